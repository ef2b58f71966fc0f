"""The report of `afm-mlx doctor`: the machine, and tests of all kernels on it.

Every function returns values that JSON can hold. A report names no user, no host and no folder.
"""

from __future__ import annotations

import datetime
import functools
import getpass
import math
import os
import platform
import re
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.selftest import checks, specs
from afm_mlx.kernels.selftest.checks import CheckResult, Verdict
from afm_mlx.kernels.selftest.specs import Spec
from afm_mlx.loading.missing_kernels import missing_kernels
from afm_mlx.measure import command_buffers
from afm_mlx.measure.describe import Facts, describe_runtime
from afm_mlx.measure.machine import Bandwidth, machine_memory, measure_bandwidth, threads_in_use
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import activation_dtype

FORMAT = 1
# GB/s as published; two where a chip is sold with two memory buses.
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


def examine(
    *,
    quick: bool = False,
    retry: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Test every variant that can run here, and describe the machine.

    Args:
        quick: True for a few problems without timing, in a second instead of a minute.
        retry: True to also run variants that ended the process the last time.
        seed: seed of the random inputs; by default a fresh one.
        progress: called with the numbers of problems done and in all.

    Returns:
        `ok`; `slow`, why models run without kernels made for this machine, or None; facts about the machine;
        `steps`, on Metal and unless `quick`, what `command_buffers.examine` finds; `kernels`, one line per
        operation and variant; `timed`, one per call that a 3B model makes and variant; `failures`; `problems`,
        all that was run.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    bandwidth = None if quick else measure_bandwidth(_threads())
    dtype = activation_dtype()
    small = specs.quick_specs(dtype) if quick else specs.full_specs()
    large = [] if quick else specs.model_specs(dtype)
    # First of all: what is compiled later is compiled once.
    steps = None if quick or not mx.metal.is_available() else _examine_steps()
    results, timed, failures = _test(small, large, retry, np.random.default_rng(seed), progress)
    date = datetime.datetime.now(datetime.UTC)
    facts = {
        "ok": not failures,
        "slow": missing_kernels() or None,
        "format": FORMAT,
        "date": date.isoformat(timespec="seconds"),
        "quick": quick,
        "seed": seed,
        "machine": describe_machine(bandwidth),
        "runtime": describe_runtime(),
        "native_extension": native_extension(),
        "asked_for": dispatch.forced() or None,
        "steps": steps,
        "kernels": _summaries([*results, *timed]),
        "timed": [_result_facts(r, bandwidth) for r in timed],
        "failures": failures,
        "problems": [_result_facts(r, None) for r in results if r.obstacle is None],
    }
    return without_private_words(facts)


def _examine_steps() -> Facts:
    try:
        return command_buffers.examine()
    except OSError as error:  # no failure of a kernel: these are tested next
        return {"not_run": str(error)}


def _test(
    small: Sequence[Spec],
    large: Sequence[Spec],
    retry: bool,
    rng: np.random.Generator,
    progress: Progress | None,
) -> tuple[list[CheckResult], list[CheckResult], dict[str, str]]:
    """Test the specs `small`, then test and time `large`; return the results of each, and the failures.

    Failures are stored for later starts. For `retry` and `progress`, see `examine`.
    """

    def report(done: int) -> None:
        if progress is not None:
            progress(done, len(small) + len(large))

    for name in dispatch.disabled():
        dispatch.enable(name)
    # A test of a variant selected by name is no verdict on the machine.
    verdict = None if dispatch.forced() else Verdict()
    check = checks.check
    if verdict is not None:
        verdict.forget(keep_ended=not retry)
        checks.switch_off(verdict)
        check = functools.partial(checks.record, verdict)
    results = check(small, rng, progress=lambda done, *_: report(done))
    timed = check(large, rng, timed=True, progress=lambda done, *_: report(len(small) + done))
    failures = checks.failures([*results, *timed]) if verdict is None else verdict.failures
    return results, timed, failures


def describe_machine(bandwidth: Bandwidth | None) -> Facts:
    """Describe chip, memory and system."""
    info = mx.device_info()
    chip = str(info.get("device_name", "")) or platform.processor()
    macos = platform.mac_ver()[0]
    facts: Facts = {
        "chip": chip,
        "architecture": info.get("architecture", platform.machine()),
        "threads": _threads(),
        "memory_gb": machine_memory() / 1e9,
        "system": f"macOS {macos}" if macos else f"{platform.system()} {platform.release()}",
        "launch_microseconds": checks.launch_seconds() * 1e6,
    }
    if bandwidth is not None:
        facts["bandwidth_gb_per_s"] = bandwidth.bytes_per_second / 1e9
        facts["bandwidth_measured_as"] = bandwidth.how
    if chip in PUBLISHED_BANDWIDTH:
        facts["bandwidth_published_gb_per_s"] = PUBLISHED_BANDWIDTH[chip]
    return facts


def _threads() -> int:
    """Return the number of threads that the native extension started, or would start."""
    return extension.status().threads or threads_in_use()


def native_extension() -> Facts | str:
    """Describe the C++ extension: how it was built and what it uses, or why it is not used."""
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
    """Summarize each variant of an operation: problems run, the worst, and why others were not run."""
    groups: dict[tuple[str, str], list[CheckResult]] = {}
    for result in results:
        groups.setdefault((result.spec.op, result.variant), []).append(result)
    summaries = []
    for (op, variant), group in groups.items():
        run = [r for r in group if r.obstacle is None]
        facts: Facts = {
            "op": op,
            "variant": variant,
            "problems": len(run),
            "failed": sum(r.failure is not None for r in run),
            "chosen": sum(r.chosen for r in group),
            "not_run": dict(Counter(r.obstacle for r in group if r.obstacle is not None)),
        }
        shares = [
            (math.inf if math.isnan(r.error) else float(r.error) / r.bound, r.spec.label)
            for r in run
            if r.error is not None
        ]
        if shares:
            share, label = max(shares, key=lambda pair: pair[0])
            facts |= {"worst_share_of_bound": share, "worst_case": label}
        summaries.append(facts)
    return summaries


# -- privacy


def without_private_words(value: Any) -> Any:
    """Return facts without the paths of folders, and the names of the user and the host."""
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
    # The last part of a path stays: it names the file.
    return re.sub(r"(?<![\w/])~?/(?:[^\s/:'\",;()]+/)+", "", value)


def _private_words() -> dict[str, str]:
    words = {str(Path.home()): "~", socket.gethostname(): "<host>"}
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # the user id has no name
        user = ""
    # "root" identifies nobody, and the word has other meanings.
    words.update({} if user == "root" else {user: "<user>"})
    return {word: stand_in for word, stand_in in words.items() if len(word) > 1}
