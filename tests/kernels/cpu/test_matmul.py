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
from tests.tools.low_rank import draw_low_rank, exact

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


@pytest.fixture(params=native.instruction_sets())
def isa(request):
    before = native.instruction_set()
    assert native.use_instruction_set(request.param)
    yield request.param
    native.use_instruction_set(before)


def draw(rng, shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


class Matrix:
    """A random packed matrix: as the kernels take it, its values, and the magnitudes summed on the way."""

    def __init__(self, rng, n, k, bits, mode, granularity="row", dtype=mx.float32, tables=1):
        self.codes = rng.integers(0, 2**bits, (n, k))
        packed = pack_codes(mx.array(self.codes), bits)
        if mode == "palette":
            table = draw(rng, (tables, 2**bits))
            values = np.take_along_axis(exact(table).repeat(n // tables, 0), self.codes, -1)
            self.gross = np.abs(values)
            self.packed = PackedWeight(packed, bits, mode, None, None, table)
        else:
            groups = k // int(granularity.split()[-1]) if granularity.startswith("groups") else 1
            shape = {"tensor": (), "row": (n,)}.get(granularity, (n, groups))
            scales, biases = draw(rng, shape, dtype), None
            spread = np.broadcast_to(exact(scales).reshape(-1, groups), (n, groups)).repeat(
                k // groups, -1
            )
            middle = (2**bits - 1) / 2
            values = spread * (self.codes - middle)
            self.gross = np.abs(spread) * (self.codes + middle)
            if mode == "affine":
                biases = draw(rng, shape, dtype)
                shift = np.broadcast_to(exact(biases).reshape(-1, groups), (n, groups)).repeat(
                    k // groups, -1
                )
                values = spread * self.codes + shift
                self.gross = np.abs(spread) * self.codes + np.abs(shift)
            self.packed = PackedWeight(packed, bits, mode, scales, biases)
        self.values = values


def oracle(x, matrix, activation_bits):
    """The product in float64, and how far a kernel may be from it."""
    wanted = x @ matrix.values.T
    gross = GROSS * np.abs(x) @ matrix.gross.T
    if matrix.packed.mode == "palette":
        return wanted, gross
    unit = np.abs(x).max(-1, keepdims=True) / LARGEST[activation_bits]
    certain = unit / 2 * np.abs(matrix.values).sum(-1)
    likely = 3.5 * unit * np.sqrt((matrix.values**2).sum(-1))
    return wanted, gross + np.minimum(certain, likely)


def assert_within(got, wanted, allowed):
    rounded = ROUNDING[got.dtype] * np.abs(wanted) + (2.0**-25 if got.dtype == mx.float16 else 0)
    worst = (np.abs(exact(got) - wanted) - rounded - allowed).max()
    assert worst <= 0, f"{worst} more than allowed, of outputs up to {np.abs(wanted).max()}"


def cases():
    for bits in (2, 4, 8):
        yield bits, "palette", ""
        for granularity in GRANULARITIES:
            yield bits, "balanced", granularity
            yield bits, "affine", granularity


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(("bits", "mode", "granularity"), cases())
def test_products(rng, isa, bits, mode, granularity, activation_bits):
    for n, k in SHAPES:
        if granularity.startswith("groups") and k % int(granularity.split()[-1]):
            continue
        matrix = Matrix(rng, n, k, bits, mode, granularity)
        for rows in (1, *rng.choice(ROWS[1:], 2, replace=False)):
            x = draw(rng, (int(rows), k))
            y = ops.packed_matmul(x, matrix.packed, ProductOptions(activation_bits=activation_bits))
            assert_within(y, *oracle(exact(x), matrix, activation_bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_columns_that_fill_words_only(rng, isa, bits):
    """K is a multiple of the codes in a word and of nothing else; nothing behind the codes is read."""
    for words in range(1, 20):
        k = words * 32 // bits
        matrix = Matrix(rng, 3, k, bits, "balanced")
        x = draw(rng, (int(rng.choice(ROWS)), k))
        assert_within(ops.packed_matmul(x, matrix.packed), *oracle(exact(x), matrix, 16))


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("mode", ["balanced", "affine", "palette"])
def test_number_formats_and_shared_tables(rng, isa, mode, dtype, rows):
    granularity = rng.choice(["tensor", "row", "groups of 64"])
    matrix = Matrix(rng, 36, 320, 4, mode, granularity, dtype, tables=12)
    x = draw(rng, (rows, 320), dtype)
    y = ops.packed_matmul(x, matrix.packed)
    assert y.dtype == dtype
    assert_within(y, *oracle(exact(x), matrix, 16))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_an_identity_shows_what_activations_become(rng, isa, bits):
    """Every element is within half a unit, and the vector nearer than bfloat16's rounding is on average."""
    k = 6656
    codes = mx.array(np.eye(k, dtype=np.int32))
    identity = PackedWeight(pack_codes(codes, bits), bits, "affine", mx.array(1.0), mx.array(0.0))
    x = draw(rng, (1, k))
    x[:, int(rng.integers(k))] = 100  # the worst case: one outlier sets the unit
    for activation_bits, largest in LARGEST.items():
        y = ops.packed_matmul(x, identity, ProductOptions(activation_bits=activation_bits))
        error = exact(y) - exact(x)
        assert np.abs(error).max() <= 100 / largest / 2 * (1 + 1e-3)
        assert np.linalg.norm(error) <= 1.1 * np.sqrt(k / 12) * 100 / largest
    y = exact(ops.packed_matmul(x, identity)) - exact(x)
    bfloat16 = exact(x.astype(mx.bfloat16)) - exact(x)
    assert np.linalg.norm(y) / np.linalg.norm(exact(x)) < 2.0**-10
    typical = draw(rng, (1, k))
    y = exact(ops.packed_matmul(typical, identity)) - exact(typical)
    bfloat16 = exact(typical.astype(mx.bfloat16)) - exact(typical)
    assert np.linalg.norm(y) < np.linalg.norm(bfloat16)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_sums_fit(rng, isa, bits):
    """Codes at their maximum times digits at theirs: no int16 saturates, no int32 wraps around."""
    n, k = 17, 16384
    codes = mx.full((n, k), 2**bits - 1, dtype=mx.uint32)
    packed = PackedWeight(pack_codes(codes, bits), bits, "affine", mx.array(1.0), mx.array(0.0))
    # Of 32639 units, two digits of 127 each; and the largest whose lower digit is -128.
    for value in (1.0, -1.0, -32384 / 32639, 32384 / 32639):
        for rows in (1, 3, 17):
            x = mx.full((rows, k), value)
            x[:, 0] = 1.0
            wanted = (value * (k - 1) + 1) * (2**bits - 1)
            for activation_bits, largest in LARGEST.items():
                y = exact(
                    ops.packed_matmul(x, packed, ProductOptions(activation_bits=activation_bits))
                )
                assert np.abs(y / wanted - 1).max() < 1 / largest


@pytest.mark.parametrize("rows", [2, 18])
def test_vectors_do_not_disturb_each_other(rng, isa, rows):
    matrix = Matrix(rng, 20, 96, 2, "balanced")
    x = exact(draw(rng, (rows, 96)))
    wanted, allowed = oracle(x, matrix, 16)
    x[0] = 0
    wanted[0] = allowed[0] = 0
    x[1, int(rng.integers(96))] = rng.choice([np.nan, np.inf, -np.inf])
    y = ops.packed_matmul(mx.array(x.astype(np.float32)), matrix.packed)
    assert np.isnan(exact(y)[1]).all()
    keep = np.arange(rows) != 1
    assert_within(y[mx.array(np.flatnonzero(keep))], wanted[keep], allowed[keep])


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


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (2, 9), (20, 1), (1, 40)])
@pytest.mark.parametrize("granularity", ["row", "groups of 64"])
def test_norm_residual_and_adapters(rng, isa, batch, length, dtype, granularity):
    # No register holds a whole number of 8-bit rows.
    n, (bits, k) = 75, (8, 212) if granularity == "row" else (2, 192)
    matrix = Matrix(rng, n, k, bits, "balanced", granularity)
    x, residual = draw(rng, (batch, length, k), dtype), draw(rng, (batch, length, n), dtype)
    norm = draw(rng, k, dtype)
    drawn = adapters(rng, batch, k, (40, 41, n), dtype)
    y = ops.packed_matmul(
        x,
        matrix.packed,
        ProductOptions(norm=norm, eps=1e-3, residual=residual, adapters=(drawn.low_rank,)),
    )
    x64 = norm_oracle(exact(x), exact(norm), 1e-3)
    wanted, allowed = oracle(x64, matrix, 16)
    wanted = wanted + drawn.added(x64) + exact(residual)
    magnitude = drawn.added(x64, magnitudes=True) + np.abs(exact(residual)) + 1
    assert_within(y, wanted, allowed + GROSS * magnitude)


@pytest.mark.parametrize("activation_bits", [16, 8])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (4, 1), (2, 20)])
@pytest.mark.parametrize("kind", ["plain", "adapters"])
def test_swiglu(rng, isa, batch, length, kind, activation_bits):
    n, k = 70, 128
    gate, up = (Matrix(rng, n, k, 2, "balanced") for _ in range(2))
    x, norm = draw(rng, (batch, length, k)), draw(rng, k)
    pair = ()
    if kind != "plain":
        pair = tuple(adapters(rng, batch, k, (n,), mx.float16) for _ in range(2))
    y = ops.packed_swiglu(
        x,
        gate.packed,
        up.packed,
        ProductOptions(
            norm=norm,
            eps=1e-5,
            adapters=pair and tuple(drawn.low_rank for drawn in pair),
            activation_bits=activation_bits,
        ),
    )
    x64 = norm_oracle(exact(x), exact(norm), 1e-5)
    (g, of_g), (u, of_u) = (oracle(x64, m, activation_bits) for m in (gate, up))
    if pair:
        g, u = g + pair[0].added(x64), u + pair[1].added(x64)
        of_g = of_g + GROSS * (pair[0].added(x64, magnitudes=True) + 1)
        of_u = of_u + GROSS * (pair[1].added(x64, magnitudes=True) + 1)
    silu = g / (1 + np.exp(-g))
    # |silu'| <= 1.1
    allowed = 1.1 * of_g * (np.abs(u) + of_u) + np.abs(silu) * of_u
    assert_within(y, silu * u, allowed + GROSS * np.abs(silu * u))


def test_what_an_adapter_adds_does_not_depend_on_the_batch(rng, isa):
    """Of a matrix of zeros only that is left: bit for bit that of each row alone, whatever is beside it."""
    n, k, batch = 90, 204, 21
    codes = mx.zeros((n, k // 4), mx.uint32)
    zeros = PackedWeight(codes, 8, "affine", mx.zeros(()), mx.zeros(()))
    ranks = [16, 5, 0, 1, 32, 8, 16, 3]
    slots = rng.integers(-1, 8, batch).tolist()
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
        assert mx.array_equal(
            together[row],
            ops.packed_matmul(x[row : row + 1], zeros, ProductOptions(adapters=(alone,)))[0],
        )


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_adapters_on_many_threads(rng, threads):
    """More pieces than threads and fewer, of both matrices; the same bits whoever computes them."""
    n, k = 700, 1024
    matrix = Matrix(rng, n, k, 2, "balanced")
    x = draw(rng, (5, 1, k))
    low_rank = draw_low_rank(
        rng, [0, 1, 1, -1, 2], k, (300, n), [40, 4, 1], [mx.float16] * 3
    ).low_rank
    before = native.threads()
    try:
        native.set_threads(threads)
        got = [
            ops.packed_matmul(x, matrix.packed, ProductOptions(adapters=(low_rank,)))
            for _ in range(20)
        ]
        mx.eval(got)
        native.set_threads(1)
        wanted = ops.packed_matmul(x, matrix.packed, ProductOptions(adapters=(low_rank,)))
        mx.eval(wanted)
    finally:
        native.set_threads(before)
    assert all(mx.array_equal(each, wanted) for each in got)


def test_slots_that_are_no_adapter_mean_none(rng, isa):
    n, k = 40, 64
    matrix = Matrix(rng, n, k, 2, "balanced")
    x = draw(rng, (6, 1, k))
    slots = [0, -1, 1, 2, 2**31 - 1, -(2**31)]
    drawn = draw_low_rank(rng, slots, k, (n,), [4, 4], [mx.float16] * 2)
    plain = ops.packed_matmul(x, matrix.packed)
    y = ops.packed_matmul(x, matrix.packed, ProductOptions(adapters=(drawn.low_rank,)))
    changed = [not mx.array_equal(y[i], plain[i]) for i in range(6)]
    assert changed == [True, False, True, False, False, False]


def test_silu_from_one_end_to_the_other(isa):
    """One input, scaled: gate values from -200 to 200, where an exponential over- and underflows."""
    k = 64
    codes = pack_codes(mx.zeros((401, k), dtype=mx.uint32) + 1, 2)
    gates = np.arange(-200, 201).astype(np.float32)
    gate = PackedWeight(codes, 2, "affine", mx.array(gates), mx.zeros(401))
    up = gate._replace(scales=mx.ones(401))
    x = mx.zeros((1, k))
    x[0, 5] = 1
    y = exact(ops.packed_swiglu(x, gate, up))[0]
    g = gates.astype(np.float64)
    assert np.abs(y - g / (1 + np.exp(-g))).max() <= 2e-6 * 200
    assert (np.abs(y - g / (1 + np.exp(-g))) <= 1e-6 * np.abs(y) + 1e-30).all()


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_largest_products(rng, isa, rows):
    n, k = 3000, 64  # many pieces, so that threads share them out
    matrix = Matrix(rng, n, k, 4, "balanced")
    x, norm = draw(rng, (rows, k)), draw(rng, k)
    products = exact(ops.packed_matmul(x, matrix.packed, ProductOptions(norm=norm)))
    order = np.argsort(-products, -1, kind="stable")
    index, value = ops.packed_argmax(x, matrix.packed, ProductOptions(norm=norm))
    assert np.array_equal(np.array(index), order[:, 0])
    assert np.array_equal(exact(value), products.max(-1))


def test_ties_go_to_the_lower_row(rng, isa):
    row = rng.integers(0, 4, 64)
    codes = np.tile(row, (900, 1))
    packed = PackedWeight(pack_codes(mx.array(codes), 2), 2, "balanced", mx.ones(900))
    x = draw(rng, (2, 64))
    assert ops.packed_argmax(x, packed)[0].tolist() == [0, 0]


def test_what_is_no_number_is_the_largest_so_that_it_is_seen(rng, isa):
    scales = np.ones(900, np.float32)
    scales[700] = np.nan
    packed = Matrix(rng, 900, 64, 4, "balanced").packed._replace(scales=mx.array(scales))
    index, value = ops.packed_argmax(draw(rng, (2, 64)), packed)
    assert index.tolist() == [700] * 2
    assert not np.isfinite(exact(value)).any()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("bits", "mode", "granularity"), cases())
def test_rows_as_numbers(rng, isa, bits, mode, granularity, dtype):
    k = 960
    matrix = Matrix(rng, 12, k, bits, mode, granularity, tables=4)
    tokens = mx.array(rng.integers(0, 12, (2, 5)).astype(np.int32))
    got = ops.packed_embedding(tokens, matrix.packed, dtype)
    assert got.dtype == dtype
    gross = matrix.gross[np.array(tokens)]
    assert_within(got, matrix.values[np.array(tokens)], GROSS * gross)
