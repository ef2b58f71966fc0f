"""The emulator on kernels that this project didn't write: MLX's own, unmodified, must give MLX's results."""

import importlib

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.metal.runtime import FOLDER, Kernel
from tests.metal import mlx_wheel, toolchain
from tests.metal.machine import EmulatorError, Output, run
from tests.metal.toolchain import CompileError
from tests.metal.translation import translate

ROUNDOFF = {"float": 2.0**-24, "half": 2.0**-11, "bfloat16_t": 2.0**-8}
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


def raw(x: mx.array) -> bytes:
    x = x.reshape(-1)
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes()


def scalar(value, dtype=np.int32) -> bytes:
    return np.array(value, dtype).tobytes()


def values(data: np.ndarray, kind: str) -> np.ndarray:
    return np.array(mx.array(data).view(DTYPES[kind]).astype(mx.float32)).astype(np.float64)


def float64(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def draw(rng, shape, kind="float") -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[kind])


def unpack(codes: mx.array, bits: int) -> np.ndarray:
    words = np.array(codes)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words[..., None] >> shifts & ((1 << bits) - 1)).reshape(*words.shape[:-1], -1)


class Weight:
    """A quantized matrix (N, K) with its exact values in float64."""

    def __init__(self, rng, n, k, bits, group, kind):
        dense = draw(rng, (n, k))
        self.codes, scales, biases = mx.quantize(dense, group, bits)
        self.scales, self.biases = scales.astype(DTYPES[kind]), biases.astype(DTYPES[kind])
        parts = unpack(self.codes, bits).reshape(n, k // group, group).astype(np.float64)
        exact = parts * float64(self.scales)[..., None] + float64(self.biases)[..., None]
        self.exact = exact.reshape(n, k)

    def buffers(self, x):
        named = zip(
            "w scales biases x".split(), (self.codes, self.scales, self.biases, x), strict=True
        )
        return [(name, raw(a)) for name, a in named]


def assert_close(got, wanted, kind, terms):
    """`terms` roundings to the dtype add up as they do in the worst case, relative to the largest result."""
    assert np.abs(got - wanted).max() <= terms * ROUNDOFF[kind] * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("function", "kind", "bits", "group", "n", "k"),
    [
        ("affine_qmv_fast", "float", 2, 64, 16, 512),
        ("affine_qmv_fast", "half", 4, 32, 24, 1024),
        ("affine_qmv_fast", "bfloat16_t", 8, 128, 8, 512),
        ("affine_qmv", "bfloat16_t", 2, 32, 13, 96),
        ("affine_qmv", "float", 4, 64, 5, 192),
        ("affine_qmv", "half", 8, 64, 9, 320),
    ],
)
def test_quantized_vector(rng, function, kind, bits, group, n, k):
    program = mlx_wheel.program(
        "quantized.h", function, f"{kind}, {group}, {bits}, false", before=QUANTIZED
    )
    weight, x = Weight(rng, n, k, bits, group, kind), draw(rng, (k,), kind)
    buffers = [
        *weight.buffers(x),
        Output("y", n * DTYPES[kind].size),
        *(("in_vec_size", scalar(k)), ("out_vec_size", scalar(n))),
        *((name, scalar(0, np.int64)) for name in "a b c d e f g h".split()),
    ]
    got = values(run(program, buffers, (32, 2 * ((n + 7) // 8), 1), (32, 2, 1))[0], kind)
    # MLX sums activations in their own dtype for the bias, 16 values at a time.
    assert_close(got, weight.exact @ float64(x), kind, 16 if kind == "float" else 32)


@pytest.mark.parametrize(
    ("kind", "bits", "group", "m", "n", "k"),
    [("half", 2, 64, 32, 64, 64), ("bfloat16_t", 4, 32, 5, 32, 96), ("float", 8, 64, 40, 33, 64)],
)
def test_quantized_matrix(rng, kind, bits, group, m, n, k):
    aligned = "true" if n % 32 == 0 else "false"
    program = mlx_wheel.program(
        "quantized.h",
        "affine_qmm_t",
        f"{kind}, {group}, {bits}, {aligned}, false",
        before=QUANTIZED,
    )
    weight, x = Weight(rng, n, k, bits, group, kind), draw(rng, (m, k), kind)
    buffers = [
        *weight.buffers(x),
        Output("y", m * n * DTYPES[kind].size),
        *(("K", scalar(k)), ("N", scalar(n)), ("M", scalar(m))),
        *((name, scalar(0, np.int64)) for name in "a b c d e f g h".split()),
    ]
    grid = (32 * ((n + 31) // 32), 2 * ((m + 31) // 32), 2)
    got = values(run(program, buffers, grid, (32, 2, 2))[0], kind).reshape(m, n)
    # The dequantized weights are rounded to the dtype.
    assert_close(got, float64(x) @ weight.exact.T, kind, 16)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("size", [7, 128, 500])
def test_softmax(rng, kind, size):
    program = mlx_wheel.program("softmax.h", "softmax_single_row", f"{kind}, float")
    x = draw(rng, (3, size), kind)
    threads = 32 * -(-size // 128)
    buffers = [
        ("in", raw(x)),
        Output("out", 3 * size * DTYPES[kind].size),
        ("axis_size", scalar(size)),
    ]
    got = values(run(program, buffers, (3 * threads, 1, 1), (threads, 1, 1))[0], kind).reshape(
        3, size
    )
    wanted = np.exp(float64(x))
    assert_close(got, wanted / wanted.sum(-1, keepdims=True), kind, 8)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("size", [5, 1000])
def test_logsumexp(rng, kind, size):
    program = mlx_wheel.program("logsumexp.h", "logsumexp", kind)
    x = draw(rng, (2, size), kind)
    threads = 32 * -(-size // 128)
    buffers = [("in", raw(x)), Output("out", 2 * DTYPES[kind].size), ("axis_size", scalar(size))]
    got = values(run(program, buffers, (2 * threads, 1, 1), (threads, 1, 1))[0], kind)
    assert_close(got, np.log(np.exp(float64(x)).sum(-1)), kind, 8)


def attention(q, k, v, group):
    q, k, v = (float64(a) for a in (q, k, v))
    k, v = (np.repeat(a, group, axis=0) for a in (k, v))
    scores = q[:, None] @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v)[:, 0]


@pytest.mark.parametrize(
    ("kind", "dim", "length", "group"),
    [("float", 64, 1, 1), ("half", 128, 70, 4), ("bfloat16_t", 64, 33, 2)],
)
def test_attention_of_one_query(rng, kind, dim, length, group):
    n_kv = 2
    program = mlx_wheel.program("sdpa_vector.h", "sdpa_vector", f"{kind}, {dim}")
    q = draw(rng, (n_kv * group, dim), kind)
    k, v = (draw(rng, (n_kv, length, dim), kind) for _ in range(2))
    strides = [scalar(s, np.int64) for s in (length * dim, dim) * 2]
    buffers = [
        *(("queries", raw(q)), ("keys", raw(k)), ("values", raw(v)), Output("out", q.nbytes)),
        *(("gqa_factor", scalar(group)), ("N", scalar(length))),
        *zip("k_head k_seq v_head v_seq".split(), strides, strict=True),
        ("scale", scalar(dim**-0.5, np.float32)),
        *((name, scalar(0, np.int64)) for name in "b f kv q h s n".split()),
    ]
    got = values(run(program, buffers, (1024 * n_kv * group, 1, 1), (1024, 1, 1))[0], kind)
    assert_close(got.reshape(q.shape), attention(q, k, v, group), kind, 16)


@pytest.mark.parametrize(("kind", "size"), [("float", 128), ("half", 64)])
def test_hadamard(rng, kind, size):
    program = mlx_wheel.program("hadamard.h", "hadamard_n", f"{kind}, {size}, 16, 4")
    x = draw(rng, (3, size), kind)
    buffers = [("in", raw(x)), Output("out", x.nbytes), ("scale", scalar(0.25, np.float32))]
    got = values(run(program, buffers, (size // 16, 3, 1), (size // 16, 1, 1))[0], kind)
    wanted = float64(mx.hadamard_transform(x.astype(mx.float32), 0.25))
    assert_close(got.reshape(x.shape), wanted, kind, 8)


@pytest.mark.parametrize("bits", [2, 4])
def test_quantization_is_bit_exact(rng, bits):
    program = mlx_wheel.program(
        "quantized.h", "affine_quantize", f"float, 64, {bits}", before=QUANTIZED
    )
    w = draw(rng, (6, 128))
    codes, scales, biases = mx.quantize(w, 64, bits)
    buffers = [
        ("w", raw(w)),
        *(Output(n, a.nbytes) for n, a in zip("qsb", (codes, scales, biases), strict=True)),
    ]
    threads = w.size // 2
    got = run(program, buffers, (threads, 1, 1), (32, 1, 1))
    for data, wanted in zip(got, (codes, scales, biases), strict=True):
        assert data.tobytes() == raw(wanted)


def test_a_kernel_of_mlx_without_its_barriers_is_caught(rng):
    """The check can fail: the tiles of MLX's product, written and read with no barrier in between."""
    program = mlx_wheel.program(
        "quantized.h",
        "affine_qmm_t",
        "float, 64, 2, true, false",
        before=QUANTIZED,
        without_barriers=True,
    )
    weight, x = Weight(rng, 32, 128, 2, 64, "float"), draw(rng, (32, 128))
    buffers = [
        *weight.buffers(x),
        Output("y", 32 * 32 * 4),
        *(("K", scalar(128)), ("N", scalar(32)), ("M", scalar(32))),
        *((name, scalar(0, np.int64)) for name in "a b c d e f g h".split()),
    ]
    with pytest.raises(EmulatorError, match="race on byte"):
        run(program, buffers, (32, 2, 2), (32, 2, 2))


def project_kernels():
    modules = [
        importlib.import_module(f"afm_mlx.kernels.metal.{path.stem}")
        for path in FOLDER.glob("*.py")
    ]
    return sorted(
        {v.headers for module in modules for v in vars(module).values() if isinstance(v, Kernel)}
    )


@pytest.mark.parametrize("names", project_kernels(), ids="+".join)
def test_headers_of_the_project_go_behind_those_of_mlx(names):
    """No name of theirs is taken: MLX compiles its own utilities in front of every `metal_kernel`."""
    header = "\n".join((FOLDER / f"{name}.metal").read_text(encoding="utf-8") for name in names)
    text = f'#include "{mlx_wheel.KERNELS}/utils.h"\n{translate(header)}'
    toolchain.check(text, include=(mlx_wheel.headers(),))


def test_a_name_that_mlx_has_is_refused():
    ours = "template <typename T, typename U> inline T ceildiv(T n, U m) { return n / m; }"
    with pytest.raises(CompileError, match="redefinition of 'ceildiv'"):
        toolchain.check(
            f'#include "{mlx_wheel.KERNELS}/utils.h"\n{ours}\n', include=(mlx_wheel.headers(),)
        )
