"""Memory bandwidth, memory and threads of this machine and process.

Decoding one token at a time is limited by the speed of reading memory. It is measured as the best of several
passes of a reduction over a buffer larger than any cache: on a GPU MLX's maximum; on a CPU NumPy's maximum of
bytes, with a part for each thread, in a child process, because the buffer would count as the caller's memory.
On a Xeon with AVX-512 and 2 threads, a hand-written loop of 64-byte loads reads 1 % faster.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from afm_mlx.kernels import settings

_CPU_BYTES = 1 << 30  # server processors have hundreds of megabytes of cache
_GPU_BYTES = 1 << 29
_PASSES = 7


class Bandwidth(NamedTuple):
    """A measured rate of reading memory."""

    bytes_per_second: float
    how: str  # description of the measurement, for reports


def measure_bandwidth(threads: int) -> Bandwidth:
    """Measure the bandwidth of MLX's default device: the GPU, or `threads` threads of the CPU.

    Takes about a second, and half a gigabyte (GPU) or a gigabyte (CPU) of memory.
    """
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return measure_cpu_bandwidth(threads)
    measured = _measure_gpu()
    mx.clear_cache()  # else MLX keeps the buffer's memory for later arrays
    return measured


def measure_cpu_bandwidth(threads: int, size: int = _CPU_BYTES) -> Bandwidth:
    """Measure with `threads` threads of the CPU and a buffer of `size` bytes, in a child process."""
    if threads < 1:
        raise ValueError(f"[measure_cpu_bandwidth] threads is {threads}; at least 1 is needed.")
    # The child finds this package where the parent did, installed or not.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "afm_mlx.measure.machine", str(threads), str(size)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    word = "thread" if threads == 1 else "threads"
    return Bandwidth(
        json.loads(done.stdout), f"NumPy's maximum of bytes, {threads} {word}, best pass"
    )


def read_rate(threads: int, size: int) -> float:
    """Return the bytes per second of the fastest of several passes over `size` bytes, in this process."""
    import numpy as np

    buffer = np.ones(size, dtype=np.uint8)  # ones, because untouched zeros share one page
    parts = np.array_split(buffer, threads)
    with ThreadPoolExecutor(threads) as pool:
        return size / _best(lambda: list(pool.map(np.max, parts)))


def _measure_gpu() -> Bandwidth:
    import mlx.core as mx

    buffer = mx.ones((_GPU_BYTES // 4,), dtype=mx.uint32)
    mx.eval(buffer)
    seconds = _best(lambda: mx.eval(mx.max(buffer)))
    return Bandwidth(_GPU_BYTES / seconds, "MLX's maximum of integers on the GPU, best pass")


def _best(run: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several passes."""
    seconds = []
    for _ in range(_PASSES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# -- threads and memory


def threads_in_use() -> int:
    """Return the number of threads of the CPU kernels: `AFM_MLX_THREADS`, or the process's cores."""
    if (wanted := settings.threads()) is not None:
        return wanted
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def reset_peak_resident() -> bool:
    """Reset the peak of `peak_resident`; return True if the system can, which only Linux does."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_resident() -> int | None:
    """Return the process's peak memory in bytes since the last reset; None if Linux does not report it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else None


if __name__ == "__main__":
    print(json.dumps(read_rate(int(sys.argv[1]), int(sys.argv[2]))))
