"""Huge pages under weights and adapters, which a decoded token reads from end to end.

Measured on a virtual machine with two cores: single products with 2-bit matrices gain 6 to 16 %, decoding the
3B 1 to 15 %, with noise of that size.
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
WORTH_IT = 16 << 20  # bytes in all; what is less lies in caches, or is read fast enough


def prefer_huge_pages(arrays: Iterable[mx.array]) -> threading.Thread | None:
    """Move evaluated arrays into huge pages, in the background: some 2 seconds for a gigabyte.

    The system moves the pages, and nobody who reads them notices. `AFM_MLX_HUGE_PAGES=0` leaves it out.

    Returns:
        The thread that does it; None when there is nothing to gain: on a GPU, for small models, and where
        the C++ extension isn't there.
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
    """An array for the caller to fill, through NumPy's view of it, before anybody else sees it.

    On a CPU its memory is taken when it is written to, in huge pages where those gain something.

    Returns:
        (size,) float16 with any numbers in it.
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
    """Stop the threads: one that came back to Python after its end would end the process with an error."""
    running = [thread for thread in _threads if thread.is_alive()]
    if running and (native := extension.module()) is not None:
        native.stop_huge_pages()
    for thread in running:
        thread.join()


# -- heaps

HEAP_BYTES = 4 << 20
"""Size from which a piece of memory is the system's own: at glibc's own 128 KB, prompts of a small model take a
fifth longer, because the pages of each piece are new."""

_M_MMAP_THRESHOLD = -3  # of malloc.h


@functools.cache
def hold_heaps_down() -> bool:
    """Have this process take pieces of `HEAP_BYTES` and more from the system, now and later.

    Returns:
        Whether it does: not where there is no glibc, and not where the environment has a size of its own
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
