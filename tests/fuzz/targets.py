"""What is tried with changed files. A target takes hypothesis's data and a folder.

It fails when the promise is broken: nothing but one line for what is wrong, nothing that lasts, no file more or less.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from engine.convert.convert import convert, quantised_in_memory
from engine.convert.entry import read_raw
from engine.convert.pickled import read_pickled
from engine.convert.report import inspect
from engine.convert.safetensors import read_header
from engine.convert.source import open_source
from engine.errors import InputError, ResourceError
from engine.models.store import FOOTER_BYTES, HEADER_BYTES, open_nook, verify
from engine.progress import finish
from engine.settings import Conversion
from engine.text.template import ChatTemplate, repaired
from engine.text.tokenizer import Piece, Tokenizer
from tests import factory
from tests.fuzz.mutations import changed_bytes, changed_document, changed_json
from tests.test_quantised import CASES
from tests.test_quantised import quantised as packed
from tests.torch_files import write_archive, write_legacy

__all__ = ["TARGETS"]

# Processor seconds. Templates may take the time they are promised, several times: they are tried when they are opened.
_PATIENCE_S = 8
_MANY_TENSORS = 3
_TEXT = "Héllo  wörld 123 \n世界 <|im_start|> 😀"

Target = Callable[[st.DataObject, Path], None]


@contextmanager
def _promised(folder: Path) -> Iterator[None]:
    """One line for what is wrong, soon, and no file more or less."""
    before = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    began_s = time.thread_time()
    sentence = ""
    try:
        yield
    except (InputError, ResourceError) as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 2000
    assert time.thread_time() - began_s < _PATIENCE_S
    assert before == {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def _toy(folder: Path, **arguments: Any) -> Path:
    """A toy model, made once for each folder."""
    return folder / "toy" if (folder / "toy").is_dir() else factory.make(folder / "toy", **arguments)


def _tried(folder: Path, path: Path) -> None:
    """Look at a model and, if it seems sound, open it."""
    with _promised(folder):
        report = inspect(path, tensors=True)
        json.dumps(report.to_json())
        assert all("\n" not in problem.sentence for problem in report.problems)
        source = open_source(path)
        assert report.usable or not source.files.get("tokenizer.json")
        if source.spec.parameters < 1 << 20:
            finish(quantised_in_memory(source, Conversion()))


_FAMILIES = (factory.cfg(), factory.qwen2()["config"], factory.qwen3()["config"], factory.mistral()["config"])
_SCALED = factory.cfg(
    rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32},
)


def configuration(data: st.DataObject, folder: Path) -> None:
    """config.json."""
    toy = _toy(folder)
    config = data.draw(st.sampled_from((*_FAMILIES, _SCALED)))
    (toy / "config.json").write_bytes(data.draw(changed_json(config)))
    _tried(folder, toy)


_TENSORS = dict(list(factory.weights(factory.cfg()).items())[:_MANY_TENSORS])


def headers(data: st.DataObject, folder: Path) -> None:
    """The header of a safetensors file."""
    if data.draw(st.booleans()):
        whole = factory.st_bytes(_TENSORS, header=lambda header: data.draw(changed_document(header)))
    else:
        whole = data.draw(changed_bytes(factory.st_bytes(_TENSORS)))
    path = folder / "model.safetensors"
    path.write_bytes(whole)
    with _promised(folder):
        for entry in read_header(path).values():
            assert 0 <= entry.begin <= entry.end <= len(whole)


def index(data: st.DataObject, folder: Path) -> None:
    """model.safetensors.index.json."""
    toy = _toy(folder)
    name = toy / "model.safetensors.index.json"
    if not name.is_file():
        factory.shard(toy, factory.weights(factory.cfg()), 3)
    correct = _index(len(list(toy.glob("*.safetensors"))))
    name.write_bytes(data.draw(changed_json(correct)))
    _tried(folder, toy)


@cache
def _index(shards: int) -> Any:
    names = list(factory.weights(factory.cfg()))
    files = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    return {"weight_map": {name: files[place % shards] for place, name in enumerate(names)}}


_SPACED = {
    **factory.tok_json(extra=()),
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
    "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]}},
    },
}
_CUT = {
    **factory.tok_json(merges=[("h", "e"), ("l", "l"), ("he", "ll")]),
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}|\s+"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        ],
    },
}
_CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "add_bos_token": True,
    "added_tokens_decoder": {"260": {"content": "<|new|>", "special": True, "lstrip": True, "normalized": False}},
    "additional_special_tokens": ["<|im_end|>"],
    "chat_template": [{"name": "default", "template": factory.CHATML}],
}


def tokenizers(data: st.DataObject, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    document = data.draw(st.sampled_from((factory.tok_json(), _SPACED, _CUT)))
    changed = data.draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    files = {"tokenizer.json": json.dumps(document).encode(), "tokenizer_config.json": json.dumps(_CONFIG).encode()}
    files[changed] = data.draw(changed_json(document if changed == "tokenizer.json" else _CONFIG))
    with _promised(folder):
        tokenizer = Tokenizer.from_files(files)
        ids = [
            *tokenizer.encode(_TEXT),
            *tokenizer.encode_pieces([Piece("<|im_start|>", False), Piece(_TEXT, True)]),
        ]
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
        tokenizer.decode([*ids, tokenizer.vocab_size, 1 << 40])
        ChatTemplate.from_files(files)


_RANKS = b"".join(f"{text} {rank}\n".encode() for rank, text in enumerate(("YQ==", "Yg==", "YWI=", "IA==", "4pg=")))
_TEKKEN = {
    "config": {"pattern": r"\p{L}+|\s", "default_vocab_size": 20, "default_num_special_tokens": 4, "version": "v3"},
    "vocab": [{"rank": rank, "token_bytes": text} for rank, text in enumerate(("YQ==", "Yg==", "YWI="))],
    "special_tokens": [{"rank": 1, "token_str": "<s>"}],
}


def ranks(data: st.DataObject, folder: Path) -> None:
    """tiktoken's files and tekken.json."""
    if data.draw(st.booleans()):
        config = json.dumps({"tokenizer_class": "QWenTokenizer"}).encode()
        files = {"qwen.tiktoken": data.draw(changed_bytes(_RANKS)), "tokenizer_config.json": config}
    else:
        files = {"tekken.json": data.draw(changed_json(_TEKKEN))}
    with _promised(folder):
        tokenizer = Tokenizer.from_files(files)
        tokenizer.decode(tokenizer.encode("ab ba <s>"))


_BITS = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if m.role == 'user' %}",
        "{% else %}",
        "{% endif %}",
        "{{ m.content }}",
    ),
    *(
        "{% set x = [x, x] %}",
        "{% set ns = namespace(x='a') %}",
        "{% set ns.x = ns.x ~ ns.x %}",
        "{{ ns.x }}",
        "{{ x }}",
    ),
    *(
        "{% for i in range(99999) %}",
        "{{ i * 'a' }}",
        "{{ 9 ** 999 }}",
        "{{ x | tojson }}",
        "{{ messages | tojson(indent=4) }}",
    ),
    *(
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{% break %}",
    ),
    *(
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ x | attr('__class__') }}",
        "{{ {} }}",
        "{{",
    ),
    *("{% macro f(n) %}", "{{ f(n) }}", "{% endmacro %}", "{{ f(1) }}", "{% include 'x' %}", "{% set x = messages %}"),
    *(
        "{{ messages[0].content.replace('', 'ab' * 999) }}",
        "{{ x | map('upper') | list | sort }}",
        "{% set x = (x, x) %}",
    ),
    *(
        "{{ x == messages }}",
        "{{ x[::-1] }}",
        "{{ '%99999d' % 1 }}",
        "{{ '{:>99999}'.format(1) }}",
        "{% raw %}",
        "{# #}",
    ),
    *(
        "{{ messages | groupby('role') | list }}",
        "{{ (x | string) * 99 }}",
        "{% call f(1) %}",
        "{% endcall %}",
        "%}",
        "\n  ",
    ),
    *(
        "<|im_start|>",
        "{{ bos_token }}",
        "{% if tools %}",
        "{% for t in tools or [] %}",
        "{% filter upper %}",
        "{% endfilter %}",
    ),
)


def templates(data: st.DataObject, folder: Path) -> None:
    """Chat templates."""
    source = "".join(data.draw(st.lists(st.sampled_from(_BITS), min_size=1, max_size=12)))
    if data.draw(st.integers(0, 3)) == 0:
        source = data.draw(changed_bytes(factory.CHATML.encode())).decode(errors="replace")
    history = [{"role": "user", "content": "hi {{ 7 * 7 }}"}, {"role": "assistant", "content": "x"}]
    with _promised(folder):
        template = ChatTemplate.from_files({"chat_template.jinja": source.encode()})
        turns, _ = repaired([*history, {"role": "user", "content": "bye"}], template)
        template.render(turns)


def _nook(folder: Path) -> bytes:
    out = folder / "toy.nook"
    if not out.is_file():
        finish(convert(_toy(folder), out, Conversion()))
    return out.read_bytes()


def nook(data: st.DataObject, folder: Path) -> None:
    """`.nook` files: bytes that changed, and manifests that were changed and vouched for."""
    whole = _nook(folder)
    path = folder / "changed.nook"
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(changed_bytes(whole)))
    else:
        path.write_bytes(_with_manifest(whole, lambda manifest: data.draw(changed_document(manifest))))
    with _promised(folder):
        report = inspect(path)
        assert report.usable or report.problems
        model = open_nook(path)
        for name in model.weights.names:
            assert model.weights.tensor(name).bytes >= 0
        for _ in verify(path):
            pass


def _with_manifest(whole: bytes, change: Callable[[Any], Any]) -> bytes:
    """The file with another manifest, which header and footer vouch for."""
    place, length = struct.unpack_from("<QQ", whole, 16)
    text = json.dumps(change(json.loads(whole[place : place + length]))).encode()
    size = place + len(text) + FOOTER_BYTES
    header = bytearray(whole[:HEADER_BYTES])
    struct.pack_into("<QQQ32s", header, 16, place, len(text), size, hashlib.sha256(text).digest())
    footer = bytearray(whole[-FOOTER_BYTES:])
    struct.pack_into("<Q32s", footer, 8, size, hashlib.sha256(bytes(header)).digest())
    return bytes(header) + whole[HEADER_BYTES:place] + text + bytes(footer)


def pickles(data: st.DataObject, folder: Path) -> None:
    """pytorch_model.bin."""
    path = folder / "pytorch_model.bin"
    data.draw(st.sampled_from((write_archive, write_legacy)))(path, _TENSORS)
    path.write_bytes(
        data.draw(changed_bytes(path.read_bytes()[-6000:] if data.draw(st.booleans()) else path.read_bytes()))
    )
    with _promised(folder):
        for entry in read_pickled(path).values():
            read_raw(entry)


def quantised(data: st.DataObject, folder: Path) -> None:
    """Shapes and types of the parts of a quantised matrix."""
    arguments, _ = packed(*CASES[data.draw(st.sampled_from(sorted(CASES)))])
    toy = factory.make(folder / "toy", arguments["config"], {})
    stem = "model.layers.0.self_attn.q_proj"

    def change(header: dict[str, Any]) -> Any:
        own = {key: value for key, value in header.items() if key.startswith(stem)}
        rest = {key: value for key, value in header.items() if key not in own}
        for value in own.values():
            if data.draw(st.booleans()):
                value["dtype"] = data.draw(st.sampled_from(["I32", "U8", "I8", "F16", "F32", "F8_E4M3", "BF16", "I64"]))
            if data.draw(st.booleans()):
                value["shape"] = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 16, 64, 128, 1 << 40]), max_size=3))
        return rest | own

    whole = factory.st_bytes(arguments["tensors"], header=change)
    (toy / "model.safetensors").write_bytes(whole)
    _tried(folder, toy)


TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (configuration, headers, index, tokenizers, ranks, templates, nook, pickles, quantised)
}
