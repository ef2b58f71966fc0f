"""Errors that the user can fix.

Each message says what is wrong, what was got, what is allowed and what to do next. The command line
prints it on one line and exits with status 2; any other exception is a defect of afm-mlx.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHOWN = 200
"""Maximum characters of a value that an error quotes."""
MESSAGE = 1100
"""Maximum characters of a message."""


def shown(value: Any) -> str:
    """Return `repr(value)` for an error's message, cut in the middle to `SHOWN` characters.

    A value without a repr, such as an integer of thousands of digits or a deep nesting, is named by its type.
    """
    try:
        # A long string's repr is as long, and only its ends are shown.
        text = repr(value if not isinstance(value, str | bytes) else _ends(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to be shown"
    return _ends(text)


def named(name: str) -> str:
    """Return a name from a file for an error's message: unchanged if printable and short, else `shown`."""
    return name if len(name) <= SHOWN and name.isprintable() else shown(name)


def reason_of(error: BaseException) -> str:
    """Return an error's message in one line; for OSError without number and path."""
    message = (isinstance(error, OSError) and error.strerror) or str(error)
    return " ".join(message.split()) or type(error).__name__


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` for the known name most similar to `name`; empty if none is similar."""
    import difflib

    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _ends(text: Any, limit: int = SHOWN) -> Any:
    if len(text) <= limit:
        return text
    dots = "..." if isinstance(text, str) else b"..."
    return text[: limit * 3 // 4] + dots + text[len(text) - limit // 4 + 3 :]


def bounded(message: str) -> str:
    return _ends(message, MESSAGE)


class AFMError(ValueError):
    """A mistake of the caller, or a file that can't be used; its message is cut by `bounded`."""

    def __init__(self, message: str = ""):
        super().__init__(bounded(message))


class ConfigError(AFMError):
    """An architecture description with unknown, missing or contradictory keys."""


class CheckpointError(AFMError):
    """A weight file that is missing, damaged, unsafe, or has other shapes."""


class TokenizerError(AFMError):
    """Tokenizer files or chat messages that can't be used."""


class ContextLengthError(AFMError):
    """More tokens than the context or the cache can hold."""


class CacheFileError(AFMError):
    """A prompt cache file that is damaged or belongs to another model or adapter."""


class RequestError(AFMError):
    """A request that can't be honoured."""


class ImageError(RequestError):
    """A picture that can't be read: damaged, too large, or in another format."""


class ConstraintError(AFMError):
    """A constraint that can't be honoured, or an answer that could not be completed."""


class IncompleteError(ConstraintError):
    """An answer that ended before its constraint was met.

    Args:
        message: see `AFMError`.
        text: the text so far.
    """

    def __init__(self, message: str = "", text: str = ""):
        super().__init__(message)
        self.text = text


class LogitsError(AFMError):
    """Logits from which no token can be chosen: NaN, infinite, or all masked."""


class EmbeddingError(AFMError):
    """Hidden states of which no vector can be made: NaN, infinite, or all zeros."""


class DataError(AFMError):
    """Training data that can't be used: a bad line, a missing or empty split, or bad options for reading it."""


class RewardError(AFMError):
    """A reward that can't be computed: an unknown name, code that raises, or a value that is no number."""


class TrainingError(AFMError):
    """A training run that can't go on, or a run folder that can't be resumed."""
