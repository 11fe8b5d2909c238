"""Answers in a terminal: one for `run`, a conversation for `chat`.

The main thread waits for the engine's events in a queue; the engine works on
its own thread.
"""

from __future__ import annotations

import os
import queue
import sys
import uuid
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from engine import api, errors
from engine.api import Delta, Done, Event, Failed, Loaded, LoadedModel, Message, Overflow, Progress, Request, Sampling
from engine.cli.flags import overlay
from engine.cli.output import ProgressView, note, write, write_json
from engine.errors import InglenookError, InputError, InternalError
from engine.settings import EngineSettings

__all__ = ["Session", "answer_once", "argument_text", "converse", "read_prompt"]

_HELP = """\
/system TEXT  begin anew with TEXT as the instruction (without TEXT: with none)
/reset        begin anew
/exit         leave, as does Ctrl+D
Ctrl+C        stop the answer
A line that ends with \\ goes on in the next one.
"""


class Session:
    """An engine with one model, for the length of a `with` block.

    overflow: what happens to conversations longer than the context.
    """

    def __init__(self, model: str, settings: EngineSettings, overflow: Overflow = "stop") -> None:
        self._model = model
        self._settings = settings
        self._overflow = overflow
        self._events: queue.Queue[Event | Loaded] = queue.Queue()
        self._engine = api.Engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.close()

    def load(self) -> LoadedModel:
        """Load the model, showing progress.

        Raises:
            InglenookError: it cannot be loaded; says why
        """
        self._engine.load(api.resolve_model(self._model), self._settings, self._events.put)
        with ProgressView() as view:
            while True:
                match self._next():
                    case Progress() as progress:
                        view.show(progress)
                    case Loaded(model=loaded):
                        for notice in loaded.notices:
                            note(notice)
                        return loaded
                    case Failed() as failed:
                        raise _error(failed)

    def answer(
        self, prompt: tuple[Message, ...] | str, sampling: Sampling, *, stream: bool = True
    ) -> Generator[Delta | Done, None, None]:
        """The pieces of an answer as they come, then `Done`; the progress of the prompt is shown meanwhile.

        Closing the generator before its end stops the answer in the engine.

        Raises:
            InglenookError: the answer failed; says why
        """
        request = Request(uuid.uuid4().hex, prompt, sampling, stream=stream, overflow=self._overflow)
        self._engine.submit(request, self._events.put)
        ended = False
        try:
            with ProgressView() as view:
                while not ended:
                    match self._next():
                        case Progress() as progress if not (stream and progress.stage == "decode"):
                            view.show(progress)
                        case Delta() as delta:
                            view.clear()
                            yield delta
                        case Done() as done:
                            ended = True
                            view.clear()
                            yield done
                        case Failed() as failed:
                            ended = True
                            raise _error(failed)
        finally:
            if not ended:
                self._engine.cancel(request.id)
                while not isinstance(self._next(), Done | Failed):
                    pass

    def _next(self) -> Event | Loaded:
        while True:
            try:
                # Windows delivers Ctrl+C only between waits.
                return self._events.get(timeout=0.1)
            except queue.Empty:
                continue


def answer_once(
    session: Session, prompt: str, given: Sampling, *, raw: bool, system: str | None, stream: bool, as_json: bool
) -> None:
    """Load, answer one prompt, write the answer.

    raw: the prompt goes to the model as it stands, without its chat template.
    """
    if raw and system is not None:
        raise InputError("--system needs the chat template, which --raw leaves out; give one of the two")
    loaded = session.load()
    messages: tuple[Message, ...] | str = prompt if raw else (*_system_message(system), Message("user", prompt))
    sampling = overlay(loaded.defaults, given)
    written = 0
    try:
        with closing(session.answer(messages, sampling, stream=stream and not as_json)) as events:
            for event in events:
                if isinstance(event, Delta):
                    written += len(event.text)
                    write(event.text)
                elif as_json:
                    write_json(_answer_json(loaded, event))
                else:
                    write(event.text[written:] + ("" if event.text.endswith("\n") else "\n"))
                    _tell_end(event)
    except (InglenookError, KeyboardInterrupt):
        if written:
            write("\n")  # what came stays a line of its own
        raise


def converse(session: Session, given: Sampling, *, system: str | None) -> None:
    """Load, then answer line by line until the input ends or says /exit."""
    loaded = session.load()
    interactive = sys.stdin.isatty()
    if interactive:
        note(f"{loaded.name} ({loaded.format}), {loaded.context:,} tokens of context. /help lists the commands.")
        _enable_line_editing()
    sampling = overlay(loaded.defaults, given)
    start = history = _system_message(system)
    for line in _lines(interactive=interactive):
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                note(_HELP.rstrip())
            case "/reset":
                history = start
            case "/system":
                start = history = _system_message(argument.strip() or None)
            case _ if command.startswith("/") and command[1:].isalpha() and not argument:
                note(f"{command} is not a command; /help lists them")
            case _:
                history = _turn(session, (*history, Message("user", line)), sampling)


def read_prompt(prompt: str) -> str:
    """`-` reads standard input; anything else is the prompt itself.

    Raises:
        InputError: the input is not UTF-8
    """
    if prompt != "-":
        return argument_text(prompt)
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start}); convert it first"
        ) from None


def argument_text(argument: str) -> str:
    """An argument as its bytes say in UTF-8, whatever the locale made of them; never with half characters."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument.encode(errors="replace").decode()


def _turn(session: Session, history: tuple[Message, ...], sampling: Sampling) -> tuple[Message, ...]:
    """Answer the last message of `history`; returns the history to go on with."""
    text = ""
    try:
        with closing(session.answer(history, sampling)) as events:
            for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    write(event.text)
                else:
                    write(event.text[len(text) :] + "\n")
                    text = event.text
                    _tell_end(event)
    except KeyboardInterrupt:
        write("\n")
        note("(stopped)")
    except InputError as error:
        note(f"{error} (/reset begins anew)")
        return history[:-1]
    # An answer that was stopped counts as far as it got; one that never began leaves no trace.
    return (*history, Message("assistant", text)) if text else history[:-1]


def _lines(*, interactive: bool) -> Iterator[str]:
    """Lines of input until its end. Ctrl+C at an interactive prompt drops the line."""
    while True:
        try:
            line = _line(interactive=interactive)
            while line.endswith("\\"):
                line = line[:-1] + "\n" + _line(interactive=interactive)
        except EOFError:
            if interactive:
                write("\n")
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            write("\n")
            continue
        yield line


def _line(*, interactive: bool) -> str:
    if interactive:
        return input("> ")
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _enable_line_editing() -> None:
    """Arrow keys and the history of this session, where the system has them. Nothing is kept on disk."""
    with suppress(ImportError):
        import readline  # noqa: F401  # importing it is what switches `input` over


def _system_message(text: str | None) -> tuple[Message, ...]:
    return () if text is None else (Message("system", text),)


def _tell_end(done: Done) -> None:
    """What a person should know of the end of an answer; speed on a terminal only."""
    for notice in done.notices:
        note(notice)
    if done.reason == "context":
        note("(the answer ended because the context is full)")
    if sys.stderr.isatty():
        cut = ", cut there by --max-tokens" if done.reason == "length" else ""
        note(f"({done.usage.completion_tokens} tokens, {done.usage.decode_tps:.1f} per second{cut})")


def _answer_json(loaded: LoadedModel, done: Done) -> dict[str, Any]:
    usage = done.usage
    return {
        "model": loaded.name,
        "text": done.text,
        "finish_reason": done.reason,
        "token_ids": list(done.token_ids),
        "usage": {**asdict(usage), "decode_tps": usage.decode_tps, "prefill_tps": usage.prefill_tps},
        "notices": list(done.notices),
    }


def _error(failed: Failed) -> InglenookError:
    """The exception for a failure that came as an event: its exit code counts, its class has done its work."""
    kind = getattr(errors, failed.kind, InternalError)
    return InputError(failed.message) if kind.exit_code == InputError.exit_code else InternalError(failed.message)
