"""Every error a person can meet, as one tree; knows nothing of who shows it."""

from __future__ import annotations

__all__ = [
    "BusyError",
    "ContextOverflowError",
    "FileDamagedError",
    "InglenookError",
    "InputError",
    "InternalError",
    "ModelFolderError",
    "OutOfSpaceError",
    "ResourceError",
    "SettingError",
    "TemplateError",
    "UnsupportedModelError",
]


class InglenookError(Exception):
    """Base of all. `str(error)` is one sentence: what is wrong, where, what to do.

    `exit_code` is what a command ends with: 2 when the input or usage is at
    fault, 1 when the machine or we are.
    """

    exit_code = 1


class InputError(InglenookError):
    """What was given cannot be used: a path, an argument, a file's content."""

    exit_code = 2


class ModelFolderError(InputError):
    """A model folder or source file is incomplete, contradictory or damaged."""


class UnsupportedModelError(InputError):
    """The model is sound, but asks for something Inglenook does not do (named)."""


class FileDamagedError(InputError):
    """A `.nook` file is truncated, altered or of another version."""


class TemplateError(InputError):
    """A chat template cannot be rendered for this conversation."""


class SettingError(InputError):
    """A setting or request parameter is outside its documented range."""


class ContextOverflowError(InputError):
    """A prompt does not fit the context; carries both numbers.

    Attributes:
        needed_tokens: tokens the request needs
        context_tokens: tokens there are
    """

    def __init__(self, message: str, *, needed_tokens: int, context_tokens: int) -> None:
        super().__init__(message)
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens


class ResourceError(InglenookError):
    """The machine lacks something: memory, a permission, a system library."""


class BusyError(ResourceError):
    """As many requests as are taken are on their way already.

    Attributes:
        retry_s: when one of them will probably have ended
    """

    def __init__(self, message: str, *, retry_s: float) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class OutOfSpaceError(ResourceError):
    """The disk is, or would become, full; nothing half-written is left."""


class InternalError(InglenookError):
    """Our own fault; the log says more."""
