"""The NEON kernels, cross-compiled by Zig's clang and run by qemu's user-mode emulator."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
NATIVE = platform.machine() in ("aarch64", "arm64") and sys.platform == "linux"


def zig(tool, *arguments):
    command = [sys.executable, "-m", "ziglang", tool, "-target", "aarch64-linux-musl", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.fixture(scope="module")
def core_test(tmp_path_factory):
    pytest.importorskip("ziglang", reason="needs Zig's clang: pip install ziglang")
    if EMULATOR is None and not NATIVE:
        pytest.skip("needs qemu-aarch64: apt install qemu-user")
    folder = tmp_path_factory.mktemp("neon")
    # Compiled as C++ but linked as C: the library of C++ would have to be compiled as well.
    flags = ["-mcpu=generic+dotprod", "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror"]
    flags += ["-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"]
    sources = [SOURCES / "isa_neon.cpp", HERE / "core_test.cpp"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, output in zip(sources, objects, strict=True):
        zig("c++", *flags, "-I", SOURCES, "-c", source, "-o", output)
    program = folder / "cpu_core_test"
    zig("cc", *objects, "-o", program)
    return program


@pytest.mark.parametrize("cpu", ["max", "neoverse-n1"])
def test_kernels_against_plain_loops(rng, core_test, cpu):
    run = [] if NATIVE else [EMULATOR, "-cpu", cpu]
    seed = str(rng.integers(2**62))
    result = subprocess.run([*run, core_test, seed], capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"seed {seed}: {result.stdout}{result.stderr}"
    assert "neon: " in result.stdout
    assert " 0 failures" in result.stdout
