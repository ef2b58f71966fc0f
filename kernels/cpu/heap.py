"""Freed memory goes back to the system instead of staying in the C library's heaps.

glibc takes a large piece of memory from the system by itself, and gives it back when it is freed. But with each
one freed it takes larger pieces, up to 32 MB, from its heaps, and keeps twice that size of free memory at their
ends. So the memory of a process that runs requests grows for a long time. Fixing the size from which pieces are
the system's own stops both: from 128 KB on, what is free at a heap's end is given back ("Memory over time" in
docs/benchmarks.md).
"""

from __future__ import annotations

import ctypes
import functools
import os

BYTES = 4 << 20
"""Size from which a piece of memory is the system's own: at glibc's own 128 KB, prompts of a small model take a
fifth longer, because the pages of each piece are new."""

_M_MMAP_THRESHOLD = -3  # of malloc.h


@functools.cache
def hold_heaps_down() -> bool:
    """Have this process take pieces of `BYTES` and more from the system, now and later.

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
    return bool(mallopt(_M_MMAP_THRESHOLD, BYTES))
