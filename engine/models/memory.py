"""What a model will take of the memory, before anything of it is allocated.

Knows sizes only. `engine/core/cpu.py` says what is free, containers' limits
counted; the runtime allocates what the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.cpu import Memory
from engine.core.operations import CHUNK_TOKENS
from engine.core.pages import PageLayout
from engine.errors import ContextOverflowError, ResourceError
from engine.models.decoder import (
    activation_columns,
    memory_layout,
    mixed_columns,
    own_columns,
    page_layout,
    scratch_bytes,
)
from engine.models.spec import ModelSpec
from engine.settings import EngineSettings, KvDtype

__all__ = ["MemoryPlan", "needed_bytes", "plan", "working_bytes"]

_GB = 1 << 30
_SMALL_MACHINE = 8 * _GB
_DEFAULT_CONTEXT, _SMALL_CONTEXT, _LEAST_CONTEXT = 8192, 4096, 512
# What stays free for everybody else: the plan is an estimate, and a machine that swaps answers nobody.
_RESERVE = 256 << 20
# Of recurrent layers, prefixes whose memory is kept whatever it costs: one for each of a few conversations.
_LEAST_PREFIXES = 4


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by what they are for. context: tokens of one conversation; pages: of the whole pool.

    memories: of sequences, for a model with recurrent layers: two for each that runs, and some for prefixes.
    free_bytes: what was free when the plan was made. spare_bytes: what is left
    of it, less a reserve, never negative.
    """

    weight_bytes: int
    kv_bytes: int
    working_bytes: int
    context: int
    pages: int
    page_bytes: int
    page_tokens: int
    free_bytes: int
    memories: int = 0
    memory_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All that the model takes."""
        return self.weight_bytes + self.kv_bytes + self.memory_bytes + self.working_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left."""
        return max(0, self.free_bytes - _RESERVE - self.total_bytes)

    @property
    def tokens_left(self) -> int:
        """Tokens that would still fit beside what is planned."""
        return self.spare_bytes // self.page_bytes * self.page_tokens


def plan(
    spec: ModelSpec,
    weight_bytes: int,
    settings: EngineSettings,
    memory: Memory,
    *,
    threads: int = 1,
    batch_tokens: int = 256,
    companion_bytes: int = 0,
) -> MemoryPlan:
    """Divide the free memory between weights, pages and working memory.

    A context of 0 chooses: 4096 tokens with 8 GB free or less, else 8192;
    never more than the model was made for, nor than fits. The pool holds as
    many full conversations as are wanted in parallel, as far as they fit; one
    fits always. Where layers are read from disk it is one, and what is left
    (`spare_bytes`) is best spent on keeping layers.

    weight_bytes: that are not in memory yet. Mapped weights count: they are
        read over and over, and a machine that drops them is useless. Where
        layers are read from disk: the least that has to be there.
    companion_bytes: a page of the draft model, of whose pages there are as many.

    Raises:
        ContextOverflowError: the wanted context is beyond the model's
        ResourceError: model and context do not fit; says what would
    """
    if settings.context > spec.context:
        raise ContextOverflowError(
            f"a context of {settings.context} tokens is more than the {spec.context} that the model was made for",
            needed_tokens=settings.context,
            context_tokens=spec.context,
        )
    layout = page_layout(spec, settings.kv)
    working = working_bytes(
        spec,
        threads=threads,
        batch_tokens=batch_tokens,
        sequences=settings.max_batch_size,
        guesses=settings.draft_tokens if settings.speculation != "off" else 0,
        context=settings.context or _DEFAULT_CONTEXT,
    )
    page_bytes = layout.page_bytes + companion_bytes
    kept = memory_layout(spec)
    memories, each = (0, 0) if kept is None else (2 * settings.max_batch_size + _LEAST_PREFIXES, kept.page_bytes)
    room = memory.free - _RESERVE - weight_bytes - working - memories * each
    fitting = max(0, room) // page_bytes * layout.tokens
    context = settings.context or _chosen_context(spec, memory.free, fitting)
    if fitting < context:
        needed = weight_bytes + working + memories * each + _pages(context, layout) * page_bytes + _RESERVE
        advice = (
            f"a context of {fitting} tokens would fit"
            if fitting >= min(_LEAST_CONTEXT, spec.context)
            else "close other programs, or take a smaller model or fewer bits"
            + ("" if settings.load == "stream" else ", or read the weights from disk (load mode stream), which is slow")
        )
        raise ResourceError(
            f"the model with a context of {context} tokens needs {needed / 1e9:.1f} GB of memory "
            f"and {memory.free / 1e9:.1f} GB are free; {advice}"
        )
    conversations = 1 if settings.load == "stream" else settings.max_batch_size
    most = conversations * _pages(context, layout)
    pages = min(most, fitting // layout.tokens)
    if each:
        # More prefixes are remembered as far as that costs little beside the pages that they belong to.
        left = room - pages * page_bytes
        memories += max(0, min(pages - _LEAST_PREFIXES, min(pages * page_bytes // 4, left) // each))
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_bytes=pages * page_bytes,
        working_bytes=working,
        context=context,
        pages=pages,
        page_bytes=page_bytes,
        page_tokens=layout.tokens,
        free_bytes=memory.free,
        memories=memories,
        memory_bytes=memories * each,
    )


def needed_bytes(spec: ModelSpec, weight_bytes: int, context: int, kv: KvDtype = "int8") -> int:
    """Memory that one conversation of so many tokens takes, model included."""
    layout, kept = page_layout(spec, kv), memory_layout(spec)
    memories = 0 if kept is None else (2 + _LEAST_PREFIXES) * kept.page_bytes
    return weight_bytes + _pages(context, layout) * layout.page_bytes + memories + working_bytes(spec, context=context)


def working_bytes(
    spec: ModelSpec,
    *,
    threads: int = 1,
    batch_tokens: int = 256,
    sequences: int = 4,
    guesses: int = 15,
    context: int = _DEFAULT_CONTEXT,
) -> int:
    """Activations of a step, partial results, logits and scratch of every thread: nearly what the decoder allocates."""
    blocks = [layer.feed_forward for layer in spec.layers]
    intermediate = max(block.widest for block in blocks)
    attended = max(mixed_columns(layer)[1] for layer in spec.layers)
    stacked = max(mixed_columns(layer)[0] for layer in spec.layers)
    inputs = activation_columns(spec)
    # The residual and a block's output beside it, stacked outputs, attended heads, queries, and two rooms for inputs of
    # products with their scales and sums.
    floats = (
        2 * spec.hidden + max(stacked, 2 * intermediate) + 2 * attended + attended // 16 + 2 * (inputs + inputs // 16)
    )
    # For each pair of a token and an expert: gates and ups, an output, and an input.
    floats += max(
        (
            block.experts.chosen
            * (2 * block.intermediate + spec.hidden + max(spec.hidden, block.intermediate) * 9 // 8)
            for block in blocks
            if block.experts is not None
        ),
        default=0,
    )
    # What latent attention, delta nets and inputs of layers have for themselves.
    mixers = {mixer for layer in spec.layers for mixer in (layer.attention, layer.delta) if mixer is not None}
    floats += sum(sum(own_columns(mixer)) for mixer in mixers)
    floats += 2 * (spec.layer_inputs or 0) * (len(spec.layers) + 1)
    partial = max(attention.heads * (attention.head_dim + 16) for attention in spec.attentions)
    floats_of_sequences = sequences * partial * -(-context // CHUNK_TOKENS) + (sequences + guesses) * spec.vocab_size
    return 4 * (batch_tokens * floats + floats_of_sequences) + threads * scratch_bytes(spec, batch_tokens)


def _chosen_context(spec: ModelSpec, free: int, fitting: int) -> int:
    wanted = min(spec.context, _SMALL_CONTEXT if free <= _SMALL_MACHINE else _DEFAULT_CONTEXT)
    return max(min(wanted, fitting), min(_LEAST_CONTEXT, spec.context))


def _pages(context: int, layout: PageLayout) -> int:
    return -(-context // layout.tokens)
