"""Metal kernels of products with packed matrices, run by the emulator, against float64 NumPy."""

import mlx.core as mx
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import BITS, dispatch
from afm_mlx.kernels.metal import matmul, products
from afm_mlx.kernels.selftest.problems import make, packed_weight
from afm_mlx.kernels.selftest.specs import DTYPES, Spec
from tests.tools.cases import all_pairs, each
from tests.tools.problems import assert_solved, with_args

FORMATS = (
    ("palette", "table"),
    *((mode, per) for mode in ("balanced", "affine") for per in ("tensor", "row", "group")),
)
ROWS = {
    "vector": ((1, 1), (2, 1), (3, 1), (2, 2)),
    "matrix": ((1, 5), (9, 1), (2, 16)),
    "unpacked": ((3, 11),),
}
SHAPES = ((704, 21), (64, 8))  # with and without tails


def assert_right(rng, variant, op, *fields, **options):
    """The variant that is chosen for a random problem is the one meant, and its error within bounds."""
    # These kernels compute with floats: no error of activations as integers is allowed.
    problem = make(Spec(op, *fields, activation_bits=32, **options), rng)
    assert dispatch.select(op, problem.case).name == f"metal/{variant}", problem.spec.label
    assert_solved(problem, getattr(kernels, op))


@pytest.mark.parametrize("variant", ROWS)
@pytest.mark.parametrize("op", ["packed_matmul", "packed_swiglu"])
def test_products(metal, rng, monkeypatch, op, variant):
    monkeypatch.setattr(matmul, "BLOCK", 5 * 704)  # several blocks, the last one short
    formats = FORMATS if op == "packed_matmul" else FORMATS[::3]
    cases = all_pairs(
        formats,
        BITS,
        SHAPES,
        ROWS[variant],
        DTYPES,
        (False, True),
        (False, True),
        (0, 4, 40),
        (0, 1),
        (0, 1),
    )
    for (mode, granularity), bits, shape, rows, dtype, norm, residual, rank, few, split in cases:
        # Some multiply with A beforehand, some have eight rows of codes for a simdgroup, and of some two
        # simdgroups share the inputs.
        monkeypatch.setattr(products, "MAX_SHRINK_BYTES", few << 20)
        monkeypatch.setattr(products, "FEW_SIMDGROUPS", few << 20)
        monkeypatch.setattr(products, "MANY_SIMDGROUPS", split << 20)
        in_dims, out_dims = shape
        group = 64 >> DTYPES.index(dtype) if granularity == "group" else 0
        if variant == "unpacked" and (mode, granularity) == ("affine", "group"):
            in_dims, group = 48, 24  # which MLX doesn't know
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
        (2, 13312, 2048, (2, 8, False)),
        (3, 13312, 2048, (2, 4, False)),
        (1, 2048, 6656, (4, 8, True)),
        (4, 2048, 6656, (2, 4, True)),
        # Simdgroups that share inputs have a step of 512 each.
        (1, 2048, 512, (2, 8, False)),
        (1, 2048, 513, (2, 8, True)),
        (1, 2040, 512, (2, 4, False)),
        (1, 256, 2048, (4, 4, True)),
        (1, 256, 1 << 20, (8, 8, True)),
        (1, 255, 1 << 20, (8, 4, True)),
        (1, 8192, 2048, (2, 8, False)),
        (1, 8191, 2048, (2, 8, True)),
    ],
)
def test_shapes_of_launches(rows, code_rows, in_dims, wanted):
    assert products.vector_threadgroups(rows, code_rows, in_dims) == wanted


def test_products_whose_inputs_simdgroups_share(metal, rng, monkeypatch):
    """Two to eight of them; some have no inputs left in the last step, or fewer than a lane takes."""
    monkeypatch.setattr(products, "MAX_SHRINK_BYTES", 0)  # adapters don't change the shape
    for rows, in_dims, bits, split in (
        (1, 1028, 8, 2),
        (3, 1032, 4, 2),
        (1, 2064, 2, 4),
        (2, 2048 + 64, 2, 4),
        (4, 4112, 2, 8),
        (1, 8192, 2, 8),
    ):
        assert products.vector_threadgroups(rows, 19, in_dims) == (split, 4, True)
        matrix = {"bits": bits, "mode": "affine", "granularity": "row"}
        fusions = {"norm": rows < 4, "residual": rows > 1, "rank": 3 * (rows != 2)}
        fields = (mx.float16, rows, 1, in_dims, 19)
        assert_right(rng, "vector", "packed_matmul", *fields, **matrix, **fusions)


@pytest.mark.parametrize("bits", BITS)
def test_the_product_of_mlx(metal, rng, bits):
    matrix = {"bits": bits, "mode": "affine", "granularity": "group", "group_size": 64}
    # MLX takes the scales in the dtype of the activations, and its CPU backend adds in it.
    fields = (mx.float32, 3, 11, 704, 21)
    fusions = {"norm": True, "rank": 4}
    assert_right(rng, "mlx_quantized", "packed_matmul", *fields, **matrix, **fusions, residual=True)
    assert_right(rng, "swiglu_mlx_quantized", "packed_swiglu", *fields, **matrix, **fusions)


def test_swiglu_of_matrices_that_differ(metal, rng):
    matrix = {"in_dims": 64, "out_dims": 9, "mode": "balanced", "granularity": "row"}
    for rows in (1, 5):
        spec = Spec("packed_swiglu", mx.float16, rows, norm=True, bits=2, **matrix)
        problem = make(spec, rng)
        x, gate, _, options = problem.args
        up = packed_weight(spec._replace(bits=4), rng)
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
        ({"rows": 5}, "metal/vector", "takes up to 4 rows, not 5"),
        ({"rows": 33}, "metal/matrix", "takes up to 32 rows, not 33"),
        ({"group_size": 24}, "metal/matrix", "groups of a multiple of 16 inputs, not of 24"),
        ({"group_size": 24}, "metal/mlx_quantized", "not balanced ones per group of 24"),
        ({"dtype": mx.int8}, "metal/unpacked", "takes float32, float16 or bfloat16, not"),
        ({"group_size": 24, "rows": 99}, "metal/unpacked", None),
    ],
)
def test_why_a_variant_cannot_run(metal, fields, variant, reason):
    case = dispatch.Case("gpu", mx.bfloat16, 1, "balanced", "group", 32)._replace(**fields)
    reasons = {v.name: found for v, found in dispatch.explain("packed_matmul", case)}
    assert (reason or "None") in str(reasons[variant])
