"""Arguments of the operations: packed matrices, low-rank adapters, keys and values, options.

A packed matrix consists of small codes, and of the scales or tables that map them to numbers:

    value[n, k] = scale * (code - (2**bits - 1) / 2)    balanced
    value[n, k] = scale * code + bias                   affine, MLX's own format
    value[n, k] = table[n * T // N, code]               palette, T tables

where scale and bias belong to the tensor, to row n, or to row n and the group that contains k. Codes are
packed into uint32 words along k, the first in the lowest bits, as MLX does. A balanced matrix equals an
affine one with `bias = -(2**bits - 1) / 2 * scale`.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

BITS = (2, 4, 8)
MODES = ("balanced", "affine", "palette")


class PackedWeight(NamedTuple):
    """A packed matrix of N output rows and K inputs.

    Args:
        codes: (N, K * bits / 32) uint32.
        bits: 2, 4 or 8.
        mode: "balanced", "affine" or "palette".
        scales: float; () per tensor, (N,) per row, (N, K / group_size) per group; None in a palette.
        biases: float of an affine matrix, in the shape of `scales`.
        table: (T, 2**bits) float32 of a palette; T divides N, and N / T rows share a table.
    """

    codes: mx.array
    bits: int
    mode: str
    scales: mx.array | None = None
    biases: mx.array | None = None
    table: mx.array | None = None

    @property
    def out_dims(self) -> int:
        return self.codes.shape[0]

    @property
    def in_dims(self) -> int:
        return self.codes.shape[1] * 32 // self.bits

    @property
    def granularity(self) -> str:
        """The unit that has one scale: "tensor", "row" or "group"; "table" for a palette."""
        return "table" if self.scales is None else ("tensor", "row", "group")[self.scales.ndim]

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale: all inputs unless scales are per group."""
        if self.scales is None or self.scales.ndim < 2:
            return self.in_dims
        return self.in_dims // self.scales.shape[1]

    @property
    def format(self) -> tuple[str, str, int]:
        """Mode, granularity and group size, on which the choice of a kernel depends."""
        return self.mode, self.granularity, self.group_size

    @property
    def layout(self) -> tuple[object, ...]:
        """Shapes and format; one kernel can multiply by two matrices whose layouts are equal."""
        scales = None if self.scales is None else self.scales.shape
        return self.codes.shape, self.bits, self.mode, scales

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays, which one product with a vector reads."""
        return sum(array.nbytes for array in self if isinstance(array, mx.array))


BLOCK = 16
"""Outputs of a low-rank adapter's B that are stored side by side."""

MAX_ADAPTERS = 8
"""Adapters that one product takes, limited by the number of buffers of a Metal kernel."""


class Part(NamedTuple):
    """Offsets of an adapter's A and B for one matrix in the adapter's flat array, multiples of `BLOCK`.

    A is (sections * rank, K), row by row. B (N, rank) is stored in blocks of `BLOCK` outputs, the last one
    padded with zeros, as (blocks, rank, BLOCK): `B[n, j]` is at `b + ((n // 16) * rank + j) * 16 + n % 16`. So
    a CPU multiplies a whole block at once, and a simdgroup's rows are neighbours. With rank 0, the adapter has
    no such matrix, and `a` and `b` have no meaning.
    """

    a: int
    b: int
    rank: int


class LowRank(NamedTuple):
    """LoRA adapters of one matrix, and which rows of the batch use which.

        y[m] += scales[s] * B_s (A_s x[m]),  s = slots[m]

    A matrix whose rows are several projections (fused QKV) has one A per section: rows of section i use
    `A[i * rank : (i + 1) * rank]`. An adapter is one array for all matrices of a model, so replacing that array
    replaces the adapter; ranks may differ.

    Args:
        numbers: up to `MAX_ADAPTERS` flat arrays, of one floating type.
        parts: offsets of each adapter's A and B for this matrix.
        scales: (adapters,) float32, alpha / rank.
        slots: (B,) int32, index of each batch row's adapter; another number, such as -1, for none.
        sections: the index after the last row of every section; (N,) for a plain matrix.
    """

    numbers: tuple[mx.array, ...]
    parts: tuple[Part, ...]
    scales: mx.array
    slots: mx.array
    sections: tuple[int, ...]

    @property
    def rank(self) -> int:
        """The largest rank that any of the adapters has in this matrix."""
        return max(part.rank for part in self.parts)


class ProductOptions(NamedTuple):
    """Options of a packed product: `residual + x' W^T + B A x'` with `x' = rms_norm(x) * norm`.

    Args:
        norm: weight of an RMSNorm that is applied to x first, (K,) float.
        eps: added to the mean square by that norm.
        residual: (..., N) float, added to the product. `packed_matmul` only.
        adapters: LoRA adapters of each matrix, gate's and up's in `packed_swiglu`. With adapters, the first
            axis of x is the batch. `packed_argmax` takes none.
        activation_bits: 16, or 8 where a backend may round activations to int8.
    """

    norm: mx.array | None = None
    eps: float = 1e-5
    residual: mx.array | None = None
    adapters: tuple[LowRank, ...] = ()
    activation_bits: int = 16

    def of_matrix(self, index: int) -> ProductOptions:
        """Return the options of a product with only the matrix of this index."""
        return self._replace(adapters=self.adapters[index : index + 1])


PLAIN = ProductOptions()
"""No norm, residual or adapters."""


class KeyValues(NamedTuple):
    """Keys and values that a block attends to, in one array: a cache is written once per token.

    Args:
        buffer: (B, 2 * n_kv_heads, S, head_dim), heads of keys and then of values, float, or int8 codes.
        key_scale, value_scale: 0-d float32 that a key's and a value's code is multiplied by; pass None for
            floats.
        tail: newest tokens' keys and values, not in `buffer` yet, (B, 2 * n_kv_heads, T, head_dim); None if
            `buffer` has all. A step that writes a token copies this short array, and not the buffer, which the
            previous step may still be reading. `decode_attention` only.
        starts: (B,) int32, tokens of each batch row in `buffer`; later ones are in `tail`. None without a tail.
    """

    buffer: mx.array
    key_scale: mx.array | None = None
    value_scale: mx.array | None = None
    tail: mx.array | None = None
    starts: mx.array | None = None

    @property
    def n_kv_heads(self) -> int:
        return self.buffer.shape[1] // 2

    @property
    def keys(self) -> mx.array:
        """(B, n_kv_heads, S, head_dim), a view."""
        return self.buffer[:, : self.n_kv_heads]

    @property
    def values(self) -> mx.array:
        """(B, n_kv_heads, S, head_dim), a view."""
        return self.buffer[:, self.n_kv_heads :]

    def tail_ends(self, lengths: mx.array, tokens: int) -> mx.array:
        """Return the tail's columns up to each row's `tokens` newest, (B,) int32.

        `lengths` (B,) are the rows' tokens up to the first of the newest.
        """
        assert self.starts is not None
        ends = lengths - self.starts
        return (
            ends + (tokens - 1) if tokens > 1 else ends
        )  # most steps: one operation less for each block


class AttentionPartials(NamedTuple):
    """Split-K partials of attention, one for each range of the columns, for a product that merges them first.

    With a range's sum v_s of weighted codes, largest score t_s in base 2, and sum of weights w_s, the output is

        value_scale * sum_s 2**(t_s - t) v_s / sum_s 2**(t_s - t) w_s,  t = max_s t_s

    Args:
        numbers: (B, n_heads, ranges, head_dim + 2) float32: v_s, t_s and w_s of every range.
        value_scale: 0-d float32 that a value's code is multiplied by.
        dtype: type of the output.
    """

    numbers: mx.array
    value_scale: mx.array
    dtype: mx.Dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the merged output, (B, 1, n_heads * head_dim)."""
        batch, n_heads, _, width = self.numbers.shape
        return batch, 1, n_heads * (width - 2)


class QueryRope(NamedTuple):
    """Arguments of the `rope_norm` that is applied to raw queries before attention; weight is (head_dim,)."""

    weight: mx.array
    theta: float
    eps: float


class NewToken(NamedTuple):
    """Projections of each row's newest token, and what turns them into heads in `norm_rope_attend`.

    Args:
        queries, keys, values: (B, 1, n_heads or n_kv_heads * head_dim), of one dtype.
        periods, eps: of `norm_rope`.
        norms: weights (head_dim,) of the queries' and of the keys' norm; None leaves the norms out.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    periods: mx.array
    norms: tuple[mx.array, mx.array] | None = None
    eps: float = 0.0

    def heads(self, head_dim: int) -> list[mx.array]:
        """Return queries, keys and values as (B, n_heads or n_kv_heads, 1, head_dim)."""
        return [x.reshape(x.shape[0], -1, 1, head_dim) for x in self[:3]]


class HeadOptions(NamedTuple):
    """Norms, scales and RoPE that make queries, keys and values of a fused QKV projection.

    Norms' weights are (head_dim,) float. `key_scale` and `value_scale` are 0-d float32 that a code is
    multiplied by, None for floats.
    """

    q_weight: mx.array
    k_weight: mx.array
    key_scale: mx.array | None
    value_scale: mx.array | None
    n_kv_heads: int
    theta: float
    eps: float


# -- codes and numbers of a packed matrix


def pack_codes(codes: mx.array, bits: int) -> mx.array:
    """Pack (N, K) integers below 2**bits into (N, K * bits / 32) uint32, the first code in the lowest bits."""
    per_word = 32 // bits
    words = codes.astype(mx.uint32).reshape(*codes.shape[:-1], -1, per_word)
    return (words << _shifts(bits)).sum(axis=-1).astype(mx.uint32)


def unpack_codes(words: mx.array, bits: int) -> mx.array:
    """Unpack (N, W) uint32 into (N, W * 32 / bits) uint8; the inverse of `pack_codes`."""
    codes = (words[..., None] >> _shifts(bits)) & (2**bits - 1)
    return codes.astype(mx.uint8).reshape(*words.shape[:-1], -1)


def _shifts(bits: int) -> mx.array:
    return mx.arange(0, 32, bits, dtype=mx.uint32)


def dequantize(weight: PackedWeight, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Return the numbers that a packed matrix stands for: (N, K), computed in float32."""
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
    """Return scales or biases in a shape that broadcasts to the codes' (N, K)."""
    array = array.astype(mx.float32)
    if weight.granularity == "group":
        return mx.repeat(array, weight.group_size, axis=-1)
    return array[:, None] if weight.granularity == "row" else array


def dequantize_rows(weight: PackedWeight, rows: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return rows of `dequantize(weight)`: (..., K) for integer indices (...)."""
    few = take_rows(weight, rows.reshape(-1))
    return dequantize(few, dtype).reshape(*rows.shape, weight.in_dims)


def take_rows(weight: PackedWeight, rows: slice | mx.array) -> PackedWeight:
    """Return the matrix of only these rows; in a palette, each row gets its own table."""
    scales, biases = (
        part if part is None or part.ndim == 0 else part[rows]
        for part in (weight.scales, weight.biases)
    )
    table = weight.table
    if table is not None:
        table = table[mx.arange(weight.out_dims)[rows] * table.shape[0] // weight.out_dims]
    return weight._replace(codes=weight.codes[rows], scales=scales, biases=biases, table=table)
