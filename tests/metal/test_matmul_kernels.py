"""Metal kernels of products with packed matrices, run by the emulator, against float64 NumPy.

Problems, their answers and the bounds that rounding explains come from `kernels.problems`.
"""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import LowRank, PackedWeight, Part, ProductOptions, dispatch
from afm_mlx.kernels.metal import products, unpacked
from afm_mlx.kernels.selftest import problems
from afm_mlx.kernels.selftest.problems import Spec
from tests.tools.cases import draw
from tests.tools.compare import assert_close
from tests.tools.graph import count_dispatches

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
FORMATS = [
    (bits, mode, granularity)
    for bits in (2, 4, 8)
    for mode, granularity in [
        ("balanced", "tensor"),
        ("balanced", "row"),
        ("balanced", "group"),
        ("affine", "tensor"),
        ("affine", "row"),
        ("affine", "group"),
        ("palette", "table"),
    ]
]


# How often numbers are rounded to the dtype: the fused kernels do it once, at the end. The others round
# both operands, and the product before they add to it.
ROUNDINGS = {"unpacked": 4, "mlx_quantized": 4, "swiglu_unpacked": 6}


def assert_right(variant, rng, spec):
    """The variant that is chosen for a random problem is the one meant, and its error within bounds."""
    problem = problems.make(spec, rng)
    assert dispatch.select(spec.op, problem.case).name == f"metal/{variant}", spec.label
    result = getattr(kernels, spec.op)(*problem.args)
    # Sums are float32; codes without their offset are up to three times as large as the product.
    sums = 4 * (4 + spec.in_dims**0.5) * 2.0**-24 * (3 if spec.op == "packed_swiglu" else 1)
    # Products are drawn to be about 1; when there are few, chance may make all of them small. An eighth of the
    # largest error counts, and a number eight times as large as most is rounded eight times as coarsely.
    rms = np.sqrt((problem.wanted[0] ** 2).mean())
    size, largest = min(1, rms), np.abs(problem.wanted[0]).max()
    rounding = ROUNDINGS.get(variant, 1) * problems.UNIT_ROUNDOFF[spec.dtype]
    bound = rounding * max(1, largest / (8 * rms)) + sums
    assert problem.error(result) * size <= bound, spec.label


def specs(op, format_, i, **options):
    """Shapes with and without tails for one format, with dtypes and fusions dealt out by `i`."""
    bits, mode, granularity = format_
    options = {
        "dtype": DTYPES[i % 3],
        "bits": bits,
        "mode": mode,
        "granularity": granularity,
        "group_size": (16, 32, 64)[i % 3] if granularity == "group" else 0,
        "norm": i % 2 == 0,
        "residual": op == "packed_matmul" and i % 3 != 1,
        "rank": (0, 4, 0, 40)[i % 4] if op in ("packed_matmul", "packed_swiglu") else 0,
        **options,
    }
    return [Spec(op, in_dims=k, out_dims=n, **options) for k, n in [(704, 21), (64, 8)]]


def every(step, first=0):
    """Formats with their indices, `step` apart: each mode and width is among them; all would be slow."""
    return [(i, format_) for i, format_ in enumerate(FORMATS) if i % step == first]


ALL = pytest.mark.parametrize("step", [2, pytest.param(1, marks=pytest.mark.slow)])


# Rows in two batch entries where they are even, so that rows share adapters.
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_vector(metal, rng, monkeypatch, bits):
    for i, format_ in every(1):
        if format_[0] == bits:
            # Some multiply with A beforehand.
            monkeypatch.setattr(products, "MAX_SHRINK_BYTES", i % 3 << 20)
            batch, tokens = [(1, 1), (2, 1), (3, 1), (2, 2)][(i + i // 4) % 4]
            for spec in specs("packed_matmul", format_, i):
                assert_right("vector", rng, spec._replace(batch=batch, tokens=tokens))


@ALL
def test_matrix(metal, rng, step):
    for i, format_ in every(step):
        batch, tokens = [(1, 5), (9, 1), (2, 16)][(i + i // 3) % 3]
        for spec in specs("packed_matmul", format_, i):
            assert_right("matrix", rng, spec._replace(batch=batch, tokens=tokens))


@ALL
def test_unpacked(metal, rng, monkeypatch, step):
    monkeypatch.setattr(unpacked, "BLOCK", 5 * 704)  # several blocks, the last one short
    for i, format_ in every(step, step - 1):
        for spec in specs("packed_matmul", format_, i):
            if format_[1:] == ("affine", "group"):
                spec = spec._replace(in_dims=48, group_size=24)
            assert_right("unpacked", rng, spec._replace(batch=3, tokens=11))


def test_the_product_of_mlx(metal, rng):
    for bits in (2, 4, 8):
        i = int(rng.integers(12))
        for spec in specs("packed_matmul", (bits, "affine", "group"), i, group_size=64):
            # MLX takes the scales in the dtype of the activations, and its CPU backend adds in it.
            spec = spec._replace(dtype=mx.float32, batch=3, tokens=11)
            assert_right("mlx_quantized", rng, spec)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("variant", "shape"),
    [("vector", (1, 1)), ("vector", (2, 2)), ("matrix", (3, 3)), ("unpacked", (3, 11))],
)
def test_swiglu(metal, rng, monkeypatch, step, variant, shape):
    for i, format_ in every(step):
        monkeypatch.setattr(products, "MANY_OUTPUTS", i % 2 << 13)
        for spec in specs("packed_swiglu", format_, i + len(variant)):
            group = min(spec.group_size, 16) if variant == "unpacked" else spec.group_size
            spec = spec._replace(batch=shape[0], tokens=shape[1], group_size=group)
            assert_right(f"swiglu_{variant}", rng, spec)


def test_swiglu_of_matrices_that_differ(metal, rng):
    matrix = {"in_dims": 64, "out_dims": 9, "mode": "balanced", "granularity": "row"}
    for rows in (1, 5):
        spec = Spec("packed_swiglu", mx.float16, rows, norm=True, bits=2, **matrix)
        x, gate, *_ = problems.make(spec, rng).args
        up = problems.packed_weight(spec._replace(bits=4), rng)
        options = ProductOptions(norm=draw(rng, (64,)))
        got, wanted = (
            module.packed_swiglu(x, gate, up, options) for module in (kernels, problems.oracle)
        )
        assert got.dtype == mx.float16
        assert_close(got, wanted, 2**-10, f"{rows} rows")


# Rows of 4 to 16 inputs have a step's tail only; below 8 elements buffers lie in `constant` memory.
@pytest.mark.parametrize(("rows", "variant"), [(1, "vector"), (8, "matrix"), (33, "unpacked")])
def test_the_smallest_matrices(metal, rng, rows, variant):
    options = {"mode": "affine", "granularity": "row", "norm": True, "residual": True, "rank": 1}
    for bits, in_dims, out_dims in ((2, 16, 1), (4, 8, 7), (4, 8, 8), (8, 4, 1), (8, 12, 3)):
        sizes = {"batch": rows, "in_dims": in_dims, "out_dims": out_dims, "bits": bits}
        assert_right(variant, rng, Spec("packed_matmul", **sizes, **options))


# -- the head


def exact_head(rng, rows, in_dims, out_dims, distinct):
    """Integers whose products are exact in float32, with rows that occur again and again."""
    x = mx.array(rng.integers(-3, 4, (rows, in_dims)).astype(np.float32))
    codes = rng.integers(0, 16, (distinct, in_dims))[rng.integers(0, distinct, out_dims)]
    words = kernels.pack_codes(mx.array(codes), 4)
    weight = PackedWeight(words, 4, "balanced", mx.array(2.0))
    return x, weight, np.array(x).astype(np.float64) @ (2 * codes - 15).T


def test_argmax_of_ties_is_the_lowest_row(metal, rng):
    for case in ((1, 5), (1, 70), (4, 70), (2, 16384 + 37), (6, 70), (33, 70), (1, 1)):
        rows, out_dims = case
        x, weight, logits = exact_head(rng, rows, 16, out_dims, max(1, out_dims // 9))
        name = "argmax" if rows <= 4 else "argmax_of_products"
        chosen = dispatch.select("packed_argmax", problems.case_of("packed_argmax", x, weight))
        assert chosen.name == f"metal/{name}"
        index, value = kernels.packed_argmax(x, weight)
        assert index.dtype == mx.uint32
        assert index.tolist() == logits.argmax(-1).tolist(), case
        assert value.tolist() == logits.max(-1).tolist(), case


@pytest.mark.parametrize("step", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_argmax_with_norm(metal, rng, step):
    for i, format_ in every(step):
        for rows in (1, 3):
            for spec in specs("packed_argmax", format_, i, batch=rows):
                assert_right("argmax", rng, spec)


def test_what_is_no_number_is_the_largest_so_that_it_is_seen(metal):
    weight = PackedWeight(mx.zeros((9, 2), mx.uint32), 4, "balanced", mx.full((9,), float("nan")))
    weight = weight._replace(scales=mx.array([-1.0] * 4 + [float("nan")] + [-2.0] * 4))
    x = mx.ones((1, 16))
    index, value = kernels.packed_argmax(x, weight)
    assert index.tolist() == [4]
    assert not np.isfinite(value.tolist()[0])


# -- what it costs


def weight_of(out_dims, in_dims, bits=2):
    codes = mx.zeros((out_dims, in_dims * bits // 32), mx.uint32)
    scales = mx.ones((out_dims,))
    mx.eval(codes, scales)  # weights are there before the graph
    return PackedWeight(codes, bits, "balanced", scales)


def adapters_of(rank, *sections):
    """One adapter, as far as counting goes: nothing is read."""
    arrays = mx.zeros((1024,), mx.float16), mx.ones((1,)), mx.zeros((1,), mx.int32)
    mx.eval(arrays)
    numbers, scales, slots = arrays
    return LowRank((numbers,), (Part(0, 0, rank),), scales, slots, sections)


# Hidden and feed-forward dimensions, and rows of queries, keys and values; adapters add a dispatch where
# all threadgroups together would read too much of A.
@pytest.mark.parametrize(
    ("dims", "rows", "rank", "shrinks"),
    [
        ((2048, 6656, 2560), 1, 0, 0),  # the 3B
        ((2048, 6656, 2560), 1, 32, 2),
        ((2048, 6656, 2560), 1, 8, 1),
        ((2048, 6656, 2560), 5, 32, 4),
        ((256, 832, 512), 4, 32, 0),
        ((256, 832, 512), 32, 0, 0),
    ],
)
def test_dispatches_of_a_block(dims, rows, rank, shrinks):
    hidden, wide, qkv = dims
    x = mx.zeros((1, rows, hidden), mx.bfloat16)
    norm = mx.array([1.0] * hidden, mx.bfloat16)
    shapes = [(qkv, hidden), (hidden, hidden), (wide, hidden), (wide, hidden), (hidden, wide)]
    weights = [weight_of(*shape) for shape in shapes]
    adapters: list = [()] * 4
    if rank:
        sections = [(hidden, (hidden + qkv) // 2, qkv), (hidden,), (wide,), (hidden,)]
        adapters = [(adapters_of(rank, *ends),) for ends in sections]
        one = adapters[2][0]
        adapters[2] += (one._replace(parts=(Part(16, 16, rank),)),)  # gate and up share all else

    def block(x, attended):
        options = [ProductOptions(adapters=each) for each in adapters]
        normed = [each._replace(norm=norm) for each in options]
        projected = kernels.packed_matmul(x, weights[0], normed[0])
        x = kernels.packed_matmul(attended, weights[1], options[1]._replace(residual=x))
        y = kernels.packed_swiglu(x, *weights[2:4], normed[2])
        return projected, kernels.packed_matmul(y, weights[4], options[3]._replace(residual=x))

    name = "afm_packed_vector" if rows <= 4 else "afm_packed_matrix"
    wanted = {name: 4, "afm_low_rank_shrink": shrinks} if shrinks else {name: 4}
    assert count_dispatches(block, x, x).kernels == wanted


def test_dispatches_of_the_head():
    x, weight = mx.zeros((1, 1, 64), mx.bfloat16), weight_of(153600, 64, 4)
    norm = mx.array([1.0] * 64)

    def greedy(x):
        return kernels.packed_argmax(x, weight, ProductOptions(norm=norm))

    assert count_dispatches(greedy, x).kernels == {"afm_packed_argmax": 1, "afm_packed_select": 1}


def test_a_product_reads_its_matrix_once():
    weight = weight_of(512, 256)

    def product(x, codes, scales):
        return kernels.packed_matmul(x, weight._replace(codes=codes, scales=scales))

    for rows in (1, 5):
        x = mx.zeros((rows, 256), mx.bfloat16)
        cost = count_dispatches(product, x, weight.codes, weight.scales)
        # A matrix stands for the second one of a pair that isn't there.
        assert weight.nbytes <= cost.bytes_read <= weight.nbytes + x.nbytes + 64


def test_why_a_variant_cannot_run():
    case = dispatch.Case("gpu", mx.bfloat16, 5, "balanced", "group", 24)
    with dispatch.force("metal"):
        reasons = {v.name: reason for v, reason in dispatch.explain("packed_matmul", case)}
    assert reasons["metal/vector"] == "takes up to 4 rows, not 5"
    assert reasons["metal/matrix"] == "takes groups of a multiple of 16 inputs, not of 24"
    assert "not balanced ones per group of 24" in reasons["metal/mlx_quantized"]
    assert reasons["metal/unpacked"] is None
