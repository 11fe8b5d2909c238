"""The command; see the package."""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tempfile
import time
import warnings
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS, Target

# Nothing that is tried may take this long; then the stack is printed, and the run is over.
_HANG_S = 300


def fuzz(target: Target, inputs: int, seed: int) -> None:
    """Try `inputs` changed files; a failure is shown as the smallest input that shows it.

    Raises:
        AssertionError, Exception: whatever broke the promise
    """
    with tempfile.TemporaryDirectory() as folder:

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=inputs,
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            print_blob=True,
        )
        @hypothesis.given(st.data())
        def run(data: st.DataObject) -> None:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
            target(data, Path(folder))

        run()
    faulthandler.cancel_dump_traceback_later()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="how many files to try, over all targets")
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    names = [arguments.only] if arguments.only else list(TARGETS)
    sys.stdout.write(f"seed {arguments.seed}\n")
    for name in names:
        began_s = time.monotonic()
        fuzz(TARGETS[name], -(-arguments.inputs // len(names)), arguments.seed)
        sys.stdout.write(f"{name}: {-(-arguments.inputs // len(names))} inputs, {time.monotonic() - began_s:.0f} s\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
