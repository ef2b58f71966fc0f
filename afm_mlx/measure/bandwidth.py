"""How fast this machine reads memory: the limit that decoding one token at a time runs into.

What is measured is the best of several passes of a reduction over a buffer that is larger than any cache. On a
GPU that is MLX's maximum. On a CPU it is NumPy's maximum of bytes, each thread in a part of its own, in a child
process so that the buffer does not count as the caller's memory. On the CPU that this was checked on (Xeon,
AVX-512, 2 threads) a hand-written loop of 64-byte loads reads 1 % faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

_CPU_BYTES = 1 << 30  # server processors have hundreds of megabytes of cache
_GPU_BYTES = 1 << 29
_PASSES = 7


class Bandwidth(NamedTuple):
    """A measured rate of reading memory.

    Args:
        bytes_per_second: rate of the best pass.
        how: what was run, for the reader of a report.
    """

    bytes_per_second: float
    how: str


def measure_bandwidth(threads: int) -> Bandwidth:
    """Measure where MLX runs by default: the GPU, or `threads` threads of the CPU.

    Takes about a second and half a gigabyte (GPU) or a gigabyte (CPU) of memory while it runs.

    Raises:
        ValueError: when `threads` is below 1.
    """
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return measure_cpu_bandwidth(threads)
    measured = _measure_gpu()
    mx.clear_cache()  # MLX would keep the memory of the buffer for later arrays
    return measured


def measure_cpu_bandwidth(threads: int, size: int = _CPU_BYTES) -> Bandwidth:
    """Measure with `threads` threads of the CPU and a buffer of `size` bytes, in a process of its own."""
    if threads < 1:
        raise ValueError(f"[measure_cpu_bandwidth] threads is {threads}; at least 1 is needed.")
    # The child finds this package where the parent found it, installed or not.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "afm_mlx.measure.bandwidth", str(threads), str(size)],
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
    """Bytes per second of the fastest pass of `threads` threads over `size` bytes, in this process."""
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
    """Seconds of the fastest of several passes."""
    seconds = []
    for _ in range(_PASSES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(read_rate(int(sys.argv[1]), int(sys.argv[2]))))
