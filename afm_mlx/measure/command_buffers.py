"""What MLX does around Metal's kernels: compiling them, and collecting them in command buffers.

MLX hands launches to the GPU in command buffers. It ends one when it has more than a number of operations, or
reads more than a number of megabytes: 40 and 40 on M chips and their Pros, 50 and 50 on Max and Ultra, 20 and
40 on phones (`Device::Device` in `mlx/backend/metal/device.cpp`; an element of an array counts as a byte).
Variables of the environment replace these numbers; MLX reads them once, when it first uses the GPU. So each
setting is measured in a process of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from afm_mlx.config import PRESETS
from afm_mlx.measure.describe import Facts

OPERATIONS, MEGABYTES = "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER"
SETTINGS: tuple[tuple[int, int], ...] = ((100, 100), (200, 400), (500, 2000))
"""Operations and megabytes that are tried besides what is set now, or MLX's own choice."""
GAIN = 1.03
"""Another setting must be this many times as fast to be recommended: less may be chance."""

_BLOCKS, _REUSE_BLOCKS = 16, 6  # of the 3B: a third of it
_TOKENS, _REPETITIONS = 64, 3
_MAX_BATCH = 8  # as a server's


def examine(run: Callable[[tuple[int, int] | None], Facts] | None = None) -> Facts:
    """Measure compiling, and decode steps with several sizes of command buffers.

    Args:
        run: measures with a setting, or with the environment as it is (None); by default in a child process.

    Returns:
        `compiling` (`libraries`, `seconds`); `command_buffers`, one entry for each setting (`operations`,
        `megabytes`, None for both where nothing was changed; `tokens_per_second`); and `recommended`, the
        variables to set, or None.
    """
    run = in_child if run is None else run
    found = run(None)
    buffers = [_entry(None, found)]
    buffers += [_entry(setting, run(setting)) for setting in SETTINGS]
    now, best = buffers[0], max(buffers, key=lambda each: each["tokens_per_second"])
    is_faster = best["tokens_per_second"] >= GAIN * now["tokens_per_second"]
    return {
        "compiling": found["compiling"],
        "command_buffers": buffers,
        "recommended": _variables((best["operations"], best["megabytes"])) if is_faster else None,
    }


def _entry(setting: tuple[int, int] | None, found: Facts) -> Facts:
    operations, megabytes = setting or (None, None)
    return {
        "operations": operations,
        "megabytes": megabytes,
        "tokens_per_second": found["tokens_per_second"],
    }


def _variables(setting: tuple[int, int]) -> dict[str, str]:
    return {OPERATIONS: str(setting[0]), MEGABYTES: str(setting[1])}


def in_child(setting: tuple[int, int] | None) -> Facts:
    """Return what `measure` finds in a child process with a setting; raise `OSError` if that fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
    environment |= {} if setting is None else _variables(setting)
    command = [sys.executable, "-m", "afm_mlx.measure.command_buffers"]
    command += ["compile"] if setting is None else []
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise OSError(f"a process that timed decode steps ended with {done.returncode}: {last}")
    found: Facts = json.loads(done.stdout)
    return found


def measure(compiling: bool) -> Facts:
    """Time decode steps of a third of a 3B model in this process; with `compiling`, compile first."""
    from afm_mlx.engine.warm_up import warm_up
    from afm_mlx.measure.benchmark import BenchmarkCase, run_case
    from afm_mlx.measure.random_model import random_packed_model

    config = dataclasses.replace(
        PRESETS["afm-3b"], num_layers=_BLOCKS, num_kv_reuse_layers=_REUSE_BLOCKS
    )
    model = random_packed_model(config)
    facts: dict[str, Any] = {}
    if compiling:
        start = time.perf_counter()
        libraries = [name for name in warm_up(model, _MAX_BATCH, drafts=True) if name]
        facts["compiling"] = {
            "libraries": len(libraries),
            "seconds": time.perf_counter() - start,
        }
    result = run_case(model, BenchmarkCase(_TOKENS, _TOKENS), _REPETITIONS)
    return {**facts, "tokens_per_second": result.decode.median}


if __name__ == "__main__":
    print(json.dumps(measure("compile" in sys.argv[1:])))
