"""Codes into words and back, in plain MLX."""

from __future__ import annotations

import mlx.core as mx

from afm_mlx.kernels.formats import PackedWeight


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """(N, K) integers of [0, 2**bits) into (N, K * bits / 32) uint32, the first code in the lowest bits."""
    per_word = 32 // bits
    words = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, per_word)
    return (words << _shifts(bits)).sum(axis=-1).astype(mx.uint32)


def unpack_codes(words: mx.array, bits: int) -> mx.array:
    """(N, W) uint32 into (N, W * 32 / bits) uint8; undoes `pack_codes`."""
    codes = (words[..., None] >> _shifts(bits)) & (2**bits - 1)
    return codes.astype(mx.uint8).reshape(*words.shape[:-1], -1)


def _shifts(bits: int) -> mx.array:
    return mx.arange(0, 32, bits, dtype=mx.uint32)


def dequantize(weight: PackedWeight, dtype: mx.Dtype = mx.float32) -> mx.array:
    """The numbers that a packed matrix stands for: (N, K), computed in float32."""
    return dequantize_rows(weight, None, dtype)


def dequantize_rows(weight: PackedWeight, rows: mx.array | None, dtype: mx.Dtype) -> mx.array:
    """Rows of `dequantize(weight)`: (..., K) for integer indices (...); None for all."""

    def of_rows(array: mx.array) -> mx.array:
        return array if rows is None else array[rows]

    codes = unpack_codes(of_rows(weight.codes), weight.bits)
    if weight.mode == "palette":
        assert weight.table is not None
        index = mx.arange(weight.out_dims) if rows is None else rows
        tables = weight.table[index * weight.table.shape[0] // weight.out_dims]
        values = mx.take_along_axis(tables, codes.astype(mx.uint32), axis=-1)
    else:
        assert weight.scales is not None
        per_input = [_per_input(weight, a, of_rows) for a in (weight.scales, weight.biases)]
        scales, biases = per_input
        if weight.mode == "balanced":
            values = (codes.astype(mx.float32) - (2**weight.bits - 1) / 2) * scales
        else:
            values = codes.astype(mx.float32) * scales + biases
    return values.astype(dtype)


def _per_input(weight: PackedWeight, array: mx.array | None, of_rows) -> mx.array | None:
    """Scales or biases in a shape that multiplies codes (..., K)."""
    if array is None:
        return None
    array = array.astype(mx.float32)
    if weight.granularity == "tensor":
        return array
    if weight.granularity == "row":
        return of_rows(array)[..., None]
    return mx.repeat(of_rows(array), weight.group_size, axis=-1)
