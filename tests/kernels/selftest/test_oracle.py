"""The oracle's own formulas, each spelled out in another way."""

import numpy as np

from afm_mlx.kernels import reference
from afm_mlx.kernels.selftest import oracle, specs
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import Spec
from tests.tools.compare import assert_close


def test_a_matrix_is_the_formula_spelled_out(rng):
    for spec in [s for s in specs.full_specs() if s.op == "packed_embedding"]:
        weight = make(spec._replace(out_dims=12), rng).args[1]
        dense = oracle.matrix(weight)
        scales, biases, table = (
            None if part is None else oracle.float64(part) for part in weight[3:]
        )
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
