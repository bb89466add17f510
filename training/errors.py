"""What can go wrong, as a short tree. Each error says what happened and the way out, and survives pickling.

PolythinkError
├── ConfigError      a configuration that cannot work            (ValueError)
├── DataError        rows that cannot be trained on              (ValueError)
├── ModelError       a base, adapter or checkpoint that is wrong (ValueError)
├── StorageError     a path that is missing, full or in use      (OSError)
├── MergeError       a merge or its proof that failed            (RuntimeError)
└── TrainingError    a worker that failed                        (RuntimeError)
"""

from typing import Any


class PolythinkError(Exception):
    """Base of all errors that are meant for people.

    Args:
        message: what happened, with the offending value.
        hint: the way out, one sentence; empty when there is none.
        field: the dotted path of the configuration or request field at fault, if one is.
    """

    def __init__(self, message: str, *, hint: str = "", field: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.field)

    def as_dict(self) -> dict[str, str | None]:
        """The form in which HTTP answers and `result.json` carry an error."""
        return {"type": type(self).__name__, "message": self.message, "hint": self.hint, "field": self.field}


def _rebuild(cls: type[PolythinkError], message: str, hint: str, field: str | None) -> PolythinkError:
    return cls(message, hint=hint, field=field)


class ConfigError(PolythinkError, ValueError):
    """A configuration that cannot work."""


class DataError(PolythinkError, ValueError):
    """Rows that cannot be trained on; the message is the whole report."""


class ModelError(PolythinkError, ValueError):
    """A base model, adapter or checkpoint that is missing parts or does not fit."""


class StorageError(PolythinkError, OSError):
    """A path that is missing, full, not shared between nodes, or already in use."""


class MergeError(PolythinkError, RuntimeError):
    """A merge that could not be made, or whose proof failed."""


class TrainingError(PolythinkError, RuntimeError):
    """A training worker that failed; the message is the worker's own."""
