"""Read files within bounds, and write files atomically.

`read_file` reads untrusted files up to a size limit; it refuses devices and limits the wait for a pipe.

Files are written to a hidden temporary folder next to the output, flushed, and renamed into place. The
temporary folder is locked while its process lives, and removed at the end, also after an error or an
interrupt. A folder that a killed process left is removed by the next process that writes next to it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from afm_mlx.errors import AFMError
from afm_mlx.file_lock import FileLock, LockHeldError

_SUFFIX = ".afm-mlx"  # of temporary folders; no other folder is removed
_LOCK_NAME = "owner.json"
_MAX_NAME = 200  # bytes of an output's name; file systems allow 255 for the temporary folder's

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}

_places: dict[Path, FileLock] = {}
"""The temporary folders of this process and their locks, for `remove_places`."""

PIPE_PAUSE, PIPE_SECONDS = 30.0, 600.0
"""Maximum seconds without a byte from a pipe, and until its end."""
_PIECE = 1 << 20


# -- reading


def read_file(path: str | Path, limit: int, *, pipes: bool = False) -> bytes:
    """Read a whole file of up to `limit` bytes; with `pipes` also a pipe, such as the shell's `<(command)`.

    The size of a regular file is checked before it is read. Devices, sockets and folders are refused, except
    the null device, which is an empty file.

    Raises:
        OSError: if the file is missing, unreadable, of another kind, too large, or a pipe that doesn't end in
            time. `strerror` says which.
    """
    # A plain `open` would wait for the writer of a named pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        if pipes and stat.S_ISFIFO(status.st_mode):
            return _read_all(_pieces_of_pipe(descriptor), limit)
        is_null = stat.S_ISCHR(status.st_mode) and os.path.samestat(status, os.stat(os.devnull))
        if not stat.S_ISREG(status.st_mode) and not is_null:
            raise OSError(errno.EINVAL, f"it is {_kind(status)}, and a file is needed")
        _check_size(status.st_size, limit)
        # The file may grow while it is read, and files in /proc report a size of 0.
        piece = status.st_size + 1 if status.st_size else _PIECE
        return _read_all(iter(lambda: os.read(descriptor, piece), b""), limit)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(descriptor)


def _read_all(pieces: Iterator[bytes], limit: int) -> bytes:
    parts, size = [], 0
    for part in pieces:
        size += len(part)
        _check_size(size, limit)
        parts.append(part)
    return b"".join(parts)


def _pieces_of_pipe(descriptor: int) -> Iterator[bytes]:
    end = time.monotonic() + PIPE_SECONDS
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while True:
        seconds = end - time.monotonic()
        if seconds <= 0:
            raise OSError(errno.ETIMEDOUT, f"it is a pipe without an end for {PIPE_SECONDS:.0f} s")
        if poll.poll(min(PIPE_PAUSE, seconds) * 1000):
            if not (part := os.read(descriptor, _PIECE)):
                return
            yield part
        elif seconds > PIPE_PAUSE:
            problem = f"it is a pipe that nobody wrote to for {PIPE_PAUSE:.0f} s"
            raise OSError(errno.ETIMEDOUT, problem)


def _kind(status: os.stat_result) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for test, kind in kinds.items() if test(status.st_mode)), "a device")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise OSError(errno.EFBIG, f"it has more than the {limit:,} bytes that are allowed")


# -- writing


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write to; on success the file replaces `path`, else `path` is unchanged.

    The temporary file has the name of `path`, because writers such as `mx.save_safetensors` look at the suffix.

    Raises:
        OSError: if `path` is a device, a pipe or a socket, which must not be replaced by a file.
    """
    path = Path(path)
    with suppress(FileNotFoundError):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
            problem = f"it is {_kind(status)}, and a file is needed"
            raise OSError(errno.EINVAL, problem, str(path))
    with place_beside(path) as place:
        temporary = place / path.name
        yield temporary
        _flush(temporary)
        os.replace(temporary, path)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder; on success it is renamed to `path`.

    Raises:
        AFMError: if `path` exists: folders are never overwritten.
    """
    path = Path(path)
    refuse_existing(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with place_beside(path) as place:
        temporary = place / path.name
        temporary.mkdir()
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _flush(file)
        refuse_existing(path)
        os.rename(temporary, path)


def remove_folder(path: str | Path) -> None:
    """Rename a folder to a temporary name and delete it; an interruption leaves the rest under that name."""
    path = Path(path)
    with place_beside(path) as place:
        os.rename(path, place / path.name)


def refuse_existing(path: str | Path) -> None:
    """Raise `AFMError` if `path` exists."""
    if os.path.lexists(path):
        raise AFMError(
            f"The output {path} exists already and would be overwritten. "
            "Choose another path, or remove it first."
        )


# -- temporary folders


@contextmanager
def place_beside(path: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to `path`, and remove it; leftovers of killed processes go first."""
    remove_leftovers(path.parent)
    with _named_after(path):
        place, lock = _make(path)
    _places[place] = lock
    try:
        with _named_after(path), _told_as(path, place / path.name):
            yield place
    finally:
        _discard(place, lock)
        _places.pop(place, None)


@contextmanager
def _told_as(path: Path, temporary: Path) -> Iterator[None]:
    """Replace `temporary` by `path`, the output, in the text of errors that the context raises."""
    try:
        yield
    except Exception as error:
        error.args = tuple(
            part.replace(str(temporary), str(path)) if isinstance(part, str) else part
            for part in error.args
        )
        raise


@contextmanager
def _named_after(path: Path) -> Iterator[None]:
    """Let errors of writing name the output instead of a temporary path, or of nothing, as a full disk's do."""
    try:
        yield
    except OSError as error:
        # For a copy, the second name is the output's.
        copied = error.filename2 is not None and error.errno in _NO_ROOM
        name = error.filename2 if copied else error.filename
        known = Path(name) if isinstance(name, str | Path) else None
        output = path if known is None and error.errno in _NO_ROOM else known and output_of(known)
        if output is None or (output == known and error.filename2 is None):
            raise
        if error.filename2 is not None and not copied:
            second = str(output_of(Path(error.filename2)))
            raise OSError(error.errno, error.strerror, str(output), None, second) from error
        raise OSError(error.errno, error.strerror, str(output)) from error


def output_of(path: Path) -> Path:
    """Return the final path of a path inside a temporary folder; any other path unchanged."""
    return Path(*(part for part in path.parts if not (part[:1] == "." and part.endswith(_SUFFIX))))


def remove_leftovers(folder: str | Path) -> None:
    """Remove the temporary folders in a folder whose processes have ended."""
    try:
        with os.scandir(folder) as entries:
            folders = [Path(e) for e in entries if e.is_dir(follow_symlinks=False)]
    except OSError:
        return  # missing, or not readable
    for place in folders:
        if not (place.name.startswith(".") and place.name.endswith(_SUFFIX)):
            continue
        try:
            _discard(place, FileLock(place / _LOCK_NAME, create=False))
        except FileNotFoundError:
            # Its process was killed before it had the lock. If it lives after all, it makes another folder.
            with suppress(OSError):
                place.rmdir()
        except (LockHeldError, OSError):
            continue


def remove_places() -> None:
    """Remove all temporary folders of this process, which is about to end without unwinding its threads."""
    for place, lock in list(_places.items()):
        _discard(place, lock)


def _make(path: Path) -> tuple[Path, FileLock]:
    name = path.name
    if len(os.fsencode(name)) > _MAX_NAME:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=_SUFFIX, dir=path.parent))
        try:
            return place, FileLock(place / _LOCK_NAME)
        except (FileNotFoundError, LockHeldError):
            continue  # another process removed it as a leftover before it was locked
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise


def _discard(place: Path, lock: FileLock) -> None:
    # The lock last: the next process finds a folder that is only partly removed.
    with suppress(OSError):
        for entry in list(os.scandir(place)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != _LOCK_NAME:
                Path(entry).unlink(missing_ok=True)
    with suppress(OSError):
        lock.release()
    with suppress(OSError):
        place.rmdir()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
