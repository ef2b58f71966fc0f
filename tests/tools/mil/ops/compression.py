"""Weights that are stored compressed."""

from __future__ import annotations

import numpy as np


def constexpr_blockwise_shift_scale(data, scale, offset=None):
    """iOS 18 `constexpr_blockwise_shift_scale`: scale * (data - offset).

    Args:
        data: integers, of any shape.
        scale: floats of the same rank; each axis is divided into as many blocks as this has entries.
        offset: of scale's shape, in data's type or a float; 0 without it.
    """
    if offset is not None and offset.shape != scale.shape:
        raise ValueError(f"offset is {offset.shape}, and scale is {scale.shape}")
    numbers = data.astype(scale.dtype)
    blocks = np.ix_(*_blocks(data.shape, scale.shape))
    if offset is not None:
        numbers = numbers - offset.astype(scale.dtype)[blocks]
    return numbers * scale[blocks]


def constexpr_lut_to_dense(indices, lut, vector_axis=None):
    """iOS 18 `constexpr_lut_to_dense`: each index is replaced by its entry of the look-up table of its block.

    Args:
        indices: (D0, ..., Dk) unsigned.
        lut: (B0, ..., Bk, entries, vector size): each axis of the indices is divided into so many blocks.
        vector_axis: along which the numbers of an entry lie; not needed for entries of one number.
    """
    if lut.ndim != indices.ndim + 2:
        raise ValueError(
            f"lut has {lut.ndim} axes, expected two more than the indices' {indices.ndim}"
        )
    blocks = np.ix_(*_blocks(indices.shape, lut.shape[:-2]))
    dense = lut[(*blocks, indices.astype(np.intp))]  # (D0, ..., Dk, vector size)
    size = lut.shape[-1]
    if size == 1:
        return dense[..., 0]
    axis = int(vector_axis) % indices.ndim
    shape = [n * (size if i == axis else 1) for i, n in enumerate(indices.shape)]
    return np.moveaxis(dense, -1, axis + 1).reshape(shape)


def _blocks(shape, counts):
    """By axis, the number of the block that each position lies in."""
    if len(shape) != len(counts) or any(n % c for n, c in zip(shape, counts, strict=True)):
        raise ValueError(f"{shape} can't be divided into {counts} blocks")
    return [np.arange(n) // (n // c) for n, c in zip(shape, counts, strict=True)]


OPS = {op.__name__: op for op in (constexpr_blockwise_shift_scale, constexpr_lut_to_dense)}
