"""Huge pages keep the contents of weights and skip small arrays; freed memory returns to the system."""

import platform
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels.cpu import extension, memory
from tests.tools.cli import process
from tests.tools.compare import assert_same

needs_native = pytest.mark.skipif(extension.module() is None, reason="needs the C++ extension")


@needs_native
def test_contents_stay_while_they_are_read(rng):
    numbers = [rng.integers(0, 2**32, size, dtype=np.uint32) for size in (9 << 20, 1000)]
    arrays = [mx.array(n) for n in numbers]
    mx.eval(arrays)
    thread = memory.prefer_huge_pages(arrays)
    assert (thread is not None) == (mx.default_device() == mx.Device(mx.cpu))
    sums = [int(a.astype(mx.uint64).sum().item()) for a in arrays]
    if thread is not None:
        thread.join()
    assert sums == [int(n.astype(np.uint64).sum()) for n in numbers]
    for array, wanted in zip(arrays, numbers, strict=True):
        assert_same(array, wanted)


@needs_native
def test_what_is_small_or_switched_off_is_left_alone(monkeypatch):
    large = mx.zeros((memory.WORTH_IT,), mx.uint8)
    mx.eval(large)
    assert memory.prefer_huge_pages([large[:1000]]) is None
    monkeypatch.setenv(memory.SWITCH, "0")
    assert memory.prefer_huge_pages([large]) is None


def test_an_array_to_fill(rng):
    numbers = rng.standard_normal(100_003).astype(np.float16)
    array = memory.unfilled(numbers.size)
    assert (array.shape, array.dtype) == ((numbers.size,), mx.float16)
    np.array(array, copy=False)[:] = numbers
    assert_same(array + 0, numbers)


@needs_native
def test_a_process_ends_in_the_middle_of_it():
    """Without waiting for the gigabyte, and without an error."""
    code = """
import afm_mlx, mlx.core as mx
from afm_mlx.kernels.cpu import memory
arrays = [mx.zeros((1 << 26,), mx.uint8) for _ in range(4)]
mx.eval(arrays)
print(memory.prefer_huge_pages(arrays).is_alive())
"""
    done = process(code=code)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True\n")


# -- heaps


# Pieces of 5 MB with a smaller one behind each: in a heap, the smaller ones would keep the large ones' memory.
CODE = """
import ctypes, os
from afm_mlx.kernels.cpu.memory import release_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
held = release_freed_memory()
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
