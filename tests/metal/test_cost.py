"""The count of a kernel's operations: on small texts, on MLX's `affine_qmv_fast`, on kernels of the project.

And `bench.predict`, whose counts equal today's kernels' counts.
"""

import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import PackedWeight, ProductOptions
from afm_mlx.kernels.metal import matmul, products
from bench.apple_gpus import Launch
from bench.predict import DATA
from tests.metal import llvm_ir, mlx_wheel, prediction_data, published, toolchain
from tests.metal.cost import REGISTERS, Argument, CostError, check, check_launch, count
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


# Rows, and the registers that a product of that many can take. Matrices of 8x8 need few, as long as what is
# stored and loaded lies at constant distances; with an address for each, 32 rows took twice as many.
@each("rows, limit", [*((n, REGISTERS) for n in (1, 2, 3, 4)), *((n, 64) for n in (8, 16, 24, 32))])
def test_products_stay_in_registers(rows, limit):
    n, k = 16384, 2048  # eight rows of codes for a simdgroup, where that many are taken
    x, options = zeros(rows, k, dtype=mx.bfloat16), ProductOptions(zeros(k, dtype=mx.bfloat16))
    multiply = products.vector if rows <= products.VECTOR_ROWS else products.matrix
    for bits in (2, 4):
        weight = PackedWeight(zeros(n, k * bits // 32, dtype=mx.uint32), bits, "balanced", zeros(n))
        calls = record(lambda w=weight: matmul.packed_matmul(multiply, x, w, options))
        calls += record(lambda w=weight: matmul.packed_swiglu(multiply, x, w, w, options))
        if rows <= products.VECTOR_ROWS:
            calls += record(lambda w=weight: matmul.argmax(x, w, options))
        for call in calls:
            check_launch(*call, registers_at_most=limit)


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
