"""The NEON kernels, cross-compiled by Zig's clang and run by qemu's user-mode emulator."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.emulator import emulator

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu"
NATIVE = platform.machine() in ("aarch64", "arm64") and sys.platform == "linux"


def zig(*arguments):
    command = [sys.executable, "-m", "ziglang", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def core_test(tmp_path_factory):
    pytest.importorskip("ziglang", reason="needs Zig's clang: pip install ziglang")
    if not NATIVE:
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
def test_kernels_against_plain_loops(rng, core_test, cpu, sets):
    if NATIVE and "neon" not in sets:
        pytest.skip("this machine has the dot product")
    run = [] if NATIVE else [emulator("aarch64"), "-cpu", cpu]
    seed = str(rng.integers(2**62))
    result = subprocess.run([*run, core_test, seed], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"seed {seed}: {result.stdout}{result.stderr}"
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == sets
