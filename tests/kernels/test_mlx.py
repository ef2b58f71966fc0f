"""MLX's own operations as a backend: every format that they can express, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import dispatch
from afm_mlx.kernels import mlx as mlx_kernels
from afm_mlx.kernels.formats import PLAIN, PackedWeight
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import UNIT_ROUNDOFF, Problem, make
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs
from tests.tools.compare import assert_same, assert_within

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
OPS = ("packed_matmul", "packed_swiglu", "packed_argmax", "packed_embedding")
CASE = dispatch.Case("cpu", mx.float32, 1, "balanced", "row", 512)


@pytest.fixture(autouse=True)
def nothing_disabled(monkeypatch):
    monkeypatch.setattr(dispatch, "_disabled", {})
    monkeypatch.delenv(dispatch.SWITCH, raising=False)
    dispatch.select.cache_clear()
    yield
    monkeypatch.undo()
    dispatch.select.cache_clear()


def drawn(rng: np.random.Generator, op: str, format_: tuple, bits: int, **fields) -> Problem:
    mode, granularity, in_dims, group_size = format_
    matrix = {"mode": mode, "granularity": granularity, "group_size": group_size, "bits": bits}
    return make(Spec(op, in_dims=in_dims, out_dims=40, **matrix, **fields), rng)


def errors(problem: Problem) -> dict[str, float]:
    """Of each variant of this backend, in units of what rounding explains."""
    variants = [v for v in dispatch.variants(problem.spec.op) if v.backend == "mlx"]
    return {v.name: problem.error(v.run(*problem.args)) / problem.bound for v in variants}


def assert_exact(problem: Problem, variants: int) -> None:
    found = errors(problem)
    assert len(found) == variants
    wrong = {name: error for name, error in found.items() if not error <= 1}
    assert not wrong, f"{problem.spec.op}, {problem.spec.label}: {wrong}"


@pytest.mark.parametrize("op", OPS)
def test_every_format_is_exact_to_rounding(rng, op):
    """Each variant, for one row and more than it is chosen for."""
    for format_, bits, tokens in all_pairs(FORMATS, kernels.BITS, (1, mlx_kernels.CPU_ROWS + 3)):
        assert_exact(drawn(rng, op, format_, bits, tokens=tokens), 2 - (op == "packed_embedding"))


def test_everything_that_goes_along_with_a_product(rng):
    fusions = {"norm": True, "rank": 8, "batch": 3}
    for format_, dtype, tokens in all_pairs((FORMATS[0], FORMATS[7]), DTYPES, (1, 5, 20)):
        given = {"dtype": dtype, "tokens": tokens, **fusions}
        assert_exact(drawn(rng, "packed_matmul", format_, 4, **given, residual=True), 2)
        assert_exact(drawn(rng, "packed_swiglu", format_, 4, **given), 2)
        given = {"dtype": dtype, "batch": 2, "rank": 8, "sections": 3}
        assert_exact(drawn(rng, "packed_matmul", format_, 2, **given), 2)
        assert_exact(drawn(rng, "packed_argmax", format_, 4, dtype=dtype, norm=True), 2)
        assert_exact(drawn(rng, "packed_embedding", format_, 8, dtype=dtype), 1)


def test_half_types_are_rounded_once(rng):
    """Not at every addition, which is what MLX's own product does with them on a CPU."""
    if dispatch.device() != "cpu":
        pytest.skip("MLX adds up in float32 on a GPU")
    for dtype in DTYPES[1:]:
        x, weight, _ = drawn(rng, "packed_matmul", FORMATS[7], 2, dtype=dtype, tokens=4).args
        wanted = oracle.packed_matmul(x, weight)
        float32_sums = 2 * UNIT_ROUNDOFF[mx.float32] * weight.in_dims**0.5 + 2.0**-22
        rms = np.sqrt((wanted**2).mean())
        allowed = UNIT_ROUNDOFF[dtype] * np.abs(wanted) + 8 * float32_sums * rms
        for variant in dispatch.variants("packed_matmul"):
            if variant.backend == "mlx":
                assert_within(variant.run(x, weight, PLAIN), wanted, allowed, (variant.name, dtype))


def test_blocks_make_up_the_whole_product(rng, monkeypatch):
    """The last block is shorter than the others."""
    for format_ in (FORMATS[0], FORMATS[3], FORMATS[4]):
        problem = drawn(rng, "packed_matmul", format_, 4, tokens=12)
        monkeypatch.setattr(mlx_kernels, "BLOCK", 7 * problem.spec.in_dims)
        assert errors(problem)["mlx/dequantized"] <= 1


def test_a_vector_without_leading_axes(rng):
    x, weight, _ = drawn(rng, "packed_matmul", FORMATS[7], 2).args
    with dispatch.force("mlx"):
        assert_same(kernels.packed_matmul(x[0, 0], weight), kernels.packed_matmul(x, weight)[0, 0])
        assert kernels.packed_embedding(mx.array(3), weight, mx.float32).shape == (512,)


def test_the_lower_row_wins_a_tie(rng):
    """Twelve rows that are all alike."""
    x, weight, _ = drawn(rng, "packed_matmul", FORMATS[7], 4).args
    alike = weight._replace(
        codes=mx.repeat(weight.codes[:1], 12, axis=0), scales=mx.repeat(weight.scales[:1], 12)
    )
    with dispatch.force("mlx"):
        for rows in (x, mx.repeat(x, mlx_kernels.CPU_ROWS + 1, axis=1)):
            indices, _ = kernels.packed_argmax(rows, alike)
            assert set(np.array(indices).ravel().tolist()) == {0}


# -- what it is chosen for


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_it_comes_after_our_kernels_and_before_the_reference(monkeypatch, device):
    case = CASE._replace(device=device)
    for variant in dispatch.variants("packed_matmul"):
        if variant.backend in ("metal", "cpu"):
            dispatch.disable(variant.name, "is not there")
    assert dispatch.select("packed_matmul", case).name == "mlx/quantized"
    many = "mlx/dequantized" if device == "cpu" else "mlx/quantized"
    assert dispatch.select("packed_matmul", case._replace(rows=100)).name == many
    names = [v.name for v in dispatch.variants("packed_matmul")]
    assert [name for name in names if name.split("/")[0] in ("mlx", "reference")] == names[-3:]


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_kernel_of_ours_runs_where_there_is_one(monkeypatch, device):
    own = {"cpu": "cpu", "gpu": "metal"}[device]
    here = dispatch.Variant("packed_matmul", f"{own}/here", lambda: None, lambda case: None)
    listed = [here, *(v for v in dispatch.variants("packed_matmul") if v.backend == "mlx")]
    monkeypatch.setattr(dispatch, "variants", lambda op: listed)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    dispatch.select.cache_clear()
    assert dispatch.select("packed_matmul", CASE._replace(device=device)) is here


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "palette", "granularity": "table"}, "MLX knows no palette"),
        ({"group_size": 208}, "multiple of 32 inputs, not of 208"),
        ({"granularity": "group", "group_size": 16}, "multiple of 32 inputs, not of 16"),
        ({"dtype": mx.int32}, "takes float32, float16 or bfloat16, not mlx.core.int32"),
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
