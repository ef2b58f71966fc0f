"""What a call reads and writes, and other bytes for the same work."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import KeyValues, PackedWeight
from afm_mlx.kernels.selftest import oracle, specs
from afm_mlx.kernels.selftest.problems import make
from afm_mlx.kernels.selftest.specs import Spec
from tests.tools.compare import exact

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
