"""Runs one command and ends as a well-behaved program does: exit codes, sentences, signals, encodings.

0 success; 2 the input or the usage is at fault; 1 the machine or we are;
130 and 143 stopped by a person or the system; 141 nobody reads the output.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import TimedRotatingFileHandler
from pathlib import Path
from types import FrameType

from cyclopts import CycloptsError, UnusedCliTokensError

from engine import api
from engine.cli.commands import app
from engine.cli.output import note
from engine.errors import InglenookError, InputError

__all__ = ["main"]

_log = logging.getLogger("inglenook")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` when None) and return the exit code; prints errors, never raises them."""
    _speak_utf8()
    with _logging_to_file() as log_path, _ended_by_sigterm():
        try:
            return _run(sys.argv[1:] if arguments is None else list(arguments))
        except BrokenPipeError:
            _drop_output()
            return 141
        except KeyboardInterrupt:
            _say("stopped")
            return 130
        except Exception as error:  # noqa: BLE001  # the one handler of this face
            _log.exception("The command failed")
            where = f"; details: {log_path}" if log_path else ""
            _say(f"{_reason(error)}{where}")
            return 1


def _run(arguments: list[str]) -> int:
    try:
        result = app(arguments)
    except UnusedCliTokensError as error:
        _say(f"nothing expects {' '.join(error.unused_tokens or [])}; see --help")
        return InputError.exit_code
    except CycloptsError as error:
        _say(str(error))
        return InputError.exit_code
    except InglenookError as error:
        _log.info("The command ended", exc_info=True)
        _say(str(error))
        return error.exit_code
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _say(sentence: str) -> None:
    # When nobody listens, the exit code still speaks.
    with suppress(OSError):
        note(f"inglenook: {sentence}")


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "the memory is full"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"internal error ({': '.join(filter(None, (type(error).__name__, str(error))))})"


def _speak_utf8() -> None:
    """UTF-8 on any locale. What cannot be written, half a surrogate pair, becomes a question mark."""
    if sys.stdin is None:  # what Python has in place of a stream that was closed at start
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115  # open to the end of the program
    if sys.stdout is None or sys.stderr is None:
        nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  # open to the end of the program
        sys.stdout = sys.stdout or nowhere
        sys.stderr = sys.stderr or nowhere
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")


@contextmanager
def _logging_to_file() -> Iterator[Path | None]:
    """Log beside the window's logs, a file a day for a week; gives None when the folder cannot be made."""
    try:
        path = api.log_folder() / "command-line.log"
    except OSError:
        yield None
        return
    handler = _LogFile(path, when="midnight", backupCount=7, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield path
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # what it still buffers when the drive is full
            handler.close()


class _LogFile(TimedRotatingFileHandler):
    """A log that cannot be written is silent: standard error belongs to the command."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Nothing."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that half-written files are removed."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        sys.exit(143)

    previous = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _drop_output() -> None:
    """Send what is still buffered nowhere; flushing it at exit would fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
