"""Tensors on their way from and into files: what they are, their bytes, and bytes as numbers."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from afm_mlx.errors import CheckpointError, named


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and type of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.size


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a safetensors file, whose data starts at byte `offset`."""

    path: Path
    offset: int

    # Files are read, and never mapped: one that is cut off while it is mapped ends the process.

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Bytes `start` to `stop`, all by default, as `uint8` in memory of their own; errors as `read_into`."""
        raw = np.empty((self.nbytes if stop is None else stop) - start, np.uint8)
        self.read_into(raw, start)
        return raw

    def read_into(self, raw: np.ndarray, start: int = 0) -> None:
        """Fill an array of bytes from byte `start` of the tensor on.

        Raises:
            CheckpointError: when the file can't be read, or ends early.
        """
        with self._opened() as file:
            self._fill(file, raw, start)

    def read_elements(self, indices: Iterable[int]) -> np.ndarray:
        """Bytes of single elements, one after the other; errors as `read_into`."""
        width = self.dtype.size
        indices = list(indices)
        raw = np.empty((len(indices), width), np.uint8)
        with self._opened() as file:
            for row, index in zip(raw, indices, strict=True):
                self._fill(file, row, index * width)
        return raw.reshape(-1)

    @contextmanager
    def _opened(self) -> Iterator[io.FileIO]:
        try:
            with self.path.open("rb", buffering=0) as file:
                yield file
        except OSError as error:
            raise CheckpointError(f"{self.path} can't be read: {error.strerror}.") from None

    def _fill(self, file: io.FileIO, raw: np.ndarray, start: int) -> None:
        file.seek(self.offset + start)
        done = 0
        while done < raw.size and (count := file.readinto(raw[done:].data)):
            done += count
        if done < raw.size:
            raise CheckpointError(
                f"{self.path} ends within {named(self.name)}: {start + done:,} of {self.nbytes:,} bytes are "
                "there. It was cut off: copy or download it again."
            )


def array_specs(tensors: Mapping[str, mx.array]) -> list[TensorSpec]:
    """The specs of arrays that are in memory or lazy."""
    return [TensorSpec(name, tuple(array.shape), array.dtype) for name, array in tensors.items()]


def array_bytes(array: mx.array) -> np.ndarray:
    """The bytes of an array, row-major, as numpy `uint8`; bfloat16 included, which numpy lacks."""
    return np.array(array.reshape(-1).view(mx.uint8), copy=False)


def float_values(raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """Bytes of float16, bfloat16 or float32 as numbers of one axis; bfloat16, which NumPy lacks, as float32."""
    raw = raw.reshape(-1)
    if dtype == mx.bfloat16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view("<f2" if dtype == mx.float16 else "<f4")
