"""What a model is, as data: one frozen `ModelSpec` with a `LayerSpec` per layer.

Knows nothing of files, weights in memory or kernels. The decoder lowers a spec
to operations; families (`families.py`) make specs from `config.json`; the
`.nook` manifest stores them as JSON. `ModelSpec.tensors()` says which tensors
such a model has, under which names and of which shapes: converter, store and
decoder all ask there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

__all__ = [
    "Activation",
    "AttentionSpec",
    "ConvolutionSpec",
    "DeltaSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
    "LatentSpec",
    "LayerSpec",
    "ModelSpec",
    "Norm",
    "QkNorm",
    "QueryGrowth",
    "Role",
    "RopeScaling",
    "RopeSpec",
    "TensorSpec",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "swiglu_clamped"]
Norm = Literal["rms", "layer"]
QkNorm = Literal["head", "width", "each"]
Role = Literal["embedding", "head", "linear", "router", "vector"]

# Bounds that a hostile file cannot leave: every product of two of them fits 64-bit arithmetic with room.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Length = Annotated[int, Field(ge=1, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "linear": positions divided by `factor`. "dynamic": NTK, the base grows
    with the length; "ntk": the base is larger by factor ** (dim / (dim - 2)).
    "llama3": low frequencies divided, high kept, between interpolated. "yarn": the
    same idea by rotations, with an attention factor. "longrope": a factor for
    every pair, one set up to the original length and one beyond. "proportional":
    only a share of the pairs turns, `factor`, the fastest ones.
    Reference: transformers `modeling_rope_utils`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["linear", "dynamic", "ntk", "llama3", "yarn", "longrope", "proportional"]
    factor: Positive
    original_context: Length
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True
    short_factor: tuple[Positive, ...] = ()
    long_factor: tuple[Positive, ...] = ()


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding of the first `dim` entries of a head.

    interleaved False: pairs (i, i + dim/2), as in transformers; True: (2i, 2i+1).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    theta: Positive
    dim: Size
    interleaved: bool = False
    scaling: RopeScaling | None = None


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p by 1 + rate * ln(1 + floor(p / period)) (Llama 4, Ministral 3)."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    rate: Positive
    period: Length


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Queries, keys and values made of shorter inner vectors ("multi-head latent attention", DeepSeek-V2).

    A head of q and k is `plain` entries without positions and those that rotate, which all heads of k have in
    common; `values` entries are its v. What is cached is k and v of every head, each padded to the layer's head_dim.
    key_rank: length of the vector that k and v are made of.
    query_rank: of the one that q is made of; None when q is made of the layer's input.
    epsilon: of the norms of both vectors.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    key_rank: Size
    plain: Size
    values: Size
    query_rank: Size | None = None
    epsilon: Annotated[float, Field(ge=0, le=1)] = 1e-6


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped key/value heads.

    window: tokens a query sees, itself included; None sees all before it.
    scale: factor on q.k, usually head_dim ** -0.5.
    rope: None for layers without positions (NoPE).
    qk_norm: of queries and keys; "head" is a root mean square norm of each head,
        all with the same weights; "width" one of all heads together; "each" a
        layer norm of each head with weights of its own.
    qk_norm_last: after the rotation, not before.
    clip: q, k and v are kept within this size.
    softcap: scores s become softcap * tanh(s / softcap).
    sinks: a learned score per head takes part in the softmax and adds nothing.
    alibi: scores fall linearly with the distance, a slope per head (Press et al. 2022).
    latent: how q, k and v come about, when not by one product.
    gated: what a head gives is multiplied by the sigmoid of a gate.
    value_norm: values have a root mean square norm without weights.
    keys_of: the earlier layer whose keys and values are attended to; None has its own.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    heads: Size
    kv_heads: Size
    head_dim: Size
    scale: Positive
    rope: RopeSpec | None
    window: Length | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QkNorm | None = None
    qk_norm_last: bool = False
    clip: Positive | None = None
    query_growth: QueryGrowth | None = None
    softcap: Positive | None = None
    sinks: bool = False
    alibi: bool = False
    latent: LatentSpec | None = None
    gated: bool = False
    value_norm: bool = False
    keys_of: Annotated[int, Field(ge=0, le=4096)] | None = None

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.rope is not None and (self.rope.dim % 2 or self.rope.dim > self.head_dim):
            raise ValueError(f"rotary size {self.rope.dim} must be even and at most the head size {self.head_dim}")
        if self.latent is not None and (
            self.rope is None
            or self.heads != self.kv_heads
            or max(self.latent.plain + self.rope.dim, self.latent.values) > self.head_dim
            or self.qk_norm is not None
            or self.qkv_bias
            or self.gated
            or self.value_norm
            or self.clip is not None
            or self.query_growth is not None
        ):
            raise ValueError("latent attention has a rotary part, a key for each head, and nothing done to either")
        if self.keys_of is not None and (
            self.latent is not None or self.value_norm or self.qk_norm not in {None, "head"}
        ):
            raise ValueError("the keys of another layer go with norms of each query head only")


@dataclass(frozen=True, slots=True)
class ConvolutionSpec:
    """out(c * convolution(b * x)) with b, c, x = in(input): LFM2's short convolution.

    width: of b, of c and of x, each of whose columns is convolved by itself over the last `taps` tokens.
    bias: of all three.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    width: Size
    taps: Annotated[int, Field(ge=2, le=64)]
    bias: bool = False

    @property
    def memory_bytes(self) -> int:
        """What is kept of a sequence: float32 inputs of the last tokens."""
        return 4 * (self.taps - 1) * self.width


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """A gated delta net (Yang et al. 2024): each head keeps a matrix, which every token corrects and lets fade.

    q, k and v go through a short convolution over `taps` tokens and silu; q and k have unit length; value heads
    share key heads evenly; what a head gives is normed, and multiplied by silu of a gate.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    key_heads: Size
    heads: Size
    key_dim: Size
    value_dim: Size
    taps: Annotated[int, Field(ge=2, le=64)]

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"{self.heads} value heads cannot share {self.key_heads} key heads evenly")

    @property
    def parts(self) -> tuple[int, int, int]:
        """Widths of q, k and v."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.heads * self.value_dim

    @property
    def matrix_bytes(self) -> int:
        """The heads' matrices, float32."""
        return 4 * self.heads * self.key_dim * self.value_dim

    @property
    def memory_bytes(self) -> int:
        """What is kept of a sequence: the matrices, then the convolution's inputs of the last tokens."""
        return self.matrix_bytes + 4 * (self.taps - 1) * sum(self.parts)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Of `count` blocks alike, a router chooses `chosen` for each token; their outputs are added by weight.

    routing: a weight is the softmax of all logits, the sigmoid of its own, or the
        softmax of the chosen logits.
    normalised: weights are divided by their sum; then times `scale`.
    groups: experts stand in so many, of which `chosen_groups` are looked at, those
        with the largest weight, or with the largest sum of two (group_by).
    router_bias: of the logits; correction: added to weights for the choice only.
    shared: intermediate size of a block that every token goes through, too;
    shared_gate: what it gives is multiplied by the sigmoid of a product with x.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    count: Annotated[int, Field(ge=1, le=1024)]
    chosen: Annotated[int, Field(ge=1, le=64)]
    routing: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalised: bool = False
    scale: Positive = 1.0
    groups: Size = 1
    chosen_groups: Size = 1
    group_by: Literal["largest", "two"] = "largest"
    router_bias: bool = False
    correction: bool = False
    shared: Size | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise ValueError(f"{self.count} experts do not stand in {self.groups} groups")
        if self.chosen > self.count // self.groups * self.chosen_groups:
            raise ValueError(f"{self.chosen} experts cannot be chosen of {self.count}")
        if self.group_by == "two" and self.groups > 1 and self.count // self.groups < 2:
            raise ValueError("groups of one expert have no two largest weights")


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)), gate and up stacked in one tensor; not gated: down(activation(up(x))).

    activation "swiglu_clamped": g / (1 + exp(-1.702 g)) * (u + 1) with g at most 7 and u within 7 (gpt-oss).
    experts: there are many such blocks, for each token some are chosen; bias and intermediate are theirs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    intermediate: Size
    activation: Activation = "silu"
    bias: bool = False
    gated: bool = True
    experts: ExpertsSpec | None = None

    def __post_init__(self) -> None:
        if self.experts is not None and not self.gated:
            raise ValueError("experts have gates")

    @property
    def widest(self) -> int:
        """The largest input of a second product."""
        return max(self.intermediate, (self.experts and self.experts.shared) or 0)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += attention(norm(x)); x += feed_forward(norm(x)). A convolution or a delta net may stand for attention.

    norms: of what goes into a block, of what comes out of it, or both.
    parallel: both blocks read the same x; shared_norm: and the same norm of it.
    residual_scale: factor on what is added to x.
    scaled: at its end, x is multiplied by a learned number.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    attention: AttentionSpec | None
    feed_forward: FeedForwardSpec
    norms: Literal["pre", "post", "both"] = "pre"
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: Positive = 1.0
    convolution: ConvolutionSpec | None = None
    delta: DeltaSpec | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        if sum(mixer is not None for mixer in (self.attention, self.convolution, self.delta)) != 1:
            raise ValueError("a layer has attention, a convolution or a delta net")
        if self.attention is None and (self.norms != "pre" or self.parallel):
            raise ValueError("recurrent layers have norms of what they get only")
        if self.norms != "pre" and (self.parallel or self.residual_scale != 1.0):
            raise ValueError("norms of what comes out of a block go neither with parallel blocks nor with a factor")
        if self.shared_norm and not self.parallel:
            raise ValueError("only parallel blocks can share a norm")

    def attending(self, **changes: Any) -> LayerSpec:
        """The same with other attention."""
        assert self.attention is not None
        return replace(self, attention=replace(self.attention, **changes))

    @property
    def memory_bytes(self) -> int:
        """What the layer keeps of a sequence besides keys and values."""
        return sum(mixer.memory_bytes for mixer in (self.convolution, self.delta) if mixer is not None)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model: W is (rows, cols), cols along the input; a vector has one row.

    parts: what is stacked along the rows of a matrix (q, k, v), or along the
    entries of a vector; one entry when nothing is.
    """

    name: str
    role: Role
    parts: tuple[int, ...]
    cols: int

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return 1 if self.role == "vector" else sum(self.parts)

    @property
    def parameters(self) -> int:
        """Numbers in it."""
        return self.rows * self.cols


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A whole model. `vocab_size` counts embedding rows, not the tokenizer's tokens.

    norm: of blocks and of what the head gets; "layer" takes the mean away first
        (Ba et al. 2016). norm_weight, norm_bias: whether such a norm has them.
    learned_positions: a vector for each position is added to the embedding.
    logit_softcap: logits l become logit_softcap * tanh(l / logit_softcap).
    layer_inputs: every layer gets a vector of so many entries for each token, of an embedding of its own and of the
        token's embedding, through a gate (Gemma 4).
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    family: str
    hidden: Size
    vocab_size: Size
    context: Length
    norm_epsilon: Annotated[float, Field(ge=0, le=1)]
    layers: Annotated[tuple[LayerSpec, ...], Field(min_length=1, max_length=4096)]
    tied_head: bool
    embedding_scale: Positive = 1.0
    logit_scale: Positive = 1.0
    norm: Norm = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    learned_positions: bool = False
    head_bias: bool = False
    logit_softcap: Positive | None = None
    layer_inputs: Size | None = None

    def __post_init__(self) -> None:
        if not self.attentions:
            raise ValueError("a model without attention")
        for number, layer in enumerate(self.layers):
            attention = layer.attention
            if attention is None or attention.keys_of is None:
                continue
            theirs = self.layers[attention.keys_of].attention if attention.keys_of < number else None
            if theirs is None or theirs.keys_of is not None or theirs.latent is not None:
                raise ValueError(f"layer {number} cannot take the keys and values of layer {attention.keys_of}")
            if (theirs.head_dim, theirs.kv_heads) != (attention.head_dim, attention.kv_heads):
                raise ValueError(f"layers {number} and {attention.keys_of} have other heads")

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Of the layers that have it."""
        return tuple(layer.attention for layer in self.layers if layer.attention is not None)

    @property
    def is_recurrent(self) -> bool:
        """Whether a sequence is more than its keys and values: there are layers that remember it otherwise."""
        return any(layer.memory_bytes for layer in self.layers)

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor of such a model, in the order of its use: embedding, layers, norm, head.

        A tied head is the embedding and has no tensor of its own.
        """
        return tuple(_tensors(self))

    @property
    def parameters(self) -> int:
        """Numbers in all tensors, a tied head counted once."""
        return sum(tensor.parameters for tensor in _tensors(self))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` gives the equal spec back."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> ModelSpec:
        """The spec that `to_json` wrote, every value checked for its type and range.

        Raises:
            ValueError: the values are not a spec (the caller names the file)
        """
        import json

        return _adapter().validate_json(json.dumps(values))


@cache
def _adapter() -> TypeAdapter[ModelSpec]:
    return TypeAdapter(ModelSpec)


def _tensors(spec: ModelSpec) -> Iterator[TensorSpec]:
    def norm(name: str) -> Iterator[TensorSpec]:
        if spec.norm_weight:
            yield _vector(name, spec.hidden)
        if spec.norm_bias:
            yield _vector(f"{name}.bias", spec.hidden)

    yield TensorSpec("embedding", "embedding", (spec.vocab_size,), spec.hidden)
    if spec.learned_positions:
        yield TensorSpec("positions", "embedding", (spec.context,), spec.hidden)
    if spec.layer_inputs is not None:
        inputs = spec.layer_inputs * len(spec.layers)
        yield TensorSpec("layer_inputs", "embedding", (spec.vocab_size,), inputs)
        yield TensorSpec("layer_inputs.of_embedding", "linear", (inputs,), spec.hidden)
        yield _vector("layer_inputs.norm", spec.layer_inputs)
    for number, layer in enumerate(spec.layers):
        prefix = f"layers.{number}.{'attention' if layer.attention is not None else 'recurrence'}"
        if layer.norms != "post":
            yield from norm(f"{prefix}.norm")
        if layer.attention is not None:
            yield from _attention_tensors(prefix, layer.attention, spec.hidden)
        if layer.convolution is not None:
            yield from _convolution_tensors(prefix, layer.convolution, spec.hidden)
        if layer.delta is not None:
            yield from _delta_tensors(prefix, layer.delta, spec.hidden)
        if layer.norms != "pre":
            yield from norm(f"{prefix}.post_norm")
        prefix = f"layers.{number}.feed_forward"
        if layer.norms != "post" and not layer.shared_norm:
            yield from norm(f"{prefix}.norm")
        yield from _feed_forward_tensors(prefix, layer.feed_forward, spec.hidden)
        if layer.norms != "pre":
            yield from norm(f"{prefix}.post_norm")
        if spec.layer_inputs is not None:
            prefix = f"layers.{number}.input"
            yield TensorSpec(f"{prefix}.gate", "linear", (spec.layer_inputs,), spec.hidden)
            yield TensorSpec(f"{prefix}.out", "linear", (spec.hidden,), spec.layer_inputs)
            yield from norm(f"{prefix}.post_norm")
        if layer.scaled:
            yield _vector(f"layers.{number}.scale", 1)
    yield from norm("norm")
    if not spec.tied_head:
        yield TensorSpec("head", "head", (spec.vocab_size,), spec.hidden)
    if spec.head_bias:
        yield _vector("head.bias", spec.vocab_size)


def _vector(name: str, *parts: int) -> TensorSpec:
    """A norm or bias."""
    return TensorSpec(name, "vector", parts, sum(parts))


def _attention_tensors(prefix: str, attention: AttentionSpec, hidden: int) -> Iterator[TensorSpec]:
    if attention.latent is not None:
        yield from _latent_tensors(prefix, attention, attention.latent, hidden)
        return
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    parts: tuple[int, ...] = (q,) if attention.keys_of is not None else (q, kv, kv)
    parts += (q,) if attention.gated else ()
    name = f"{prefix}.q" if attention.keys_of is not None else f"{prefix}.qkv"
    yield TensorSpec(name, "linear", parts, hidden)
    if attention.qkv_bias:
        yield _vector(f"{name}.bias", *parts)
    if attention.qk_norm is not None:
        shared = attention.qk_norm == "head"
        yield _vector(f"{prefix}.q_norm", *[attention.head_dim] * (1 if shared else attention.heads))
        if attention.keys_of is None:
            yield _vector(f"{prefix}.k_norm", *[attention.head_dim] * (1 if shared else attention.kv_heads))
    if attention.sinks:
        yield _vector(f"{prefix}.sinks", attention.heads)
    yield TensorSpec(f"{prefix}.out", "linear", (hidden,), q)
    if attention.out_bias:
        yield _vector(f"{prefix}.out.bias", hidden)


def _latent_tensors(prefix: str, attention: AttentionSpec, latent: LatentSpec, hidden: int) -> Iterator[TensorSpec]:
    """`down` makes q, or what it is made of, and what k and v are made of with the rotary part of k."""
    rotary = attention.rope.dim if attention.rope is not None else 0
    q, heads = attention.heads * (latent.plain + rotary), attention.heads
    yield TensorSpec(f"{prefix}.down", "linear", (latent.query_rank or q, latent.key_rank + rotary), hidden)
    if latent.query_rank is not None:
        yield _vector(f"{prefix}.query_norm", latent.query_rank)
        yield TensorSpec(f"{prefix}.query_up", "linear", (q,), latent.query_rank)
    yield _vector(f"{prefix}.key_norm", latent.key_rank)
    yield TensorSpec(f"{prefix}.key_up", "linear", (heads * (latent.plain + latent.values),), latent.key_rank)
    if attention.sinks:
        yield _vector(f"{prefix}.sinks", heads)
    yield TensorSpec(f"{prefix}.out", "linear", (hidden,), heads * latent.values)
    if attention.out_bias:
        yield _vector(f"{prefix}.out.bias", hidden)


def _convolution_tensors(prefix: str, how: ConvolutionSpec, hidden: int) -> Iterator[TensorSpec]:
    """`kernel` is (width, taps), one row after the other."""
    parts = (how.width,) * 3
    yield TensorSpec(f"{prefix}.in", "linear", parts, hidden)
    yield _vector(f"{prefix}.kernel", how.width * how.taps)
    yield TensorSpec(f"{prefix}.out", "linear", (hidden,), how.width)
    if how.bias:
        yield _vector(f"{prefix}.in.bias", *parts)
        yield _vector(f"{prefix}.kernel.bias", how.width)
        yield _vector(f"{prefix}.out.bias", hidden)


def _delta_tensors(prefix: str, how: DeltaSpec, hidden: int) -> Iterator[TensorSpec]:
    """`in` makes q, k, v and the gate of what comes out; `gates` makes b and a; `decay` is A_log."""
    yield TensorSpec(f"{prefix}.in", "linear", (*how.parts, how.parts[2]), hidden)
    yield TensorSpec(f"{prefix}.gates", "router", (how.heads, how.heads), hidden)
    yield _vector(f"{prefix}.decay", how.heads)
    yield _vector(f"{prefix}.decay.bias", how.heads)
    yield _vector(f"{prefix}.kernel", sum(how.parts) * how.taps)
    yield _vector(f"{prefix}.out_norm", how.value_dim)
    yield TensorSpec(f"{prefix}.out", "linear", (hidden,), how.parts[2])


def _feed_forward_tensors(prefix: str, feed: FeedForwardSpec, hidden: int) -> Iterator[TensorSpec]:
    if feed.experts is not None:
        yield from _expert_tensors(prefix, feed, feed.experts, hidden)
        return
    up, parts = ("gate_up", (feed.intermediate, feed.intermediate)) if feed.gated else ("up", (feed.intermediate,))
    yield TensorSpec(f"{prefix}.{up}", "linear", parts, hidden)
    if feed.bias:
        yield _vector(f"{prefix}.{up}.bias", *parts)
    yield TensorSpec(f"{prefix}.down", "linear", (hidden,), feed.intermediate)
    if feed.bias:
        yield _vector(f"{prefix}.down.bias", hidden)


def _expert_tensors(prefix: str, feed: FeedForwardSpec, experts: ExpertsSpec, hidden: int) -> Iterator[TensorSpec]:
    """Experts' matrices are stacked one after the other."""
    yield TensorSpec(f"{prefix}.router", "router", (experts.count,), hidden)
    if experts.router_bias:
        yield _vector(f"{prefix}.router.bias", experts.count)
    if experts.correction:
        yield _vector(f"{prefix}.router.correction", experts.count)
    gate_up = (feed.intermediate,) * (2 * experts.count)
    yield TensorSpec(f"{prefix}.experts.gate_up", "linear", gate_up, hidden)
    if feed.bias:
        yield _vector(f"{prefix}.experts.gate_up.bias", *gate_up)
    yield TensorSpec(f"{prefix}.experts.down", "linear", (hidden,) * experts.count, feed.intermediate)
    if feed.bias:
        yield _vector(f"{prefix}.experts.down.bias", *(hidden,) * experts.count)
    if experts.shared is not None:
        yield TensorSpec(f"{prefix}.shared.gate_up", "linear", (experts.shared, experts.shared), hidden)
        yield TensorSpec(f"{prefix}.shared.down", "linear", (hidden,), experts.shared)
    if experts.shared_gate:
        yield TensorSpec(f"{prefix}.shared.gate", "router", (1,), hidden)
