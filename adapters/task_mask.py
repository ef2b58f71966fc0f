"""Task masks: the channels of each block's feed-forward that a task needs.

A feed-forward computes `down(act(gate(x)) * up(x))`. A mask keeps some of its channels, in groups of
neighbours, and the model then runs with the kept rows of `gate` and `up` and the kept columns of `down` alone:
it equals the model whose other channels are multiplied by zero, and reads fewer bytes. Blocks may keep
different numbers of groups. The idea, with masks chosen by a task's description: Instruction-Following Pruning,
arXiv 2501.02086.

A folder holds a mask in two files, with an adapter's files or without them:

- `mask.safetensors`: `kept` (blocks, ceil(groups / 8)) uint8, one bit for each group, the first in the lowest.
- `mask_config.json`: the size of a group, the number of groups that each block keeps, the task's text, the
  base's fingerprint, and the fingerprint of the bits.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.adapters.target_modules import TargetModule, replace_layers, target_modules
from afm_mlx.checkpoint.safetensors_file import read_header, save_file
from afm_mlx.config import read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, RequestError, named, shown
from afm_mlx.files import atomic_write
from afm_mlx.json_values import is_text
from afm_mlx.kernels.cpu.memory import unfilled
from afm_mlx.model.fused_layers import ACTIVE, with_arrays

MASK_NAME = "mask.safetensors"
MASK_CONFIG_NAME = "mask_config.json"
GROUP = 16
"""Channels of a group unless a mask says another number: a 32-bit word of 2-bit codes in a row of `down`."""

_VERSION = 1
_MAX_CHANNELS = 1 << 25  # of all blocks together, more than any model has
_ALIGNMENT = 128  # bytes: a cache line of Apple's processors
_THREADS = 2
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_MAKE = "make a mask (afm-mlx prune for AFM models, write_mask in Python for others)"


@dataclass(frozen=True, eq=False)
class TaskMask:
    """The kept channels of every block's feed-forward.

    Args:
        kept: (blocks, groups) bool; group g holds the channels from `g * group` to `(g + 1) * group - 1`.
        group: number of channels that are kept or cut together.
        task: what the mask is for, as text.
        criterion: how the groups were chosen, such as "activation".
        base_model_fingerprint: fingerprint of the model that the mask was made for; None when unknown.

    Raises:
        RequestError: when `kept` or `group` has another form, or a block keeps no group.
    """

    kept: np.ndarray
    group: int = GROUP
    task: str = ""
    criterion: str = ""
    base_model_fingerprint: str | None = None

    def __post_init__(self) -> None:
        kept = self.kept
        if (
            not isinstance(kept, np.ndarray)
            or kept.dtype != bool
            or kept.ndim != 2
            or not kept.size
        ):
            raise RequestError(
                f"kept is {shown(kept)}; a bool array of shape [blocks, groups] is needed."
            )
        if type(self.group) is not int or self.group < 1:
            raise RequestError(f"group is {shown(self.group)}; a number of channels is needed.")
        empty = np.flatnonzero(~kept.any(axis=1))
        if empty.size:
            raise RequestError(
                f"Block {empty[0]} keeps no group of its feed-forward; every block must keep one or more."
            )

    @property
    def blocks(self) -> int:
        return self.kept.shape[0]

    @property
    def ffn_dim(self) -> int:
        """Channels of a block's feed-forward, kept or not."""
        return self.kept.shape[1] * self.group

    @property
    def share(self) -> float:
        """Kept channels of all blocks as a share of all channels, in (0, 1]."""
        return float(self.kept.mean())

    @property
    def is_full(self) -> bool:
        """True if every channel is kept."""
        return bool(self.kept.all())

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of channels that each block keeps."""
        return tuple(int(count) * self.group for count in self.kept.sum(axis=1))

    def channel_bits(self, block: int) -> np.ndarray:
        """Return a block's channels as (ffn_dim,) bool, True for kept ones."""
        return np.repeat(self.kept[block], self.group)

    def channels(self, block: int) -> np.ndarray:
        """Return the indices of a block's kept channels, ascending."""
        return np.flatnonzero(self.channel_bits(block))

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits of SHA-256, equal for masks that keep the same channels."""
        head = json.dumps([_VERSION, self.blocks, self.ffn_dim])
        bits = np.packbits(np.repeat(self.kept, self.group, axis=1), axis=1, bitorder="little")
        return hashlib.sha256(head.encode() + bits.tobytes()).hexdigest()


# -- files


def has_mask(folder: str | Path) -> bool:
    """True if a folder holds one of a mask's files."""
    folder = Path(folder)
    return (folder / MASK_NAME).is_file() or (folder / MASK_CONFIG_NAME).is_file()


def check_has_mask(folder: str | Path) -> None:
    """Raise `CheckpointError` if a folder holds no task mask."""
    if not has_mask(folder):
        raise CheckpointError(
            f"{folder} holds no task mask; a mask is a folder with {MASK_NAME} and {MASK_CONFIG_NAME}. Copy it "
            f"again, or {_MAKE}."
        )


def is_mask_alone(folder: str | Path) -> bool:
    """True if a folder holds a mask, and no adapter of any format."""
    # Names of adapters' files begin with this word in every format.
    return has_mask(folder) and not any(Path(folder).glob("adapter*"))


def write_mask(folder: str | Path, mask: TaskMask) -> None:
    """Write a mask's two files into a folder, which may hold an adapter; each is replaced whole or not at all.

    Raises `AFMError` when they can't be written.
    """
    folder = Path(folder)
    config = {
        "format_version": _VERSION,
        "group": mask.group,
        "ffn_dim": mask.ffn_dim,
        "kept_groups": mask.kept.sum(axis=1).tolist(),
        "kept_share": round(mask.share, 6),
        "task": mask.task,
        "criterion": mask.criterion,
        "base_model_fingerprint": mask.base_model_fingerprint,
        "mask_fingerprint": mask.fingerprint,
    }
    bits = mx.array(np.packbits(mask.kept, axis=1, bitorder="little"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / MASK_NAME) as path:
            save_file(path, {"kept": bits})
        with atomic_write(folder / MASK_CONFIG_NAME) as path:
            path.write_text(json.dumps(config, indent=4, sort_keys=True), encoding="utf-8")
    except OSError as error:
        raise AFMError(f"The mask in {folder} can't be written: {error}.") from None


def read_mask(folder: str | Path) -> TaskMask:
    """Read a folder's mask.

    Raises:
        CheckpointError: when a file is missing, cut off, or holds other bits than when it was written.
        ConfigError: when the config can't be used.
    """
    folder = Path(folder)
    path, tensors = folder / MASK_CONFIG_NAME, folder / MASK_NAME
    for file, other in ((path, MASK_NAME), (tensors, MASK_CONFIG_NAME)):
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing; a mask is {file.name} and {other}. Copy the whole folder again, or "
                f"{_MAKE}."
            )
    config = read_config_json(path)
    group: Any = config.get("group")
    ffn_dim: Any = config.get("ffn_dim")
    counts: Any = config.get("kept_groups")
    base, version = config.get("base_model_fingerprint"), config.get("format_version")
    are_counts = isinstance(counts, list) and all(type(n) is int and n > 0 for n in counts)
    most = _MAX_CHANNELS // max(1, len(counts)) if are_counts else _MAX_CHANNELS
    is_width = type(ffn_dim) is int and 0 < ffn_dim <= most
    widths = f"a multiple of group, up to {most:,}"
    is_group = type(group) is int and 0 < group <= _MAX_CHANNELS
    for name, value, holds, allowed in (
        ("format_version", version, version == _VERSION, "1"),
        ("group", group, is_group, "a number of channels"),
        ("ffn_dim", ffn_dim, is_width and is_group and ffn_dim % group == 0, widths),
        ("kept_groups", counts, are_counts and counts, "a number of 1 or more for each block"),
        ("task", config.get("task"), is_text(config.get("task", "")), "a text"),
        ("criterion", config.get("criterion"), is_text(config.get("criterion", "")), "a text"),
        ("base_model_fingerprint", base, base is None or is_text(base), "a text or null"),
    ):
        if not holds:
            raise ConfigError(f"{path}: {name} is {shown(value)}, and must be {allowed}.")
    groups = ffn_dim // group
    stored = read_header(tensors)
    bits, shape = stored.get("kept"), (len(counts), -(-groups // 8))
    if bits is None or len(stored) > 1 or (bits.dtype, bits.shape) != (mx.uint8, shape):
        found = {
            name: [str(t.dtype).removeprefix("mlx.core."), *t.shape] for name, t in stored.items()
        }
        raise CheckpointError(
            f"{tensors} holds {shown(found)}, and {MASK_CONFIG_NAME} needs kept, uint8 of shape "
            f"{list(shape)}. The two files are of different masks: copy the folder again."
        )
    unpacked = np.unpackbits(bits.read().reshape(shape), axis=1, bitorder="little")
    edited = CheckpointError(
        f"{tensors} has other bits than {MASK_CONFIG_NAME} says: one of the files was edited or damaged. "
        f"Copy the folder again, or {_MAKE}."
    )
    if unpacked[:, groups:].any() or not unpacked.any(axis=1).all():
        raise edited
    texts = config.get("task", ""), config.get("criterion", "")
    mask = TaskMask(unpacked[:, :groups].astype(bool), group, *texts, base)
    is_same = mask.kept.sum(axis=1).tolist() == counts
    if not is_same or config.get("mask_fingerprint") != mask.fingerprint:
        raise edited
    return mask


# -- a model's feed-forwards


class FeedForward(NamedTuple):
    """A block's feed-forward, whose hidden channels are the outputs of `gate` and `up` and inputs of `down`."""

    path: str  # of the module that holds the three layers, within the model
    block: int
    gate: TargetModule
    up: TargetModule
    down: TargetModule

    @property
    def targets(self) -> tuple[TargetModule, TargetModule, TargetModule]:
        return self.gate, self.up, self.down

    @property
    def lora_axes(self) -> dict[str, int]:
        """The axis that the hidden channels have in LoRA tensors, by the tensors' names in adapter files."""
        of_outputs = {f"{target.path}.lora_b": 1 for target in (self.gate, self.up)}
        return of_outputs | {f"{self.down.path}.lora_a": 0}

    @property
    def width(self) -> int:
        return sum(outputs for _, outputs in self.gate.shapes.values())


def feed_forwards(model: nn.Module) -> list[FeedForward]:
    """Return the feed-forward of each block of a model, for masks.

    Raises:
        RequestError: when a block has none with linear layers `gate_proj`, `up_proj` and `down_proj`, or two,
            or when blocks have different widths.
    """
    owners: dict[str, dict[str, TargetModule]] = {}
    for target in target_modules(model):
        if target.is_stack:
            raise RequestError(
                "This model can't run with task masks: its feed-forwards are stacks of matrices, of tracks or "
                "of experts."
            )
        owner, _, last = target.path.rpartition(".")
        if last in _PROJECTIONS:
            owners.setdefault(owner, {})[last] = target
    found = [
        FeedForward(path, layers["gate_proj"].block, *(layers[each] for each in _PROJECTIONS))
        for path, layers in owners.items()
        if len(layers) == len(_PROJECTIONS)
    ]
    if [each.block for each in found] != list(range(len(model.layers))):
        raise RequestError(
            "This model can't run with task masks: each block needs one feed-forward with linear layers "
            f"{', '.join(_PROJECTIONS)}, and {len({each.block for each in found})} of {len(model.layers)} "
            f"blocks have one, {len(found)} in all."
        )
    if len({each.width for each in found}) > 1:
        raise RequestError(
            "This model can't run with task masks: its blocks have feed-forwards of "
            f"{', '.join(map(str, sorted({each.width for each in found})))} channels, and a mask has one width."
        )
    return found


def apply_mask(model: nn.Module, mask: TaskMask) -> nn.Module:
    """Replace the feed-forwards' layers of a model by the kept channels, in place; return the model.

    The model is smaller then, and trains and runs as any other; its `args` keep the whole width. A mask that
    keeps all channels changes nothing. Codes, scales and float numbers are copied, never rounded.

    Raises:
        CheckpointError: when the mask is for another shape, or cuts a packed word or a group of scales.
        RequestError: when the model has adapters, or feed-forwards that masks can't cut.
    """
    if ACTIVE in model:
        raise RequestError(
            "The model has an adapter or a pool; take it off (detach_adapter), or load the model again."
        )
    base = MaskBase.of(model)
    base.check(mask, "to apply")
    layers = {target.path: target for target in target_modules(model)}
    if any(layers[path].layer is not layers[path].linear for path in base.arrays):
        raise RequestError("The model has LoRA layers. Apply the mask first, and then add them.")
    if not mask.is_full:
        taken = gather(base.plan(mask)).arrays()
        replaced = [(path, with_arrays(layers[path].linear, each)) for path, each in taken.items()]
        replace_layers(model, replaced)
    return model


class MaskBase(NamedTuple):
    """What a mask has to fit, and what it takes channels of: the feed-forwards of a model."""

    layers: Sequence[FeedForward]
    arrays: Mapping[str, Mapping[str, mx.array]]  # parameters by name, of each layer by its path

    @classmethod
    def of(cls, model: nn.Module) -> MaskBase:
        """Describe a model; raise `RequestError` as `feed_forwards` does."""
        layers = feed_forwards(model)
        targets = [target for each in layers for target in each.targets]
        # References, because a step that is traced puts placeholders into the layers.
        arrays = {t.path: dict(tree_flatten(t.linear.parameters())) for t in targets}
        mx.eval(arrays)
        return cls(layers, arrays)

    def check(self, mask: TaskMask, source: str | Path) -> None:
        """Raise `CheckpointError` unless a mask has the model's blocks and channels."""
        blocks, width = len(self.layers), self.layers[0].width
        if (mask.blocks, mask.ffn_dim) != (blocks, width):
            raise CheckpointError(
                f"The mask {source} is for {mask.blocks} blocks with feed-forwards of {mask.ffn_dim:,} "
                f"channels, and this model has {blocks} of {width:,}. Take the model that it was made for, or "
                f"{_MAKE}."
            )

    def plan(self, mask: TaskMask) -> Plan:
        """Return what a mask takes of every layer, nothing if it keeps all channels.

        Raises `CheckpointError` when channels of one packed word, or of one group of scales, are kept and cut.
        """
        if mask.is_full:
            return {}
        return {
            target.path: plan_cuts(self.arrays[target.path], kept, target is each.down, target.path)
            for each in self.layers
            for kept in [mask.channel_bits(each.block)]
            for target in each.targets
        }


# -- arrays of the kept channels


class Cut(NamedTuple):
    """Items of an array that are copied, in order."""

    array: mx.array  # evaluated
    axis: int  # 0 or 1; items are the same along the other one
    items: np.ndarray  # their indices
    run: int  # neighbours along the axis that make an item

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.array.shape)
        shape[self.axis] = len(self.items) * self.run
        return tuple(shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.array.dtype.size

    def copy_to(self, out: np.ndarray) -> None:
        """Copy the items into `nbytes` bytes, without an operation of MLX."""
        array, axis = self.array, self.axis
        item = array.dtype.size * self.run * math.prod(array.shape[axis + 1 :])
        lead = array.shape[0] if axis else 1
        items = (each.view(f"V{item}").reshape(lead, -1) for each in (_bytes_of(array), out))
        # Without "clip", NumPy copies to another array first.
        np.take(next(items), self.items, axis=1, out=next(items), mode="clip")


Plan: TypeAlias = Mapping[str, Mapping[str, Cut]]
"""The cuts of layers' parameters, by layers' paths and parameters' names."""


def plan_cuts(
    arrays: Mapping[str, mx.array], kept: np.ndarray, of_inputs: bool, name: str
) -> dict[str, Cut]:
    """Return the cuts of a linear layer's parameters; parameters that all channels share are left out.

    Args:
        arrays: parameters by name: `weight` (N, K), or codes (N, words); `scales` and `biases` of packed
            matrices; a palette's `table`; `bias` (N,).
        kept: (N,) or (K,) bool, at least one True.
        of_inputs: True if the channels are the layer's inputs (`down`), False for outputs (`gate` and `up`).
        name: the layer, for errors.

    Raises:
        CheckpointError: when channels of one packed word, or of one group of scales, are kept and cut.
    """
    cuts = {}
    for part, array in arrays.items():
        if part == "table":
            if not of_inputs and array.shape[0] > 1:
                # A table for each kept row: of rows that share one, some may be cut.
                rows = np.flatnonzero(kept) * array.shape[0] // kept.size
                cuts[part] = Cut(array, 0, rows, 1)
        elif array.ndim > of_inputs:
            cuts[part] = _cut(array, kept, int(of_inputs), f"{name}.{part}")
    return cuts


def _cut(array: mx.array, kept: np.ndarray, axis: int, name: str) -> Cut:
    """Return the cut of an array whose `axis` holds all channels, in equal units of one or more."""
    by_unit = kept.reshape(array.shape[axis], -1)
    chosen = by_unit[:, 0]
    if (by_unit != chosen[:, None]).any():
        per = by_unit.shape[1]
        raise CheckpointError(
            f"The mask keeps groups of {_run_length(kept)} channels, and {named(name)} holds channels in units "
            f"of {per}, which can't be cut. Make a mask whose group is a multiple of {per}: afm-mlx prune "
            f"--group {per} for AFM models, write_mask in Python for others."
        )
    run = _run_length(chosen)  # one item each, which copies faster
    return Cut(array, axis, np.flatnonzero(chosen[::run]), run)


def _run_length(kept: np.ndarray) -> int:
    """Return the largest power of two such that aligned runs of this length are kept or cut whole."""
    run = 1
    while kept.size % (2 * run) == 0:
        pairs = kept[::run].reshape(-1, 2)
        if (pairs[:, 0] != pairs[:, 1]).any():
            break
        run *= 2
    return run


def _bytes_of(array: mx.array) -> np.ndarray:
    """View an evaluated array's bytes, row-major; NumPy lacks bfloat16."""
    view = memoryview(array)
    return np.frombuffer(view.cast("B") if view.c_contiguous else view.tobytes(), np.uint8)


class Gathered(NamedTuple):
    """Parameters of the kept channels, in one block of memory."""

    memory: mx.array  # (n,) float16, of which each parameter takes some bytes
    plan: Plan

    def arrays(self) -> dict[str, dict[str, mx.array]]:
        """Return each layer's parameters by name; call it in the thread that runs the model."""
        made: dict[str, dict[str, mx.array]] = {}
        starts = _starts(self.plan)
        for path, cuts in self.plan.items():
            made[path] = {}
            for part, cut in cuts.items():
                start = starts[path, part] // 2
                numbers = self.memory[start : start + -(-cut.nbytes // 2)]
                if cut.array.dtype.size == 1:
                    numbers = numbers.view(mx.uint8)[: cut.nbytes]
                made[path][part] = numbers.view(cut.array.dtype).reshape(cut.shape)
        mx.eval(made)
        return made


def plan_bytes(plan: Plan) -> int:
    """Return the bytes of the block of memory that `gather` takes."""
    return sum(_padded(cut.nbytes) for cuts in plan.values() for cut in cuts.values())


def gather(plan: Plan) -> Gathered:
    """Copy the kept channels' parameters; no operation of MLX runs, so any thread may call this."""
    memory = unfilled(plan_bytes(plan) // 2)
    view, starts = np.array(memory, copy=False).view(np.uint8), _starts(plan)
    every = [(starts[path, part], cut) for path, cuts in plan.items() for part, cut in cuts.items()]

    def fill(first: int) -> None:
        for start, cut in every[first::_THREADS]:
            cut.copy_to(view[start : start + cut.nbytes])

    with ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(fill, range(_THREADS)))
    return Gathered(memory, plan)


def _starts(plan: Plan) -> dict[tuple[str, str], int]:
    """Return the first byte of each parameter, by path and name."""
    keys = [(path, part) for path, cuts in plan.items() for part in cuts]
    sizes = [_padded(plan[path][part].nbytes) for path, part in keys]
    return dict(zip(keys, itertools.accumulate(sizes, initial=0), strict=False))


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


# -- LoRA tensors of a masked model


def expand_lora(
    tensors: Mapping[str, mx.array], mask: TaskMask, layers: Sequence[FeedForward]
) -> dict[str, mx.array]:
    """Return LoRA tensors of a model with a mask (`apply_mask`) at the whole model's shapes, zero where cut.

    `tensors` have their names in adapter files; `layers` are the `feed_forwards` of either model.
    """
    result = dict(tensors)
    for each in layers:
        channels = mx.array(mask.channels(each.block))
        for name, axis in each.lora_axes.items():
            if name in result:
                shape = list(result[name].shape)
                shape[axis] = mask.ffn_dim
                whole = mx.zeros(shape, result[name].dtype)
                whole[(slice(None),) * axis + (channels,)] = result[name]
                result[name] = whole
    return result
