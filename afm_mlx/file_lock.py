"""A lock on a file that ends with the process that holds it, however that ends.

The operating system keeps it (`flock`), so a killed process leaves none behind, and neither a process id that
is given out again nor a container with ids of its own can be mistaken for the owner. The file names the owner,
for messages. NFS keeps such locks between machines. On file systems that keep none (some of clusters) the name
in the file decides: an owner on this machine that no longer runs has lost its lock, and one on another machine
keeps it.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

from afm_mlx.errors import AFMError, shown

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
_RECORD_BYTES = 1 << 16  # that are read of a lock file; a longer one is none of ours


class LockHeldError(AFMError):
    """Another process, or another `FileLock` of this one, holds the lock.

    Attributes:
        owner: the process that holds it; None where the file does not say.
    """

    def __init__(self, path: Path, owner: Owner | None):
        super().__init__(f"{path} is locked by {owner or 'a process that it does not name'}.")
        self.owner = owner


@dataclass(frozen=True)
class Owner:
    """A process that holds a lock.

    Args:
        pid: its process id.
        host: name of the machine that it runs on.
        begun: when the process began, in its system's words: tells it from a later process with its number.
        since: when it took the lock, in ISO 8601.
        command: the command line that started it.
    """

    pid: int
    host: str
    begun: str
    since: str
    command: str

    @classmethod
    def here(cls) -> Owner:
        """This process, now."""
        pid = os.getpid()
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return cls(pid, socket.gethostname(), _own_begun(pid), now, _command())

    @classmethod
    def read(cls, descriptor: int) -> Owner | None:
        """The owner that an open lock file names; None when it names none, or can't be read."""
        try:
            owner = cls(**json.loads(os.pread(descriptor, _RECORD_BYTES, 0)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        types = [type(value) for value in vars(owner).values()]
        return owner if types == [int, str, str, str, str] else None

    def may_live(self) -> bool:
        """True if the process runs, as far as this machine can tell: another machine's may always run."""
        if self.host != socket.gethostname():
            return True
        return _is_alive(self.pid) and self.begun in ("", _begun(self.pid))

    def is_here(self) -> bool:
        """True if it is this very process."""
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())

    def __str__(self) -> str:
        if self.is_here():
            return f"this very process since {self.since}"
        where = "" if self.host == socket.gethostname() else f" on {shown(self.host)}"
        return f"process {self.pid}{where} since {self.since} ({shown(self.command)})"


class FileLock:
    """A lock that is held from the making of this object to `release`, or to the end of the process.

    Args:
        path: path of the lock's file, in an existing folder.
        create: make the file when it is missing.

    Raises:
        LockHeldError: names the process that has it, which may be this one.
        OSError: when the file can't be opened; `FileNotFoundError` also when it is missing and not made.
    """

    def __init__(self, path: Path, *, create: bool = True):
        self.path = path
        self._descriptor: int | None = _locked(path, create)

    def release(self) -> None:
        """Remove the file, and let others take it; a second call does nothing."""
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        try:
            # Before it is let go: afterwards it could be the next one's.
            if _is_at(descriptor, self.path):
                self.path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)

    def __del__(self) -> None:
        # A lock that nobody released: its file stays, and locks nothing.
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]


def _locked(path: Path, create: bool) -> int:
    """An open file that this process alone has locked, with this process in it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            _lock(descriptor, path)
            # Whoever had it may have removed it after it was opened here: that file locks nothing.
            if _is_at(descriptor, path):
                _write(descriptor, Owner.here())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the latter on SMB shares
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


def _write(descriptor: int, owner: Owner) -> None:
    # A full disk must not keep its leftovers from being locked and removed: the lock itself takes no room.
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(dataclasses.asdict(owner)).encode(), 0)


# -- processes


def _command() -> str:
    program, *arguments = sys.orig_argv if sys.argv[:1] in ([], [""], ["-c"]) else sys.argv
    name = Path(program).name
    if name == "__main__.py":
        name = f"python -m {Path(program).parent.name}"
    return " ".join([name, *map(shlex.quote, arguments)])[: _RECORD_BYTES // 32]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _begun(pid: int) -> str:
    """When a process began, in its system's words; "" where that can't be found out."""
    try:
        if sys.platform == "linux":
            # Behind the name, which may hold spaces and brackets; field 22 of proc(5).
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
            return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {ticks}"
        done = subprocess.run(
            ["ps", "-o", "lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=5,
            env={**os.environ, "LC_ALL": "C"},
        )
        return done.stdout.strip()
    except (OSError, IndexError, subprocess.SubprocessError):
        return ""


_own_begun = cache(_begun)  # for this process's number alone, which a forked process does not have
