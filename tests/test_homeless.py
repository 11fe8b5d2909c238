"""Without a home that can be written the starter answers, and the window opens and says what is not kept."""

from __future__ import annotations

import pytest

from engine import api
from engine.folders import library_folder
from gui import app


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    """A data folder that cannot be made by anybody: a file stands where it would be."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.usefixtures("no_home")
def test_the_library_is_empty_and_the_starter_is_found(monkeypatch, tmp_path):
    (tmp_path / "models").mkdir()
    starter = tmp_path / "models" / "small.nook"
    starter.touch()
    monkeypatch.setattr("engine.api.starter_folder", lambda: tmp_path / "models")
    assert not library_folder().exists()
    assert api.library_models(broken=True) == ()
    assert api.resolve_model("starter") == starter


@pytest.mark.usefixtures("no_home")
def test_the_window_keeps_nothing_and_says_so(qtbot, tmp_path):
    folders = app._folders()
    assert folders.data.parent == tmp_path
    assert folders.missing is not None
    window = app.create_window(engine_factory=lambda: None, folders=folders)
    qtbot.addWidget(window)
    said = [window._banners.itemAt(index).widget().text.text() for index in range(window._banners.count())]
    assert any("Conversations of this session are not kept" in sentence for sentence in said)
    window.close()
    assert app.finish(window)
