"""Attention of new tokens, by the operation that fits the call.

| call | keys and values | operation |
| --- | --- | --- |
| a few new tokens per row, with a cache | read from the cache's buffer and tail | `decode_attention` |
| a prompt, with a cache | read from the cache's buffer | `causal_attention` |
| no cache, no gradients | floats on the int8 grid | `causal_attention` |
| training, or rows that hold several samples | floats that carry gradients | `attention` |

Decoding fuses RoPE, norms, int8 codes, writing and attention. The others share the same results up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import mlx.core as mx

from afm_mlx.kernels import (
    AttentionPartials,
    HeadOptions,
    KeyValues,
    QueryRope,
    attention,
    causal_attention,
    decode_attention,
    dequantize_int8,
    fake_int8,
    rope_norm,
    rope_norm_quantize,
    write_and_attend,
    write_tokens,
)
from afm_mlx.model.kv_cache import KVCache, TailWriter, causal_mask

Attended: TypeAlias = mx.array | AttentionPartials
"""Attention's output (B, L, n_heads * head_dim), or the partials that the next product merges."""


class Positions(NamedTuple):
    """Positions of the new tokens in their rows, and the mask of what they see; the same for every block.

    Args:
        offset: position of the first new token: one for all rows, or (B,); or (B, L), the position of every
            token in rows that hold several samples.
        mask: as `afm_mlx.kernels.attention` takes it.
        lengths: (B,) int32, columns that the first new token of each row sees, its own included. Set if the
            step decodes: few new tokens, and keys and values are read from the cache's buffers.
        cached: True if keys and values go to a cache, so that no gradients are needed.
    """

    offset: int | mx.array
    mask: mx.array | str | None
    lengths: mx.array | None = None
    cached: bool = False

    @property
    def packed(self) -> bool:
        """True if rows hold several samples, each with its own positions."""
        return isinstance(self.offset, mx.array) and self.offset.ndim == 2


def row_positions(
    inputs: mx.array, segments: mx.array | None = None, shared: mx.array | None = None
) -> Positions:
    """Return the positions and mask of whole rows of tokens (B, L), which begin at position 0.

    `segments` (B, L) are equal for the tokens of one sample, which are consecutive; by default each row is one
    sample. Padding has another number, so it sees itself, and no query is without a key. With segments, offsets
    are (B, L) int32, each sample's from 0, and the mask is boolean (B, 1, L, L), True where a query sees a key.

    `shared` (B,) is the length of each row's first sample, such as a prompt, if the other samples continue it:
    they see its tokens, but not each other's, and their offsets begin at `shared`.
    """
    if segments is None:
        return Positions(0, causal_mask(inputs.shape[1]))
    column = mx.arange(segments.shape[1], dtype=mx.int32)
    fresh = mx.concatenate(
        [mx.zeros_like(segments[:, :1]), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    starts = mx.cummax(mx.where(fresh, column, 0), axis=1)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    offsets, sees = column - starts, same & (column[:, None] >= column)
    if shared is not None:
        follows = column >= shared[:, None]
        offsets = offsets + mx.where(follows, shared[:, None], 0)
        sees = sees | (follows[:, None, :, None] & ~follows[:, None, None, :])
    return Positions(offsets, sees)


def attend_and_write(
    qkv: mx.array,
    options: HeadOptions,
    positions: Positions,
    cache: TailWriter | None,
    *,
    training: bool,
    merge: bool,
) -> tuple[Attended, KeyValues]:
    """Write the new tokens' keys and values to the cache, and attend to all tokens so far.

    Args:
        qkv: the fused projection, (B, L, (n_heads + 2 * n_kv_heads) * head_dim).
        options: norms, scales and RoPE of the heads.
        positions: positions and mask of the new tokens.
        cache: the block's cache; pass None to attend to the new tokens only.
        training: True if gradients are needed.
        merge: False if the caller also accepts attention's partials (results over parts of the columns, which
            the next product merges).
    """
    if cache is not None and positions.lengths is not None:
        y, kv = _decode(qkv, options, positions.lengths, cache, merge)
        return _merge_heads(y), kv
    if isinstance(cache, KVCache) and cache.int8:
        q, codes = rope_norm_quantize(qkv, positions.offset, options)
        cache.update(codes)
        kv = KeyValues(cache.in_use(), options.key_scale, options.value_scale)
    elif isinstance(cache, KVCache):
        q, floats = _on_int8_grid(qkv, positions.offset, options)
        cache.update(floats)
        kv = KeyValues(cache.in_use())
    elif options.key_scale is not None and not training and not positions.packed:
        q, floats = _on_int8_grid(qkv, positions.offset, options)
        kv = KeyValues(floats)
    else:
        q, k, v = float_heads(qkv, positions.offset, options)
        if options.key_scale is not None and options.value_scale is not None:
            # LSQ's gradient scale of an activation: one over the root of its features times the largest code.
            share = (k.shape[1] * k.shape[3] * 127) ** -0.5
            k = fake_int8(k, options.key_scale, share)
            v = fake_int8(v, options.value_scale, share)
        kv = KeyValues(mx.concatenate([k, v], axis=1))
    return _merge_heads(_attend(q, kv, positions)), kv


def attend(
    q: mx.array, rope: QueryRope, positions: Positions, kv: KeyValues, merge: bool
) -> Attended:
    """Attend with new queries, (B, L, n_heads * head_dim), to all keys and values that another block wrote.

    For `positions` and `merge`, see `attend_and_write`.
    """
    heads = _heads(q, rope.weight.shape[0])
    if positions.lengths is not None:
        return _merge_heads(decode_attention(heads, kv, positions.lengths, rope, merge))
    heads = rope_norm(heads, rope.weight, positions.offset, rope.theta, rope.eps)
    return _merge_heads(_attend(heads, kv, positions))


def float_heads(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array, mx.array]:
    """Split a fused projection into queries, keys and values with RoPE and norm, by differentiable operations.

    Returns queries (B, n_heads, L, head_dim), and keys and values (B, n_kv_heads, L, head_dim); scales are not
    used.
    """
    head_dim = options.q_weight.shape[0]
    kv_dim = options.n_kv_heads * head_dim
    width = qkv.shape[-1]
    split = qkv.split([width - 2 * kv_dim, width - kv_dim], axis=-1)
    q, k, v = (_heads(projected, head_dim) for projected in split)
    q = rope_norm(q, options.q_weight, offset, options.theta, options.eps)
    k = rope_norm(k, options.k_weight, offset, options.theta, options.eps)
    return q, k, v


def _decode(
    qkv: mx.array, options: HeadOptions, lengths: mx.array, cache: TailWriter, merge: bool
) -> tuple[Attended, KeyValues]:
    """Attend with a few new tokens per row, which are written to the cache's tail."""
    count = qkv.shape[1]
    head_dim = options.q_weight.shape[0]
    buffer, tail, starts = cache.open_tail(2 * options.n_kv_heads, head_dim, count)
    int8 = buffer.dtype == mx.int8
    scales = (options.key_scale, options.value_scale) if int8 else (None, None)
    kv = KeyValues(buffer, *scales, tail, starts)
    if int8:
        y, tail = write_and_attend(qkv, kv, lengths, options, merge)
        cache.take_tail(tail, count)
        return y, kv._replace(tail=tail)
    q, new = _on_int8_grid(qkv, lengths - 1, options)
    tail = write_tokens(tail, new.astype(tail.dtype), lengths - starts + (count - 1))
    cache.take_tail(tail, count)
    kv = kv._replace(tail=tail)
    return decode_attention(q, kv, lengths, merge=merge), kv


def _attend(queries: mx.array, kv: KeyValues, positions: Positions) -> mx.array:
    """Attend with any number of queries, by `causal_attention` where no gradients are needed: it has none."""
    if isinstance(positions.mask, str) and (positions.cached or kv.key_scale is not None):
        return causal_attention(queries, kv)
    return attention(queries, kv, positions.mask)


def _on_int8_grid(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array]:
    """Return queries, and float keys and values (B, 2 * n_kv_heads, L, head_dim), rounded to any scales."""
    q, kv = rope_norm_quantize(qkv, offset, options)
    if options.key_scale is None or options.value_scale is None:
        return q, kv
    k, v = kv.split(2, axis=1)
    k = dequantize_int8(k, options.key_scale, q.dtype)
    return q, mx.concatenate([k, dequantize_int8(v, options.value_scale, q.dtype)], axis=1)


def _heads(x: mx.array, head_dim: int) -> mx.array:
    """Reshape (B, L, n * head_dim) to (B, n, L, head_dim)."""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def _merge_heads(x: Attended) -> Attended:
    """Reshape (B, n, L, head_dim) to (B, L, n * head_dim); partials stay as they are."""
    if isinstance(x, AttentionPartials):
        return x
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1)
