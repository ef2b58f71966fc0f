"""Measure how fast a model runs here: tokens per second, memory, and share of the memory bandwidth."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import FLAG, MAX_ROWS, Argument, UsageError, flag_of, integer, number
from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.config import PRESETS
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.vision_config import MODES

if TYPE_CHECKING:
    import mlx.nn as nn

    from afm_mlx.measure.benchmark import BenchmarkCase, BenchmarkResult
    from afm_mlx.measure.machine import Bandwidth
    from afm_mlx.tokenizer.protocol import Tokenizer

THREADS_VARIABLE = "AFM_MLX_THREADS"
MAX_CASES, MAX_TOKENS, MAX_RANK = 10_000, 1 << 20, 1 << 16


def integers(low: int, high: int) -> Callable[[str], list[int]]:
    """Return a converter of comma-separated integers from `low` to `high`."""
    one = integer(low, high)

    def convert(text: str) -> list[int]:
        return [one(part.strip()) for part in text.split(",")]

    return convert


def modes_of_images(text: str) -> list[str]:
    """Convert comma-separated modes of images."""
    found = [part.strip() for part in text.split(",")]
    if not set(found) <= set(MODES):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(MODES)}")
    return found


_LIST = {"metavar": "N,..."}

# fmt: off
_CASES = [
    Argument("--prompt-tokens -p", integers(1, MAX_TOKENS), "tokens of a prompt", "512", **_LIST),
    Argument("--generation-tokens -g", integers(3, MAX_TOKENS), "tokens of an answer", "128", **_LIST),
    Argument("--batch-size -b", integers(1, MAX_ROWS), "rows side by side", "1", **_LIST),
    Argument("--depth -d", integers(0, MAX_TOKENS), "tokens in the KV cache before the prompt", "0",
             **_LIST),
    Argument("--adapter-rank", integers(0, MAX_RANK),
             "rank of a random adapter on every linear layer; 0 for none", "0", **_LIST),
    Argument("--adapters", integers(1, MAX_ROWS), "different adapters, which the rows use in turn", "1",
             **_LIST),
]

ARGUMENTS = {
    "model": [
        Argument("--model", None,
                 f"model folder or hub id; the embedded model ({EMBEDDED_MODEL}) unless --preset is given"),
        Argument("--preset", list(PRESETS), "sizes of an architecture"),
        Argument("--random-weights", FLAG,
                 "fill the preset with random codes: 2 bits, and 4 for the embedding; afm-2024 has palettes of "
                 "4 bits, and 8"),
        Argument("--mask", None,
                 "task mask that the model runs with: its path, or the name of one that comes with the model",
                 metavar="DIR"),
        model_options.TRUST_REMOTE_CODE,
    ],
    "cases (each takes a list, as in 128,512; all combinations run)": _CASES,
    "images: the image encoder and its adaptor alone": [
        Argument("--image", modes_of_images,
                 "modes in which one image is encoded, in place of prompts and answers: high, balanced, rapid",
                 metavar="MODE,..."),
    ],
    "draft tokens: decoding with and without them, in turn": [
        Argument("--draft-model", None,
                 "draft model: its folder or hub id, auto for the one in the model's folder, or with --preset "
                 "the name of a preset, which is filled like it",
                 metavar="PATH"),
        Argument("--num-draft-tokens", integers(1, 7), "draft tokens at a time; by default as many as pay off",
                 **_LIST),
        Argument("--prompt-lookup", FLAG, "draft the tokens that followed the last tokens earlier in the text"),
        Argument("--draft-acceptance", number(0, 1),
                 "probability that a draft token is right if those before it are, whatever the draft model "
                 "proposes; it runs anyway"),
    ],
    "options": [
        Argument("--num-trials -n", integer(1), "measured runs of a case", 5),
        model_options.ACTIVATION_BITS,
        Argument("--kv", ["int8", "float"], "storage of the KV cache", "int8"),
        Argument("--threads -t", integer(1, 4096), "threads of the CPU; by default the cores it may use"),
        Argument("--seed", integer(0, model_options.MAX_SEED), "seed of the random tokens and codes", 0),
        Argument("--output -o", ["md", "csv", "json"], "output format", "md"),
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    _check(args)
    if args.threads is not None:  # of the kernels and the BLAS, before either has started
        from afm_mlx import blas

        os.environ[THREADS_VARIABLE] = str(args.threads)
        blas.set_threads(args.threads)
    from afm_mlx.measure.benchmark import BenchmarkCase, run_case
    from afm_mlx.measure.machine import measure_bandwidth, threads_in_use
    from afm_mlx.quantization.packed_layers import set_activation_bits

    lists = [getattr(args, row.name) for row in _CASES]  # in the order of BenchmarkCase's fields
    if (count := math.prod(map(len, lists))) > MAX_CASES:
        raise UsageError(f"the lists make {count:,} cases; allowed are {MAX_CASES:,}.")
    cases = [BenchmarkCase(*sizes) for sizes in itertools.product(*lists)]
    threads = threads_in_use()
    bandwidth = None if _drafts(args) or args.image else measure_bandwidth(threads)
    name, model, tokenizer = _model_of(args)
    set_activation_bits(model, args.activation_bits)
    if args.image is not None:
        _run_images(args, name, model, threads)
        return
    if _drafts(args):
        _run_speculation(args, name, model, tokenizer, cases)
        return
    total, done = len(cases) * (args.num_trials + 1), itertools.count(1)
    with progress_bar("bench", "run") as progress:

        def report() -> None:
            if progress:
                progress(next(done), total)

        run_one = partial(run_case, model, kv=args.kv, tokenizer=tokenizer, seed=args.seed)
        results = [run_one(case, args.num_trials, on_run=report) for case in cases]
    assert bandwidth is not None
    rows = [_row(result, bandwidth) for result in results]
    facts = _facts(args, name, model, threads, bandwidth)
    if args.output == "json":
        print_json(facts | {"results": rows})
    elif args.output == "csv":
        common = {key: value for key, value in facts.items() if key != "runtime"}
        _print_csv(common | {"device": facts["runtime"]["device_name"]}, rows)
    else:
        _print_markdown(facts, rows)


def _check(args: argparse.Namespace) -> None:
    if args.model is not None and args.preset is not None:
        raise UsageError("--model and --preset can't both be given; a preset has no folder.")
    if args.random_weights and args.preset is None:
        raise UsageError(
            f"--random-weights needs --preset, whose sizes it fills; allowed are {', '.join(PRESETS)}."
        )
    if args.preset is not None and not args.random_weights:
        raise UsageError(
            f"--preset {args.preset} has no weights of its own. Add --random-weights, or give --model."
        )
    for name in ("num_draft_tokens", "draft_acceptance"):
        if getattr(args, name) is not None and not _drafts(args):
            raise UsageError(
                f"{flag_of(name)} needs --draft-model or --prompt-lookup, which draft tokens."
            )
    if args.draft_acceptance is not None and (args.draft_model is None or args.prompt_lookup):
        raise UsageError("--draft-acceptance needs --draft-model, and no --prompt-lookup.")
    if args.mask is not None and (args.preset is not None or args.adapter_rank != [0]):
        raise UsageError(
            "--mask is for a model that is loaded, without random adapters: leave out --preset and "
            "--adapter-rank. bench/masks.py in the source measures masks with random weights."
        )
    if args.image is not None and _drafts(args):
        raise UsageError("--image measures the image encoder alone; leave out the draft tokens.")
    for name in ("depth", "adapter_rank") if _drafts(args) else ():
        if getattr(args, name) != [0]:
            raise UsageError(f"{flag_of(name)} can't be combined with draft tokens; leave it out.")


def _drafts(args: argparse.Namespace) -> bool:
    """True if the arguments ask for speculative decoding."""
    return args.draft_model is not None or args.prompt_lookup


def _model_of(args: argparse.Namespace) -> tuple[str, Any, Any]:
    """Return the name of a model, the model, and its tokenizer, which random weights don't have."""
    if args.preset is not None:
        from afm_mlx.loading.missing_kernels import warn_if_slow
        from afm_mlx.measure.random_model import random_packed_model
        from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE, PRESET_RULES

        rules = PRESET_RULES.get(args.preset, (AFM_RULE, AFM_EMBEDDING_RULE))
        model = random_packed_model(PRESETS[args.preset], *rules, seed=args.seed)
        warn_if_slow(model)
        return f"{args.preset} (random)", model, None
    from afm_mlx.loading.load import load

    name = args.model or EMBEDDED_MODEL
    model, tokenizer = load(name, trust_remote_code=args.trust_remote_code, mask=args.mask)
    return name if args.mask is None else f"{name}:{args.mask}", model, tokenizer


def _facts(
    args: argparse.Namespace, name: str, model: nn.Module, threads: int, bandwidth: Bandwidth
) -> dict[str, Any]:
    from mlx.utils import tree_flatten

    from afm_mlx.measure.describe import describe_runtime
    from afm_mlx.model.model import is_afm

    return {
        "model": name,
        "weight_bytes": sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        "trials": args.num_trials,
        "activation_bits": args.activation_bits,
        # A model without int8 scales, such as mlx-lm's, keeps floats whatever --kv says.
        "kv": args.kv if is_afm(model) and model.args.kv_bits == 8 else "float",
        "threads": threads,
        "bandwidth_bytes_per_second": bandwidth.bytes_per_second,
        "bandwidth_measured_with": bandwidth.how,
        "runtime": describe_runtime(),
    }


def _row(result: BenchmarkResult, bandwidth: Bandwidth) -> dict[str, Any]:
    """Return a result as a flat dict: bytes, seconds, and tokens per second."""
    row: dict[str, Any] = dataclasses.asdict(result.case)
    for name in ("prefill", "decode", "first_token"):
        spread = getattr(result, name)
        unit = "seconds" if name == "first_token" else "tokens_per_second"
        row |= {f"{name}_{unit}": spread.mean, f"{name}_deviation": spread.deviation}
        row[f"{name}_median"] = spread.median
    rate = result.bytes_per_second
    return row | {
        "peak_memory_bytes": result.peak_memory,
        "peak_resident_bytes": result.peak_resident,
        "peak_over_weights_and_cache": result.memory_ratio,
        "bytes_per_token": result.bytes_per_token,
        "adapter_bytes": result.cost.adapter_bytes if result.cost else None,
        "operations_per_step": result.cost.operations if result.cost else None,
        "bytes_per_second": rate,
        "share_of_bandwidth": None if rate is None else rate / bandwidth.bytes_per_second,
    }


# -- output


def _print_csv(common: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    writer = csv.DictWriter(sys.stdout, [*common, *rows[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(common | row for row in rows)


def _print_columns(
    columns: dict[str, Callable[[dict[str, Any]], str]], rows: list[dict[str, Any]]
) -> None:
    """Print a Markdown table of right-aligned columns."""
    cells = [list(columns), *([show(row) for show in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [" | ".join(map(str.rjust, line, widths)) for line in cells]
    print(f"| {lines[0]} |\n|{'|'.join('-' * (width + 1) + ':' for width in widths)}|")
    for line in lines[1:]:
        print(f"| {line} |")


def _print_markdown(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    _print_columns(_COLUMNS, rows)
    runtime = facts["runtime"]
    print(f"\nmodel: {facts['model']}, {facts['weight_bytes'] / 1e9:.3f} GB")
    print(
        f"device: {runtime['device_name']} ({runtime['device']}), {facts['threads']} threads; "
        f"activations of {facts['activation_bits']} bits, {facts['kv']} keys and values"
    )
    print(
        f"memory limit: {facts['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s "
        f"({facts['bandwidth_measured_with']})"
    )
    print(
        f"mean ± deviation of {facts['trials']} runs after a warm-up; memory is MLX's peak, and its share "
        "of what weights, adapter and cache take"
    )


def _spread(row: dict[str, Any], name: str, unit: str, scale: float = 1) -> str:
    deviation = row[f"{name}_deviation"]
    return _with_deviation(row[f"{name}_{unit}"] * scale, deviation and deviation * scale)


def _with_deviation(mean: float, deviation: float | None) -> str:
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


def _scaled(key: str, scale: float, digits: int, unit: str = "") -> Callable[[dict[str, Any]], str]:
    def show(row: dict[str, Any]) -> str:
        return "-" if row[key] is None else f"{row[key] * scale:.{digits}f}{unit}"

    return show


def _memory(row: dict[str, Any]) -> str:
    ratio = row["peak_over_weights_and_cache"]
    peak = f"{row['peak_memory_bytes'] / 1e9:.3f}"
    return peak if ratio is None else f"{peak} ({ratio:.2f}x)"


_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "prompt": lambda row: str(row["prompt_tokens"]),
    "new": lambda row: str(row["generated_tokens"]),
    "rows": lambda row: str(row["batch"]),
    "depth": lambda row: str(row["depth"]),
    "rank": lambda row: str(row["adapter_rank"]) + f" x {row['adapters']}" * (row["adapters"] > 1),
    "prefill tok/s": lambda row: _spread(row, "prefill", "tokens_per_second"),
    "decode tok/s": lambda row: _spread(row, "decode", "tokens_per_second"),
    "first token ms": lambda row: _spread(row, "first_token", "seconds", 1e3),
    "memory GB": _memory,
    "resident GB": _scaled("peak_resident_bytes", 1e-9, 3),
    "MB/token": _scaled("bytes_per_token", 1e-6, 1),
    "ops/step": _scaled("operations_per_step", 1, 0),
    "GB/s": _scaled("bytes_per_second", 1e-9, 2),
    "of limit": _scaled("share_of_bandwidth", 100, 1, " %"),
}


# -- images


def _run_images(args: argparse.Namespace, name: str, model: nn.Module, threads: int) -> None:
    from afm_mlx.measure.benchmark import run_image

    results = [run_image(model, mode, args.num_trials, seed=args.seed) for mode in args.image]
    rows = [
        {
            "mode": result.mode,
            "tiles": result.tiles,
            "tokens": result.tokens,
            "seconds": result.seconds.mean,
            "deviation": result.seconds.deviation,
            "median": result.seconds.median,
            "encoder_flops_per_second": result.encoder_flops / result.seconds.mean,
            "peak_memory_bytes": result.peak_memory,
        }
        for result in results
    ]
    common = {"model": name, "trials": args.num_trials, "activation_bits": args.activation_bits}
    common["threads"] = threads
    if args.output == "json":
        print_json(common | {"results": rows})
    elif args.output == "csv":
        _print_csv(common, rows)
    else:
        _print_columns(_IMAGE_COLUMNS, rows)
        print(f"\nmodel: {name}; {threads} threads; activations of {args.activation_bits} bits")
        print(f"mean ± deviation of {args.num_trials} runs after a warm-up; memory is MLX's peak")


_IMAGE_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "mode": lambda row: row["mode"],
    "tiles": lambda row: str(row["tiles"]),
    "tokens": lambda row: str(row["tokens"]),
    "ms": lambda row: _with_deviation(
        row["seconds"] * 1e3, row["deviation"] and row["deviation"] * 1e3
    ),
    "encoder GFLOP/s": _scaled("encoder_flops_per_second", 1e-9, 0),
    "memory GB": _scaled("peak_memory_bytes", 1e-9, 3),
}


# -- speculative decoding


def _run_speculation(
    args: argparse.Namespace,
    name: str,
    model: nn.Module,
    tokenizer: Tokenizer,
    cases: Sequence[BenchmarkCase],
) -> None:
    """Run every case with every number of draft tokens, and print the gain over plain decoding."""
    import numpy as np

    from afm_mlx.engine.speculation.drafting import Speculation
    from afm_mlx.measure.benchmark import FixedAcceptance, run_speculation

    rng = np.random.default_rng(args.seed)
    draft = _draft_model(args, model, tokenizer)
    if args.draft_acceptance is not None:
        draft = FixedAcceptance(draft, args.draft_acceptance, rng)
    counts = args.num_draft_tokens or [None]
    total, done = len(cases) * len(counts) * 2 * (args.num_trials + 1), itertools.count(1)
    rows = []
    with progress_bar("bench", "run") as progress:

        def report() -> None:
            if progress:
                progress(next(done), total)

        for case in cases:
            prompts = rng.integers(0, model.args.vocab_size, (case.batch, case.prompt_tokens))
            for count in counts:
                result = run_speculation(
                    model,
                    prompts.tolist(),
                    Speculation(draft, args.prompt_lookup, num_draft_tokens=count),
                    generated_tokens=case.generated_tokens,
                    repetitions=args.num_trials,
                    kv=args.kv,
                    on_run=report,
                )
                rows.append(
                    {
                        "prompt_tokens": case.prompt_tokens,
                        "generated_tokens": case.generated_tokens,
                        "batch": case.batch,
                        "num_draft_tokens": count,
                        "guesses_per_step": result.drafted,
                        "accepted": result.accepted,
                        "plain_tokens_per_second": result.plain.mean,
                        "plain_deviation": result.plain.deviation,
                        "tokens_per_second": result.speculative.mean,
                        "deviation": result.speculative.deviation,
                        "times": result.ratio.median,
                        "same_answers": result.equal,
                    }
                )
    facts = {"model": name, "draft_model": args.draft_model, "trials": args.num_trials}
    if args.output == "json":
        print_json(facts | {"activation_bits": args.activation_bits, "results": rows})
    elif args.output == "csv":
        _print_csv(facts, rows)
    else:
        _print_columns(_SPECULATION_COLUMNS, rows)
        print(f"\nmodel: {name}; draft model: {args.draft_model or 'none, prompt look-up'}")
        print(
            f"mean ± deviation of {args.num_trials} runs after a warm-up; runs with and without draft tokens "
            "alternate, and times is the ratio of neighbouring runs"
        )


def _draft_model(args: argparse.Namespace, model: nn.Module, tokenizer: Tokenizer) -> Any:
    """Load or make the draft model that the arguments name; return None if they name none."""
    if args.draft_model is None:
        return None
    from afm_mlx.loading.load import load_drafts
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.quantization.packed_layers import set_activation_bits

    if args.preset is not None:
        if args.draft_model not in PRESETS:
            raise UsageError(
                f"--draft-model is {args.draft_model}; with --preset it is the name of one: "
                f"{', '.join(PRESETS)}."
            )
        from afm_mlx.measure.random_model import random_packed_model

        draft: Any = random_packed_model(PRESETS[args.draft_model], seed=args.seed)
    else:
        folder = resolve_model(args.model or EMBEDDED_MODEL)
        draft, _ = load_drafts(args.draft_model, model, tokenizer, folder)
    set_activation_bits(draft, args.activation_bits)
    return draft


_SPECULATION_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "prompt": lambda row: str(row["prompt_tokens"]),
    "new": lambda row: str(row["generated_tokens"]),
    "rows": lambda row: str(row["batch"]),
    "drafted": lambda row: (
        f"{row['guesses_per_step']:.1f}"
        + (" (adaptive)" if row["num_draft_tokens"] is None else "")
    ),
    "kept": lambda row: f"{row['accepted']:.0%}",
    "tok/s without": lambda row: _with_deviation(
        row["plain_tokens_per_second"], row["plain_deviation"]
    ),
    "tok/s with": lambda row: _with_deviation(row["tokens_per_second"], row["deviation"]),
    "times": lambda row: f"{row['times']:.2f}x",
    "same answers": lambda row: "yes" if row["same_answers"] else "no",
}
