"""`afm-mlx bench --draft-model`: decoding with guesses beside the same without."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.output import print_json, print_markdown_table, progress_bar
from afm_mlx.cli.parser import UsageError
from afm_mlx.config import PRESETS

if TYPE_CHECKING:
    from afm_mlx.measure.benchmark import BenchmarkCase
    from afm_mlx.measure.speculation import SpeculationResult


def is_asked(args: argparse.Namespace) -> bool:
    """True if the arguments ask for speculative decoding."""
    return args.draft_model is not None or args.prompt_lookup


def check(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments that don't go together."""
    for name in ("num_draft_tokens", "draft_acceptance"):
        if getattr(args, name) is not None and not is_asked(args):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} needs --draft-model or --prompt-lookup, which guess.")
    if args.draft_acceptance is not None and (args.draft_model is None or args.prompt_lookup):
        raise UsageError("--draft-acceptance needs --draft-model, and no --prompt-lookup.")
    if not is_asked(args):
        return
    for flag in ("depth", "adapter_rank"):
        if getattr(args, flag) != [0]:
            raise UsageError(f"--{flag.replace('_', '-')} can't go with guesses; leave it out.")


def run(
    args: argparse.Namespace, name: str, model: Any, tokenizer: Any, cases: Sequence[BenchmarkCase]
) -> None:
    """Run every case with every number of guesses, and print what they bring."""
    import numpy as np

    from afm_mlx.engine.speculation.drafting import Speculation
    from afm_mlx.measure.speculation import SetAcceptance, run_speculation

    rng = np.random.default_rng(args.seed)
    draft = _draft_of(args, model, tokenizer)
    if args.draft_acceptance is not None:
        draft = SetAcceptance(draft, args.draft_acceptance, rng)
    counts = args.num_draft_tokens or [None]
    total, done = len(cases) * len(counts) * 2 * (args.num_trials + 1), 0
    rows = []
    with progress_bar("bench", "run") as progress:

        def report() -> None:
            nonlocal done
            done += 1
            if progress:
                progress(done, total)

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
                rows.append(_row(case, count, result))
    facts = {"model": name, "draft_model": args.draft_model, "trials": args.num_trials}
    if args.output == "json":
        print_json(facts | {"activation_bits": args.activation_bits, "results": rows})
    elif args.output == "csv":
        writer = csv.DictWriter(sys.stdout, [*facts, *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(facts | row for row in rows)
    else:
        print_markdown_table(
            [list(_COLUMNS), *([show(row) for show in _COLUMNS.values()] for row in rows)]
        )
        print(f"\nmodel: {name}; draft model: {args.draft_model or 'none, prompt look-up'}")
        print(
            f"mean ± deviation of {args.num_trials} runs after one that does not count; runs with and without "
            "guesses take turns, and times is the ratio of neighbours"
        )


def _draft_of(args: argparse.Namespace, model: Any, tokenizer: Any) -> Any:
    """The draft model that the arguments name; None for none."""
    if args.draft_model is None:
        return None
    from afm_mlx.loading.load import load_drafts
    from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
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


def _row(case: BenchmarkCase, count: int | None, result: SpeculationResult) -> dict[str, Any]:
    return {
        "prompt_tokens": case.prompt_tokens,
        "generated_tokens": case.generated_tokens,
        "batch": case.batch,
        "num_draft_tokens": count,
        "guesses_per_step": result.guesses,
        "accepted": result.accepted,
        "plain_tokens_per_second": result.plain.mean,
        "plain_deviation": result.plain.deviation,
        "tokens_per_second": result.guessed.mean,
        "deviation": result.guessed.deviation,
        "times": result.ratio.median,
        "same_answers": result.equal,
    }


def _speed(mean: float, deviation: float | None) -> str:
    return f"{mean:.1f}" if deviation is None else f"{mean:.1f} ± {deviation:.1f}"


_COLUMNS = {
    "prompt": lambda row: str(row["prompt_tokens"]),
    "new": lambda row: str(row["generated_tokens"]),
    "rows": lambda row: str(row["batch"]),
    "guesses": lambda row: (
        f"{row['guesses_per_step']:.1f}"
        + (" (as many as pay)" if row["num_draft_tokens"] is None else "")
    ),
    "kept": lambda row: f"{row['accepted']:.0%}",
    "tok/s without": lambda row: _speed(row["plain_tokens_per_second"], row["plain_deviation"]),
    "tok/s with": lambda row: _speed(row["tokens_per_second"], row["deviation"]),
    "times": lambda row: f"{row['times']:.2f}x",
    "same answers": lambda row: "yes" if row["same_answers"] else "no",
}
