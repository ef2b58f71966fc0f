"""Errors that the user can mend.

Each message says what is wrong, what was got, what is allowed and what to do next. The command line
prints it on one line and exits with status 2; everything else that is raised is a defect of ours.
"""

from __future__ import annotations

from typing import Any

SHOWN = 200
"""Characters of a value that an error quotes."""


def shown(value: Any) -> str:
    """`repr(value)` for an error's message, cut in the middle to `SHOWN` characters.

    Values come from files and callers, and may be of any size. A value that can't be written out (an integer of
    thousands of digits, a deep nesting) is named by its type.
    """
    try:
        # A long string's repr is as long; its ends are all that will be seen.
        text = repr(value if not isinstance(value, str | bytes) else _ends(value))
    except (ValueError, RecursionError):
        return f"a {type(value).__name__} too large to be shown"
    return _ends(text)


def _ends(text: Any) -> Any:
    if len(text) <= SHOWN:
        return text
    dots = "..." if isinstance(text, str) else b"..."
    return text[: SHOWN * 3 // 4] + dots + text[len(text) - SHOWN // 4 + 3 :]


class AFMError(ValueError):
    """Something the caller got wrong, or a file that can't be used."""


class ConfigError(AFMError):
    """An architecture description with unknown, missing or contradictory keys."""


class CheckpointError(AFMError):
    """A weight file that is missing, damaged, unsafe, or of another shape."""


class TokenizerError(AFMError):
    """Tokenizer files or chat messages that can't be used."""


class ContextLengthError(AFMError):
    """More tokens than the context, or the cache, holds."""


class CacheFileError(AFMError):
    """A prompt cache file that is damaged or belongs to another model or adapter."""


class RequestError(AFMError):
    """A generation request that can't be honoured as it was asked."""


class LogitsError(AFMError):
    """Logits from which no token can be chosen: NaN, infinite, or none left."""


class DataError(AFMError):
    """A data file with a line that can't be used."""


class TrainingError(AFMError):
    """A training run that can't go on, or a run folder that can't be continued."""
