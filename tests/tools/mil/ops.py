"""Operations as pure functions of arrays, and the table of them by name.

Floats come in the type in which they are computed; the caller casts results to the program's types. Parameters
have the opset's names. Where Apple leaves a result undefined, such as for an index out of bounds, the operation
raises. The operations that our packages use are of iOS 15, 17 and 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

_DTYPES = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "bool": np.bool_}

# -- compression


def constexpr_blockwise_shift_scale(data, scale, offset=None):
    """Compute scale * (data - offset); each axis has as many blocks as `scale` has entries along it."""
    if offset is not None and offset.shape != scale.shape:
        raise ValueError(f"offset is {offset.shape}, and scale is {scale.shape}")
    numbers = data.astype(scale.dtype)
    blocks = np.ix_(*_blocks(data.shape, scale.shape))
    if offset is not None:
        numbers = numbers - offset.astype(scale.dtype)[blocks]
    return numbers * scale[blocks]


def constexpr_lut_to_dense(indices, lut):
    """Replace indices (D0, ..., Dk) by entries of the table of their block, lut (B0, ..., Bk, entries, 1)."""
    if lut.ndim != indices.ndim + 2 or lut.shape[-1] != 1:
        raise ValueError(f"lut is {lut.shape}, with indices {indices.shape}")
    blocks = np.ix_(*_blocks(indices.shape, lut.shape[:-2]))
    return lut[(*blocks, indices.astype(np.intp))][..., 0]


def _blocks(shape, counts):
    """Return, by axis, the number of the block of each position."""
    if len(shape) != len(counts) or any(n % c for n, c in zip(shape, counts, strict=True)):
        raise ValueError(f"{shape} can't be divided into {counts} blocks")
    return [np.arange(n) // (n // c) for n, c in zip(shape, counts, strict=True)]


# -- element by element


def real_div(x, y):
    if x.dtype.kind != "f" or y.dtype.kind != "f":  # of integers it is not described
        raise TypeError(f"real_div of {x.dtype} by {y.dtype}, expected floats")
    return x / y


def rsqrt(x, epsilon=1e-12):
    return 1 / np.sqrt(x + np.asarray(epsilon, x.dtype))


def cast(x, dtype):
    """Cast; floats become integers towards zero. Floats that become floats stay: the caller may round them."""
    target = np.dtype(_DTYPES[dtype])
    if target.kind == "f":
        return x if x.dtype.kind == "f" else x.astype(np.float64)
    return np.trunc(x).astype(target) if x.dtype.kind == "f" else x.astype(target)


# -- products


def linear(x, weight, bias=None):
    result = x @ weight.T
    return result if bias is None else result + bias


def einsum(values, equation):
    """Compute the one equation of our packages, of (.., C, H, W) and (.., W, H, U); sizes of 1 broadcast."""
    if equation != "nchw,nwhu->nchu":
        raise ValueError(f"the equation {equation} is not known here")
    x, y = values
    return np.swapaxes(np.swapaxes(x, -3, -2) @ np.swapaxes(y, -3, -2), -3, -2)


def conv(x, weight, strides=None, pad_type="valid", pad=None, dilations=None, groups=1):
    """Compute a convolution of 1 x 1: a product with a matrix for each place."""
    if set(weight.shape[2:]) != {1} or int(groups) != 1 or weight.ndim != x.ndim:
        raise ValueError(f"a kernel {weight.shape} in {int(groups)} groups, known is 1 x 1 in one")
    if (strides is not None and (strides != 1).any()) or (pad is not None and pad.any()):
        raise ValueError(f"strides {strides} and padding {pad}, known are ones and zeros")
    result = weight.reshape(weight.shape[:2]) @ x.reshape(*x.shape[:2], -1)
    return result.reshape(x.shape[0], weight.shape[0], *x.shape[2:])


def scaled_dot_product_attention(query, key, value, attn_mask):
    """Compute softmax(Q K^T / sqrt(E) + mask) V, all with the same batch."""
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} differ in their batch"
        )
    scores = query @ np.swapaxes(key, -1, -2) / np.asarray(math.sqrt(query.shape[-1]), query.dtype)
    return softmax(scores + attn_mask) @ value


def softmax(x, axis=-1):
    powers = np.exp(x - x.max(int(axis), keepdims=True))
    return powers / powers.sum(int(axis), keepdims=True)


# -- parts and shapes


def gather(x, indices, axis=0, batch_dims=0, validate_indices=False):
    axis = int(axis) % x.ndim
    if int(batch_dims) or not (indices.min() >= 0 and indices.max() < x.shape[axis]):
        raise IndexError(f"indices from {indices.min()} to {indices.max()} of {x.shape[axis]}")
    return np.take(x, indices.astype(np.intp), axis)


def _slices(shape, begin, end):
    for length, first, last in zip(shape, begin, end, strict=True):
        if not 0 <= first <= last <= length:
            raise IndexError(f"{first} to {last} has only {length} elements")
    return tuple(slice(first, last) for first, last in zip(begin, end, strict=True))


def slice_by_index(x, begin, end):
    return x[_slices(x.shape, begin, end)]


def slice_update(x, update, begin, end):
    """Return a copy of x in which the part from `begin` to `end` is `update`."""
    result, slices = x.copy(), _slices(x.shape, begin, end)
    if result[slices].shape != update.shape:
        raise ValueError(f"the slice is {result[slices].shape}, and the update is {update.shape}")
    result[slices] = update
    return result


def split(x, axis, num_splits=None, split_sizes=None):
    if split_sizes is None:
        return tuple(np.split(x, int(num_splits), int(axis)))
    if split_sizes.sum() != x.shape[int(axis)]:
        raise ValueError(f"sizes {split_sizes} of an axis of {x.shape[int(axis)]}")
    return tuple(np.split(x, np.cumsum(split_sizes)[:-1], int(axis)))


def concat(values, axis, interleave=False):
    if interleave:
        raise ValueError("interleaved concat is not known here")
    return np.concatenate(values, int(axis))


def cumsum(x, axis=0, exclusive=False, reverse=False):
    if exclusive or reverse:
        raise ValueError("exclusive and reverse sums are not known here")
    return np.cumsum(x, int(axis), x.dtype)


def _axes(axes):
    return tuple(int(a) for a in axes)


OPS: dict[str, Callable[..., Any]] = {
    **{
        op.__name__: op
        for op in (
            *(constexpr_blockwise_shift_scale, constexpr_lut_to_dense, real_div, rsqrt, cast),
            *(linear, einsum, conv, scaled_dot_product_attention, softmax, gather, slice_by_index),
            *(slice_update, split, concat, cumsum),
        )
    },
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "expand_dims": lambda x, axes: np.expand_dims(x, _axes(axes)),
    "floor_div": lambda x, y: x // y,
    "greater_equal": lambda x, y: x >= y,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "logical_and": lambda x, y: x & y,
    "maximum": lambda x, y: np.maximum(x, y),
    "minimum": lambda x, y: np.minimum(x, y),
    "mul": lambda x, y: x * y,
    "reduce_max": lambda x, axes, keep_dims: np.max(x, _axes(axes), keepdims=bool(keep_dims)),
    "reduce_mean": lambda x, axes, keep_dims: np.mean(x, _axes(axes), keepdims=bool(keep_dims)),
    "reshape": lambda x, shape: x.reshape(_axes(shape)),
    "round": lambda x: np.rint(x),  # halves to even
    "silu": lambda x: x * (1 + np.tanh(x / 2)) / 2,
    "sub": lambda x, y: x - y,
    "tile": lambda x, reps: np.tile(x, _axes(reps)),
    "transpose": lambda x, perm: np.transpose(x, _axes(perm)),
}
