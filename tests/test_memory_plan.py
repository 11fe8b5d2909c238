"""The memory plan: honest sums, sensible defaults, refusals with numbers."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.core.cpu import Memory
from engine.core.pages import PagePool
from engine.errors import ContextOverflowError, ResourceError
from engine.models.decoder import Decoder, page_layout
from engine.models.families import recognise
from engine.models.memory import needed_bytes, plan, working_bytes
from engine.models.weights import VECTOR, MemoryWeights, Tensor
from engine.settings import EngineSettings
from tests.factory import cfg

GB = 1 << 30
SPEC = recognise(
    cfg(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        vocab_size=32000,
    )
).spec
PAGE = page_layout(SPEC, "int8").page_bytes


def planned(free, weights=GB, **settings):
    return plan(SPEC, weights, EngineSettings(**settings), Memory(total=4 * free, free=free, limit=None))


@pytest.mark.parametrize(("free", "context"), [(3 * GB, 4096), (8 * GB, 4096), (8 * GB + 1, 8192), (64 * GB, 8192)])
def test_the_default_context(free, context):
    assert planned(free).context == context


def test_the_default_is_never_above_the_model_s_or_the_memory_s():
    small = recognise(cfg()).spec
    assert plan(small, GB, EngineSettings(), Memory(16 * GB, 16 * GB, None)).context == 256
    fixed = GB + (256 << 20) + working_bytes(SPEC, sequences=4)
    tight = planned(fixed + 20 * PAGE)
    assert tight.context == 20 * 64
    assert tight.pages == 20
    assert tight.tokens_left == 0


def test_sums():
    found = planned(16 * GB, context=4096, max_batch_size=4)
    assert found.pages == 4 * 64
    assert found.kv_bytes == found.pages * PAGE
    assert found.total_bytes == GB + found.kv_bytes + found.working_bytes
    assert found.spare_bytes == 16 * GB - (256 << 20) - found.total_bytes
    assert found.tokens_left == found.spare_bytes // PAGE * 64


def test_fewer_parallel_conversations_when_all_do_not_fit():
    fixed = GB + (256 << 20) + working_bytes(SPEC, sequences=4)
    found = planned(fixed + 100 * PAGE, context=4096, max_batch_size=4)
    assert found.pages == 100
    assert found.context == 4096


@pytest.mark.parametrize("kv", ["int8", "f16", "f32"])
def test_pages_follow_the_precision(kv):
    assert planned(16 * GB, kv=kv).page_bytes == page_layout(SPEC, kv).page_bytes


def test_a_context_beyond_the_model_is_refused_with_both_numbers():
    with pytest.raises(ContextOverflowError, match="40000 tokens is more than the 32768") as caught:
        planned(64 * GB, context=40000)
    assert (caught.value.needed_tokens, caught.value.context_tokens) == (40000, 32768)


def test_what_does_not_fit_is_refused_with_numbers_and_advice():
    fixed = GB + (256 << 20) + working_bytes(SPEC, sequences=4)
    with pytest.raises(ResourceError, match=r"a context of 640 tokens would fit"):
        planned(fixed + 10 * PAGE, context=8192)
    with pytest.raises(ResourceError, match=r"needs 1\.4 GB of memory and 1\.1 GB are free; close other programs"):
        planned(GB)


def test_needed_bytes_grow_with_the_context():
    sizes = [needed_bytes(SPEC, GB, context) for context in (64, 128, 4096)]
    assert sizes[1] - sizes[0] == PAGE
    assert GB < sizes[0] < sizes[2]
    assert needed_bytes(SPEC, 0, 4096, "f16") > needed_bytes(SPEC, 0, 4096, "int8")


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("batch_tokens", [64, 512])
@pytest.mark.parametrize("context", [2048, 32768])
def test_the_working_memory_is_what_the_decoder_allocates(threads, batch_tokens, context):
    nothing = np.zeros(64, np.uint8)
    tensors = [
        Tensor(
            t.name, VECTOR if t.role == "vector" else "q4", 0 if t.role == "vector" else 32, t.rows, t.cols, 0, nothing
        )
        for t in SPEC.tensors()
    ]
    decoder = Decoder(
        SPEC,
        MemoryWeights(tensors),
        PagePool(1, page_layout(SPEC, "int8")),
        SimpleNamespace(members=threads, run=None),
        context=context,
        max_tokens=batch_tokens,
        max_sequences=4,
        max_wanted=4,
    )
    expected = working_bytes(SPEC, threads=threads, batch_tokens=batch_tokens, sequences=4, guesses=0, context=context)
    assert 0.9 < decoder.buffer_bytes / expected < 1.1
