"""Products of packed matrices in C++, on every instruction set of this machine, against float64 NumPy.

Activations are rounded to integers of one unit per vector, `u = max|x| / 32639` (or / 127), so an output moves
by at most `u / 2 * sum|w|`; and, the roundings being independent, by more than `3.5 u ||w||` once in 10^10
(Hoeffding). What comes on top is float32's: `GROSS` times the sum of the magnitudes that are added up.
"""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.cpu import native as ops
from afm_mlx.kernels.formats import MAX_ADAPTERS, LowRank, PackedWeight, ProductOptions
from afm_mlx.kernels.packing import pack_codes
from tests.tools import compare
from tests.tools.cases import all_pairs, draw
from tests.tools.compare import exact
from tests.tools.low_rank import draw_low_rank

native = extension.module()
if native is None:
    pytest.skip(extension.unavailable() or "", allow_module_level=True)

LARGEST = {16: 32639, 8: 127}
GROSS = 4e-6
ROUNDING = {mx.float32: 2.0**-23, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-10}
ROWS = (1, 2, 3, 5, 8, 17, 64)
# Whole registers, ragged ends, less than a register, more rows than a thread takes at once.
SHAPES = ((33, 512), (5, 1120), (1, 64), (70, 2080))
GRANULARITIES = ("tensor", "row", "groups of 32", "groups of 64", "groups of 16", "groups of 80")
FORMATS = [("palette", ""), *((m, g) for m in ("balanced", "affine") for g in GRANULARITIES)]


class Matrix:
    """A random packed matrix: as the kernels take it, its values, and the magnitudes summed on the way."""

    def __init__(self, rng, n, k, bits, mode, granularity="row", dtype=mx.float32, tables=1):
        self.codes = rng.integers(0, 2**bits, (n, k))
        scales = biases = table = None
        if mode == "palette":
            table = draw(rng, (tables, 2**bits), dtype)
            self.values = np.take_along_axis(exact(table).repeat(n // tables, 0), self.codes, -1)
            self.gross = np.abs(self.values)
        else:
            groups = k // int(granularity.split()[-1]) if granularity.startswith("groups") else 1
            shape = {"tensor": (), "row": (n,)}.get(granularity, (n, groups))

            def spread(numbers):
                per_group = np.broadcast_to(exact(numbers).reshape(-1, groups), (n, groups))
                return per_group.repeat(k // groups, -1)

            scales = draw(rng, shape, dtype)
            shift = np.full((n, k), -(2**bits - 1) / 2) * spread(scales)
            if mode == "affine":
                biases = draw(rng, shape, dtype)
                shift = spread(biases)
            self.values = spread(scales) * self.codes + shift
            self.gross = np.abs(spread(scales)) * self.codes + np.abs(shift)
        codes = pack_codes(mx.array(self.codes), bits)
        self.packed = PackedWeight(codes, bits, mode, scales, biases, table)


def oracle(x, matrix, activation_bits=16):
    """The product in float64, and how far a kernel may be from it."""
    wanted, gross = x @ matrix.values.T, GROSS * np.abs(x) @ matrix.gross.T
    if matrix.packed.mode == "palette":
        return wanted, gross
    unit = np.abs(x).max(-1, keepdims=True) / LARGEST[activation_bits]
    certain = unit / 2 * np.abs(matrix.values).sum(-1)
    likely = 3.5 * unit * np.sqrt((matrix.values**2).sum(-1))
    return wanted, gross + np.minimum(certain, likely)


def assert_within(got, wanted, allowed, *case):
    rounded = ROUNDING[got.dtype] * np.abs(wanted) + (2.0**-25 if got.dtype == mx.float16 else 0)
    compare.assert_within(got, wanted, rounded + allowed, case)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_products(rng, isa, bits):
    for case in all_pairs(FORMATS, SHAPES, ROWS, (16, 8)):
        (mode, granularity), (n, k), rows, activation_bits = case
        if granularity.startswith("groups") and k % int(granularity.split()[-1]):
            k = 960
        matrix, x = Matrix(rng, n, k, bits, mode, granularity), draw(rng, (rows, k))
        y = ops.packed_matmul(x, matrix.packed, ProductOptions(activation_bits=activation_bits))
        assert_within(y, *oracle(exact(x), matrix, activation_bits), *case)


def test_columns_that_fill_words_only(rng, isa):
    """K is a multiple of the codes in a word and of nothing else; nothing behind the codes is read."""
    for bits in (2, 4, 8):
        for words in range(1, 20):
            k = words * 32 // bits
            matrix, x = Matrix(rng, 3, k, bits, "balanced"), draw(rng, (int(rng.choice(ROWS)), k))
            assert_within(ops.packed_matmul(x, matrix.packed), *oracle(exact(x), matrix), bits, k)


def test_number_formats_and_shared_tables(rng, isa):
    for case in all_pairs(FORMATS[:3] + FORMATS[8:10], list(ROUNDING), (1, 8, 40)):
        (mode, granularity), dtype, rows = case
        matrix = Matrix(rng, 36, 320, 4, mode, granularity, dtype, tables=12)
        x = draw(rng, (rows, 320), dtype)
        y = ops.packed_matmul(x, matrix.packed)
        assert y.dtype == dtype
        assert_within(y, *oracle(exact(x), matrix), *case)


def test_an_identity_shows_what_activations_become(rng, isa):
    """Every element is within half a unit, and the vector nearer than bfloat16's rounding is on average."""
    k = 1024
    for bits in (2, 4, 8):
        codes = pack_codes(mx.array(np.eye(k, dtype=np.int32)), bits)
        identity = PackedWeight(codes, bits, "affine", mx.array(1.0), mx.array(0.0))
        x = draw(rng, (1, k))
        typical = mx.array(x)
        x[:, int(rng.integers(k))] = 100  # the worst case: one outlier sets the unit
        for activation_bits, largest in LARGEST.items():
            y = ops.packed_matmul(x, identity, ProductOptions(activation_bits=activation_bits))
            compare.assert_within(y, x, 100 / largest / 2 * (1 + 1e-3), (bits, activation_bits))
            off = np.linalg.norm(exact(y) - exact(x))
            assert off <= 1.1 * np.sqrt(k / 12) * 100 / largest
        y = ops.packed_matmul(x, identity)
        assert np.linalg.norm(exact(y) - exact(x)) < 2.0**-10 * np.linalg.norm(exact(x))
        y, bfloat16 = ops.packed_matmul(typical, identity), typical.astype(mx.bfloat16)
        off, coarse = (np.linalg.norm(exact(a) - exact(typical)) for a in (y, bfloat16))
        assert off < coarse


def test_the_largest_sums_fit(isa):
    """Codes at their maximum times digits at theirs: no int16 saturates, no int32 wraps around."""
    n, k = 17, 16384
    # Of 32639 units, two digits of 127 each; and the largest whose lower digit is -128.
    cases = all_pairs((2, 4, 8), (1.0, -1.0, -32384 / 32639, 32384 / 32639), (1, 3, 17), (16, 8))
    for case in cases:
        bits, value, rows, activation_bits = case
        codes = pack_codes(mx.full((n, k), 2**bits - 1, dtype=mx.uint32), bits)
        packed = PackedWeight(codes, bits, "affine", mx.array(1.0), mx.array(0.0))
        x = mx.full((rows, k), value)
        x[:, 0] = 1.0
        wanted = np.full((rows, n), (value * (k - 1) + 1) * (2**bits - 1))
        y = ops.packed_matmul(x, packed, ProductOptions(activation_bits=activation_bits))
        compare.assert_close(y, wanted, 1 / LARGEST[activation_bits], case)


def test_vectors_do_not_disturb_each_other(rng, isa):
    for rows in (2, 18):
        matrix, x = Matrix(rng, 20, 96, 2, "balanced"), exact(draw(rng, (rows, 96)))
        wanted, allowed = oracle(x, matrix)
        x[0] = wanted[0] = allowed[0] = 0
        x[1, int(rng.integers(96))] = rng.choice([np.nan, np.inf, -np.inf])
        y = ops.packed_matmul(mx.array(x.astype(np.float32)), matrix.packed)
        assert np.isnan(exact(y)[1]).all()
        keep = np.flatnonzero(np.arange(rows) != 1)
        assert_within(y[mx.array(keep)], wanted[keep], allowed[keep], rows)


def norm_oracle(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def adapters(rng, batch, k, sections, dtype):
    """Up to eight, of other ranks and types each, one of which may leave the matrix alone."""
    count = int(rng.integers(1, MAX_ADAPTERS + 1))
    ranks = rng.choice([0, 1, 3, 8, 16, 20], count).tolist()
    dtypes = [dtype, *(list(ROUNDING)[i] for i in rng.integers(0, 3, count - 1))]
    slots = rng.integers(-1, count, batch).tolist()
    slots[0] = 0
    return draw_low_rank(rng, slots, k, sections, ranks, dtypes)


def test_norm_residual_and_adapters(rng, isa):
    n = 75  # no register holds a whole number of 8-bit rows
    shapes, formats = ((1, 1), (3, 1), (2, 9), (20, 1), (1, 40)), ("row", "groups of 64")
    for case in all_pairs(list(ROUNDING), shapes, formats):
        dtype, (batch, length), granularity = case
        bits, k = (8, 212) if granularity == "row" else (2, 192)
        matrix = Matrix(rng, n, k, bits, "balanced", granularity)
        x, residual = draw(rng, (batch, length, k), dtype), draw(rng, (batch, length, n), dtype)
        norm, drawn = draw(rng, k, dtype), adapters(rng, batch, k, (40, 41, n), dtype)
        options = ProductOptions(norm, 1e-3, residual, (drawn.low_rank,))
        y = ops.packed_matmul(x, matrix.packed, options)
        x64 = norm_oracle(exact(x), exact(norm), 1e-3)
        wanted, allowed = oracle(x64, matrix)
        wanted = wanted + drawn.added(x64) + exact(residual)
        magnitude = drawn.added(x64, magnitudes=True) + np.abs(exact(residual)) + 1
        assert_within(y, wanted, allowed + GROSS * magnitude, *case)


def test_swiglu(rng, isa):
    n, k = 70, 128
    for case in all_pairs((16, 8), ((1, 1), (4, 1), (2, 20)), (False, True)):
        activation_bits, (batch, length), adapted = case
        matrices = [Matrix(rng, n, k, 2, "balanced") for _ in range(2)]
        drawn = [adapters(rng, batch, k, (n,), mx.float16) for _ in range(2 * adapted)]
        x, norm = draw(rng, (batch, length, k)), draw(rng, k)
        low_rank = tuple(each.low_rank for each in drawn)
        options = ProductOptions(norm, 1e-5, None, low_rank, activation_bits)
        y = ops.packed_swiglu(x, *(matrix.packed for matrix in matrices), options)
        x64 = norm_oracle(exact(x), exact(norm), 1e-5)
        (g, of_g), (u, of_u) = (oracle(x64, matrix, activation_bits) for matrix in matrices)
        if adapted:
            g, u = g + drawn[0].added(x64), u + drawn[1].added(x64)
            of_g = of_g + GROSS * (drawn[0].added(x64, magnitudes=True) + 1)
            of_u = of_u + GROSS * (drawn[1].added(x64, magnitudes=True) + 1)
        silu = g / (1 + np.exp(-g))
        allowed = 1.1 * of_g * (np.abs(u) + of_u) + np.abs(silu) * of_u  # |silu'| <= 1.1
        assert_within(y, silu * u, allowed + GROSS * np.abs(silu * u), *case)


def test_what_an_adapter_adds_does_not_depend_on_the_batch(rng, isa):
    """Of a matrix of zeros only that is left: bit for bit that of each row alone, whatever is beside it."""
    n, k, batch = 90, 204, 21
    codes = mx.zeros((n, k // 4), mx.uint32)
    zeros = PackedWeight(codes, 8, "affine", mx.zeros(()), mx.zeros(()))
    slots = rng.integers(-1, 8, batch).tolist()
    ranks = [16, 5, 0, 1, 32, 8, 16, 3]
    low_rank = draw_low_rank(rng, slots, k, (n,), ranks, [mx.float16] * 8).low_rank
    x = draw(rng, (batch, 1, k))
    together = ops.packed_matmul(x, zeros, ProductOptions(adapters=(low_rank,)))
    for row in rng.choice(batch, 6, replace=False).tolist():
        slot = max(slots[row], 0)
        alone = LowRank(
            (low_rank.numbers[slot],),
            (low_rank.parts[slot],),
            low_rank.scales[slot : slot + 1],
            mx.array([0 if slots[row] >= 0 else -1]),
            low_rank.sections,
        )
        wanted = ops.packed_matmul(x[row : row + 1], zeros, ProductOptions(adapters=(alone,)))
        compare.assert_same(together[row], wanted[0], row)


def test_adapters_on_many_threads(rng):
    """More pieces than threads and fewer, of both matrices; the same bits whoever computes them."""
    n, k = 700, 1024
    matrix, x = Matrix(rng, n, k, 2, "balanced"), draw(rng, (5, 1, k))
    slots, dtypes = [0, 1, 1, -1, 2], [mx.float16] * 3
    low_rank = draw_low_rank(rng, slots, k, (300, n), [40, 4, 1], dtypes).low_rank
    options = ProductOptions(adapters=(low_rank,))
    before, wanted = native.threads(), None
    try:
        for threads in (1, 2, 5):
            native.set_threads(threads)
            for got in [ops.packed_matmul(x, matrix.packed, options) for _ in range(20)]:
                mx.eval(got)
                wanted = got if wanted is None else wanted
                compare.assert_same(got, wanted, f"{threads} threads")
    finally:
        native.set_threads(before)


def test_slots_that_are_no_adapter_mean_none(rng, isa):
    n, k = 40, 64
    matrix, x = Matrix(rng, n, k, 2, "balanced"), draw(rng, (6, 1, k))
    slots = [0, -1, 1, 2, 2**31 - 1, -(2**31)]
    drawn = draw_low_rank(rng, slots, k, (n,), [4, 4], [mx.float16] * 2)
    plain = ops.packed_matmul(x, matrix.packed)
    y = ops.packed_matmul(x, matrix.packed, ProductOptions(adapters=(drawn.low_rank,)))
    assert [compare.same(y[i], plain[i]) for i in range(6)] == [
        False,
        True,
        False,
        True,
        True,
        True,
    ]


def test_silu_from_one_end_to_the_other(isa):
    """One input, scaled: gate values from -200 to 200, where an exponential over- and underflows."""
    k = 64
    codes = pack_codes(mx.zeros((401, k), dtype=mx.uint32) + 1, 2)
    gates = np.arange(-200, 201).astype(np.float32)
    gate = PackedWeight(codes, 2, "affine", mx.array(gates), mx.zeros(401))
    x = mx.zeros((1, k))
    x[0, 5] = 1
    y = ops.packed_swiglu(x, gate, gate._replace(scales=mx.ones(401)))
    g = gates.astype(np.float64)
    wanted = g / (1 + np.exp(-g))
    compare.assert_within(exact(y)[0], wanted, 1e-6 * np.abs(wanted) + 1e-30)


def test_largest_products(rng, isa):
    for rows in (1, 3, 20):
        n, k = 3000, 64  # many pieces, so that threads share them out
        matrix, x, norm = Matrix(rng, n, k, 4, "balanced"), draw(rng, (rows, k)), draw(rng, k)
        products = exact(ops.packed_matmul(x, matrix.packed, ProductOptions(norm=norm)))
        index, value = ops.packed_argmax(x, matrix.packed, ProductOptions(norm=norm))
        assert index.dtype == mx.uint32
        compare.assert_same(exact(index), products.argmax(-1), rows)
        compare.assert_same(exact(value), products.max(-1), rows)


def test_ties_go_to_the_lower_row(rng, isa):
    codes = np.tile(rng.integers(0, 4, 64), (900, 1))
    packed = PackedWeight(pack_codes(mx.array(codes), 2), 2, "balanced", mx.ones(900))
    assert ops.packed_argmax(draw(rng, (2, 64)), packed)[0].tolist() == [0, 0]


def test_what_is_no_number_is_the_largest_so_that_it_is_seen(rng, isa):
    scales = np.ones(900, np.float32)
    scales[700] = np.nan
    packed = Matrix(rng, 900, 64, 4, "balanced").packed._replace(scales=mx.array(scales))
    index, value = ops.packed_argmax(draw(rng, (2, 64)), packed)
    assert index.tolist() == [700] * 2
    assert not np.isfinite(exact(value)).any()


def test_rows_as_numbers(rng, isa):
    for case in all_pairs(FORMATS, (2, 4, 8), list(ROUNDING)):
        (mode, granularity), bits, dtype = case
        matrix = Matrix(rng, 12, 960, bits, mode, granularity, tables=4)
        tokens = mx.array(rng.integers(0, 12, (2, 5)).astype(np.int32))
        got, rows = ops.packed_embedding(tokens, matrix.packed, dtype), np.array(tokens)
        assert got.dtype == dtype
        assert_within(got, matrix.values[rows], GROSS * matrix.gross[rows], *case)
