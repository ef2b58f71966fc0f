"""How the C++ extension is found, refused and set up."""

import json

import mlx.core as mx
import pytest

from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.errors import SettingError
from tests.tools.cli import process

native = extension.module()
needs_native = pytest.mark.skipif(native is None, reason=extension.unavailable())

PROBE = """
import json
import afm_mlx
import mlx.core as mx
{first}
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
case = dispatch.Case("cpu", mx.float32, 1, "balanced", "row", 64)
status = extension.status()._asdict()
status["path"] = str(status["path"])
print(json.dumps({{**status, "chosen": dispatch.select("packed_matmul", case).name}}))
"""


def probe(first=""):
    return json.loads(process(code=PROBE.format(first=first), check=True).stdout)


@needs_native
def test_status_says_what_runs_with_which_settings(monkeypatch):
    monkeypatch.setenv(extension.THREADS, "1")
    monkeypatch.setenv(extension.ISA, "portable")
    status = probe()
    assert (status["reason"], status["threads"], status["instruction_set"]) == ("", 1, "portable")
    assert status["path"] == str(extension.status().path)
    assert status["mlx"] == mx.__version__
    assert status["instruction_sets"][-1] == "portable"
    assert status["chosen"] == "cpu/packed_matmul"


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(extension.SWITCH, "0")
    status = probe()
    assert status["reason"] == "switched off by AFM_MLX_NATIVE=0"
    assert status["chosen"] == "mlx/quantized"


@needs_native
@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        (extension.THREADS, "two", "must be a whole number from 1 to 1024"),
        (extension.THREADS, "0", "must be a whole number from 1 to 1024"),
        (extension.THREADS, "1025", "must be a whole number from 1 to 1024"),
        (extension.ISA, "sse2", "this processor runs .*portable"),
    ],
)
def test_settings_that_can_not_be_followed_are_errors(monkeypatch, name, value, allowed):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingError, match=f"{name} is '{value}': .*{allowed}"):
        extension._configure(native)


@needs_native
def test_another_mlx_than_it_was_built_against_is_refused():
    status = probe("mx.__version__ = '0.99.0'")
    assert f"built against MLX {native.mlx_version}, and this is MLX 0.99.0" in status["reason"]
    assert status["chosen"] == "mlx/quantized"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("native_reason.txt", b"there was no C++ compiler", "no C++ compiler; reinstall afm-mlx"),
        ("nothing", b"", "is not there; reinstall afm-mlx"),
        (extension._file_name(), b"\x7fELF, but no more than that", "can't be loaded"),
    ],
)
def test_what_a_build_left_says_why_there_is_no_extension(
    tmp_path, monkeypatch, file, content, reason
):
    (tmp_path / file).write_bytes(content)
    given = {file: tmp_path / file}
    monkeypatch.setattr(extension, "_find", given.get)
    module, said = extension._loaded.__wrapped__()
    assert module is None
    assert reason in said


@needs_native
def test_a_loop_in_a_forked_child_ends():
    """Threads don't survive a fork: the child's first loop starts its own."""
    code = """
import os, sys, warnings
import afm_mlx
from afm_mlx.kernels.cpu import extension
native = extension.module()
native.set_threads(4)
assert native.self_test(1000) == 499500
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    os._exit(0 if native.self_test(1000) == 499500 and native.threads() == 4 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    process(code=code, check=True, timeout=60)
