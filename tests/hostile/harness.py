"""Runs generated hostile inputs: each must give a right answer or one error of ours, soon and in little memory.

A generator is a function of a random generator that returns a `Case`. `run_cases` draws as many as its share of
all cases is worth, and fails with the seed and the number of the first case that breaks the promise.

    AFM_HOSTILE_CASES   cases of all generators together: 2,000 by default, 20,000 in `make fuzz`
    AFM_TEST_SEED       of the draws; a failure prints it
"""

from __future__ import annotations

import faulthandler
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from afm_mlx.errors import AFMError
from afm_mlx.kernels.errors import SettingError

TOTAL = int(os.environ.get("AFM_HOSTILE_CASES") or 2000)
SECONDS = 20
"""A case that takes longer hangs."""
MEMORY = 512 << 20
"""Bytes by which the process's peak may grow during one case."""
MESSAGE = 1200
"""Characters of an error's message; what it quotes of the input has to be cut."""


@dataclass
class Case:
    """One hostile input.

    Args:
        what: the input in a few words, or as text, for the report of a failure.
        run: uses the input as a program would. It checks its own answer where the input is usable after all,
            and lets errors pass.
    """

    what: str
    run: Callable[[], Any]


def share(fraction: float) -> int:
    """Cases of a generator that is worth this fraction of all."""
    return max(1, round(TOTAL * fraction))


def run_cases(
    generate: Callable[[np.random.Generator], Case], rng: np.random.Generator, count: int
) -> None:
    """Draw and run cases, and check what every one must keep to.

    Args:
        generate: draws a case.
        rng: of the test; every case gets a child of it.
        count: how many.
    """
    for number, child in enumerate(rng.spawn(count)):
        case = generate(child)
        _run(case, f"case {number} of {count}: {case.what[:2000]}")


def _run(case: Case, label: str) -> None:
    peak, start = _peak(), time.perf_counter()
    # Native code that hangs can't be interrupted: say where it is, and end the process.
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        case.run()
    except (AFMError, SettingError) as error:
        _check_message(str(error), label)
    except Exception:
        pytest.fail(
            f"{label}\nended in a traceback:\n{traceback.format_exc()[-3000:]}", pytrace=False
        )
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds, grown = time.perf_counter() - start, _peak() - peak
    if seconds > SECONDS:
        pytest.fail(f"{label}\ntook {seconds:.0f} s", pytrace=False)
    if grown > MEMORY:
        pytest.fail(f"{label}\ntook {grown / 1e6:,.0f} MB more than before", pytrace=False)


def _check_message(message: str, label: str) -> None:
    if not message.strip():
        pytest.fail(f"{label}\nhas an error without a word", pytrace=False)
    if len(message) > MESSAGE:
        pytest.fail(
            f"{label}\nhas an error of {len(message)} characters:\n{message[:3000]}", pytrace=False
        )


def _peak() -> int:
    """The process's peak resident size, bytes; macOS counts in bytes and Linux in kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024
