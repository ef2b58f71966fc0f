"""What commands say of arguments that can't be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from afm_mlx.errors import AFMError, shown


class UsageError(AFMError):
    """Arguments that can't be used."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the name that is most like what was given, else nothing."""
    close = difflib.get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def check_text(where: str, value: Any) -> None:
    """Refuse texts that file systems, tokenizers and terminals don't take, in lists and maps too.

    Raises:
        UsageError: for a NUL, or half of a surrogate pair, as which Python holds bytes of the command line that
            are no UTF-8.
    """
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            check_text(where, item)
    elif isinstance(value, str):
        if "\0" in value:
            raise UsageError(f"{where} has a NUL character in {shown(value)}; leave it out.")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{where} is not valid UTF-8: {shown(value)}. Give it in UTF-8; a file may have to be renamed."
            ) from None
