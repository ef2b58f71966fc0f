"""What commands say of arguments that can't be used."""

from __future__ import annotations

from typing import Any

from afm_mlx.errors import AFMError, shown


class UsageError(AFMError):
    """Arguments that can't be used."""


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
