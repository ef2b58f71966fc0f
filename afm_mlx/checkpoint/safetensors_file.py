"""One safetensors file: its header validated before a byte of data is read, its data written as a stream.

A file may be damaged, or made to harm. Data is written tensor by tensor in chunks, so that a model larger than
memory can be written.

Source of the format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import SafetensorError, safe_open

from afm_mlx.checkpoint.stored_tensor import StoredTensor, TensorSpec, array_bytes, array_specs
from afm_mlx.errors import CheckpointError, named
from afm_mlx.files import output_of

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
