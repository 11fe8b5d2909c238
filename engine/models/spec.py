"""What a model is, as data: one frozen `ModelSpec` with a `LayerSpec` per layer.

Knows nothing of files, weights in memory or kernels. The decoder lowers a spec
to operations; families (`families.py`) make specs from `config.json`; the
`.nook` manifest stores them as JSON. `ModelSpec.tensors()` says which tensors
such a model has, under which names and of which shapes: converter, store and
decoder all ask there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter

__all__ = [
    "Activation",
    "AttentionSpec",
    "ExpertsSpec",
    "FeedForwardSpec",
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
    every pair, one set up to the original length and one beyond.
    Reference: transformers `modeling_rope_utils`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["linear", "dynamic", "ntk", "llama3", "yarn", "longrope"]
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

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.rope is not None and (self.rope.dim % 2 or self.rope.dim > self.head_dim):
            raise ValueError(f"rotary size {self.rope.dim} must be even and at most the head size {self.head_dim}")


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
    """x += attention(norm(x)); x += feed_forward(norm(x)).

    norms: of what goes into a block, of what comes out of it, or both.
    parallel: both blocks read the same x; shared_norm: and the same norm of it.
    residual_scale: factor on what is added to x.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norms: Literal["pre", "post", "both"] = "pre"
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: Positive = 1.0

    def __post_init__(self) -> None:
        if self.norms != "pre" and (self.parallel or self.residual_scale != 1.0):
            raise ValueError("norms of what comes out of a block go neither with parallel blocks nor with a factor")
        if self.shared_norm and not self.parallel:
            raise ValueError("only parallel blocks can share a norm")


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
    for number, layer in enumerate(spec.layers):
        prefix = f"layers.{number}.attention"
        if layer.norms != "post":
            yield from norm(f"{prefix}.norm")
        yield from _attention_tensors(prefix, layer.attention, spec.hidden)
        if layer.norms != "pre":
            yield from norm(f"{prefix}.post_norm")
        prefix = f"layers.{number}.feed_forward"
        if layer.norms != "post" and not layer.shared_norm:
            yield from norm(f"{prefix}.norm")
        yield from _feed_forward_tensors(prefix, layer.feed_forward, spec.hidden)
        if layer.norms != "pre":
            yield from norm(f"{prefix}.post_norm")
    yield from norm("norm")
    if not spec.tied_head:
        yield TensorSpec("head", "head", (spec.vocab_size,), spec.hidden)
    if spec.head_bias:
        yield _vector("head.bias", spec.vocab_size)


def _vector(name: str, *parts: int) -> TensorSpec:
    """A norm or bias."""
    return TensorSpec(name, "vector", parts, sum(parts))


def _attention_tensors(prefix: str, attention: AttentionSpec, hidden: int) -> Iterator[TensorSpec]:
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    yield TensorSpec(f"{prefix}.qkv", "linear", (q, kv, kv), hidden)
    if attention.qkv_bias:
        yield _vector(f"{prefix}.qkv.bias", q, kv, kv)
    if attention.qk_norm is not None:
        shared = attention.qk_norm == "head"
        yield _vector(f"{prefix}.q_norm", *[attention.head_dim] * (1 if shared else attention.heads))
        yield _vector(f"{prefix}.k_norm", *[attention.head_dim] * (1 if shared else attention.kv_heads))
    if attention.sinks:
        yield _vector(f"{prefix}.sinks", attention.heads)
    yield TensorSpec(f"{prefix}.out", "linear", (hidden,), q)
    if attention.out_bias:
        yield _vector(f"{prefix}.out.bias", hidden)


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
