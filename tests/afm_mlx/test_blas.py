"""MLX's matrix product on Linux, in processes of their own: what is loaded can't be unloaded."""

import json
import os
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
{first}
import afm_mlx
from afm_mlx import blas
from afm_mlx.kernels.cpu import extension
import mlx.core as mx, numpy as np
native = extension.module() is not None
rng = np.random.default_rng({seed})
mx.set_default_device(mx.cpu)

def product(m, k, n, ta, tb):
    a = rng.standard_normal((k, m) if ta else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if tb else (k, n)).astype(np.float32)
    x, y = (a.T if ta else a), (b.T if tb else b)
    u, v = mx.array(a), mx.array(b)
    u, v = (u.T if ta else u), (v.T if tb else v)
    got = [np.array(u @ v) for _ in range(3)]
    same = all(np.array_equal(got[0], again) for again in got)
    return same, float(np.abs(got[0] - x.astype(np.float64) @ y).max())

results = [product(*shape, ta, tb) for shape in {shapes} for ta in (0, 1) for tb in (0, 1)]
u, v = mx.ones((513, 65)), mx.ones((65, 260))

def seconds_while_idle():
    mx.eval(u @ v)  # NumPy's own products, above, are on OpenBLAS's threads
    time.sleep(0.2)
    mx.eval(u @ v)
    start = time.process_time()
    time.sleep(0.1)
    return time.process_time() - start

print(json.dumps({{
    "status": blas.status(),
    "loaded": sys.platform == "linux" and "afm_blas.so" in open("/proc/self/maps").read(),
    "native": native,
    "alike": all(same for same, _ in results),
    "error": max(error for _, error in results),
    "seconds_while_idle": min(seconds_while_idle() for _ in range({idle})),
}}))
"""
SMALL = [(1, 1, 1), (3, 5, 7), (64, 33, 129), (17, 200, 1)]
LARGE = [(129, 130, 301), (1, 1100, 700), (700, 1100, 1), (513, 65, 260), (3, 70000, 5)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")


def probe(rng, shapes=SMALL, first="", idle=1, **environment):
    code = PROBE.format(shapes=shapes, first=first, idle=idle, seed=int(rng.integers(2**31)))
    command, pipes = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    result = subprocess.run(command, check=True, env=os.environ | environment, **pipes)
    answer = json.loads(result.stdout)
    assert answer["alike"]
    assert answer["error"] < (1e-3 if shapes is LARGE else 1e-4)
    return answer


def test_products_go_to_openblas(rng):
    answer = probe(rng)
    if "afm_blas.so is not there" in answer["status"]:
        pytest.skip(answer["status"])
    assert (answer["status"], answer["loaded"]) == ("NumPy's OpenBLAS", True)


def test_the_environment_switches_it_off(rng):
    answer = probe(rng, AFM_MLX_BLAS="0")
    assert "switched off by AFM_MLX_BLAS=0" in answer["status"]
    assert not answer["loaded"]


def test_too_late_is_reported(rng):
    assert "imported before afm_mlx" in probe(rng, first="import mlx.core")["status"]


def test_the_kernels_threads_share_products_and_rest_afterwards(rng):
    """OpenBLAS's own would compute on, waiting for the next product, for a tenth of a second each time."""
    answer = probe(rng, LARGE, idle=5, AFM_MLX_THREADS="3", OPENBLAS_NUM_THREADS="2")
    if not answer["native"]:
        pytest.skip("needs the C++ extension")
    assert answer["seconds_while_idle"] < 0.03
