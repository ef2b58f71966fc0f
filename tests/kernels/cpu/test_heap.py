"""Freed memory is the system's again, whatever was freed before."""

import platform
import sys

import pytest

from tests.tools.cli import process

# Pieces of 5 MB with a smaller one behind each: in a heap, the smaller ones would keep the large ones' memory.
CODE = """
import ctypes, os
from afm_mlx.kernels.cpu.memory import hold_heaps_down

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
held = hold_heaps_down()
libc.free(libc.malloc(30 << 20))  # from now on glibc would take 30 MB from a heap
before = resident()
pieces = [(libc.malloc(5 << 20), libc.malloc(1 << 20)) for _ in range(20)]
for large, _ in pieces:
    ctypes.memset(large, 1, 5 << 20)
for large, _ in pieces:
    libc.free(large)
print(held, resident() - before < 10 << 20)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's heaps"
)
@pytest.mark.parametrize(
    ("threshold", "printed"), [(None, "True True"), ("33554432", "False False")]
)
def test_freed_memory_goes_back_unless_the_environment_says_otherwise(
    monkeypatch, threshold, printed
):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if threshold is not None:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", threshold)
    done = process(code=CODE)
    assert done.stdout.strip() == printed, done.stderr
