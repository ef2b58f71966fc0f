"""Locks on files, which end with the process that holds them.

The operating system keeps the lock (`flock`, which NFS shares between machines), so a killed process leaves
none behind. The file names the owner for messages. On file systems without locks, such as some of clusters, the
owner in the file decides: one on this machine that no longer runs has lost its lock, and one on another machine
keeps it.

The library `filelock` leaves the file behind, can't refuse to create one, names no owner, and keeps the locks
of killed processes on file systems without `flock`.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from afm_mlx.errors import AFMError, shown

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_RECORD_BYTES = 1 << 16
"""Maximum bytes that are read of a lock file; a longer one was not written here."""


class LockHeldError(AFMError):
    """Another process, or another `FileLock` of this one, holds the lock: `owner`, None if it is unknown."""

    def __init__(self, path: Path, owner: Owner | None):
        super().__init__(f"{path} is locked by {owner or 'a process that it does not name'}.")
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock, `since` when (ISO 8601), and its command line."""

    pid: int
    host: str
    since: str
    command: str

    @classmethod
    def here(cls) -> Owner:
        program, *arguments = sys.orig_argv if sys.argv[:1] in ([], [""], ["-c"]) else sys.argv
        name = Path(program).name
        if name == "__main__.py":
            name = f"python -m {Path(program).parent.name}"
        command = " ".join([name, *map(shlex.quote, arguments)])[: _RECORD_BYTES // 32]
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(os.getpid(), socket.gethostname(), now, command)

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """Read the owner from an open lock file; None if it names none."""
        try:
            record = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
            owner = cls(**{field.name: record[field.name] for field in dataclasses.fields(cls)})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        types = [type(value) for value in vars(owner).values()]
        return owner if types == [int, str, str, str] else None

    def may_live(self) -> bool:
        """True if the process runs, or is on another machine, where this one can't tell."""
        if self.host != socket.gethostname():
            return True
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:
            pass
        return True

    def is_here(self) -> bool:
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())

    def __str__(self) -> str:
        if self.is_here():
            return f"this very process since {self.since}"
        where = "" if self.host == socket.gethostname() else f" on {shown(self.host)}"
        return f"process {self.pid}{where} since {self.since} ({shown(self.command)})"


class FileLock:
    """A lock that is held from the creation of this object to `release`, or to the end of the process.

    Unless `create`, the lock's file must exist.

    Raises:
        LockHeldError: names the process that holds the lock, which may be this one.
        OSError: if the file can't be opened; `FileNotFoundError` if it is missing and `create` is False.
    """

    def __init__(self, path: Path, *, create: bool = True):
        self.path = path
        self._descriptor: int | None = None
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while self._descriptor is None:
            descriptor = os.open(path, flags, 0o666)
            try:
                _lock(descriptor, path)
                # The previous owner may have removed the file after it was opened here: that one locks nothing.
                if _is_at(descriptor, path):
                    # A full disk must not keep leftovers from being removed: the lock itself takes no space.
                    with suppress(OSError):
                        os.ftruncate(descriptor, 0)
                        record = json.dumps(dataclasses.asdict(Owner.here()))
                        os.pwrite(descriptor, record.encode(), 0)
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Remove the file and end the lock; a second call does nothing."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            # Before the lock ends: afterwards the file could be the next owner's.
            if _is_at(descriptor, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        # A lock that was never released: its file stays, and locks nothing.
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # PermissionError on SMB shares
        raise LockHeldError(path, Owner.read(descriptor)) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = Owner.read(descriptor)
        if owner is not None and owner.may_live():
            raise LockHeldError(path, owner) from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False
