"""MLX's own operations as a backend: every format that they can express, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import dispatch
from afm_mlx.kernels import mlx as mlx_kernels
from afm_mlx.kernels.operands import PLAIN, PackedWeight
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import UNIT_ROUNDOFF, Problem, make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs
from tests.tools.compare import assert_same, assert_within
from tests.tools.problems import assert_solved

# (mode, granularity, K, group size): MLX's own groups, one that it repeats, and one of three times 32.
FORMATS = (
    ("affine", "group", 512, 64),
    ("affine", "group", 512, 256),
    ("affine", "group", 576, 96),
    ("affine", "row", 160, 0),
    ("affine", "tensor", 192, 0),
    ("balanced", "group", 512, 32),
    ("balanced", "group", 512, 256),
    ("balanced", "row", 512, 0),
    ("balanced", "tensor", 160, 0),
)
ROWS = FORMATS[7]
OPS = ("packed_matmul", "packed_swiglu", "packed_argmax", "packed_embedding", "packed_gather")
ONE_VARIANT = ("packed_embedding", "packed_gather")
CASE = dispatch.Case("cpu", mx.float32, 1, "balanced", "row", 512)


def drawn(rng: np.random.Generator, op: str, format_: tuple, bits: int, **fields) -> Problem:
    mode, granularity, in_dims, group_size = format_
    spec = Spec(op, mx.float32, 1, 1, in_dims, 40, bits, mode, granularity, group_size)
    return make(spec._replace(**fields), rng)


def of_mlx(op: str) -> list[dispatch.Variant]:
    found = [variant for variant in dispatch.variants(op) if variant.backend == "mlx"]
    assert len(found) == (1 if op in ONE_VARIANT else 2)
    return found


@pytest.mark.parametrize("op", OPS)
def test_every_format_is_exact_to_rounding(rng, op):
    """Each variant, for one row and more than it is chosen for, with all that goes along with a product."""
    tokens = (1, 2, mlx_kernels.CPU_ROWS + 3)
    cases = all_pairs(FORMATS, kernels.BITS, tokens, DTYPES, (1, 3), (False, True), (0, 8), (1, 3))
    for format_, bits, length, dtype, batch, norm, rank, sections in cases:
        options = {"norm": norm, "residual": norm, "rank": rank, "sections": sections}
        if op != "packed_matmul":
            options.update(residual=False, sections=1)
        if op in ("packed_argmax", *ONE_VARIANT):
            options.update(rank=0)
        if op == "packed_gather":  # more and fewer vectors than experts
            options.update(experts=5, chosen=sections)
        options.update(dtype=dtype, batch=batch, tokens=length)
        problem = drawn(rng, op, format_, bits, **options)
        for variant in of_mlx(op):
            assert_solved(problem, variant.run)


def test_a_grid_is_exact_and_its_products_are_about_as_large_as_their_vectors(rng):
    """In every type, for the 3B's matrices and the smallest ones: no weight is rounded, or exceeds float16."""
    for bits, in_dims, dtype in all_pairs(kernels.BITS, (32, 96, 2048, 6656), DTYPES):
        codes = rng.integers(0, 2**bits, (3, in_dims))
        packed = kernels.pack_codes(mx.array(codes), bits)
        scales, biases, size = mlx_kernels._grid(3, in_dims, bits, dtype)
        got = mx.dequantize(packed, scales, biases, size, bits)
        unit = mlx_kernels.grid_unit(bits, in_dims)
        assert_same(got.astype(mx.float32), (codes - (2**bits - 1) / 2) * np.float32(unit))
        # The largest product with a vector of norm 1; a random one is 2.4 to 3.4 times smaller.
        assert 0.6 < (2**bits - 1) / 2 * unit * in_dims**0.5 <= 1.8


@pytest.mark.parametrize("dtype", DTYPES)
def test_biases_of_groups_belong_to_the_rounded_scales(rng, dtype):
    """So a balanced group stays balanced, up to one rounding."""
    for bits in kernels.BITS:
        weight = drawn(rng, "packed_matmul", FORMATS[5], bits).args[1]
        scales, biases, size = mlx_kernels._affine(weight, dtype)
        assert (scales.dtype, biases.dtype, size) == (dtype, dtype, 32)
        middle = (2**bits - 1) / 2 * np.array(scales.astype(mx.float32)).astype(np.float64)
        allowed = UNIT_ROUNDOFF[dtype] * middle
        assert_within(-biases.astype(mx.float32), middle, allowed)


def test_half_types_are_rounded_once(rng):
    """Not at every addition, which is what MLX's own product does with them on a CPU."""
    if dispatch.device() != "cpu":
        pytest.skip("MLX adds up in float32 on a GPU")
    for dtype in DTYPES[1:]:
        x, weight, _ = drawn(rng, "packed_matmul", ROWS, 2, dtype=dtype, tokens=4).args
        wanted = oracle.packed_matmul(x, weight)
        float32_sums = 2 * UNIT_ROUNDOFF[mx.float32] * weight.in_dims**0.5 + 2.0**-22
        rms = np.sqrt((wanted**2).mean())
        allowed = UNIT_ROUNDOFF[dtype] * np.abs(wanted) + 8 * float32_sums * rms
        for variant in of_mlx("packed_matmul"):
            assert_within(variant.run(x, weight, PLAIN), wanted, allowed, (variant.name, dtype))


def test_blocks_make_up_the_whole_product(rng, monkeypatch):
    """The last block is shorter than the others."""
    for format_ in (FORMATS[0], FORMATS[3], FORMATS[4]):
        problem = drawn(rng, "packed_matmul", format_, 4, tokens=12)
        monkeypatch.setattr(mlx_kernels, "BLOCK", 7 * problem.spec.in_dims)
        for variant in of_mlx("packed_matmul"):
            assert_solved(problem, variant.run)


def test_a_vector_without_leading_axes(rng):
    x, weight, _ = drawn(rng, "packed_matmul", ROWS, 2).args
    with dispatch.force("mlx"):
        assert_same(kernels.packed_matmul(x[0, 0], weight), kernels.packed_matmul(x, weight)[0, 0])
        assert kernels.packed_embedding(mx.array(3), weight, mx.float32).shape == (512,)


def test_the_lower_row_wins_a_tie(rng):
    """Twelve rows that are all alike. Their sums are exact, in whatever order a BLAS adds up which row."""
    x, weight, _ = drawn(rng, "packed_argmax", ROWS, 4, tokens=mlx_kernels.CPU_ROWS + 1).args
    x = mx.array(rng.integers(-8, 9, x.shape)).astype(x.dtype)
    codes, scales = mx.repeat(weight.codes[:1], 12, axis=0), mx.full((12,), 0.5)
    for variant in of_mlx("packed_argmax"):
        indices, _ = variant.run(x, weight._replace(codes=codes, scales=scales), PLAIN)
        assert not indices.any(), variant.name


# -- what it is chosen for


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_it_comes_after_our_kernels_and_before_the_reference(device):
    case = CASE._replace(device=device)
    names = [v.name for v in dispatch.variants("packed_matmul")]
    assert names[-3:] == ["mlx/quantized", "mlx/dequantized", "reference"]
    for name in names[:-3]:
        dispatch.disable(name, "is not there")
    assert dispatch.select("packed_matmul", case).name == "mlx/quantized"
    many = "mlx/dequantized" if device == "cpu" else "mlx/quantized"
    rows = mlx_kernels.CPU_ROWS + 1
    assert dispatch.select("packed_matmul", case._replace(rows=rows)).name == many


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "palette", "granularity": "table"}, "MLX knows no palette"),
        ({"group_size": 208}, "multiple of 32 inputs, not of 208"),
        ({"granularity": "group", "group_size": 16}, "multiple of 32 inputs, not of 16"),
        ({"dtype": mx.int32}, "takes float32, float16 or bfloat16, not int32"),
    ],
)
def test_the_reference_runs_what_mlx_cannot_express(fields, reason):
    with dispatch.force("mlx"):
        for op in OPS:
            case = CASE._replace(**fields)
            reasons = [r for v, r in dispatch.explain(op, case) if v.backend == "mlx"]
            assert all(reason in r for r in reasons)
            assert dispatch.select(op, case).name == "reference"


@pytest.mark.usefixtures("exact_memory")
def test_memory_of_many_rows_is_bounded(rng):
    """By blocks that come one after the other; the numbers of the whole matrix would take sixteen."""
    n, k = 16 * mlx_kernels.BLOCK // 512, 512
    codes = mx.array(rng.integers(0, 2**32, (n, k * 2 // 32), dtype=np.uint32))
    weight = PackedWeight(codes, 2, "balanced", scales=mx.array(0.01))
    x = mx.array(rng.standard_normal((mlx_kernels.CPU_ROWS + 1, k)).astype(np.float32))
    mx.eval(x, weight.codes)
    with dispatch.force("mlx/dequantized"):
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        y = kernels.packed_matmul(x, weight)
        mx.eval(y)
    block = mlx_kernels.BLOCK * x.dtype.size
    assert mx.get_peak_memory() - before - 2 * y.nbytes < 6 * block
