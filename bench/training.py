"""Measure training steps at the 3B's widths: seconds, memory and its estimate, and mlx-lm's own steps.

Every case is a process of its own, one at a time, so that its peak is its own. They take turns over the
rounds, and each figure is the median of all steps. The model has the 3B's widths, fewer blocks, and a smaller
vocabulary: what a block costs does not depend on how many there are.

    python -m bench.training --depth 4 --output results
    python -m bench.training --macs          what fits into which Mac, by the estimate alone
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.measure.machine import threads_in_use
from afm_mlx.training.methods.training_memory import MemoryEstimate, estimate_memory
from bench.bystanders import Bystanders
from bench.peer_afm import shrunk
from bench.peer_protocol import Peer, PeerError
from bench.targets import Target, markdown, report
from bench.training_worker import RANK, Case

Answers = dict[str, list[dict[str, Any]]]
"""What the workers said, by the case's name; one answer per round."""

QAT_OVER_FULL = 1.3
ESTIMATE_IS_OFF = 0.15


def cases(batch_size: int, length: int, peer: bool = True) -> list[Case]:
    """Return the cases to measure, in the order of the table; with `peer`, mlx-lm's, too."""
    kinds = [
        Case("full"),
        Case("qat", granularity="tensor"),
        Case("qat", granularity="row"),
        Case("lora"),
        Case("lora", base_bits=2),
        Case("dpo", base_bits=2),
    ]
    kinds += [dataclasses.replace(case, grad_checkpoint=True) for case in kinds]
    kinds.append(Case("qat", granularity="tensor", ema=True))
    if peer:
        kinds += [Case("mlx-lm full"), Case("mlx-lm lora")]
    return [dataclasses.replace(case, batch_size=batch_size, length=length) for case in kinds]


def measure(
    config: ModelConfig, found: list[Case], rounds: int, steps: int, threads: int
) -> Answers:
    """Measure the cases in turn, in each round; leave out cases that fail, and print the reason."""
    answers: Answers = {}
    for turn in range(rounds):
        for case in found:
            _note(f"round {turn + 1} of {rounds}: {case.name}")
            command = [sys.executable, "-m", "bench.training_worker"]
            command += ["--config", json.dumps(config.to_dict())]
            command += ["--case", json.dumps(dataclasses.asdict(case))]
            try:
                worker = Peer(case.name, command, threads)
                try:
                    answer = worker.measure("steps", steps=steps)
                finally:
                    worker.close()
            except PeerError as error:
                _note(f"{case.name}: no figure: {error}")
                continue
            answers.setdefault(case.name, []).append(answer)
            processor = statistics.median(answer["processor_seconds"])
            _note(f"{processor:.2f} CPU s a step, {answer['peak_bytes'] / 1e9:.2f} GB")
    return answers


def estimate_of(config: ModelConfig, case: Case) -> MemoryEstimate | None:
    """Return the estimate for a case of ours; None for a peer's."""
    if case.kind.startswith("mlx-lm"):
        return None
    return estimate_memory(
        config,
        "lora" if case.kind == "dpo" else case.kind,
        batch_size=case.batch_size,
        length=case.length,
        rank=RANK,
        base_bits=case.base_bits if case.base_bits < 32 else None,
        dtype=mx.float32,
        grad_checkpoint=case.grad_checkpoint,
        ema=case.ema,
    )


def summary(config: ModelConfig, found: list[Case], answers: Answers) -> dict[str, dict[str, Any]]:
    """Return medians, tokens per second and bytes by case."""
    result = {}
    for case in found:
        if case.name not in answers:
            continue
        given = answers[case.name]
        seconds, processor = (
            statistics.median(s for answer in given for s in answer[key])
            for key in ("seconds", "processor_seconds")
        )
        estimate = estimate_of(config, case)
        result[case.name] = {
            "seconds": seconds,
            "processor_seconds": processor,
            "tokens_per_second": case.batch_size * case.length / seconds,
            "peak_bytes": max(answer["peak_bytes"] for answer in given),
            "held_bytes": max(answer["held_bytes"] for answer in given),
            "estimated_bytes": None if estimate is None else estimate.total,
        }
    return result


def table(figures: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return a table's rows, the header first."""
    base = figures.get("full", {}).get("processor_seconds")
    header = ["", "s a step", "CPU s", "over full", "tok/s", "peak GB", "estimate GB", "off by"]
    rows = [header]
    for name, f in figures.items():
        estimated = f["estimated_bytes"]
        ratio = "-" if base is None else f"{f['processor_seconds'] / base:.2f}"
        rows.append(
            [
                name,
                f"{f['seconds']:.2f}",
                f"{f['processor_seconds']:.2f}",
                ratio,
                f"{f['tokens_per_second']:.0f}",
                f"{f['peak_bytes'] / 1e9:.2f}",
                "-" if estimated is None else f"{estimated / 1e9:.2f}",
                "-" if estimated is None else f"{100 * (estimated / f['peak_bytes'] - 1):+.0f} %",
            ]
        )
    return rows


def targets(figures: dict[str, dict[str, Any]]) -> list[Target]:
    """Return the promised figures with the measured ones."""

    def ratio(a: str, b: str, key: str = "processor_seconds") -> float | None:
        return figures[a][key] / figures[b][key] if a in figures and b in figures else None

    found = []
    for name, base in (
        ("qat per tensor", "full"),
        ("qat per row", "full"),
        ("qat per tensor, recomputed", "full, recomputed"),
        ("qat per row, recomputed", "full, recomputed"),
    ):
        found.append(Target(f"{name} over {base}", ratio(name, base), QAT_OVER_FULL, at_most=True))
    for ours, theirs in (("full", "mlx-lm full"), ("lora, float base", "mlx-lm lora")):
        found.append(Target(f"{ours} over {theirs}", ratio(ours, theirs), 1.1, at_most=True))
    dpo, sft = "dpo, 2-bit base", "lora, 2-bit base"
    found.append(Target(f"{dpo} over {sft}", ratio(dpo, sft), 1.15, at_most=True))
    memory = ratio(dpo, sft, "peak_bytes")
    found.append(Target(f"peak memory of {dpo} over {sft}", memory, 1.1, at_most=True))
    errors = [
        abs(f["estimated_bytes"] / f["peak_bytes"] - 1)
        for f in figures.values()
        if f["estimated_bytes"] is not None
    ]
    worst = max(errors, default=None)
    found.append(Target("estimated memory, the worst error", worst, ESTIMATE_IS_OFF, at_most=True))
    return found


# -- what fits where


MAC_GIGABYTES = (16, 32, 64, 128)
_MAC_ROWS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LoRA, 2-bit base", "lora", {"base_bits": 2}),
    ("LoRA, 2-bit base, recomputed", "lora", {"base_bits": 2, "grad_checkpoint": True}),
    ("LoRA, float base", "lora", {}),
    ("LoRA, float base, recomputed", "lora", {"grad_checkpoint": True}),
    ("full, recomputed", "full", {"grad_checkpoint": True}),
    ("QAT, recomputed", "qat", {"grad_checkpoint": True}),
    ("QAT, recomputed, average", "qat", {"grad_checkpoint": True, "ema": True}),
)


def usable_bytes(gigabytes: int) -> int:
    """Return the bytes that a Mac of `gigabytes` GiB lets its GPU use: 2/3 up to 32 GiB, 3/4 above.

    An assumption: `mx.device_info()["max_recommended_working_set_size"]` reports it on a Mac.
    Source: Metal's `recommendedMaxWorkingSetSize` in logs that users of llama.cpp have posted: 10,923 MiB of
    16 GiB, 21,845 of 32, and 49,152 of 64.
    """
    total = gigabytes << 30
    return total * 2 // 3 if gigabytes <= 32 else total * 3 // 4


def largest_length(
    config: ModelConfig, budget: int, kind: str, *, limit: int | None = None, **settings: object
) -> int:
    """Return the maximum tokens of one row that fit in a number of bytes, a multiple of 64; 0 if none fit.

    Args:
        config: architecture.
        budget: bytes.
        kind, settings: as of `estimate_memory`, without `length`.
        limit: maximum length to try; the model's context by default.
    """
    limit = config.context_length if limit is None else limit
    low, high = 0, limit // 64
    while low < high:
        middle = (low + high + 1) // 2
        found = estimate_memory(config, kind, length=64 * middle, **settings)  # type: ignore[arg-type]
        low, high = (middle, high) if found.total <= budget else (low, middle - 1)
    return 64 * low


def mac_rows(config: ModelConfig, example: int = 1024) -> list[list[str]]:
    """Return a table's rows: the longest row that fits each Mac, and the bytes of one of `example` tokens."""
    rows = [["", f"GB at {example} tokens", *(f"{size} GB" for size in MAC_GIGABYTES)]]
    for name, kind, settings in _MAC_ROWS:
        at = estimate_memory(config, kind, batch_size=1, length=example, **settings)
        cells = []
        for size in MAC_GIGABYTES:
            length = largest_length(config, usable_bytes(size), kind, batch_size=1, **settings)
            cells.append(f"{length:,} tokens" if length else "no")
        rows.append([name, f"{at.total / 1e9:.1f}", *cells])
    return rows


# -- command line


def _note(text: str) -> None:
    print(f"training: {text}", file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="afm-3b")
    parser.add_argument(
        "--depth", type=int, default=4, help="blocks, as large a share reusing keys"
    )
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--batch-size", type=int, default=2, help="rows")
    parser.add_argument("--steps", type=int, default=2, help="measured in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="the cores of this process by default")
    parser.add_argument("--only", nargs="*", default=[], help="cases, by how their names start")
    parser.add_argument("--no-peer", action="store_true", help="leave mlx-lm out")
    parser.add_argument("--macs", action="store_true", help="only say what fits into which Mac")
    parser.add_argument("--output", type=Path, help="folder for training.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    whole = PRESETS[options.preset]
    if options.macs:
        print(f"{options.preset}, one row, bfloat16, all tokens scored\n")
        print(markdown(mac_rows(whole)))
        return
    config = dataclasses.replace(shrunk(whole, options.depth), vocab_size=options.vocabulary)
    threads = options.threads or threads_in_use()
    found = cases(options.batch_size, options.length, not options.no_peer)
    if options.only:
        found = [case for case in found if case.name.startswith(tuple(options.only))]
    bystanders = Bystanders()
    answers = measure(config, found, options.rounds, options.steps, threads)
    others = bystanders.processors()
    figures = summary(config, found, answers)
    print(f"{options.preset} with {options.depth} blocks and {options.vocabulary} tokens, float32")
    print(f"{options.batch_size} x {options.length} tokens a step, {threads} threads\n")
    print(markdown(table(figures)))
    print()
    facts = {
        "preset": options.preset,
        "config": config.to_dict(),
        "threads": threads,
        "cases": {case.name: dataclasses.asdict(case) for case in found},
        "answers": answers,
        "figures": figures,
    }
    path = None if options.output is None else options.output / "training.json"
    report(targets(figures), others, path, facts)


if __name__ == "__main__":
    main()
