"""What a `config.json` says about a model: a blueprint, made by the reader of its family.

Holds the register of families and the decoder that nearly all of them are
variations of. A family reads its configuration key by key through `HfConfig`;
a key that is neither read nor harmless is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from engine.errors import ModelFolderError, UnsupportedModelError
from engine.models.hf_config import HARMLESS, HfConfig, all_of, listed, shown
from engine.models.names import Names
from engine.models.rope_config import ropes
from engine.models.spec import Activation, AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, Norm

__all__ = [
    "FULL",
    "SLIDING",
    "Blueprint",
    "activation",
    "decoder",
    "families",
    "family",
    "layer_kinds",
    "recognise",
    "text_part",
]

FULL = "full_attention"
SLIDING = "sliding_attention"

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}

_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a configuration says: the model, and the names its tensors carry.

    spellings: what files write for `model.`, and before `lm_head`, in the order of preference.
    ignored: pattern of tensors, by the beginning of their names, that the model does without.
    """

    spec: ModelSpec
    names: Names
    notices: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = (("model.", ""), ("", ""))
    ignored: str = ""


Reader = Callable[[HfConfig], Blueprint]


@dataclass(frozen=True, slots=True)
class _Family:
    architecture: str
    model_type: str
    read: Reader


_FAMILIES: dict[str, _Family] = {}


# What an architecture needs that is not there, by a part of its name; the first that fits is said.
_MISSING = {
    "Moe": "routed experts of a kind that is not known",
    "MoE": "routed experts of a kind that is not known",
    "DeepseekV3": "a choice of keys by an index",
    "DeepseekV4": "compressed keys and hyper-connections",
    "Mamba": "state space layers",
    "Bamba": "state space layers",
    "Jamba": "state space layers",
    "Zamba": "state space layers",
    "FalconH1": "state space layers",
    "Hybrid": "state space layers",
    "Rwkv": "recurrent layers",
    "RecurrentGemma": "recurrent layers",
    "Gemma3n": "altup blocks and embeddings per layer",
    "T5": "an encoder",
    "Bart": "an encoder",
    "Whisper": "an encoder for sound",
    "ForSequenceClassification": "a head that classifies",
    "Bloom": "a norm after the embedding",
    "OPT": "shifted positions",
}


def family(*names: tuple[str, str]) -> Callable[[Reader], Reader]:
    """Register the reader of architectures, as `architectures` and `model_type` of `config.json` name them."""

    def register(read: Reader) -> Reader:
        for architecture, model_type in names:
            _FAMILIES[architecture] = _Family(architecture, model_type, read)
        return read

    return register


def families() -> tuple[tuple[str, ...], ...]:
    """The supported architectures, sorted; those that one reader reads belong together."""
    together: dict[Reader, list[str]] = {}
    for found in _FAMILIES.values():
        together.setdefault(found.read, []).append(found.architecture)
    return tuple(sorted(map(tuple, together.values())))


def recognise(values: Mapping[str, Any], where: str = "config.json") -> Blueprint:
    """The model that a `config.json` describes. where: what errors call it.

    Raises:
        UnsupportedModelError: another architecture, or a key that changes the
            arithmetic in a way that Inglenook does not know; named
        ModelFolderError: a key is missing or of the wrong type; named
    """
    config = HfConfig(values, where)
    found = _family_of(config)
    config.architecture = found.architecture
    blueprint = found.read(config)
    config.close(found.architecture, HARMLESS)
    return replace(blueprint, notices=tuple(config.notices))


def text_part(
    config: HfConfig,
    read: Reader,
    *,
    tied: bool,
    also: str = "sees pictures",
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> Blueprint:
    """The text model in one that takes in other things, too; its notices go to the whole.

    What is written beside `text_config` is about the other towers and their tokens, but for tied embeddings.

    read: reads the text model
    tied: what holds for embeddings where nothing is said
    also: what the whole model does besides, as people say it
    usual: values of the text model that are left unsaid

    Raises:
        ModelFolderError, UnsupportedModelError: as `recognise`
    """
    inner = config.nested("text_config")
    if inner is None:
        raise ModelFolderError(f"{config.where} does not say text_config")
    together = config.flag("tie_word_embeddings", default=tied)
    text = HfConfig({**usual, "tie_word_embeddings": together, **inner.values}, inner.where)
    text.architecture = config.architecture
    blueprint = read(text)
    text.close(config.architecture, HARMLESS)
    config.notices.extend([f"of the model, which also {also}, the text part is used", *text.notices])
    return blueprint


def _family_of(config: HfConfig) -> _Family:
    architectures = config.texts("architectures") or ()
    model_type = config.text("model_type")
    if not architectures:
        for candidate in _FAMILIES.values():
            if candidate.model_type == model_type:
                return candidate
    name = ", ".join(architectures) or model_type
    if name is None:
        raise ModelFolderError(f"{config.where} names no architecture (architectures, model_type), so this is no model")
    found = _FAMILIES.get(name)
    if found is None:
        missing = next((reason for part, reason in _MISSING.items() if part in name), None)
        why = f": it needs {missing}" if missing else ""
        raise UnsupportedModelError(
            f"{listed([name])} ({config.where}) is not supported{why}; docs/models.md lists what is"
        )
    if model_type not in {None, found.model_type}:
        raise UnsupportedModelError(
            f"{config.where} calls itself {name}, but model_type = {shown(model_type)} is an unsupported family"
        )
    return found


def decoder(
    config: HfConfig,
    names: Names,
    *,
    context: int,
    kinds: Callable[[int], str] = lambda _: FULL,
    window: int | None = None,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    theta: float = 10000.0,
    partial: float | None = None,
    interleaved: bool = False,
    sliding_theta: float | None = None,
    rotates: bool = True,
    rope_keys: Sequence[str] = (),
    scale: float | None = None,
    act: str = "silu",
    norm: Norm = "rms",
    epsilon: float = 1e-6,
    tied: bool = False,
    attention: Callable[..., AttentionSpec] = AttentionSpec,
    feed_forward: Callable[..., FeedForwardSpec] = FeedForwardSpec,
    layer: Callable[..., LayerSpec] = LayerSpec,
    model: Callable[..., ModelSpec] = ModelSpec,
    adjust: Callable[[int, LayerSpec], LayerSpec] = lambda _, made: made,
    **blueprint: Any,
) -> Blueprint:
    """The common decoder: norm, attention, norm, feed-forward, in every layer.

    What a configuration does not say: context, head_dim (else hidden size /
    heads), intermediate, theta, partial, act (activation), epsilon, tied.

    kv_heads: where `num_key_value_heads` does not count.
    kinds: layer -> FULL or SLIDING; window: of the latter.
    rotates: whether there are rotary positions; the others as in `ropes`.
    rope_keys: of its parameters that the family reads itself.
    scale: of scores, else head_dim ** -0.5.
    attention, feed_forward, layer, model: make the parts, with what the family fixes filled in (`partial`).
    adjust: a last change to each layer.
    blueprint: other fields of the `Blueprint`.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = config.size("head_dim", head_dim or max(1, hidden // heads))
    if kv_heads is None:
        kv_heads = config.size("num_key_value_heads", heads)
    if head_dim * heads != hidden and "head_dim" not in config and hidden % heads:
        raise ModelFolderError(f"hidden_size = {hidden} ({config.where}) is no multiple of {heads} attention heads")
    if heads % kv_heads:
        raise ModelFolderError(
            f"{heads} attention heads ({config.where}) cannot share {kv_heads} key/value heads evenly"
        )
    reach = config.size("max_position_embeddings", context)
    if rotates:
        rope_of, reach = ropes(
            config,
            head_dim,
            reach,
            theta=theta,
            partial=partial,
            interleaved=interleaved,
            sliding_theta=sliding_theta,
            read_elsewhere=rope_keys,
        )
    block = feed_forward(
        intermediate=config.size("intermediate_size", intermediate), activation=activation(config, act)
    )

    def made(number: int) -> LayerSpec:
        kind = kinds(number)
        part = attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5 if scale is None else scale,
            rope=rope_of(kind) if rotates else None,
            window=window if kind == SLIDING else None,
        )
        return adjust(number, layer(attention=part, feed_forward=block))

    count = config.size("num_hidden_layers")
    if count > _MOST_LAYERS:
        raise ModelFolderError(
            f"num_hidden_layers = {count} ({config.where}) is more than the {_MOST_LAYERS} supported"
        )
    spec = model(
        family=config.architecture,
        hidden=hidden,
        vocab_size=config.size("vocab_size"),
        context=reach,
        norm=norm,
        norm_epsilon=config.number("rms_norm_eps", epsilon),
        layers=tuple(made(number) for number in range(count)),
        tied_head=config.flag("tie_word_embeddings", default=tied),
    )
    return Blueprint(spec, names, **blueprint)


def layer_kinds(
    config: HfConfig, usual: Callable[[int], str], window: int | None, others: frozenset[str] = frozenset()
) -> Callable[[int], str]:
    """Kind of each layer by `layer_types`, else the family's usual one.

    others: kinds that the family has besides attention with and without a window.

    Raises:
        UnsupportedModelError, ModelFolderError: unknown kinds, too few of them, or windows without a size
    """
    kinds: Sequence[str] | None = config.texts("layer_types")
    if kinds is None:
        return usual if window is not None or others else lambda _: FULL
    unknown = set(kinds) - {FULL, SLIDING, *others}
    if unknown:
        raise UnsupportedModelError(
            f"layer_types ({config.where}) has {listed(sorted(unknown))}, which is not supported"
        )
    if SLIDING in kinds and window is None:
        raise ModelFolderError(
            f"layer_types ({config.where}) asks for sliding windows, but there is no window size in use"
        )
    if len(kinds) < config.size("num_hidden_layers"):
        raise ModelFolderError(f"layer_types ({config.where}) has {len(kinds)} entries for more layers")
    return lambda layer: kinds[layer]


def activation(config: HfConfig, usual: str) -> Activation:
    """The non-linearity that `hidden_act` names."""
    name = config.text("hidden_act", usual) or ""
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{config.spelt('hidden_act')} = {shown(name)} ({config.where}) is not supported; "
            f"{all_of(sorted(_ACTIVATIONS))} are"
        )
    return _ACTIVATIONS[name]
