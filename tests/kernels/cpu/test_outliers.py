"""Vectors with outliers: integers with one scale would lose the other elements' precision."""

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import BITS, PackedWeight, ProductOptions, pack_codes
from afm_mlx.kernels.operands import PLAIN
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import Spec
from tests.tools import compare
from tests.tools.cases import all_pairs, draw
from tests.tools.compare import exact
from tests.tools.problems import assert_solved, draw_low_rank

LARGEST = {16: 32639, 8: 127}
STEP = 254  # from a pass's unit to the next pass's
# How many, and how large; float32 sums lose as much as bfloat16 where more are larger still.
OUTLIERS = [
    *((n, 10.0**e) for n in (1, 3, 16) for e in range(1, 6)),
    *((n, 10.0**e) for n in (17, 40) for e in range(1, 4)),
]


def matrix_with_zeros(rng, n, k, bits, group, columns):
    """An affine matrix, (N, K), whose weights are 0 in these columns; group 0 for a scale per row."""
    zero = 2 ** (bits - 1)
    codes = rng.integers(0, 2**bits, (n, k))
    codes[:, columns] = zero
    size = (n, k // group) if group else (n,)
    scales = mx.array(rng.uniform(0.7, 1.4, size).astype(np.float32))
    return PackedWeight(pack_codes(mx.array(codes), bits), bits, "affine", scales, -zero * scales)


def relative(got, wanted):
    """Root mean square of each row's differences, over the row's."""
    return np.sqrt(((got - wanted) ** 2).mean(-1) / (wanted**2).mean(-1))


def test_the_others_are_as_precise_as_in_bfloat16(ops, rng, isas):
    """Outliers meet weights of 0: what is left is the others' share."""
    cases = all_pairs(OUTLIERS, BITS, (0, 16, 64, 80), (1, 2, 19), (16, 8), (False, True))
    for isa in isas():
        for case in cases:
            (count, size), bits, group, rows, activation_bits, norm = case
            k = 960
            columns = rng.choice(k, count, replace=False)
            x = rng.standard_normal((rows, k)).astype(np.float32)
            x[-1:, columns] = size * rng.choice([-1, 1], count)  # of several rows, the last alone
            weight = matrix_with_zeros(rng, 60, k, bits, group, columns)
            options = ProductOptions(
                norm=draw(rng, (k,)) if norm else None, activation_bits=activation_bits
            )
            y = exact(ops.packed_matmul(mx.array(x), weight, options))
            vectors = x.astype(np.float64)
            if norm:
                vectors = oracle.rms_norm(vectors, exact(options.norm), options.eps)
            numbers = oracle.matrix(weight).T
            rounded = exact(mx.array(vectors.astype(np.float32)).astype(mx.bfloat16))
            wanted = vectors @ numbers
            allowed = relative(rounded @ numbers, wanted) if activation_bits == 16 else 0.15
            assert (relative(y, wanted) <= allowed).all(), (isa, case)


def test_every_operation_with_outliers(ops, rng, isas):
    for isa in isas():
        for op, rows, outliers, activation_bits in all_pairs(
            ("packed_matmul", "packed_swiglu", "packed_argmax"), (1, 5, 17), (1, 16, 17), (16, 8)
        ):
            matrix = (512, 200, 4, "affine", "row", 0)
            spec = Spec(op, mx.float32, 1, rows, *matrix, outliers=outliers)
            problem = make(spec._replace(activation_bits=activation_bits, norm=rows == 5), rng)
            assert_solved(problem, getattr(ops, op)), isa


def units(rng, activation_bits):
    """Vectors on each side of every threshold, as magnitudes and how many of each, and their units."""
    one, k = 1 / LARGEST[activation_bits], 1024
    half = (1.5 * one, 1)  # rounding leaves half a unit of it
    if activation_bits == 16:
        yield ((1, 1), (0.005, 384), (0.5, k - 385)), one
        yield ((1, 1), (0.005, 385), (0.5, k - 386)), one / 2
        yield ((1, 1), (0.005, 192), (0.5, 319), (0, 512)), one  # zeros count as neither
        yield ((1, 1), (0.005, 193), (0.5, 318), (0, 512)), one / 2
        yield ((1, 16), (0.005, k - 16)), one * 0.005
        yield ((1, 17), (0.005, k - 18), half), one / STEP
        yield ((1, 17), (1.2 / 128 / STEP, k - 18), half), one / STEP
        yield ((1, 17), (0.9 / 128 / STEP, k - 18), half), one / STEP**2
    else:
        yield ((1, 1), (0.025, 512), (0.5, k - 513)), one
        yield ((1, 1), (0.025, 513), (0.5, k - 514)), one / 2
        yield ((1, 17), (0.025, 768), (0.5, k - 785)), one
        yield ((1, 17), (0.025, 769), (0.5, k - 786)), one / STEP
        yield ((1, 17), (0.9 / 32 / STEP, 128), (0.02, k - 145)), one / STEP
        yield ((1, 17), (0.9 / 32 / STEP, 129), (0.02, k - 146)), one / STEP**2


def test_units_on_both_sides_of_every_threshold(ops, rng, isas):
    """The largest error shows the unit that a vector got."""
    k = 1024
    codes = pack_codes(mx.array(np.eye(k, dtype=np.int32)), 2)
    identity = PackedWeight(codes, 2, "affine", mx.array(1.0), mx.array(0.0))
    for isa in isas():
        for activation_bits in LARGEST:
            options = ProductOptions(activation_bits=activation_bits)
            for numbers, unit in units(rng, activation_bits):
                x = np.concatenate([np.full(count, value) for value, count in numbers])
                # The others differ a little, so that their errors do.
                x = rng.permutation(np.where(x == 1, x, x * rng.uniform(0.97, 1, k)))
                x = (x * rng.choice([-1, 1], (3, k))).astype(np.float32)
                for rows in (1, 3):
                    y = exact(ops.packed_matmul(mx.array(x[:rows]), identity, options))
                    off = np.abs(y - x[:rows])[np.abs(x[:rows]) < 1].max() / unit
                    assert 0.4 < off < 0.51, (isa, activation_bits, numbers, off)


def test_palettes_with_outliers(ops, rng, isas):
    """Their columns have codes whose numbers are 0; rows of one table more or less than a stretch of work."""
    k = 960
    for isa in isas():
        for bits, rows, tables, outliers, activation_bits in all_pairs(
            (2, 4, 8), (1, 2, 19), (1, 3, 30), (0, 1, 16, 17), (16, 8)
        ):
            columns = rng.choice(k, outliers, replace=False)
            x = rng.standard_normal((rows, k)).astype(np.float32)
            x[-1:, columns] = 1e4 * rng.choice([-1, 1], outliers)
            table = rng.standard_normal((tables, 2**bits)).astype(np.float32)
            table[:, 1] = 0
            codes = rng.integers(0, 2**bits, (90, k))
            codes[:, columns] = 1
            palette = PackedWeight(pack_codes(mx.array(codes), bits), bits, "palette")
            palette = palette._replace(table=mx.array(table))
            options = ProductOptions(activation_bits=activation_bits)
            y = exact(ops.packed_matmul(mx.array(x), palette, options))
            wanted = x.astype(np.float64) @ oracle.matrix(palette).T
            allowed = 2.0**-9 if activation_bits == 16 else 0.15
            assert (relative(y, wanted) <= allowed).all(), (isa, bits, rows, tables, outliers)


def test_tables_on_both_sides_of_what_integers_are_good_for(ops, rng, isas):
    """A number that is far larger than the others of its table, and that no code names, costs them nothing."""
    k, n = 512, 80
    for isa in isas():
        for rows in (1, 6):
            x = 2 + draw(
                rng, (rows, k)
            )  # products of numbers that are nearly equal are no differences
            # Of 16 numbers, 6 or 7 below 128 of 65,534 steps; another table has an infinity, one only zeros.
            for small in (6, 7):
                table = np.full((5, 16), 0.5) * rng.uniform(0.9, 1, (5, 16))
                table[1, :small] = (104 + np.array([0, 1.5, 3.5, 5.5, 7.5, 9.5, 11.5]))[
                    :small
                ] / 65534
                table[:, 15] = 1
                table[2, 15], table[3] = np.inf, 0
                codes = rng.integers(0, 15, (n, k))
                codes[16:32] = rng.integers(0, small, (16, k))
                words = pack_codes(mx.array(codes), 4)
                table = mx.array(table.astype(np.float32))
                palette = PackedWeight(words, 4, "palette", table=table)
                y = exact(ops.packed_matmul(x, palette, PLAIN))
                finite = mx.where(mx.isinf(table), mx.array(0.0), table)
                wanted = exact(x) @ oracle.matrix(palette._replace(table=finite)).T
                off = relative(y.T.reshape(5, -1), wanted.T.reshape(5, -1) + 1e-30)
                assert (off[[0, 2, 4]] < 1e-3).all(), (isa, rows, small)
                assert (y[:, 48:64] == 0).all(), (isa, rows, small)
                integers = isa != "portable" and small == 6
                assert (off[1] > 1e-3) == integers, (isa, rows, small, off)
                assert off[1] < (0.01 if integers else 1e-4), (isa, rows, small, off)


def test_rows_of_a_batch_as_alone(ops, rng, isas):
    """Some rows have outliers, some need further passes, one is no number; adapters take them whole."""
    k, n = 960, 90
    x = rng.standard_normal((9, k))
    for row, count, size in ((1, 3, 1e3), (2, 40, 1e3), (4, 40, 1e6), (5, 16, 1e2), (8, 100, 1e3)):
        x[row, rng.choice(k, count, replace=False)] *= size
    x[3] = 10.0 ** rng.uniform(-5, 0, k)
    x[6], x[7, 5] = 0, np.nan
    x = mx.array(x.astype(np.float32))[:, None]
    spec = Spec("packed_matmul", mx.float32, in_dims=k, out_dims=n, bits=2, mode="balanced")
    low_rank = draw_low_rank(rng, [0, -1, 1, 0, 1, 0, 0, 1, 0], k, (n,), [8, 3])
    for isa in isas():
        for granularity, size in (("row", 0), ("group", 64)):
            fields = {"granularity": granularity, "group_size": size}
            weight = make(spec._replace(**fields), rng).args[1]
            together = ops.packed_matmul(x, weight, PLAIN)
            for row in range(9):
                alone = ops.packed_matmul(x[row : row + 1], weight, PLAIN)[0]
                if row == 7:
                    assert mx.isnan(mx.stack([together[row], alone])).all().item()
                else:
                    # Groups' sums are floats, which several vectors add up in another order than one.
                    allowed = 5e-6 if size else 1e-6
                    compare.assert_close(together[row], alone, allowed, (isa, granularity, row))
            options = ProductOptions(adapters=(low_rank,))
            wanted = oracle.packed_matmul(x, weight, options)
            got = exact(ops.packed_matmul(x, weight, options))
            for row in (0, 1, 2, 3, 4, 5, 6, 8):
                compare.assert_close(got[row], wanted[row], 1e-3, (isa, granularity, row))
