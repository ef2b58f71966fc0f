"""Published speeds of MLX's own kernels, and what the cost model says to them.

    python -m tests.metal.published

Each figure names its source. What was not published (activations' type, a chip's core count) is said, too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import numpy as np

from bench import predict as prediction
from bench.predict import CHIPS, Chip, Launch, Seconds

from . import mlx_wheel
from .cost import Argument, count

QUANTIZED = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")
SIZES = {"half": 2, "bfloat16_t": 2, "float": 4}
GITHUB = "https://github.com"


@functools.cache
def qmv(kind: str, bits: int, group: int, n: int, k: int) -> Launch:
    """MLX's `affine_qmv_fast` for one vector: a matrix (n, k) of codes, activations and scales of a type."""
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
    return count("affine_qmv_fast", unit, arguments, (32, 2 * (-(-n // 8)), 1), (32, 2, 1))


class Products(NamedTuple):
    """The matrices of a model whose products follow each other.

    Args:
        layers: how many layers have them.
        steps: for each product that waits for the one before: (N, K) of the matrices side by side.
        others: launches of a layer besides, as mlx-lm's code has them.
    """

    layers: int
    steps: tuple[tuple[tuple[int, int], ...], ...]
    others: int


class Model(NamedTuple):
    """A model of mlx-lm: its layers, (N, K) of its head, the format of its weights.

    `token_bytes` are read besides, such as keys and values.
    """

    parts: tuple[Products, ...]
    head: tuple[int, int]
    kind: str
    bits: int
    group: int
    token_bytes: float = 0

    def seconds(self, chip: Chip) -> Seconds:
        def launches(shapes: Sequence[tuple[int, int]]) -> list[Launch]:
            return [qmv(self.kind, self.bits, self.group, n, k) for n, k in shapes]

        steps = [(part.layers, launches(shapes)) for part in self.parts for shapes in part.steps]
        others = sum(part.layers * part.others for part in self.parts) + 4
        steps.append((1, launches([self.head])))
        return prediction.chain(steps, others, chip, self.token_bytes)


def transformer(
    layers: int, hidden: int, queries: int, keys: int, ffn: int, vocab: int, kind: str, bits: int, group: int,
    *, context: int = 64, norms: int = 0,
) -> Model:  # fmt: skip
    """Of Llama's kind; `norms`: a step for norms of queries and keys, as in Qwen3."""
    steps = (
        ((queries, hidden), (keys, hidden), (keys, hidden)),
        ((hidden, queries),),
        ((ffn, hidden), (ffn, hidden)),
        ((hidden, ffn),),
    )
    # Norm; RoPE; keys and values; attention, in two passes from 1,024 on; sum; norm; SwiGLU; sum.
    others = 8 + norms + (context >= 1024)
    kv = 2.0 * 2 * keys * layers * context
    return Model((Products(layers, steps, others),), (vocab, hidden), kind, bits, group, kv)


def qwen3_4b(bits: int, group: int) -> Model:
    return transformer(
        36, 2560, 4096, 1024, 9728, 151936, "bfloat16_t", bits, group, context=2112, norms=1
    )


# Qwen3.6's 27B: three of four layers have a recurrent state of 48 heads x 128 x 128 floats, read and written.
_MLP = (((17408, 5120), (17408, 5120)), ((5120, 17408),))
BONSAI_27B = Model(
    (
        Products(48, (((10240, 5120), (6144, 5120), (48, 5120), (48, 5120)), ((5120, 6144),), *_MLP), 12),
        Products(16, (((12288, 5120), (1024, 5120), (1024, 5120)), ((5120, 6144),), *_MLP), 10),
    ),
    (248320, 5120),
    "half",
    2,
    128,
    2 * 48 * 48 * 128 * 128 * 4,
)  # fmt: skip


class Figure(NamedTuple):
    """A published figure: milliseconds of a matrix, or tokens per second of a model.

    Args:
        chip: its name in `CHIPS`.
        runs: a `Model`, or the arguments of `qmv`.
        fitted: whether a number of the cost model was chosen to meet it.
        note: what the source leaves open.
    """

    what: str
    chip: str
    measured: float
    runs: Model | tuple[str, int, int, int, int]
    source: str
    fitted: bool = False
    note: str = ""

    @property
    def unit(self) -> str:
        return "tokens/s" if isinstance(self.runs, Model) else "ms"

    def predicted(self) -> float:
        chip = CHIPS[self.chip]
        if isinstance(self.runs, Model):
            return 1 / self.runs.seconds(chip).total
        return 1e3 * prediction.seconds([qmv(*self.runs)], chip).total

    def off(self) -> float:
        """How much longer (positive) or shorter the prediction takes than what was measured."""
        ratio = self.predicted() / self.measured
        return (1 / ratio if isinstance(self.runs, Model) else ratio) - 1


_MLX, _MLX_LM = f"{GITHUB}/ml-explore/mlx", f"{GITHUB}/ml-explore/mlx-lm"
_DEMO = f"{GITHUB}/PrismML-Eng/Bonsai-demo/pull"
_BONSAI_8B = transformer(36, 4096, 4096, 1024, 12288, 151936, "half", 2, 128, norms=1)
_QWEN_7B = transformer(28, 3584, 3584, 512, 18944, 152064, "bfloat16_t", 4, 64)
_LLAMA_8B = transformer(32, 4096, 4096, 1024, 14336, 128256, "bfloat16_t", 4, 64)
_QWEN_06B = transformer(28, 1024, 2048, 1024, 3072, 151936, "bfloat16_t", 8, 64, norms=1)


def _figures() -> Iterator[Figure]:
    unknown, cores = "type of activations not given", "number of cores not given"
    for bits, n, ms in (2, 17408, 0.121), (4, 17408, 0.198), (2, 248320, 1.539), (4, 248320, 2.725):
        what, shape = f"{n} x 5120, {bits} bits, groups of 128", ("half", bits, 128, n, 5120)
        yield Figure(what, "m4-pro", ms, shape, f"{_MLX}/issues/3852", True, unknown)
    for bits, ms in (2, 0.072), (4, 0.126):
        what, shape = f"17408 x 5120, {bits} bits, groups of 128", ("half", bits, 128, 17408, 5120)
        yield Figure(what, "m3-max", ms, shape, f"{_MLX}/issues/3852", note=cores)
    for n, k, ms in (4096, 4096, 0.093), (14336, 4096, 0.415), (4096, 14336, 0.246):
        what, shape = f"{n} x {k}, 4 bits, groups of 64", ("half", 4, 64, n, k)
        yield Figure(what, "m5", ms, shape, f"{_MLX}/pull/3753")
    measured = {
        "m1-pro": (14.97, 159),
        "m4": (12.65, 150),
        "m4-pro": (24.82, 133),
        "m5-pro": (29.53, 100),
    }
    for chip, (tps, pull) in measured.items():
        what, note = "Ternary-Bonsai-27B, 2 bits", cores if chip == "m5-pro" else ""
        yield Figure(what, chip, tps, BONSAI_27B, f"{_DEMO}/{pull}", note=note)
    card = "https://huggingface.co/prism-ml/Ternary-Bonsai-8B-mlx-2bit"
    yield Figure("Ternary-Bonsai-8B, 2 bits", "m4-pro", 82, _BONSAI_8B, card)
    benchmarks = f"{_MLX_LM}/blob/main/mlx_lm/BENCHMARKS.md"
    for bits, group, tps in (4, 64, 134.52), (4, 32, 126.0), (8, 64, 86.907):
        what = f"Qwen3-4B, {bits} bits, groups of {group}, 2,048 tokens"
        yield Figure(what, "m4-max", tps, qwen3_4b(bits, group), benchmarks)
    what = "Qwen3-4B, 4 bits, groups of 64, 2,048 tokens"
    yield Figure(what, "m3-pro", 44.62, qwen3_4b(4, 64), f"{_MLX_LM}/pull/1569", note=cores)
    what, source = "Qwen2.5-7B, 4 bits", f"{_MLX_LM}/issues/193"
    yield Figure(what, "m2-max", 71.39, _QWEN_7B, source, note=cores)
    source = f"{GITHUB}/AlexsJones/llmfit/pull/1031"
    yield Figure("Llama-3.1-8B, 4 bits", "m2-pro", 36.2, _LLAMA_8B, source, note=cores)
    source = f"{GITHUB}/waybarrios/vllm-mlx/issues/531"
    yield Figure("Qwen3-0.6B, 8 bits", "m4-pro", 284.2, _QWEN_06B, source, note="in a server")


FIGURES = tuple(_figures())


def fit() -> tuple[float, float]:
    """The share of bandwidth and the corner nearest to the fitted figures, by squares of logarithms."""

    def error(share: float, corner: float) -> float:
        with mock.patch.multiple(prediction, BANDWIDTH_SHARE=share, CORNER=corner):
            return sum(math.log1p(figure.off()) ** 2 for figure in FIGURES if figure.fitted)

    grid = itertools.product([i / 100 for i in range(80, 101)], [float(p) for p in range(2, 13)])
    return min(grid, key=lambda numbers: error(*numbers))


def table() -> str:
    """All figures as Markdown, with the model's prediction, and its prediction without arithmetic."""
    lines = [
        "| what | chip | measured | predicted | off | by bytes alone | source |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for figure in FIGURES:
        source = figure.source.removeprefix(f"{GITHUB}/").removeprefix("https://")
        link = f"[{source.split('/blob/')[0]}]({figure.source})"
        link += f"; {figure.note}" if figure.note else ""
        off = f"{figure.off():+.0%}" + (", fitted" if figure.fitted else "")
        with mock.patch.object(prediction, "lane_cycles", return_value=0.0):
            alone = f"{figure.off():+.0%}"
        measured = f"{figure.measured:.4g} {figure.unit} | {figure.predicted():.4g}"
        lines.append(
            f"| {figure.what} | {CHIPS[figure.chip].label} | {measured} | {off} | {alone} | {link} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
