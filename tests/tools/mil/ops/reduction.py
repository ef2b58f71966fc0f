"""Along axes: sums, means, maxima, running sums and softmax. Axes are all where none are named."""

from __future__ import annotations

import numpy as np


def reduce_sum(x, axes=None, keep_dims=False):
    """iOS 15 `reduce_sum`."""
    return np.sum(x, _axes(axes), x.dtype, keepdims=bool(keep_dims))


def reduce_mean(x, axes=None, keep_dims=False):
    """iOS 15 `reduce_mean`."""
    return np.mean(x, _axes(axes), keepdims=bool(keep_dims))


def reduce_max(x, axes=None, keep_dims=False):
    """iOS 15 `reduce_max`."""
    return np.max(x, _axes(axes), keepdims=bool(keep_dims))


def reduce_argmax(x, axis=-1, keep_dims=False, output_dtype="int32"):
    """iOS 17 `reduce_argmax`: the first index of the maximum; Core ML may take another of several."""
    if output_dtype not in ("int32", "uint16"):
        raise ValueError(f"output_dtype {output_dtype}, known are int32 and uint16")
    return np.argmax(x, int(axis), keepdims=bool(keep_dims))


def cumsum(x, axis=0, exclusive=False, reverse=False):
    """iOS 15 `cumsum`: sums of what comes before along the axis, each element included unless exclusive."""
    axis = int(axis)
    ordered = np.flip(x, axis) if reverse else x
    sums = np.cumsum(ordered, axis, x.dtype)
    if exclusive:
        sums = sums - ordered
    return np.flip(sums, axis) if reverse else sums


def softmax(x, axis=-1):
    """iOS 15 `softmax`: exp(x) / sum(exp(x)) along the axis, here without overflow."""
    powers = np.exp(x - x.max(int(axis), keepdims=True))
    return powers / powers.sum(int(axis), keepdims=True)


def _axes(axes):
    return None if axes is None else tuple(int(a) for a in axes)


OPS = {
    op.__name__: op for op in (reduce_sum, reduce_mean, reduce_max, reduce_argmax, cumsum, softmax)
}
