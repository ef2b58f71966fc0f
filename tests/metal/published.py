"""Published speeds of MLX's own kernels, and what the cost model says to them.

    python -m tests.metal.published

Each figure names its source. What was not published (activations' type, a chip's core count) is said, too.

Three terms of the model are fitted to these figures, the others judge it:

- the share of bandwidth and the corner, to the four times of matrices on an M4 Pro;
- the cost of a launch, by class of chip, to every second of the models' decode speeds, in the order of chips
  and names, beginning with the first. Those between them are judged.

The ranges of `bench.predict` are of the judged figures' errors and, with the halves exchanged, of the others'.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np

from bench import apple_gpus
from bench.apple_gpus import CHIPS, LAUNCH_SECONDS, Chip, Launch, Seconds

from . import mlx_wheel
from .cost import Argument, count

QUANTIZED = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")
HALF, BFLOAT = "half", "bfloat16_t"
SIZES = {"half": 2, "bfloat16_t": 2, "float": 4}
GITHUB = "https://github.com"


@functools.cache
def qmv(kind: str, bits: int, group: int, n: int, k: int) -> Launch:
    """MLX's `affine_qmv_fast` for one vector: a matrix (n, k) of codes, activations and scales of a type.

    It takes multiples of 8 outputs and 512 inputs. Others go to a slower kernel, which is counted as this one
    with the next multiple: its tail keeps arrays where no register can.
    """
    n, k = -(-n // 8) * 8, -(-k // 512) * 512
    template = f"{kind}, {group}, {bits}, false"
    unit = mlx_wheel.source("quantized.h", "affine_qmv_fast", template, before=QUANTIZED)
    size = SIZES[kind]
    sizes = [Argument(name, 4, np.array(value, np.int32)) for name, value in (("K", k), ("N", n))]
    arguments = [
        Argument("w", n * k * bits // 8),
        *(Argument(name, n * k // group * size) for name in ("scales", "biases")),
        *(Argument(name, length * size) for name, length in (("x", k), ("y", n))),
        *sizes,
        *(Argument(name, 8, np.zeros(1, np.int64)) for name in "abcdefgh"),
    ]
    return count("affine_qmv_fast", unit, arguments, (32, 2 * (n // 8), 1), (32, 2, 1))


def sums_in_bfloat(launch: Launch, bits: int, k: int) -> Launch:
    """The launch as MLX had it before 0.32.4, when `qmv` added up to 6 bits' inputs in their own type.

    Of every 16 inputs of a lane, four sums of four were rounded three times each.
    """
    rounded = 12 * k // 512 if bits <= 6 else 0
    counts = dict(launch.operations)
    counts |= {"bfloat_float": rounded, "float": counts["float"] - rounded}
    return launch._replace(operations=counts)


class Layers(NamedTuple):
    """Layers of one kind.

    Args:
        count: how many there are.
        steps: for each product that waits for the one before: (N, K) of the matrices side by side.
        others: launches of a layer besides, as mlx-lm's code has them.
        attention: width of its queries; 0 where its work doesn't grow with the context.
    """

    count: int
    steps: tuple[tuple[tuple[int, int], ...], ...]
    others: int
    attention: int = 0


class Model(NamedTuple):
    """A model of mlx-lm: its layers, (N, K) of its head, the format of its weights.

    `token_bytes` are read besides, such as keys and values.
    """

    layers: tuple[Layers, ...]
    head: tuple[int, int]
    kind: str
    bits: int
    group: int
    token_bytes: float = 0

    def decode(self, chip: Chip) -> Seconds:
        """The time of a token, with the MLX of the figures."""

        def launch(n: int, k: int) -> Launch:
            if self.bits == 16:  # bytes alone
                return Launch("gemv", n // 8, n // 4, {}, 0, 2 * n * k)
            found = qmv(self.kind, self.bits, self.group, n, k)
            return sums_in_bfloat(found, self.bits, k) if self.kind == BFLOAT else found

        steps = [
            (part.count, list(itertools.starmap(launch, shapes)))
            for part in self.layers
            for shapes in part.steps
        ]
        steps.append((1, [launch(*self.head)]))
        # Embedding, last norm, and the choice of a token in four.
        others = sum(part.count * part.others for part in self.layers) + 6
        return apple_gpus.chain(steps, others, chip, self.token_bytes)

    def prefill(self, chip: Chip, tokens: int) -> Seconds:
        """The time to a prompt's first token: all its tokens but one without the head, then a decode step."""
        way = "MLX qmm" if self.bits < 16 else "matmul"
        return self.multiply(chip, tokens - 1, way) + self.decode(chip)

    def multiply(self, chip: Chip, tokens: int, way: str) -> Seconds:
        """The time of all layers for a prompt's tokens."""
        total, half = apple_gpus.NOTHING, self.kind == HALF
        for part in self.layers:
            shapes = list(itertools.chain.from_iterable(part.steps))
            for n, k in shapes:
                seconds = apple_gpus.product(
                    way, tokens, n, k, self.bits, chip, group=self.group, half=half
                )
                total += seconds.times(part.count)
            outputs = sum(n for n, _ in shapes)
            rest = apple_gpus.between(outputs, part.others, part.attention, tokens, chip, half=half)
            total += rest.times(part.count)
        return total


# Launches of a layer of mlx-lm's code that are no product: norms, RoPE of queries and of keys, updates of both,
# attention, two sums, SwiGLU. `test_published.py` counts them in that code.
OTHERS = {"llama": 10, "qwen2": 13, "qwen3": 12, "phi3": 12, "gemma3_text": 21}
TWO_PASSES = 1024  # tokens from which on attention takes two launches


def transformer(
    family: str, layers: int, hidden: int, queries: int, keys: int, ffn: int, vocab: int, /,
    kind: str, bits: int = 4, group: int = 64, context: int = 64,
) -> Model:  # fmt: skip
    """A model of one of `OTHERS`' families; widths of all heads' queries and keys."""
    steps = [
        ((queries, hidden), (keys, hidden), (keys, hidden)),
        ((hidden, queries),),
        ((ffn, hidden), (ffn, hidden)),
        ((hidden, ffn),),
    ]
    if family == "phi3":  # one matrix each
        steps[0], steps[2] = ((queries + 2 * keys, hidden),), ((2 * ffn, hidden),)
    others = OTHERS[family] + (context >= TWO_PASSES)
    kv = 2.0 * 2 * keys * layers * context
    return Model(
        (Layers(layers, tuple(steps), others, queries),), (vocab, hidden), kind, bits, group, kv
    )


LLAMA_1B = functools.partial(transformer, "llama", 16, 2048, 2048, 512, 8192, 128256)
LLAMA_8B = functools.partial(transformer, "llama", 32, 4096, 4096, 1024, 14336, 128256)
MISTRAL_7B = functools.partial(transformer, "llama", 32, 4096, 4096, 1024, 14336, 32768)
QWEN25_05B = functools.partial(transformer, "qwen2", 24, 896, 896, 128, 4864, 151936)
QWEN25_7B = functools.partial(transformer, "qwen2", 28, 3584, 3584, 512, 18944, 152064)
QWEN25_14B = functools.partial(transformer, "qwen2", 48, 5120, 5120, 1024, 13824, 152064)
QWEN3_06B = functools.partial(transformer, "qwen3", 28, 1024, 2048, 1024, 3072, 151936)
QWEN3_4B = functools.partial(transformer, "qwen3", 36, 2560, 4096, 1024, 9728, 151936)
QWEN3_8B = functools.partial(transformer, "qwen3", 36, 4096, 4096, 1024, 12288, 151936)
PHI35_MINI = functools.partial(transformer, "phi3", 32, 3072, 3072, 3072, 8192, 32064)
GEMMA3_1B = functools.partial(transformer, "gemma3_text", 26, 1152, 1024, 256, 6912, 262144)
GEMMA3_4B = functools.partial(transformer, "gemma3_text", 34, 2560, 2048, 1024, 10240, 262208)
GEMMA3_27B = functools.partial(transformer, "gemma3_text", 62, 5376, 4096, 2048, 21504, 262208)
BONSAI_8B = transformer("qwen3", 36, 4096, 4096, 1024, 12288, 151936, kind=HALF, bits=2, group=128)
# Qwen3.6's 27B: three of four layers have a recurrent state of 48 heads x 128 x 128 floats, read and written.
_MLP = (((17408, 5120), (17408, 5120)), ((5120, 17408),))
BONSAI_27B = Model(
    (
        Layers(48, (((10240, 5120), (6144, 5120), (48, 5120), (48, 5120)), ((5120, 6144),), *_MLP), 18),
        Layers(16, (((12288, 5120), (1024, 5120), (1024, 5120)), ((5120, 6144),), *_MLP), 14, 6144),
    ),
    (248320, 5120), HALF, 2, 128, 2 * 48 * 48 * 128 * 128 * 4,
)  # fmt: skip


class Figure(NamedTuple):
    """A published figure: milliseconds of a matrix, or tokens per second of a model.

    Args:
        chip: its name in `CHIPS`.
        runs: a `Model`, or the arguments of `qmv`.
        prompt: tokens of the prompt whose speed it is; 0 for a token after it.
        peer: True for llama.cpp, whose tiled kernel the model prices, too.
        note: what the source leaves open.
    """

    what: str
    chip: str
    measured: float
    runs: Model | tuple[str, int, int, int, int]
    source: str
    note: str = ""
    prompt: int = 0
    peer: bool = False

    @property
    def unit(self) -> str:
        return "tokens/s" if isinstance(self.runs, Model) else "ms"

    def seconds(self) -> Seconds:
        chip = CHIPS[self.chip]
        if not isinstance(self.runs, Model):
            return apple_gpus.seconds([qmv(*self.runs)], chip)
        if self.peer:
            return self.runs.multiply(chip, self.prompt, "own tiled")
        return self.runs.prefill(chip, self.prompt) if self.prompt else self.runs.decode(chip)

    def predicted(self) -> float:
        total = self.seconds().total
        return (self.prompt or 1) / total if isinstance(self.runs, Model) else 1e3 * total

    def off(self) -> float:
        """How much longer (positive) or shorter the prediction takes than what was measured."""
        ratio = self.predicted() / self.measured
        return (1 / ratio if isinstance(self.runs, Model) else ratio) - 1


_MLX, _MLX_LM = f"{GITHUB}/ml-explore/mlx", f"{GITHUB}/ml-explore/mlx-lm"
_DEMO = f"{GITHUB}/PrismML-Eng/Bonsai-demo/pull"
_RAPID = f"{GITHUB}/raullenchai/Rapid-MLX/pull"
_MLXCEL = f"{GITHUB}/lablup/mlxcel/blob/main/docs/benchmark_results"
_UNKNOWN, _CORES = "type of activations not given", "cores not given"


def _matrices() -> Iterator[Figure]:
    for bits, n, ms in (2, 17408, 0.121), (4, 17408, 0.198), (2, 248320, 1.539), (4, 248320, 2.725):
        what, shape = f"{n} x 5120, {bits} bits, groups of 128", (HALF, bits, 128, n, 5120)
        yield Figure(what, "m4-pro", ms, shape, f"{_MLX}/issues/3852", _UNKNOWN)
    for bits, ms in (2, 0.072), (4, 0.126):
        what, shape = f"17408 x 5120, {bits} bits, groups of 128", (HALF, bits, 128, 17408, 5120)
        yield Figure(what, "m3-max", ms, shape, f"{_MLX}/issues/3852", _CORES)
    for n, k, ms in (4096, 4096, 0.093), (14336, 4096, 0.415), (4096, 14336, 0.246):
        what, shape = f"{n} x {k}, 4 bits, groups of 64", (HALF, 4, 64, n, k)
        yield Figure(what, "m5", ms, shape, f"{_MLX}/pull/3753")
    times = {
        (4096, 4096): (0.039, 0.038),
        (11008, 4096): (0.072, 0.110),
        (4096, 11008): (0.075, 0.098),
    }
    note = "chip not seen in the source; the author's other figures are of an M4 Pro"
    for ((n, k), each), i in itertools.product(times.items(), (0, 1)):
        what, shape = f"{n} x {k}, {(2, 4)[i]} bits, groups of 128", (HALF, (2, 4)[i], 128, n, k)
        yield Figure(what, "m4-pro", each[i], shape, f"{_MLX}/pull/3161", note)


def _decodes() -> Iterator[Figure]:
    bonsai = {
        "m1-pro": (14.97, 159),
        "m4": (12.65, 150),
        "m4-pro": (24.82, 133),
        "m5-pro": (29.53, 100),
    }
    for chip, (tps, pull) in bonsai.items():
        note = _CORES if chip == "m5-pro" else ""
        yield Figure("Ternary-Bonsai-27B, 2 bits", chip, tps, BONSAI_27B, f"{_DEMO}/{pull}", note)
    card = "https://huggingface.co/prism-ml/Ternary-Bonsai-8B-mlx-2bit"
    yield Figure("Ternary-Bonsai-8B, 2 bits", "m4-pro", 82, BONSAI_8B, card)
    benchmarks = f"{_MLX_LM}/blob/main/mlx_lm/BENCHMARKS.md"
    for bits, group, tps in (4, 64, 134.52), (4, 32, 126.0), (8, 64, 86.907):
        what = f"Qwen3-4B, {bits} bits, groups of {group}, 2,048 tokens"
        yield Figure(what, "m4-max", tps, QWEN3_4B(BFLOAT, bits, group, 2112), benchmarks)
    what, model = "Qwen3-4B, 4 bits, groups of 64, 2,048 tokens", QWEN3_4B(BFLOAT, context=2112)
    yield Figure(what, "m3-pro", 44.62, model, f"{_MLX_LM}/pull/1569", _CORES)
    what, source = "Qwen2.5-7B, 4 bits", f"{_MLX_LM}/issues/193"
    yield Figure(what, "m2-max", 71.39, QWEN25_7B(BFLOAT), source, _CORES)
    source = f"{GITHUB}/AlexsJones/llmfit/pull/1031"
    yield Figure("Llama-3.1-8B, 4 bits", "m2-pro", 36.2, LLAMA_8B(HALF), source, _CORES)
    source = f"{GITHUB}/waybarrios/vllm-mlx/issues/531"
    yield Figure("Qwen3-0.6B, 8 bits", "m4-pro", 284.2, QWEN3_06B(BFLOAT, 8), source, "in a server")

    source = f"{_MLX}/pull/1864"
    for chip, small, large in (
        ("m2", 204.81, 22.08),
        ("m2-ultra", 368.18, 131.2),
        ("m4-max", 532.73, 104.02),
    ):
        yield Figure(
            "Qwen2.5-0.5B, 4 bits", chip, small, QWEN25_05B(HALF, context=150), source, _CORES
        )
        yield Figure(
            "Mistral-7B, 4 bits", chip, large, MISTRAL_7B(HALF, context=150), source, _CORES
        )
    for what, tps, model, pull in _RAPID_FIGURES:
        yield Figure(
            f"{what}, 4 bits", "m3-ultra-60", tps, model, f"{_RAPID}/{pull}", "in a server"
        )
    for page, chip in (0, "m1-ultra"), (1, "m5-max"):
        source = f"{_MLXCEL}/model_tests_{('m1ultra', 'm5max')[page]}.md"
        for what, tps, model in _MLXCEL_FIGURES:
            if tps[page]:
                yield Figure(what, chip, tps[page], model, source, _CORES)


# 512 tokens before; of the same runs prompts' speeds are below.
_RAPID_FIGURES = (
    ("Llama-3.1-8B", 119.39, LLAMA_8B(HALF, context=576), 586),
    ("Qwen2.5-14B", 66.36, QWEN25_14B(HALF, context=576), 630),
    ("Qwen3-0.6B", 387.64, QWEN3_06B(BFLOAT, context=576), 633),
    ("Qwen3-8B", 112.89, QWEN3_8B(BFLOAT, context=576), 636),
    ("gemma3-1b", 257.65, GEMMA3_1B(BFLOAT, context=576), 640),
    ("gemma3-4b", 141.16, GEMMA3_4B(BFLOAT, context=576), 635),
    ("gemma3-27b", 35.19, GEMMA3_27B(BFLOAT, context=576), 637),
)
# mlx-lm's own speeds in that table, on an M1 Ultra and on an M5 Max.
_MLXCEL_FIGURES = (
    ("Llama-3.1-8B, 4 bits", (110.66, 117.43), LLAMA_8B(HALF)),
    ("Llama-3.2-1B, 4 bits", (418.25, 578.64), LLAMA_1B(HALF)),
    ("Phi-3.5-mini, 4 bits", (166.3, 207.79), PHI35_MINI(HALF)),
    ("Qwen2.5-7B, 8 bits", (70.46, 67.44), QWEN25_7B(HALF, 8)),
    ("Qwen3-0.6B, 4 bits", (299.61, 651.14), QWEN3_06B(BFLOAT)),
    ("Qwen3-4B, 4 bits", (123.92, 190.94), QWEN3_4B(BFLOAT)),
    ("Qwen3-8B, 4 bits", (84.54, 113.4), QWEN3_8B(BFLOAT)),
    ("gemma3-4b, 4 bits", (109.48, 181.66), GEMMA3_4B(BFLOAT)),
)


def _prompts() -> Iterator[Figure]:
    def figure(
        what: str, chip: str, tps: float, model: Model, tokens: int, source: str, note: str = ""
    ) -> Figure:
        return Figure(f"{what}, prompt of {tokens:,}", chip, tps, model, source, note, tokens)

    bonsai = {
        "m1-pro": (65.11, 159),
        "m4": (65.16, 150),
        "m4-pro": (119.78, 133),
        "m5-pro": (466, 100),
    }
    for chip, (tps, pull) in bonsai.items():
        note = _CORES if chip == "m5-pro" else ""
        yield figure(
            "Ternary-Bonsai-27B, 2 bits", chip, tps, BONSAI_27B, 512, f"{_DEMO}/{pull}", note
        )
    benchmarks = f"{_MLX_LM}/blob/main/mlx_lm/BENCHMARKS.md"
    for bits, tps in (4, 1622.27), (8, 1606.57), (16, 1780.63):
        model = QWEN3_4B(BFLOAT, bits)
        yield figure(f"Qwen3-4B, {bits} bits", "m4-max", tps, model, 2048, benchmarks)
    model, source = QWEN3_4B(BFLOAT), f"{_MLX_LM}/pull/1569"
    yield figure("Qwen3-4B, 4 bits", "m3-pro", 615.28, model, 2048, source, _CORES)
    speeds = (1156.0, 606.9, 8853.7, 1069.2, 6827.5, 2034.0, 298.6)
    for (what, _, model, pull), tps in zip(_RAPID_FIGURES, speeds, strict=True):
        source = f"{_RAPID}/{pull}"
        yield figure(f"{what}, 4 bits", "m3-ultra-60", tps, model, 512, source, "in a server")


def _peers() -> Iterator[Figure]:
    """llama.cpp, 4 bits with a scale for 32 weights (0.5 bits each), on other chips than its share is from."""
    llama_3b = transformer("llama", 28, 3072, 3072, 1024, 8192, 128256, kind=HALF)
    bench = f"{GITHUB}/brand-o/normiebench/issues"
    for what, chip, tps, model, source, note in (
        ("Llama-3.1-8B", "m1-max", 499.58, LLAMA_8B(HALF), f"{bench}/40", _CORES),
        (
            "Llama-3.2-3B",
            "m1-ultra",
            2142.59,
            llama_3b,
            f"{GITHUB}/geerlingguy/ai-benchmarks/issues/48",
            "",
        ),
        ("Llama-3.1-8B", "m4", 224.81, LLAMA_8B(HALF), f"{bench}/3", _CORES),
    ):
        what = f"llama.cpp, {what}, Q4_K, prompt of 512"
        yield Figure(what, chip, tps, model, source, note, 512, peer=True)


def _ordered(figures: Iterator[Figure]) -> tuple[Figure, ...]:
    chips = list(CHIPS)
    return tuple(sorted(figures, key=lambda f: (chips.index(f.chip), f.what)))


MATRICES, PEERS = tuple(_matrices()), tuple(_peers())
DECODES, PROMPTS = _ordered(_decodes()), _ordered(_prompts())
FITTED_MATRICES, FITTED = MATRICES[:4], DECODES[::2]
JUDGED = DECODES[1::2]


# -- fitting


def _error(figures: Sequence[Figure]) -> float:
    return sum(math.log1p(figure.off()) ** 2 for figure in figures)


def fit_work() -> tuple[float, float]:
    """The share of bandwidth and the corner nearest to the fitted times, by squares of logarithms."""

    def error(numbers: tuple[float, float]) -> float:
        share, corner = numbers
        with mock.patch.multiple(apple_gpus, BANDWIDTH_SHARE=share, CORNER=corner):
            return _error(FITTED_MATRICES)

    grid = itertools.product([i / 100 for i in range(80, 101)], [float(p) for p in range(2, 13)])
    return min(grid, key=error)


def fit_launches(fitted: Sequence[Figure] = FITTED) -> dict[str, float]:
    """The cost of a launch nearest to the fitted speeds of a class of chips, in steps of 0.05 us."""

    def nearest(kind: str) -> float:
        figures = [figure for figure in fitted if CHIPS[figure.chip].launch_class == kind]

        def error(seconds: float) -> float:
            with mock.patch.dict(LAUNCH_SECONDS, {kind: seconds}):
                return _error(figures)

        return min((round(i * 0.05e-6, 8) for i in range(1, 200)), key=error)

    return {kind: nearest(kind) for kind in LAUNCH_SECONDS}


# -- errors and their ranges


class Errors(NamedTuple):
    """Errors of one kind (`bench.predict.speed_range`): of judged figures, and of others with costs fitted to
    those that are judged here.
    """  # fmt: skip

    judged: list[float]
    exchanged: list[float]

    @property
    def all(self) -> list[float]:
        return self.judged + self.exchanged


def _middle(offs: Sequence[float]) -> tuple[float, float]:
    """From one of the errors to another, so that at least 80 % lie between them."""
    low, high = np.quantile(offs, 0.1, method="lower"), np.quantile(offs, 0.9, method="higher")
    return float(low), float(high)


def _errors() -> dict[str, Errors]:
    def of(figures: Sequence[Figure], dies: str) -> list[float]:
        return [figure.off() for figure in figures if CHIPS[figure.chip].dies == dies]

    found = {}
    exchanged = fit_launches(JUDGED)
    for dies in ("one die", "two dies"):
        judged = of(JUDGED, dies)
        with mock.patch.dict(LAUNCH_SECONDS, exchanged):
            found[dies] = Errors(judged, of(FITTED, dies))
    return found | {"prompts": Errors([figure.off() for figure in PROMPTS], [])}


def errors() -> dict[str, tuple[float, float]]:
    """The range of the middle 80 % of the errors, by kind."""
    middles = {kind: _middle(found.all) for kind, found in _errors().items()}
    return {kind: (round(low, 4), round(high, 4)) for kind, (low, high) in middles.items()}


class Inside(NamedTuple):
    """How many figures a range holds.

    Args:
        judged, exchanged: of `Errors`, in the range of all.
        alone: in the range of the others, without themselves.
        total: how many there are.
    """

    judged: int
    exchanged: int
    alone: int
    total: int


def inside() -> dict[str, Inside]:
    found = {}
    for kind, each in _errors().items():
        low, high = _middle(each.all)
        others = [_middle(each.all[:i] + each.all[i + 1 :]) for i in range(len(each.all))]
        alone = sum(
            left <= off <= right for off, (left, right) in zip(each.all, others, strict=True)
        )
        judged, exchanged = (sum(low <= off <= high for off in offs) for offs in each)
        found[kind] = Inside(judged, exchanged, alone, len(each.all))
    return found


# -- tables


def table(figures: Sequence[Figure], fitted: Sequence[Figure] = ()) -> str:
    """Figures as Markdown, with the model's prediction, and what share of it are launches."""
    lines = [
        "| what | chip | measured | predicted | off | launches | source |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for figure in figures:
        source = figure.source.removeprefix(f"{GITHUB}/").removeprefix("https://")
        link = f"[{source.split('/blob/')[0]}]({figure.source})"
        link += f"; {figure.note}" if figure.note else ""
        off = f"{figure.off():+.0%}" + (", fitted" if figure in fitted else "")
        seconds = figure.seconds()
        measured = f"{figure.measured:.4g} {figure.unit} | {figure.predicted():.4g}"
        share = f"{seconds.launch / seconds.total:.0%}"
        lines.append(
            f"| {figure.what} | {CHIPS[figure.chip].label} | {measured} | {off} | {share} | {link} |"
        )
    return "\n".join(lines)


def ranges_table() -> str:
    """The ranges, and how many figures they hold, as Markdown."""
    lines = [
        "| | range of errors | judged half inside | other half inside | inside the range of the others |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    ranges, counts = errors(), inside()
    for kind, each in _errors().items():
        low, high = ranges[kind]
        judged, exchanged, alone, total = counts[kind]
        name = kind if kind == "prompts" else f"decode, {kind}"
        other = f"{exchanged} of {len(each.exchanged)}" if each.exchanged else ""
        lines.append(
            f"| {name} | {low:+.0%} to {high:+.0%} | {judged} of {len(each.judged)} | {other} "
            f"| {alone} of {total} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        table(MATRICES, FITTED_MATRICES), table(DECODES, FITTED), table(PROMPTS + PEERS), sep="\n\n"
    )
