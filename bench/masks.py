"""What task masks gain at the 3B's shape: decoding at several kept shares, first and later swaps.

The model has random weights of 2 bits, and the masks random groups, as many in every block. Shares take turns,
so that a machine's moods hit all alike. A decode step with a share is to be as much faster as the bytes that it
reads are fewer.

    python -m bench.masks --output results
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.task_mask import GROUP, TaskMask, feed_forwards, write_mask
from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.measure.benchmark import BenchmarkCase, step_cost
from afm_mlx.measure.machine import threads_in_use
from afm_mlx.measure.random_model import random_packed_model
from bench.adapters import timed
from bench.bystanders import Bystanders
from bench.targets import Target, markdown, report

SHARES = (1.0, 0.5, 0.25)
OF_BYTES = 0.9
FIRST_SECONDS = 0.2
SWAP_SECONDS = 1e-3

Figures = dict[str, Any]


def random_mask(model: Any, share: float, group: int, seed: int) -> TaskMask:
    """Return a mask of random groups, a share of each block's, rounded."""
    rng, layers = np.random.default_rng(seed), feed_forwards(model)
    groups = layers[0].width // group
    order = rng.permuted(np.tile(np.arange(groups), (len(layers), 1)), axis=1)
    return TaskMask(order < max(1, round(groups * share)), group)


def decoding(model: Any, shares: tuple[float, ...], group: int, steps: int) -> Figures:
    """Measure seconds of single steps of one row, and count the bytes of a step, by share.

    The shares take turns step by step, each with its own cache of 16 tokens and more.
    """
    active, token = bind(model), mx.zeros((1, 1), mx.int32)
    batches: dict[float, BatchAdapters | None] = dict.fromkeys(shares)
    caches: dict[float, Any] = {}
    seconds: dict[float, list[float]] = {share: [] for share in shares}
    step_bytes: dict[float, int] = {}
    with tempfile.TemporaryDirectory() as folder, AdapterPool(model) as pool:
        for index, share in enumerate(shares):
            if share < 1:
                place = Path(folder) / str(share)
                write_mask(place, random_mask(model, share, group, index))
                pool.register(str(share), place)
                batches[share] = BatchAdapters.everywhere(pool.load(str(share)))
            with active.using(batches[share]):
                cost = step_cost(model, BenchmarkCase(16, steps, 1), "int8")
                step_bytes[share] = cost.step_bytes
                caches[share] = model.make_cache()
                model.prefill(mx.zeros((1, 16), mx.int32), caches[share])
        for turn in range(steps + 3):  # the first ones trace the step, and warm up
            for share, batch in batches.items():
                with active.using(batch):
                    taken = timed([lambda s=share: mx.eval(model.greedy(token, caches[s])[0])])
                seconds[share] += taken if turn >= 3 else []
    return {"step_seconds": seconds, "bytes": step_bytes}


def swaps(model: Any, share: float, group: int, trials: int) -> Figures:
    """Measure seconds of the first swap to a mask, from its files until it can run, and of later swaps."""
    active, firsts, writing, later = bind(model), [], [], []

    def swap(pool: AdapterPool, name: str) -> None:
        active.set(BatchAdapters.everywhere(pool.load(name)))

    with tempfile.TemporaryDirectory() as folder:
        for index in range(2):
            write_mask(Path(folder) / str(index), random_mask(model, share, group, index))
        for _ in range(trials + 1):  # the first one is a warm-up
            with AdapterPool(model) as pool:
                for index in range(2):
                    pool.register(str(index), Path(folder) / str(index))
                nbytes = pool.load("1").nbytes
                # A virtual machine gets memory that it has given back slowly: see bench.adapters.
                writing += timed([partial(np.empty(nbytes, np.uint8).fill, 1)])
                firsts += timed([partial(swap, pool, "0")])
                later += timed([partial(swap, pool, str(i % 2)) for i in range(1, 21)])[1:]
                active.set(None)
    return {
        "bytes": nbytes,
        "first_seconds": firsts[1:],
        "write_seconds": writing[1:],
        "swap_seconds": later,
    }


def measure(preset: str, group: int, rounds: int, steps: int) -> Figures:
    model = random_packed_model(PRESETS[preset])
    return {
        "swaps": swaps(model, 0.5, group, rounds),
        "decoding": decoding(model, SHARES, group, steps),
    }


def targets(figures: Figures) -> list[Target]:
    found, swap = figures["decoding"], figures["swaps"]
    steps, nbytes = found["step_seconds"], found["bytes"]
    rows = []
    for share in SHARES[1:]:
        promised = nbytes[1.0] / nbytes[share]
        gain = statistics.median(a / b for a, b in zip(steps[1.0], steps[share], strict=True))
        rows.append(
            Target(
                f"share {share}: {gain:.2f} x as fast, over {promised:.2f} x fewer bytes",
                gain / promised,
                OF_BYTES,
            )
        )
    first, later = (statistics.median(swap[f"{name}_seconds"]) * 1e3 for name in ("first", "swap"))
    return [
        *rows,
        Target("first swap to a share of 0.5", first, FIRST_SECONDS * 1e3, True, "ms"),
        Target("later swap, in the pool", later, SWAP_SECONDS * 1e3, True, "ms"),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.masks", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="afm-3b")
    parser.add_argument("--group", type=integer(1), default=GROUP, help="channels of a group")
    parser.add_argument("--rounds", type=integer(1), default=7, help="first swaps")
    parser.add_argument("--steps", type=integer(3), default=100, help="steps with every share")
    parser.add_argument("--output", type=Path, help="folder for masks.json, all figures")
    options = parser.parse_args(argv)
    bystanders = Bystanders()
    figures = measure(options.preset, options.group, options.rounds, options.steps)
    others = bystanders.processors()
    print(
        f"{options.preset}, random weights of 2 bits, groups of {options.group}, {threads_in_use()} threads\n"
    )
    rows = [["kept share", "tokens/s, median", "quarter at most", "quarter at least", "MB a step"]]
    found = figures["decoding"]
    for share, steps in found["step_seconds"].items():
        late, middle, early = statistics.quantiles(sorted(1 / each for each in steps), n=4)
        megabytes = found["bytes"][share] / 1e6
        rows.append([str(share), *(f"{n:.1f}" for n in (middle, late, early)), f"{megabytes:.0f}"])
    print(markdown(rows))
    swap = figures["swaps"]
    for name in ("first", "write"):
        times = ", ".join(f"{s * 1e3:.0f}" for s in swap[f"{name}_seconds"])
        print(f"{name}: {times} ms for {swap['bytes'] / 1e6:.0f} MB")
    path = None if options.output is None else options.output / "masks.json"
    report(targets(figures), others, path, {"preset": options.preset, **figures})


if __name__ == "__main__":
    main()
