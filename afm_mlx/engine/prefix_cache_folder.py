"""Blocks of a prefix cache in a folder, one file each, for processes to come.

A file is a digest, a head and the arrays' bytes. Its name is the digest of all that keys and values depend on:
the model, the key of the prefix cache, and all tokens from the first on. A file whose own digest is wrong is
removed, and so a file that was cut off, changed or never finished is none.

Files are read and written in threads of their own. These never touch MLX: they hand over and are handed bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from afm_mlx.checkpoint.stored_tensor import array_bytes
from afm_mlx.errors import RequestError
from afm_mlx.files import atomic_write, remove_leftovers

SUFFIX = ".prefix"
_DIGEST = 32  # bytes
_MOST_PENDING = 256 << 20  # bytes that wait to be written; what comes then is left out
_DTYPES = {str(d): d for d in (mx.int8, mx.float16, mx.bfloat16, mx.float32)}


@dataclass(frozen=True)
class StoredArray:
    """An array as bytes, which any thread may hold.

    Args:
        dtype: its type, as MLX writes it.
        shape: its shape.
        data: its elements, row-major.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    @classmethod
    def of(cls, array: mx.array) -> StoredArray:
        return cls(str(array.dtype), tuple(array.shape), array_bytes(array))

    def array(self) -> mx.array:
        return mx.array(self.data).view(_DTYPES[self.dtype]).reshape(self.shape)


Places = tuple[tuple[int, int], ...]
StoredBlock = tuple[Places, list[StoredArray]]
"""`Columns.places`, and `Columns.groups`."""


class PrefixFolder:
    """A folder of blocks under a budget; what was not used for longest makes room.

    Files with other names are left alone, and not counted. When a file can't be written, that is told in one
    warning, and no more are.

    Args:
        path: the folder; it is made, for its owner only, if it isn't there.
        budget: bytes of files at most.

    Attributes:
        nbytes: bytes of all files.

    Raises:
        RequestError: when the folder can't be made or read.
    """

    def __init__(self, path: str | Path, budget: int):
        self.path, self.budget, self.nbytes = Path(path), budget, 0
        self._sizes: OrderedDict[str, int] = (
            OrderedDict()
        )  # by name, in the order of their last uses
        self._pending = 0  # bytes that wait to be written
        self._is_writing = True
        self._lock = threading.RLock()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.path)
            self._scan()
        except OSError as error:
            raise RequestError(
                f"The prefix cache's folder {self.path} can't be used: {error}. Name another one."
            ) from error
        self._reader = ThreadPoolExecutor(1, "afm-mlx prefixes read")
        self._writer = ThreadPoolExecutor(1, "afm-mlx prefixes write")

    def _scan(self) -> None:
        found = []
        for entry in os.scandir(self.path):
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                found.append((stat.st_mtime_ns, entry.name.removesuffix(SUFFIX), stat.st_size))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.nbytes += size
        self._evict(0)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def close(self) -> None:
        """Write what waits to be written; there is no reading or writing after that."""
        self._reader.shutdown()
        self._writer.shutdown()

    # -- called by the thread of the prefix cache

    def read(self, names: Sequence[str]) -> Future[list[StoredBlock]]:
        """Begin to read consecutive blocks: the result ends with the first one that can't be read."""
        return self._reader.submit(self._read_all, list(names))

    def write(self, name: str, places: Places, arrays: Sequence[mx.array]) -> None:
        """Begin to write a block, unless it is there.

        Args:
            name: see `block_name`.
            places, arrays: `Columns.places` and `Columns.groups`, computed.
        """
        nbytes = sum(array.nbytes for array in arrays)
        with self._lock:
            too_many = self._pending + nbytes > _MOST_PENDING
            if not self._is_writing or name in self._sizes or too_many or nbytes > self.budget:
                return
            self._pending += nbytes
        stored = [StoredArray.of(array) for array in arrays]
        self._writer.submit(self._write, name, (places, stored), nbytes)

    # -- in threads of its own

    def _read_all(self, names: Sequence[str]) -> list[StoredBlock]:
        found = []
        for name in names:
            path = self._path(name)
            try:
                block = _decoded(name, path.read_bytes())
                os.utime(path)
            except (OSError, ValueError, KeyError, TypeError):
                self._remove(name)
                break
            with self._lock:
                if name in self._sizes:
                    self._sizes.move_to_end(name)
            found.append(block)
        return found

    def _write(self, name: str, block: StoredBlock, pending: int) -> None:
        try:
            if self._is_writing:
                data = _encoded(name, block)
                self._evict(len(data))
                with atomic_write(self._path(name)) as place:
                    place.write_bytes(data)
                with self._lock:
                    self.nbytes += len(data) - self._sizes.pop(name, 0)
                    self._sizes[name] = len(data)
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
                f"The prefix cache writes no more to {self.path}: {error}. It goes on in memory, and reads "
                "what is there.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _evict(self, nbytes: int) -> None:
        with self._lock:
            while self._sizes and self.nbytes + nbytes > self.budget:
                self._remove(next(iter(self._sizes)))

    def _remove(self, name: str) -> None:
        with self._lock:
            self.nbytes -= self._sizes.pop(name, 0)
        try:
            self._path(name).unlink(missing_ok=True)
        except OSError as error:
            self._stop_writing(error)  # nothing could make room

    def _path(self, name: str) -> Path:
        return self.path / (name + SUFFIX)


def block_name(above: str, tokens: bytes) -> str:
    """The name of a block: 64 hex digits.

    Args:
        above: name of the block above; for the first one, all else that keys and values depend on.
        tokens: ids of its tokens, as bytes.
    """
    return hashlib.sha256(above.encode() + b"\0" + tokens).hexdigest()


def _encoded(name: str, block: StoredBlock) -> bytes:
    places, arrays = block
    kinds = [(array.dtype, array.shape) for array in arrays]
    written = json.dumps({"name": name, "places": places, "arrays": kinds}).encode()
    parts = [
        len(written).to_bytes(8, "little"),
        written,
        *(array.data.tobytes() for array in arrays),
    ]
    body = b"".join(parts)
    return hashlib.sha256(body).digest() + body


def _decoded(name: str, data: bytes) -> StoredBlock:
    """A block of a file's bytes.

    Raises:
        ValueError, KeyError, TypeError: when they are not as they were written.
    """
    digest, body = data[:_DIGEST], memoryview(data)[_DIGEST:]
    if hashlib.sha256(body).digest() != digest:
        raise ValueError("The digest is another one.")
    length = int.from_bytes(body[:8], "little")
    head, at = json.loads(bytes(body[8 : 8 + length])), 8 + length
    if head["name"] != name:
        raise ValueError("It is another block's.")
    arrays = []
    for dtype, shape in head["arrays"]:
        count = _DTYPES[dtype].size * int(np.prod(shape))
        arrays.append(StoredArray(dtype, tuple(shape), np.frombuffer(body, np.uint8, count, at)))
        at += count
    return tuple((group, index) for group, index in head["places"]), arrays
