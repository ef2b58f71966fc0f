"""Threads and memory of this process, and the memory of this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from afm_mlx.kernels import settings


def threads_in_use() -> int:
    """Threads that the CPU's kernels compute with: `AFM_MLX_THREADS`, or the cores of this process."""
    if (wanted := settings.threads()) is not None:
        return wanted
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_resident() -> bool:
    """Start the peak of `peak_resident` anew; returns whether the system can, which only Linux does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident() -> int | None:
    """Most bytes of memory that this process had since the last reset; None where Linux does not say."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else None
