"""How the C++ extension is found, refused and set up."""

import json
import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import dispatch, packed_embedding
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.formats import PackedWeight
from tests.tools.compare import assert_same

native = extension.module()
needs_native = pytest.mark.skipif(native is None, reason=extension.unavailable())

PROBE = """
import json
{first}
import afm_mlx
import mlx.core as mx
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
status = extension.status()
case = dispatch.Case("cpu", mx.float32, 1, "balanced", "row", 64)
print(json.dumps({{"reason": status.reason, "threads": status.threads, "isa": status.instruction_set,
                   "chosen": dispatch.select("packed_matmul", case).name}}))
"""


def probe(first="", **environment):
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(first=first)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    if result.returncode:
        return result.stderr
    return json.loads(result.stdout)


@needs_native
def test_status_says_what_runs():
    status = extension.status()
    assert status.available
    assert status.path.is_file()
    assert status.mlx == mx.__version__
    assert status.instruction_set in status.instruction_sets
    assert status.instruction_sets[-1] == "portable"
    assert status.threads >= 1


def test_it_can_be_switched_off():
    answer = probe(AFM_MLX_NATIVE="0")
    assert answer["reason"] == "switched off by AFM_MLX_NATIVE=0"
    assert answer["chosen"] == "mlx/quantized"


@needs_native
def test_settings_are_followed():
    answer = probe(AFM_MLX_THREADS="3", AFM_MLX_ISA="portable")
    assert (answer["reason"], answer["threads"], answer["isa"]) == ("", 3, "portable")
    assert answer["chosen"].startswith("cpu/")


@needs_native
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("AFM_MLX_THREADS", "two", "a whole number from 1 to 1024"),
        ("AFM_MLX_THREADS", "0", "a whole number from 1 to 1024"),
        ("AFM_MLX_ISA", "sse2", "this processor runs"),
    ],
)
def test_settings_that_can_not_be_followed_are_errors(name, value, allowed):
    error = probe(**{name: value}).splitlines()[-1]
    assert error.startswith("afm_mlx.kernels.errors.SettingError")
    assert name in error
    assert repr(value) in error
    assert allowed in error


@needs_native
def test_another_mlx_than_it_was_built_against_is_refused():
    answer = probe("import afm_mlx; import mlx.core as mx; mx.__version__ = '0.99.0'")
    assert f"built against MLX {native.mlx_version}, and this is MLX 0.99.0" in answer["reason"]
    assert answer["chosen"] == "mlx/quantized"


def test_a_build_that_failed_says_why(tmp_path, monkeypatch):
    note = tmp_path / "native_reason.txt"
    note.write_text("there was no C++ compiler when afm-mlx was installed")
    for found, wanted in ((note, "no C++ compiler"), (None, "is not there")):
        monkeypatch.setattr(
            extension, "_find", lambda name, found=found: found if name == note.name else None
        )
        module, reason = extension._loaded.__wrapped__()
        assert module is None
        assert wanted in reason
        assert "reinstall afm-mlx" in reason


def test_a_library_that_does_not_load_is_refused(tmp_path, monkeypatch):
    library = tmp_path / extension._file_name()
    library.write_bytes(b"\x7fELF, but no more than that")
    monkeypatch.setattr(extension, "_find", lambda name: library)
    module, reason = extension._loaded.__wrapped__()
    assert module is None
    assert "can't be loaded" in reason


@needs_native
def test_a_loop_in_a_forked_child_ends(rng):
    """Threads don't survive a fork: the child's first loop starts its own."""
    code = """
import os, sys
import afm_mlx
from afm_mlx.kernels.cpu import extension
native = extension.module()
native.set_threads(4)
assert native.self_test(1000) == 499500
child = os.fork()
if child == 0:
    os._exit(0 if native.self_test(1000) == 499500 and native.threads() == 4 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


@needs_native
def test_numbers_go_to_each_dtype_rounded_once(rng):
    """The conversions that the primitives do themselves, on all kinds of float32, against MLX's."""
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    numbers = bits.view(np.float32)
    small = (rng.standard_normal(4096) * 10.0 ** rng.integers(-8, 6, 4096)).astype(np.float32)
    edges = np.array([65519.0, 65520.0, 65504.0, 2.0**-24, 2.0**-25, 0.0, -0.0], np.float32)
    values = np.concatenate([numbers[np.isfinite(numbers)], small, edges])
    table = mx.array(values[: len(values) // 4 * 4].reshape(-1, 4))
    # Row i's codes 0, 1, 2, 3 and so on are a palette's entries: the embedding copies them.
    codes = mx.full((table.shape[0], 1), 0xE4E4E4E4, dtype=mx.uint32)
    weight = PackedWeight(codes, 2, "palette", table=table)
    rows = mx.arange(table.shape[0], dtype=mx.int32)
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        with dispatch.force("cpu"):
            got = packed_embedding(rows, weight, dtype)
        wanted = mx.concatenate([table] * 4, axis=1).astype(dtype)
        assert_same(got, wanted)
