"""A short run of `tests/fuzz`: the same promises, some dozens of inputs each."""

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_changed_files_end_in_one_sentence(name):
    fuzz(TARGETS[name], 25, seed=1)
