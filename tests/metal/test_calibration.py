"""The emulator on kernels that this project didn't write: MLX's own, unmodified, must give MLX's results."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import KeyValues, PackedWeight
from afm_mlx.kernels.mlx import _grid, grid_unit
from afm_mlx.kernels.selftest import oracle
from tests.metal import mlx_wheel, texts, toolchain
from tests.metal.emulator import raw_bytes
from tests.metal.machine import EmulatorError, run
from tests.metal.toolchain import CompileError
from tests.metal.translation import translate
from tests.tools import compare
from tests.tools.cases import draw as draw_array
from tests.tools.compare import UNIT_ROUNDOFF, exact

DTYPES = {"float": mx.float32, "half": mx.float16, "bfloat16_t": mx.bfloat16}
QUANTIZED = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@pytest.fixture(scope="module", autouse=True)
def wheel():
    try:
        mlx_wheel.headers()
    except mlx_wheel.Unavailable as error:
        pytest.skip(str(error))


def scalar(value, dtype=np.int32) -> bytes:
    return np.array(value, dtype).tobytes()


def values(data: np.ndarray, kind: str) -> np.ndarray:
    return exact(mx.array(data).view(DTYPES[kind]))


def draw(rng, shape, kind="float") -> mx.array:
    return draw_array(rng, shape, DTYPES[kind])


def draw_weight(rng, n, k, bits, group, kind) -> PackedWeight:
    codes, *per_group = mx.quantize(draw(rng, (n, k)), group, bits)
    return PackedWeight(codes, bits, "affine", *(a.astype(DTYPES[kind]) for a in per_group))


def inputs(weight, x):
    arrays = {"w": weight.codes, "scales": weight.scales, "biases": weight.biases, "x": x}
    return [(name, raw_bytes(array)) for name, array in arrays.items()]


def assert_close(got, wanted, kind, terms, what="outputs"):
    """`terms` roundings to the dtype add up as they do in the worst case, relative to the largest result."""
    compare.assert_close(got, wanted, terms * UNIT_ROUNDOFF[DTYPES[kind]], what)


def zeros(names):
    """Arguments that stand for axes and strides that aren't there."""
    return [(name, scalar(0, np.int64)) for name in names]


def test_quantized_vector(rng):
    for case in (
        ("affine_qmv_fast", "float", 2, 64, 16, 512),
        ("affine_qmv_fast", "half", 4, 32, 24, 1024),
        ("affine_qmv_fast", "bfloat16_t", 8, 128, 8, 512),
        ("affine_qmv", "bfloat16_t", 2, 32, 13, 96),
        ("affine_qmv", "float", 4, 64, 5, 192),
        ("affine_qmv", "half", 8, 64, 9, 320),
    ):
        function, kind, bits, group, n, k = case
        template = f"{kind}, {group}, {bits}, false"
        program = mlx_wheel.program("quantized.h", function, template, before=QUANTIZED)
        weight, x = draw_weight(rng, n, k, bits, group, kind), draw(rng, (k,), kind)
        sizes = [("in_vec_size", scalar(k)), ("out_vec_size", scalar(n))]
        output = ("y", n * DTYPES[kind].size)
        buffers = [*inputs(weight, x), output, *sizes, *zeros("abcdefgh")]
        launch = functools.partial(run, program, buffers, (32, 2 * ((n + 7) // 8), 1), (32, 2, 1))
        repeats = function == "affine_qmv" and n > 8
        if repeats:  # two simdgroups compute some of the last rows
            with pytest.raises(EmulatorError, match=r"race of equal values on byte .* of `y`"):
                launch()
        got = values(launch(lets_equals_race=repeats)[0], kind)
        # MLX sums activations in their own dtype for the bias, 16 values at a time.
        assert_close(
            got, oracle.matrix(weight) @ exact(x), kind, 16 if kind == "float" else 32, case
        )


def test_quantized_vector_of_chosen_experts(rng):
    """Experts share scales and biases, with strides of 0, as `kernels.mlx.packed_gather` passes them."""
    for kind, bits, chosen in (("half", 2, (3, 0)), ("bfloat16_t", 4, (2, 2)), ("float", 2, (1,))):
        experts, n, k, group = 4, 16, 512, 128
        template = f"{kind}, {group}, {bits}"
        function = "affine_gather_qmv_fast"
        program = mlx_wheel.program("quantized.h", function, template, before=QUANTIZED)
        codes = mx.array(rng.integers(0, 2**32, (experts, n, k * bits // 32), dtype=np.uint32))
        scales, biases, size = _grid(n, k, bits, DTYPES[kind])
        assert size == group
        x, pairs, long = draw(rng, (k,), kind), len(chosen), np.int64
        per_expert = (n * k * bits // 32, k * bits // 32, 1)
        shared = (0, k // group, 1)
        buffers = [
            *inputs(PackedWeight(codes, bits, "affine", scales, biases), x),
            ("lhs", np.zeros(pairs, np.uint32).tobytes()),
            ("rhs", np.array(chosen, np.uint32).tobytes()),
            ("y", pairs * n * DTYPES[kind].size),
            *[("in_vec_size", scalar(k)), ("out_vec_size", scalar(n))],
            *[
                ("x_ndim", scalar(1)),
                ("x_shape", scalar((1, 1, k))),
                ("x_s", scalar((k, k, 1), long)),
            ],
            *[("w_ndim", scalar(1)), ("w_shape", scalar(codes.shape))],
            *[("w_s", scalar(per_expert, long)), ("s_s", scalar(shared, long))],
            *[("b_s", scalar(shared, long)), ("ndim", scalar(1)), ("shape", scalar((pairs,)))],
            *[("lhs_s", scalar((1,), long)), ("rhs_s", scalar((1,), long))],
        ]
        (got,) = run(program, buffers, (32, 2 * (n // 8), pairs), (32, 2, 1))
        weight = PackedWeight(codes.reshape(-1, codes.shape[2]), bits, "balanced", mx.array(1.0))
        wanted = oracle.packed_gather(x[None], weight, mx.array(chosen), experts)
        unit = grid_unit(bits, k)
        # As `test_quantized_vector`.
        terms = 16 if kind == "float" else 32
        assert_close(values(got, kind).reshape(pairs, n), unit * wanted, kind, terms, (kind, bits))


def matrix_buffers(weight, x, m, n, k, kind):
    sizes = [("K", scalar(k)), ("N", scalar(n)), ("M", scalar(m))]
    return [*inputs(weight, x), ("y", m * n * DTYPES[kind].size), *sizes, *zeros("abcdefgh")]


def test_quantized_matrix(rng):
    for case in (
        ("half", 2, 64, 32, 64, 64),
        ("bfloat16_t", 4, 32, 5, 32, 96),
        ("float", 8, 64, 40, 33, 64),
    ):
        kind, bits, group, m, n, k = case
        template = f"{kind}, {group}, {bits}, {'true' if n % 32 == 0 else 'false'}, false"
        program = mlx_wheel.program("quantized.h", "affine_qmm_t", template, before=QUANTIZED)
        weight, x = draw_weight(rng, n, k, bits, group, kind), draw(rng, (m, k), kind)
        grid = (32 * ((n + 31) // 32), 2 * ((m + 31) // 32), 2)
        (got,) = run(program, matrix_buffers(weight, x, m, n, k, kind), grid, (32, 2, 2))
        # The dequantized weights are rounded to the dtype.
        wanted = exact(x) @ oracle.matrix(weight).T
        assert_close(values(got, kind).reshape(m, n), wanted, kind, 16, case)


def test_attention_of_one_query(rng):
    n_kv = 2
    for case in (("float", 64, 1, 1), ("half", 128, 70, 4), ("bfloat16_t", 64, 33, 2)):
        kind, dim, length, group = case
        program = mlx_wheel.program("sdpa_vector.h", "sdpa_vector", f"{kind}, {dim}")
        q = draw(rng, (n_kv * group, dim), kind)
        k, v = (draw(rng, (n_kv, length, dim), kind) for _ in range(2))
        strides = [scalar(s, np.int64) for s in (length * dim, dim) * 2]
        buffers = [
            *((name, raw_bytes(array)) for name, array in zip("qkv", (q, k, v), strict=True)),
            *(("out", q.nbytes), ("gqa_factor", scalar(group)), ("N", scalar(length))),
            *zip("k_head k_seq v_head v_seq".split(), strides, strict=True),
            *(("scale", scalar(dim**-0.5, np.float32)), *zeros("b f kv q h s n".split())),
        ]
        got = values(run(program, buffers, (1024 * n_kv * group, 1, 1), (1024, 1, 1))[0], kind)
        queries, kv = q[None, :, None], KeyValues(mx.concatenate([k, v])[None])
        wanted = oracle.decode_attention(queries, kv, mx.array([length]))
        assert_close(got.reshape(wanted.shape), wanted, kind, 16, case)


def test_a_kernel_of_mlx_without_its_barriers_is_caught(rng):
    """The check can fail: the tiles of MLX's product, written and read with no barrier in between."""
    options = {"before": QUANTIZED, "without_barriers": True}
    template = "float, 64, 2, true, false"
    program = mlx_wheel.program("quantized.h", "affine_qmm_t", template, **options)
    weight, x = draw_weight(rng, 32, 128, 2, 64, "float"), draw(rng, (32, 128))
    with pytest.raises(EmulatorError, match="race on byte"):
        run(program, matrix_buffers(weight, x, 32, 32, 128, "float"), (32, 2, 2), (32, 2, 2))


def test_headers_of_the_project_go_behind_those_of_mlx():
    """No name of theirs is taken: MLX compiles its own utilities in front of every `metal_kernel`."""
    forms = {}
    for kernel, _, options in texts.calls():
        forms[kernel.headers, dict(options["template"]).get("MODE")] = kernel, options["template"]
    assert {name for headers, _ in forms for name in headers} > {"partials", "low_rank", "rope"}
    for kernel, template in forms.values():
        header = "\n".join(kernel.decided(template, name) for name in kernel.headers)
        text = f'#include "{mlx_wheel.KERNELS}/utils.h"\n{translate(header)}'
        toolchain.check(text, include=(mlx_wheel.headers(),))


def test_a_name_that_mlx_has_is_refused():
    ours = "template <typename T, typename U> inline T ceildiv(T n, U m) { return n / m; }"
    with pytest.raises(CompileError, match="redefinition of 'ceildiv'"):
        toolchain.check(
            f'#include "{mlx_wheel.KERNELS}/utils.h"\n{ours}\n', include=(mlx_wheel.headers(),)
        )
