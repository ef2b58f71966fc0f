"""Processor time that other programs take while a benchmark runs."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Bystanders:
    """Measures the processor time that other processes take after this object is made.

    On a busy machine the measurements of a benchmark mean little.

    Counts what `/proc/stat` says is busy (stolen by other virtual machines too), less this process and those
    of its children that have ended. Linux only.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Return seconds: of the clock, of all processors while busy, and of this process; None if unknown."""
        try:
            line = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), mine

    def processors(self) -> float | None:
        """Return the mean number of processors that other processes kept busy since this object was made."""
        end = self._now()
        if self._start is None or end is None:
            return None
        clock, busy, mine = (b - a for a, b in zip(self._start, end, strict=True))
        return max(0.0, (busy - mine) / clock)
