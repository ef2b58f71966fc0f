"""What adapters cost at the 3B's shape: swapping, loading, decoding with one, and a batch with eight.

The model has random weights, and so have the adapters. Whatever is compared takes turns, so that a machine's
moods hit both alike.

    python -m bench.adapters --output results
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.active import (
    ActiveAdapters,
    BatchAdapters,
    attach_random_adapters,
    bind,
    detach_adapter,
    random_adapter,
    unbind,
)
from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import ResidentAdapter, build_resident
from afm_mlx.adapters.target_modules import target_shapes
from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.measure.benchmark import Bench, BenchmarkCase, count_operations
from afm_mlx.measure.machine import measure_bandwidth, threads_in_use
from afm_mlx.measure.random_model import random_packed_model
from bench.bystanders import Bystanders
from bench.targets import Target, markdown, report

SWAP_SECONDS = 1e-3
LOAD_SECONDS = 0.15
OF_NONE = 0.87
PROMPT_OF_NONE = 0.92
OF_ONE = 0.8
DISPATCHES = 380
NO_EXTRA = 1.05  # of a step, within what its own noise is

Figures = dict[str, Any]


def swaps(model: Any, ranks: Sequence[int], steps: int) -> Figures:
    """Measure seconds of a swap, of the token after it, and of tokens without a swap.

    Args:
        model: a model without an adapter.
        ranks: ranks of the two adapters that take turns.
        steps: number of tokens after a swap, and of tokens without one.
    """
    active, residents = bind(model), [_resident(model, rank, i) for i, rank in enumerate(ranks)]
    swapping = timed(_swap_to(active, r) for r in itertools.islice(itertools.cycle(residents), 200))
    active.set(None)
    token, cache = mx.zeros((1, 1), mx.int32), model.make_cache()
    model.prefill(mx.zeros((1, 8), mx.int32), cache)

    def step() -> None:
        mx.eval(model.greedy(token, cache)[0])

    # MLX computes the prompt with the first step that reads its keys and values: no adapter's time.
    step()
    first = []  # with each adapter: that may make a trace
    for resident in residents:
        _swap_to(active, resident)()
        first += timed([step])
    kept, swapped = [], []
    for resident in itertools.islice(itertools.cycle(residents), steps):
        swap = _swap_to(active, resident)
        swapped += timed([lambda swap=swap: (swap(), step())])
        kept += timed([step])
    unbind(model)
    return {
        "swap_seconds": statistics.median(swapping),
        "kept_seconds": statistics.median(kept),
        "after_swap_seconds": statistics.median(swapped),
        "first_ever_seconds": first,
    }


def _resident(model: Any, rank: int, seed: int) -> ResidentAdapter:
    return build_resident(random_adapter(model, rank, seed), 1.0, target_shapes(model), "random")


def _swap_to(active: ActiveAdapters, resident: ResidentAdapter) -> Callable[[], None]:
    return lambda: active.set(BatchAdapters.of([resident]))


def timed(calls: Any) -> list[float]:
    seconds = []
    for call in calls:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def loads(model: Any, rank: int, trials: int) -> Figures:
    """Measure seconds to load an adapter whose file is in the system's page cache.

    A virtual machine that has given memory back to its host gets it again at a tenth of the speed. So before
    each load as much memory as the adapter takes is written to and freed, which the load then finds; how long
    that took is a figure of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        tensors = {n: mx.array(t) for n, t in random_adapter(model, rank).items()}
        save_adapter(folder, tensors, AdapterConfig(rank, 1.0, len(model.layers)))
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        del tensors
        seconds, writing = [], []
        for _ in range(trials + 1):  # the first one is a warm-up
            # A pool remembers what it has loaded before: each load is the first one of its pool.
            with AdapterPool(model) as pool:
                pool.register("random", folder)
                writing += timed([lambda: np.empty(nbytes, np.uint8).fill(1)])
                seconds += timed([lambda pool=pool: pool.load("random")])
    return {"bytes": nbytes, "load_seconds": seconds[1:], "write_seconds": writing[1:]}


def in_turn(
    model: Any, cases: dict[str, BenchmarkCase], rounds: int
) -> Iterator[tuple[str, Bench, bool]]:
    """Yield a case's name, its benchmark, and False in the first round, which is a warm-up."""
    active, batches = bind(model), {name: _batch(model, case) for name, case in cases.items()}
    for turn in range(rounds + 1):
        for name, case in cases.items():
            with active.using(batches[name]):
                yield name, Bench(model, case, "int8", None, np.random.default_rng(turn)), turn > 0
    unbind(model)


def decoding(model: Any, cases: dict[str, BenchmarkCase], rounds: int) -> dict[str, list[float]]:
    """Measure decoding in tokens per second; return each round's value by case name. The cases take turns."""
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for name, bench, counts in in_turn(model, cases, rounds):
        bench.run(4)
        _, seconds = bench.run(bench.case.generated_tokens)
        if counts:
            rates[name].append(bench.case.batch * (bench.case.generated_tokens - 2) / seconds)
    return rates


def prompts(model: Any, cases: dict[str, BenchmarkCase], rounds: int) -> dict[str, list[float]]:
    """Measure prompts in tokens per second up to the first new token; return each round's value by case
    name.
    """
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for name, bench, counts in in_turn(model, cases, rounds):
        first, _ = bench.run(3)
        if counts:
            rates[name].append(bench.case.prompt_tokens / first)
    return rates


def _batch(model: Any, case: BenchmarkCase) -> BatchAdapters | None:
    """Make the random adapters of a case's rows, as a pool holds them; return None if its rank is 0."""
    if not case.adapter_rank:
        return None
    residents = [_resident(model, case.adapter_rank, seed) for seed in range(case.adapters)]
    return BatchAdapters.of([residents[row % len(residents)] for row in range(case.batch)])


def operations(model: Any) -> dict[str, int]:
    """Count the operations of a decode step without an adapter, with one, and of 8 rows with 8 ranks."""
    counts = {"none": count_operations(model)}
    attach_random_adapters(model, 16)
    counts["rank 16"] = count_operations(model)
    rows = [_resident(model, rank, rank) for rank in (8, 16, 32, 4, 12, 24, 20, 28)]
    bind(model).set(BatchAdapters.of(rows))
    counts["8 rows, 8 ranks"] = count_operations(model, batch=8)
    detach_adapter(model)
    return counts


def targets(figures: Figures) -> list[Target]:
    """Return the promised figures with the measured ones."""
    same, load, rates = figures["swaps"]["16 and 16"], figures["loads"], figures["decoding"]
    return [
        Target(
            "swap of a resident adapter", same["swap_seconds"] * 1e3, SWAP_SECONDS * 1e3, True, "ms"
        ),
        Target(
            "the token after a swap, over any other",
            same["after_swap_seconds"] / same["kept_seconds"],
            NO_EXTRA,
            True,
        ),
        Target(
            f"first load of {load['bytes'] / 1e6:.0f} MB from the page cache",
            statistics.median(load["load_seconds"]) * 1e3,
            LOAD_SECONDS * 1e3,
            True,
            "ms",
        ),
        Target(
            "decode with rank 16, over none",
            _ratio(rates["1 row, rank 16"], rates["1 row, none"]),
            OF_NONE,
        ),
        Target(
            "prompt with rank 16, over none",
            _ratio(figures["prompts"]["rank 16"], figures["prompts"]["none"]),
            PROMPT_OF_NONE,
        ),
        Target(
            "8 rows with 8 adapters, over with one",
            _ratio(rates["8 rows, 8 adapters"], rates["8 rows, 1 adapter"]),
            OF_ONE,
        ),
        Target(
            "operations a step, 8 rows with 8 ranks",
            figures["operations"]["8 rows, 8 ranks"],
            DISPATCHES,
            True,
            "",
        ),
    ]


def _ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of `rates` / `others`; both were measured close together in a round."""
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


def measure(preset: str, rank: int, rounds: int, generated: int) -> Figures:
    """Measure swaps, loads, decoding and prompts on one random model, and count operations; return the
    figures.
    """
    model = random_packed_model(PRESETS[preset])
    one = BenchmarkCase(16, generated, 1)
    eight = BenchmarkCase(16, generated, 8, adapter_rank=rank)
    return {
        "bandwidth_bytes_per_second": measure_bandwidth(threads_in_use()).bytes_per_second,
        "swaps": {
            f"{first} and {second}": swaps(model, (first, second), 4 * rounds)
            for first, second in ((16, 16), (16, 32))
        },
        "loads": loads(model, 32, rounds),
        "operations": operations(model),
        "prompts": prompts(
            model,
            {
                "none": BenchmarkCase(512, 3),
                f"rank {rank}": BenchmarkCase(512, 3, adapter_rank=rank),
            },
            rounds,
        ),
        "decoding": decoding(
            model,
            {
                "1 row, none": one,
                f"1 row, rank {rank}": BenchmarkCase(16, generated, 1, adapter_rank=rank),
                "8 rows, none": BenchmarkCase(16, generated, 8),
                "8 rows, 1 adapter": eight,
                "8 rows, 8 adapters": BenchmarkCase(
                    16, generated, 8, adapter_rank=rank, adapters=8
                ),
            },
            rounds,
        ),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="afm-3b")
    parser.add_argument("--rounds", type=integer(1), default=7, help="measured runs of every case")
    parser.add_argument("--generated", type=integer(1), default=24, help="tokens of an answer")
    parser.add_argument("--output", type=Path, help="folder for adapters.json, all figures")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    bystanders = Bystanders()
    figures = measure(options.preset, 16, options.rounds, options.generated)
    others = bystanders.processors()
    print(f"{options.preset}, random weights of 2 bits, {threads_in_use()} threads\n")
    rows = [["", "tokens/s, median", "least", "most"]]
    for kind, words in (("decoding", "decoding, "), ("prompts", "prompt of 512, ")):
        for name, rates in figures[kind].items():
            rows.append([words + name, *(f"{f(rates):.1f}" for f in (statistics.median, min, max))])
    print(markdown(rows))
    for pair, found in figures["swaps"].items():
        first = _milliseconds(found["first_ever_seconds"])
        swap, kept, after = (
            found[f"{name}_seconds"] * 1e3 for name in ("swap", "kept", "after_swap")
        )
        print(
            f"\nranks {pair}: a swap {swap:.3f} ms; a token {kept:.1f} ms, after a swap {after:.1f} ms, "
            f"with each for the first time {first} ms"
        )
    load = figures["loads"]
    print(
        f"\nloads: {_milliseconds(load['load_seconds'])} ms; writing to as much new memory before each: "
        f"{_milliseconds(load['write_seconds'])} ms"
    )
    counts = ", ".join(f"{name} {count}" for name, count in figures["operations"].items())
    print(f"\noperations a step: {counts}\n")
    path = None if options.output is None else options.output / "adapters.json"
    report(targets(figures), others, path, {"preset": options.preset, **figures})


def _milliseconds(seconds: Sequence[float]) -> str:
    return ", ".join(f"{each * 1e3:.0f}" for each in seconds)


if __name__ == "__main__":
    main()
