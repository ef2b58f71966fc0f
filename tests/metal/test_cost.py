"""The count of a kernel's operations: on small texts, on MLX's `affine_qmv_fast`, on kernels of the project.

And `bench.predict`, whose counts equal today's kernels' counts.
"""

import itertools
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import PackedWeight, ProductOptions
from afm_mlx.kernels.metal import matmul, products
from bench.apple_gpus import Launch
from bench.predict import DATA
from tests.metal import llvm_ir, mlx_wheel, prediction_data, published, rows, toolchain
from tests.metal.cost import Argument, CostError, check, check_launch, count, count_launch
from tests.metal.launches import record
from tests.metal.machine import Unit
from tests.metal.operations import operations
from tests.tools.cases import each

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

SIGNATURE = (
    "device float* out [[buffer(0)]], const device float* x [[buffer(1)]], const constant int& n [[buffer(2)]],"
    " const device int* places [[buffer(3)]], uint lane [[thread_index_in_simdgroup]]"
)


def cost(body: str, n: int = 4, threads: int = 64, **options) -> Launch:
    """Of a kernel with this body; `x` and `places` have 1,024 numbers that nobody knows."""
    text = f"#include <mlx_prelude.h>\n[[kernel]] void small({SIGNATURE}) {{\n{body}\n}}\n"
    arguments = [
        Argument("out", 128),
        Argument("x", 4096),
        Argument("n", 4, np.array(n, np.int32)),
        Argument("places", 4096),
    ]
    unit = Unit(text, "small", SIGNATURE)
    return count("small", unit, arguments, (threads, 1, 1), (32, 1, 1), **options)


@each(
    "body, wanted",
    (
        ("y = y * 2.0f + x[lane + 32];", {"float": 1, "load": 2, "store": 1}),
        ("y = y * x[lane + 32] * x[lane + 64];", {"float": 2, "load": 3}),
        ("y = float(places[lane] & 12);", {"bit": 1, "convert": 1}),
        ("y = float((places[lane] >> 3) & 12);", {"shift": 1, "bit": 1, "convert": 1}),
        ("y = float(half(y));", {"load": 1, "store": 1}),
        ("y = float(bfloat(y)) + 1.0f;", {"bfloat": 2, "float": 1}),
        # A sum in bfloat is rounded to it.
        (
            "y = float(bfloat(y) + bfloat(x[lane + 32]));",
            {"bfloat": 3, "bfloat_float": 1, "load": 2},
        ),
        (
            "y = metal::precise::exp2(y) / x[lane + 32];",
            {"exponent": 1, "reciprocal": 1, "load": 2},
        ),
        ("y = simd_sum(y) + simd_shuffle_xor(y, 1);", {"reduction": 1, "shuffle": 1, "float": 1}),
        # 512 multiplications and additions, by all lanes together.
        (
            "simdgroup_matrix<float, 8, 8> a; a.thread_elements()[0] = a.thread_elements()[1] = y;"
            "simdgroup_multiply_accumulate(a, a, a, a); y = a.thread_elements()[0] * a.thread_elements()[1];",
            {"matrix": 1, "float": 1},
        ),
        # What follows from sizes alone is done once for all threads.
        ("y = y * float((n & 7) / 3);", {"float": 1}),
        # Both sides of what lanes may decide differently are waited for.
        ("if (y > 0.0f) y = metal::precise::sin(y);", {"sine": 1}),
    ),
)
def test_operations_by_class(body, wanted):
    found = cost(f"float y = x[lane]; {body} out[lane] = y;").operations
    loads = {"load": 1, "store": 1, **wanted}
    assert {k: v for k, v in found.items() if k != "integer"} == loads, found


def test_loops_and_loads_count_as_often_as_they_run():
    body = (
        "float y = 0; for (int i = 0; i < n; i++) y = y * x[i * 32 + lane] + 1.0f; out[lane] = y;"
    )
    few, many = cost(body, 3), cost(body, 30)
    assert few.operations["float"] == 3
    assert many.operations["float"] == 30
    assert (few.lane_bytes, many.lane_bytes) == (3 * 4 + 4, 30 * 4 + 4)
    # Two simdgroups of 32 lanes load 30 numbers each, and the array has 4,096 bytes.
    assert (few.memory_bytes, many.memory_bytes) == (2 * 32 * 12 + 128, 4096 + 128)
    assert (many.threadgroups, many.simdgroups) == (2, 2)
    # Neighbours are loaded together, four at most.
    four = "float y = x[4 * lane] + x[4 * lane + 1] + x[4 * lane + 2] + x[4 * lane + 3]; out[lane] = y;"
    assert cost(four).operations["load"] == 1
    apart = "float y = x[lane] + x[lane + 40] + x[lane + 80] + x[lane + 120]; out[lane] = y;"
    assert cost(apart).operations["load"] == 4
    five = "int i = 5 * int(lane); out[lane] = x[i] + x[i + 1] + x[i + 2] + x[i + 3] + x[i + 4];"
    assert cost(five).operations["load"] == 2


def test_what_is_slow_or_unknown_is_refused():
    in_memory = "float a[8]; for (int i = 0; i < 8; i++) a[i] = x[i]; out[lane] = a[places[lane]];"
    with pytest.raises(CostError, match="arrays stay in memory instead of registers"):
        cost(in_memory)
    endless = 'float y = 0;\n_Pragma("clang loop unroll(full)")\n'
    endless += "for (int i = 0; i < n; i++) y += x[i];\nout[0] = y;"
    with pytest.raises(CostError, match="can't be unrolled"):
        cost(endless)
    sums = "float a[40]; for (int i = 0; i < 40; i++) a[i] = 0;"
    sums += "for (int k = 0; k < n; k++) for (int i = 0; i < 40; i++) a[i] += x[k + 8 * i] * a[i];"
    sums += "float y = 0; for (int i = 0; i < 40; i++) y += a[i]; out[lane] = y;"
    with pytest.raises(CostError, match=r"about 4\d registers of 32 bits .* the budget is 40"):
        cost(sums, registers_at_most=40)
    assert cost(sums, registers_at_most=48).operations["float"] == 4 * 40 + 40

    # Nor is anything left out because nobody has a price for it.
    blocks = llvm_ir.parse(
        "define void @f() {\nentry:\n  %a = fancy float 1.0\n  ret void\n}\n", "f"
    )
    check("f", blocks)
    with pytest.raises(NotImplementedError, match="no class of operations has LLVM's fancy"):
        operations(blocks["%entry"], {})


@pytest.fixture
def wheel():
    try:
        mlx_wheel.headers()
    except mlx_wheel.Unavailable as error:
        pytest.skip(str(error))


def test_a_vector_product_of_mlx(wheel):
    """What can be read in `qdot` and `load_vector` of MLX's quantized.h."""
    n, k = 64, 4096
    for bits, masks in ((2, 1), (4, 1), (8, 0)):
        launch = published.qmv("half", bits, 64, n, k)
        codes = n * k / (32 * launch.simdgroups)  # of a lane
        assert launch.simdgroups == 2 * n // 8
        assert launch.operations["convert"] == codes
        assert launch.operations.get("bit", 0) == masks * codes
        assert 1 < launch.operations["float"] / codes < 2.1
        arrays = n * k * bits // 8 + 2 * n * k // 64 * 2 + 2 * k + 2 * n
        assert launch.memory_bytes == pytest.approx(arrays, rel=1e-3)
        assert launch.operations["reduction"] == 4  # rows of a simdgroup
    operations = published.qmv("bfloat16_t", 4, 64, n, k).operations
    # Inputs, scales and biases of four rows; results.
    assert operations["bfloat"] == (16 + 2 * 4) * k // 512 + 4
    # MLX 0.32.4 adds inputs as floats; what it did before is as much work, and is rounded.
    assert "bfloat_float" not in operations
    before = published.sums_in_bfloat(published.qmv("bfloat16_t", 4, 64, n, k), 4, k).operations
    assert (before["bfloat_float"], sum(before.values())) == (
        12 * k // 512,
        sum(operations.values()),
    )
    # Where MLX has another kernel, the next multiples of what this one takes stand for it.
    assert published.qmv("half", 4, 64, 61, 3700) == published.qmv("half", 4, 64, n, k)


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


def weight_of(mode: str, granularity: str, bits: int, n: int, k: int) -> PackedWeight:
    codes = zeros(n, k * bits // 32, dtype=mx.uint32)
    if mode == "palette":
        return PackedWeight(codes, bits, mode, table=zeros(n // 16, 1 << bits, dtype=mx.float16))
    scales = zeros(n, k // 64) if granularity == "group" else zeros(n)
    return PackedWeight(codes, bits, mode, scales, scales if mode == "affine" else None)


# The vector kernel takes 6 vectors at a time, and the matrix kernel 16. Wide formats leave registers for half
# as many rows of codes. Products of matrices would take twice as many with an address for each input.
@each(
    "kernel, rows, formats",
    [
        ("vector", 1, [("balanced", "row", 2), ("balanced", "row", 4), ("affine", "group", 4)]),
        ("vector", 6, [("balanced", "row", 4), ("balanced", "row", 8), ("affine", "row", 4)]),
        ("vector", 6, [("affine", "group", 8), ("palette", "table", 4)]),
        ("matrix", 16, [("balanced", "row", 8), ("affine", "group", 4), ("affine", "row", 8)]),
        ("matrix", 16, [("palette", "table", 8)]),
    ],
)
def test_products_stay_in_registers(kernel, rows, formats):
    n, k = 16384, 2048  # eight rows of codes for a simdgroup, where that many are taken
    x, options = zeros(rows, k, dtype=mx.bfloat16), ProductOptions(zeros(k, dtype=mx.bfloat16))
    multiply = getattr(products, kernel)
    for mode, granularity, bits in formats:
        weight = weight_of(mode, granularity, bits, n, k)
        calls = record(lambda w=weight: matmul.packed_matmul(multiply, x, w, options))
        calls += record(lambda w=weight: matmul.packed_swiglu(multiply, x, w, w, options))
        if rows == 1:  # of the 3B's head, whose simdgroups take several tiles
            head = weight_of(mode, granularity, bits, 153_600, k)
            calls += record(lambda w=head: matmul.argmax(x, w, options))
        for call in calls:
            check_launch(*call)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 12])
def test_inputs_of_every_vector_are_loaded_four_at_a_time(rows):
    """A row's address is computed once a step, and is a constant's distance from each of its inputs."""
    n, k = 16384, 2048
    weight, x = weight_of("balanced", "row", 2, n, k), zeros(rows, k, dtype=mx.bfloat16)
    kernel = "vector" if products.takes_vectors(rows) else "matrix"
    (call,) = record(
        lambda: matmul.packed_matmul(getattr(products, kernel), x, weight, ProductOptions())
    )
    steps, of_step = (k // 512, 16 * min(rows, 6)) if kernel == "vector" else (k // 128, 32)
    of_codes = 8 * steps
    loads = count_launch(*call).operations["load"]
    assert loads <= steps * of_step // 4 + of_codes + 2 * min(rows, 6) + 16


@pytest.mark.parametrize("on", rows.ON, ids=lambda on: on.chip)
def test_the_prices_of_kernels_are_those_of_the_counts(on):
    """By which the kernel is chosen: products whose chip isn't known when they are written."""
    set_by = products.OLD_PRICES if on.generation < 15 else products.NEW_PRICES
    assert rows.prices(on) == pytest.approx(set_by, rel=0.15)


def test_one_more_row_costs_less_than_another_pass_of_all():
    """The largest step is from 8 to 9 rows, which are two passes: 1.84 times with matrices, on an M4."""
    for on, most in zip(rows.ON, (1.7, 1.7, 1.5, 1.5, 1.5), strict=True):
        times = [rows.microseconds(rows.chosen("gateup", n, on), on) for n in range(1, 33)]
        steps = [after / before for before, after in itertools.pairwise(times)]
        assert max(steps) <= most, (on.chip, 2 + int(np.argmax(steps)))


# -- what is predicted from the counts


def test_the_stored_counts_are_those_of_the_kernels(wheel):
    stored = json.loads(DATA.read_text(encoding="utf-8"))
    assert json.loads(prediction_data.text()) == stored, "a kernel has changed: run `make costs`"
    page = prediction_data.DOCS.read_text(encoding="utf-8")
    assert prediction_data.with_tables(page) == page, (
        "the tables of docs/benchmarks.md are old: run `make costs`"
    )
    with pytest.raises(ValueError, match="no marks for the table `ranges`"):
        prediction_data.with_tables("")
