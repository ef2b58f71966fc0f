"""How the C++ extension is found, refused and set up."""

import json
import os
import shutil
import subprocess
import sys

import mlx.core as mx
import pytest

from afm_mlx.kernels import settings
from afm_mlx.kernels.cpu import extension, trial
from afm_mlx.kernels.settings import SettingError
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
    assert status["reason"] == "switched off by AFM_MLX_NATIVE=0; unset it to use the extension"
    assert status["chosen"] == "mlx/quantized"


@needs_native
def test_an_instruction_set_that_the_processor_lacks_is_an_error(monkeypatch):
    monkeypatch.setenv(extension.ISA, "sse2")
    with pytest.raises(
        SettingError, match=f"{extension.ISA} is 'sse2': this processor runs .*portable"
    ):
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
        ("nothing", b"", "is missing; reinstall afm-mlx"),
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


# -- tried in a child process


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A machine that has tried no library: the folder in which it will say what became of one."""
    monkeypatch.setenv(settings.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def trials(monkeypatch):
    """The libraries that were tried."""
    seen, tried = [], trial.tried
    monkeypatch.setattr(trial, "tried", lambda library: (seen.append(library), tried(library))[1])
    return seen


@pytest.fixture
def fatal(tmp_path, monkeypatch):
    """An installed library as a compiler with another processor as target makes it."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "fatal.c", tmp_path / extension._file_name()
    source.write_text(
        "#include <signal.h>\nvoid *PyInit__afm_cpu(void) { raise(SIGILL); return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
    monkeypatch.setattr(extension, "_find", lambda name: library)
    return library


def test_the_signal_that_kills_a_library_is_named(known, fatal, trials):
    for _ in range(2):
        module, reason = extension._loaded.__wrapped__()
        assert module is None
        died = f"{fatal.name} was killed by SIGILL while it was tried on this machine; "
        assert reason == died + extension._rebuild()
    assert trials == [str(fatal)], "once, and known from then on"
    assert not list(fatal.parent.glob("core*"))


def test_the_build_says_what_ended_the_trial(fatal):
    command = [sys.executable, trial.__file__, str(fatal)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "killed by SIGILL while it was tried\n")


@needs_native
def test_a_library_is_tried_once(known, trials, tmp_path, monkeypatch):
    library = tmp_path / "copy.so"
    shutil.copy(native.__file__, library)
    assert [extension._death_in_trial(library) for _ in range(2)] == ["", ""]
    assert len(trials) == 1
    os.utime(library, times=(1, 1))  # another build
    for wanted in (2, 2):
        assert extension._death_in_trial(library) == ""
        assert len(trials) == wanted
    for file in known.iterdir():
        file.write_text("[1, 2")  # damaged
    assert extension._death_in_trial(library) == ""
    assert len(trials) == 3


@pytest.mark.parametrize("died", ["stopped after 60 s", "killed by SIGKILL"])
def test_what_others_do_to_a_trial_is_not_kept(known, fatal, monkeypatch, died):
    monkeypatch.setattr(trial, "tried", lambda library: (died, ""))
    assert f"was {died} while it was tried" in extension._loaded.__wrapped__()[1]
    assert not known.exists()


def test_a_trial_ends(fatal, monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.001)
    assert trial.tried(str(fatal)) == ("stopped after 0.001 s", "")


@pytest.mark.parametrize("executable", ["", "/usr/sbin/program-with-python-in-it"])
def test_a_program_that_embeds_python_is_not_started_again(
    known, trials, fatal, monkeypatch, executable
):
    monkeypatch.setattr(sys, "executable", executable)
    assert extension._death_in_trial(fatal) == ""
    assert not trials


def test_nothing_is_kept_where_nothing_can_be_written(known, fatal, trials):
    known.write_text("a file where the folder would be")
    for _ in range(2):
        assert extension._death_in_trial(fatal) == "killed by SIGILL"
    assert len(trials) == 2


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
