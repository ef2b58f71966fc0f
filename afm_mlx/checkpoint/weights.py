"""Weight files of a model folder: read after validation, checked against shapes, written as a stream.

The layout is mlx-lm's: `model.safetensors`, or shards of 5 GiB at most that are named
`model-0000i-of-0000N.safetensors`, and `model.safetensors.index.json`. A header is validated before a byte of
data is read, because a weight file may be damaged or made to harm. Writing takes the data tensor by tensor
in chunks, so that a model larger than memory can be written.

Source of the format: https://github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import re
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

from afm_mlx.config import read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, named, shown

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 << 30

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

# The types that MLX loads; safetensors has more.
_DTYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "U16": mx.uint16,
    "U32": mx.uint32,
    "U64": mx.uint64,
    "I8": mx.int8,
    "I16": mx.int16,
    "I32": mx.int32,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_LINE = 300
_SHARD_NAME = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


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
            f"{path} holds tensors of type {_first(unknown)}; MLX loads {', '.join(_DTYPES)}. "
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


def stored_tensors(folder: str | Path) -> dict[str, StoredTensor]:
    """The tensors of a model folder by name, from validated headers; no data is read.

    Raises:
        CheckpointError: on missing or damaged files, and when the index and the files disagree.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    weight_map = _read_index(index) if index.is_file() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else _find_files(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(folder / name).values():
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder}: both {tensors[tensor.name].path.name} and {name} hold the tensor "
                    f"{named(tensor.name)}. Remove the file that does not belong to the model."
                )
            tensors[tensor.name] = tensor
    if weight_map is not None:
        placed = {name: tensor.path.name for name, tensor in tensors.items()}
        wrong = sorted(n for n, f in weight_map.items() if placed.get(n) != f)
        wrong += sorted(set(placed) - set(weight_map))
        if wrong:
            raise CheckpointError(
                f"{index} does not fit the files that it names: {_first(wrong)}. The folder is a mix of "
                "two versions, or a download was cut off: copy or download it again."
            )
    return tensors


@contextmanager
def reading(source: str | Path) -> Iterator[None]:
    """Let what MLX raises while it reads arrays of a file be a `CheckpointError` that names the source."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{source} can't be read: {named(str(error))} The file was cut off or replaced since it was "
            "opened, or memory is short. Load it again once it is whole."
        ) from None


def load_weights(folder: str | Path) -> dict[str, mx.array]:
    """Load a model folder's tensors lazily: MLX reads the data of an array when it is first used.

    Raises:
        CheckpointError: see `stored_tensors`.
    """
    return load_stored(stored_tensors(folder))


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


def check_weights(
    expected: Mapping[str, Sequence[int]], weights: Mapping[str, Any], source: str | Path
) -> None:
    """Compare the names and shapes of `weights` (anything with a `.shape`) with `expected`.

    Raises:
        CheckpointError: one that lists what is missing, unexpected and of the wrong shape.
    """
    wrong = [
        f"{named(name)} is {shown(list(weights[name].shape))} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    problems = [
        f"{len(names)} tensors {what}: {_first(names)}"
        for what, names in (
            ("missing", [name for name in expected if name not in weights]),
            ("unexpected", [name for name in weights if name not in expected]),
            ("of the wrong shape", wrong),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source} does not fit its config: {'; '.join(problems)}. "
            "Check that the config and the weights are of the same model."
        )


def write_weights(
    folder: str | Path,
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Iterable[Any]],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    total_parameters: int | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write a model folder's safetensors files and their index; peak memory is what `read` holds.

    Args:
        folder: an existing folder, of `afm_mlx.files.atomic_folder` as a rule.
        specs: the tensors, in the order in which shards are filled.
        read: yields the data of a tensor, row-major and little-endian, in chunks with the buffer
            protocol. It is called once for each tensor.
        max_shard_bytes: a tensor that is larger gets a shard of its own.
        total_parameters: for the index; the number of elements by default.
        progress: called after each chunk.

    Returns:
        The paths of the shards.

    Raises:
        CheckpointError: when the disk has no room.
    """
    folder = Path(folder)
    total = sum(spec.nbytes for spec in specs)
    _check_room(folder, total)
    shards = _split(specs, max_shard_bytes)
    done, paths = 0, []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        paths.append(folder / (name if len(shards) > 1 else "model.safetensors"))
        weight_map |= {spec.name: paths[-1].name for spec in shard}
        start = done

        def report(written: int, start: int = start) -> None:
            if progress is not None:
                progress(start + written, total)

        write_file(paths[-1], shard, read, report)
        done += sum(spec.nbytes for spec in shard)
    if total_parameters is None:
        total_parameters = sum(spec.size for spec in specs)
    metadata = {"total_size": total, "total_parameters": total_parameters}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=4), encoding="utf-8")
    return paths


def write_file(
    path: Path,
    specs: Sequence[TensorSpec],
    read: Callable[[TensorSpec], Iterable[Any]],
    report: Callable[[int], None] = lambda written: None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one safetensors file as a stream; see `write_weights`."""
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
    with _Writer(path) as put:
        put(struct.pack("<Q", len(encoded)) + encoded)
        for spec in ordered:
            start = written
            for chunk in read(spec):
                written += put(chunk)
                report(written)
            if written - start != spec.nbytes:
                raise RuntimeError(
                    f"{spec.name}: {written - start} bytes came, {spec.nbytes} announced"
                )


def save_weights(folder: str | Path, weights: Mapping[str, mx.array], **options: Any) -> list[Path]:
    """Write arrays as a model folder's weight files; `options` are those of `write_weights`."""
    specs = array_specs(weights)
    return write_weights(folder, specs, lambda spec: [array_bytes(weights[spec.name])], **options)


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


def array_specs(tensors: Mapping[str, mx.array]) -> list[TensorSpec]:
    """The specs of arrays that are in memory or lazy."""
    return [TensorSpec(name, tuple(array.shape), array.dtype) for name, array in tensors.items()]


def array_bytes(array: mx.array) -> np.ndarray:
    """The bytes of an array, row-major, as numpy `uint8`; bfloat16 included, which numpy lacks."""
    return np.array(array.reshape(-1).view(mx.uint8), copy=False)


class _Writer:
    """A file opened for writing, whose errors say what the disk lacks."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Callable[[Any], int]:
        self.file = self.path.open("wb")
        return self.put

    def put(self, chunk: Any) -> int:
        try:
            return self.file.write(chunk)
        except OSError as error:
            raise self._explain(error) from None

    def __exit__(self, *exception: Any) -> None:
        try:
            self.file.close()
        except OSError as error:
            raise self._explain(error) from None

    def _explain(self, error: OSError) -> CheckpointError:
        free = shutil.disk_usage(self.path.parent).free
        return CheckpointError(
            f"{self.path} could not be written: {os.strerror(error.errno or 0)}; "
            f"{free / 1e9:.1f} GB are free on that disk. Make room or choose another output path."
        )


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder.parent} has no room: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free. "
            "Make room, choose another output path, or a dtype of 16 bits."
        )


def _split(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not shards or filled + spec.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = read_config_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map. Copy or download the model folder again.")
    for name in weight_map.values():
        # The names come from a file of others: one that leaves the folder would read what it should not.
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(
                f"{path} names the file {shown(name)}; only names of *.safetensors files in the same folder "
                "are allowed. Do not use this folder unless you know who made it."
            )
    return weight_map


def _find_files(folder: Path) -> list[str]:
    files = sorted(path.name for path in folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no model*.safetensors. A model folder comes from `afm-mlx convert`."
        )
    numbered = [m for m in map(_SHARD_NAME.fullmatch, files) if m]
    for match in numbered[:1]:
        whole = {f"model-{i + 1:05d}-of-{match[2]}.safetensors" for i in range(int(match[2]))}
        missing = sorted(whole - set(files))
        if missing:
            raise CheckpointError(
                f"{folder} lacks {_first(missing)}. Copy or download the model folder again."
            )
    return files


def _first(names: Sequence[str]) -> str:
    """Up to five of the names, as many as a line holds, and how many there are beyond."""
    chosen = list(itertools.accumulate(map(named, names[:5]), "{}, {}".format))
    fitting = [text for text in chosen if len(text) <= _LINE] or chosen[:1]
    more = len(names) - len(fitting)
    return fitting[-1] + (f" and {more} more" if more else "")
