"""The decoder: parity with transformers in float32, and results that depend on nothing but the sequence, to the bit.

A folder of `tests/goldens/tiny_folder.py` is opened, converted and run by the
product's own path. Whatever changes who computes what, and when (pieces of a
prompt, threads, instruction tier, other sequences, places of pages), must not
change one bit of any logit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import engine
from engine.convert.convert import convert
from engine.convert.load import open_model
from engine.convert.recipe import conversion_for
from engine.core.build import TARGETS
from engine.core.operations import PAGE_TOKENS
from engine.core.pages import PagePool
from engine.core.team import Team
from engine.errors import UnsupportedModelError
from engine.models.batch import Batch
from engine.models.decoder import Decoder, check_shapes, memory_layout, page_layout, scratch_bytes
from engine.models.weights import ModelSource
from engine.progress import finish
from engine.settings import Conversion
from tests import factory
from tests.goldens import tiny_folder
from tests.workbench import product_scratch_bytes, same_bits

GOLDENS = Path(__file__).parent / "goldens"
CASES = list(tiny_folder.CASES)
IDS = tiny_folder.token_ids(300)
FORMATS = {
    "q4": Conversion(bits=4),
    "q4-256": Conversion(bits=4, group_size=256, keep=("embedding=q4", "head=q4")),
    "q8": Conversion(bits=8, group_size=64),
    "q4g-q6": Conversion(bits=4, group_size=64, keep=("*.attention.*=q4g", "*.feed_forward.*=q6")),
    "f16": Conversion(bits=16, keep=("*=f16",)),
    "bf16": Conversion(bits=16, keep=("*=bf16",)),
    "f32": conversion_for("f32"),
}
KV = ["int8", "f16", "f32"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """`folder(case, dtype)`: a tiny model with a tokenizer of bytes, which the product asks of a model that talks."""
    made = {}

    def write(case, dtype="f32", **how):
        key = (case, dtype, *how.items())
        if key not in made:
            made[key] = tmp_path_factory.mktemp(case)
            tiny_folder.write_folder(made[key], case, dtype, **how)
            (made[key] / "tokenizer.json").write_text(json.dumps(factory.tok_json()), encoding="utf-8")
        return made[key]

    return write


@pytest.fixture(scope="session")
def source(folder):
    """`source(case, format)`: the converted model in memory."""
    opened = {}

    def load(case, name) -> ModelSource:
        if (case, name) not in opened:
            opened[case, name] = finish(open_model(folder(case), FORMATS[name]))
        return opened[case, name]

    return load


@dataclass
class Runner:
    """A decoder with pages of its own for a few sequences."""

    decoder: Decoder
    tables: np.ndarray  # int32 (sequences, pages)
    memories: np.ndarray | None = (
        None  # int32 (sequences, 2): of what a sequence was, -1 for nothing; for the next step
    )

    def step(self, parts, wanted=None, *, again=False):
        """Logits (wanted, vocab) of [(sequence, first position, ids)], each part's tokens consecutive.

        wanted: rows of the batch, all when None
        again: compute it twice, as after a step that was cancelled
        """
        lengths = np.zeros(len(self.tables), np.int32)
        for number, first, ids in parts:
            lengths[number] = first + len(ids)
        order = {number: row for row, (number, _, _) in enumerate(parts)}
        tokens = sum(len(ids) for _, _, ids in parts)
        batch = Batch(
            ids=np.concatenate([ids for _, _, ids in parts]).astype(np.int32),
            positions=np.concatenate([np.arange(first, first + len(ids)) for _, first, ids in parts]).astype(np.int32),
            sequence_of=np.concatenate([np.full(len(ids), order[number]) for number, _, ids in parts]).astype(np.int32),
            tables=self.tables[[number for number, _, _ in parts]],
            lengths=lengths[[number for number, _, _ in parts]],
            wanted=np.arange(tokens, dtype=np.int32) if wanted is None else np.asarray(wanted, np.int32),
            memories=None if self.memories is None else self.memories[[number for number, _, _ in parts]],
        )
        logits = self.decoder.forward(batch).copy()
        if again and self.memories is not None:
            assert same_bits(self.decoder.forward(batch), logits), "a step left what it began with changed"
        for number, _, _ in parts if self.memories is not None else ():
            before, after = self.memories[number]
            # Two places take turns; the first step began with neither.
            self.memories[number] = after, before if before >= 0 else after + 1
        return logits

    def logits(self, ids, sizes, sequence=0, *, again=False):
        """Logits of all ids, run in pieces of the sizes, the last repeated."""
        rows, start = [], 0
        sizes = list(sizes)
        while start < len(ids):
            size = min(sizes.pop(0) if len(sizes) > 1 else sizes[0], len(ids) - start)
            rows.append(self.step([(sequence, start, ids[start : start + size])], again=again))
            start += size
        return np.concatenate(rows)


@pytest.fixture
def runner(kernels):
    """`runner(source, ...)`: a `Runner`; its threads end with the test."""
    teams = []

    def build(model, *, kv="int8", tier=None, threads=2, context=512, sequences=1, seed=0):
        team = Team(kernels(tier), threads)
        teams.append(team)
        pages = -(-context // PAGE_TOKENS)
        pool = PagePool(sequences * pages + 1, page_layout(model.spec, kv))
        if kv == "int8":
            # What others left in the pages: codes of all kinds, and scales up to the largest half.
            pool.memory[:] = np.resize(np.frombuffer(b"\xff\x7b\x01\x80", np.uint8), pool.memory.shape)
        order = np.random.default_rng(seed).permutation(pool.count)[: sequences * pages]
        kept, memories, places = memory_layout(model.spec), None, None
        if kept is not None:
            memories = PagePool(2 * sequences, kept)
            memories.memory.view(np.float32)[:] = np.nan  # what others left
            places = np.array([(-1, 2 * number) for number in range(sequences)], np.int32)
        decoder = Decoder(
            model.spec,
            model.weights,
            pool,
            team,
            context=context,
            kv=kv,
            max_tokens=300,
            max_sequences=sequences,
            max_wanted=300,
            memories=memories,
        )
        return Runner(decoder, order.reshape(sequences, pages).astype(np.int32), places)

    yield build
    for team in teams:
        team.close()


def golden(case):
    return np.load(GOLDENS / f"tiny-{case}.npz")


def check_parity(logits, values, tolerance):
    """Every stored logit within the tolerance, and the likeliest token where the margin allows to tell."""
    assert np.abs(logits[:, values["columns"]] - values["logits"]).max() <= tolerance
    assert np.abs(logits[-1] - values["last_logits"]).max() <= tolerance
    assert np.abs(logits.max(axis=1) - values["max"]).max() <= tolerance
    clear = values["margin"] > 2 * tolerance
    assert clear.mean() > 0.99
    assert np.array_equal(logits.argmax(axis=1)[clear], values["argmax"][clear])


# ---------------------------------------------------------------- parity


@pytest.mark.parametrize("case", [case for case in CASES if case != "llama-dynamic"])
@pytest.mark.usefixtures("compiled_kernels")
def test_parity_with_transformers(folder, case):
    """The contract is 2e-3. Ours is 1e-4: float32 noise of these models is 1e-5 (their logits have deviation 1)."""
    values = golden(case)
    with engine.AutoModel.from_pretrained(folder(case), max_seq_len=512, dtype="f32") as model:
        logits = model.logits(values["ids"])
    assert logits.dtype == np.float32
    assert logits.shape == (300, tiny_folder.VOCAB)
    check_parity(logits, values, 1e-4)


def test_parity_with_transformers_of_dynamic_frequencies(source, runner):
    """They depend on the length, and the reference took that of the whole text. A model in use ends at 64 tokens."""
    values = golden("llama-dynamic")
    check_parity(runner(source("llama-dynamic", "f32"), kv="f32", context=300).logits(IDS, [100]), values, 1e-4)


def test_goldens_are_of_these_weights(tmp_path):
    """The folder that is written now is the one that the reference saw, byte for byte."""
    for case in ("llama", "qwen2-tied", "qwen3-headdim32"):
        digest = tiny_folder.write_folder(tmp_path / case, case)
        meta = json.loads(str(golden(case)["meta"]))
        assert meta["sha256_f32"] == digest
        assert np.array_equal(golden(case)["ids"], IDS)


def test_other_dtypes_and_shards_are_the_same_model(folder, runner):
    """bf16 in shards with a config of transformers 5, and f16, hold the same numbers: equal logits to the bit."""
    case = "llama-yarn"
    models = [
        finish(open_model(folder(case, dtype, **how), conversion_for("f32")))
        for dtype, how in (("f32", {}), ("bf16", {"shards": 3, "style": 5}), ("f16", {}))
    ]
    first, *others = (runner(model, kv="f32").logits(IDS[:120], [120]) for model in models)
    for other in others:
        assert same_bits(other, first)


@pytest.mark.parametrize("name", ["q4", "q8"])
def test_the_nook_file_computes_like_the_folder(folder, source, runner, name, tmp_path):
    file = tmp_path / "model.nook"
    finish(convert(folder("qwen3-tied"), file, FORMATS[name]))
    opened = finish(open_model(file))
    got = runner(opened).logits(IDS[:100], [100])
    assert same_bits(got, runner(source("qwen3-tied", name)).logits(IDS[:100], [100]))


@pytest.mark.parametrize(
    ("name", "kv", "most"), [("q4", "int8", 0.25), ("q8", "int8", 0.05), ("f16", "f16", 0.01), ("bf16", "f16", 0.01)]
)
def test_quantising_costs_little(source, runner, name, kv, most):
    """Root mean square difference of logits, whose deviation is 1, to the reference: a tenth of it is noise of 4 bits.

    Weights here are random normal, the worst that quantisation meets; f16 and bf16 hold them exactly.
    """
    values = golden("llama")
    logits = runner(source("llama", name), kv=kv).logits(IDS, [300])
    difference = logits[:, values["columns"]] - values["logits"]
    assert np.sqrt((difference**2).mean()) < most


LOUD = {0: [3, 19], 1: [8, 24]}
"""Key head -> dimensions, two rotated pairs, that are sixty times the others. Queries are that much smaller there."""


def with_uneven_keys(family):
    """Arguments of `factory.make` for a toy model whose keys are as uneven as those of trained models."""
    made = getattr(factory, family)(num_hidden_layers=2, head_dim=32, max_position_embeddings=512)
    heads_of_key = made["config"]["num_attention_heads"] // made["config"]["num_key_value_heads"]
    rng = np.random.default_rng(6)
    for name, tensor in made["tensors"].items():
        if name.endswith("_proj.weight") and "self_attn" in name:
            tensor[:] *= np.float32(4)
        elif name.endswith("k_proj.bias"):
            tensor[:] = rng.normal(0, 0.1, tensor.shape)
        for key_head, dims in LOUD.items():
            if family == "qwen2" and name.endswith("k_proj.bias"):
                tensor[32 * key_head + np.array(dims)] = [60, -60]
            elif family == "qwen2" and "q_proj" in name:
                for head in range(heads_of_key * key_head, heads_of_key * (key_head + 1)):
                    tensor[32 * head + np.array(dims)] /= np.float32(60)
            elif name.endswith("k_norm.weight"):
                tensor[dims] = 60
            elif name.endswith("q_norm.weight"):
                tensor[dims] = np.float32(1 / 60)
    return made


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_uneven_keys_survive_int8(runner, tmp_path, family):
    """With one scale for all dimensions nothing is left of the small ones: 0.24 and 0.12 of the logits' deviation."""
    model = finish(open_model(factory.make(tmp_path / "model", **with_uneven_keys(family)), conversion_for("f32")))
    ids = np.random.default_rng(7).integers(0, 256, 200).astype(np.int32)
    plain, small = (runner(model, kv=kv).logits(ids, [200]) for kv in ("f32", "int8"))
    difference = np.sqrt(((small - plain) ** 2).mean()) / plain.std()
    assert difference < 0.03


# ---------------------------------------------------------------- nothing but the sequence counts


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize(("case", "name"), [("llama", "q4"), ("qwen3-headdim32", "q8"), ("qwen2-swa64", "f32")])
def test_pieces_threads_and_pages_change_nothing(source, runner, case, name, kv):
    """A prompt at once, by 1, 7 and 64 tokens, by 1, 2 and 3 threads, with pages in other places."""
    model = source(case, name)
    want = runner(model, kv=kv, threads=1).logits(IDS, [300])
    assert np.isfinite(want).all()
    for sizes, threads in (([1], 2), ([7], 3), ([64], 2), ([200, 1, 1, 33, 1], 1)):
        got = runner(model, kv=kv, threads=threads, seed=threads + len(sizes)).logits(IDS, sizes)
        assert same_bits(got, want), (sizes, threads)


@pytest.mark.parametrize("name", ["f16", "bf16", "q4-256"])
def test_pieces_change_nothing_in_any_format(source, runner, name):
    model = source("qwen2", name)
    want = runner(model, threads=1).logits(IDS[:150], [150])
    for sizes, threads in (([1], 2), ([7], 3), ([64], 2)):
        assert same_bits(runner(model, threads=threads, seed=1).logits(IDS[:150], sizes), want), (sizes, threads)


@pytest.mark.parametrize("kv", KV)
def test_company_changes_nothing(source, runner, kv):
    """Three other sequences of other lengths in the same steps, before and after, prompts beside single tokens."""
    model = source("mistral-swa64", "q4")
    others = [tiny_folder.token_ids(150, seed=seed) for seed in (1, 2, 3)]
    alone = [runner(model, kv=kv, threads=1).logits(ids, [40]) for ids in (IDS[:150], *others)]
    here = runner(model, kv=kv, sequences=4, threads=2, seed=4)
    texts = dict(enumerate((IDS[:150], *others)))
    done = dict.fromkeys(texts, 0)
    rng = np.random.default_rng(5)
    while any(done[number] < 150 for number in texts):
        members = [number for number in rng.permutation(4) if done[number] < 150 and rng.random() < 0.8]
        parts = []
        for number in members:
            size = min(int(rng.choice([1, 1, 3, 9, 30])), 150 - done[number])
            parts.append((number, done[number], texts[number][done[number] : done[number] + size]))
        if not parts:
            continue
        rows, row = here.step(parts), 0
        for number, first, ids in parts:
            assert same_bits(rows[row : row + len(ids)], alone[number][first : first + len(ids)]), (number, first)
            row += len(ids)
            done[number] += len(ids)


def test_only_wanted_rows_are_computed(source, runner):
    model = source("qwen2", "q4")
    want = runner(model).logits(IDS[:90], [90])
    for wanted in ([89], [0, 3, 88], [], list(range(90))):
        got = runner(model, threads=3).step([(0, 0, IDS[:90])], wanted)
        assert got.shape == (len(wanted), tiny_folder.VOCAB)
        assert same_bits(got, want[wanted])


def test_a_step_again_gives_the_same(source, runner):
    """Keys and values written twice, as after a cancelled step."""
    here = runner(source("llama", "q4"))
    want = here.logits(IDS[:70], [70])
    assert same_bits(here.logits(IDS[:70], [70]), want)
    here.decoder.cancel()
    here.step([(0, 60, IDS[60:70])])
    assert here.decoder.cancelled
    here.decoder.clear_cancel()
    assert same_bits(here.step([(0, 60, IDS[60:70])]), want[60:])
    assert not here.decoder.cancelled


# ---------------------------------------------------------------- tiers


@pytest.fixture(scope="session")
def first_tier():
    """(case, format, kv) -> logits of the tier that came first."""
    return {}


@pytest.mark.parametrize("tier", TARGETS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_tier_gives_the_same_bits(source, runner, first_tier, tier, name):
    for case in ("llama-llama3", "qwen3"):
        for kv in KV:
            here = runner(source(case, name), kv=kv, tier=tier)
            logits = here.logits(IDS[:200], [33, 100, 1, 1, 65])
            assert same_bits(logits, first_tier.setdefault((case, name, kv), logits)), (case, kv)


# ---------------------------------------------------------------- limits


def test_batches_beyond_the_room_are_refused(source, runner):
    here = runner(source("llama", "q4"))
    with pytest.raises(AssertionError, match="301 tokens exceeds 300"):
        here.step([(0, 0, np.zeros(301, np.int32))], [0])


def test_shapes_that_kernels_do_not_take_are_refused(source):
    spec = source("llama", "q4").spec
    layer = spec.layers[0]
    wrong = {
        "hidden size = 120": replace(spec, hidden=120),
        "head_dim = 24": replace(spec, layers=(replace(layer, attention=replace(layer.attention, head_dim=24)),)),
        "head_dim = 528": replace(spec, layers=(replace(layer, attention=replace(layer.attention, head_dim=528)),)),
        "intermediate size = 100": replace(
            spec, layers=(layer, replace(layer, feed_forward=replace(layer.feed_forward, intermediate=100)))
        ),
    }
    for words, changed in wrong.items():
        with pytest.raises(UnsupportedModelError, match=words):
            check_shapes(changed)
    check_shapes(spec)


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim", "intermediate"),
    [
        (128, 8, 2, 16, 384),
        (16384, 1, 1, 16, 16),
        (16, 1024, 1024, 64, 16),
        (16, 1, 1, 496, 65536),
        (16, 64, 1, 512, 16),
    ],
)
def test_scratch_holds_what_kernels_put_there(source, hidden, heads, kv_heads, head_dim, intermediate):
    """Whatever is the widest of a model: a row of floats, what products on tiles keep, and a tile of attention."""
    spec = source("llama", "q4").spec
    attention = replace(spec.layers[0].attention, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rope=None)
    feed_forward = replace(spec.layers[0].feed_forward, intermediate=intermediate)
    layer = replace(spec.layers[0], attention=attention, feed_forward=feed_forward)
    spec = replace(spec, hidden=hidden, layers=(layer,))
    for tokens in (1, 16, 17, 512):
        size = scratch_bytes(spec, tokens)
        assert size % 64 == 0
        assert size >= product_scratch_bytes(tokens)
    size = scratch_bytes(spec, 1)
    for tensor in spec.tensors():
        assert size >= 4 * tensor.cols, tensor.name
    # Pages; a row's scale, query, its scales, 512 scores as float32 and as int16, and two results; for tiles their
    # shapes, two of products, and a chunk of values.
    rows = -(-max(64, heads // kv_heads) // 16) * 16
    part = 4 * (16 + head_dim)
    assert size >= 128 + rows * (4 + 4 * head_dim + 128 + 6 * 512 + 2 * part) + 64 + 2048 + 512 * head_dim
