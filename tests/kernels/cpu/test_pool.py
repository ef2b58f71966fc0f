"""The threads that the CPU kernels compute with: loops of all kinds, and threads that come late."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "kernels" / "cpu"


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
