"""Tensors on their way from and into files: what they are, their bytes, and bytes as numbers."""

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
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from afm_mlx.errors import CheckpointError, named
from afm_mlx.files import output_of


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


# -- safetensors_file

# The types that MLX loads; safetensors has more.
_DTYPES: dict[str, mx.Dtype] = {"BOOL": mx.bool_, "BF16": mx.bfloat16}
_DTYPES |= {"F16": mx.float16, "F32": mx.float32}
_DTYPES |= {f"U{bits}": getattr(mx, f"uint{bits}") for bits in (8, 16, 32, 64)}
_DTYPES |= {f"I{bits}": getattr(mx, f"int{bits}") for bits in (8, 16, 32, 64)}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read_header(path: str | Path) -> dict[str, StoredTensor]:
    """Validate a safetensors file's header and return its tensors; no data is read.

    Raises:
        CheckpointError: when the file is missing, cut off, no safetensors file, or of a type that MLX
            can't load.
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
    return {
        name: StoredTensor(
            name,
            tuple(entry["shape"]),
            _DTYPES[entry["dtype"]],
            path,
            8 + length + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Turn what MLX raises while it reads arrays of a file into a `CheckpointError` that names the source."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} can't be read: {named(str(error))} The file was cut off or replaced since it was "
            "opened, or memory is short. Load it again once it is whole."
        ) from None


def load_stored(tensors: Mapping[str, StoredTensor]) -> dict[str, mx.array]:
    """The tensors as lazy arrays. A file that is cut off before they are read makes MLX raise `RuntimeError`.

    Raises:
        CheckpointError: when MLX finds something else in a file than `tensors` says.
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
    """Write one safetensors file as a stream; errors as of `write_weights`.

    Args:
        path: path of the file.
        specs: the tensors; those of wider types come first in the file.
        read: see `write_weights`.
        report: called with the bytes written so far after each chunk.
        metadata: strings for the header; mlx-lm's by default.
    """
    # Wide types first keep every tensor aligned to its own type, for readers that map the file.
    ordered = sorted(specs, key=lambda spec: -spec.dtype.size)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "mlx"})}
    end = 0
    for spec in ordered:
        begin, end = end, end + spec.nbytes
        header[spec.name] = {
            "dtype": _CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
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
    """Write arrays to one safetensors file; mlx-lm's metadata when none is given.

    `mx.save_safetensors` does the same, but says nothing when the disk is full.
    """
    write_file(
        Path(path),
        array_specs(tensors),
        lambda spec: [array_bytes(tensors[spec.name])],
        metadata=metadata,
    )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `CheckpointError` that says what the disk lacks: around writes, not reads."""
    try:
        yield
    except OSError as error:
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(
            f"{output_of(path)} could not be written: {os.strerror(error.errno or 0)}; {free / 1e9:.1f} GB are "
            "free on that disk. Make room or choose another output path."
        ) from None
