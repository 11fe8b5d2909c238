"""What a model is, as data: one frozen `ModelSpec` with a `LayerSpec` per layer.

Knows nothing of files, weights in memory or kernels. The decoder lowers a spec
to operations; families (`families.py`) make specs from `config.json`; the
`.nook` manifest stores them as JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["AttentionSpec", "FeedForwardSpec", "LayerSpec", "ModelSpec", "RopeScaling", "RopeSpec"]

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "linear": positions divided by `factor`. "dynamic": NTK, the base grows
    with the length. "llama3": low frequencies divided, high kept, between
    interpolated. "yarn": the same idea by rotations, with an attention factor.
    Reference: transformers `modeling_rope_utils`.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    original_context: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` entries of a head.

    interleaved False: pairs (i, i + dim/2), as in transformers; True: (2i, 2i+1).
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads.

    window: tokens a query sees, itself included; None sees all before it.
    scale: factor on q.k, usually head_dim ** -0.5.
    rope: None for layers without positions (NoPE).
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)); gate and up are stacked in one tensor."""

    intermediate: int
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `vocab_size` counts embedding rows, not the tokenizer's tokens."""

    family: str
    hidden: int
    vocab_size: int
    context: int
    norm_epsilon: float
    layers: tuple[LayerSpec, ...]
    tied_head: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives the equal spec back."""
        from dataclasses import asdict

        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> ModelSpec:
        """The spec that `to_json` wrote.

        Raises:
            TypeError, KeyError, ValueError: the values are not a spec (the
            caller names the file)
        """
        layers = tuple(_layer(layer) for layer in values["layers"])
        return cls(**{**values, "layers": layers})


def _layer(values: dict[str, Any]) -> LayerSpec:
    attention = dict(values["attention"])
    rope = attention.pop("rope")
    if rope is not None:
        scaling = rope["scaling"]
        if scaling is not None:
            scaling = RopeScaling(
                **{**scaling, "short_factor": tuple(scaling["short_factor"]), "long_factor": tuple(scaling["long_factor"])}
            )
        rope = RopeSpec(**{**rope, "scaling": scaling})
    return LayerSpec(
        attention=AttentionSpec(**attention, rope=rope), feed_forward=FeedForwardSpec(**values["feed_forward"])
    )
