"""The CPU kernels on ARM, and on x86 with and without AVX2 and AVX-512, emulated where this machine is another.

qemu 7.2 emulates no AVX-512: the AVX-512 kernels run on machines that have it.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy
import pytest

from afm_mlx.kernels.cpu import extension
from tests.tools.cli import ROOT

HERE = Path(__file__).parent
SOURCES = ROOT / "kernels" / "cpu"
PROMPT = "Make this formal:\nhey Hana, can't make it to the Film Lecture"

PORTABLE, AVX2 = ("portable",), ("avx2", "portable")
PROCESSORS = {
    "Nehalem": PORTABLE,  # neither AVX
    "SandyBridge": PORTABLE,  # AVX alone
    "Haswell": AVX2,
    "EPYC-Milan": AVX2,
}
INCOMPLETE = {  # not for NumPy's OpenBLAS, which looks at the model alone
    "Haswell,-f16c": PORTABLE,
    "Haswell,-fma": PORTABLE,
    "Haswell,-xsave": PORTABLE,  # a system that doesn't save the wide registers
}
SETS = PROCESSORS | INCOMPLETE
FAST = ("Nehalem", "Haswell")
cpus = pytest.mark.parametrize(
    "cpu", [cpu if cpu in FAST else pytest.param(cpu, marks=pytest.mark.slow) for cpu in PROCESSORS]
)
needs_native = pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())

BEST_SET = """
import afm_mlx, mlx.core as mx, numpy as np
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.selftest.checks import check
from afm_mlx.kernels.selftest.specs import quick_specs
native = extension.module()
print(*native.instruction_sets())
for name in native.instruction_sets()[:1]:
    assert native.use_instruction_set(name)
    results = check(quick_specs(mx.float32), np.random.default_rng(0), only_what_runs=True)
    run = {r.variant for r in results if r.variant.startswith("cpu/") and r.error is not None}
    wrong = [r.summary for r in results if r.failure]
    print(name, len(run), *wrong)
"""


def emulator(machine: str) -> str:
    """Path of the emulator. Without one the test is skipped, or fails if AFM_MLX_REQUIRE_EMULATOR is 1."""
    names = (f"qemu-{machine}", f"qemu-{machine}-static")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        required = os.environ.get("AFM_MLX_REQUIRE_EMULATOR") == "1"
        (pytest.fail if required else pytest.skip)(f"needs {names[0]}: apt install qemu-user")
    return found


def python_on(cpu: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a Python on another x86 processor. Its child processes run on this machine's own."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("emulates Linux on x86, and needs its libraries")
    # The emulator tells on stderr which of a processor's features it lacks.
    python = options.pop("python", sys.executable)
    command = [emulator("x86_64"), "-cpu", cpu, python, *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("AFM_MLX_ISA", "OPENBLAS_CORETYPE")}
    return subprocess.run(command, capture_output=True, text=True, env=kept, check=False, **options)


@needs_native
@cpus
def test_the_extension_runs_what_the_processor_has(cpu):
    ended = python_on(cpu, "-c", BEST_SET, cwd=ROOT, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [" ".join(SETS[cpu]), f"{SETS[cpu][0]} 13"]


@pytest.mark.parametrize("code", [None, "import afm_mlx; afm_mlx.load"])
def test_a_processor_that_numpy_does_not_run_on_is_an_error(code):
    """NumPy 2.4 and later end the process there before they ask."""
    if tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4):
        pytest.skip("this NumPy runs on every x86-64")
    ended = python_on("core2duo", *(["-c", code] if code else ["-m", "afm_mlx", "info"]), cwd=ROOT)
    assert ended.returncode == (1 if code else 2)
    message = ended.stderr.splitlines()[-1]
    assert (
        f"NumPy {numpy.__version__} would end this process: this processor lacks SSE4.1, SSE4.2, POPCNT"
        in message
    )
    assert "pip install 'numpy<2.4'" in message
    assert code or "Traceback" not in ended.stderr


# -- without Python and MLX: the kernels alone


def flags():
    """Flags of each instruction set, as the build has them."""
    found = {}
    text = (SOURCES / "CMakeLists.txt").read_text()
    for isa, words in re.findall(r"^set\(flags_(\w+) (.*)\)", text, re.MULTILINE):
        found[isa] = words.replace("${flags_avx512}", " ".join(found.get("avx512", []))).split()
    return found


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """By its source, each unit without optimization: a function that isn't inlined is in the object."""
    if shutil.which("c++") is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("needs a C++ compiler for x86 on Linux")
    folder, of_isa = tmp_path_factory.mktemp("core"), flags()
    found = {}
    units = [*SOURCES.glob("isa*.cpp"), *SOURCES.glob("palette_*.cpp"), HERE / "core_test.cpp"]
    for source in [*units, *SOURCES.glob("attention_*.cpp")]:
        output = folder / f"{source.stem}.o"
        mine = of_isa.get(source.stem.rpartition("_")[2], []) if source.parent == SOURCES else []
        if "neon" not in source.stem:
            command = ["c++", "-std=c++20", "-O0", "-w", f"-I{SOURCES}", *mine, "-c", source]
            subprocess.run([*command, "-o", output], check=True)
            found[source.stem] = output
    return found


@pytest.fixture(scope="module")
def core_test(objects):
    program = next(iter(objects.values())).parent / "core_test"
    linked = [file for name, file in objects.items() if not name.startswith("attention")]
    subprocess.run(["c++", *linked, "-o", program], check=True)
    return program


@pytest.mark.slow
@pytest.mark.parametrize("cpu", [None, *SETS])
def test_kernels_against_plain_loops(rng, core_test, cpu):
    run = [emulator("x86_64"), "-cpu", cpu] if cpu else []
    seed = str(rng.integers(2**62))
    ended = subprocess.run([*run, core_test, seed], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"seed {seed}: {ended.stdout}{ended.stderr}"
    names = tuple(line.partition(":")[0] for line in ended.stdout.splitlines())
    assert names == (SETS[cpu] if cpu else tuple(extension.status().instruction_sets))


@pytest.mark.slow
def test_units_of_an_instruction_set_share_no_function_and_start_nothing(objects):
    """The linker keeps one copy of a function that is in several objects, whatever that was compiled for."""
    of_isa = [name for name in objects if name.rpartition("_")[2] in flags()]
    assert len(of_isa) == 5
    for name in of_isa:
        listing = subprocess.run(
            ["nm", "-C", objects[name]], capture_output=True, text=True, check=True
        )
        symbols = [line[17:].split(" ", 1) for line in listing.stdout.splitlines()]
        shared = [text for kind, text in symbols if kind in "WVu" and "DW.ref" not in text]
        assert not shared, name
        assert not [text for _, text in symbols if "GLOBAL__" in text], "a static initializer"
        given = [text for kind, text in symbols if kind in "TDBR"]
        assert all(
            re.fullmatch(r"afm::(\w+_kernels\(\)|vbmi_\w+\(\)|kAttention\w+)", s) for s in given
        )


# -- ARM, cross-compiled by Zig's clang

IS_ARM = platform.machine() in ("aarch64", "arm64") and sys.platform == "linux"


def zig(*arguments):
    command = [sys.executable, "-m", "ziglang", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def neon_test(tmp_path_factory):
    pytest.importorskip("ziglang", reason="needs Zig's clang: pip install ziglang")
    if not IS_ARM:
        emulator("aarch64")
    folder = tmp_path_factory.mktemp("neon")
    # Linked without a library of C or C++, which would have to be compiled as well.
    flags = ["-target", "aarch64-linux-musl", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-mno-outline-atomics"]
    sources = [SOURCES / f"isa{unit}.cpp" for unit in ("", "_neon", "_portable")]
    sources += [HERE / "core_test.cpp", HERE / "bare_aarch64.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, output in zip(sources, objects, strict=True):
        own = ["-mcpu=generic+v8_2a+dotprod" if source.stem == "isa_neon" else "-mcpu=generic"]
        own += ["-fno-builtin"] * (source.stem == "bare_aarch64")
        zig("c++", *flags, *own, "-I", SOURCES, "-c", source, "-o", output)
    program = folder / "cpu_core_test"
    zig("ld.lld", "-static", *objects, "-o", program)
    return program


@pytest.mark.parametrize(
    ("cpu", "sets"),
    [
        ("max", ["neon", "portable"]),
        ("neoverse-n1", ["neon", "portable"]),
        ("cortex-a72", ["portable"]),  # without the dot product
    ],
)
def test_neon_against_plain_loops(rng, neon_test, cpu, sets):
    if IS_ARM and "neon" not in sets:
        pytest.skip("this machine has the dot product")
    run = [] if IS_ARM else [emulator("aarch64"), "-cpu", cpu]
    seed = str(rng.integers(2**62))
    result = subprocess.run([*run, neon_test, seed], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"seed {seed}: {result.stdout}{result.stderr}"
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == sets


# -- the thread pool


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_thread_pool(tmp_path):
    """Under ThreadSanitizer where the compiler has it: what loops share is written by one thread at a time."""
    program = tmp_path / "cpu_pool_test"
    sources = [HERE / "pool_test.cpp", SOURCES / "pool.cpp", SOURCES / "pool_size.cpp"]
    compile_it = ["c++", "-std=c++20", "-O1", "-pthread", "-Wall", f"-I{SOURCES}", "-o", program]
    sanitized = subprocess.run(
        [*compile_it, "-fsanitize=thread", *sources], capture_output=True, check=False
    )
    if sanitized.returncode:
        subprocess.run([*compile_it, *sources], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


# -- a wheel


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The Python of an environment that a wheel is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, *"-m pip wheel -q --no-deps -w".split(), str(folder), str(ROOT)]
    subprocess.run(pip, check=True)
    venv.create(folder / "env", symlinks=True)
    python = folder / "env" / "bin" / "python"
    site = next((folder / "env").glob("lib/python*/site-packages"))
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(site)
    others = {path for path in sys.path if path.endswith("site-packages")}
    (site / "dependencies.pth").write_text("\n".join(sorted(others)))
    return python


@pytest.mark.slow
@pytest.mark.parametrize("cpu", PROCESSORS)
def test_a_wheel_works_on_each_processor(installed, tmp_path, monkeypatch, cpu):
    monkeypatch.setenv("AFM_MLX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AFM_MLX_SELFTEST", raising=False)
    for arguments in (["info"], ["doctor", "--quick"], ["generate", "--prompt", PROMPT]):
        ended = python_on(
            cpu, "-m", "afm_mlx", *arguments, python=str(installed), cwd=tmp_path, timeout=300
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        if arguments[0] == "doctor":
            assert f"instruction set   {SETS[cpu][0]}" in ended.stdout
            assert "ok" in ended.stdout
        if arguments[0] == "generate":
            assert "Film Lecture" in ended.stdout
