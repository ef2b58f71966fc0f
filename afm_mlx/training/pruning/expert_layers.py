"""The mixture-of-experts layers of a model: which axis of which parameter counts experts, and how to cut it.

The axes are found by building the architecture twice, with the config's number of experts and with a smaller
number: a parameter whose shape differs has experts on the axis that shrank. So routers, their biases, and
experts of any architecture of mlx-lm are found without a list of names.

One table can hold the experts of several routers, one router's after the other: its first axis is then
`groups * experts` long, and every router keeps the same number of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.errors import ConfigError, named
from afm_mlx.quantization.packed_layers import PARTS

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that can hold a router's number of experts."""

_PARTS = (*PARTS, "global_scale")
"""Parameters of a packed matrix, ours or mlx-lm's."""


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one block, and their routers.

    Attributes:
        path: the module that computes experts, called with inputs and the experts' indices.
        experts: number of experts of a router.
        groups: number of routers whose experts are in the tables.
        axes: axis of experts in each parameter of the float model, by its name.
    """

    path: str
    experts: int
    groups: int
    axes: Mapping[str, int]

    @property
    def routers(self) -> list[str]:
        """Names of the parameters that belong to no expert: weights and biases of routers."""
        return [name for name in self.axes if not name.startswith(f"{self.path}.")]


Shapes = Mapping[str, tuple[int, ...]]


def model_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters by name; the arrays are not computed."""
    return {name: array.shape for name, array in tree_flatten(model.parameters())}


def expert_layers(whole: Shapes, small: Shapes, experts: int, fewer: int) -> list[ExpertLayer]:
    """Compare the shapes of one architecture with `experts` and with `fewer` experts of each router.

    Returns:
        The layers in the order of their blocks.

    Raises:
        ConfigError: if a parameter has another number of entries than its experts, or only one of the two
            models has it.
    """
    if differing := whole.keys() ^ small.keys():
        raise ConfigError(
            f"A model of this architecture with {fewer} experts has other parameters than one with {experts}, "
            f"such as {named(min(differing))}; so its experts can't be removed."
        )
    axes: dict[str, int] = {}
    tables: dict[str, int] = {}  # entries, by path
    for name, shape in whole.items():
        changed = [axis for axis, size in enumerate(shape) if size != small[name][axis]]
        if not changed:
            continue
        axis, groups = changed[0], shape[changed[0]] / experts
        if len(changed) > 1 or groups != int(groups) or small[name][axis] != groups * fewer:
            raise ConfigError(
                f"{name} is {list(shape)} for {experts} experts and {list(small[name])} for {fewer}: some of "
                "its entries belong to no expert, so experts of this architecture can't be removed."
            )
        axes[name] = axis
        if len(shape) == 3 and axis == 0 and name.endswith(".weight"):
            tables[name.rsplit(".", 2)[0]] = shape[0]
    found: dict[str, dict[str, int]] = {path: {} for path in tables}
    for name, axis in axes.items():
        # A router is in the block of its experts, not always in the same module.
        near = max(found, key=lambda path: _common_parts(path, name))
        found[near][name] = axis
    return [ExpertLayer(path, experts, tables[path] // experts, own) for path, own in found.items()]


def _common_parts(one: str, other: str) -> int:
    """Return the number of names with which two paths begin alike."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def cut_parameters(
    parameters: Mapping[str, mx.array], layer: ExpertLayer, kept: np.ndarray
) -> dict[str, mx.array]:
    """Return the parameters of a layer, float or packed, that change when only some experts stay.

    Packed matrices keep their codes and scales.

    Args:
        parameters: all parameters of the model by name.
        layer: the layer.
        kept: (groups, n) indices of the kept experts of each router, ascending.

    Raises:
        ConfigError: if experts share a palette's table.
    """
    firsts = np.arange(layer.groups)[:, None] * layer.experts
    found = {}
    for name, axis in layer.axes.items():
        stem = name.removesuffix("weight")
        for part in [f"{stem}{part}" for part in _PARTS] if name.endswith(".weight") else [name]:
            array = parameters.get(part)
            if array is None or array.ndim == 0:  # one scale for all
                continue
            entries = layer.experts * (layer.groups if axis == 0 else 1)
            rows, rest = divmod(array.shape[axis], entries)
            if rest or not rows:
                raise ConfigError(
                    f"{part} has {array.shape[axis]} rows for {entries} experts, which share them: such a "
                    "model can't lose experts. Prune the float model, and pack the result."
                )
            taken = (kept + firsts).reshape(-1) if axis == 0 else kept
            found[part] = _taken(array, axis, taken, rows)
    return found


def _taken(array: mx.array, axis: int, taken: np.ndarray, rows: int) -> mx.array:
    """Take experts on an axis that has `rows` entries for each.

    `taken` is a list of experts, or on another axis than the first one list for each router.
    """
    entries = (taken[..., None] * rows + np.arange(rows)).reshape(*taken.shape[:-1], -1)
    if taken.ndim == 1:
        return mx.take(array, mx.array(entries), axis=axis)
    if axis != 1 or array.shape[0] != len(taken):
        raise ConfigError(
            f"A parameter of shape {list(array.shape)} has no first axis of {len(taken)} routers."
        )
    indices = mx.array(entries).reshape(*entries.shape, *[1] * (array.ndim - 2))
    return mx.take_along_axis(array, indices, axis=1)


def fewer_experts(values: Mapping[str, Any], key: Sequence[str], number: int) -> dict[str, Any]:
    """Return the content of config.json with another number of experts, at a path of keys and its synonyms."""
    first, *rest = key
    if rest:
        return {**values, first: fewer_experts(values[first], rest, number)}
    same = [k for k in EXPERT_KEYS if values.get(k) == values[first]]
    return {**values, **dict.fromkeys(same, number)}
