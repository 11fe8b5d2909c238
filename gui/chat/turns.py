"""The messages of the conversation that is shown, as a Qt model; views only draw it.

`advance` is how an engine event changes a message: a pure function, so that a
conversation in the background grows by the same rule as the one in view.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from PySide6.QtCore import QAbstractListModel, QModelIndex, QPersistentModelIndex, Qt

from gui.data.store import Message

if TYPE_CHECKING:
    from engine import api

__all__ = ["Activity", "ChatModel", "Turn", "advance", "with_versions"]

Index = QModelIndex | QPersistentModelIndex


@dataclass(frozen=True, slots=True)
class Activity:
    """What is going on before or while text arrives.

    stage: "model" (no model yet), "queue", "prefill", "writing"; done of total tokens where known
    """

    stage: str
    done: int = 0
    total: int = 0
    eta_s: float | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A message as it is shown: what is stored, and what only a running answer has."""

    message: Message
    activity: Activity | None = None
    notices: tuple[str, ...] = ()
    tokens: int = 0  # so far
    begun: int = 0  # characters that were there before this answer began
    version: int = 0  # which of the versions this is, from 0
    versions: int = 1
    unseen: bool = False  # the model does not read it any more

    @property
    def growing(self) -> bool:
        """Still being answered."""
        return self.message.state == "growing"


def advance(turn: Turn, event: api.Event) -> Turn:
    """The turn after an event of its request."""
    from engine import api  # loaded long since: the event came from there

    match event:
        case api.Started():
            return replace(turn, activity=Activity("prefill", event.cached_tokens, event.prompt_tokens))
        case api.Progress(stage="prefill"):
            return replace(turn, activity=Activity("prefill", event.done, event.total, event.eta_s))
        case api.ContextCut() | api.Progress(stage="decode"):
            return turn  # the notices at the end say what was left out
        case api.Progress():
            return replace(turn, activity=Activity(event.stage, event.done, event.total, event.eta_s))
        case api.Delta():
            return replace(
                turn,
                message=replace(turn.message, content=turn.message.content + event.text),
                activity=Activity("writing"),
                tokens=turn.tokens + max(1, len(event.token_ids)),
            )
        case api.Done():
            begun = turn.message.content[: turn.begun]
            facts = _facts(event.usage)
            if begun:
                facts["completion_tokens"] += int(turn.message.facts.get("completion_tokens", 0))
            message = replace(turn.message, content=begun + event.text, state="done", reason=event.reason, facts=facts)
            return replace(turn, message=message, activity=None, notices=event.notices)
        case api.Failed():
            content = turn.message.content or event.text
            facts = {"error": event.kind}
            if event.needed_tokens:
                facts |= {"needed_tokens": event.needed_tokens, "context_tokens": event.context_tokens}
            message = replace(turn.message, content=content, state="failed", reason=event.message, facts=facts)
            return replace(turn, message=message, activity=None)


def with_versions(turn: Turn, siblings: Mapping[tuple[str | None, str], Sequence[str]]) -> Turn:
    """The turn, knowing which of how many versions it is."""
    same = siblings.get((turn.message.parent, turn.message.role), ())
    if turn.message.id not in same:
        return turn
    return replace(turn, version=same.index(turn.message.id), versions=len(same))


def _facts(usage: api.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_s": round(usage.queue_s, 4),
        "prefill_s": round(usage.prefill_s, 4),
        "decode_s": round(usage.decode_s, 4),
        "decode_tps": round(usage.decode_tps, 3),
        "prefill_tps": round(usage.prefill_tps, 3),
    }


class ChatModel(QAbstractListModel):
    """The turns in view, in order."""

    TurnRole = Qt.ItemDataRole.UserRole

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []

    def rowCount(self, parent: Index = QModelIndex()) -> int:  # noqa: B008 (Qt's signature)
        """One row per turn."""
        return 0 if parent.isValid() else len(self.turns)

    def data(self, index: Index, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """The text of a turn, or the turn itself."""
        if role == Qt.ItemDataRole.DisplayRole:
            return self.turns[index.row()].message.content
        return self.turns[index.row()] if role == self.TurnRole else None

    def show(self, turns: Sequence[Turn]) -> None:
        """Show another conversation."""
        self.beginResetModel()
        self.turns = list(turns)
        self.endResetModel()

    def append(self, turn: Turn) -> None:
        """A turn is added at the end."""
        row = len(self.turns)
        self.beginInsertRows(QModelIndex(), row, row)
        self.turns.append(turn)
        self.endInsertRows()

    def cut(self, row: int) -> None:
        """The turns from `row` on are no longer part of the branch in view."""
        if row < len(self.turns):
            self.beginRemoveRows(QModelIndex(), row, len(self.turns) - 1)
            del self.turns[row:]
            self.endRemoveRows()

    def renumber(self, siblings: Mapping[tuple[str | None, str], Sequence[str]]) -> None:
        """Say of each turn which of how many versions it is."""
        for row, turn in enumerate(self.turns):
            numbered = with_versions(turn, siblings)
            if numbered != turn:
                self.turns[row] = numbered
                self.dataChanged.emit(self.index(row), self.index(row))

    def mark_unseen(self, unseen: Collection[str]) -> None:
        """Say which messages the model does not read any more."""
        for row, turn in enumerate(self.turns):
            if turn.unseen != (turn.message.id in unseen):
                self.turns[row] = replace(turn, unseen=not turn.unseen)
                self.dataChanged.emit(self.index(row), self.index(row))

    def put(self, turn: Turn) -> None:
        """Replace the turn of the same identity, if it is in view."""
        for row in range(len(self.turns) - 1, -1, -1):
            if self.turns[row].message.id == turn.message.id:
                known = self.turns[row]
                self.turns[row] = replace(turn, version=known.version, versions=known.versions, unseen=known.unseen)
                self.dataChanged.emit(self.index(row), self.index(row))
                return
