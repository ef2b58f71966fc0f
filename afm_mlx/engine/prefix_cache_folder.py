"""Pages of a prefix cache in a folder, one file each, for later processes.

A file is a digest, a head and the arrays' bytes. Its name is the digest of all that keys and values depend on:
the model, the key of the prefix cache, and all tokens from the first on. A file whose own digest is wrong is
removed: it was cut off, changed or never finished. A file whose head differs from the head of this model's
pages in any byte is removed as well: nothing that a file says of itself is believed.

Two threads read and write files. They never touch MLX: bytes go in and come out.

Processes may share a folder. Only one writes at a time: it locks the folder, rescans it, and evicts old files
before it writes its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.checkpoint.safetensors_file import array_bytes
from afm_mlx.errors import RequestError
from afm_mlx.files import atomic_write, read_file, remove_leftovers

SUFFIX = ".prefix"
_DIGEST = 32  # bytes
_MOST_PENDING = 256 << 20  # bytes that wait to be written; what comes then is left out
_LOCK_SECONDS = 30.0  # for which another process may write
_DTYPES = {str(d): d for d in (mx.int8, mx.float16, mx.bfloat16, mx.float32)}


Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class PageLayout:
    """The form of a model's pages: `Columns.places`, and type and shape of each of `Columns.groups`."""

    places: Places
    arrays: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, places: Places, groups: Sequence[mx.array], tokens: int) -> PageLayout:
        """Return the layout of pages of `tokens` tokens that are otherwise like these groups."""
        shapes = [(*array.shape[:2], tokens, array.shape[3]) for array in groups]
        return cls(places, tuple((str(a.dtype), s) for a, s in zip(groups, shapes, strict=True)))

    def head(self, name: str) -> bytes:
        """Return the bytes between digest and arrays in the file of a page."""
        written = json.dumps({"name": name, "places": self.places, "arrays": self.arrays}).encode()
        return len(written).to_bytes(8, "little") + written


class StoredPage(NamedTuple):
    """A page as bytes, which any thread may hold."""

    layout: PageLayout
    data: list[np.ndarray]  # the elements of each of `layout.arrays`, row-major

    def groups(self) -> list[mx.array]:
        pairs = zip(self.data, self.layout.arrays, strict=True)
        return [
            mx.array(data).view(_DTYPES[dtype]).reshape(shape) for data, (dtype, shape) in pairs
        ]


@dataclass
class _File:
    """Size and last use of a page's file."""

    nbytes: int
    used: int  # nanoseconds since 1970, as the file system has it


class PrefixFolder:
    """A folder of pages under a budget of bytes, of all processes; the least recently used files are evicted.

    The folder is made, for its owner only, if it isn't there. Files with other names are left alone, and not
    counted. When a file can't be written, one warning is issued and writing stops. A read-only folder is read,
    and one warning says that it isn't written.
    """

    def __init__(self, path: str | Path, budget: int):
        self.path, self.budget = Path(path), budget
        self.nbytes = 0  # of all files, as they were at the last write
        self._files: OrderedDict[str, _File] = OrderedDict()  # by name, in the order of last uses
        self._pending = 0  # bytes that wait to be written
        self._is_writing = True
        self._lock = threading.RLock()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.path)
            with self._alone():
                if os.access(self.path, os.W_OK | os.X_OK):
                    self._evict(0)
                else:
                    self._stop_writing(PermissionError(errno.EACCES, "the folder may only be read"))
        except OSError as error:
            raise RequestError(
                f"The prefix cache's folder {self.path} can't be used: {error}. Name another one."
            ) from error
        self._reader = ThreadPoolExecutor(1, "afm-mlx prefixes read")
        self._writer = ThreadPoolExecutor(1, "afm-mlx prefixes write")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock out writers of other processes, and rescan the files; `OSError` if another keeps its lock."""
        descriptor = os.open(self.path, os.O_RDONLY)  # the lock ends with it
        try:
            end = time.monotonic() + _LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        problem = f"another process has kept it locked for {_LOCK_SECONDS:.0f} s"
                        raise OSError(errno.ETIMEDOUT, problem, str(self.path)) from None
                    time.sleep(0.005)
                except OSError:
                    break  # a file system without such locks: the budget holds for each process
            self._scan()
            yield
        finally:
            os.close(descriptor)

    def _scan(self) -> None:
        files = os.listdir(self.path)
        there = {name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)}
        with self._lock:
            known = set(self._files)
        new = {}
        for name in there - known:
            try:
                status = self._path(name).lstat()
            except FileNotFoundError:
                continue  # another thread or process has removed it
            if stat.S_ISREG(status.st_mode):
                new[name] = _File(status.st_size, status.st_mtime_ns)
        with self._lock:
            for name in known - there:
                self._forget(name)
            for name, file in sorted(new.items(), key=lambda item: item[1].used):
                self._add(name, file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def close(self) -> None:
        """Finish all reads and writes."""
        self._reader.shutdown()
        self._writer.shutdown()

    # -- called by the thread of the prefix cache

    def read(self, names: Sequence[str], layout: PageLayout) -> Future[list[StoredPage]]:
        """Begin to read consecutive pages of a layout, up to the first one that can't be read."""
        return self._reader.submit(self._read_all, list(names), layout)

    def write(self, name: str, places: Places, arrays: Sequence[mx.array]) -> None:
        """Begin to write a page (`Columns.places` and `Columns.groups`, computed), unless its file exists."""
        nbytes = sum(array.nbytes for array in arrays)
        with self._lock:
            too_many = self._pending + nbytes > _MOST_PENDING
            if not self._is_writing or name in self._files or too_many or nbytes > self.budget:
                return
            self._pending += nbytes
        layout = PageLayout.of(places, arrays, arrays[0].shape[2])
        page = StoredPage(layout, [array_bytes(array) for array in arrays])
        self._writer.submit(self._write, name, page, nbytes)

    # -- in the reader's and the writer's thread

    def _read_all(self, names: Sequence[str], layout: PageLayout) -> list[StoredPage]:
        found = []
        for name in names:
            path, used = self._path(name), time.time_ns()
            try:
                page = _decoded(name, layout, path)
            except OSError:  # it is gone, or not for this user to read
                with self._lock:
                    self._forget(name)
                break
            except ValueError:
                self._remove(name)
                break
            with suppress(OSError):  # where it may only be read
                os.utime(path, ns=(used, used))
            with self._lock:
                if name in self._files:
                    self._files[name].used = used
                    self._files.move_to_end(name)
            found.append(page)
        return found

    def _write(self, name: str, page: StoredPage, pending: int) -> None:
        try:
            if self._is_writing:
                body = b"".join([page.layout.head(name), *(a.tobytes() for a in page.data)])
                data = hashlib.sha256(body).digest() + body
                with self._alone():
                    self._evict(len(data))
                    with atomic_write(self._path(name)) as place:
                        place.write_bytes(data)
                    with self._lock:
                        self._forget(name)
                        self._add(name, _File(len(data), time.time_ns()))
        except OSError as error:
            self._stop_writing(error)
        finally:
            with self._lock:
                self._pending -= pending

    def _stop_writing(self, error: OSError) -> None:
        with self._lock:
            was_writing, self._is_writing = self._is_writing, False
        if was_writing:
            warnings.warn(
                f"The prefix cache writes nothing to {self.path}: {error.strerror or error}. It goes on in "
                "memory, and reads what is there.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _evict(self, nbytes: int) -> None:
        with self._lock:
            while self._files and self.nbytes + nbytes > self.budget:
                name, file = next(iter(self._files.items()))
                try:
                    used = self._path(name).lstat().st_mtime_ns
                except OSError:
                    used = 0
                if used > file.used:  # another process used it
                    file.used = used
                    self._files.move_to_end(name)
                else:
                    self._remove(name)

    def _add(self, name: str, file: _File) -> None:
        self._files[name] = file
        self.nbytes += file.nbytes

    def _forget(self, name: str) -> None:
        if (file := self._files.pop(name, None)) is not None:
            self.nbytes -= file.nbytes

    def _remove(self, name: str) -> None:
        with self._lock:
            self._forget(name)
        if not self._is_writing:
            return
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._stop_writing(error)  # nothing can be evicted

    def _path(self, name: str) -> Path:
        return self.path / (name + SUFFIX)


def page_name(above: str, tokens: bytes) -> str:
    """Return the name of a page, 64 hex digits, from its tokens as bytes and the name of the page above.

    The first page's `above` is all else that keys and values depend on.
    """
    return hashlib.sha256(above.encode() + b"\0" + tokens).hexdigest()


def _decoded(name: str, layout: PageLayout, path: Path) -> StoredPage:
    """Read a page of that name and layout; `ValueError` if the file holds anything else."""
    head = layout.head(name)
    sizes = [_DTYPES[dtype].size * math.prod(shape) for dtype, shape in layout.arrays]
    try:
        data = read_file(path, _DIGEST + len(head) + sum(sizes))
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EINVAL):  # too large, or no regular file
            raise ValueError(error.strerror) from None
        raise
    digest, body = data[:_DIGEST], memoryview(data)[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("The digest is another one.")
    if body[: len(head)] != head or len(body) != len(head) + sum(sizes):
        raise ValueError("This is not a page of this name and this model.")
    starts = itertools.accumulate(sizes, initial=len(head))
    pairs = zip(sizes, starts, strict=False)
    return StoredPage(layout, [np.frombuffer(body, np.uint8, size, at) for size, at in pairs])
