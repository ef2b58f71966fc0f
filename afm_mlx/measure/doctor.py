"""What this machine is, and whether every kernel works on it: a report as plain facts.

Every function returns values that JSON can hold. A report names no user, no host and no folder.
"""

from __future__ import annotations

import datetime
import getpass
import math
import os
import platform
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.selftest import checks, specs
from afm_mlx.kernels.selftest.checks import CheckResult
from afm_mlx.kernels.selftest.specs import Spec
from afm_mlx.kernels.selftest.verdict import Verdict
from afm_mlx.loading.load import activation_dtype
from afm_mlx.measure import describe
from afm_mlx.measure.bandwidth import Bandwidth, measure_bandwidth

FORMAT = 1
# GB/s as the makers publish them; two where a chip is sold with two memory buses.
PUBLISHED_BANDWIDTH = {
    "Apple M1": [68],
    "Apple M1 Pro": [200],
    "Apple M1 Max": [400],
    "Apple M1 Ultra": [800],
    "Apple M2": [100],
    "Apple M2 Pro": [200],
    "Apple M2 Max": [400],
    "Apple M2 Ultra": [800],
    "Apple M3": [100],
    "Apple M3 Pro": [150],
    "Apple M3 Max": [300, 400],
    "Apple M3 Ultra": [819],
    "Apple M4": [120],
    "Apple M4 Pro": [273],
    "Apple M4 Max": [410, 546],
    "Apple M5": [153],
    "Apple M5 Pro": [307],
    "Apple M5 Max": [460, 614],
}

Facts = dict[str, Any]
Progress = Callable[[int, int], None]


def examine(
    *,
    quick: bool = False,
    retry: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Test every variant that can run here, and say what the machine is.

    Args:
        quick: a second instead of a minute: a few problems, and nothing is timed.
        retry: also run variants that ended the process the last time.
        seed: of the random inputs; a fresh one by default.
        progress: called with (problems done, problems in all).

    Returns:
        `ok`; facts about the machine; `kernels`, one line per operation and variant; `timed`, one per call that
        a 3B model makes and variant; `failures`; `problems`, everything that was run.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    bandwidth = None if quick else measure_bandwidth(_threads())
    small, large = _specs(quick)
    results, timed, failures = _test(small, large, retry, np.random.default_rng(seed), progress)
    date = datetime.datetime.now(datetime.UTC)
    facts = {
        "ok": not failures,
        "format": FORMAT,
        "date": date.isoformat(timespec="seconds"),
        "quick": quick,
        "seed": seed,
        "machine": describe_machine(bandwidth),
        "runtime": describe.describe_runtime(),
        "native_extension": native_extension(),
        "asked_for": dispatch.forced() or None,
        "kernels": _summaries([*results, *timed]),
        "timed": [_result_facts(r, bandwidth) for r in timed],
        "failures": failures,
        "problems": [_result_facts(r, None) for r in results if r.obstacle is None],
    }
    return without_private_words(facts)


def _specs(quick: bool) -> tuple[list[Spec], list[Spec]]:
    dtype = activation_dtype()
    if quick:
        return specs.quick_specs(dtype), []
    return specs.full_specs(), specs.model_specs(dtype)


def _test(
    small: Sequence[Spec],
    large: Sequence[Spec],
    retry: bool,
    rng: np.random.Generator,
    progress: Progress | None,
) -> tuple[list[CheckResult], list[CheckResult], dict[str, str]]:
    """Results of both lists, and the failures, which are remembered for the next start."""
    total = len(small) + len(large)

    def report(done: int, _: int, variant: str, before: int = 0) -> None:
        if progress is not None:
            progress(before + done, total)

    def report_large(done: int, of: int, variant: str) -> None:
        report(done, of, variant, len(small))

    for name in dispatch.disabled():
        dispatch.enable(name)
    if dispatch.forced():  # a choice of the user's is no verdict on this machine
        results = checks.check(small, rng, progress=report)
        timed = checks.check(large, rng, timed=True, progress=report_large)
        return results, timed, checks.failures([*results, *timed])
    verdict = Verdict()
    verdict.forget(keep_ended=not retry)
    checks.switch_off(verdict)
    results = checks.record(verdict, small, rng, progress=report)
    timed = checks.record(verdict, large, rng, timed=True, progress=report_large)
    return results, timed, verdict.failures


def describe_machine(bandwidth: Bandwidth | None) -> Facts:
    """Chip, memory and system."""
    info = mx.device_info()
    chip = str(info.get("device_name", "")) or platform.processor()
    facts: Facts = {
        "chip": chip,
        "architecture": info.get("architecture", platform.machine()),
        "threads": _threads(),
        "memory_gb": _memory() / 1e9,
        "system": f"macOS {platform.mac_ver()[0]}" if platform.mac_ver()[0] else _linux(),
        "launch_microseconds": checks.launch_seconds() * 1e6,
    }
    if bandwidth is not None:
        facts["bandwidth_gb_per_s"] = bandwidth.bytes_per_second / 1e9
        facts["bandwidth_measured_as"] = bandwidth.how
    if chip in PUBLISHED_BANDWIDTH:
        facts["bandwidth_published_gb_per_s"] = PUBLISHED_BANDWIDTH[chip]
    return facts


def _linux() -> str:
    return f"{platform.system()} {platform.release()}"


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _threads() -> int:
    """Threads that the CPU's kernels use: by default the processors that this process may run on."""
    if threads := extension.status().threads:
        return threads
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def native_extension() -> Facts | str:
    """State of the C++ primitives: how they were built and what they use, or why they aren't used."""
    status = extension.status()
    if not status.available:
        return f"not used: {status.reason}"
    return {name: value for name, value in status._asdict().items() if value}


# -- results


def _result_facts(result: CheckResult, bandwidth: Bandwidth | None) -> Facts:
    facts: Facts = {
        "op": result.spec.op,
        "case": result.spec.label,
        "variant": result.variant,
        "chosen": result.chosen,
    }
    if result.obstacle is not None:
        return {**facts, "not_run": result.obstacle}
    facts.update(error=result.error, bound=result.bound, failure=result.failure)
    if result.seconds is not None and result.bytes_per_second is not None:
        facts["microseconds"] = result.seconds * 1e6
        facts["bytes"] = result.nbytes
        facts["gb_per_s"] = result.bytes_per_second / 1e9
        if bandwidth is not None:
            facts["share_of_bandwidth"] = result.bytes_per_second / bandwidth.bytes_per_second
    return facts


def _summaries(results: Sequence[CheckResult]) -> list[Facts]:
    """For each operation and variant: how many problems, the worst of them, and why others were not run."""
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        groups.setdefault((result.spec.op, result.variant), []).append(result)
    return [_summary(op, variant, group) for (op, variant), group in groups.items()]


def _summary(op: str, variant: str, results: Sequence[CheckResult]) -> Facts:
    run = [r for r in results if r.obstacle is None]
    reasons: dict[str, int] = {}
    for result in results:
        if result.obstacle is not None:
            reasons[result.obstacle] = reasons.get(result.obstacle, 0) + 1
    facts: Facts = {
        "op": op,
        "variant": variant,
        "problems": len(run),
        "failed": sum(r.failure is not None for r in run),
        "chosen": sum(r.chosen for r in results),
        "not_run": reasons,
    }
    measured = [r for r in run if r.error is not None]
    if measured:
        worst = max(measured, key=_share_of_bound)
        facts.update(worst_share_of_bound=_share_of_bound(worst), worst_case=worst.spec.label)
    return facts


def _share_of_bound(result: CheckResult) -> float:
    assert result.error is not None
    return math.inf if math.isnan(result.error) else float(result.error) / result.bound


# -- privacy


def without_private_words(value: Any) -> Any:
    """The same facts without folders, and without the names of the user and of the host."""
    if isinstance(value, dict):
        return {key: without_private_words(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_private_words(item) for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str):
        return value
    for word, stand_in in _private_words().items():
        value = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", stand_in, value)
    # Of a path, the last part says which file it was, and that is enough.
    return re.sub(r"(?<![\w/])~?/(?:[^\s/:'\",;()]+/)+", "", value)


def _private_words() -> dict[str, str]:
    words = {str(Path.home()): "~", socket.gethostname(): "<host>"}
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no name for the user's number
        user = ""
    # Every machine has a root, and the word has other meanings.
    words.update({} if user == "root" else {user: "<user>"})
    return {word: stand_in for word, stand_in in words.items() if len(word) > 1}
