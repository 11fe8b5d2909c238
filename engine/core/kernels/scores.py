"""What some families do to the scores of attention before, and to its sums after, the softmax."""

from engine.core.kernels import fields as at
from engine.core.kernels.common import load_float
from engine.core.kernels.rows import capped
from engine.core.kernels.simd import (
    count_up,
    exp,
    float32,
    kernel,
    load_f32,
    load_f32x16,
    load_i64,
    max_lanes,
    splat_f32,
    store_f32,
    store_f32x16,
)
from engine.core.operations import PARTIAL_HEAD


@kernel
def bend(row, head, scores, first, position, vectors):
    """Scores of one query and head with the positions from `first` on, in place: soft cap, then ALiBi.

    slopes  float32 (heads,)   what a score loses for each position between key and query
    """
    cap, slopes = load_float(row + at.ATTEND_SOFTCAP), load_i64(row + at.ATTEND_SLOPES)
    if cap > float32(0.0):
        size = splat_f32(cap)
        for vector in range(vectors):
            store_f32x16(scores + 64 * vector, capped(load_f32x16(scores + 64 * vector), size))
    if slopes != 0:
        slope = splat_f32(load_f32(slopes + 4 * head))
        for vector in range(vectors):
            distance = count_up(float32(first + 16 * vector - position))
            store_f32x16(scores + 64 * vector, load_f32x16(scores + 64 * vector) + distance * slope)


@kernel
def add_sink(sinks, head, total, head_dim):
    """Join a folded result with its head's sink: one more score, whose value is nothing.

    sinks  float32 (heads,), or address 0 for none
    """
    if sinks == 0:
        return
    before, sink = load_f32(total), load_f32(sinks + 4 * head)
    top = max(before, sink)
    keep = max_lanes(exp(splat_f32(before - top)))
    gain = max_lanes(exp(splat_f32(sink - top)))
    store_f32(total, top)
    store_f32(total + 4, load_f32(total + 4) * keep + gain)
    keeps = splat_f32(keep)
    for column in range(0, head_dim, 16):
        place = total + 4 * (PARTIAL_HEAD + column)
        store_f32x16(place, load_f32x16(place) * keeps)
