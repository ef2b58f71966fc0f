"""Apple's GPUs, and the time that a counted launch takes on them.

A `Launch` counts what one kernel launch does: each lane's operations by class, bytes that a lane loads, and
bytes that come from memory. `seconds` turns counts into time:

    seconds = launch + (memory^p + arithmetic^p)^(1/p)

Arithmetic is the cycles of a lane's operations, as published for M1 and M2, over the chip's lanes and clock;
memory is bytes over the chip's bandwidth. They overlap, and the longer one decides; where both take about as
long, a GPU reaches neither limit, which a maximum with a soft corner (p = 5) describes.

`product` prices a product of many rows by its floating-point operations instead: matrix kernels reach a share
of the peak that is published, whatever their instructions are.

Three terms are fitted to published speeds of MLX's kernels (`tests/metal/published.py`): the share of the
bandwidth that a kernel reaches, the corner, and what a launch costs. The model leaves out caches, clocks that
fall with heat, and which instructions Apple's compiler makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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

    @property
    def dies(self) -> str:
        """Of an Ultra there are two, with half of the memory each."""
        return "two dies" if self.name.endswith("Ultra") else "one die"

    @property
    def launch_class(self) -> str:
        """The key in `LAUNCH_SECONDS`."""
        if self.dies == "two dies":
            return self.dies
        return "from M5" if self.generation >= ACCELERATORS else "up to M4"

    @property
    def launch(self) -> float:
        """Seconds that a launch costs beyond its operations and bytes."""
        return LAUNCH_SECONDS[self.launch_class]


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
    "m3-ultra-60": Chip("Apple M3 Ultra", 60, 1.38, 819, 9),
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
FLOAT = {"float": 1.0, "bfloat_float": 1.0, "matrix": 18.0}
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
ACCELERATORS = 10  # first generation with neural accelerators (M5), which matrix products reach
# Taking in a bfloat is a shift for GPUs that don't know the type, and a move for others (a judgement). What
# those GPUs compute in bfloat they round in addition: a shift, and three operations on bits and integers.
BFLOAT_SHIFT, BFLOAT_MOVE = 4.0, 1.0
ROUNDING = 3.0
# Simdgroups that a core needs to start an operation every cycle: metal-benchmarks, "ALU Bottlenecks", four at
# a time.
BUSY_SIMDGROUPS = 12
CORE_BYTES = 64  # that a core's lanes load a cycle, from the nearest cache; same source
GPU_BYTES = 32  # that one core takes from the caches behind it
# Fitted, see `tests/metal/published.py`: the share of the published bandwidth and the corner on four times of
# matrices (M4 Pro), launches on half of the published speeds of models. A launch costs its start, the latency
# of its first loads, its last threadgroups' ends, and the processor's part. A chain of 3,200 kernels that do
# nothing takes 2.75 us each on an M3 Ultra (github.com/ml-explore/mlx/issues/4521).
BANDWIDTH_SHARE = 0.9
CORNER = 5.0
LAUNCH_SECONDS = {"up to M4": 2.45e-6, "from M5": 1.6e-6, "two dies": 4.25e-6}


def lane_cycles(launch: Launch, generation: int) -> float:
    """Count the cycles of one lane's operations on a core, when enough simdgroups run to keep it busy."""
    operations = launch.operations

    def of(prices: Mapping[str, float]) -> float:
        return sum(price * operations.get(kind, 0) for kind, price in prices.items())

    complex_cycles, starts = of(COMPLEX), of(dict.fromkeys(COMPLEX, COMPLEX_START))
    floats, integers = of(FLOAT), of(INTEGER)
    bfloats = operations.get("bfloat", 0)
    if generation <= SHARES_PIPELINES:
        rounded = operations.get("bfloat_float", 0)
        shifts = bfloats + 3 * rounded  # two operands and a result
        complex_cycles += BFLOAT_SHIFT * shifts
        main = floats + integers + COMPLEX_START * shifts + ROUNDING * rounded
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
        bandwidth = min(BANDWIDTH_SHARE * chip.bandwidth * 1e9, cores * GPU_BYTES * clock)
        memory += launch.memory_bytes / bandwidth
    fixed = len(launches) * chip.launch
    return Seconds(arithmetic, memory, fixed, fixed + overlapped(arithmetic, memory))


def overlapped(arithmetic: float, memory: float) -> float:
    """Compute the time of two parts, of which each alone would take so long, run side by side."""
    return (arithmetic**CORNER + memory**CORNER) ** (1 / CORNER)


def chain(
    steps: Iterable[tuple[int, Sequence[Launch]]], others: int, chip: Chip, other_bytes: float = 0
) -> Seconds:
    """Sum the time of steps that wait for each other.

    Launches that run concurrently share their work's time, but each costs its launch: so it is in the
    published speeds of models.

    Args:
        steps: pairs of a repeat count and the launches that run concurrently in the step.
        others: launches whose operations were not counted: small ones, or MLX's attention.
        chip: to run on.
        other_bytes: bytes that the uncounted launches read.
    """
    read = other_bytes / (BANDWIDTH_SHARE * chip.bandwidth * 1e9)
    launches = others * chip.launch
    uncounted = Seconds(0, read, launches, read + launches)
    return sum((seconds(step, chip).times(count) for count, step in steps), uncounted)


# -- products of many rows

WAYS = ("dequantize + matmul", "MLX qmm", "MLX qmm_nax", "own tiled", "matmul")
"""Ways to multiply more rows than a kernel for vectors takes; "matmul" is of dense matrices, of 16 bits."""
_KERNELS = dict(zip(WAYS, ("matmul", "qmm", "qmm", "tiled", "matmul"), strict=True))
# Multiply-adds a cycle of a core's accelerators, in units of what its lanes do: "over 4x the peak GPU compute
# for AI compared to M4" (Apple, October 2025).
ACCELERATED = 4
UNPACKED = 1 << 25  # numbers that are unpacked at a time, see kernels/metal/prompts.py
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


def rate(chip: Chip, kernel: str, *, half: bool = False, share: float | None = None) -> float:
    """Return the floating-point operations a second of one of `SHARES`' kernels on large matrices."""
    peak = 2.0 * LANES * chip.cores * chip.gigahertz * 1e9
    if chip.generation >= ACCELERATORS and (found := SHARES[kernel][3]):
        return (share or found) * ACCELERATED * peak
    found = SHARES[kernel][2 if chip.generation > SHARES_PIPELINES else 0 if half else 1]
    assert found is not None
    return (share or found) * peak


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
    accelerated = chip.generation >= ACCELERATORS
    if way == "MLX qmm_nax" and not accelerated:
        raise ValueError(f"{chip.name} has no neural accelerators; take another of {WAYS}.")
    kernel = _KERNELS[way]
    tile = 64 if kernel == "matmul" or (accelerated and kernel == "qmm") else 32
    tiles = -(-rows // tile) * -(-n // tile)
    flops = 2.0 * tiles * tile * tile * k
    busy = min(1.0, tiles / chip.cores)
    arithmetic = flops / (busy * rate(chip, kernel, half=half, share=share))
    bandwidth = BANDWIDTH_SHARE * chip.bandwidth * 1e9
    dense, activations = 2.0 * n * k / bandwidth, 2.0 * rows * (n + k) / bandwidth
    packed = (n * k * bits / 8 + (4 * n * k / group if group else 4 * n)) / bandwidth
    if way != "dequantize + matmul":
        memory = (dense if way == "matmul" else packed) + activations
        total = chip.launch + overlapped(arithmetic, memory)
        return Seconds(arithmetic, memory, chip.launch, total)
    blocks = -(-n // max(1, UNPACKED // k))
    unpacking, multiplying = packed + dense, dense + activations
    # Blocks of results are copied together.
    joining = 4.0 * rows * n / bandwidth if blocks > 1 else 0.0
    launches = (2 * blocks + (blocks > 1)) * chip.launch
    total = launches + unpacking + overlapped(arithmetic, multiplying) + joining
    return Seconds(arithmetic, unpacking + multiplying + joining, launches, total)


def between(
    outputs: int, others: int, attention: int, tokens: int, chip: Chip, *, half: bool = False
) -> Seconds:
    """Compute the time of what a block does between its products, for a prompt that nothing precedes.

    Causal attention runs at the speed of dense products. Norms, RoPE, activations and sums are a pass over the
    products' results.

    Args:
        outputs: of the block's products, together.
        others: launches besides the products.
        attention: width of all heads' queries.
        tokens: of the prompt.
    """
    # Two products of tokens x tokens x width, half of which the mask leaves out.
    arithmetic = 2.0 * attention * tokens**2 / rate(chip, "matmul", half=half)
    memory = 4.0 * tokens * outputs / (BANDWIDTH_SHARE * chip.bandwidth * 1e9)
    launches = others * chip.launch
    return Seconds(arithmetic, memory, launches, arithmetic + memory + launches)
