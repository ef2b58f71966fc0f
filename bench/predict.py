"""Predict decode speed on Apple GPUs with a cost model, for chips that nobody here has.

    python -m bench.predict m4-max [--preset afm-3b] [--output md|csv|json]

A `Launch` counts what one kernel launch does: each lane's operations by class, bytes that a lane loads, and
bytes that come from memory. Counting needs a compiler, so `make costs` does it beforehand and stores the counts
of the presets in `prediction.json`. This module turns counts into seconds:

    seconds = launch + (memory^p + arithmetic^p)^(1/p)

Arithmetic is the cycles of a lane's operations, as published for M1 and M2, over the chip's lanes and clock;
memory is bytes over the chip's bandwidth. They overlap, and the longer one decides; where both take about as
long, a GPU reaches neither limit, which a maximum with a soft corner (p = 5) describes. Two numbers are
fitted, only on figures of MLX's kernels on one chip: the corner, and the share of the published bandwidth
that a kernel reaches (docs/benchmarks.md has the table, with figures that nothing was fitted on).

The model leaves out caches, the latency of loads where few threads run, the processor's part in a
launch, clocks that fall with heat, and which instructions Apple's compiler makes.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from afm_mlx.config import PRESETS

from .targets import markdown

DATA = Path(__file__).with_name("prediction.json")

# -- chips


class Chip(NamedTuple):
    """A chip's GPU.

    Args:
        name: as MLX names the device.
        cores: of the GPU, 128 lanes each.
        gigahertz: highest clock of the GPU.
        bandwidth: of memory as Apple publishes it, in GB/s.
        generation: Apple's number of the GPU family; from 9 on (M3), integer and float operations run side by
            side.
    """

    name: str
    cores: int
    gigahertz: float
    bandwidth: float
    generation: int

    @property
    def label(self) -> str:
        return f"{self.name.removeprefix('Apple ')}, {self.cores} cores"


# Clocks: metal-benchmarks (M1, M2) and eclecticlight.co (M3 Pro, M4 Pro), who measured them, and hmc-tech.com
# (M4, M5). For M3, M3 Max, M4 Max, M5 Pro and M5 Max a sibling's stands here.
CHIPS = {
    "m1": Chip("Apple M1", 8, 1.278, 68, 7),
    "m1-pro": Chip("Apple M1 Pro", 16, 1.296, 200, 7),
    "m1-max": Chip("Apple M1 Max", 32, 1.296, 400, 7),
    "m1-ultra": Chip("Apple M1 Ultra", 64, 1.296, 800, 7),
    "m2": Chip("Apple M2", 10, 1.398, 100, 8),
    "m2-pro": Chip("Apple M2 Pro", 19, 1.398, 200, 8),
    "m2-max": Chip("Apple M2 Max", 38, 1.398, 400, 8),
    "m2-ultra": Chip("Apple M2 Ultra", 76, 1.398, 800, 8),
    "m3": Chip("Apple M3", 10, 1.38, 100, 9),
    "m3-pro": Chip("Apple M3 Pro", 18, 1.38, 150, 9),
    "m3-max": Chip("Apple M3 Max", 40, 1.38, 400, 9),
    "m3-max-30": Chip("Apple M3 Max", 30, 1.38, 300, 9),
    "m3-ultra": Chip("Apple M3 Ultra", 80, 1.38, 819, 9),
    "m4": Chip("Apple M4", 10, 1.47, 120, 9),
    "m4-pro": Chip("Apple M4 Pro", 20, 1.578, 273, 9),
    "m4-max": Chip("Apple M4 Max", 40, 1.578, 546, 9),
    "m4-max-32": Chip("Apple M4 Max", 32, 1.578, 410, 9),
    "m5": Chip("Apple M5", 10, 1.74, 153, 10),
    "m5-pro": Chip("Apple M5 Pro", 20, 1.74, 307, 10),
    "m5-max": Chip("Apple M5 Max", 40, 1.74, 614, 10),
    "m5-max-32": Chip("Apple M5 Max", 32, 1.74, 460, 10),
}


# -- launches


class Launch(NamedTuple):
    """The counted work of one kernel launch.

    Args:
        kernel: its name.
        threadgroups: number of threadgroups.
        simdgroups: number of simdgroups, of 32 lanes each.
        operations: number of operations of one lane, by class.
        lane_bytes: bytes that one lane loads and stores, from caches or memory.
        memory_bytes: bytes that are read from or written to memory, each counted once.
    """

    kernel: str
    threadgroups: int
    simdgroups: int
    operations: Mapping[str, int]
    lane_bytes: int
    memory_bytes: int


class Seconds(NamedTuple):
    """Time of launches, in seconds.

    Args:
        arithmetic: time if memory and launches cost nothing.
        memory: time if arithmetic and launches cost nothing.
        launch: fixed cost of the launches.
        total: time of all three, overlapped.
    """

    arithmetic: float
    memory: float
    launch: float
    total: float

    def __add__(self, other: object) -> Seconds:
        assert isinstance(other, Seconds)
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Seconds:
        return Seconds(*(count * part for part in self))


NOTHING = Seconds(0, 0, 0, 0)

# Cycles of 32 lanes, M1 and M2: github.com/philipturner/metal-benchmarks, "Instruction Throughputs".
# The four schedulers of a core start one of these a cycle each:
FLOAT = {"float": 1.0, "matrix": 18.0}
INTEGER = {"bit": 1.0, "integer": 1.0}
ACCESS = {"load": 1.0, "store": 1.0}
# A quarter of the lanes does these, while schedulers go on with others:
COMPLEX = {
    "convert": 4.0,
    "shift": 4.0,
    "multiply": 4.0,
    "exponent": 4.0,
    "reciprocal": 6.0,
    "root": 8.0,
    "power": 9.0,
    "sine": 14.3,
    "divide": 30.0,
    "shuffle": 2.04,
    "reduction": 14.5,
}
# Cycles that starting a complex operation keeps others waiting: of "EXP2 + 3 FMUL" and the like, same source.
COMPLEX_START = 2.0
LANES = 128  # of a core
SHARES_PIPELINES = 8  # last generation whose integer and float operations share them
# Taking in a bfloat is a shift for GPUs that don't know the type, and a move for others (a judgement).
BFLOAT_SHIFT, BFLOAT_MOVE = 4.0, 1.0
# Simdgroups that a core needs to start an operation every cycle: metal-benchmarks, "ALU Bottlenecks", four at
# a time.
BUSY_SIMDGROUPS = 12
CORE_BYTES = 64  # that a core's lanes load a cycle, from the nearest cache; same source
GPU_BYTES = 32  # that one core takes from the caches behind it
# A chain of 3,200 small dependent kernels of MLX takes 8.8 ms: github.com/ml-explore/mlx/issues/4521.
LAUNCH_SECONDS = 2.75e-6
# Fitted on the four figures of github.com/ml-explore/mlx/issues/3852 (M4 Pro), see tests/metal/published.py.
BANDWIDTH_SHARE = 0.9
CORNER = 5.0


def lane_cycles(launch: Launch, generation: int) -> float:
    """Count the cycles of one lane's operations on a core, when enough simdgroups run to keep it busy."""
    operations = launch.operations

    def of(prices: Mapping[str, float]) -> float:
        return sum(price * operations.get(kind, 0) for kind, price in prices.items())

    complex_cycles, starts = of(COMPLEX), of(dict.fromkeys(COMPLEX, COMPLEX_START))
    floats, integers = of(FLOAT), of(INTEGER)
    bfloats = operations.get("bfloat", 0)
    if generation <= SHARES_PIPELINES:
        complex_cycles += BFLOAT_SHIFT * bfloats
        main = floats + integers + COMPLEX_START * bfloats
    else:
        main = max(floats, integers + BFLOAT_MOVE * bfloats)
    loads = launch.lane_bytes * LANES / CORE_BYTES
    return max(complex_cycles, main + of(ACCESS) + starts, loads)


def seconds(launches: Sequence[Launch], chip: Chip) -> Seconds:
    """Compute the time of launches that run concurrently on a chip."""
    clock = chip.gigahertz * 1e9
    arithmetic = memory = 0.0
    for launch in launches:
        cores = min(chip.cores, launch.threadgroups)
        slow = max(1.0, BUSY_SIMDGROUPS * cores / launch.simdgroups)
        cycles = lane_cycles(launch, chip.generation) * launch.simdgroups * 32 / (LANES * cores)
        arithmetic += slow * cycles / clock
        rate = min(BANDWIDTH_SHARE * chip.bandwidth * 1e9, cores * GPU_BYTES * clock)
        memory += launch.memory_bytes / rate
    total = LAUNCH_SECONDS + (arithmetic**CORNER + memory**CORNER) ** (1 / CORNER)
    return Seconds(arithmetic, memory, LAUNCH_SECONDS, total)


def chain(
    steps: Iterable[tuple[int, Sequence[Launch]]], others: int, chip: Chip, other_bytes: float = 0
) -> Seconds:
    """Sum the time of steps that wait for each other.

    Args:
        steps: pairs of a repeat count and the launches that run concurrently in the step.
        others: launches whose operations were not counted: small ones, or MLX's attention.
        chip: to run on.
        other_bytes: bytes that the uncounted launches read.
    """
    read = other_bytes / (BANDWIDTH_SHARE * chip.bandwidth * 1e9)
    launches = others * LAUNCH_SECONDS
    uncounted = Seconds(0, read, launches, read + launches)
    return sum((seconds(step, chip).times(count) for count, step in steps), uncounted)


# -- products of many rows

WAYS = ("dequantize + matmul", "MLX qmm", "MLX qmm_nax", "own tiled")
"""Ways to multiply more rows than a kernel for vectors takes: see `product`."""
NAX_GENERATION = 10  # first with neural accelerators (M5), which only matrix products reach
# Multiply-adds a cycle of a core's accelerators, in units of what its lanes do: "over 4x the peak GPU compute
# for AI compared to M4" (Apple, October 2025).
NAX_RATE = 4
UNPACKED = 1 << 25  # numbers that are unpacked at a time, see kernels/metal/matmul.py
# Shares of the peak that kernels reach on large matrices, from published times of single products:
# (up to M2 in half, up to M2 in bfloat16, from M3 on, on the accelerators).
SHARES = {
    # mlx#1518 (M2 Ultra, 20 TFLOPS); in bfloat16 6/7 of it on an M2 Pro (raullenchai/Rapid-MLX#3058);
    # mlx#3196 (M3 Ultra with 60 cores, 17.5 to 18.9 TFLOPS); mlx#3211 (M5 Max, 53 to 58 TFLOPS)
    "matmul": (0.74, 0.64, 0.85, 0.79),
    # mlx#4216 (M1 Max: 17.2 and 30.6 ms), since mlx#4241 some 20 % faster in bfloat16; mlx#3852 and mlx#3863
    # (M4 Pro, M3 Max, 32 rows); jundot/omlx#2657 (M5 Max, 7.5 to 16 ms)
    "qmm": (0.74, 0.50, 0.79, 0.70),
    # llama.cpp's mul_mm, 4 bits: 232.6 tokens/s of a 7B on an M1 Pro with 14 cores, 341.7 on an M3 Pro
    # (gist.github.com/andrewginns/cf95867c2d79458bd894c07b9e7d5cbd)
    "tiled": (0.66, 0.66, 0.71, None),
}


def product(
    way: str,
    rows: int,
    n: int,
    k: int,
    bits: int,
    chip: Chip,
    *,
    group: int = 0,
    half: bool = False,
    share: float | None = None,
) -> Seconds:
    """Compute the time of a product of `rows` vectors with a packed matrix (n, k), from 33 rows on.

    `seconds = launches + (flops / (share * peak) and bytes / bandwidth, overlapped)`, with rows and columns
    rounded up to whole tiles. Dequantizing is a pass of its own over bytes, before the product.

    Args:
        way: one of `WAYS`. With neural accelerators, `matmul` uses them, and "MLX qmm" is "MLX qmm_nax".
        group: weights that share a scale and a bias of 16 bits; 0 for a scale per row.
        half: activations are float16 instead of bfloat16, which matters up to M2.
        share: of the peak, for a kernel that is none of `SHARES`.

    Raises:
        ValueError: for "MLX qmm_nax" on a chip without neural accelerators.
    """
    accelerated = chip.generation >= NAX_GENERATION
    if way == "MLX qmm_nax" and not accelerated:
        raise ValueError(f"{chip.name} has no neural accelerators; take another of {WAYS}.")
    kernel = {"dequantize + matmul": "matmul", "own tiled": "tiled"}.get(way, "qmm")
    uses_accelerators = accelerated and kernel != "tiled"
    column = (
        3 if uses_accelerators else 2 if chip.generation > SHARES_PIPELINES else 0 if half else 1
    )
    part = share or SHARES[kernel][column] or 0.0
    tile = 32 if kernel != "matmul" and not uses_accelerators else 64
    tiles = -(-rows // tile) * -(-n // tile)
    flops = 2.0 * tiles * tile * tile * k
    cores = min(chip.cores, tiles)
    peak = cores * LANES * 2 * chip.gigahertz * 1e9 * (NAX_RATE if uses_accelerators else 1)
    arithmetic = flops / (part * peak)
    rate = BANDWIDTH_SHARE * chip.bandwidth * 1e9
    packed = n * k * bits / 8 + (4 * n * k / group if group else 4 * n)
    activations = 2.0 * rows * (n + k)
    if way != "dequantize + matmul":
        memory = (packed + activations) / rate
        overlapped = (arithmetic**CORNER + memory**CORNER) ** (1 / CORNER)
        return Seconds(arithmetic, memory, LAUNCH_SECONDS, LAUNCH_SECONDS + overlapped)
    blocks = -(-n // max(1, UNPACKED // k))
    unpacking = (packed + 2.0 * n * k) / rate
    multiplying = (2.0 * n * k + activations) / rate
    joining = 4.0 * rows * n / rate if blocks > 1 else 0.0  # blocks of results are copied together
    overlapped = (arithmetic**CORNER + multiplying**CORNER) ** (1 / CORNER)
    launches = (2 * blocks + (blocks > 1)) * LAUNCH_SECONDS
    memory = unpacking + multiplying + joining
    return Seconds(arithmetic, memory, launches, launches + unpacking + joining + overlapped)


# -- what was counted

CONTEXTS = (512, 4096)
"""Tokens in the cache, the new one included, that steps were counted for."""


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8"))


def _launch(number: int) -> Launch:
    return Launch(*_data()["launches"][number])


def _steps(stored: Iterable[Sequence[Any]]) -> list[tuple[int, list[Launch]]]:
    """Convert stored steps, `[count, launch]` or `[count, [launch, ...]]`, to launches."""
    return [
        (count, [_launch(n) for n in (which if isinstance(which, list) else [which])])
        for count, which in stored
    ]


class Prediction(NamedTuple):
    """Predicted figures of a preset's decode step on a chip.

    Args:
        seconds: time of a token.
        nbytes: bytes that a token reads: weights, and keys and values of the context.
        dispatches: kernel launches of a token.
        limit: seconds that these bytes take at the chip's published bandwidth.
        over_mlx: time of MLX's own kernel (`affine_qmv_fast`, groups of 64) on the blocks' layers, divided by
            the time of our kernels, which also do norms, SwiGLU and sums; None where MLX has no such kernel.
    """

    seconds: Seconds
    nbytes: int
    dispatches: int
    limit: float
    over_mlx: float | None

    @property
    def tokens_per_second(self) -> float:
        return 1 / self.seconds.total

    @property
    def share(self) -> float:
        """Share of the published bandwidth that the step reaches."""
        return self.limit / self.seconds.total


def predict(preset: str, context: int, chip: Chip) -> Prediction:
    """Predict one row's decode step of a preset, in the format that `bench --random-weights` fills."""
    stored = _data()["presets"][preset]
    step = stored["steps"][str(context)]
    launches, others, nbytes = _steps(step["launches"]), step["others"], step["bytes"]
    ours = chain(_steps(step["products"]), 0, chip).total
    over_mlx = chain(_steps(stored["mlx"]), 0, chip).total / ours if stored["mlx"] else None
    dispatches = others + sum(count for count, _ in launches)
    limit = nbytes / (chip.bandwidth * 1e9)
    counted = sum(count * sum(l.memory_bytes for l in each) for count, each in launches)
    total = chain(launches, others, chip, max(0, nbytes - counted))
    return Prediction(total, nbytes, dispatches, limit, over_mlx)


# -- the command

TITLES = (
    "chip|cores|GB/s|context|decode tok/s|arithmetic ms|memory ms|launches ms|MB/token|dispatches|of limit|"
    "over MLX"
).split("|")
NOTE = """
A prediction, not a measurement: no Mac was used. Operations of the Metal kernels were counted in their text
and priced as published for M1 and M2; clocks, bandwidths and the cost of a launch are published, too. Most
published speeds of MLX's own kernels are within 15 % of what this model says, and rather lower
(docs/benchmarks.md). "over MLX" is how much longer MLX's own kernel would take for the blocks' layers, at the
same bits in groups of 64."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the predicted decode speed of a preset on one chip or on all of them."""
    parser = argparse.ArgumentParser(
        prog="bench.predict", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("chip", choices=[*CHIPS, "all"], help="chip to predict for")
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="afm-3b", help="sizes of an architecture"
    )
    parser.add_argument(
        "--output", "-o", choices=["md", "csv", "json"], default="md", help="output format"
    )
    args = parser.parse_args(argv)
    names = list(CHIPS) if args.chip == "all" else [args.chip]
    rows = [facts(args.preset, name, context) for name in names for context in CONTEXTS]
    if args.output == "json":
        print(json.dumps({"predicted": True, "preset": args.preset, "results": rows}, indent=2))
    elif args.output == "csv":
        writer = csv.DictWriter(sys.stdout, ["predicted", "preset", *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"predicted": True, "preset": args.preset} | row for row in rows)
    else:
        print(f"predicted: one row of {args.preset}, packed as bench --random-weights packs it\n")
        print(markdown([TITLES, *map(_cells, rows)]))
        print(NOTE)


def facts(preset: str, name: str, context: int) -> dict[str, Any]:
    """Return the predicted figures of a preset on the chip called `name`, in bytes and seconds."""
    chip = CHIPS[name]
    found = predict(preset, context, chip)
    return {
        "chip": name,
        "gpu_cores": chip.cores,
        "bandwidth_bytes_per_second": chip.bandwidth * 1e9,
        "context": context,
        "decode_tokens_per_second": found.tokens_per_second,
        "seconds": found.seconds.total,
        "arithmetic_seconds": found.seconds.arithmetic,
        "memory_seconds": found.seconds.memory,
        "launch_seconds": found.seconds.launch,
        "bytes_per_token": found.nbytes,
        "dispatches_per_token": found.dispatches,
        "share_of_bandwidth": found.share,
        "over_mlx": found.over_mlx,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    parts = (row[f"{part}_seconds"] for part in ("arithmetic", "memory", "launch"))
    return [
        row["chip"],
        str(row["gpu_cores"]),
        f"{row['bandwidth_bytes_per_second'] / 1e9:.0f}",
        f"{row['context']:,}",
        f"{row['decode_tokens_per_second']:.0f}",
        *(f"{part * 1e3:.2f}" for part in parts),
        f"{row['bytes_per_token'] / 1e6:.0f}",
        str(row["dispatches_per_token"]),
        f"{row['share_of_bandwidth']:.0%}",
        "-" if row["over_mlx"] is None else f"{row['over_mlx']:.2f}x",
    ]


if __name__ == "__main__":
    main()
