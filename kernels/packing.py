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
    codes = unpack_codes(weight.codes, weight.bits)
    if weight.mode == "palette":
        assert weight.table is not None
        tables = weight.table[mx.arange(weight.out_dims) * weight.table.shape[0] // weight.out_dims]
        return mx.take_along_axis(tables, codes.astype(mx.uint32), axis=-1).astype(dtype)
    assert weight.scales is not None
    scales, numbers = _per_input(weight, weight.scales), codes.astype(mx.float32)
    if weight.mode == "balanced":
        values = (numbers - (2**weight.bits - 1) / 2) * scales
    else:
        assert weight.biases is not None
        values = numbers * scales + _per_input(weight, weight.biases)
    return values.astype(dtype)


def _per_input(weight: PackedWeight, array: mx.array) -> mx.array:
    """Scales or biases in a shape that multiplies codes (N, K)."""
    array = array.astype(mx.float32)
    if weight.granularity == "group":
        return mx.repeat(array, weight.group_size, axis=-1)
    return array[:, None] if weight.granularity == "row" else array


def dequantize_rows(weight: PackedWeight, rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Rows of `dequantize(weight)`: (..., K) for integer indices (...)."""
    few = take_rows(weight, rows.reshape(-1))
    return dequantize(few, dtype).reshape(*rows.shape, weight.in_dims)


def take_rows(weight: PackedWeight, rows: slice | mx.array) -> PackedWeight:
    """The matrix that has only these rows; in a palette each one gets a table of its own."""
    scales, biases = (
        part if part is None or part.ndim == 0 else part[rows]
        for part in (weight.scales, weight.biases)
    )
    table = weight.table
    if table is not None:
        table = table[mx.arange(weight.out_dims)[rows] * table.shape[0] // weight.out_dims]
    return weight._replace(codes=weight.codes[rows], scales=scales, biases=biases, table=table)
