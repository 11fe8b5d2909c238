"""The conversation as it is read."""

from gui.chat.transcript.texts import Cell, CopyButton
from gui.chat.transcript.view import Transcript

__all__ = ["Cell", "CopyButton", "Transcript"]
