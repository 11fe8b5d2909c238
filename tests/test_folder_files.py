"""Model folders with files that are none, and names that are no text."""

import os
import sys

import pytest

from engine.convert.folder import find_model, model_name, stored_tensors
from engine.errors import InputError, ModelFolderError
from tests.factory import make


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every file name is text")
def test_a_name_that_is_no_utf_8_is_shown_with_replacement_signs(tmp_path):
    assert model_name(tmp_path / os.fsdecode(b"a\xff")) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes among files")
def test_a_pipe_is_never_waited_for(tmp_path):
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ModelFolderError, match="holds no weights"):
        stored_tensors(folder)
    with pytest.raises(InputError, match="is a pipe"):
        find_model(folder / "model.safetensors")
