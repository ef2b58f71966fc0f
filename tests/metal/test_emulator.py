"""The emulator itself: the language's functions, and seeded faults."""

import os
import re

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.metal import runtime as metal_runtime
from tests.metal import emulator, machine, toolchain
from tests.metal.emulator import Kernel, emulated, probe
from tests.metal.machine import EmulatorError
from tests.metal.toolchain import CompileError
from tests.tools.cases import draw
from tests.tools.compare import assert_same, exact

_reason = toolchain.why_unavailable()
pytestmark = pytest.mark.skipif(_reason is not None, reason=str(_reason))

# -- the language


SIMD = {
    "simd_sum(v)": lambda v: np.full(32, v.sum()),
    "simd_max(v)": lambda v: np.full(32, v.max()),
    "simd_min(v)": lambda v: np.full(32, v.min()),
    "simd_prefix_inclusive_sum(v)": np.cumsum,
    "simd_shuffle(v, 31 - lane)": lambda v: v[::-1],
    "simd_shuffle_xor(v, 5)": lambda v: v[np.arange(32) ^ 5],
    "simd_shuffle_down(v, 3)": lambda v: np.concatenate([v[3:], v[29:]]),
    "simd_shuffle_up(v, 3)": lambda v: np.concatenate([v[:3], v[:29]]),
    "simd_shuffle_and_fill_up(v, -v, 2)": lambda v: np.concatenate([-v[30:], v[:30]]),
    "simd_broadcast(v, 7)": lambda v: np.full(32, v[7]),
    "quad_sum(v)": lambda v: v.reshape(-1, 4).sum(-1).repeat(4),
    "quad_shuffle_xor(v, 1)": lambda v: v[np.arange(32) ^ 1],
    "quad_broadcast(v, 2)": lambda v: v[2::4].repeat(4),
}


def test_simdgroup_functions(rng):
    v = rng.integers(0, 1000, 32).astype(np.int32)
    calls = "".join(f"x[{32 * k} + i] = {call};\n" for k, call in enumerate(SIMD))
    source = f"int v = a[i];\n{calls}"
    got = probe(source, mx.array(v), n=32, size=32 * len(SIMD), dtype=mx.int32)[0]
    for row, (call, wanted) in zip(got.reshape(-1, 32), SIMD.items(), strict=True):
        assert_same(exact(row), wanted(v), call)


def test_half_and_bfloat_round_after_every_operation(rng):
    a = mx.array(rng.uniform(1, 2, 64).astype(np.float32))
    source = "half h = half(a[i]); x[i] = float(h * h + h); bfloat b = bfloat(a[i]); y[i] = float(b * b + b);"
    got = probe(source, a, outputs=2)
    h, b = a.astype(mx.float16), a.astype(mx.bfloat16)
    for x, v in zip(got, (h, b), strict=True):
        assert_same(x, (v * v + v).astype(mx.float32))


def test_shapes_strides_and_scalars():
    source = "x[i] = a_shape[0] * 1000 + int(a_strides[0]) * 100 + a_ndim * 10 + int(b) + c[1];"
    got = probe(source, mx.zeros((2, 3)), mx.array(4.0), mx.array([0, 5]), n=1, dtype=mx.int32)[0]
    assert got.item() == 2000 + 300 + 20 + 4 + 5


# -- seeded faults

SWAP = "threadgroup float s[64]; s[i] = a[i]; {} x[i] = s[63 - i];"
# What is found, and sources that do it.
FAULTS = {
    "race on byte": [
        SWAP.format(""),
        SWAP.format("threadgroup_barrier(mem_flags::mem_none);"),
        SWAP.format("threadgroup_barrier(mem_flags::mem_device);"),
        SWAP.format("simdgroup_barrier(mem_flags::mem_threadgroup);"),
        "x[i] = a[i]; if (a[i] > 9.0f) return; x[i] += x[63 - i];",
    ],
    r"divergent simd_sum \(probe.source:2:": ["if (lane < 16) x[i] = simd_sum(a[i]);"],
    "divergent simd_": ["x[i] = lane % 2 ? simd_sum(a[i]) : simd_max(a[i]);"],
    "28 have returned": ["if (lane > 3) return; x[i] = simd_sum(a[i]);"],
    "divergent threadgroup_barrier": [
        "if (i > 31) return; threadgroup_barrier(mem_flags::mem_none);",
        "if (i % 2) threadgroup_barrier(mem_flags::mem_none);",
    ],
    "read of 4 bytes out of bounds: at byte 256 of buffer `a`": ["x[i] = a[i + 1];"],
    "4 bytes before buffer `a`": ["x[i] = a[int(i) - 1];"],
    "read of 4 bytes": ["x[i] = a[i + 100000000];"],
    "write of 4 bytes out of bounds: at byte 256 of buffer `x`": ["x[i + 1] = a[i];"],
    "write to input `a`": ["((device float*)a)[i] = 0.0f; x[i] = 0.0f;"],
    "misaligned read of 8 bytes": ["x[i] = i < 63 ? ((const device float2*)(a + i))->x : 0.0f;"],
    "threadgroup variable `s`, which has 256": [
        "threadgroup float s[64]; threadgroup float* p = s; p[i + 1] = 0.0f; x[i] = 0.0f;"
    ],
    "misaligned read of a struct": [
        "struct P { float y, z; } p; const device char* q = (const device char*)a + 1; "
        "p = *((const device P*)q); x[i] = p.y;"
    ],
    "index out of bounds of an array": ["float p[4] = {}; x[i] = p[i];"],
    "memory that nothing wrote": ["threadgroup float s[64]; x[i] = s[i];", "x[i] = x[i] + 1.0f;"],
    "brings threadgroup memory to 32784 bytes, the limit is 32768": [
        "threadgroup float s[8193]; s[i] = 0.0f; x[i] = s[i];"
    ],
    r"the lanes disagree on where the simdgroup matrix lies \(probe.source:2:": [
        "simdgroup_float8x8 m; threadgroup float s[64]; s[i] = a[i]; "
        "simdgroup_barrier(mem_flags::mem_threadgroup); simdgroup_load(m, s + lane % 2); x[i] = 0.0f;"
    ],
    r"race on byte [0-3] of `x`: writes it, which": ["x[0] = a[i]; if (i > 0) x[i] = 0.0f;"],
    "race of equal values on byte 0 of `x`: writes it, which": [
        "x[0] = 1.0f; if (i > 0) x[i] = 0.0f;",
        "*(device float4*)x = float4(1.0f); x[4 + i / 2] = 0.0f;",
    ],
    "race of equal values on byte .* of `s`": [
        "threadgroup float s[64]; s[i] = 0.0f; s[i / 32 * 32] = 0.0f; x[i] = 0.0f;"
    ],
    "signed integer overflow": ["int big = 2147483600; x[i] = float(big + int(i));"],
    "shift by more": ["x[i] = float(1u << i);"],
    "division by zero": ["x[i] = float(int(i + 1) / int(i / 32));"],
    "still running": ["while (a[i] < 1e30f) { x[i] = 0.0f; }"],
}


def failure(source, *inputs, error=EmulatorError, **options):
    """What a launch says that must not run."""
    try:
        probe(source, *inputs, **options)
    except error as caught:
        return str(caught)
    return "nothing was found"


def test_faults_are_caught(rng, monkeypatch):
    for message, sources in FAULTS.items():
        monkeypatch.setattr(machine, "SECONDS", 1 if message == "still running" else 60)
        for source in sources:
            said = failure(source, draw(rng, (64,)))
            assert re.search(message, said), f"{source}: {said}"
            assert "kernel `probe`" in said


REFUSED = {
    "device pointer to threadgroup memory": "threadgroup float s[64]; const device float* p = s; x[i] = p[i];",
    "thread pointer to device memory": "const thread float* p = a; x[i] = p[i];",
    "constant pointer to device memory": "const constant float* p = a; x[i] = p[i];",
    "const lost": "device float* p = a; x[i] = p[i];",
    "double": "double d = a[i]; x[i] = float(d);",
    "double arithmetic": "x[i] = a[i] * double(2);",
    "float to bfloat": "bfloat b = a[i]; x[i] = float(b);",
    "wrong vector": "float4 v = float4(1.0f, 2.0f); x[i] = v.x;",
    "unknown name": "x[i] = threads_per_galaxy;",
    "64 bits in a simdgroup": "x[i] = float(simd_sum(long(a[i])));",
    "64 bits shuffled": "x[i] = float(simd_shuffle_xor(ulong2(1, 2), 1).x);",
    "bool in a simdgroup": "x[i] = float(simd_max(a[i] > 0.0f));",
    "bool in a quadgroup": "x[i] = float(quad_broadcast(a[i] > 0.0f, 1));",
    "ambiguous": "half h = half(a[i]); x[i] = max(h, 0.0f);",
}


def test_text_that_metal_refuses_does_not_compile(rng):
    for fault, source in REFUSED.items():
        said = failure(source, draw(rng, (64,)), error=CompileError)
        assert "kernel `probe` doesn't compile" in said, f"{fault}: {said}"


def test_a_small_input_lies_in_another_address_space():
    source = "const device float* p = a; x[i] = p[i];"
    assert_same(probe(source, mx.ones((8,)), n=7)[0], mx.ones((7,)))
    with pytest.raises(CompileError):
        probe(source, mx.ones((7,)), n=7)


def test_too_many_threads_or_buffers():
    with pytest.raises(EmulatorError, match="2048 threads in a threadgroup"):
        probe("x[i] = 0;", n=2048)
    with pytest.raises(EmulatorError, match="32 buffers"):
        names = [f"n{k}" for k in range(31)]
        Kernel("probe", names, ["x"], "x[0] = 0;")(
            inputs=[mx.zeros(8)] * 31,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
        )


# -- the project's launches


@pytest.fixture
def launch_file(tmp_path, monkeypatch):
    """A kernel file of the project, with the launch that its wrappers use."""

    def launch(source, a, threads=32):
        (tmp_path / "probe.metal").write_text(source, encoding="utf-8")
        monkeypatch.setattr(metal_runtime, "FOLDER", tmp_path)
        forget()
        with emulated():
            return metal_runtime.launch(
                metal_runtime.Kernel("probe", ("a",), ("x",), headers=()),
                [a],
                template=(("T", a.dtype),),
                grid=(a.size, 1, 1),
                threadgroup=(threads, 1, 1),
                output_shapes=[a.shape],
                output_dtypes=[mx.float32],
            )[0]

    def forget():
        metal_runtime._read.cache_clear()
        metal_runtime.form.cache_clear()
        emulator.project_kernel.cache_clear()

    yield launch
    forget()


def test_launches_of_the_project_are_emulated(launch_file, rng, monkeypatch):
    a = draw(rng, (64,))
    twice = "x[thread_position_in_grid.x] = T(2.0f * float(a[thread_position_in_grid.x]));"
    assert_same(launch_file(twice, a), 2 * a)
    outside = "\nx[thread_position_in_grid.x] = a[64];"
    with pytest.raises(EmulatorError, match=r"\(probe.metal:1") as raised:
        launch_file(outside, a)
    # The text is one line, unless somebody looks for a fault.
    assert raised.value.__notes__ == ["AFM_METAL_LINES=1 shows names and lines of the files."]
    monkeypatch.setenv(emulator.LINES, "1")
    with pytest.raises(EmulatorError, match=r"\(probe.metal:2"):
        launch_file(outside, a)


def test_limits_of_the_project(launch_file):
    source = "x[thread_position_in_grid.x] = 0.0f;"
    with pytest.raises(EmulatorError, match="512 threads in a threadgroup"):
        launch_file(source, mx.zeros(512), threads=512)
    with pytest.raises(EmulatorError, match="isn't a multiple"):
        launch_file(source, mx.zeros(40))
    sum_in_bfloat = "uint i = thread_position_in_grid.x;\nT y = a[i] + a[0];\nx[i] = float(y);"
    launch_file(sum_in_bfloat, mx.zeros(32, mx.float16))
    with pytest.raises(CompileError, match=r"arithmetic on bfloat, .* in lines 1"):
        launch_file(sum_in_bfloat, mx.zeros(32, mx.bfloat16))


# -- a run


def test_what_nobody_wrote_stays_poisoned():
    got = np.array(probe("if (i % 2) x[i] = 1.0f;")[0])
    assert np.isnan(got[::2]).all()
    assert (got[1::2] == 1).all()


def test_the_tests_go_on_after_a_crash(rng):
    """A launch is a process of its own: nothing of a kernel's faults stays."""
    pid = os.getpid()
    with pytest.raises(EmulatorError):
        probe("((device float*)0)[i] = 1.0f; x[i] = 0.0f;", draw(rng, (64,)))
    assert os.getpid() == pid
    assert_same(probe("x[i] = 1.0f;")[0], mx.ones((64,)))
