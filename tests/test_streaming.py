"""Weights that are read from disk while others compute: the same bits as mapped ones, at any size of memory."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import engine
from engine import api
from engine.convert.convert import convert
from engine.core.cpu import Memory
from engine.core.operations import PAGE_TOKENS
from engine.core.pages import PagePool
from engine.core.team import Team
from engine.errors import FileDamagedError, InputError, ResourceError
from engine.models import streaming
from engine.models.batch import Batch
from engine.models.decoder import Decoder, page_layout
from engine.models.memory import plan
from engine.models.store import NookFile, open_nook
from engine.models.streaming import StreamedWeights, least_bytes
from engine.progress import finish
from engine.runtime import model as assembly
from engine.settings import Conversion, EngineSettings
from tests.factory import cfg, make
from tests.goldens import tiny_folder
from tests.workbench import same_bits

LAYERS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("source") / "toy", cfg(num_hidden_layers=LAYERS, eos_token_id=None))


@pytest.fixture(scope="module")
def path(folder, tmp_path_factory):
    found = tmp_path_factory.mktemp("nook") / "toy.nook"
    finish(convert(folder, found))
    return found


@pytest.fixture
def decoder_of(kernels):
    """`decoder_of(spec, weights)`: a decoder over pages of its own."""
    teams = []

    def build(spec, weights):
        teams.append(Team(kernels(), 2))
        pool = PagePool(4, page_layout(spec, "int8"))
        return Decoder(spec, weights, pool, teams[-1], context=4 * PAGE_TOKENS, max_tokens=64, max_wanted=64)

    yield build
    for team in teams:
        team.close()


def step(decoder, first, ids):
    """Logits (tokens, vocab) of the next ids of the one sequence there is."""
    tokens = np.arange(len(ids), dtype=np.int32)
    batch = Batch(
        ids=np.asarray(ids, np.int32),
        positions=first + tokens,
        sequence_of=np.zeros(len(ids), np.int32),
        tables=np.arange(4, dtype=np.int32)[None],
        lengths=np.array([first + len(ids)], np.int32),
        wanted=tokens,
    )
    return decoder.forward(batch).copy()


def steps(decoder):
    ids = tiny_folder.token_ids(60) % decoder.spec.vocab_size
    return [step(decoder, 0, ids[:50]), *(step(decoder, at, ids[at : at + 1]) for at in range(50, 60))]


def layer_bytes(file):
    """All layers are alike; three of them are in the least."""
    head = next(tensor for tensor in file.manifest.tensors if tensor.name in {"head", "embedding"})
    return (least_bytes(file) - -(-head.bytes // 4096) * 4096) // 3


@pytest.mark.parametrize("turning", [7, 6, 5, 4])
def test_layers_in_turn_give_the_bits_of_mapped_ones(path, decoder_of, turning):
    source = open_nook(path)
    expected = steps(decoder_of(source.spec, source.weights))
    layer = layer_bytes(source.weights)
    weights = StreamedWeights(source.weights, least_bytes(source.weights) + (LAYERS - turning) * layer)
    try:
        assert weights.step_bytes == pytest.approx(turning * layer, abs=4096 * turning)
        assert weights.held_bytes <= least_bytes(source.weights) + (LAYERS - turning) * layer
        for got, want in zip(steps(decoder_of(source.spec, weights)), expected, strict=True):
            assert same_bits(got, want)
        assert weights.rate() > 0
    finally:
        weights.close()


def test_what_fits_is_read_once(path, decoder_of):
    source = open_nook(path)
    weights = StreamedWeights(source.weights, 2 * source.weights.total_bytes)
    try:
        decoder = decoder_of(source.spec, weights)
        first = steps(decoder)
        assert weights.step_bytes == 0
        # The file may go: everything is in memory by now.
        weights._disk.close()
        assert all(map(same_bits, steps(decoder), first))
    finally:
        weights.close()


def test_every_weight_is_found_where_it_was_written(path):
    file = NookFile.open(path)
    weights = StreamedWeights(file, least_bytes(file))
    try:
        assert weights.names == file.names
        assert weights.total_bytes == file.total_bytes
        moved = set()
        for name in file.names:
            mapped, streamed = file.tensor(name), weights.tensor(name)
            assert same_bits(mapped.data, streamed.data)
            if streamed.address != mapped.address:
                moved.add(name)
            assert streamed.address % 64 == 0
        head = "embedding" if file.manifest.spec.tied_head else "head"
        assert moved == {name for name in file.names if name.startswith("layers.")} | {head}
    finally:
        weights.close()


def test_a_step_that_was_broken_off_spoils_no_later_one(path, decoder_of):
    source = open_nook(path)
    expected = steps(decoder_of(source.spec, source.weights))
    weights = StreamedWeights(source.weights, least_bytes(source.weights))
    try:
        decoder = decoder_of(source.spec, weights)
        for layers in (1, 4, 6):
            weights.begin()
            for layer in range(layers):
                assert weights.take(layer, 60.0)
                if layer < layers - 1:
                    weights.give_back(layer)
            assert all(map(same_bits, steps(decoder), expected))
    finally:
        weights.close()


def test_cancelling_does_not_wait_for_the_disk(path, decoder_of, monkeypatch):
    source = open_nook(path)
    waits, goes_on = threading.Event(), threading.Event()
    read = streaming._Disk.read

    def stuck(disk, part, place):
        if part.bytes != head.bytes:
            waits.set()
            assert goes_on.wait(60)
        return read(disk, part, place)

    head = source.weights.tensor("embedding" if source.spec.tied_head else "head")
    monkeypatch.setattr(streaming._Disk, "read", stuck)
    weights = StreamedWeights(source.weights, least_bytes(source.weights))
    try:
        decoder = decoder_of(source.spec, weights)
        assert waits.wait(60)
        decoder.cancel()
        step(decoder, 0, [1, 2, 3])
        assert decoder.cancelled
        assert not goes_on.is_set()
        decoder.clear_cancel()
        goes_on.set()
        mapped = decoder_of(source.spec, source.weights)
        assert same_bits(step(decoder, 0, [1, 2, 3]), step(mapped, 0, [1, 2, 3]))
        assert not decoder.cancelled
    finally:
        goes_on.set()
        weights.close()


def test_a_file_that_is_cut_short_ends_the_answer_with_its_name(path, decoder_of, tmp_path):
    nook = shutil.copy(path, tmp_path / "toy.nook")
    source = open_nook(nook)
    weights = StreamedWeights(source.weights, least_bytes(source.weights))
    try:
        decoder = decoder_of(source.spec, weights)
        step(decoder, 0, [1, 2, 3])
        os.truncate(nook, source.weights.offset("layers.5.feed_forward.down"))
        with pytest.raises(FileDamagedError, match=r"toy\.nook became shorter"):
            steps(decoder)
    finally:
        weights.close()


def test_another_file_of_the_same_name_is_refused(path, folder, tmp_path):
    nook = Path(shutil.copy(path, tmp_path / "toy.nook"))
    file = NookFile.open(nook)
    finish(convert(folder, tmp_path / "other.nook", Conversion(bits=8)))
    (tmp_path / "other.nook").replace(nook)
    with pytest.raises(FileDamagedError, match="was replaced"):
        StreamedWeights(file, least_bytes(file))
    nook.unlink()
    with pytest.raises(ResourceError, match="cannot be read"):
        StreamedWeights(file, least_bytes(file))


def test_less_than_the_least_is_refused(path):
    file = NookFile.open(path)
    with pytest.raises(ResourceError, match="layers need"):
        StreamedWeights(file, least_bytes(file) - 1)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="only Linux reads past its cache so")
def test_where_the_cache_cannot_be_avoided_it_is_used(path, decoder_of, monkeypatch):
    opened = streaming._opened

    def refusing(path, past_cache, block):
        if past_cache:
            raise OSError(22, "Invalid argument")
        return opened(path, past_cache, block)

    monkeypatch.setattr(streaming, "_opened", refusing)
    source = open_nook(path)
    weights = StreamedWeights(source.weights, least_bytes(source.weights))
    try:
        assert not weights._disk._is_direct
        mapped = decoder_of(source.spec, source.weights)
        assert all(map(same_bits, steps(decoder_of(source.spec, weights)), steps(mapped)))
    finally:
        weights.close()


# --- as a person meets it -------------------------------------------------------------------------------------------


@pytest.fixture
def lend(path, monkeypatch):
    """`lend(settings)`: from now on there is memory for the model's least and for two more layers."""

    def limit(settings):
        file = NookFile.open(path)
        planned = plan(file.manifest.spec, least_bytes(file), settings, Memory(8 << 30, 8 << 30, None), threads=1)
        free = planned.total_bytes + (256 << 20) + 2 * layer_bytes(file)
        monkeypatch.setattr(assembly, "memory", lambda: Memory(free, free, None))
        return settings

    return limit


def test_a_model_larger_than_the_memory_answers_as_any_other(path, lend):
    with engine.AutoModel.from_pretrained(
        path, 256, settings=EngineSettings(context=256, threads=1, load="resident")
    ) as model:
        expected = model.generate("the sea", max_new_tokens=12, temperature=0.0)
        assert model.info.step_disk_bytes == 0
    settings = lend(EngineSettings(load="stream", context=256, threads=1, max_batch_size=2))
    with engine.AutoModel.from_pretrained(path, 256, settings=settings) as model:
        info = model.info
        assert 0 < info.step_disk_bytes < info.weight_bytes
        assert "read from disk for every token" in info.notices[-1]
        assert "tokens a second" in info.notices[-1]
        assert model.generate("the sea", max_new_tokens=12, temperature=0.0) == expected


def test_the_plan_of_a_mapped_model_points_to_the_disk(path, monkeypatch):
    monkeypatch.setattr(assembly, "memory", lambda: Memory(1 << 20, 1 << 20, None))
    with pytest.raises(ResourceError, match="load mode stream"):
        engine.AutoModel.from_pretrained(path, 256, settings=EngineSettings(context=256))
    with pytest.raises(ResourceError) as raised:
        engine.AutoModel.from_pretrained(path, 256, settings=EngineSettings(context=256, load="stream"))
    assert "stream" not in str(raised.value)


def test_a_folder_has_to_be_converted_first(folder):
    with pytest.raises(InputError, match=f"{folder} has to be converted before its layers can be read from disk"):
        engine.AutoModel.from_pretrained(folder, 256, settings=EngineSettings(context=256, load="stream"))


def test_the_measurement_says_what_the_disk_gave(path, lend):
    settings = EngineSettings(load="stream", threads=1)
    lend(settings.model_copy(update={"context": 66, "max_batch_size": 2, "speculation": "off"}))
    *_, found = api.bench(path, settings=settings, prompt_tokens=64, gen_tokens=4, depth=4, batch=2, repeat=1)
    assert found["step_disk_bytes"] > 0
    assert found["disk_bytes_per_s"] > 0
