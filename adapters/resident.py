"""Adapters from files to memory: all numbers in one flat array, which kernels read.

Opening an adapter reads headers and checks all that can be known without the numbers, above all the bytes that
it will take; reading fills the array. A switch of adapters replaces one array by another. `parts` says where in
the array each matrix is, and `afm_mlx.kernels.Part` how A and B are laid out.

An adapter may have a task mask: the matrices of the kept channels are then copied from the base, and A of
`down` and B of `gate` and `up` are cut to the same channels.

Nothing here is an operation of MLX, except `ResidentAdapter.masked`, so a thread can load an adapter while the
engine's thread decodes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

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
from afm_mlx.adapters.target_modules import (
    Shapes,
    ZooBase,
    target_modules,
    target_shapes,
    zoo_base,
)
from afm_mlx.adapters.task_mask import (
    FeedForward,
    Gathered,
    MaskBase,
    Plan,
    TaskMask,
    check_has_mask,
    gather,
    has_mask,
    is_mask_alone,
    plan_bytes,
    read_mask,
)
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.safetensors_file import StoredTensor, float_values, reading
from afm_mlx.config import ModelConfig
from afm_mlx.errors import CheckpointError, RequestError, named, shown
from afm_mlx.json_values import FLOAT16_MAX
from afm_mlx.kernels import BLOCK, Part
from afm_mlx.kernels.cpu.memory import unfilled
from afm_mlx.model.model import is_afm
from afm_mlx.ranks import ranks_of

_SAMPLES = 256
_THREADS = 2  # 133 MB took 119 ms on two cores, and 188 ms with one thread; more were not tried
_INFINITE = 0x7C00  # the exponent of float16's infinities and NaNs
_BLOCK_BYTES = np.dtype(f"V{2 * BLOCK}")


class Readable(Protocol):
    """A tensor that `TensorReader` reads: an MLX or NumPy array, a `StoredTensor`, or joined ones."""

    @property
    def shape(self) -> tuple[int, ...]: ...


Pair: TypeAlias = tuple[Readable, Readable]
"""A (inputs, rank) and B (rank, outputs)."""


@dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """An adapter in memory, ready to run."""

    numbers: mx.array  # (n,) float16, of all matrices
    parts: Mapping[str, Part]  # each adapted layer's place in `numbers`, by the layer's path
    scale: float  # alpha / rank
    fingerprint: str  # 64 hex digits, equal for equal numbers on the same layers
    layout: int  # a number that adapters with equal `parts` and with masks of equal widths share
    mask: TaskMask | None = None  # None, too, for a mask that keeps all channels
    gathered: Gathered | None = None  # what the mask keeps of the base
    whole: str = ""  # of a part: digest of the whole adapter's numbers, equal on all ranks

    @property
    def nbytes(self) -> int:
        masked = 0 if self.gathered is None else self.gathered.memory.nbytes
        return self.numbers.nbytes + masked

    @property
    def rank(self) -> int:
        """Largest rank among the adapter's pairs; 0 for a mask alone."""
        return max((part.rank for part in self.parts.values()), default=0)

    @cached_property
    def masked(self) -> Mapping[str, dict[str, mx.array]]:
        """The kept channels' parameters by name, of each layer by its path; for the model's thread."""
        return {} if self.gathered is None else self.gathered.arrays()


def plan_layout(
    tensors: Mapping[str, Readable], shapes: Shapes, source: str | Path
) -> tuple[dict[str, Part], int]:
    """Return an adapter's `ResidentAdapter.parts` and its bytes in memory; raises as `pairs_by_layer`."""
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
    tensors: Mapping[str, Readable], scale: float, shapes: Shapes, source: str | Path
) -> ResidentAdapter:
    """Read an adapter's tensors, by their names in an adapter folder and of a floating type, into one array.

    `scale` is alpha / rank, `shapes` are the model's `target_shapes`. Raises `CheckpointError`, which names
    `source`, when a tensor does not fit the model, or holds a number that float16 does not.
    """
    parts, nbytes = plan_layout(tensors, shapes, source)
    if not parts:  # kernels take no empty array
        return _finished(unfilled(BLOCK), parts, scale, [])
    # NumPy fills the array without Python's lock, so decoding goes on, and faster than MLX copies.
    numbers = unfilled(nbytes // 2)
    view = np.array(numbers, copy=False)
    layers = list(pairs_by_layer(for_numpy(tensors, source), shapes, source).items())

    def fill(first: int) -> list[np.uint64]:
        """Read every `_THREADS`-th layer from `first` on into its part of the array; return the checksums."""
        read = TensorReader()
        return [
            _fill_layer(view, parts[path], shapes[path], pairs, read, path, source)
            for path, pairs in layers[first::_THREADS]
        ]

    with ThreadPoolExecutor(_THREADS) as threads:
        sums = list(threads.map(fill, range(_THREADS)))
    in_order = [sums[i % _THREADS][i // _THREADS] for i in range(len(layers))]
    return _finished(numbers, parts, scale, in_order)


def _finished(
    numbers: mx.array, parts: dict[str, Part], scale: float, sums: list[np.uint64]
) -> ResidentAdapter:
    """Return the adapter whose array is filled; `sums` are the layers' checksums, in the order of `parts`."""
    view = np.array(numbers, copy=False)
    # A digest of all numbers would take longer than reading them.
    head = {"scale": scale, "parts": parts}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    bounds = sorted({*(i for p in parts.values() for i in (p.a, p.b)), view.size}) if parts else []
    for start, end in itertools.pairwise(bounds):
        # An odd stride visits every column of a matrix, whose rows are a power of two long as a rule.
        stride = max(1, (end - start) // _SAMPLES) | 1
        digest.update(view[start:end:stride].tobytes())
    digest.update(np.array(sums, np.uint64).tobytes())
    return ResidentAdapter(numbers, parts, scale, digest.hexdigest(), _layout(parts))


def _layout(parts: Mapping[str, Part], widths: tuple[int, ...] = ()) -> int:
    """Return the number of a layout, whose mask keeps `widths` channels in the blocks."""
    return _LAYOUTS.setdefault((tuple(sorted(parts.items())), widths), next(_NUMBERS))


_LAYOUTS: dict[tuple[tuple[tuple[str, Part], ...], tuple[int, ...]], int] = {}
_NUMBERS = itertools.count()  # two threads never get the same one, as they may of `len(_LAYOUTS)`


def _fill_layer(
    view: np.ndarray,
    part: Part,
    sections: Mapping[str, tuple[int, int]],
    pairs: Sequence[Pair | None],
    read: TensorReader,
    path: str,
    source: str | Path,
) -> np.uint64:
    """Copy a layer's pairs (None for a section without one) to `part` of `view`; return its words' sum."""
    outputs, rank = sum(width for _, width in sections.values()), part.rank
    blocks = _filled_up(outputs) // BLOCK
    mine = view[part.a : part.b + rank * blocks * BLOCK]
    all_b = view[part.b : part.b + rank * blocks * BLOCK]
    (inputs, _), *_ = sections.values()
    fills_blocks = outputs % BLOCK == len(sections) * rank * inputs % BLOCK == 0
    if not fills_blocks or any(pair is None or pair[0].shape[1] != rank for pair in pairs):
        mine[:] = 0
    start = 0
    for index, ((end, (_, width)), pair) in enumerate(zip(sections.items(), pairs, strict=True)):
        if pair is not None:
            a = _checked(read(pair[0]), f"{path}.lora_a{end}", source)
            section = view[part.a + index * rank * inputs :][: a.size]
            np.copyto(section.reshape(a.T.shape), a.T)
            b = _checked(read(pair[1]), f"{path}.lora_b{end}", source)
            own = len(b)  # rank of this pair
            if start % BLOCK == width % BLOCK == 0:
                # Whole blocks move as one item each, which is three times as fast.
                first, count = start // BLOCK, width // BLOCK
                by_block = all_b.view(_BLOCK_BYTES).reshape(blocks, rank)
                moved = np.ascontiguousarray(b, np.float16).view(_BLOCK_BYTES).reshape(own, count)
                np.copyto(by_block[first : first + count, :own], moved.T)
            else:
                n = np.arange(start, start + width)
                all_b.reshape(blocks, rank, BLOCK)[n // BLOCK, :own, n % BLOCK] = b.T
        start += width
    return mine.view(np.uint64).sum()  # while the part is in the processor's cache


def _filled_up(count: int) -> int:
    return -(-count // BLOCK) * BLOCK


def _checked(values: np.ndarray, name: str, source: str | Path) -> np.ndarray:
    """Return the values as float16; raise `CheckpointError` for NaN and numbers beyond float16."""
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


def for_numpy(tensors: Mapping[str, Readable], source: str | Path) -> dict[str, Readable]:
    """Evaluate MLX arrays for `TensorReader`, and convert bfloat16, which NumPy lacks, to float32.

    Call this before threads read: MLX gives each thread that computes a stream, and never takes it back.
    """
    arrays = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, mx.array)}
    for name, array in arrays.items():
        if array.dtype == mx.bfloat16:
            arrays[name] = array.astype(mx.float32)
    with reading(source):
        mx.eval(arrays)
    return {**tensors, **arrays}


class TensorReader:
    """Reads tensors as NumPy arrays; each call may reuse the memory of the previous result."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def __call__(self, tensor: Readable) -> np.ndarray:
        """Return the numbers of a stored tensor, or of one from `for_numpy`; stored bfloat16 as float32."""
        if not isinstance(tensor, StoredTensor):
            return np.asarray(tensor)
        if self._buffer.size < tensor.nbytes:
            self._buffer = np.empty(tensor.nbytes, np.uint8)
        raw = self._buffer[: tensor.nbytes]
        tensor.read_into(raw)
        return float_values(raw, tensor.dtype).reshape(tensor.shape)


def pairs_by_layer(
    tensors: Mapping[str, Readable], shapes: Shapes, source: str | Path
) -> dict[str, list[Pair | None]]:
    """Return a mapping from each adapted layer's path to one pair (A, B) for each section, or None for it.

    `tensors` are whole pairs, of which only the shapes are read. Raises `CheckpointError`, which names the
    tensor that does not fit the model.
    """
    rest, result = dict(tensors), {}
    for path, of_sections in shapes.items():
        pairs: list[Pair | None] = []
        for end, (inputs, outputs) in of_sections.items():
            a, b = rest.pop(f"{path}.lora_a{end}", None), rest.pop(f"{path}.lora_b{end}", None)
            if a is None and b is None:
                pairs.append(None)
                continue
            assert a is not None  # pairs are whole
            assert b is not None
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


class RankPart(NamedTuple):
    """The part of an adapter that one rank loads, of a model whose layers are split over ranks."""

    channels: Mapping[str, np.ndarray]  # kept of a tensor, by its name; see `TargetModule.channels`
    names: Mapping[str, str | None]  # of stacks' tensors; see `TargetModule.own_names`
    shapes: Shapes  # of what is left

    @classmethod
    def of(cls, model: nn.Module) -> RankPart:
        targets = target_modules(model)
        return cls(
            {name: kept for each in targets for name, kept in each.channels.items()},
            {name: own for each in targets for name, own in each.own_names.items()},
            {each.path: each.part_shapes for each in targets},
        )

    def taken(self, tensors: Mapping[str, Readable]) -> dict[str, Readable]:
        """Return a rank's part of whole LoRA tensors."""
        found = {}
        for name, tensor in tensors.items():
            if (own := self.names.get(name, name)) is None:
                continue
            if name in self.channels:
                tensor = _Taken(tensor, self.channels[name], 0 if is_a(name) else 1)
            found[own] = tensor
        return found


class Base(NamedTuple):
    """What an adapter has to fit: a model's shapes and fingerprints."""

    shapes: Shapes
    fingerprints: Collection[str] | None  # that an adapter may name; None accepts any adapter
    config: ModelConfig | ZooBase | None = None
    masks: MaskBase | RequestError | None = None  # the error says why the model takes no masks
    part: RankPart | None = None  # what a rank takes of adapters; None for all

    @property
    def own_shapes(self) -> Shapes:
        """The shapes that adapters have in this process."""
        return self.shapes if self.part is None else self.part.shapes

    @classmethod
    def of(
        cls, model: nn.Module, base_folder: str | Path | None = None, force: bool = False
    ) -> Base:
        """Describe a model in memory, with LoRA layers or without; `force` accepts adapters of other models.

        The fingerprint of `base_folder`, an AFM model's folder, is accepted too: the fingerprint of arrays in
        memory depends on the type that the device computes in. A rank's part of a model has no fingerprint in
        memory: without `base_folder`, and in models of mlx-lm, any adapter whose shapes fit is accepted there.
        """
        if ranks_of(model) is not None:
            return cls._of_part(model, base_folder, force)
        fingerprints = None if force else {base_model_fingerprint(model)}
        if not is_afm(model):
            zoo = zoo_base(model)
            return cls(zoo.shapes, fingerprints, zoo, _mask_base(model))
        if fingerprints is not None and base_folder is not None:
            fingerprints.add(folder_fingerprint(model.args, base_folder))
        return cls(target_shapes(model), fingerprints, model.args, _mask_base(model))

    @classmethod
    def _of_part(cls, model: nn.Module, base_folder: str | Path | None, force: bool) -> Base:
        fingerprints = None
        if is_afm(model) and base_folder is not None and not force:
            fingerprints = {folder_fingerprint(model.args, base_folder)}
        return cls(
            target_shapes(model),
            fingerprints,
            model.args if is_afm(model) else zoo_base(model),
            RequestError("Task masks are for models that one process holds."),
            RankPart.of(model),
        )


def _mask_base(model: nn.Module) -> MaskBase | RequestError:
    try:
        return MaskBase.of(model)
    except RequestError as error:
        return error


@dataclass(frozen=True)
class OpenAdapter:
    """An adapter whose headers were read and fit the base."""

    tensors: Mapping[str, Readable]  # by their names in an adapter folder
    scale: float  # alpha / rank
    base: Base
    source: str  # for errors
    stamps: Mapping[Path, tuple[int, ...]]  # see `_stamps`
    nbytes: int  # that the adapter will take in memory
    mask: TaskMask | None = None
    plan: Plan | None = None  # of the mask
    whole: str = ""  # see `ResidentAdapter.whole`

    def with_mask(self, folder: Path) -> OpenAdapter:
        """Return the adapter with a folder's task mask; raise `AFMError` if the mask does not fit the base."""
        if self.mask is not None:
            raise RequestError(
                f"{self.source} has a task mask, and {folder} is another one. Take an adapter without a mask."
            )
        check_has_mask(folder)
        stamps = _stamps(folder) | dict(self.stamps)
        mask, masks = read_mask(folder), self.base.masks
        if not isinstance(masks, MaskBase):
            raise masks or RequestError("The base was described without its feed-forwards.")
        check_base(mask.base_model_fingerprint, self.base.fingerprints, folder, "task mask")
        masks.check(mask, folder)
        plan = masks.plan(mask)
        tensors = self.tensors
        if plan:
            tensors = _taken_tensors(for_numpy(tensors, self.source), mask, masks.layers)
        made = replace(self, tensors=tensors, stamps=stamps, mask=mask, plan=plan)
        _, nbytes = plan_layout(tensors, made.shapes, self.source)
        return replace(made, nbytes=max(nbytes, 2 * BLOCK) + plan_bytes(plan))

    @property
    def shapes(self) -> Shapes:
        """The shapes that LoRA pairs have in memory: behind a mask, with the kept channels alone."""
        shapes = dict(self.base.own_shapes)
        if self.mask is not None and isinstance(self.base.masks, MaskBase):
            for each in self.base.masks.layers:
                width = self.mask.widths[each.block]
                for target in each.targets:
                    ((end, (inputs, outputs)),) = target.shapes.items()
                    of_inputs = target is each.down
                    shapes[target.path] = {end: (width, outputs) if of_inputs else (inputs, width)}
        return shapes

    def read(self) -> ResidentAdapter:
        """Read the numbers into memory, or raise `CheckpointError` if a file has changed or holds NaN."""
        resident = build_resident(self.tensors, self.scale, self.shapes, self.source)
        resident = replace(resident, whole=self.whole)
        if self.mask is not None and self.plan:
            digest = hashlib.sha256(f"{resident.fingerprint} {self.mask.fingerprint}".encode())
            resident = replace(
                resident,
                fingerprint=digest.hexdigest(),
                layout=_layout(resident.parts, self.mask.widths),
                mask=self.mask,
                gathered=gather(self.plan),
            )
        for path, stamp in self.stamps.items():
            if _stamps(path) != {path: stamp}:
                raise CheckpointError(
                    f"{path} was changed while it was read. Load the adapter again once it is whole."
                )
        return resident


class _Taken(NamedTuple):
    """A tensor of a LoRA pair with the kept channels alone, which NumPy reads as an array."""

    tensor: Readable
    channels: np.ndarray
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        shape = list(self.tensor.shape)
        shape[self.axis] = self.channels.size
        return shape[0], shape[1]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.take(TensorReader()(self.tensor), self.channels, self.axis)


def _taken_tensors(
    tensors: Mapping[str, Readable], mask: TaskMask, layers: Sequence[FeedForward]
) -> dict[str, Readable]:
    """Return LoRA tensors with the kept channels alone: B's columns of `gate` and `up`, A's rows of `down`."""
    taken = dict(tensors)
    for each in layers:
        channels = mask.channels(each.block)
        for name, axis in each.lora_axes.items():
            if name in taken:
                taken[name] = _Taken(taken[name], channels, axis)
    return taken


def _whole_digest(tensors: Mapping[str, Readable], scale: float) -> str:
    """Return 64 hex digits that are equal for equal adapters."""
    digest, read = hashlib.sha256(repr(scale).encode()), TensorReader()
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].shape}".encode())
        digest.update(np.ascontiguousarray(read(tensors[name])).view(np.uint8).data)
    return digest.hexdigest()


def open_masked(path: str | Path | None, mask: str | Path | None, base: Base) -> OpenAdapter:
    """Open an adapter, a folder's task mask, or both as one; raises as `open_adapter`."""
    if path is None:
        assert mask is not None
        return open_adapter(Path(mask), base)
    opened = open_adapter(Path(path), base)
    return opened if mask is None else opened.with_mask(Path(mask))


def open_adapter(path: Path, base: Base) -> OpenAdapter:
    """Open an adapter of any format, and check that it fits a base; its folder may hold a task mask, too.

    Only the headers of an mlx-lm folder are read. Other formats are converted, so they are read whole. Raises
    `CheckpointError` when files are missing or damaged, hold no LoRA pairs, or are for another model, and
    `ConfigError` when the config can't be used.
    """
    stamps = _stamps(path)
    tensors: Mapping[str, Readable]
    if is_mask_alone(path):
        return OpenAdapter({}, 1.0, base, str(path), stamps, 0).with_mask(path)
    if (path / TENSORS_NAME).is_file() and (path / CONFIG_NAME).is_file():
        tensors, config = open_folder(path)
    else:
        # Formats import this room, and most runs don't need them.
        from afm_mlx.adapters.formats import read_adapter

        tensors, config = read_adapter(path, base.config, finite=False)
        with reading(path):
            mx.eval(tensors)
    check_fingerprint(config, base.fingerprints, path)
    whole = ""
    if base.part is not None:
        plan_layout(tensors, base.shapes, path)  # raises if the whole doesn't fit
        tensors = for_numpy(tensors, path)
        whole = _whole_digest(tensors, config.scale)
        tensors = base.part.taken(tensors)
    _, nbytes = plan_layout(tensors, base.own_shapes, path)
    opened = OpenAdapter(tensors, config.scale, base, str(path), stamps, nbytes, whole=whole)
    return opened.with_mask(path) if has_mask(path) else opened


def _stamps(path: Path) -> dict[Path, tuple[int, ...]]:
    """Return inode, size and modification time of each of an adapter's files, by its path."""
    try:
        if not path.exists():
            raise CheckpointError(f"There is no adapter {path}. Was it moved or deleted?")
        files = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]
        found = {file: file.stat() for file in files}
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}.") from None
    return {file: (s.st_ino, s.st_size, s.st_mtime_ns) for file, s in found.items()}


def open_sum(parts: Sequence[tuple[OpenAdapter, float]], base: Base, source: str) -> OpenAdapter:
    """Open the weighted sum of opened adapters; raises `RequestError` for a weight that can't be used."""
    for part, _ in parts:
        if part.mask is not None:
            raise RequestError(
                f"{part.source} has a task mask, which can't be weighted. Add up adapters without masks, and "
                "give the sum a mask when it is registered."
            )
    adapters = [(for_numpy(part.tensors, part.source), part.scale) for part, _ in parts]
    scale, terms = weighted_sum(adapters, [weight for _, weight in parts])
    tensors = {name: _Joined(tuple(each), int(is_a(name))) for name, each in terms.items()}
    stamps = {path: stamp for part, _ in parts for path, stamp in part.stamps.items()}
    _, nbytes = plan_layout(tensors, base.own_shapes, source)
    whole = " ".join(f"{weight} {part.whole}" for part, weight in parts if part.whole)
    return OpenAdapter(tensors, scale, base, source, stamps, nbytes, whole=whole)


def check_fingerprint(
    config: AdapterConfig, known: Collection[str] | None, source: str | Path
) -> None:
    """Raise `CheckpointError` if an adapter names another base than those `known`; None accepts any adapter."""
    check_base(config.base_model_fingerprint, known, source, "adapter")


def check_base(
    wanted: str | None, known: Collection[str] | None, source: str | Path, what: str
) -> None:
    """Raise `CheckpointError` if `what` names another base than those `known`; None accepts any."""
    if wanted is not None and known is not None and wanted not in known:
        raise CheckpointError(
            f"The {what} {source} was made for the model with fingerprint {named(wanted)}, and this one has "
            f"{' or '.join(sorted(known))}. Take the model that it was made for, make one "
            "for this model, or force it (--force) to try."
        )


class _Joined(NamedTuple):
    """Tensors to be joined along an axis when NumPy reads them as one array."""

    terms: tuple[Term[Readable], ...]
    axis: int

    @property
    def shape(self) -> tuple[int, int]:
        size = [0, 0]
        for tensor, _ in self.terms:
            size[self.axis] += tensor.shape[self.axis]
            size[1 - self.axis] = tensor.shape[1 - self.axis]
        return size[0], size[1]

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate(
            [
                np.asarray(TensorReader()(tensor), np.float32) * np.float32(factor)
                for tensor, factor in self.terms
            ],
            self.axis,
        )
