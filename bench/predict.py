"""Predict decode and prefill speed on Apple GPUs with a cost model, for chips that nobody here has.

    python -m bench.predict m4-max [--preset afm-3b] [--output md|csv|json]

`apple_gpus.py` is the model. Counting a kernel's operations needs a compiler, so `make costs` does it
beforehand and stores the counts of the presets in `prediction.json`. With them it stores the model's errors on
published speeds of MLX's kernels that no number was fitted to: predictions are printed as the range of the
middle 80 % of these errors (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from afm_mlx.config import PRESETS

from .apple_gpus import (
    ACCELERATORS,
    CHIPS,
    NOTHING,
    Chip,
    Launch,
    Seconds,
    between,
    chain,
    product,
)
from .targets import markdown

DATA = Path(__file__).with_name("prediction.json")

# -- what was counted

TEXT_PRESETS = [name for name, config in PRESETS.items() if config.vision_config is None]
"""Presets that were counted; a model with an image encoder decodes as its text model does."""
CONTEXTS = (512, 4096)
"""Tokens in the cache, the new one included, that steps were counted for."""
PROMPT = 512
"""Tokens of a predicted prompt."""
PROMPT_WAYS = ("dequantize + matmul", "MLX qmm", "own tiled")
"""Ways to multiply a prompt's tokens, of `apple_gpus.WAYS`."""
OTHERS = 10  # launches of a block besides its products, for a prompt: norms, RoPE, cache, attention, sums


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


def speed_range(kind: str, value: float) -> tuple[float, float]:
    """Return the range of a predicted speed: the middle 80 % of the model's errors.

    Args:
        kind: of errors: "one die" and "two dies" for decode steps, "prompts".
        value: tokens per second.
    """
    low, high = _data()["errors"][kind]
    return value * (1 + low), value * (1 + high)


class Prediction(NamedTuple):
    """Predicted figures of a preset's decode step on a chip.

    Args:
        seconds: time of a token.
        nbytes: bytes that a token reads: weights, and keys and values of the context.
        dispatches: kernel launches of a token.
        limit: seconds that these bytes take at the chip's published bandwidth.
        over_mlx: time of MLX's own kernel (`affine_qmv_fast`) on the blocks' layers, divided by the time of our
            kernels, which also do norms, SwiGLU and sums: by type of activations and size of groups, as in
            "bfloat16, 64". Empty where MLX has no such kernel.
    """

    seconds: Seconds
    nbytes: int
    dispatches: int
    limit: float
    over_mlx: dict[str, float]

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
    over_mlx = {
        kind: chain(_steps(steps), 0, chip).total / ours for kind, steps in stored["mlx"].items()
    }
    dispatches = others + sum(count for count, _ in launches)
    limit = nbytes / (chip.bandwidth * 1e9)
    counted = sum(count * sum(l.memory_bytes for l in each) for count, each in launches)
    total = chain(launches, others, chip, max(0, nbytes - counted))
    return Prediction(total, nbytes, dispatches, limit, over_mlx)


def prompt_seconds(preset: str, chip: Chip, way: str) -> Seconds | None:
    """Predict the time to the first token of a prompt of `PROMPT` tokens, with nothing in the cache.

    All tokens but the last go through the writing blocks alone; the last one is a decode step. None where MLX
    has no kernel for the weights.
    """
    stored = _data()["presets"][preset]
    if way == "MLX qmm" and not stored["mlx"]:
        return None
    # MLX has a scale and a bias for every 128 weights at most.
    group = 128 if way == "MLX qmm" else 0
    blocks = NOTHING
    for count, matrices, attention in stored["blocks"]:
        for n, k, bits, half in matrices:
            part = product(way, PROMPT - 1, n, k, bits, chip, group=group, half=half)
            blocks += part.times(count)
        rest = between(sum(n for n, *_ in matrices), OTHERS, attention, PROMPT - 1, chip)
        blocks += rest.times(count)
    return blocks + predict(preset, PROMPT, chip).seconds


# -- the command

NOTE = f"""
A prediction, not a measurement: no Mac was used. Operations of the Metal kernels were counted in their text
and priced as published for M1 and M2; clocks and bandwidths are published, too. Ranges are where 80 % of
published speeds of MLX's kernels lie around what this model says of them (docs/benchmarks.md); these kernels
can be further off. "over MLX" is how much longer MLX's own kernel would take for the blocks' layers at the same
bits, with activations in bfloat16 or half, in groups of 64 or 128. Prompts have {PROMPT} tokens, which
`kernels/metal/matmul.py` multiplies with MLX's qmm on an M5 and with unpacked matrices elsewhere."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the predicted speeds of a preset on one chip or on all of them."""
    parser = argparse.ArgumentParser(
        prog="bench.predict", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("chip", choices=[*CHIPS, "all"], help="chip to predict for")
    parser.add_argument(
        "--preset", choices=TEXT_PRESETS, default="afm-3b", help="sizes of an architecture"
    )
    parser.add_argument(
        "--output", "-o", choices=["md", "csv", "json"], default="md", help="output format"
    )
    args = parser.parse_args(argv)
    names = list(CHIPS) if args.chip == "all" else [args.chip]
    steps = [facts(args.preset, name, context) for name in names for context in CONTEXTS]
    prompts = [prompt_facts(args.preset, name, way) for name in names for way in PROMPT_WAYS]
    prompts = [row for row in prompts if row]
    if args.output == "json":
        found = {"predicted": True, "preset": args.preset, "results": steps, "prompts": prompts}
        print(json.dumps(found, indent=2))
    elif args.output == "csv":
        fields = ["predicted", "preset", *dict.fromkeys([*steps[0], *prompts[0]])]
        writer = csv.DictWriter(sys.stdout, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows({"predicted": True, "preset": args.preset} | r for r in steps + prompts)
    else:
        print(f"predicted: one row of {args.preset}, packed as bench --random-weights packs it\n")
        print(markdown([list(STEP_CELLS), *map(_step_cells, steps)]), end="\n\n")
        print(markdown([list(PROMPT_CELLS), *map(_prompt_cells, prompts)]))
        print(NOTE)


def facts(preset: str, name: str, context: int) -> dict[str, Any]:
    """Return the predicted figures of a preset's decode step on the chip `name`, in bytes and seconds."""
    chip = CHIPS[name]
    found = predict(preset, context, chip)
    low, high = speed_range(chip.dies, found.tokens_per_second)
    return {
        "chip": name,
        "gpu_cores": chip.cores,
        "bandwidth_bytes_per_second": chip.bandwidth * 1e9,
        "context": context,
        "decode_tokens_per_second": found.tokens_per_second,
        "decode_tokens_per_second_low": low,
        "decode_tokens_per_second_high": high,
        "seconds": found.seconds.total,
        "arithmetic_seconds": found.seconds.arithmetic,
        "memory_seconds": found.seconds.memory,
        "launch_seconds": found.seconds.launch,
        "bytes_per_token": found.nbytes,
        "dispatches_per_token": found.dispatches,
        "share_of_bandwidth": found.share,
        **{f"over_mlx_{kind.replace(', ', '_')}": ratio for kind, ratio in found.over_mlx.items()},
    }


def prompt_facts(preset: str, name: str, way: str) -> dict[str, Any]:
    """Return the predicted figures of a prompt on the chip `name`; empty where a way can't run it."""
    chip = CHIPS[name]
    seconds = prompt_seconds(preset, chip, way)
    if seconds is None:
        return {}
    speed = PROMPT / seconds.total
    low, high = speed_range("prompts", speed)
    uses_accelerators = chip.generation >= ACCELERATORS and way != "own tiled"
    return {
        "chip": name,
        "gpu_cores": chip.cores,
        "bandwidth_bytes_per_second": chip.bandwidth * 1e9,
        "prompt_tokens": PROMPT,
        "way": f"{way}, on the accelerators" if uses_accelerators else way,
        "prefill_tokens_per_second": speed,
        "prefill_tokens_per_second_low": low,
        "prefill_tokens_per_second_high": high,
        "seconds": seconds.total,
        "arithmetic_seconds": seconds.arithmetic,
        "memory_seconds": seconds.memory,
        "launch_seconds": seconds.launch,
    }


STEP_CELLS = (
    "chip", "cores", "GB/s", "context", "decode tok/s", "arithmetic ms", "memory ms", "launches ms", "MB/token",
    "dispatches", "of limit", "over MLX: bfloat16, 64", "128", "half, 64", "128",
)  # fmt: skip
PROMPT_CELLS = ("chip", "prompt tok/s", "ms", "way")


def _step_cells(row: dict[str, Any]) -> list[str]:
    parts = (row[f"{part}_seconds"] for part in ("arithmetic", "memory", "launch"))
    ratios = [ratio for key, ratio in row.items() if key.startswith("over_mlx")]
    return [
        row["chip"],
        str(row["gpu_cores"]),
        f"{row['bandwidth_bytes_per_second'] / 1e9:.0f}",
        f"{row['context']:,}",
        f"{row['decode_tokens_per_second_low']:.0f} to {row['decode_tokens_per_second_high']:.0f}",
        *(f"{part * 1e3:.2f}" for part in parts),
        f"{row['bytes_per_token'] / 1e6:.0f}",
        str(row["dispatches_per_token"]),
        f"{row['share_of_bandwidth']:.0%}",
        *([f"{ratio:.2f}x" for ratio in ratios] or ["-"] * 4),
    ]


def _prompt_cells(row: dict[str, Any]) -> list[str]:
    low, high = (row[f"prefill_tokens_per_second_{end}"] for end in ("low", "high"))
    return [row["chip"], f"{low:.0f} to {high:.0f}", f"{row['seconds'] * 1e3:.0f}", row["way"]]


if __name__ == "__main__":
    main()
