"""Adapters in the Metal kernels, run by the emulator: many at once, of any rank, in any place."""

import mlx.core as mx
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.metal import products
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs
from tests.tools.low_rank import draw_low_rank, in_shared_arrays
from tests.tools.problems import assert_solved, with_args

BODY = {"bits": 2, "mode": "balanced", "granularity": "row", "activation_bits": 32}
EXTREMES = [-(2**31), -2, 2**31 - 1]
INSIDE = pytest.mark.parametrize("inside", [False, True], ids=["shrink", "inside"])
# Rows of the batch, and tokens of each.
SHAPES = [(1, 1, "vector"), (4, 1, "vector"), (2, 2, "vector"), (8, 1, "matrix"), (3, 4, "matrix")]


def draw_slots(rng, rows, adapters):
    """Every adapter if rows suffice, else some; and slots that are none's."""
    listed = [*range(adapters), -1, int(rng.choice([adapters, *EXTREMES]))] * rows
    return [int(rng.integers(adapters)), *rng.permutation(listed)[1:rows].tolist()]


def assert_adapted(problem, variant, *adapters):
    """The variant that is chosen is the one meant, and adds what the adapters say."""
    *given, options = problem.args
    problem = with_args(problem, *given, options._replace(adapters=adapters))
    assert dispatch.select(problem.spec.op, problem.case).name == f"metal/{variant}"
    assert_solved(problem, getattr(kernels, problem.spec.op))


@INSIDE
def test_adapters_of_any_rank_in_one_batch(metal, rng, monkeypatch, inside):
    monkeypatch.setattr(products, "MAX_SHRINK_BYTES", 1 << 30 if inside else 0)
    cases = all_pairs(SHAPES, (1, 2, 8), (1, 2, 3), (False, True), DTYPES, DTYPES)
    for (batch, tokens, variant), count, projections, norm, dtype, of_adapters in cases:
        n = int(rng.integers(33, 200))
        # Products with A that fit into a threadgroup's memory.
        ranks = rng.choice([0, 1, 5, 8, 16, 33, 64], count).tolist()
        ranks[int(rng.integers(count))] = 12
        slots, sections = draw_slots(rng, batch, count), (n // 3, n // 3 + 7, n)[-projections:]
        adapters = draw_low_rank(rng, slots, 144, sections, ranks, [of_adapters])
        spec = Spec("packed_matmul", dtype, batch, tokens, 144, n, **BODY)
        problem = make(spec._replace(norm=norm, residual=(projections > 1) != norm), rng)
        assert_adapted(problem, variant, adapters)


PAIRS = {
    "gate": [(4, 0)],
    "up": [(0, 9)],
    "both": [(3, 20)],
    "eight": [(16, 16), (0, 5), (7, 0), (0, 0), (8, 1), (2, 40), (33, 3), (1, 1)],
}


@INSIDE
@pytest.mark.parametrize("name", PAIRS)
def test_adapters_of_a_pair(metal, rng, monkeypatch, name, inside):
    monkeypatch.setattr(products, "MAX_SHRINK_BYTES", 1 << 30 if inside else 0)
    for (batch, tokens, variant), shared in all_pairs(SHAPES[1:4], (False, True)):
        n = int(rng.integers(9, 41))
        spec = Spec("packed_swiglu", mx.float32, batch, tokens, 80, n, **BODY, norm=True)
        slots = draw_slots(rng, batch, len(PAIRS[name]))
        pair = [draw_low_rank(rng, slots, 80, (n,), own) for own in zip(*PAIRS[name], strict=True)]
        pair = in_shared_arrays(*pair) if shared else pair
        assert_adapted(make(spec, rng), f"swiglu_{variant}", *pair)


@pytest.mark.parametrize(("rows", "variant"), [(1, "vector"), (8, "matrix")])
def test_an_adapter_that_leaves_the_matrix_alone_may_be_of_any_size(metal, rng, rows, variant):
    spec = Spec("packed_matmul", mx.float32, rows, in_dims=64, out_dims=8, **BODY)
    given = draw_low_rank(rng, [1] * rows, 64, (8,), [0, 5])
    few = mx.array([float("nan")] * 3, mx.float16)  # 3 elements would be in another address space
    adapters = given._replace(numbers=(few, given.numbers[1]))
    assert_adapted(make(spec, rng), variant, adapters)


# -- what is refused, and what it costs


def test_what_metal_can_not_add_is_refused(rng):
    given = draw_low_rank(rng, [0], 16, (4,), [1] * 9)
    with pytest.raises(ValueError, match="up to 8 adapters of one type at a time; got 9 of"):
        products.adapter_inputs((given,))
    mixed = given.numbers[0], given.numbers[1].astype(mx.float32)
    with pytest.raises(ValueError, match=r"got 2 of .*float16, .*float32"):
        products.adapter_inputs((given._replace(numbers=mixed, parts=given.parts[:2]),))


def test_another_adapter_in_the_same_place_is_another_array_and_no_other_table(rng):
    given = draw_low_rank(rng, [0], 64, (24,), [7])
    other = given._replace(numbers=(given.numbers[0] * 2,))
    of_given, of_other = (products.adapter_inputs((adapters,)) for adapters in (given, other))
    first, second = of_given["adapter0"], of_other["adapter0"]
    table, same_table = of_given["parts"], of_other["parts"]
    assert (first is given.numbers[0], second is other.numbers[0]) == (True, True)
    assert table is same_table
