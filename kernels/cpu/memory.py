"""Memory on a CPU: huge pages for weights and adapters, and heaps that release freed memory.

Every decoded token reads all weights. With huge pages, on a virtual machine with two cores, single products
with 2-bit matrices gain 6 to 16 %, and decoding the 3B gains 1 to 15 %, with noise of that size.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import threading
import weakref
from collections.abc import Iterable

import mlx.core as mx

from afm_mlx.kernels import settings
from afm_mlx.kernels.cpu import extension

SWITCH = settings.HUGE_PAGES
WORTH_IT = 16 << 20  # bytes in all: fewer fit into caches, or are read fast enough


def prefer_huge_pages(arrays: Iterable[mx.array]) -> threading.Thread | None:
    """Move evaluated arrays into huge pages, in a background thread: some 2 seconds for a gigabyte.

    The system moves the pages; readers don't have to wait. `AFM_MLX_HUGE_PAGES=0` prevents it.

    Returns:
        The thread; None if nothing is moved: on a GPU, for small models, and without the C++ extension.
    """
    arrays = list(arrays)
    native = extension.module()
    if native is None or not _gains(sum(array.nbytes for array in arrays)):
        return None
    thread = threading.Thread(target=native.use_huge_pages, args=(arrays,), daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def unfilled(size: int) -> mx.array:
    """Make a (size,) float16 array for the caller to fill through a NumPy view, before anything else uses it.

    On a CPU, its memory is allocated when it is written to, in huge pages if the array is large.
    """
    native = extension.module()
    if native is None or _on_gpu():
        return mx.empty((size,), mx.float16)
    return native.unfilled(size, _gains(2 * size))


def _gains(nbytes: int) -> bool:
    return not _on_gpu() and nbytes >= WORTH_IT and settings.is_on(SWITCH)


def _on_gpu() -> bool:
    return mx.default_device() != mx.Device(mx.cpu)


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Stop the threads that move pages: one that returned to Python after its end would crash the process."""
    running = [thread for thread in _threads if thread.is_alive()]
    if running and (native := extension.module()) is not None:
        native.stop_huge_pages()
    for thread in running:
        thread.join()


# -- heaps
#
# glibc allocates a large block of memory with mmap, and unmaps it when it is freed. But with each freed block
# it raises the size from which it does so, up to 32 MB, and keeps twice that size of free memory at its
# heaps' ends. So the memory of a process that runs requests grows for a long time. A fixed threshold prevents
# both ("Memory over time" in docs/benchmarks.md).

HEAP_BYTES = 4 << 20
"""Size from which a block is mapped: at glibc's default, 128 KB, prompts of a small model take a fifth longer,
because the pages of each block are new."""

_M_MMAP_THRESHOLD = -3  # of malloc.h


@functools.cache
def release_freed_memory() -> bool:
    """Make this process map blocks of `HEAP_BYTES` and more, so that freed memory returns to the system.

    Returns True if it now does so; False without glibc, and if the environment sets a threshold
    (`MALLOC_MMAP_THRESHOLD_`, or `glibc.malloc.mmap_threshold` in `GLIBC_TUNABLES`).
    """
    if os.environ.get("MALLOC_MMAP_THRESHOLD_"):
        return False
    if "mmap_threshold" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BYTES))
