"""Freed memory is the system's again."""

import platform
import sys

import pytest

from tests.tools.cli import process

# Pieces of 100 kB with a small one behind each, which keeps the memory of those below it in the heap.
CODE = """
import ctypes, os
from afm_mlx.kernels.cpu import heap

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
before = resident()
pieces = [(libc.malloc(100_000), libc.malloc(5000)) for _ in range(500)]
for large, _ in pieces:
    ctypes.memset(large, 1, 100_000)
for large, _ in pieces:
    libc.free(large)
kept = resident() - before
asked = [heap.give_freed_memory_back() for _ in range(2)]
print(kept > 40 << 20, resident() - before < 10 << 20, asked)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.libc_ver()[0] != "glibc", reason="glibc's heaps"
)
def test_freed_memory_goes_back_but_not_all_the_time(monkeypatch):
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    done = process(code=CODE)
    assert done.stdout.strip() == "True True [True, False]", done.stderr
