"""Matrix products, convolutions and attention."""

from __future__ import annotations

import math

import numpy as np

from tests.tools.mil.ops.reduction import softmax


def linear(x, weight, bias=None):
    """iOS 15 `linear`: x (.., inputs) times the transposed weight (outputs, inputs), plus bias (outputs,)."""
    if not 1 <= x.ndim <= 3:
        raise ValueError(f"x has {x.ndim} axes, expected 1 to 3")
    result = x @ weight.T
    return result if bias is None else result + bias


def matmul(x, y, transpose_x=False, transpose_y=False):
    """iOS 15 `matmul`: x @ y with NumPy's broadcasting, the last two axes swapped before where it says so."""
    x = np.swapaxes(x, -1, -2) if transpose_x and x.ndim > 1 else x
    y = np.swapaxes(y, -1, -2) if transpose_y and y.ndim > 1 else y
    return x @ y


def einsum(values, equation):
    """iOS 15 `einsum`: `nchw,nwhu->nchu` or `chw,whr->chr` in any letters, with sizes of 1 broadcast."""
    letters = {
        c: chr(ord("a") + i) for i, c in enumerate(dict.fromkeys(filter(str.isalpha, equation)))
    }
    pattern = "".join(letters.get(c, c) for c in equation)
    if pattern not in ("abcd,adce->abce", "abc,cbd->abd"):
        raise ValueError(f"the equation {equation} is none of the two that Core ML has")
    x, y = values  # (.., C, H, W) and (.., W, H, U)
    product = np.swapaxes(x, -3, -2) @ np.swapaxes(y, -3, -2)  # (.., H, C, U)
    return np.swapaxes(product, -3, -2)


def conv(x, weight, bias=None, strides=None, pad_type="valid", pad=None, dilations=None, groups=1):
    """iOS 17 `conv` of 1 x 1: a product with a matrix for each place. Other kernels are not known here.

    Args:
        x: (n, inputs, spatial ..).
        weight: (outputs, inputs, 1 ..).
        bias: (outputs,).
        strides: ones, by spatial axis.
        pad_type: how zeros are added at the borders, which a kernel of this size doesn't need.
        pad: zeros, two for each spatial axis.
        dilations: have no effect on a kernel of this size.
        groups: 1.
    """
    if set(weight.shape[2:]) != {1} or int(groups) != 1 or weight.ndim != x.ndim:
        raise ValueError(f"a kernel {weight.shape} in {int(groups)} groups, known is 1 x 1 in one")
    if (strides is not None and (strides != 1).any()) or (pad is not None and pad.any()):
        raise ValueError(f"strides {strides} and padding {pad}, known are ones and zeros")
    result = weight.reshape(weight.shape[:2]) @ x.reshape(*x.shape[:2], -1)
    result = result.reshape(x.shape[0], weight.shape[0], *x.shape[2:])
    return result if bias is None else result + bias.reshape(-1, *[1] * (x.ndim - 2))


def scaled_dot_product_attention(query, key, value, attn_mask=None):
    """iOS 18 `scaled_dot_product_attention`: softmax(Q K^T / sqrt(E) + mask) V.

    Args:
        query: (.., L, E).
        key: (.., S, E), with the same batch.
        value: (.., S, EV), with the same batch.
        attn_mask: broadcast to (.., L, S): what is added, or booleans of what takes part.
    """
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        raise ValueError(
            f"query {query.shape}, key {key.shape} and value {value.shape} differ in their batch"
        )
    scores = query @ np.swapaxes(key, -1, -2) / np.asarray(math.sqrt(query.shape[-1]), query.dtype)
    if attn_mask is not None and attn_mask.dtype == bool:
        scores = np.where(attn_mask, scores, np.asarray(-np.inf, scores.dtype))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return softmax(scores) @ value


OPS = {op.__name__: op for op in (linear, matmul, einsum, conv, scaled_dot_product_attention)}
