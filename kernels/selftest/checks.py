"""Run every variant of every operation on this machine, and disable variants whose results are wrong.

`afm-mlx doctor` runs the whole test. `ensure_checked` runs a short one when a model is loaded for the first
time on a machine, and stores the verdict in a file, so that later starts don't repeat it. There is one file
for each combination of package version, MLX version, device, operating system and text of the kernels, in the
user's cache folder (or `AFM_MLX_CACHE`). It also names the variant that is being tested: one that kills the
process is recognized, and not run, the next time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import dispatch, settings
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.operands import NewToken
from afm_mlx.kernels.selftest.problems import UNIT_ROUNDOFF, Args, Problem, make
from afm_mlx.kernels.selftest.specs import Spec, quick_specs

_LARGEST_OF_REFERENCE = 1 << 26  # numbers of a matrix, of which it makes several float32 arrays
_BYTES_IN_TURN = 192 << 20  # more than the last-level cache of any Apple chip
_MOST_COPIES = 64
_CHAIN_SECONDS, _CHAINS = 0.02, 5
_MESSAGE = 600  # characters of an exception's text in a report

SWITCH = settings.SELFTEST

ENDED = "ended the process in the self-test"
TESTING_SECONDS = 600
"""Limit of the time in which a variant is tested, or a verdict is written."""

_SOURCES = (".py", ".metal", ".h", ".cpp")


class CheckResult(NamedTuple):
    """Result of one variant on one problem.

    Args:
        chosen: True if dispatch chooses this variant for such a call.
        obstacle: why the variant was not run; None if it was.
        error: relative to the answer's root mean square, see `Problem.error`; None without a result.
        bound: the largest error that rounding explains.
        failure: what is wrong with the variant; None if nothing is.
        seconds: time of a call in a chain of calls that wait for each other; None if it was not timed.
        nbytes: bytes that one call reads and writes.
    """

    spec: Spec
    variant: str
    chosen: bool = False
    obstacle: str | None = None
    error: float | None = None
    bound: float = 0.0
    failure: str | None = None
    seconds: float | None = None
    nbytes: int = 0

    @property
    def bytes_per_second(self) -> float | None:
        return self.nbytes / self.seconds if self.seconds else None

    @property
    def summary(self) -> str:
        """Problem and failure, in one clause."""
        return f"{self.spec.op}, {self.spec.label}: {self.failure}"


def check(
    specs: Sequence[Spec],
    rng: np.random.Generator,
    *,
    timed: bool = False,
    only_what_runs: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[CheckResult]:
    """Run every variant that can run here on every problem, and disable variants that fail.

    A variant fails if it raises, returns another shape or dtype, or is off by more than rounding explains. The
    reference can fail, too, but is never disabled: there is no other variant after it. With `only_what_runs`, a
    problem ends at the first variant that passes; with `timed`, calls are measured. `progress` is called before
    a variant runs, with specs done, specs in all, and the variant's name.
    """
    results, cases = [], []
    for done, spec in enumerate(specs):
        problem = make(spec, rng)
        # The reference dequantizes a matrix to float32, and a lookup dequantizes single rows only.
        large = (
            spec.op != "packed_embedding" and spec.in_dims * spec.out_dims > _LARGEST_OF_REFERENCE
        )
        for variant, obstacle in dispatch.explain(spec.op, problem.case):
            cases.append(problem.case)
            if variant.name == "reference" and large:
                obstacle = "not tested on a matrix of this size"
            if obstacle:
                results.append(CheckResult(spec, variant.name, obstacle=obstacle))
                continue
            if progress is not None:
                progress(done, len(specs), variant.name)
            results.append(_run(variant, problem, timed))
            if only_what_runs and results[-1].failure is None:
                break
    for result in results:
        if result.failure is not None and result.variant != "reference":
            dispatch.disable(result.variant, f"failed the self-test ({result.summary})")
    return [
        r._replace(chosen=dispatch.select(r.spec.op, case).name == r.variant)
        for r, case in zip(results, cases, strict=True)
    ]


def _run(variant: dispatch.Variant, problem: Problem, timed: bool) -> CheckResult:
    result = CheckResult(problem.spec, variant.name, bound=problem.bound, nbytes=problem.nbytes)
    try:
        outputs = variant.run(*problem.args)
        mx.eval(outputs)
        error = problem.error(outputs)
        result = result._replace(error=error)
        if not error <= problem.bound:
            failure = f"error {error:.1e} is over its bound, {problem.bound:.1e}"
            return result._replace(failure=failure)
        if timed:
            return result._replace(seconds=seconds_per_call(variant.run, problem))
    except Exception as error:  # a kernel's compiler, MLX or our code can raise anything
        words = " ".join(str(error).split())[:_MESSAGE]
        return result._replace(failure=f"{type(error).__name__}: {words}")
    return result


def failures(results: Sequence[CheckResult]) -> dict[str, str]:
    """Return the first failure of each variant that failed, and the variant that runs instead."""
    chosen = {r.spec: r.variant for r in results if r.chosen}
    found: dict[str, str] = {}
    for result in results:
        if result.failure is not None:
            instead = chosen[result.spec]
            instead = f"; {instead} runs instead" if instead != result.variant else ""
            found.setdefault(result.variant, result.summary + instead)
    return found


def record(
    verdict: Verdict,
    specs: Sequence[Spec],
    rng: np.random.Generator,
    *,
    progress: Callable[[int, int, str], None] | None = None,
    **options: bool,
) -> list[CheckResult]:
    """Run `check`, add its failures to the verdict, also if a variant kills the process; return its results."""

    def begin(done: int, total: int, variant: str) -> None:
        if variant != "reference":
            verdict.begin(variant)
        if progress is not None:
            progress(done, total, variant)

    try:
        results = check(specs, rng, progress=begin, **options)
    except BaseException:  # Ctrl-C, or a defect of this module: no failure of a variant
        verdict.forget(keep_ended=True)
        raise
    verdict.end({**failures(results), **verdict.failures})
    return results


@functools.cache
def ensure_checked() -> None:
    """Test this machine's kernels once; disable, with a warning, variants that fail or have failed before.

    The first time takes well under a second, plus the compiling of the kernels. Later starts read the verdict
    from its file, once in a process. `AFM_MLX_SELFTEST=0` disables the test.
    """
    # A variant that the user selected by name runs untested.
    settings.check()
    if dispatch.forced() or not settings.is_on(SWITCH):
        return
    verdict = Verdict()
    switch_off(verdict)
    if not verdict.done:
        dtype = mx.float32 if dispatch.device() == "cpu" else mx.bfloat16
        # Each tested kernel is compiled; kernels that the model compiles anyway cost nothing.
        record(verdict, quick_specs(dtype), np.random.default_rng(), only_what_runs=True)
    for name, reason in verdict.failures.items():
        fault = f"The kernel {name} failed its self-test on this machine and is switched off"
        if name == "reference":
            fault = "Plain MLX gives wrong results on this machine"
        more = "`afm-mlx doctor` shows more and writes a report to send in."
        warnings.warn(f"{fault} ({reason}). {more}", RuntimeWarning, stacklevel=2)


def switch_off(verdict: Verdict) -> None:
    """Disable the variants that the verdict lists."""
    for name, reason in verdict.failures.items():
        if name != "reference":
            dispatch.disable(name, f"failed the self-test ({reason})")


# -- the verdict, in a file


class Verdict:
    """The failures of variants that self-tests found on this machine, read from a file in the cache folder.

    `done` is True if the file is of a self-test that ended, in this process or an earlier one.
    """

    def __init__(self) -> None:
        self.done = False
        self.failures: dict[str, str] = {}
        self._key = _machine_key()
        digest = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:16]
        self._path = settings.cache_folder() / f"selftest-{digest}.json"
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            failures, running, pid = values["failures"], values["running"], int(values["pid"])
            if values["key"] != self._key:
                return
            self.failures = {str(name): str(reason) for name, reason in failures.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # no file yet, or a damaged one: the test runs again
        self.done = running is None
        # Another process may be testing now; after a restart, its id may belong to any process.
        if running is not None and (_age(self._path) > TESTING_SECONDS or not _is_alive(pid)):
            self.failures[running] = ENDED

    def begin(self, variant: str) -> None:
        """Write to the file that a variant is about to be tested; if that ends the process, it is a failure."""
        self._write(variant)

    def end(self, failures: dict[str, str]) -> None:
        """Record that the test has ended with these failures, and remove files of writes that were killed."""
        self.failures, self.done = dict(failures), True
        self._write(None)
        for path in self._path.parent.glob(f"selftest-*{settings.TEMPORARY}"):
            if _age(path) > TESTING_SECONDS:
                with contextlib.suppress(OSError):
                    path.unlink()

    def forget(self, *, keep_ended: bool = False) -> None:
        """Remove the file and all failures; `keep_ended` keeps failures of variants that killed a process."""
        kept = self.failures.items() if keep_ended else ()
        self.failures = {name: reason for name, reason in kept if reason == ENDED}
        self.done = False
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _write(self, running: str | None) -> None:
        values: dict[str, object] = {"key": self._key, "failures": self.failures}
        values |= {"running": running, "pid": os.getpid()}
        settings.write_json(self._path, values)


def _machine_key() -> dict[str, str]:
    """Return the properties of machine and installation on which a verdict depends."""
    status = extension.status()
    native = "none"
    if status.path is not None and status.available:
        file = status.path.stat()
        native = f"{file.st_size} {file.st_mtime_ns} {status.instruction_set}"
    return {
        "afm-mlx": _version("afm-mlx"),
        "mlx": _version("mlx"),
        "device": str(mx.default_device()),
        "name": str(mx.device_info().get("device_name", "")),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "kernels": _sources_digest(),
        "extension": native,
        "variants": " ".join(v.name for op in dispatch.OPS for v in dispatch.variants(op)),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _age(path: Path) -> float:
    """Return the seconds since a file was written; 0 if it doesn't exist."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # another user's process, or an impossible id
    return True


# -- time


def seconds_per_call(run: Callable[..., Any], problem: Problem) -> float:
    """Measure the median time of a call, in chains whose calls wait for each other's result.

    A call's first argument is the previous call's plus 0 times its result. The time of that addition is
    measured and subtracted. Calls use different weights and caches in turn, so that these come from memory.
    """
    copies = max(1, min(_MOST_COPIES, math.ceil(_BYTES_IN_TURN / problem.nbytes)))
    once = _chain_seconds(run, problem, [problem.args], 1)
    length = max(1, min(200, int(_CHAIN_SECONDS / once)))
    args = problem.fresh(min(copies, length))
    times, links = [], []
    for _ in range(_CHAINS):
        times.append(_chain_seconds(run, problem, args, length))
        links.append(_chain_seconds(None, problem, args, length))
        if sum(times) > 10 * _CHAIN_SECONDS:
            break
    return max(float(np.median(times) - np.median(links)), 1e-9) / length


def launch_seconds() -> float:
    """Measure the time of a small operation that waits for the one before: the cost of every launch."""
    length, times = 200, []
    for _ in range(_CHAINS):
        x = mx.zeros((2048,))
        for _ in range(length):
            x = x + 1.0
        times.append(_seconds_of(x))
    return float(np.median(times)) / length


def _chain_seconds(
    run: Callable[..., Any] | None, problem: Problem, args: Sequence[Args], length: int
) -> float:
    """Measure a chain of `length` calls of `run`; its additions alone if `run` is None."""
    first = problem.args[0]
    x = first.queries if isinstance(first, NewToken) else first
    for arguments in itertools.islice(itertools.cycle(args), length):
        y = x
        if run is not None:
            given = first._replace(queries=x) if isinstance(first, NewToken) else x
            y = run(given, *arguments[1:])
            if isinstance(y, tuple):
                y = next(o for o in y if o.dtype in UNIT_ROUNDOFF)
        x = x + (y[(0,) * y.ndim] * 0).astype(x.dtype)
    return _seconds_of(x)


def _seconds_of(x: mx.array) -> float:
    start = time.perf_counter()
    mx.eval(x)
    return time.perf_counter() - start
