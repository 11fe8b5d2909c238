"""A conversation to a prompt, by the chat template that came with the model.

The template is a stranger's program and runs in a sandbox. What it writes is
told apart from what people said, so that the tokenizer can recognise control
tokens in the one and never in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from threading import Lock
from typing import Any

import jinja2

from engine.errors import InputError, TemplateError
from engine.text.files import Files, chat_templates, special_tokens
from engine.text.provenance import Text, joined, spans_of
from engine.text.sandbox import ExhaustedError, RaisedError, Sandbox
from engine.text.tokenizer import Piece

__all__ = ["ROLES", "ChatTemplate", "Message", "repaired"]

Message = Mapping[str, Any]
Turn = dict[str, Any]  # a message whose content is one string

ROLES = ("system", "user", "assistant", "tool")
_LONGEST_SOURCE = 1 << 18
_LONGEST_REASON = 300
# Stands between messages that are put together, and between all of them when there is no template.
_GAP = "\n\n"
_PROBE = ("Marram 417", "Quillwort 902", "Sedge 538", "Yarrow 261")


class ChatTemplate:
    """How a model wants a conversation written down.

    completion: there is no usable template; what was said is simply put
        together, for a model that goes on with any text. The ids of such a
        prompt want the tokenizer's special tokens around them.
    notices: sentences on what was found wanting.
    accepts_system: a system message reaches the model.
    sources: the templates as they are written.
    after_answer: what the template writes between an answer and the next
        message; it usually begins with the token that ends an answer.
    """

    def __init__(self, sources: Mapping[str, str], variables: Mapping[str, str]) -> None:
        """Compile `sources`, templates by name of which "default" is one, and try them on a conversation.

        variables: what templates may ask for by name, such as `bos_token`.

        Raises:
            TemplateError: the default one does not compile, or refuses every conversation
        """
        self.notices: tuple[str, ...] = ()
        self.sources = tuple(sources.values())
        self.completion = not sources
        self.accepts_system = True
        self.after_answer = ""
        self._lock = Lock()
        self._variables = variables
        self._sandbox = Sandbox()
        self._wants_parts = False
        self._templates = {name: self._compiled(source) for name, source in sources.items()}
        if sources:
            self._probe()

    @classmethod
    def from_files(cls, files: Files) -> ChatTemplate:
        """The chat template among `files`, bytes by name; `none()` with a notice when none can be used.

        Raises:
            ModelFolderError: tokenizer_config.json is damaged
        """
        sources = chat_templates(files)
        if not sources:
            return cls.none("this model has no chat template: it goes on with the text as it stands")
        if "default" not in sources:
            names = ", ".join(sorted(sources))[:_LONGEST_REASON]
            return cls.none(
                f"this model's chat templates ({names}) are for special uses: it goes on with the text only"
            )
        used = {name: source for name, source in sources.items() if name in {"default", "tool_use"}}
        try:
            return cls(used, special_tokens(files))
        except TemplateError as error:
            return cls.none(f"{error}: the model goes on with the text as it stands")

    @classmethod
    def none(cls, notice: str = "") -> ChatTemplate:
        """Plain completion."""
        template = cls({}, {})
        template.notices = (notice,) if notice else ()
        return template

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 - the reference's signature
        *,
        started: datetime | None = None,
        **variables: Any,
    ) -> list[Piece]:
        """The prompt in pieces, neighbours of which are of different kinds.

        messages: each with `role`, one of `ROLES`, and `content`: a string,
            None, or a list of text parts. Other keys go to the template.
        started: the time that a template is told when it asks, now if None;
            within one conversation it should not change, so that its prompts
            begin alike.
        variables: further ones for the template, such as `enable_thinking`
            or `tools`; strings in them count as content.

        Raises:
            InputError: the messages are malformed, or hold more than text
            TemplateError: the template refuses them, in its own words, or fails
        """
        if not messages:
            raise InputError("the conversation has no messages")
        turns = [_marked_turn(_checked(number, message)) for number, message in enumerate(messages, 1)]
        if self.completion:
            parts = [part for turn in turns if turn["content"] for part in (_GAP, turn["content"])]
            return _pieces(joined(parts[1:]))
        if self._wants_parts:
            turns = [turn | {"content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        given: dict[str, Any] = {"tools": None, "documents": None, **self._variables}
        given |= {name: _marked(value) for name, value in variables.items()}
        given |= {"messages": turns, "add_generation_prompt": add_generation_prompt}
        name = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        with self._lock:
            text = self._run(self._templates[name], given, started or datetime.now().astimezone())
        return _pieces(text)

    def apply(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 - the reference's signature
        *,
        started: datetime | None = None,
        **variables: Any,
    ) -> str:
        """The prompt as one string; see `render`."""
        pieces = self.render(messages, add_generation_prompt, started=started, **variables)
        return "".join(piece.text for piece in pieces)

    def _compiled(self, source: str) -> jinja2.Template:
        if len(source) > _LONGEST_SOURCE:
            raise TemplateError(f"the chat template has {len(source)} characters, and none is that long")
        try:
            return self._sandbox.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is wrong in line {error.lineno} ({_reason(error)})") from None
        except Exception as error:  # noqa: BLE001 - a stranger's program fails as it likes
            raise TemplateError(f"the chat template cannot be read ({_reason(error)})") from None

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any], started: datetime) -> Text:
        try:
            return self._sandbox.render(template, variables, started)
        except RaisedError as error:
            raise TemplateError(f"the chat template refuses this conversation ({_reason(error)})") from None
        except ExhaustedError as error:
            raise _HopelessError(f"the chat template was stopped ({error})") from None
        except RecursionError:
            raise _HopelessError("the chat template was stopped (it calls itself without end)") from None
        except Exception as error:  # noqa: BLE001 - as above
            raise TemplateError(f"the chat template fails on this conversation ({_reason(error)})") from None

    def _probe(self) -> None:
        """Learn from a four-turn conversation what the template does with content."""
        first, answer, second, system = _PROBE
        turns = [_turn("user", first), _turn("assistant", answer), _turn("user", second)]
        try:
            text = self.apply(turns)
        except _HopelessError:
            raise
        except TemplateError:
            self._wants_parts = True
            text = self.apply(turns)
        if second not in text and not self._wants_parts:
            self._wants_parts = True
            text = self.apply(turns)
        if second not in text:
            raise TemplateError("the chat template leaves out what the user says")
        _, found, rest = text.partition(answer)
        self.after_answer = rest.partition(second)[0] if found else ""
        try:
            self.accepts_system = system in self.apply([_turn("system", system), *turns])
        except _HopelessError:
            raise
        except TemplateError:
            self.accepts_system = False


class _HopelessError(TemplateError):
    """Another arrangement of the messages would not help."""


def repaired(messages: Sequence[Message], template: ChatTemplate) -> tuple[list[Message], tuple[str, ...]]:
    """A conversation that `template` takes, made of `messages`, and what was changed.

    Answers that were stopped before their first word are left out, and a
    system message goes before the first user message when the template has no
    place for it. If the template still refuses, neighbours of one role are
    joined, then later system messages moved, then an empty user message put
    before an answer that comes first. `messages` itself stays as it is.

    Raises:
        InputError: the messages are malformed, or there are none
        TemplateError: the template refuses them in every arrangement
    """
    turns = [_checked(number, message) for number, message in enumerate(messages, 1)]
    notices: list[str] = []

    def changed(repair: Callable[[list[Turn]], list[Turn]], notice: str) -> bool:
        nonlocal turns
        before, turns = turns, repair(turns)
        if turns != before and notice not in notices:
            notices.append(notice)
        return turns != before

    join = (_neighbours_joined, "messages in a row from the same side were joined")
    move = (_system_in_user, "this model has no place for a system prompt, so it was put before the first message")
    begin = (
        _begun_by_user,
        "an empty message was put before the first answer, because this model's template wants one",
    )
    if changed(_empty_answers_dropped, "an empty answer was left out"):
        changed(*join)
    if not template.accepts_system:
        changed(*move)
    for repair in (join, move, join, begin):
        try:
            template.render(turns)
        except _HopelessError:
            raise
        except TemplateError:
            changed(*repair)
        else:
            return list(turns), tuple(notices)
    template.render(turns)
    return list(turns), tuple(notices)


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _empty_answers_dropped(turns: list[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn["role"] != "assistant" or turn["content"].strip() or len(turn) > 2]


def _system_in_user(turns: list[Turn]) -> list[Turn]:
    system = _GAP.join(turn["content"] for turn in turns if turn["role"] == "system")
    others = [turn for turn in turns if turn["role"] != "system"]
    if len(others) == len(turns):
        return turns
    first = next((number for number, turn in enumerate(others) if turn["role"] == "user"), None)
    if first is None:
        return [_turn("user", system), *others]
    told = _GAP.join(text for text in (system, others[first]["content"]) if text)
    return [*others[:first], others[first] | {"content": told}, *others[first + 1 :]]


def _neighbours_joined(turns: list[Turn]) -> list[Turn]:
    result: list[Turn] = []
    for turn in turns:
        # Turns with more than role and content, such as calls of tools, stay apart.
        if (
            result
            and turn["role"] == result[-1]["role"]
            and turn["role"] != "tool"
            and len(turn) == len(result[-1]) == 2
        ):
            result[-1] = _turn(turn["role"], _GAP.join((result[-1]["content"], turn["content"])))
        else:
            result.append(turn)
    return result


def _begun_by_user(turns: list[Turn]) -> list[Turn]:
    first = next((number for number, turn in enumerate(turns) if turn["role"] != "system"), None)
    if first is None or turns[first]["role"] == "user":
        return turns
    return [*turns[:first], _turn("user", ""), *turns[first:]]


def _checked(number: int, message: Any) -> Turn:
    """A message with `content` as one string and without keys that are null.

    Raises:
        InputError: it is malformed, or holds more than text
    """
    if not isinstance(message, Mapping):
        raise InputError(f"message {number} is not an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"message {number} has the role {str(role)[:40]!r}; there are {', '.join(ROLES)}")
    others = {key: value for key, value in message.items() if value is not None and key not in {"role", "content"}}
    return _turn(role, _content(number, message.get("content"))) | others


def _content(number: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InputError(f"the content of message {number} is neither a text nor a list of parts")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise InputError(f"message {number} holds a part of the type {str(kind)[:40]!r}; this model is text-only")
        if not isinstance(part.get("text"), str):
            raise InputError(f"message {number} holds a text part without text")
        texts.append(part["text"])
    return "".join(texts)


def _marked_turn(turn: Turn) -> Turn:
    # Roles are one of four words; templates make control tokens of them.
    return {key: value if key == "role" else _marked(value) for key, value in turn.items()}


def _marked(value: Any) -> Any:
    """A value for the template, made of plain data in which every string counts as content."""
    if isinstance(value, str):
        return Text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {_marked(key): _marked(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item) for item in value]
    raise InputError(f"a {type(value).__name__} cannot be given to a chat template")


def _pieces(text: Text) -> list[Piece]:
    pieces: list[Piece] = []
    plain, position = str.__getitem__(text, slice(None)), 0
    for begin, end in spans_of(text):
        if begin > position:
            pieces.append(Piece(plain[position:begin], is_content=False))
        pieces.append(Piece(plain[begin:end], is_content=True))
        position = end
    if position < len(plain):
        pieces.append(Piece(plain[position:], is_content=False))
    return pieces


def _reason(error: Exception) -> str:
    """What an exception says, on one line and not too long."""
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
