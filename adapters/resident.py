"""An adapter in memory, as the kernels read it: all its numbers in one flat array.

Loading fills one buffer, unloading drops it, and another adapter takes its place as one array for another.
Where the numbers of a matrix lie is in `parts`; the layout of A and B is that of `afm_mlx.kernels.Part`.

Nothing here is an operation of MLX: a thread of its own may load an adapter while the engine's decodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import (
    CONFIG_NAME,
    TENSORS_NAME,
    AdapterConfig,
    is_a,
    open_folder,
)
from afm_mlx.adapters.compose import Term, weighted_sum
from afm_mlx.adapters.target_modules import Shapes, target_shapes
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.safetensors_file import StoredTensor, float_values, reading
from afm_mlx.config import ModelConfig
from afm_mlx.errors import CheckpointError, named, shown
from afm_mlx.json_values import FLOAT16_MAX
from afm_mlx.kernels import BLOCK, Part
from afm_mlx.kernels.cpu.memory import unfilled
from afm_mlx.model.model import is_afm

_SAMPLES = 256
_THREADS = 2  # that read and rearrange: 119 ms for 133 MB on two cores, where one took 188; more were not tried
_INFINITE = 0x7C00  # the exponent of float16's infinities and NaNs
_BLOCK_BYTES = np.dtype(f"V{2 * BLOCK}")


@dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """An adapter that is ready to run.

    Args:
        numbers: (n,) float16, those of all matrices.
        parts: where the numbers of a layer's matrices lie, by its path; layers without an adapter are left out.
        scale: alpha / rank.
        fingerprint: 64 hex digits, the same for the same numbers in the same places.
        layout: a number that adapters with equal `parts` share.
    """

    numbers: mx.array
    parts: Mapping[str, Part]
    scale: float
    fingerprint: str
    layout: int

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max(part.rank for part in self.parts.values())


def plan_layout(
    tensors: Mapping[str, Any], shapes: Shapes, source: str | Path
) -> tuple[dict[str, Part], int]:
    """Return `ResidentAdapter.parts` of an adapter, and its bytes in memory, before any tensor is read.

    Args:
        tensors: tensors by their names in an adapter folder; only their `shape` counts.
        shapes: shapes of the model's linear layers, see `target_shapes`.
        source: where the adapter comes from, for errors.

    Raises:
        CheckpointError: names a tensor that is not of this model, or its shape.
    """
    pairs = pairs_by_layer(tensors, shapes, source)
    parts, size = {}, 0
    for path, of_sections in pairs.items():
        (inputs, _), *_ = shapes[path].values()
        outputs = sum(width for _, width in shapes[path].values())
        rank = max(pair[0].shape[1] for pair in of_sections if pair is not None)
        a, b = size, size + _filled_up(len(of_sections) * rank * inputs)
        parts[path] = Part(a, b, rank)
        size = b + rank * _filled_up(outputs)
    return parts, 2 * size


def build_resident(
    tensors: Mapping[str, Any], scale: float, shapes: Shapes, source: str | Path
) -> ResidentAdapter:
    """Put an adapter's tensors into one array.

    Args:
        tensors: arrays, `StoredTensor`, or what NumPy takes for an array, by their names in an adapter
            folder: A (K, rank) and B (rank, N_i) of a floating type. They are read one by one.
        scale: alpha / rank.
        shapes: shapes of the model's linear layers, see `target_shapes`.
        source: where the adapter comes from, for errors.

    Raises:
        CheckpointError: when a tensor does not fit the model, or holds a number that float16 does not.
    """
    parts, nbytes = plan_layout(tensors, shapes, source)
    # NumPy fills it without Python's lock, and faster than MLX copies: decoding goes on meanwhile.
    numbers = unfilled(nbytes // 2)
    view = np.array(numbers, copy=False)
    places = list(pairs_by_layer(for_numpy(tensors, source), shapes, source).items())

    def fill(first: int) -> list[np.uint64]:
        """Every `_THREADS`-th place; returns the sum of each one's numbers."""
        read = TensorReader()
        return [
            _fill_place(view, parts[path], shapes[path], pairs, read, path, source)
            for path, pairs in places[first::_THREADS]
        ]

    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(fill, range(_THREADS)))
    in_order = [sums[i % _THREADS][i // _THREADS] for i in range(len(places))]
    fingerprint = _numbers_fingerprint(view, parts, scale, in_order)
    layout = _LAYOUTS.setdefault(tuple(sorted(parts.items())), next(_NUMBERS))
    return ResidentAdapter(numbers, parts, scale, fingerprint, layout)


_LAYOUTS: dict[tuple[tuple[str, Part], ...], int] = {}
_NUMBERS = itertools.count()  # two threads never get the same one, as they may of `len(_LAYOUTS)`


def _fill_place(
    view: np.ndarray,
    part: Part,
    sections: Mapping[str, tuple[int, int]],
    pairs: Sequence[tuple[Any, Any] | None],
    read: TensorReader,
    path: str,
    source: str | Path,
) -> np.uint64:
    """Copy one layer's pairs to their place; returns the sum of the layer's numbers as 64-bit words."""
    outputs, start = sum(width for _, width in sections.values()), 0
    mine = view[part.a : part.b + part.rank * _filled_up(outputs)]
    if not _covers(part, outputs, pairs):
        mine[:] = 0
    for index, ((end, (_, width)), pair) in enumerate(zip(sections.items(), pairs, strict=True)):
        if pair is not None:
            a = _checked(read(pair[0]), f"{path}.lora_a{end}", source)
            section = view[part.a + index * part.rank * len(a) :][: a.size]
            np.copyto(section.reshape(a.T.shape), a.T)
            b = _checked(read(pair[1]), f"{path}.lora_b{end}", source)
            _fill_b(view, part, outputs, start, b)
        start += width
    return mine.view(np.uint64).sum()  # while they lie in the processor's cache


def _covers(part: Part, outputs: int, of_sections: Sequence[tuple[Any, Any] | None]) -> bool:
    """True if the pairs fill their buffer, so that none of it has to be zeroed."""
    ranks = {0 if pair is None else pair[0].shape[1] for pair in of_sections}
    inputs = next(pair[0].shape[0] for pair in of_sections if pair is not None)
    whole = outputs % BLOCK == len(of_sections) * part.rank * inputs % BLOCK == 0
    return whole and ranks == {part.rank}


def _filled_up(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


def _fill_b(view: np.ndarray, part: Part, outputs: int, start: int, b: np.ndarray) -> None:
    """Copy B (rank, width) to the outputs from `start` on."""
    rank, width = b.shape
    blocks = _filled_up(outputs) // BLOCK
    target = view[part.b : part.b + blocks * part.rank * BLOCK]
    if start % BLOCK == 0 and width % BLOCK == 0:
        # Whole blocks move as one item each, which is three times as fast.
        first, count = start // BLOCK, width // BLOCK
        by_block = target.view(_BLOCK_BYTES).reshape(blocks, part.rank)
        moved = np.ascontiguousarray(b, np.float16).view(_BLOCK_BYTES).reshape(rank, count)
        np.copyto(by_block[first : first + count, :rank], moved.T)
        return
    by_output = target.reshape(blocks, part.rank, BLOCK)
    n = np.arange(start, start + width)
    by_output[n // BLOCK, :rank, n % BLOCK] = b.T


def _checked(values: np.ndarray, name: str, source: str | Path) -> np.ndarray:
    """The values as float16; raises `CheckpointError` where float16 doesn't hold them."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16, copy=False)
    if half.size and (half.view(np.uint16) & _INFINITE).max() == _INFINITE:
        if np.isfinite(values).all():
            raise CheckpointError(
                f"{source}: {named(name)} has numbers up to {np.abs(values).max():g}, and float16, in which "
                f"adapters run, ends at {FLOAT16_MAX:g}. Scale A up and B down, or the other way round."
            )
        raise CheckpointError(
            f"{source}: {named(name)} holds NaN or infinity. The training that made the adapter has "
            "failed: take an earlier checkpoint of it."
        )
    return half


def for_numpy(tensors: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """What a `TensorReader` takes: arrays are evaluated, and those of bfloat16, which NumPy lacks, are float32.

    Called before threads read: MLX gives each thread that computes a stream, and never takes it back.

    Raises:
        CheckpointError: when MLX can't read what an array holds from its file.
    """
    arrays = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, mx.array)}
    for name, array in arrays.items():
        if array.dtype == mx.bfloat16:
            arrays[name] = array.astype(mx.float32)
    with reading(source):
        mx.eval(arrays)
    return {**tensors, **arrays}


class TensorReader:
    """Tensors as NumPy arrays, one at a time: the next one may take the memory of the one before."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def __call__(self, tensor: Any) -> np.ndarray:
        """The tensor's numbers; a `StoredTensor`'s as float32 where it is bfloat16.

        Args:
            tensor: see `for_numpy`.

        Raises:
            CheckpointError: when a `StoredTensor`'s file can't be read, or ends early.
        """
        if not isinstance(tensor, StoredTensor):
            return np.asarray(tensor)
        if self._buffer.size < tensor.nbytes:
            self._buffer = np.empty(tensor.nbytes, np.uint8)
        raw = self._buffer[: tensor.nbytes]
        tensor.read_into(raw)
        return float_values(raw, tensor.dtype).reshape(tensor.shape)


def _numbers_fingerprint(
    view: np.ndarray, parts: Mapping[str, Part], scale: float, sums: Sequence[np.uint64]
) -> str:
    """Digest of scale, places, a sample of every matrix's numbers, and each layer's sum of all its numbers.

    A digest of all numbers would take longer than to read them.
    """
    head = {"scale": scale, "parts": parts}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    bounds = sorted({*(i for p in parts.values() for i in (p.a, p.b)), view.size})
    for start, end in itertools.pairwise(bounds):
        # An odd stride visits every column of a matrix, whose rows are a power of two long as a rule.
        stride = max(1, (end - start) // _SAMPLES) | 1
        digest.update(view[start:end:stride].tobytes())
    digest.update(np.array(sums, np.uint64).tobytes())
    return digest.hexdigest()


def pairs_by_layer(
    tensors: Mapping[str, Any], shapes: Shapes, source: str | Path
) -> dict[str, list[tuple[Any, Any] | None]]:
    """Pairs A, B of every section, by the layer's path; None for a section without an adapter.

    Args:
        tensors: whole pairs by their names in an adapter folder; only their `shape` counts.
        shapes: shapes of the model's linear layers, see `target_shapes`.
        source: where the adapter comes from, for errors.

    Raises:
        CheckpointError: names a tensor that is not of this model, or its shape.
    """
    rest, result = dict(tensors), {}
    for path, of_sections in shapes.items():
        pairs: list[tuple[Any, Any] | None] = []
        for end, (inputs, outputs) in of_sections.items():
            a, b = rest.pop(f"{path}.lora_a{end}", None), rest.pop(f"{path}.lora_b{end}", None)
            if a is None and b is None:
                pairs.append(None)
                continue
            if (a.shape[0], b.shape[1]) != (inputs, outputs) or a.shape[1] != b.shape[0]:
                got = f"{shown(list(a.shape))} and {shown(list(b.shape))}"
                raise CheckpointError(
                    f"{source}: the adapter of {path}{end} is {got}, and the "
                    f"layer needs [{inputs}, rank] and [rank, {outputs}]. It was made for another model."
                )
            pairs.append((a, b))
        if any(pair is not None for pair in pairs):
            result[path] = pairs
    if rest:
        raise CheckpointError(
            f"{source}: this model has no layer for {named(min(rest))} ({len(rest)} such tensors). It was "
            "made for another model."
        )
    return result


# -- files and sums


class Base(NamedTuple):
    """The model that adapters have to fit.

    Args:
        shapes: shapes of its linear layers, see `target_shapes`.
        fingerprints: fingerprints that an adapter for it may name; None takes any adapter.
        config: architecture of the model; None for a model of mlx-lm's zoo.
    """

    shapes: Shapes
    fingerprints: Collection[str] | None
    config: ModelConfig | None = None

    @classmethod
    def of(
        cls, model: nn.Module, base_folder: str | Path | None = None, force: bool = False
    ) -> Base:
        """Return what adapters of a model in memory have to fit.

        Args:
            model: a model with LoRA layers or without.
            base_folder: folder of the model. Its fingerprint counts too, since that of the arrays in memory
                depends on the type that the device computes in.
            force: take adapters that were made for another model.
        """
        if not is_afm(model):
            return cls(target_shapes(model), None)
        fingerprints = None
        if not force:
            fingerprints = {base_model_fingerprint(model)}
            if base_folder is not None:
                fingerprints.add(folder_fingerprint(model.args, base_folder))
        return cls(target_shapes(model), fingerprints, model.args)


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter whose headers were read and found to fit.

    Args:
        tensors: stored tensors, by their names in an adapter folder.
        scale: alpha / rank.
        base: the model that they fit.
        source: where they come from, for errors.
        stamps: what tells whether a file was changed since, by its path.
        nbytes: bytes that it will take in memory.
    """

    tensors: Mapping[str, Any]
    scale: float
    base: Base
    source: str
    stamps: Mapping[Path, tuple[int, ...]]
    nbytes: int

    def read(self) -> ResidentAdapter:
        """Read the numbers.

        Raises:
            CheckpointError: when a file was changed or deleted meanwhile, or holds NaN or infinity.
        """
        resident = build_resident(self.tensors, self.scale, self.base.shapes, self.source)
        for path, stamp in self.stamps.items():
            if _stamps(path) != {path: stamp}:
                raise CheckpointError(
                    f"{path} was changed while it was read. Load the adapter again once it is whole."
                )
        return resident


def open_adapter(path: Path, base: Base) -> OpenAdapter:
    """Open an adapter of any format.

    Of an mlx-lm folder only headers are read. Other formats are read whole, for they have to be converted.

    Raises:
        CheckpointError: when files are missing or damaged, hold no LoRA pairs, or are for another model.
        ConfigError: when the config can't be used.
    """
    stamps = _stamps(path)
    tensors: Mapping[str, Any]
    if (path / TENSORS_NAME).is_file() and (path / CONFIG_NAME).is_file():
        tensors, config = open_folder(path)
    else:
        # Formats build upon this package, and are not needed by most who run it.
        from afm_mlx.adapters.formats import read_adapter

        tensors, config = read_adapter(path, base.config, finite=False)
        with reading(path):
            mx.eval(tensors)
    check_fingerprint(config, base.fingerprints, path)
    _, nbytes = plan_layout(tensors, base.shapes, path)
    return OpenAdapter(tensors, config.scale, base, str(path), stamps, nbytes)


def _stamps(path: Path) -> dict[Path, tuple[int, ...]]:
    """What tells whether a file was changed since, for the files of an adapter by their paths."""
    try:
        if not path.exists():
            raise CheckpointError(f"There is no adapter {path}. Was it moved or deleted?")
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
        found = {file: file.stat() for file in files}
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from None
    return {file: (s.st_ino, s.st_size, s.st_mtime_ns) for file, s in found.items()}


def open_sum(parts: Sequence[tuple[OpenAdapter, float]], base: Base, source: str) -> OpenAdapter:
    """Open the adapter that adds `weight` times what each of the given ones adds; see `compose`.

    Raises:
        RequestError: for a weight that can't be used.
    """
    adapters = [(for_numpy(part.tensors, part.source), part.scale) for part, _ in parts]
    scale, terms = weighted_sum(adapters, [weight for _, weight in parts])
    tensors = {name: _Joined(tuple(each), int(is_a(name))) for name, each in terms.items()}
    stamps = {path: stamp for part, _ in parts for path, stamp in part.stamps.items()}
    _, nbytes = plan_layout(tensors, base.shapes, source)
    return OpenAdapter(tensors, scale, base, source, stamps, nbytes)


def check_fingerprint(
    config: AdapterConfig, known: Collection[str] | None, source: str | Path
) -> None:
    """Compare the base that an adapter names with those that the model goes by.

    Args:
        config: config of the adapter; one that names no base passes.
        known: the model's fingerprints, in memory and as it was stored; None takes any.
        source: where the adapter comes from, for errors.

    Raises:
        CheckpointError: shows both.
    """
    wanted = config.base_model_fingerprint
    if wanted is not None and known is not None and wanted not in known:
        raise CheckpointError(
            f"The adapter {source} was made for the model with fingerprint {named(wanted)}, and this one has "
            f"{' or '.join(sorted(known))}. Take the model that it was trained on, train an adapter "
            "for this one, or force it (--force) to try."
        )


class _Joined(NamedTuple):
    """Tensors to be put side by side along an axis once they are read; NumPy takes it for an array."""

    terms: tuple[Term, ...]
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        size = [0, 0]
        for tensor, _ in self.terms:
            size[self.axis] += tensor.shape[self.axis]
            size[1 - self.axis] = tensor.shape[1 - self.axis]
        return size[0], size[1]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(
            [
                np.asarray(TensorReader()(tensor), np.float32) * np.float32(factor)
                for tensor, factor in self.terms
            ],
            self.axis,
        )
