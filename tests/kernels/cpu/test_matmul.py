"""Products of packed matrices in C++, on every instruction set of this machine, against float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import (
    BITS,
    MAX_ADAPTERS,
    LowRank,
    PackedWeight,
    Part,
    ProductOptions,
    pack_codes,
)
from afm_mlx.kernels.operands import PLAIN
from afm_mlx.kernels.selftest.problems import make, packed_weight
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools import compare
from tests.tools.cases import all_pairs, draw, each
from tests.tools.compare import exact
from tests.tools.problems import assert_solved, draw_low_rank, with_args

LARGEST = {16: 32639, 8: 127}
# (batch, tokens); more rows than a thread takes at once.
ROWS = ((1, 1), (2, 1), (3, 1), (1, 5), (8, 1), (1, 17), (4, 16))
# Whole registers, ragged ends, less than a register.
SHAPES = ((33, 512), (5, 1120), (1, 64), (70, 2080))
ROW = {"mode": "balanced", "granularity": "row"}
GRANULARITIES = (("tensor", 0), ("row", 0), *(("group", size) for size in (16, 32, 64, 80)))
FORMATS = [
    ("palette", "table", 0),
    *((mode, *per) for mode in ("balanced", "affine") for per in GRANULARITIES),
]


def matrix(format_, bits, n, k):
    """The fields of a `Spec` from `in_dims` to `group_size`."""
    mode, granularity, group = format_
    return 960 if group and k % group else k, n, bits, mode, granularity, group


@pytest.mark.parametrize("bits", BITS)
def test_products(ops, rng, isa, bits):
    cases = all_pairs(
        FORMATS, SHAPES, ROWS, DTYPES, (16, 8), (False, True), (False, True), (0, 0, 8)
    )
    for format_, shape, rows, dtype, activation_bits, norm, residual, rank in cases:
        spec = Spec("packed_matmul", dtype, *rows, *matrix(format_, bits, *shape))
        fusions = {"norm": norm, "residual": residual, "rank": rank}
        spec = spec._replace(activation_bits=activation_bits, **fusions)
        assert_solved(make(spec, rng), ops.packed_matmul)


def test_groups_with_several_vectors(ops, rng, isas):
    """Groups from four bytes of codes to five blocks of 64 codes; tails of columns, of rows and of vectors."""
    cases = all_pairs(
        BITS,
        (8, 16, 32, 64, 128, 192, 320),
        (2, 3, 35),  # groups of a row
        (1, 16, 17, 33, 70),
        (*range(2, 8), 9, 11, 13, 65),  # the last: more than are multiplied at once
        (16, 8),
        ("balanced", "affine"),
    )
    for _ in isas():
        for bits, group, groups, n, vectors, activation_bits, mode in cases:
            fields = (max(group, 32 // bits) * groups, n, bits, mode, "group", group)
            spec = Spec("packed_matmul", mx.float32, 1, vectors, *fields)
            assert_solved(
                make(spec._replace(activation_bits=activation_bits), rng), ops.packed_matmul
            )


def test_experts(ops, rng, isas):
    """Few experts, and more than are prepared together."""
    rows = ((1, 1, 1), (1, 1, 3), (2, 1, 2), (1, 17, 1), (3, 40, 2))
    cases = all_pairs(FORMATS, BITS, ((3, 70), (40, 5)), rows, DTYPES, (16, 8))
    for _ in isas():
        for format_, bits, (experts, n), (batch, tokens, chosen), dtype, activation_bits in cases:
            fields = matrix(format_, bits, n * experts, 160)
            spec = Spec("packed_gather", dtype, batch, tokens, *fields, experts=experts)
            spec = spec._replace(chosen=chosen, activation_bits=activation_bits)
            assert_solved(make(spec, rng), ops.packed_gather)
        # More vectors of one expert than stay in the second-level cache.
        spec = Spec("packed_gather", mx.float32, 1, 300, *matrix(FORMATS[2], 2, 20, 2080))
        assert_solved(make(spec._replace(experts=2, chosen=2), rng), ops.packed_gather)


def test_swiglu(ops, rng, isa):
    for rows, dtype, activation_bits, rank in all_pairs(ROWS, DTYPES, (16, 8), (0, 8)):
        spec = Spec("packed_swiglu", dtype, *rows, *matrix(FORMATS[2], 2, 70, 128), rank=rank)
        spec = spec._replace(activation_bits=activation_bits, norm=bool(rng.integers(2)))
        assert_solved(make(spec, rng), ops.packed_swiglu)


def test_several_matrices_in_one_operation_have_the_bits_of_each_alone(ops, rng, isas):
    """From one piece to many for a thread, matrices without adapters between others with them."""
    cases = all_pairs(FORMATS, BITS, (64, 480), ROWS, DTYPES, (16, 8), (0, 8))
    for _ in isas():
        for format_, bits, k, rows, dtype, activation_bits, rank in cases:
            sizes = rng.permutation([70, 33, 5, 900])[:3].tolist()
            specs = [
                Spec("packed_matmul", dtype, *rows, *matrix(format_, bits, n, k), rank=rank)
                for n in sizes
            ]
            problems = [make(spec._replace(norm=True), rng).args for spec in specs]
            x, _, options = problems[0]
            options = options._replace(activation_bits=activation_bits)
            weights = [weight for _, weight, _ in problems]
            adapters = [each for *_, of_one in problems for each in of_one.adapters]
            if adapters:
                adapters[1] = adapters[1]._replace(parts=(Part(0, 0, 0),) * len(adapters[1].parts))
            options = options._replace(adapters=tuple(adapters))
            got = kernels.packed_matmul_each(x, weights, options)
            for i, weight in enumerate(weights):
                wanted = ops.packed_matmul(x, weight, options.of_matrix(i))
                assert mx.array_equal(got[i], wanted), (specs[i], i)


def test_several_matrices_must_be_alike(ops, rng):
    weights = [packed_weight(Spec("", out_dims=8, in_dims=64, bits=b, **ROW), rng) for b in (2, 4)]
    x = mx.zeros((1, 64))
    with pytest.raises(ValueError, match="the same inputs, bits, mode and groups"):
        kernels.packed_matmul_each(x, weights)
    with pytest.raises(ValueError, match="packed_matmul_each takes no residual"):
        kernels.packed_matmul_each(x, weights[:1], ProductOptions(residual=mx.zeros((1, 8))))


def test_largest_products(ops, rng, isas):
    for _ in isas():
        for rows in (1, 3, 20):  # many pieces, so that threads share them out
            spec = Spec(
                "packed_argmax", mx.float32, 1, rows, *matrix(FORMATS[2], 4, 3000, 64), norm=True
            )
            assert_solved(make(spec, rng), ops.packed_argmax)


def test_rows_as_numbers(ops, rng, isa):
    for format_, bits, dtype in all_pairs(FORMATS, BITS, DTYPES):
        spec = Spec("packed_embedding", dtype, 2, 5, *matrix(format_, bits, 12, 960))
        assert_solved(make(spec, rng), ops.packed_embedding)


def test_columns_that_fill_words_only(ops, rng, isa):
    """K is a multiple of the codes in a word and of nothing else; nothing behind the codes is read."""
    for bits in BITS:
        for words in range(1, 20):
            rows = ROWS[int(rng.integers(len(ROWS)))]
            shape = matrix(FORMATS[2], bits, 3, words * 32 // bits)
            assert_solved(
                make(Spec("packed_matmul", mx.float32, *rows, *shape), rng), ops.packed_matmul
            )


def test_scales_of_half_types(ops, rng, isas):
    for _ in isas():
        for format_, dtype, rows in all_pairs(FORMATS, DTYPES[1:], (1, 40)):
            weight = packed_weight(
                Spec("packed_matmul", dtype, 1, rows, *matrix(format_, 4, 12, 320)), rng
            )
            x = draw(rng, (rows, weight.in_dims))
            names = [
                name for name in ("scales", "biases", "table") if getattr(weight, name) is not None
            ]
            given = weight._replace(**{n: getattr(weight, n).astype(dtype) for n in names})
            wide = weight._replace(**{n: getattr(given, n).astype(mx.float32) for n in names})
            got, wanted = (ops.packed_matmul(x, w, PLAIN) for w in (given, wide))
            compare.assert_same(got, wanted, (format_, dtype, rows))


def test_one_vector_meets_scales_where_they_are(ops, rng, isas):
    """In float32 the same bits, with an outlier too; and a row of NaN spoils no other row's product."""
    cases = all_pairs(
        BITS, (1, 3, 16, 19), (1, 2, 40, 70), DTYPES, ("same", "float32"), ("balanced", "affine")
    )
    for _ in isas():
        for bits, groups, n, dtype, of_biases, mode in cases:
            weight = packed_weight(
                Spec("packed_matmul", dtype, 1, 1, 64 * groups, n, bits, mode, "group", 64), rng
            )
            numbers = weight._asdict() | {"scales": weight.scales.astype(dtype)}
            if mode == "affine":
                kind = dtype if of_biases == "same" else mx.float32
                numbers["biases"] = weight.biases.astype(kind)
            given = PackedWeight(**numbers)
            wide = {
                name: value.astype(mx.float32)
                for name, value in numbers.items()
                if name in ("scales", "biases") and value is not None
            }
            x = draw(rng, (1, 64 * groups))
            x[0, 5] = 3000
            got, wanted = (ops.packed_matmul(x, w, PLAIN) for w in (given, given._replace(**wide)))
            compare.assert_same(got, wanted, (bits, groups, n, dtype, mode))
            spoilt = np.array(given.scales.astype(mx.float32))
            spoilt[n // 2] = np.nan
            found = ops.packed_matmul(
                x, given._replace(scales=mx.array(spoilt).astype(dtype)), PLAIN
            )
            others = np.arange(n) != n // 2
            assert np.isnan(np.array(found)[0, n // 2])
            np.testing.assert_array_equal(np.array(found)[0, others], np.array(got)[0, others])


# -- activations as integers


def test_an_identity_shows_what_activations_become(ops, rng, isa):
    """Every element is within half a unit, and the vector nearer than bfloat16's rounding is on average."""
    k = 1024
    for bits in BITS:
        codes = pack_codes(mx.array(np.eye(k, dtype=np.int32)), bits)
        identity = PackedWeight(codes, bits, "affine", mx.array(1.0), mx.array(0.0))
        typical = draw(rng, (1, k))
        y, bfloat16 = ops.packed_matmul(typical, identity, PLAIN), typical.astype(mx.bfloat16)
        off, coarse = (np.linalg.norm(exact(a) - exact(typical)) for a in (y, bfloat16))
        assert off < coarse
        x = mx.array(typical)
        x[:, int(rng.integers(k))] = 10  # sets the unit, as it is too small to be multiplied apart
        for activation_bits, largest in LARGEST.items():
            y = ops.packed_matmul(x, identity, ProductOptions(activation_bits=activation_bits))
            compare.assert_within(y, x, 10 / largest / 2 * (1 + 1e-3), (bits, activation_bits))


def test_the_largest_sums_fit(ops, isas):
    """Codes at their maximum times digits at theirs: no int16 saturates, no int32 wraps around."""
    for _ in isas():
        n, k = 17, 16384
        # Of 32639 units, two digits of 127 each; and the largest whose lower digit is -128.
        values = (1.0, -1.0, -32384 / 32639, 32384 / 32639)
        cases = all_pairs(BITS, values, (1, 3, 17), (16, 8), (1, 2, 64))
        for case in cases:
            bits, value, rows, activation_bits, groups = case
            codes = pack_codes(mx.full((n, k), 2**bits - 1, dtype=mx.uint32), bits)
            scales = mx.ones((n, groups))
            packed = PackedWeight(codes, bits, "affine", scales, mx.zeros_like(scales))
            x = mx.full((rows, k), value)
            x[:, 0] = 1.0
            wanted = np.full((rows, n), (value * (k - 1) + 1) * (2**bits - 1))
            y = ops.packed_matmul(x, packed, ProductOptions(activation_bits=activation_bits))
            compare.assert_close(y, wanted, 1 / LARGEST[activation_bits], case)


# -- what goes along with a product


def test_adapters_of_all_ranks_and_types(ops, rng, isa):
    """Up to eight; a slot that names none of them means none."""
    for batch, tokens in ((1, 1), (6, 1), (2, 9), (20, 1)):
        count = int(rng.integers(1, MAX_ADAPTERS + 1))
        slots = rng.choice([*range(count), -1, count, 2**31 - 1, -(2**31)], batch)
        slots[0] = 0
        ranks = rng.choice([0, 1, 3, 8, 16, 20], count).tolist()
        dtypes = [DTYPES[i] for i in rng.permutation(3)]
        low_rank = draw_low_rank(rng, slots, 192, (40, 41, 75), ranks, dtypes)
        spec = Spec("packed_matmul", mx.float32, batch, tokens, *matrix(FORMATS[2], 2, 75, 192))
        problem = make(spec._replace(norm=True), rng)
        x, weight, options = problem.args
        adapted = options._replace(adapters=(low_rank,))
        assert_solved(with_args(problem, x, weight, adapted), ops.packed_matmul)


def test_what_an_adapter_adds_does_not_depend_on_the_batch(ops, rng, isa):
    """A matrix of zeros leaves the adapters' product, which has the same bits alone and in a batch.

    Few vectors of each adapter, and so many that its numbers become floats once for all of them.
    """
    few = (21, 1, 204, rng.integers(-1, 8, 21).tolist(), [16, 5, 0, 1, 32, 8, 16, 3])
    many = (4, 29, 564, [0, 1, -1, 1], [24, 68])
    for batch, tokens, k, slots, ranks in (few, many):
        n = 90
        codes = mx.zeros((n, k // 4), mx.uint32)
        zeros = PackedWeight(codes, 8, "affine", mx.zeros(()), mx.zeros(()))
        x = draw(rng, (batch, tokens, k))
        low_rank = draw_low_rank(rng, slots, k, (37, n), ranks)
        together = ops.packed_matmul(x, zeros, ProductOptions(adapters=(low_rank,)))
        for row in rng.choice(batch, min(batch, 6), replace=False).tolist():
            slot, token = max(slots[row], 0), int(rng.integers(tokens))
            alone = LowRank(
                (low_rank.numbers[slot],),
                (low_rank.parts[slot],),
                low_rank.scales[slot : slot + 1],
                mx.array([0 if slots[row] >= 0 else -1]),
                low_rank.sections,
            )
            vector = x[row : row + 1, token : token + 1]
            wanted = ops.packed_matmul(vector, zeros, ProductOptions(adapters=(alone,)))
            compare.assert_same(together[row, token], wanted[0, 0], (batch, row, token))


def test_few_vectors_come_out_as_among_many(ops, rng, isa):
    """Kernels for up to 16 vectors take columns in parts, those for more take whole rows: the same bits.

    With AVX-512, and with AVX2 and up to 4 bits, they also equal one vector's products.
    """
    for bits in BITS:
        alone = isa == "avx512" or (isa == "avx2" and bits < 8)
        counts = (1, 2, 3, 4, 7, 8, 16) if alone else (2, 3, 7, 16)
        spec = Spec("packed_matmul", mx.float32, 1, 19, *matrix(FORMATS[2], bits, 37, 4640))
        x, weight, _ = make(spec, rng).args
        for activation_bits in (16, 8):
            options = ProductOptions(activation_bits=activation_bits)
            wanted = ops.packed_matmul(x, weight, options)
            for count in counts:
                got = ops.packed_matmul(x[:, :count], weight, options)
                compare.assert_same(got, wanted[:, :count], (bits, activation_bits, count))


@each("vectors", [1, 5])
def test_adapters_on_many_threads(ops, rng, set_threads, vectors):
    """More pieces than threads and fewer, of both matrices; the same bits whoever computes them.

    With one thread, a piece has 64 rows: one vector is multiplied in parts, between which B is prefetched.
    """
    spec = Spec("packed_matmul", mx.float32, vectors, 1, *matrix(FORMATS[2], 2, 700, 1024))
    problem = make(spec, rng)
    x, weight, _ = problem.args
    slots = [0, 1, 1, -1, 2][:vectors]
    low_rank = draw_low_rank(rng, slots, 1024, (300, 700), [40, 4, 1])
    options = ProductOptions(adapters=(low_rank,))
    wanted = None
    for threads in (1, 2, 5):
        set_threads(threads)
        assert_solved(with_args(problem, x, weight, options), ops.packed_matmul)
        for got in [ops.packed_matmul(x, weight, options) for _ in range(20)]:
            mx.eval(got)
            wanted = got if wanted is None else wanted
            compare.assert_same(got, wanted, f"{threads} threads")


def test_silu_from_one_end_to_the_other(ops, isas):
    """One input, scaled: gate values from -200 to 200, where an exponential over- and underflows."""
    for _ in isas():
        k = 64
        codes = pack_codes(mx.zeros((401, k), dtype=mx.uint32) + 1, 2)
        gates = np.arange(-200, 201).astype(np.float32)
        gate = PackedWeight(codes, 2, "affine", mx.array(gates), mx.zeros(401))
        x = mx.zeros((1, k))
        x[0, 5] = 1
        y = ops.packed_swiglu(x, gate, gate._replace(scales=mx.ones(401)), PLAIN)
        g = gates.astype(np.float64)
        wanted = g / (1 + np.exp(-g))
        compare.assert_within(exact(y)[0], wanted, 1e-6 * np.abs(wanted) + 1e-30)


def test_ties_go_to_the_lower_row(ops, rng, isas):
    for _ in isas():
        codes = np.tile(rng.integers(0, 4, 64), (900, 1))
        packed = PackedWeight(pack_codes(mx.array(codes), 2), 2, "balanced", mx.ones(900))
        assert ops.packed_argmax(draw(rng, (2, 64)), packed, PLAIN)[0].tolist() == [0, 0]
