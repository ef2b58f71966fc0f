"""Which groups of channels a mask keeps: from scores and a share, and the share from bytes or a speed."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.task_mask import (
    FeedForward,
    MaskBase,
    TaskMask,
    apply_mask,
    feed_forwards,
    plan_cuts,
)
from afm_mlx.checkpoint.fingerprint import base_parameters
from afm_mlx.errors import ConfigError

SHARES = ("equal", "sensitivity")
"""How a share is spread over blocks: the same for all, or more for blocks whose channels score higher."""

_LEAST = 0.5
"""Part of its share that every block keeps: scores of different blocks are alike only roughly."""


def group_scores(scores: np.ndarray, group: int) -> np.ndarray:
    """Return the sum of each group's scores, (blocks, groups), from (blocks, channels)."""
    return scores.reshape(len(scores), -1, group).sum(axis=-1)


def kept_counts(scores: np.ndarray, share: float, shares: str = "equal") -> np.ndarray:
    """Return the number of groups that each block keeps, (blocks,), 1 or more.

    With "equal" it is the share of a block's groups, rounded. With "sensitivity" the same total goes to the
    groups with the highest `scores` (blocks, groups), but each block keeps half of its share at least.
    """
    blocks, groups = scores.shape
    equal = max(1, math.floor(share * groups + 0.5))
    if shares == "equal":
        return np.full(blocks, equal)
    least = max(1, math.floor(_LEAST * equal))
    ranked = -np.sort(-scores, axis=1)[:, least:]
    rest = np.argsort(-ranked, axis=None, kind="stable")[: blocks * (equal - least)]
    if not rest.size:
        return np.full(blocks, equal)
    return least + np.bincount(rest // (groups - least), minlength=blocks)


def kept_groups(scores: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return True for the `counts` highest scores of each block, (blocks, groups); of equals, the first."""
    order = np.argsort(-scores, axis=1, kind="stable")
    kept = np.zeros(scores.shape, bool)
    for block, count in enumerate(counts):
        kept[block, order[block, :count]] = True
    return kept


# -- the share


def step_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of the weights that a decode step reads: of feed-forward channels, and all others."""
    base = MaskBase.of(model)
    inside = sum(
        cut.nbytes
        for each in base.layers
        for target in each.targets
        for cut in plan_cuts(
            base.arrays[target.path], np.ones(each.width, bool), target is each.down, target.path
        ).values()
    )
    return inside, sum(array.nbytes for array in base_parameters(model).values()) - inside


def share_for_bytes(model: nn.Module, target: int, group: int) -> float:
    """Return the largest share with which a decode step reads at most `target` bytes of weights.

    Raises `ConfigError` when one group in each block is too much, or the whole model reads no more.
    """
    inside, rest = step_bytes(model)
    groups = feed_forwards(model)[0].width // group
    kept = math.floor((target - rest) * groups / inside)
    least = math.ceil(rest + inside / groups)
    if kept < 1 or kept >= groups:
        fault = (
            "the whole model reads no more: it needs no mask"
            if kept >= groups
            else "that is out of reach"
        )
        raise ConfigError(
            f"target_bytes is {target:,}, and {fault}. A step of this model reads {inside + rest:,} bytes of "
            f"weights, {inside:,} of them of feed-forward channels; allowed are {least:,} to "
            f"{inside + rest - 1:,}."
        )
    return kept / groups


_PROBE = 0.25  # the share at which the speed is measured, besides 1


def share_for_speed(
    model: nn.Module, target: float, group: int, speed: Callable[[nn.Module], float]
) -> float:
    """Return the largest share with which the model gives `target` tokens per second.

    `speed` measures a model. Seconds a token are taken to be linear in the share, as measured with the whole
    model and with a quarter of its channels, which the model has afterwards.

    Raises `ConfigError` when one group in each block is too slow, or the whole model is fast enough.
    """
    layers = feed_forwards(model)
    groups = layers[0].width // group
    whole = speed(model)
    probe = max(1, math.floor(_PROBE * groups))
    apply_mask(model, first_groups(layers, groups, probe, group))
    slope = (1 / whole - 1 / speed(model)) / (groups - probe) if probe < groups else 0.0
    fixed = 1 / whole - slope * groups
    kept = math.floor((1 / target - fixed) / slope) if slope > 0 else 0
    if target <= whole or kept < 1:
        fastest = 1 / (fixed + slope) if fixed + slope > 0 else whole
        fault = (
            "the whole model is as fast: it needs no mask"
            if target <= whole
            else "that is out of reach"
        )
        raise ConfigError(
            f"target_tokens_per_second is {target:g}, and {fault}. Measured here, the whole model gives "
            f"{whole:.1f}, and one group of {group} channels in each block about {fastest:.1f}."
        )
    return min(kept, groups) / groups


def first_groups(layers: list[FeedForward], groups: int, kept: int, group: int) -> TaskMask:
    """Return a mask of the first groups of every block, which runs as fast as any mask of its size."""
    bits = np.zeros((len(layers), groups), bool)
    bits[:, :kept] = True
    return TaskMask(bits, group)
