"""Freed memory goes back to the system instead of staying in the C library's heaps.

glibc keeps what is freed in its heaps, where one small piece that lives keeps all that lies below it; and
MLX's thread frees what other threads have made. So a process that runs requests holds more than anybody uses.
Asked for, that comes back: processes of 123 to 161 MB went to 86 to 94, until the next requests ("Memory over
time" in docs/benchmarks.md). Taking every large piece from the system by itself keeps memory level
(`M_MMAP_THRESHOLD`), but then a prompt of the embedded model takes a fifth longer.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

SECONDS = 10.0
"""Seconds between two requests to glibc, each of which takes milliseconds."""

_lock = threading.Lock()
_last = 0.0


def give_freed_memory_back() -> bool:
    """Have glibc give the system what was freed, unless that was less than `SECONDS` ago.

    Returns:
        Whether it was asked to: never where there is no glibc.
    """
    global _last
    with _lock:
        now = time.monotonic()
        if now < _last + SECONDS or (trim := _malloc_trim()) is None:
            return False
        _last = now
    trim(0)
    return True


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
