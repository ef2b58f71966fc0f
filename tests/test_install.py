"""The wheel, and that an ordinary install works from anywhere, the clone's own root included."""

import contextlib
import importlib.util
import json
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent
PROBE = """
import json, sys
import afm_mlx
heavy = sorted({"mlx", "numpy", "transformers", "mlx_lm", "torch"} & set(sys.modules))
import afm_mlx.kernels, afm_mlx.converters.convert, afm_mlx.adapters
from afm_mlx import load, generate
from afm_mlx.kernels.cpu import extension
status = extension.status()
print(json.dumps({"heavy": heavy, "kernels": afm_mlx.kernels.__name__, "blas": afm_mlx.blas.status(),
                  "reason": status.reason, "path": str(status.path)}))
"""


def said(command, **options):
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light():
    answer = json.loads(said([sys.executable, "-c", PROBE]))
    assert (answer["heavy"], answer["kernels"]) == ([], "afm_mlx.kernels")


# Takes the finder of an editable install out of every Python that is started with it.
UNINSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__name__.startswith("ScikitBuild")]
"""
SPAWN = """
import multiprocessing, sys
import afm_mlx
from importlib import import_module
if __name__ == "__main__":
    names = [f"afm_mlx.{room}" for room in ("kernels", "converters", "adapters")]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert [module.__name__ for module in map(import_module, names)] == names
        print(pool.apply(eval, ("__import__('afm_mlx.adapters').adapters.__file__",)))
"""


@pytest.mark.parametrize("installed", [True, False])
def test_a_source_checkout_has_its_three_rooms_and_no_more(tmp_path, installed):
    """As an editable install, without one, in pytest, as `python -m`, and in spawned children."""
    for name in ("tests", "bench", "docs", "afm_mlx"):
        assert importlib.util.find_spec(f"afm_mlx.{name}") is None
    environment = dict(os.environ)
    if not installed:
        (tmp_path / "sitecustomize.py").write_text(UNINSTALLED)
        environment["PYTHONPATH"] = str(tmp_path)
    probe = "import importlib.util; print(importlib.util.find_spec('afm_mlx.tests'))"
    assert said([sys.executable, "-c", probe], cwd=ROOT, env=environment) == "None\n"
    answer = said([sys.executable, "-c", SPAWN], cwd=ROOT, env=environment)
    assert answer == f"{ROOT / 'adapters' / '__init__.py'}\n"
    command = [sys.executable, "-m", "afm_mlx", "adapter", "info", "todo", "--json"]
    assert json.loads(said(command, cwd=ROOT, env=environment))["rank"] > 0


def test_every_python_that_is_promised_runs_the_dependencies():
    promised = SpecifierSet(metadata.metadata("afm-mlx")["Requires-Python"])
    requirements = map(Requirement, metadata.requires("afm-mlx"))
    needed = [r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    assert "mlx-lm" in needed
    for minor in range(8, 15):
        if promised.contains(f"3.{minor}"):
            for name in needed:
                theirs = metadata.metadata(name)["Requires-Python"]
                assert SpecifierSet(theirs or "").contains(f"3.{minor}.0"), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_the_wheel_installs_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"afm_mlx"}
    rooms = {f"afm_mlx/{room}/__init__.py" for room in ("kernels", "converters", "adapters")}
    assert rooms | {"afm_mlx/py.typed", "afm_mlx/embedded/afm-nano/config.json"} <= set(names)
    assert "afm_mlx/server/page/index.html" in names
    sources = (".c", ".cpp", ".h", ".cmake", "CMakeLists.txt", ".pyc")
    assert not [name for name in names if name.endswith(sources)]
    assert wheel.stat().st_size < 8e6


@pytest.mark.slow
def test_an_ordinary_install_works_from_anywhere(wheel, tmp_path):
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    said([python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)])
    # Its dependencies are this interpreter's; our editable finder must not come along.
    site = said([python, "-c", "print(__import__('sysconfig').get_path('platlib'))"]).strip()
    paths = os.pathsep.join([site, sysconfig.get_path("platlib")])
    for folder in (ROOT, tmp_path):
        options = {"cwd": folder, "env": os.environ | {"PYTHONPATH": paths}}
        answer = json.loads(said([python, "-c", PROBE], **options))
        assert answer["reason"] == ""
        assert Path(answer["path"]).is_relative_to(site)
        info = said([python, "-m", "afm_mlx", "info", "--json"], **options)
        if sys.platform == "linux":
            assert "NumPy's OpenBLAS" in answer["blas"]
            assert "NumPy's OpenBLAS" in info


def configure(folder, source=ROOT, toolchain="", **environment):
    """What an install's build notes about the CPU kernels, and how its first step ends."""
    values = [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"]
    command = ["cmake", "-S", str(source), "-B", str(folder), *values]
    options = {"capture_output": True, "text": True, "env": os.environ | environment}
    # Without a terminal, which the build would write to.
    result = subprocess.run(command, check=False, start_new_session=True, **options)
    note = folder / "native_reason.txt"
    return note.read_text() if note.is_file() else None, result


@pytest.fixture(autouse=True)
def lenient(monkeypatch):
    """CI asks for an error when the CPU kernels can't be built; here it is the other case that counts."""
    monkeypatch.delenv("AFM_MLX_REQUIRE_NATIVE", raising=False)


FATAL = """
cmake_minimum_required(VERSION 3.20)
project(fatal LANGUAGES CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/out)
add_library(_afm_cpu MODULE fatal.cpp)
set_target_properties(_afm_cpu PROPERTIES PREFIX "" SUFFIX ".so")
"""
"""An extension that does nothing but die."""

needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
needs_nanobind = pytest.mark.skipif(
    importlib.util.find_spec("nanobind") is None,
    reason="needs nanobind, which is there for builds only",
)


@needs_cmake
@pytest.mark.parametrize("wanted", ["there was no C++ compiler", "Python's package nanobind"])
def test_an_install_goes_on_without_the_cpu_kernels(tmp_path, wanted):
    """What is missing is noted for `doctor`; a developer may ask for an error instead."""
    if "compiler" in wanted:
        environment = {"CXX": str(tmp_path / "no-such-compiler")}
    else:
        # A package that hides the one that is installed.
        package = tmp_path / "hidden" / "nanobind"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text("raise SystemExit('no nanobind here')")
        environment = {"PYTHONPATH": str(package.parent)}
    reason, result = configure(tmp_path / "build", **environment)
    assert result.returncode == 0, result.stderr
    assert wanted in reason
    assert reason in " ".join(result.stderr.split())
    _, result = configure(tmp_path / "strict", **environment, AFM_MLX_REQUIRE_NATIVE="1")
    assert result.returncode != 0
    assert wanted in " ".join(result.stderr.split())


@needs_cmake
def test_an_install_without_the_cpu_kernels_says_so_on_the_terminal(tmp_path):
    """pip hides what a build that ends well has printed."""
    environment = {**os.environ, "CXX": str(tmp_path / "no-such-compiler")}
    command = (
        f"cmake -S {ROOT} -B {tmp_path} -DPython_EXECUTABLE={sys.executable} >{tmp_path}/out 2>&1"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execve("/bin/sh", ["sh", "-c", command], environment)
    said = b""
    with contextlib.suppress(OSError):  # of a terminal that nobody has open any more
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (
        b"afm-mlx: The CPU kernels could not be built, and afm-mlx will be slow on the CPU: "
        in said
    )
    assert b"there was no C++ compiler" in said


@needs_cmake
def test_a_toolchain_for_another_machine_compiles_the_cpu_kernels_too(tmp_path):
    toolchain = tmp_path / "toolchain.cmake"
    kernels_only = 'if(CMAKE_SOURCE_DIR MATCHES "/kernels/cpu$")'
    toolchain.write_text(f'{kernels_only}\n  message(FATAL_ERROR "read for these")\nendif()\n')
    reason, result = configure(tmp_path / "build", toolchain=toolchain)
    assert result.returncode == 0, result.stderr
    assert "read for these" in reason


@pytest.mark.slow
@needs_cmake
@needs_nanobind
def test_an_install_goes_on_when_the_cpu_kernels_do_not_compile(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(ROOT / "kernels/cpu", source / "kernels/cpu")
    shutil.copy(ROOT / "CMakeLists.txt", source)
    with (source / "kernels/cpu/pool.h").open("a") as header:
        header.write('\n#error "a header that this compiler does not know"\n')
    reason, result = configure(tmp_path / "build", source)
    assert result.returncode == 0, result.stderr
    assert reason.startswith("it did not compile")
    assert "a header that this compiler does not know" in reason


@needs_cmake
def test_an_install_names_the_signal_that_the_cpu_kernels_die_of(tmp_path):
    source = tmp_path / "source"
    kernels = source / "kernels" / "cpu"
    kernels.mkdir(parents=True)
    for name in (
        "CMakeLists.txt",
        "kernels/cpu/extension.cmake",
        "kernels/cpu/trial.py",
        "kernels/cpu/blas.c",
    ):
        shutil.copy(ROOT / name, source / name)
    (kernels / "CMakeLists.txt").write_text(FATAL)
    (kernels / "fatal.cpp").write_text(
        '#include <csignal>\nextern "C" void *PyInit__afm_cpu() { raise(SIGILL); return nullptr; }\n'
    )
    reason, result = configure(tmp_path / "build", source)
    assert result.returncode == 0, result.stderr
    assert reason == "it does not work here: killed by SIGILL while it was tried"
    assert reason in " ".join(result.stderr.split())


@pytest.mark.slow
@needs_cmake
def test_another_nanobind_than_that_of_mlx_is_found_at_build_time(tmp_path):
    """It builds and imports with one; only a call with an array fails."""
    folder = tmp_path / "old"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    if subprocess.run([*command, "nanobind==2.15.0"], check=False).returncode:
        pytest.skip("nanobind 2.15.0 can't be fetched")
    reason, result = configure(tmp_path / "build", PYTHONPATH=str(folder))
    assert result.returncode == 0, result.stderr
    assert reason.startswith("it does not work here: nanobind 2.15.0 has other internals")
    assert "build with the nanobind that afm-mlx's pyproject.toml names" in reason


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("has_uv", [True, False])
def test_make_shows_how_the_install_goes_and_takes_uv_where_it_is(tmp_path, has_uv):
    """What make would run for a new environment; nothing is silenced, and pip is there if uv fails."""
    for name in ("make", "sh", "env", "uname", *["uv"] * has_uv):
        program = shutil.which(name) or sys.executable
        (tmp_path / name).symlink_to(program)
    for target, what in ((".demo", "."), (".test", '".[test]"'), (".lint", '".[test,lint]"')):
        command = ["make", "-n", f"new/{target}", "VENV=new"]
        out = said(command, cwd=ROOT, env={"PATH": str(tmp_path), "HOME": str(tmp_path)})
        assert f"new/bin/python -m pip install --disable-pip-version-check --editable {what}" in out
        assert (f"{tmp_path}/uv pip install --python new/bin/python" in out) is has_uv
        assert "--quiet" not in out
        assert "-q " not in out
