"""Safetensors files: headers are validated before any data is read, and data is written as a stream.

A file may be damaged, or malicious. Data is written tensor by tensor in chunks, so that a model larger than
memory can be written.

Source of the format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from afm_mlx.errors import CheckpointError, named
from afm_mlx.files import output_of


class TensorLike(Protocol):
    """Anything with a shape and a type: an array, or a tensor in a file."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> mx.Dtype: ...


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

    # Files are read, never mapped: if a mapped file is cut off, the process ends.

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Read bytes `start` to `stop`, by default all, into a new `uint8` array; raise as `read_into` does."""
        raw = np.empty((self.nbytes if stop is None else stop) - start, np.uint8)
        self.read_into(raw, start)
        return raw

    def read_into(self, raw: np.ndarray, start: int = 0) -> None:
        """Fill an array of bytes, from byte `start` of the tensor on.

        Raises:
            CheckpointError: if the file can't be read, or ends early.
        """
        with self._opened() as file:
            self._fill(file, raw, start)

    def read_rows(self, ranges: Sequence[tuple[int, int]]) -> mx.array:
        """Read ranges of the first axis, one after the other; raise as `read_into` does."""
        width = self.nbytes // self.shape[0]
        raw = np.concatenate([self.read(start * width, end * width) for start, end in ranges])
        return mx.array(raw).view(self.dtype).reshape(-1, *self.shape[1:])

    def read_elements(self, indices: Iterable[int]) -> np.ndarray:
        """Read the bytes of single elements, one after the other; raise as `read_into` does."""
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
    return [TensorSpec(name, tuple(array.shape), array.dtype) for name, array in tensors.items()]


def array_bytes(array: mx.array) -> np.ndarray:
    """Return the bytes of an array, row-major, as NumPy `uint8`; works for bfloat16, which NumPy lacks."""
    return np.array(array.reshape(-1).view(mx.uint8), copy=False)


def float_values(raw: np.ndarray, dtype: mx.Dtype) -> np.ndarray:
    """View bytes of float16, bfloat16 or float32 as (N,) numbers; bfloat16, which NumPy lacks, as float32."""
    raw = raw.reshape(-1)
    if dtype == mx.bfloat16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4")
    return raw.view("<f2" if dtype == mx.float16 else "<f4")


# -- files

# The types that MLX loads; safetensors has more.
_DTYPES = {"BOOL": mx.bool_, "BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}
_DTYPES |= {f"U{bits}": getattr(mx, f"uint{bits}") for bits in (8, 16, 32, 64)}
_DTYPES |= {f"I{bits}": getattr(mx, f"int{bits}") for bits in (8, 16, 32, 64)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Validate a safetensors file's header and return its tensors by name; no data is read.

    Raises:
        CheckpointError: if the file is missing, cut off, no safetensors file, or has a type unknown to MLX.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Copy or download the model folder again.")
    try:
        # The library checks the sizes in the header against each other and against the file's length.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} ({path.stat().st_size:,} bytes) is no whole safetensors file: {named(str(error))}. "
            "It was cut off or damaged on its way: copy or download it again."
        ) from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - set(_DTYPES))
    if unknown:
        raise CheckpointError(
            f"{path} holds tensors of type {', '.join(unknown)}; MLX loads {', '.join(_DTYPES)}. "
            "Save the model in one of these."
        )
    tensors = {}
    for name, entry in header.items():
        shape, dtype = tuple(entry["shape"]), _DTYPES[entry["dtype"]]
        offset = 8 + length + entry["data_offsets"][0]
        tensors[name] = StoredTensor(name, shape, dtype, path, offset)
    return tensors


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turn errors of MLX while it reads arrays of a file into a `CheckpointError` that names the source."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} can't be read: {named(str(error))} The file was cut off or replaced since it was "
            "opened, or memory is short. Load it again once it is whole."
        ) from None


def load_stored(tensors: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """Load tensors as lazy arrays. If a file is cut off before they are read, MLX raises `RuntimeError`.

    Raises:
        CheckpointError: if the content of a file differs from `tensors`.
    """
    weights: dict[str, mx.array] = {}
    for path in {tensor.path: None for tensor in tensors.values()}:
        with reading(path):
            loaded = mx.load(str(path), format="safetensors")
        assert isinstance(loaded, dict)
        weights |= loaded
    for name, tensor in tensors.items():
        found = weights.get(name)
        if found is None or (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(
                f"{tensor.path}: {named(name)} is not what the header says: the file was replaced meanwhile, "
                "or MLX reads it otherwise. Load it again, or save the model again."
            )
    return weights


def write_file(
    path: Path,
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Iterable[Any]],
    report: Callable[[int], None] = lambda written: None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file as a stream, wider types first; raises as `write_weights`.

    Args:
        read: see `write_weights`.
        report: called after each chunk with the bytes written so far.
        metadata: strings for the header; by default mlx-lm's.
    """
    # Wide types first: every tensor is aligned to its own type, for readers that map the file.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.size)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    end = 0
    for spec in ordered:
        begin, end = end, end + spec.nbytes
        entry = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape)}
        header[spec.name] = {**entry, "data_offsets": [begin, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    written = 0
    with _writing(path):
        file = path.open("wb")
    try:
        with _writing(path):
            file.write(struct.pack("<Q", len(encoded)) + encoded)
        for spec in ordered:
            start = written
            for chunk in read(spec):
                with _writing(path):
                    written += file.write(chunk)
                report(written)
            if written - start != spec.nbytes:
                raise RuntimeError(
                    f"{spec.name}: {written - start} bytes came, {spec.nbytes} announced"
                )
    finally:
        with _writing(path):
            file.close()


def save_file(
    path: str | Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays to one safetensors file; `mx.save_safetensors` reports no error if the disk is full."""
    specs = array_specs(tensors)
    write_file(Path(path), specs, lambda spec: [array_bytes(tensors[spec.name])], metadata=metadata)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` of a write into a `CheckpointError` that gives the disk's free space."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"{output_of(path)} could not be written: {os.strerror(error.errno or 0)}; {free / 1e9:.1f} GB are "
            "free on that disk. Make room or choose another output path."
        ) from None
