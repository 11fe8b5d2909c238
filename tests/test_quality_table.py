"""The table of what files lose: one pass for all, the document by sections, a control with noise."""

from __future__ import annotations

import numpy as np
import pytest

from engine.convert.convert import convert
from engine.convert.source import open_source
from engine.progress import finish
from engine.settings import Conversion
from tests.bench import quality
from tests.factory import make, qwen2


@pytest.mark.usefixtures("compiled_kernels")
def test_rows_of_the_table(tmp_path):
    folder = make(tmp_path / "toy", **qwen2())
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    files = {}
    for bits in (4, 8):
        files[f"int{bits}"] = tmp_path / f"int{bits}.nook"
        finish(convert(folder, files[f"int{bits}"], Conversion(bits=bits)))
    source, four, eight = quality.measure(folder, files, [text], 128, 2)
    assert (source.kl_mean, source.top1_agreement) == (0, 1)
    assert four.kl_mean > eight.kl_mean > 0
    assert four.bytes < eight.bytes
    assert "| int8 |" in quality.section(folder, [source, four, eight], [text], 128)


def test_sections_replace_those_of_their_name(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "DOCUMENT", tmp_path / "quality.md")
    for text in ("## a\n\nold\n", "## b\n\nb\n", "## a\n\nnew\n"):
        quality.write(text)
    assert (tmp_path / "quality.md").read_text("utf-8") == f"{quality.TITLE}\n## b\n\nb\n\n## a\n\nnew\n"


def test_the_control_has_a_little_noise(tmp_path):
    folder = make(tmp_path / "toy", **qwen2())
    quality.control(folder, tmp_path / "control")
    plain, noisy = open_source(folder), open_source(tmp_path / "control")
    for before, after in zip(plain.assignments, noisy.assignments, strict=True):
        a, b = (source.rows(at, 0, at.tensor.rows) for source, at in ((plain, before), (noisy, after)))
        if before.tensor.role == "vector":
            assert np.array_equal(a, b)
        else:
            assert np.sqrt(np.square(a - b).mean() / np.square(a).mean()) == pytest.approx(quality.NOISE, rel=0.1)
