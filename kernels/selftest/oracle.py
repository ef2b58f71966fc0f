"""The operations in float64 NumPy, with which the self-test and the tests compare every backend.

Written from the formulas, not from `kernels.reference`, so that its mistakes show. The functions take the
operations' arguments and return float64 arrays. They are slow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.operands import (
    BLOCK,
    PLAIN,
    HeadOptions,
    KeyValues,
    LowRank,
    NewToken,
    PackedWeight,
    ProductOptions,
    QueryRope,
)

_ROWS_AT_A_TIME = 4096  # rows of a matrix: the head's is gigabytes in float64


def float64(array: mx.array) -> np.ndarray:
    """Return an array's numbers, exactly, as float64."""
    if array.dtype in (mx.bfloat16, mx.float16):
        array = array.astype(mx.float32)
    return np.array(array).astype(np.float64)


def matrix(weight: PackedWeight) -> np.ndarray:
    return np.concatenate(list(_blocks(weight)))


def _blocks(weight: PackedWeight) -> Iterator[np.ndarray]:
    """Yield the numbers of the matrix in blocks of consecutive rows."""
    for start in range(0, weight.out_dims, _ROWS_AT_A_TIME):
        yield _rows(weight, np.arange(start, min(start + _ROWS_AT_A_TIME, weight.out_dims)))


def _rows(weight: PackedWeight, rows: np.ndarray) -> np.ndarray:
    """Return the numbers of these rows of the matrix, (rows, K)."""
    words = np.array(weight.codes, copy=False)[rows]
    optional = (weight.scales, weight.biases, weight.table)
    scales, biases, table = (None if array is None else float64(array) for array in optional)
    shifts = np.arange(0, 32, weight.bits, dtype=np.uint32)
    codes = words[:, :, None] >> shifts & np.uint32(2**weight.bits - 1)
    codes = codes.reshape(len(rows), -1)
    if table is not None:
        return table[rows[:, None] * len(table) // weight.out_dims, codes]
    assert scales is not None
    scale = _per_code(scales, rows, codes.shape[1])
    if weight.mode == "balanced":
        return scale * (codes - (2**weight.bits - 1) / 2)
    assert biases is not None
    return scale * codes + _per_code(biases, rows, codes.shape[1])


def _per_code(array: np.ndarray, rows: np.ndarray, in_dims: int) -> np.ndarray:
    if array.ndim == 0:
        return array
    of_rows = array[rows].reshape(len(rows), -1)
    return np.repeat(of_rows, in_dims // of_rows.shape[1], axis=1)


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return `x / sqrt(mean(x**2) + eps) * weight` over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def packed_matmul(x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN) -> np.ndarray:
    """See `reference.packed_matmul`."""
    x64 = float64(x)
    if options.norm is not None:
        x64 = rms_norm(x64, float64(options.norm), options.eps)
    y = np.concatenate([x64 @ block.T for block in _blocks(weight)], axis=-1)
    for low_rank in options.adapters:
        y += _low_rank(x64, low_rank)
    return y if options.residual is None else y + float64(options.residual)


def _low_rank(x: np.ndarray, low_rank: LowRank) -> np.ndarray:
    scales = float64(low_rank.scales)
    y = np.zeros((*x.shape[:-1], low_rank.sections[-1]))
    for row, slot in enumerate(np.array(low_rank.slots).tolist()):
        if not 0 <= slot < len(low_rank.parts):
            continue
        numbers, part = float64(low_rank.numbers[slot]), low_rank.parts[slot]
        start, rank = 0, part.rank
        for section, end in enumerate(low_rank.sections if rank else ()):
            first = part.a + section * rank * x.shape[-1]
            a = numbers[first : first + rank * x.shape[-1]].reshape(rank, -1)
            n, j = np.arange(start, end)[:, None], np.arange(rank)
            b = numbers[part.b + (n // BLOCK * rank + j) * BLOCK + n % BLOCK]
            y[row, ..., start:end] = scales[slot] * (x[row] @ a.T @ b.T)
            start = end
    return y


def packed_swiglu(
    x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions = PLAIN
) -> np.ndarray:
    """See `reference.packed_swiglu`."""
    g = packed_matmul(x, gate, options.of_matrix(0))
    u = packed_matmul(x, up, options.of_matrix(1))
    return g / (1 + np.exp(-g)) * u


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> np.ndarray:
    """See `reference.packed_embedding`."""
    index = np.array(tokens).astype(np.int64)
    return _rows(weight, index.reshape(-1)).reshape(*index.shape, -1)


def packed_gather(
    x: mx.array, weight: PackedWeight, indices: mx.array, experts: int, *_: object
) -> np.ndarray:
    """See `reference.packed_gather`."""
    rows, pairs = weight.out_dims // experts, np.array(indices)
    vectors = np.repeat(float64(x), len(pairs) // len(x), axis=0)
    y = np.empty((len(pairs), rows))
    for expert in np.unique(pairs):
        mine = pairs == expert
        y[mine] = vectors[mine] @ _rows(weight, expert * rows + np.arange(rows)).T
    return y


def rope(x: np.ndarray, offset: int | mx.array, theta: float) -> np.ndarray:
    """Apply rotary embedding to adjacent pairs of (B, n_heads, L, head_dim), at positions from `offset` on."""
    offsets = np.broadcast_to(np.array(offset), x.shape[:1]).astype(np.float64)
    positions = offsets[:, None] + np.arange(x.shape[2])
    frequencies = theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(
        1j * positions[:, None, :, None] * frequencies
    )
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def rope_norm_quantize(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[np.ndarray, np.ndarray]:
    """See `reference.rope_norm_quantize`; codes are clamped but not rounded."""
    q_weight, k_weight = float64(options.q_weight), float64(options.k_weight)
    heads = float64(qkv).reshape(*qkv.shape[:2], -1, len(q_weight)).swapaxes(1, 2)
    n_heads = heads.shape[1] - 2 * options.n_kv_heads
    q, k, v = np.split(heads, [n_heads, n_heads + options.n_kv_heads], axis=1)
    q = rms_norm(rope(q, offset, options.theta), q_weight, options.eps)
    k = rms_norm(rope(k, offset, options.theta), k_weight, options.eps)
    if options.key_scale is None or options.value_scale is None:
        return q, np.concatenate([k, v], axis=1)
    codes = [k / float64(options.key_scale), v / float64(options.value_scale)]
    return q, np.clip(np.concatenate(codes, axis=1), -128, 127)


def norm_rope(
    heads: mx.array,
    periods: mx.array,
    offset: int | mx.array,
    weight: mx.array | None = None,
    eps: float = 0.0,
) -> np.ndarray:
    """See `reference.norm_rope`."""
    x = float64(heads) if weight is None else rms_norm(float64(heads), float64(weight), eps)
    offsets = np.broadcast_to(np.array(offset), x.shape[:1]).astype(np.float64)
    positions = (offsets[:, None] + np.arange(x.shape[2]))[:, None, :, None]
    first, second = np.split(x, 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * positions / float64(periods))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def norm_rope_attend(
    token: NewToken, kv: KeyValues, lengths: mx.array
) -> tuple[np.ndarray, np.ndarray]:
    """See `reference.norm_rope_attend`."""
    assert kv.tail is not None
    q, k, v = token.heads(kv.buffer.shape[3])
    q_norm, k_norm = token.norms or (None, None)
    turned = norm_rope(q, token.periods, lengths - 1, q_norm, token.eps)
    keys = norm_rope(k, token.periods, lengths - 1, k_norm, token.eps)
    tail = float64(kv.tail)
    for row, column in enumerate((lengths - kv.starts - 1).tolist()):
        tail[row, :, column] = np.concatenate([keys[row], float64(v)[row]])[:, 0]
    seen = np.array(lengths)
    joined = _joined(kv._replace(tail=mx.array(tail.astype(np.float32))), seen)
    return _attend(turned, joined, seen[:, None]).reshape(token.queries.shape), tail


def decode_attention(
    queries: mx.array, kv: KeyValues, lengths: mx.array, query_rope: QueryRope | None = None
) -> np.ndarray:
    """See `reference.decode_attention`."""
    q = float64(queries)
    if query_rope is not None:
        q = rope(q, lengths - 1, query_rope.theta)
        q = rms_norm(q, float64(query_rope.weight), query_rope.eps)
    seen = np.array(lengths)[:, None] + np.arange(q.shape[2])
    return _attend(q, _joined(kv, seen[:, -1]), seen)


def write_and_attend(
    qkv: mx.array,
    kv: KeyValues,
    lengths: mx.array,
    options: HeadOptions,
    written: mx.array | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """See `reference.write_and_attend`; the tail's new columns in units of a code, clamped but not rounded.

    It attends to `written`; by default to the returned tail, rounded to codes.
    """
    q, codes = rope_norm_quantize(qkv, lengths - 1, options)
    assert kv.tail is not None
    tail = float64(kv.tail)
    for row, first in enumerate((lengths - kv.starts - 1).tolist()):
        tail[row, :, first : first + codes.shape[2]] = codes[row]
    written = mx.array(np.rint(tail).astype(np.int8)) if written is None else written
    seen = np.array(lengths)[:, None] + np.arange(q.shape[2])
    return _attend(q, _joined(kv._replace(tail=written), seen[:, -1]), seen), tail


def _joined(kv: KeyValues, lengths: np.ndarray) -> KeyValues:
    """Return keys and values without a tail: its tokens follow each row's others in the buffer."""
    if kv.tail is None:
        return kv
    buffer, tail, starts = float64(kv.buffer), float64(kv.tail), np.array(kv.starts)
    columns = np.zeros((*buffer.shape[:2], lengths.max(), buffer.shape[3]))
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        columns[row, :, :start] = buffer[row, :, :start]
        columns[row, :, start:length] = tail[row, :, : length - start]
    # Codes, and floats of up to 32 bits, are float32 without loss.
    return KeyValues(mx.array(columns.astype(np.float32)), kv.key_scale, kv.value_scale)


def causal_attention(queries: mx.array, kv: KeyValues) -> np.ndarray:
    """See `reference.causal_attention`."""
    batch, _, length, _ = queries.shape
    seen = np.arange(kv.buffer.shape[2] - length, kv.buffer.shape[2]) + 1
    return _attend(float64(queries), kv, np.tile(seen, (batch, 1)))


def _attend(q: np.ndarray, kv: KeyValues, seen: np.ndarray) -> np.ndarray:
    """Compute the attention of every query over the first `seen[row, token]` tokens of its row."""
    k, v = float64(kv.keys), float64(kv.values)
    if kv.key_scale is not None and kv.value_scale is not None:
        k, v = k * float64(kv.key_scale), v * float64(kv.value_scale)
    group = q.shape[1] // k.shape[1]
    output = np.empty_like(q)
    for row, head, token in np.ndindex(q.shape[:3]):
        keys, values = (x[row, head // group, : seen[row, token]] for x in (k, v))
        scores = keys @ q[row, head, token] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        output[row, head, token] = weights / weights.sum() @ values
    return output


def gelu(x: mx.array) -> np.ndarray:
    """See `reference.gelu`."""
    numbers = float64(x)
    return numbers * np.vectorize(math.erfc)(-numbers / 2**0.5) / 2


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> np.ndarray:
    """See `reference.write_tokens`."""
    output = float64(buffer)
    for row, length in enumerate(np.array(lengths).tolist()):
        output[row, :, length - tokens.shape[2] : length] = float64(tokens)[row]
    return output


packed_argmax = packed_matmul
"""Every product; the self-test looks up whether the right one was found."""
