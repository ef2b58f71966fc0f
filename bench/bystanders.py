"""Processor time that other programs take while a benchmark runs."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Bystanders:
    """Processor time that others take from here on: on a busy machine, what is measured means little.

    Counts what `/proc/stat` says is busy (stolen by other virtual machines too), less this process and those
    of its children that have ended. Linux only.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all processors that were busy, and our own of those."""
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
        """How many processors others kept busy on average since the start."""
        end = self._now()
        if self._start is None or end is None:
            return None
        clock, busy, mine = (b - a for a, b in zip(self._start, end, strict=True))
        return max(0.0, (busy - mine) / clock)
