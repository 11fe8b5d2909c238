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
    "FeedForwardSpec",
    "LayerSpec",
    "ModelSpec",
    "Role",
    "RopeScaling",
    "RopeSpec",
    "TensorSpec",
]

Activation = Literal["silu", "gelu", "gelu_tanh"]
Role = Literal["embedding", "head", "linear", "vector"]

# Bounds that a hostile file cannot leave: every product of two of them fits 64-bit arithmetic with room.
Size = Annotated[int, Field(ge=1, le=1 << 24)]
Length = Annotated[int, Field(ge=1, le=1 << 31)]
Positive = Annotated[float, Field(gt=0, le=1e30)]
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    kind "linear": positions divided by `factor`. "dynamic": NTK, the base grows
    with the length. "llama3": low frequencies divided, high kept, between
    interpolated. "yarn": the same idea by rotations, with an attention factor.
    Reference: transformers `modeling_rope_utils`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
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
class AttentionSpec:
    """Causal attention with grouped key/value heads.

    window: tokens a query sees, itself included; None sees all before it.
    scale: factor on q.k, usually head_dim ** -0.5.
    rope: None for layers without positions (NoPE).
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
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly")
        if self.rope is not None and (self.rope.dim % 2 or self.rope.dim > self.head_dim):
            raise ValueError(f"rotary size {self.rope.dim} must be even and at most the head size {self.head_dim}")


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) * up(x)); gate and up are stacked in one tensor."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    intermediate: Size
    activation: Activation = "silu"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += attention(norm(x)); x += feed_forward(norm(x))."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    attention: AttentionSpec
    feed_forward: FeedForwardSpec


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
    """A whole model. `vocab_size` counts embedding rows, not the tokenizer's tokens."""

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
    def vector(name: str, *parts: int) -> TensorSpec:
        return TensorSpec(name, "vector", parts, sum(parts))

    yield TensorSpec("embedding", "embedding", (spec.vocab_size,), spec.hidden)
    for number, layer in enumerate(spec.layers):
        attention, feed = layer.attention, layer.feed_forward
        prefix = f"layers.{number}.attention"
        q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
        yield vector(f"{prefix}.norm", spec.hidden)
        yield TensorSpec(f"{prefix}.qkv", "linear", (q, kv, kv), spec.hidden)
        if attention.qkv_bias:
            yield vector(f"{prefix}.qkv.bias", q, kv, kv)
        if attention.qk_norm:
            yield vector(f"{prefix}.q_norm", attention.head_dim)
            yield vector(f"{prefix}.k_norm", attention.head_dim)
        yield TensorSpec(f"{prefix}.out", "linear", (spec.hidden,), q)
        if attention.out_bias:
            yield vector(f"{prefix}.out.bias", spec.hidden)
        prefix = f"layers.{number}.feed_forward"
        yield vector(f"{prefix}.norm", spec.hidden)
        yield TensorSpec(f"{prefix}.gate_up", "linear", (feed.intermediate, feed.intermediate), spec.hidden)
        if feed.bias:
            yield vector(f"{prefix}.gate_up.bias", feed.intermediate, feed.intermediate)
        yield TensorSpec(f"{prefix}.down", "linear", (spec.hidden,), feed.intermediate)
        if feed.bias:
            yield vector(f"{prefix}.down.bias", spec.hidden)
    yield vector("norm", spec.hidden)
    if not spec.tied_head:
        yield TensorSpec("head", "head", (spec.vocab_size,), spec.hidden)
