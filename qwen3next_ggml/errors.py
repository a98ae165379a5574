"""Every error this package raises on purpose, and the one check that every room makes (level 0).

`QGraphError` is what the command line shows as one line; anything else that escapes is a bug and shows its traceback.
"""

from numbers import Integral


class QGraphError(Exception):
    """Base of all errors meant for a user; never raised itself."""


class GgufError(QGraphError):
    """A file is not a GGUF, or lies about its own content."""


class UnsupportedModelError(QGraphError):
    """A well-formed file holds an architecture or layout that has no graph here."""


class TensorError(QGraphError):
    """A tensor is missing, has the wrong shape, or has a type that cannot be used."""


class GraphError(QGraphError):
    """A node cannot be built from these operands."""


class BackendError(QGraphError):
    """A provider, device, buffer or computation failed."""


class Aborted(BackendError):
    """A computation was stopped on request before it finished."""


class StateError(QGraphError):
    """A sequence cannot be brought into the state asked for; it was left as it was."""


class ContextFull(StateError):
    """The session has no cell left for the tokens handed in; it was left as it was."""


class NonFinite(QGraphError):
    """A computation produced NaN or infinity where a number was needed."""


class OptionError(QGraphError, ValueError):
    """An argument has a value that means nothing."""


def check_count(name: str, value: object, low: int) -> None:
    """Raise OptionError unless an argument is a whole number from `low` on."""
    if not isinstance(value, Integral):
        raise OptionError(f"{name} is {value!r}, expected a whole number")
    if value < low:
        raise OptionError(f"{name} must be at least {low}, got {value}")
