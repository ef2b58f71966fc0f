"""Problems of the self-test: their bytes, their lists, and the oracle's answers."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import BITS, MODES, KeyValues, PackedWeight, dispatch, reference
from afm_mlx.kernels.selftest import oracle, specs
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.compare import assert_close, exact

MATRIX = {"in_dims": 512, "out_dims": 96, "bits": 2, "mode": "balanced", "granularity": "row"}
PACKED = 96 * 512 // 4 + 96 * 4
HEADS = {"heads": 8, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(
    ("spec", "nbytes"),
    [
        (
            Spec("packed_matmul", mx.bfloat16, **MATRIX, norm=True),
            PACKED + 2 * 512 + 2 * (512 + 96),
        ),
        (Spec("packed_argmax", **MATRIX), PACKED + 4 * 512),
        # Seven rows of codes, each with its scale, that become numbers of two bytes.
        (Spec("packed_embedding", mx.float16, 1, 7, **MATRIX), 7 * (PACKED // 96 + 2 * 512)),
        (Spec("decode_attention", **HEADS, capacity=100), 2 * 4 * 8 * 64 + 97 * 2 * 2 * 64),
        (
            Spec("causal_attention", tokens=3, **HEADS, capacity=10),
            2 * 3 * 4 * 8 * 64 + 10 * 2 * 2 * 64,
        ),
        (Spec("write_tokens", mx.int8, 2, 3, **HEADS, capacity=9), 2 * 2 * 3 * 2 * 2 * 64),
    ],
    ids=lambda value: getattr(value, "op", None),
)
def test_bytes_of_a_call(rng, spec, nbytes):
    assert make(spec, rng).nbytes == nbytes


def test_bytes_of_an_adapter_count_where_a_row_uses_it(rng):
    problem = make(Spec("packed_matmul", **MATRIX, rank=8), rng)  # one of three is used
    (low_rank,) = problem.args[-1].adapters
    used = low_rank.numbers[low_rank.slots.item()].nbytes
    assert problem.nbytes == PACKED + 4 * (512 + 96) + used + low_rank.scales.nbytes + 4


def test_outliers_show_what_one_scale_for_all_costs_the_others(rng):
    outliers = [spec for spec in specs.full_specs() if spec.outliers]
    assert {spec.activation_bits for spec in outliers} == {16, 8}
    for spec in outliers:
        problem = make(spec._replace(norm=False), rng)
        x, weight, options = problem.args
        vectors = exact(x)
        typical = np.abs(vectors) < 100
        assert (~typical).sum() == spec.outliers * spec.batch * spec.tokens
        levels = 2 ** (spec.activation_bits - 1) - 1
        for apart in (False, True):
            rest = np.where(typical | (not apart), vectors, 0)
            unit = np.abs(rest).max(-1, keepdims=True) / levels
            rounded = np.where(rest != 0, np.round(rest / unit) * unit, vectors)
            got = oracle.packed_matmul(mx.array(rounded.astype(np.float32)), weight, options)
            error = problem.error(mx.array(got.astype(np.float32)))
            assert (error <= problem.bound) == apart, spec.label
    with pytest.raises(ValueError, match="affine, not balanced"):
        make(Spec("packed_matmul", **MATRIX, outliers=2), rng)


def test_calls_in_turn_read_other_bytes_of_the_same_size(rng):
    for spec in specs.quick_specs(mx.float32):
        problem = make(spec, rng)
        for args in problem.fresh(3)[1:]:
            for new, old in zip(args, problem.args, strict=True):
                if isinstance(new, PackedWeight | KeyValues):
                    assert new[0].shape == old[0].shape
                    assert not mx.any(new[0] == old[0]).item()


# -- lists of problems


def test_the_full_test_covers_every_pair():
    listed = specs.full_specs()
    assert {spec.op for spec in listed} == set(dispatch.OPS)
    values = {
        "dtype": DTYPES,
        "bits": BITS,
        "mode": MODES,
        "out_dims": (256, 37),
        "rows": (1, 3, 8, 40),
        "norm": (True, False),
        "residual": (True, False),
        "rank": (0, 8, 16),
        "activation_bits": (16, 8),
    }
    products = [
        {**spec._asdict(), "rows": spec.batch * spec.tokens}
        for spec in listed
        if spec.op == "packed_matmul" and not spec.outliers and spec.tokens <= 40
    ]
    for one, two in itertools.combinations(values, 2):
        seen = {(product[one], product[two]) for product in products}
        assert seen == set(itertools.product(values[one], values[two]))


def test_specs_of_the_model_are_whole(rng):
    """Each one packs, and has a name of its own."""
    for listed in (specs.model_specs(mx.bfloat16), specs.quick_specs(mx.float16)):
        assert {spec.op for spec in listed} == set(dispatch.OPS)
        assert len({(s.op, s.label) for s in listed}) == len(listed)
        for spec in listed:
            assert spec.in_dims * spec.bits % 32 == 0
            fewer = {"out_dims": 64, "tokens": 3, "experts": 8}
            make(spec._replace(**{k: min(getattr(spec, k), n) for k, n in fewer.items()}), rng)


def test_a_label_names_what_the_problem_is_made_of():
    matrix = {"in_dims": 64, "out_dims": 8, "bits": 4, "mode": "affine"}
    product = specs.Spec(
        "packed_matmul",
        batch=2,
        tokens=3,
        **matrix,
        granularity="group",
        group_size=32,
        norm=True,
        rank=8,
        activation_bits=8,
    )
    assert product.label == (
        "6 rows, 8x64, 4-bit affine g32, norm, LoRA 8, 8-bit activations, float32"
    )
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 16, "capacity": 9}
    attention = specs.Spec("decode_attention", mx.float16, **heads, rope=True)
    assert attention.label == "1 row, 4/2 heads x 16, 9 columns, rope, float16"


# -- the oracle's formulas, each in another form


def test_products_with_experts_are_those_with_each_expert_alone(rng):
    for spec in [s for s in specs.full_specs() if s.op == "packed_gather"][::5]:
        x, weight, indices, experts, *_ = (problem := make(spec, rng)).args
        matrices = oracle.matrix(weight).reshape(experts, -1, spec.in_dims)
        vectors = np.repeat(exact(x), spec.chosen, axis=0)
        assert_close(
            problem.wanted[0], np.einsum("pk,pnk->pn", vectors, matrices[np.array(indices)]), 1e-12
        )


def test_a_matrix_is_the_formula_spelled_out(rng):
    for spec in [s for s in specs.full_specs() if s.op == "packed_embedding"]:
        weight = make(spec._replace(out_dims=12), rng).args[1]
        dense = oracle.matrix(weight)
        optional = (weight.scales, weight.biases, weight.table)
        scales, biases, table = (x if x is None else oracle.float64(x) for x in optional)
        for _ in range(20):
            n, k = int(rng.integers(12)), int(rng.integers(spec.in_dims))
            word = int(np.array(weight.codes)[n, k * spec.bits // 32])
            code = word >> (k * spec.bits % 32) & (2**spec.bits - 1)
            at = {0: (), 1: (n,), 2: (n, k // max(1, spec.group_size))}
            if spec.mode == "palette":
                value = table[n * len(table) // 12, code]
            elif spec.mode == "balanced":
                value = scales[at[scales.ndim]] * (code - (2**spec.bits - 1) / 2)
            else:
                value = scales[at[scales.ndim]] * code + biases[at[scales.ndim]]
            assert dense[n, k] == value


def test_adapters_equal_a_merged_matrix(rng):
    matrix = {"in_dims": 512, "out_dims": 96, "bits": 2, "mode": "balanced", "granularity": "row"}
    problem = make(Spec("packed_matmul", batch=4, tokens=2, **matrix, rank=8, sections=3), rng)
    x, weight, options = problem.args
    (low_rank,) = options.adapters
    start = np.array([0, *low_rank.sections])
    for row, slot in enumerate(low_rank.slots.tolist()):
        merged = oracle.matrix(weight)
        if slot >= 0 and (rank := low_rank.parts[slot].rank):
            factors = reference.low_rank_factors(low_rank, slot, weight.in_dims)
            a, b = map(oracle.float64, factors)
            for i in range(3):
                rows = slice(start[i], start[i + 1])
                added = b[rows] @ a[rank * i : rank * i + rank]
                merged[rows] += float(low_rank.scales[slot]) * added
        assert_close(problem.wanted[0][row], oracle.float64(x[row]) @ merged.T, 1e-12, row, least=1)
