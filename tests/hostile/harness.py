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
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from afm_mlx.errors import AFMError
from afm_mlx.kernels.settings import SettingError

TOTAL = int(os.environ.get("AFM_HOSTILE_CASES") or 2000)
SECONDS = 20
"""A case that takes longer hangs."""
MEMORY = 512 << 20
"""Bytes by which the process's peak may grow during one case."""
MESSAGE = 1200
"""Characters of an error's message; what it quotes of the input has to be cut."""


class Case(NamedTuple):
    """One hostile input: `what` for the report of a failure, and `run`, which uses it as a program would.

    `run` checks its own answer where the input is usable after all, and lets errors pass.
    """

    what: str
    run: Callable[[], Any]


def run_cases(
    generate: Callable[[np.random.Generator], Case], rng: np.random.Generator, share: float
) -> None:
    """Draw and run a share of all cases, each from a child of `rng`; check what every one must keep to."""
    count = max(1, round(TOTAL * share))
    for number, child in enumerate(rng.spawn(count)):
        case = generate(child)
        if broken := _broken(case):
            label = f"case {number} of {count}: {case.what[:2000]}"
            pytest.fail(f"{label}\n{broken}", pytrace=False)


def _broken(case: Case) -> str:
    """What a case does that none may; empty when it keeps to everything."""
    peak, start, message = _peak(), time.perf_counter(), None
    # Native code that hangs can't be interrupted: say where it is, and end the process.
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        case.run()
    except (AFMError, SettingError) as error:
        message = str(error)
    except Exception:
        return f"ended in a traceback:\n{traceback.format_exc()[-3000:]}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    seconds, grown = time.perf_counter() - start, _peak() - peak
    if message is not None and not message.strip():
        return "has an error without a word"
    if message is not None and len(message) > MESSAGE:
        return f"has an error of {len(message)} characters:\n{message[:3000]}"
    if seconds > SECONDS:
        return f"took {seconds:.0f} s"
    return f"took {grown / 1e6:,.0f} MB more than before" if grown > MEMORY else ""


def _peak() -> int:
    """The process's peak resident size, bytes; macOS counts in bytes and Linux in kilobytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
