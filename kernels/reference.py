"""Definitions of the operations in plain MLX, which every other backend must match."""

from __future__ import annotations

import functools
import math
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.kernels.operands import (
    BLOCK,
    PLAIN,
    AttentionPartials,
    HeadOptions,
    KeyValues,
    LowRank,
    NewToken,
    PackedWeight,
    ProductOptions,
    QueryRope,
    dequantize,
    dequantize_rows,
)

INT8_MIN, INT8_MAX = -128, 127


def quantize_int8(x: mx.array, scale: mx.array) -> mx.array:
    """Return `clamp(round(x / scale), -128, 127)`, int8, of the shape of `x`; `scale` is 0-d, float, positive.

    Rounds half to even, in float32 for any dtype of `x`.

    Source: tamm 0.2.0, `tamm/ao/layers/functional.py`, `fake_quantize`.
    """
    codes = mx.round(x.astype(mx.float32) / scale)
    return mx.clip(codes, INT8_MIN, INT8_MAX).astype(mx.int8)


def dequantize_int8(codes: mx.array, scale: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return `codes * scale`, multiplied in float32 and returned as `dtype`."""
    return (codes.astype(mx.float32) * scale).astype(dtype)


def fake_int8(x: mx.array, scale: mx.array, gradient_scale: float = 1.0) -> mx.array:
    """Return `dequantize_int8(quantize_int8(x))` with gradients, which go straight through the rounding:

        d/dx = 1 where the rounded value is within the codes, else 0
        d/dscale = gradient_scale * (code - x / scale) within, gradient_scale * code outside

    Computed in float32, returned in the dtype of `x`. The value does not depend on `gradient_scale`.

    Source: LSQ, Esser et al. 2020, equations 1 to 5.
    """
    fixed = mx.stop_gradient(scale)
    scale = fixed + gradient_scale * (scale - fixed)
    steps = x.astype(mx.float32) / scale
    rounded = mx.round(mx.stop_gradient(steps))
    codes = mx.clip(rounded, INT8_MIN, INT8_MAX)
    # Adds 0, and the gradient of `steps` where nothing was clipped.
    codes = codes + mx.where(rounded == codes, steps - mx.stop_gradient(steps), 0)
    return (codes * scale).astype(x.dtype)


def rope_norm(
    x: mx.array, weight: mx.array, offset: int | mx.array, theta: float, eps: float
) -> mx.array:
    """Apply rotary embedding to adjacent pairs, then RMSNorm over the head's dimensions; keep shape and dtype.

    Args:
        x: queries or keys, (B, n_heads, L, head_dim).
        weight: weight of the norm, (head_dim,).
        offset: position of the first of the L tokens: one for all rows, or (B,) int32; or (B, L) int32, of
            every token.
        theta: base of the frequencies, `theta ** (-2i / head_dim)`.
        eps: added to the mean square.
    """
    rope = functools.partial(
        mx.fast.rope, dims=x.shape[-1], traditional=True, base=theta, scale=1.0
    )
    if isinstance(offset, mx.array) and offset.ndim == 2:
        tokens = x.swapaxes(1, 2)  # (B, L, n_heads, head_dim), as rows of one token
        rows = rope(tokens.reshape(-1, *tokens.shape[2:])[:, :, None], offset=offset.reshape(-1))
        x = rows.reshape(tokens.shape).swapaxes(1, 2)
    else:
        x = rope(x, offset=offset)
    return mx.fast.rms_norm(x, weight, eps)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Return `x * weight / sqrt(mean(x^2) + eps)` over the last axis, in the dtype of `x`.

    NaN if the mean overflows, where MLX's own norm returns zeros.
    """
    squares = mx.mean(mx.square(x.astype(mx.float32)), axis=-1, keepdims=True)
    normed = mx.fast.rms_norm(x, weight, eps)
    return mx.where(squares < math.inf, normed, mx.array(math.nan, normed.dtype))


def attention(queries: mx.array, kv: KeyValues, mask: mx.array | str | None) -> mx.array:
    """Compute scaled dot-product attention with grouped heads over float or int8 keys and values.

    Static scales are factored out of the sums, `softmax(s_k (q . k) / sqrt(d)) v s_v`, so codes are not
    dequantized.

    Args:
        queries: (B, n_heads, L, head_dim), float; the output has their shape and dtype.
        kv: keys and values of S >= L tokens; `n_heads` is a multiple of their heads.
        mask: None, "causal" (the L queries are the last of the S tokens), or a boolean array that broadcasts to
            (B, n_heads, L, S), True where a query sees a key.
    """
    dtype = queries.dtype
    if kv.key_scale is not None:
        queries = (queries * kv.key_scale).astype(dtype)
    output = mx.fast.scaled_dot_product_attention(
        queries,
        kv.keys.astype(dtype),
        kv.values.astype(dtype),
        scale=queries.shape[-1] ** -0.5,
        mask=mask,
    )
    if kv.value_scale is not None:
        output = (output * kv.value_scale).astype(dtype)
    return output


def decode_attention(
    queries: mx.array,
    kv: KeyValues,
    lengths: mx.array,
    rope: QueryRope | None = None,
    merge: bool = True,
) -> mx.array | AttentionPartials:
    """Attend with a row's L newest tokens over a cache's buffers, each token up to itself.

    Args:
        queries: (B, n_heads, L, head_dim), float; the output has their shape and dtype.
        kv: buffers of any capacity, with a tail or without; columns after a row's newest token are not read.
        lengths: (B,) int32, columns that the first of a row's L tokens sees, its own included: its position +
            1. Each token after it sees one more.
        rope: if given, `queries` are raw, and `rope_norm` is applied to them first, from position `lengths -
            1` on.
        merge: if False, a variant may return the result of L = 1 as partials, for `packed_matmul` to merge.
    """
    if rope is not None:
        queries = rope_norm(queries, rope.weight, lengths - 1, rope.theta, rope.eps)
    seen = lengths[:, None] + mx.arange(queries.shape[2])
    if kv.tail is None or kv.starts is None:
        return attention(queries, kv, _first_columns(kv.buffer, seen))
    buffer = mx.concatenate([kv.buffer, kv.tail], axis=2)
    starts = kv.starts[:, None]
    in_tail = _first_columns(kv.tail, seen - starts)
    in_buffer = mx.broadcast_to(
        _first_columns(kv.buffer, starts), (*in_tail.shape[:3], kv.buffer.shape[2])
    )
    visible = mx.concatenate([in_buffer, in_tail], axis=-1)
    return attention(queries, kv._replace(buffer=buffer), visible)


def _first_columns(buffer: mx.array, counts: mx.array) -> mx.array:
    """Return a mask (B, 1, L, capacity), True at the first `counts` (B, L) columns of each batch row."""
    return mx.arange(buffer.shape[2]) < counts[:, None, :, None]


def merge_partials(partials: AttentionPartials) -> mx.array:
    """Merge `AttentionPartials`, by their formula, into attention's output (B, 1, n_heads * head_dim)."""
    sums, top, weights = partials.numbers.split([-2, -1], axis=-1)
    share = mx.power(2.0, top - top.max(axis=2, keepdims=True))
    merged = (share * sums).sum(axis=2) / (share * weights).sum(axis=2) * partials.value_scale
    return merged.reshape(partials.shape).astype(partials.dtype)


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """Attend with the L last of S tokens, each up to itself, as in a prompt; shapes as in `attention`."""
    return attention(queries, kv, "causal")


def gelu(x: mx.array) -> mx.array:
    """Return `x (1 + erf(x / sqrt(2))) / 2`, in the shape and type of x: float numbers."""
    return nn.gelu(x)


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    """Write the newest tokens of every row to its last columns of a cache's buffer; return the buffer.

    It is written in place if nothing else holds it. Buffer and tokens are (B, heads, capacity or L, head_dim),
    heads of keys and of values. `lengths`, (B,) int32, are columns in use per row, the L new ones included; at
    most `capacity`.
    """
    row, head, back = _places(*tokens.shape[:3])
    written = buffer[...]
    written[row, head, lengths[:, None, None] - back] = tokens
    return written


@functools.lru_cache(maxsize=8)
def _places(rows: int, heads: int, count: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return indices of batch rows and of heads, and distances of `count` tokens from a row's end.

    Arrays made on the host cost a GPU nothing, and a trace computes with the same arrays once for all blocks.
    """
    row, head = np.arange(rows)[:, None, None], np.arange(heads)[:, None]
    row, head, back = (
        mx.array(places.astype(np.int32)) for places in (row, head, np.arange(count, 0, -1))
    )
    return row, head, back


def rope_norm_quantize(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array]:
    """Apply RoPE and QK-norm to a fused QKV projection, and quantize keys and values to int8.

    Args:
        qkv: (B, L, (n_heads + 2 * n_kv_heads) * head_dim): queries, keys, values.
        offset: position of the first of the L tokens: one for all rows, or (B,) int32.

    Returns:
        queries (B, n_heads, L, head_dim) in the dtype of `qkv`; keys and then values, (B, 2 * n_kv_heads, L,
        head_dim): int8 codes, or in the dtype of `qkv` without scales.
    """
    heads = qkv.reshape(*qkv.shape[:2], -1, options.q_weight.shape[0]).swapaxes(1, 2)
    n_heads = heads.shape[1] - 2 * options.n_kv_heads
    q, k, v = heads.split([n_heads, n_heads + options.n_kv_heads], axis=1)
    q = rope_norm(q, options.q_weight, offset, options.theta, options.eps)
    k = rope_norm(k, options.k_weight, offset, options.theta, options.eps)
    if options.key_scale is None or options.value_scale is None:
        return q, mx.concatenate([k, v], axis=1)
    codes = [quantize_int8(k, options.key_scale), quantize_int8(v, options.value_scale)]
    return q, mx.concatenate(codes, axis=1)


def norm_rope(
    heads: mx.array,
    periods: mx.array,
    offset: int | mx.array,
    weight: mx.array | None = None,
    eps: float = 0.0,
) -> mx.array:
    """Return heads after a norm and then RoPE, as Qwen3 and Llama have them.

    Args:
        heads: (B, n_heads, L, head_dim); RoPE turns the pairs (i, head_dim / 2 + i).
        periods: (head_dim / 2,) float; a pair is turned by `position / periods[i]`.
        offset: position of the first of the L tokens: one for all rows, or (B,) int32.
        weight: (head_dim,) of the norm; None leaves the norm out.
        eps: of the norm.
    """
    if weight is not None:
        heads = mx.fast.rms_norm(heads, weight, eps)
    dims = heads.shape[-1]
    return mx.fast.rope(
        heads, dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=periods
    )


def norm_rope_attend(
    token: NewToken, kv: KeyValues, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    """Run `norm_rope`, `write_tokens` and `decode_attention` for each row's newest token.

    Args:
        token: projections in `kv`'s dtype.
        kv: float buffers with a tail, to whose columns `lengths - 1 - starts` the tokens are written.
        lengths: (B,) int32, columns in use per row, the new token's included: its position + 1.

    Returns:
        attention's output (B, 1, n_heads * head_dim); the tail with the new tokens, whose columns behind the
        longest row's newest token may hold anything.
    """
    assert kv.tail is not None
    assert kv.starts is not None
    q, k, v = token.heads(kv.buffer.shape[3])
    q_norm, k_norm = token.norms or (None, None)
    q = norm_rope(q, token.periods, lengths - 1, q_norm, token.eps)
    k = norm_rope(k, token.periods, lengths - 1, k_norm, token.eps)
    tail = write_tokens(kv.tail, mx.concatenate([k, v], axis=1), lengths - kv.starts)
    y = decode_attention(q, kv._replace(tail=tail), lengths)
    assert isinstance(y, mx.array)
    return y.reshape(token.queries.shape), tail


def write_and_attend(
    qkv: mx.array, kv: KeyValues, lengths: mx.array, options: HeadOptions, merge: bool = True
) -> tuple[mx.array | AttentionPartials, mx.array]:
    """Run `rope_norm_quantize`, `write_tokens` and `decode_attention` for a row's L newest tokens.

    Args:
        qkv: the new tokens' queries, keys and values, (B, L, (n_heads + 2 * n_kv_heads) * head_dim).
        kv: int8 buffers with a tail, to whose columns from `lengths - 1 - starts` on the tokens are written.
        lengths: (B,) int32, columns in use per row, the first new token's included: its position + 1.

    Returns:
        attention's output (B, n_heads, L, head_dim) in the dtype of `qkv`, or with `merge=False` its partials;
        the tail with the new tokens.
    """
    queries, codes = rope_norm_quantize(qkv, lengths - 1, options)
    kv = with_new_codes(kv, codes, lengths)
    assert kv.tail is not None
    return decode_attention(queries, kv, lengths), kv.tail


def with_new_codes(kv: KeyValues, codes: mx.array, lengths: mx.array) -> KeyValues:
    """Return keys and values whose tail has the codes of a row's L newest tokens; see `write_and_attend`.

    `codes` are (B, 2 * n_kv_heads, L, head_dim) int8; `kv` has a tail.
    """
    assert kv.tail is not None
    ends = kv.tail_ends(lengths, codes.shape[2])
    return kv._replace(tail=write_tokens(kv.tail, codes, ends))


def packed_matmul(x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN) -> mx.array:
    """Return `residual + x' W^T + B A x'` with `x' = rms_norm(x) * norm`, for x (..., K) and W (N, K).

    Norm, residual and adapters are optional; `activation_bits` is ignored here. Sums are float32, the result
    (..., N) has the dtype of `x`.
    """
    dtype = x.dtype
    x = x.astype(mx.float32)
    if options.norm is not None:
        x = rms_norm(x, options.norm.astype(mx.float32), options.eps)
    y = _product(x, weight)
    for low_rank in options.adapters:
        y = y + low_rank_product(x, low_rank)
    if options.residual is not None:
        y = y + options.residual
    return y.astype(dtype)


def _product(x: mx.array, weight: PackedWeight) -> mx.array:
    """Return `x W^T`, whose gradient (of `x` only) dequantizes W again instead of storing it."""

    @mx.custom_function
    def product(x: mx.array) -> mx.array:
        return x @ dequantize(weight).T

    @product.vjp
    def gradient(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        # Depends on the cotangent; otherwise MLX would dequantize in the forward pass and store the result.
        codes = mx.depends([weight.codes], [cotangent])[0]
        return cotangent @ dequantize(weight._replace(codes=codes))

    return product(x)


def packed_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    experts: int,
    ascending: bool = False,
    activation_bits: int = 16,
) -> mx.array:
    """Return products with chosen experts of a mixture: `y[p] = x[p * M // P] W_e^T` with `e = indices[p]`.

    Sums are float32.

    Args:
        x: (M, K), float.
        weight: matrices of all experts, one after the other: (experts * N, K), balanced or affine.
        indices: (P,) integers from 0 to `experts` - 1, P a multiple of M.
        experts: number of experts.
        ascending: True if `indices` ascend, of which some variants make use.
        activation_bits: 16, or 8 where a backend may round activations to int8; ignored here.

    Returns:
        (P, N) of the dtype of `x`.
    """
    matrices = dequantize(weight).reshape(experts, -1, weight.in_dims)
    vectors = mx.repeat(x.astype(mx.float32), indices.size // max(1, x.shape[0]), axis=0)
    y = mx.gather_mm(vectors[:, None], matrices.swapaxes(1, 2), rhs_indices=indices)
    return y[:, 0].astype(x.dtype)


def low_rank_product(x: mx.array, low_rank: LowRank) -> mx.array:
    """Return the adapters' product, (B, ..., N) float32 for x (B, ..., K): zeros in rows without an adapter."""
    rows = x.astype(mx.float32).reshape(x.shape[0], -1, x.shape[-1])
    y = mx.zeros((*rows.shape[:2], low_rank.sections[-1]))
    for slot, part in enumerate(low_rank.parts):
        if part.rank:
            a, b = low_rank_factors(low_rank, slot, x.shape[-1])
            hidden = (rows @ a.T) * low_rank.scales[slot]
            added = [
                hidden[..., i * part.rank : (i + 1) * part.rank] @ b[start:end].T
                for i, (start, end) in enumerate(pairwise([0, *low_rank.sections]))
            ]
            mine = (low_rank.slots == slot)[:, None, None]
            y = mx.where(mine, mx.concatenate(added, axis=-1), y)
    return y.reshape(*x.shape[:-1], -1)


def low_rank_factors(
    low_rank: LowRank, slot: int, in_dims: int, dtype: mx.Dtype = mx.float32
) -> tuple[mx.array, mx.array]:
    """Return A (sections * rank, K) and B (N, rank) of the adapter at index `slot`."""
    numbers, part = low_rank.numbers[slot], low_rank.parts[slot]
    rows, out_dims = len(low_rank.sections) * part.rank, low_rank.sections[-1]
    blocks = -(-out_dims // BLOCK)
    a = numbers[part.a : part.a + rows * in_dims].reshape(rows, in_dims)
    b = numbers[part.b : part.b + blocks * part.rank * BLOCK].reshape(blocks, part.rank, BLOCK)
    b = b.swapaxes(1, 2).astype(dtype).reshape(blocks * BLOCK, part.rank)[:out_dims]
    return a.astype(dtype), b


def packed_swiglu(
    x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions = PLAIN
) -> mx.array:
    """Return `silu(x' G^T) * (x' U^T)` with `x' = rms_norm(x) * norm`; options as in `packed_matmul`."""
    wide = x.astype(mx.float32)
    g = packed_matmul(wide, gate, options.of_matrix(0))
    u = packed_matmul(wide, up, options.of_matrix(1))
    return (g * mx.sigmoid(g) * u).astype(x.dtype)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """Return rows of a packed matrix: (..., K) of `dtype` for integer tokens (...)."""
    return dequantize_rows(weight, tokens, dtype)


def packed_argmax(
    x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN
) -> tuple[mx.array, mx.array]:
    """Find the row with the largest product, the first on a tie: the next token of greedy decoding.

    Returns indices (...) uint32, and their products (...) float32: NaN or infinity if any product is NaN or
    +infinity.
    """
    logits = packed_matmul(x.astype(mx.float32), weight, options)
    return mx.argmax(logits, axis=-1), mx.max(logits, axis=-1)
