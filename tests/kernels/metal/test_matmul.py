"""Metal kernels of products with packed matrices, run by the emulator, against float64 NumPy."""

import platform

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import BITS, PackedWeight, ProductOptions, dispatch
from afm_mlx.kernels.metal import matmul, products, prompts, runtime
from afm_mlx.kernels.ops import case_of
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import make, packed_weight
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs, each
from tests.tools.compare import assert_close, assert_same
from tests.tools.problems import assert_solved, draw_low_rank, in_shared_arrays, with_args

FORMATS = (
    ("palette", "table"),
    *((mode, per) for mode in ("balanced", "affine") for per in ("tensor", "row", "group")),
)
# Rows of the batch and tokens of each. Here the vector kernel takes 3 vectors a pass, and the matrix kernel 8
# or 16: 21 rows take three passes, and 32 two.
ROWS = {
    "vector": ((1, 1), (2, 1), (3, 1), (2, 2), (6, 1), (5, 2)),
    "matrix": ((1, 7), (8, 1), (2, 7), (16, 1), (3, 7), (2, 16)),
    "unpacked": ((3, 11),),
}
SHAPES = ((704, 21), (64, 8))  # with and without tails
BODY = {"bits": 2, "mode": "balanced", "granularity": "row", "activation_bits": 32}


def assert_right(rng, variant, op, *fields, **options):
    """The variant that is chosen for a random problem is the one meant, and its error within bounds."""
    # These kernels compute with floats: no error of activations as integers is allowed.
    problem = make(Spec(op, *fields, activation_bits=32, **options), rng)
    assert dispatch.select(op, problem.case).name == f"metal/{variant}", problem.spec.label
    assert_solved(problem, getattr(kernels, op))


def small_passes(monkeypatch):
    """Let the vector kernel take 3 vectors a pass, since 6 of them take long to compile for a CPU."""
    monkeypatch.setattr(products, "rows_of_pass", lambda rows: 1 if rows == 1 else 3)


def on_gpu(monkeypatch, generation):
    """Choose variants as on a GPU of this generation."""
    monkeypatch.setattr(runtime, "gpu_generation", lambda: generation)
    monkeypatch.setattr(runtime, "has_bfloat", lambda: generation not in (13, 14))
    monkeypatch.setattr(runtime, "has_matrix_units", lambda: generation >= 17)
    dispatch.select.cache_clear()


@pytest.mark.parametrize("variant", ROWS)
@pytest.mark.parametrize("op", ["packed_matmul", "packed_swiglu"])
def test_products(metal, rng, monkeypatch, op, variant):
    monkeypatch.setattr(matmul, "OTHER_MOST_WITH_CODES", 0)
    monkeypatch.setattr(prompts, "BLOCK", 5 * 704)  # several blocks, the last one short
    small_passes(monkeypatch)
    formats = FORMATS if op == "packed_matmul" else FORMATS[::3]
    axes = (formats, BITS, SHAPES, ROWS[variant], DTYPES)
    cases = all_pairs(*axes, (False, True), (False, True), (0, 4, 40), (0, 1), (0, 1))
    for (mode, granularity), bits, shape, rows, dtype, norm, residual, rank, few, split in cases:
        # Some have eight rows of codes for a simdgroup, and of some simdgroups share the inputs.
        monkeypatch.setattr(products, "FEW_SIMDGROUPS", few << 20)
        monkeypatch.setattr(products, "MANY_SIMDGROUPS", split << 20)
        monkeypatch.setattr(products, "BUSY_SIMDGROUPS", split << 20)
        on_gpu(monkeypatch, 13 if split else 0)  # with float16 instead of bfloat16, or not
        in_dims, out_dims = shape
        group = 64 >> DTYPES.index(dtype) if granularity == "group" else 0
        matrix = {"bits": bits, "mode": mode, "granularity": granularity, "group_size": group}
        fusions = {"norm": norm, "residual": residual and op == "packed_matmul", "rank": rank}
        name = variant if op == "packed_matmul" else f"swiglu_{variant}"
        assert_right(rng, name, op, dtype, *rows, in_dims, out_dims, **matrix, **fusions)


@each(
    "rows, code_rows, in_dims, wanted",
    [
        # The 3B's matrices: queries, keys and values; output; gate and up; down.
        (1, 2560, 2048, (4, 8, True)),
        (1, 2048, 2048, (4, 8, True)),
        (1, 2048, 6656, (4, 8, True)),
        (2, 13312, 2048, (2, 8, False)),
        (2, 2560, 2048, (2, 8, True)),
        (6, 2048, 6656, (2, 8, True)),
        # Simdgroups that share inputs have a step of 512 each.
        (1, 2048, 512, (2, 8, False)),
        (1, 2048, 513, (2, 8, True)),
        (1, 2040, 512, (2, 4, False)),
        (1, 256, 2048, (4, 4, True)),
        (1, 256, 1 << 20, (8, 8, True)),
        (1, 255, 1 << 20, (8, 4, True)),
        (1, 8192, 2048, (2, 8, False)),
        (1, 8191, 2048, (2, 8, True)),
        # A Max has 40 cores, which 12 simdgroups each keep busy.
        (2, 8 * 480, 2048, (2, 8, False)),
        (2, 8 * 479, 2048, (2, 8, True)),
    ],
)
def test_shapes_of_launches(rows, code_rows, in_dims, wanted):
    assert products.vector_threadgroups(rows, code_rows, in_dims) == wanted


@each(
    "code_rows, in_dims, wanted",
    [
        (13312, 2048, (2, 32, True)),
        (2560, 2048, (8, 32, True)),
        (2048, 6656, (8, 32, True)),
        (32 * 480, 2048, (2, 32, False)),
        # Simdgroups that share inputs have a step of 128 each.
        (32, 128, (2, 32, False)),
        (32, 512, (4, 32, True)),
        (32, 1000, (8, 32, True)),
    ],
)
def test_shapes_of_launches_with_matrices(code_rows, in_dims, wanted):
    assert products.matrix_threadgroups(code_rows, in_dims) == wanted


@pytest.mark.parametrize(
    ("generations", "vectors"),
    [
        ((13, 14), {*range(1, 7), 9, 10, 17, 18}),
        ((0, 15, 16, 17), {*range(1, 7), *range(9, 13), 17, 18, 19}),
    ],
)
def test_the_choice_of_a_kernel_follows_the_gpu(metal, monkeypatch, generations, vectors):
    """By counted prices: a pass of the vector kernel takes 6 vectors, one of the matrix kernel 8 or 16."""
    for generation in generations:
        on_gpu(monkeypatch, generation)
        chosen = {
            op: {n for n in range(1, 33) if "/matrix" not in name(n) and "swiglu_m" not in name(n)}
            for op, name in (
                (op, lambda n, op=op: dispatch.select(op, BALANCED._replace(rows=n)).name)
                for op in ("packed_matmul", "packed_swiglu")
            )
        }
        assert chosen == {"packed_matmul": vectors, "packed_swiglu": vectors}


def test_products_whose_inputs_simdgroups_share(metal, rng):
    """Two to eight of them; some have no inputs left in the last step, or fewer than a lane takes."""
    few = ((1, 1028, 8, 2), (3, 1032, 4, 2), (1, 2064, 2, 4), (6, 2048 + 64, 2, 4))
    for rows, in_dims, bits, split in (*few, (4, 4112, 2, 8), (1, 8192, 2, 8)):
        assert products.vector_threadgroups(rows, 19, in_dims) == (split, 4, True)
        matrix = {"bits": bits, "mode": "affine", "granularity": "row"}
        fusions = {"norm": rows < 4, "residual": rows > 1, "rank": 3 * (rows != 2)}
        fields = (mx.float16, rows, 1, in_dims, 19)
        assert_right(rng, "vector", "packed_matmul", *fields, **matrix, **fusions)


@pytest.mark.parametrize(("mode", "granularity"), [("balanced", "row"), ("affine", "group")])
def test_every_number_of_vectors_of_a_pass(metal, rng, mode, granularity):
    """2 to 6 of them; 9 are 5 and 4, 11 are 6 and 5, 17 are 6, 6 and 5."""
    matrix = {"bits": 2, "mode": mode, "granularity": granularity, "group_size": 16}
    for rows in (2, 3, 4, 5, 6, 9, 11, 17):
        fields = (mx.bfloat16, rows, 1, 80, 21)
        assert_right(rng, "vector", "packed_matmul", *fields, **matrix, norm=True)


# Steps of 128 inputs, the last one not whole; simdgroups without one; 32 rows of codes, of a pair 16 each.
@pytest.mark.parametrize(
    ("in_dims", "split"), [(128, 1), (256, 2), (272, 2), (520, 4), (1024, 8), (2000, 8)]
)
def test_products_of_matrices_whose_inputs_simdgroups_share(metal, rng, in_dims, split):
    for rows, op, bits in (
        (7, "packed_matmul", 2),
        (16, "packed_swiglu", 4),
        (24, "packed_matmul", 8),
    ):
        if in_dims % 16 and bits == 2:
            continue
        outputs = 37
        assert products.matrix_threadgroups(outputs, in_dims) == (
            split if split > 1 else 2,
            32,
            split > 1,
        )
        matrix = {"bits": bits, "mode": "balanced", "granularity": "row"}
        fusions = {"norm": rows < 24, "residual": rows == 7, "rank": 3 * (rows != 7)}
        name = "matrix" if op == "packed_matmul" else "swiglu_matrix"
        assert_right(rng, name, op, mx.float32, rows, 1, in_dims, outputs, **matrix, **fusions)


# Rows without a group size are given to MLX as a grid, whose products are multiplied by their scales.
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_of_mlx(metal, rng, monkeypatch, bits, dtype):
    formats = (
        ("affine", "group"),
        ("balanced", "tensor"),
        ("balanced", "row"),
        ("balanced", "group"),
    )
    # MLX's CPU backend adds in the activations' type: in half types, few products.
    sizes = (704, 64, 32) if dtype == mx.float32 else (64, 32)
    for (mode, granularity), in_dims, generation in all_pairs(formats, sizes, (13, 17)):
        # On matrix units, MLX's product takes multiples of 64 inputs; before, no balanced groups.
        if granularity == "group" or in_dims == 32:
            generation = 17 if granularity == "group" else 15
        on_gpu(monkeypatch, generation)
        group = min(in_dims, 64) if granularity == "group" else 0
        matrix = {"bits": bits, "mode": mode, "granularity": granularity, "group_size": group}
        fields = (dtype, 3, 11, in_dims, 21)
        fusions = {"norm": True, "rank": 4}
        assert_right(
            rng, "mlx_quantized", "packed_matmul", *fields, **matrix, **fusions, residual=True
        )
        assert_right(rng, "swiglu_mlx_quantized", "packed_swiglu", *fields, **matrix, **fusions)


OF_MLX = {"mode": "affine", "granularity": "group", "group_size": 128}
BALANCED = dispatch.Case("gpu", mx.bfloat16, 33, "balanced", "row", 2048)


@each(
    "generation, fields, chosen",
    [
        # M1 and M2, and what no name says
        (13, {"rows": 128}, "mlx_quantized"),
        (14, {"rows": 129}, "unpacked"),
        (0, {"rows": 129}, "unpacked"),
        # M3 and M4
        (15, {"rows": 256}, "mlx_quantized"),
        (16, {"rows": 256, "granularity": "tensor"}, "mlx_quantized"),
        (16, {"rows": 257}, "unpacked"),
        (16, {"rows": 99, "group_size": 48}, "unpacked"),
        (16, {"rows": 99, "granularity": "group", "group_size": 64}, "unpacked"),
        # M5
        (17, {"rows": 4096}, "mlx_quantized"),
        (17, {"rows": 4096, "granularity": "group", "group_size": 32}, "mlx_quantized"),
        (17, {"rows": 4096, "granularity": "group", "group_size": 48}, "unpacked"),
        (17, {"group_size": 96}, "unpacked"),
        (17, {"mode": "affine", "group_size": 2048}, "unpacked"),
        (17, {"mode": "palette", "granularity": "table"}, "unpacked"),
        # MLX's own format
        (13, {"rows": 128, **OF_MLX}, "mlx_quantized"),
        (16, {"rows": 257, **OF_MLX}, "unpacked"),
        (17, {"rows": 4096, **OF_MLX}, "mlx_quantized"),
        (17, {"rows": 4096, **OF_MLX, "group_size": 24}, "unpacked"),
    ],
)  # fmt: skip
def test_many_rows_take_the_faster_product_of_mlx(metal, monkeypatch, generation, fields, chosen):
    on_gpu(monkeypatch, generation)
    case = BALANCED._replace(**fields)
    assert dispatch.select("packed_matmul", case).name == f"metal/{chosen}"
    assert dispatch.select("packed_swiglu", case).name == f"metal/swiglu_{chosen}"


@each(
    "name, darwin, generation, has_matrix_units",
    [
        ("applegpu_g13g", "25.2.0", 13, False),
        ("applegpu_g16s", "25.2.0", 16, False),
        ("applegpu_g17g", "25.2.0", 17, True),
        ("applegpu_g17g", "25.1.0", 17, False),  # macOS 26.1
        ("applegpu_g17g", "24.6.0", 17, False),  # macOS 15.6
        ("applegpu_g17g", "26.0.0", 17, True),
        ("applegpu_g17p", "25.2.0", 17, False),  # phones and what has their chips
        ("applegpu_g18p", "25.4.0", 18, True),
        ("applegpu_g20d", "27.10.1", 20, True),
        ("applegpu_17", "25.2.0", 0, False),
        ("x86_64", "6.1.0-18-amd64", 0, False),
    ],
)
def test_the_generation_of_a_gpu(monkeypatch, name, darwin, generation, has_matrix_units):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": name})
    monkeypatch.setattr(platform, "release", lambda: darwin)
    assert runtime.gpu_generation.__wrapped__() == generation
    assert runtime.has_matrix_units.__wrapped__() == has_matrix_units


def test_swiglu_of_matrices_that_differ(metal, rng):
    matrix = {"in_dims": 64, "out_dims": 9, "mode": "balanced", "granularity": "row"}
    for rows, fields in all_pairs((1, 7, 33), ({"bits": 4}, {"mode": "palette"})):
        spec = Spec("packed_swiglu", mx.float16, rows, norm=True, bits=2, **matrix)
        problem = make(spec, rng)
        x, gate, _, options = problem.args
        up = packed_weight(spec._replace(**fields), rng)
        assert_solved(with_args(problem, x, gate, up, options), kernels.packed_swiglu)


# Rows of 4 to 16 inputs have a step's tail only; below 8 elements buffers are in `constant` memory.
@pytest.mark.parametrize(("rows", "variant"), [(1, "vector"), (8, "matrix"), (33, "unpacked")])
def test_the_smallest_matrices(metal, rng, rows, variant):
    options = {"mode": "affine", "granularity": "row", "norm": True, "residual": True, "rank": 1}
    for bits, *shape in ((2, 16, 1), (4, 8, 7), (4, 8, 8), (8, 4, 1), (8, 12, 3)):
        fields = (mx.float32, rows, 1, *shape, bits)
        assert_right(rng, variant, "packed_matmul", *fields, **options)


@pytest.mark.parametrize(
    ("fields", "variant", "reason"),
    [
        ({"rows": 7}, "metal/vector", "takes longer for 7 rows than products of matrices"),
        ({"rows": 33}, "metal/matrix", "takes up to 32 rows, not 33"),
        ({"group_size": 24}, "metal/matrix", "groups of a multiple of 16 inputs, not of 24"),
        ({"group_size": 24}, "metal/mlx_quantized", "in groups only on a GPU with matrix units"),
        (
            {"granularity": "row", "rows": 129},
            "metal/mlx_quantized",
            "takes up to 128 rows on this GPU",
        ),
        (
            {"granularity": "row", "group_size": 48},
            "metal/mlx_quantized",
            "rows of a multiple of 32 inputs, not of 48",
        ),
        (
            {"mode": "affine", "group_size": 24},
            "metal/mlx_quantized",
            "not affine ones per group of 24",
        ),
        ({"dtype": mx.int8}, "metal/unpacked", "takes float32, float16 or bfloat16, not"),
        ({"group_size": 24, "rows": 99}, "metal/unpacked", None),
    ],
)
def test_why_a_variant_cannot_run(metal, monkeypatch, fields, variant, reason):
    on_gpu(monkeypatch, 14)
    case = dispatch.Case("gpu", mx.bfloat16, 1, "balanced", "group", 32)._replace(**fields)
    reasons = {v.name: found for v, found in dispatch.explain("packed_matmul", case)}
    assert (reason or "None") in str(reasons[variant])


@pytest.mark.parametrize("rows", [1, 5, 7, 33])
def test_a_norm_whose_squares_overflow_gives_nan(metal, rows):
    weight = PackedWeight(mx.zeros((8, 4), mx.uint32), 4, "balanced", mx.ones((8,)))
    options = ProductOptions(norm=mx.ones((32,)))
    assert mx.isnan(kernels.packed_matmul(mx.full((rows, 32), 3e19), weight, options)).all().item()


MANY = (1 << 16) + 37  # rows that 16 bits can't count; the model's head has 153,600


@pytest.mark.parametrize(("rows", "variant"), [(1, "vector"), (7, "matrix")])
def test_rows_of_a_matrix_are_counted_past_16_bits(metal, rng, rows, variant):
    spec = Spec("packed_matmul", mx.float32, rows, 1, 16, MANY, **BODY, residual=True)
    assert_adapted(make(spec, rng), variant)


def test_rows_that_are_unpacked_are_counted_past_16_bits(metal, rng):
    weight = packed_weight(Spec("packed_matmul", in_dims=16, out_dims=MANY, **BODY), rng)
    got = products.unpack(weight, MANY - 40, MANY, mx.float32)
    assert_close(got, oracle.matrix(weight)[-40:], 2.0**-22)


@pytest.mark.parametrize(("rows", "variant"), [(1, "vector"), (7, "matrix")])
def test_silu_of_large_negative_numbers_is_as_exact_as_its_exponential(metal, rows, variant):
    """Gates of -6 to -84, without rounding: nothing but `exp(-gate)` is off by more than an ulp."""
    of_gates = mx.arange(1, 15) / 4
    gate = PackedWeight(mx.zeros((14, 1), mx.uint32), 2, "balanced", of_gates)
    up = PackedWeight(mx.full((14, 1), 2**32 - 1, mx.uint32), 2, "balanced", mx.ones((14,)))
    x = mx.ones((rows, 16))
    case = case_of("packed_swiglu", x, gate, up)
    assert dispatch.select("packed_swiglu", case).name == f"metal/swiglu_{variant}"
    g = -24 * np.array(of_gates).astype(np.float64)
    wanted = 24 * g / (1 + np.exp(-g))
    got = np.array(kernels.packed_swiglu(x, gate, up)).astype(np.float64)
    # The exponential by 4 ulps; sum, quotient and product by half of one each.
    assert_close(got / wanted, np.ones((rows, 14)), 5.5 * 2.0**-23)


@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_a_norm_is_rounded_once(metal, rng, rows):
    """Products that are powers of two, so that 1 / rms comes out: its precise function is correctly rounded."""
    x = rng.integers(-3, 4, (rows, 16)).astype(np.float64)
    x[:, -1] += 16 - x.sum(-1)
    weight = PackedWeight(mx.full((9, 2), 0x88888888, mx.uint32), 4, "balanced", mx.array(1.0))
    options = ProductOptions(norm=mx.ones((16,)), eps=0.0)
    got = kernels.packed_matmul(mx.array(x.astype(np.float32)), weight, options)
    wanted = 8 / np.sqrt((x**2).mean(-1, keepdims=True))
    assert_same(got, np.broadcast_to(wanted.astype(np.float32), (rows, 9)))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_scales_of_many_vectors_are_not_rounded(metal, rng, monkeypatch, dtype):
    """Products of integers, and residuals that leave of them what rounding would take away."""
    on_gpu(monkeypatch, 13)
    x = rng.integers(-1, 2, (40, 32)).astype(np.float32)
    codes, scales = rng.integers(0, 4, (24, 32)), rng.uniform(1, 2, 24).astype(np.float32)
    packed = kernels.pack_codes(mx.array(codes), 2)
    weight = PackedWeight(packed, 2, "balanced", mx.array(scales))
    # Multiples of 1/2 up to 48 are exact in 16 bits.
    products = mx.array((x @ (codes - 1.5).T).astype(np.float32) * scales)
    residual = -products.astype(dtype)
    options = ProductOptions(residual=residual)
    got = kernels.packed_matmul(mx.array(x).astype(dtype), weight, options)
    assert_same(got, (products + residual.astype(mx.float32)).astype(dtype))
    assert (got != 0).any().item()


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_a_product_is_not_rounded_before_its_residual_is_added(metal, rng, dtype):
    """Products of integers, and residuals that leave of them what rounding would take away."""
    for rows in (1, 3, 7):
        x = rng.integers(-30, 31, (rows, 16)).astype(np.float32)
        codes = rng.integers(0, 256, (40, 16))
        weight = PackedWeight(kernels.pack_codes(mx.array(codes), 8), 8, "balanced", mx.array(1.0))
        products = mx.array((x @ (codes - 127.5).T).astype(np.float32))
        residual = -products.astype(dtype)
        got = kernels.packed_matmul(
            mx.array(x).astype(dtype), weight, ProductOptions(residual=residual)
        )
        assert_same(got.astype(mx.float32), products + residual.astype(mx.float32))
        assert (got != 0).any().item()


# -- the head: the largest product


# A simdgroup has one tile up to 32,768 rows; matrices' products are compared in chunks of 4,096.
@each(
    "rows, out_dims",
    [
        (1, 1),
        (1, 5),
        (4, 70),
        (2, 32768),
        (2, 40001),
        (3, 16384),
        (9, 50),
        (7, 4096 + 37),
        (33, 70),
    ],
)
def test_ties_go_to_the_lowest_row(metal, rng, rows, out_dims):
    """Integers whose products are exact in float32, with rows of the matrix that occur again and again."""
    x = mx.array(rng.integers(-3, 4, (rows, 16)).astype(np.float32))
    distinct = rng.integers(0, 16, (max(1, out_dims // 9), 16))
    codes = distinct[rng.integers(0, len(distinct), out_dims)]
    weight = PackedWeight(kernels.pack_codes(mx.array(codes), 4), 4, "balanced", mx.array(2.0))
    logits = np.array(x).astype(np.float64) @ (2 * codes - 15).T
    chosen = dispatch.select("packed_argmax", case_of("packed_argmax", x, weight)).name
    assert chosen == ("metal/argmax" if rows == 1 else "metal/argmax_of_products")
    index, value = kernels.packed_argmax(x, weight)
    assert index.dtype == mx.uint32
    assert index.tolist() == logits.argmax(-1).tolist()
    assert value.tolist() == logits.max(-1).tolist()


def test_the_largest_in_any_tile_is_found(metal, rng):
    """A simdgroup of the 3B's head has 5 tiles. Here, the last simdgroup's last one has a single row."""
    out_dims, code_rows = 40_001, products.CODE_ROWS
    tiles = -(-out_dims // (code_rows * matmul.CHUNK))
    assert tiles >= 2
    assert out_dims % (tiles * code_rows) % code_rows == 1
    # One place in each tile of a simdgroup, one of which is the last row of all.
    first = int(rng.integers(out_dims // (tiles * code_rows))) * tiles * code_rows
    places = [first + tile * code_rows + int(rng.integers(code_rows)) for tile in range(tiles)]
    places[out_dims % (tiles * code_rows) // code_rows] = out_dims - 1
    for place in places:
        codes = rng.integers(6, 10, (out_dims, 16))
        codes[place] = 15
        weight = PackedWeight(kernels.pack_codes(mx.array(codes), 4), 4, "balanced", mx.array(2.0))
        index, value = kernels.packed_argmax(mx.ones((1, 16)), weight)
        assert (index.item(), value.item()) == (place, 16 * 15)


def test_every_format(metal, rng, monkeypatch):
    small_passes(monkeypatch)
    for (mode, per), bits, dtype, rows, shape in all_pairs(
        FORMATS, BITS, DTYPES, (1, 3), ((704, 21), (64, 8))
    ):
        group = 32 if per == "group" else 0
        spec = Spec("packed_argmax", dtype, rows, 1, *shape, bits, mode, per, group, norm=rows > 1)
        assert_solved(make(spec._replace(activation_bits=32), rng), kernels.packed_argmax)


# One kernel finds the largest, another one multiplies, and beyond 32 rows MLX.
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_what_is_no_number_is_the_largest_so_that_it_is_seen(metal, rows):
    scales = mx.array([-1.0] * 4 + [float("nan")] + [-2.0] * 4)
    weight = PackedWeight(mx.zeros((9, 2), mx.uint32), 4, "balanced", scales)
    index, value = kernels.packed_argmax(mx.ones((rows, 16)), weight)
    assert index.tolist() == [4] * rows
    assert not np.isfinite(value.tolist()).any()


@pytest.mark.parametrize("variant", ["metal/argmax", "metal/argmax_of_products"])
def test_the_largest_is_found_past_16_bits(metal, variant):
    codes = np.zeros((MANY, 1), np.uint32)
    codes[MANY - 2] = 2**32 - 1
    weight = PackedWeight(mx.array(codes), 2, "balanced", mx.array(1.0))
    with dispatch.force(variant):
        index, value = kernels.packed_argmax(mx.ones((1, 16)), weight)
    assert index.tolist() == [MANY - 2]
    assert value.tolist() == [24.0]


# -- adapters: many at once, of any rank


EXTREMES = [-(2**31), -2, 2**31 - 1]
# Rows of the batch, and tokens of each.
BATCHES = [
    *((1, 1, "vector"), (4, 1, "vector"), (2, 2, "vector"), (8, 1, "matrix"), (3, 5, "matrix")),
    *((6, 1, "vector"), (3, 3, "vector")),
]


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


def test_adapters_of_any_rank_in_one_batch(metal, rng, monkeypatch):
    small_passes(monkeypatch)
    cases = all_pairs(BATCHES, (1, 2, 8), (1, 2, 3), (False, True), DTYPES, DTYPES)
    for (batch, tokens, variant), count, projections, norm, dtype, of_adapters in cases:
        n = int(rng.integers(33, 200))
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


@pytest.mark.parametrize("name", PAIRS)
def test_adapters_of_a_pair(metal, rng, monkeypatch, name):
    small_passes(monkeypatch)
    for (batch, tokens, variant), shared in all_pairs(BATCHES[1:4], (False, True)):
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
