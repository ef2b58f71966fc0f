"""The same numbers in another shape or order."""

from __future__ import annotations

import numpy as np


def reshape(x, shape):
    """iOS 17 `reshape`: -1 is what is left; a 0 is the size of x at the same axis, counted from the last."""
    sizes = [int(n) for n in shape]
    for i, size in enumerate(sizes):
        if size == 0:
            behind = len(sizes) - i
            sizes[i] = x.shape[-behind] if behind <= x.ndim else 1
    return x.reshape(sizes)


def transpose(x, perm):
    """iOS 17 `transpose`: axis i of the result is axis perm[i] of x."""
    return np.transpose(x, [int(p) for p in perm])


def expand_dims(x, axes):
    """iOS 17 `expand_dims`: axes of the result that are new."""
    return np.expand_dims(x, tuple(int(a) for a in axes))


def squeeze(x, axes=None):
    """iOS 17 `squeeze`: takes away these axes of size 1, or all."""
    return np.squeeze(x, None if axes is None else tuple(int(a) for a in axes))


def concat(values, axis, interleave=False):
    """iOS 15 `concat`: one behind the other, or interleaved element by element."""
    if not interleave:
        return np.concatenate(values, int(axis))
    axis = int(axis) % values[0].ndim
    joined = np.stack(values, axis + 1)
    shape = list(values[0].shape)
    shape[axis] *= len(values)
    return joined.reshape(shape)


def tile(x, reps):
    """iOS 15 `tile`: x so many times along each axis."""
    if len(reps) != x.ndim:
        raise ValueError(f"{len(reps)} numbers of repetitions for {x.ndim} axes")
    return np.tile(x, [int(n) for n in reps])


def shape(x):
    """iOS 15 `shape`: sizes of the axes, int32."""
    return np.array(x.shape, np.int32)


OPS = {op.__name__: op for op in (reshape, transpose, expand_dims, squeeze, concat, tile, shape)}
