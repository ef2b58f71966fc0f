"""Adapters in the Metal kernels, run by the emulator: many at once, of any rank, in any place."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import ProductOptions, dispatch
from afm_mlx.kernels.metal import low_rank, products
from afm_mlx.kernels.selftest import oracle, problems
from afm_mlx.kernels.selftest.problems import Spec
from tests.tools.compare import UNIT_ROUNDOFF, assert_close, exact, same
from tests.tools.graph import count_dispatches
from tests.tools.low_rank import draw_low_rank, in_shared_arrays

BODY = {"bits": 2, "mode": "balanced", "granularity": "row"}
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
EXTREMES = [-(2**31), -2, 2**31 - 1]
INSIDE = pytest.mark.parametrize("inside", [False, True], ids=["shrink", "inside"])


def draw_adapters(rng, ranks, slots, in_dims, sections, dtype=mx.float16):
    drawn = draw_low_rank(rng, slots, in_dims, sections, ranks, [dtype] * len(ranks))
    mx.eval(drawn.low_rank.numbers)  # there before any graph
    return drawn


def draw_slots(rng, rows, adapters):
    """Every adapter if rows suffice, else some; and slots that are none's."""
    slots = rng.permutation([*range(adapters), -1, int(rng.choice([adapters, *EXTREMES]))] * rows)[
        :rows
    ]
    slots[0] = rng.integers(adapters)
    return slots.tolist()


def assert_added(got, wanted, dtype, in_dims, what="outputs"):
    """Equal up to one rounding to `dtype` and float32 sums."""
    assert got.dtype == dtype
    bound = UNIT_ROUNDOFF[dtype] + 4 * (4 + in_dims**0.5) * 2.0**-24
    assert_close(got, wanted, bound, what, least=1)


def variant_of(op, *args):
    return dispatch.select(op, problems.case_of(op, *args)).name.removeprefix("metal/")


def with_adapters(*low_rank):
    return ProductOptions(adapters=low_rank)


# Rows of the batch, and tokens of each.
SHAPES = [(1, 1, "vector"), (4, 1, "vector"), (2, 2, "vector"), (8, 1, "matrix"), (3, 4, "matrix")]


@INSIDE
def test_adapters_of_any_rank_in_one_batch(metal, rng, monkeypatch, inside):
    monkeypatch.setattr(products, "MAX_SHRINK_BYTES", 1 << 30 if inside else 0)
    in_dims, n = 144, int(rng.integers(33, 200))
    for i, (batch, tokens, variant) in enumerate(2 * SHAPES):
        count = (1, 2, 8)[i % 3]
        sections = (n // 3, n // 3 + 7, n) if i % 2 else (n,)
        # So many products with A fit into a threadgroup's memory.
        ranks = rng.choice([0, 1, 5, 8, 16, 33, 64], count).tolist()
        ranks[int(rng.integers(count))] = 12
        adapters = draw_adapters(rng, ranks, draw_slots(rng, batch, count), in_dims, sections)
        spec = Spec("packed_matmul", mx.bfloat16, batch, tokens, in_dims, n, **BODY)
        problem = problems.make(spec._replace(norm=i % 3 == 0, residual=i % 3 != 1), rng)
        x, weight, options = problem.args
        options = options._replace(adapters=(adapters.low_rank,))
        assert variant_of("packed_matmul", x, weight, options) == variant
        got, x = kernels.packed_matmul(x, weight, options), exact(x)
        if options.norm is not None:
            x = oracle.rms_norm(x, exact(options.norm), options.eps)
        assert_added(got, problem.wanted[0] + adapters.added(x), mx.bfloat16, in_dims, ranks)


def swiglu(gate, up):
    return gate / (1 + np.exp(-gate)) * up


PAIRS = {
    "gate": [(4, 0)],
    "up": [(0, 9)],
    "both": [(3, 20)],
    "eight": [(16, 16), (0, 5), (7, 0), (0, 0), (8, 1), (2, 40), (33, 3), (1, 1)],
}


@INSIDE
@pytest.mark.parametrize(("batch", "tokens", "variant"), SHAPES[1:4])
def test_adapters_of_a_pair(metal, rng, monkeypatch, batch, tokens, variant, inside):
    monkeypatch.setattr(products, "MAX_SHRINK_BYTES", 1 << 30 if inside else 0)
    in_dims, n = 80, int(rng.integers(9, 41))
    spec = Spec("packed_swiglu", mx.float32, batch, tokens, in_dims, n, **BODY, norm=True)
    for name, ranks in PAIRS.items():
        slots = draw_slots(rng, batch, len(ranks))
        adapters = in_shared_arrays(
            [draw_adapters(rng, own, slots, in_dims, (n,)) for own in zip(*ranks, strict=True)]
        )
        x, *weights, plain = problems.make(spec, rng).args
        options = plain._replace(adapters=tuple(each.low_rank for each in adapters))
        assert variant_of("packed_swiglu", x, *weights, options) == f"swiglu_{variant}"
        got = kernels.packed_swiglu(x, *weights, options)
        normed = oracle.rms_norm(exact(x), exact(plain.norm), plain.eps)
        pair = (
            oracle.packed_matmul(x, weight, plain) + each.added(normed)
            for weight, each in zip(weights, adapters, strict=True)
        )
        assert_close(got, swiglu(*pair), 2e-5, name)


def test_matrices_of_a_pair_with_arrays_of_their_own(metal, rng):
    for batch in (2, 8):
        spec = Spec("packed_swiglu", mx.float32, batch, in_dims=64, out_dims=20, **BODY)
        x, *weights, _ = problems.make(spec, rng).args
        drawn = [
            draw_adapters(rng, [rank, 3], draw_slots(rng, batch, 2), 64, (20,)) for rank in (4, 9)
        ]
        options = with_adapters(*(adapters.low_rank for adapters in drawn))
        got = kernels.packed_swiglu(x, *weights, options)
        pair = (
            oracle.packed_matmul(x, weight) + adapters.added(exact(x))
            for weight, adapters in zip(weights, drawn, strict=True)
        )
        assert_close(got, swiglu(*pair), 2e-5, f"{batch} rows")


# float16 under bfloat16 is what a model runs with.
def test_any_type_of_numbers_under_any_type_of_activations(metal, rng):
    pairs = {(dtype, mx.float16) for dtype in DTYPES} | {(mx.bfloat16, dtype) for dtype in DTYPES}
    for dtype, of_adapter in sorted(pairs, key=str):
        batch = int(rng.choice([1, 3, 5]))
        slots = [1, 0, 1, -1, 0][:batch]
        adapters = draw_adapters(rng, [6, 2], slots, 48, (19,), of_adapter)
        spec = Spec("packed_matmul", dtype, batch, in_dims=48, out_dims=19, **BODY)
        problem = problems.make(spec, rng)
        got = kernels.packed_matmul(*problem.args[:2], with_adapters(adapters.low_rank))
        wanted = problem.wanted[0] + adapters.added(exact(problem.args[0]))
        assert_added(got, wanted, dtype, 48, (dtype, of_adapter))


@pytest.mark.parametrize(("batch", "variant"), [(4, "vector"), (8, "matrix")])
def test_rows_without_an_adapter_get_what_the_matrix_gives(metal, rng, batch, variant):
    spec = Spec("packed_matmul", mx.float32, batch, in_dims=64, out_dims=40, **BODY)
    x, weight, _ = problems.make(spec, rng).args
    slots = [-1, 0, 2, *EXTREMES, 1, -1][:batch]  # of two adapters, the first one of rank 0
    options = with_adapters(draw_adapters(rng, [0, 4], slots, 64, (40,)).low_rank)
    assert variant_of("packed_matmul", x, weight, options) == variant
    plain = kernels.packed_matmul(x, weight)
    adapted = kernels.packed_matmul(x, weight, options)
    alike = [same(a, b) for a, b in zip(plain, adapted, strict=True)]
    assert alike == [slot != 1 for slot in slots]


@pytest.mark.parametrize("rows", [1, 8])
def test_an_adapter_that_leaves_the_matrix_alone_may_be_of_any_size(metal, rng, rows):
    spec = Spec("packed_matmul", mx.float32, rows, in_dims=64, out_dims=8, **BODY)
    x, weight, _ = problems.make(spec, rng).args
    given = draw_adapters(rng, [0, 5], [1] * rows, 64, (8,))
    few = mx.array([float("nan")] * 3, mx.float16)  # so few would come in another address space
    one = given.low_rank._replace(numbers=(few, given.low_rank.numbers[1]))
    wanted = oracle.packed_matmul(x, weight) + given.added(exact(x))
    got = kernels.packed_matmul(x, weight, with_adapters(one))
    assert_added(got, wanted, mx.float32, 64)


@pytest.mark.parametrize("rows", [1, 8])
def test_swapping_hands_over_another_array(metal, rng, rows):
    """One adapter after another through the same table: nothing of the one before is left."""
    spec = Spec("packed_matmul", mx.float32, rows, in_dims=64, out_dims=24, **BODY)
    x, weight, _ = problems.make(spec, rng).args
    given, tables = draw_adapters(rng, [7], [0] * rows, 64, (24,)), set()
    for factor in (1, -2):
        one = given.low_rank._replace(numbers=(given.low_rank.numbers[0] * factor,))
        # Both A and B are multiplied.
        wanted = oracle.packed_matmul(x, weight) + factor**2 * given.added(exact(x))
        got = kernels.packed_matmul(x, weight, with_adapters(one))
        assert_added(got, wanted, mx.float32, 64)
        tables.add(id(low_rank.arrays((one,))[8]))
    assert len(tables) == 1


# -- what is refused, and what it costs


def test_what_metal_can_not_add_is_refused(rng):
    given = draw_adapters(rng, [1] * 9, [0], 16, (4,)).low_rank
    with pytest.raises(ValueError, match="up to 8 adapters of one type at a time; got 9 of"):
        low_rank.arrays((given,))
    mixed = given.numbers[0], given.numbers[1].astype(mx.float32)
    two = given._replace(numbers=mixed, parts=given.parts[:2])
    with pytest.raises(ValueError, match=r"got 2 of .*float16, .*float32"):
        low_rank.arrays((two,))


@pytest.mark.parametrize(("rows", "shrinks"), [(1, 0), (8, 1)])
def test_dispatches_of_a_mixed_batch(rng, rows, shrinks):
    spec = Spec("packed_matmul", mx.bfloat16, rows, in_dims=64, out_dims=8, **BODY)
    x, weight, _ = problems.make(spec, rng).args

    def product(ranks):
        given = draw_adapters(rng, ranks, [0] * rows, 64, (8,)).low_rank
        return count_dispatches(
            lambda x: kernels.packed_matmul(x, weight, with_adapters(given)), x
        ).kernels

    name = "afm_packed_vector" if rows <= 4 else "afm_packed_matrix"
    assert product([0, 0]) == {name: 1}  # nothing to add
    of_one = product([8])
    assert of_one == product([8, 0, 16, 1, 32, 3, 9, 64])
    assert of_one == {name: 1, **({"afm_low_rank_shrink": 1} if shrinks else {})}
