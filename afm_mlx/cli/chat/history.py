"""What was typed, kept between chats in a private file; nothing that is wrong with the file stops a chat."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import FileHistory, History, InMemoryHistory

from afm_mlx.kernels import settings

SWITCH = settings.HISTORY
"""0 in this environment variable keeps nothing between chats."""
MAX_BYTES = 1 << 20
"""The largest file; when a chat begins with a larger one, its older half is dropped."""


def open_history() -> History:
    """The history in the user's state folder, or one in memory where there can't be a file."""
    if not settings.is_on(SWITCH):
        return InMemoryHistory()
    try:
        path = _state_folder() / "chat-history"
        _make_ready(path)
    except (OSError, RuntimeError):  # the latter where there is no home folder
        return InMemoryHistory()
    return _PrivateHistory(path)


class _PrivateHistory(FileHistory):
    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):  # the disk may be full, the folder gone
            super().store_string(string)


def _state_folder() -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # others are to be ignored
        return given / "afm-mlx"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "afm-mlx"
    return Path.home() / ".local" / "state" / "afm-mlx"


def _make_ready(path: Path) -> None:
    """Make the file where there is none, let nobody else read it, and shorten it past `MAX_BYTES`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Opening a pipe would wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file")
        os.fchmod(file.fileno(), 0o600)
        if os.fstat(file.fileno()).st_size <= MAX_BYTES:
            return
        file.seek(-MAX_BYTES // 2, os.SEEK_END)
        newest = file.read().partition(b"\n\n")[2]  # from the first whole entry on
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(newest)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
