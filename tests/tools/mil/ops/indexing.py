"""Parts of an array, read and written. Negative indices are out of bounds where iOS 17 says so."""

from __future__ import annotations

import numpy as np


def gather(x, indices, axis=0, batch_dims=0, validate_indices=False):
    """iOS 17 `gather`: x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]."""
    axis, batch_dims = int(axis) % x.ndim, int(batch_dims)
    _check_bounds(indices, x.shape[axis])
    if not batch_dims:
        return np.take(x, indices.astype(np.intp), axis)
    batch = x.shape[:batch_dims]
    if indices.shape[:batch_dims] != batch:
        raise ValueError(f"indices are {indices.shape}, and the batch of x is {batch}")
    rows = [
        np.take(x[i], indices[i].astype(np.intp), axis - batch_dims) for i in np.ndindex(*batch)
    ]
    return np.stack(rows).reshape(*batch, *rows[0].shape)


def slice_by_index(x, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None):
    """iOS 17 `slice_by_index`: x[begin:end:stride] by axis.

    Args:
        x: of any shape.
        begin: first index by axis.
        end: index by axis that is not taken any more.
        stride: by axis; ones without it.
        begin_mask: axes that start at their first element, or with a negative stride at their last.
        end_mask: axes that go on to their end.
        squeeze_mask: axes of which only `begin` is taken, and which then vanish.
    """
    return x[_slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


def slice_update(
    x, update, begin, end, stride=None, begin_mask=None, end_mask=None, squeeze_mask=None
):
    """iOS 18 `slice_update`: a copy of x in which the part that `slice_by_index` takes is `update`."""
    result = x.copy()
    slices = _slices(x.shape, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    if result[slices].shape != update.shape:
        raise ValueError(f"the slice is {result[slices].shape}, and the update is {update.shape}")
    result[slices] = update
    return result


def split(x, axis, num_splits=None, split_sizes=None):
    """iOS 15 `split`: parts of the given sizes, or so many equal ones."""
    if split_sizes is None:
        return tuple(np.split(x, int(num_splits), int(axis)))
    if split_sizes.sum() != x.shape[int(axis)]:
        raise ValueError(f"sizes {split_sizes} of an axis of {x.shape[int(axis)]}")
    return tuple(np.split(x, np.cumsum(split_sizes)[:-1], int(axis)))


def _slices(shape, begin, end, stride, begin_mask, end_mask, squeeze_mask):
    rank = len(shape)
    strides = [1] * rank if stride is None else stride.tolist()
    begins, ends = begin.tolist(), end.tolist()
    masks = [[False] * rank if m is None else m for m in (begin_mask, end_mask, squeeze_mask)]
    slices = []
    for i, length in enumerate(shape):
        no_begin, no_end, index = (mask[i] for mask in masks)
        if index:
            slices.append(0 if no_begin else begins[i])
            continue
        for bound, free in ((begins[i], no_begin), (ends[i], no_end)):
            if not free and not -length <= bound <= length:
                raise IndexError(
                    f"axis {i} from {begins[i]} to {ends[i]} has only {length} elements"
                )
        slices.append(
            slice(None if no_begin else begins[i], None if no_end else ends[i], strides[i])
        )
    return tuple(slices)


def _check_bounds(indices, length):
    if indices.size and not (indices.min() >= 0 and indices.max() < length):
        raise IndexError(f"indices from {indices.min()} to {indices.max()} of {length} elements")


OPS = {op.__name__: op for op in (gather, slice_by_index, slice_update, split)}
