"""Measure how many tasks of a test set a model solves, with and without constraints, and its perplexity on
held-out text.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import MAX_ROWS, Argument, UsageError, integer, unavailable
from afm_mlx.cli.output import print_json, print_table, progress_bar
from afm_mlx.cli.perplexity import HELD_OUT

if TYPE_CHECKING:
    from afm_mlx.measure.evaluation import Evaluation, TaskScore
    from afm_mlx.measure.perplexity import Perplexity

TEST_SET = "evaluation.jsonl"
_CONSTRAINED = {"never": [False], "always": [True], "both": [False, True]}

_HARNESS = (
    "tasks of lm-evaluation-harness are not available in this version; mlx_lm.evaluate runs them"
)

# fmt: off
ARGUMENTS = {
    "options": [
        *model_options.LOADING,
        Argument("--data", None,
                 'lines of {"task", "messages", "tools"?, "answer", "compare"?}; by default the model '
                 f"folder's {TEST_SET}, which the embedded model has",
                 metavar="FILE.jsonl"),
        Argument("--limit", integer(1), "examples per task; all by default"),
        Argument("--batch-size", integer(1, MAX_ROWS), "examples in a batch", 16),
        Argument("--constrained", ["never", "always", "both"],
                 "constrain answers to the schema of the example's response format, or calls to calls of its "
                 "tools; both measures with and without", "never"),
        Argument("--show-errors", integer(0), "print N wrong answers", 0, metavar="N"),
        model_options.JSON,
        unavailable("--tasks", _HARNESS, nargs="+"),
        *(unavailable(flag, _HARNESS) for flag in ("--output-dir", "--num-shots", "--chat-template-args")),
        *(unavailable(flag, _HARNESS, nargs=0)
          for flag in ("--fewshot-as-multiturn", "--apply-chat-template", "--confirm-run-unsafe-code")),
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure.evaluation import evaluate, load_examples
    from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity

    folder = resolve_model(args.model)
    data = Path(args.data) if args.data is not None else folder / TEST_SET
    if args.data is None and not data.is_file():
        raise UsageError(f"--data is missing, and {args.model} has no {TEST_SET}.")
    examples = load_examples(data, args.limit)
    model, tokenizer = model_options.load_model(args)
    evaluations = {}
    for constrained in _CONSTRAINED[args.constrained]:
        with progress_bar("answering", "example") as progress:
            options = {"batch_size": args.batch_size, "constrained": constrained}
            found = evaluate(model, tokenizer, examples, progress=progress, **options)
            evaluations[constrained] = found
    perplexity = None
    if (folder / HELD_OUT).is_file():
        pieces = cut(load_documents(folder / HELD_OUT, tokenizer))
        with progress_bar("perplexity", "sample") as progress:
            perplexity = measure_perplexity(model, tokenizer, pieces, args.batch_size, progress)
    if args.json:
        print_json(_as_json(args, data, evaluations, perplexity))
    else:
        _print(args, data, evaluations, perplexity)


def _as_json(
    args: argparse.Namespace,
    data: Path,
    evaluations: dict[bool, Evaluation],
    perplexity: Perplexity | None,
) -> dict[str, Any]:
    def score(score: TaskScore) -> dict[str, Any]:
        return dataclasses.asdict(score) | {"accuracy": score.accuracy}

    scores = []
    for evaluation in evaluations.values():
        wrong = [(m.example, m.answer) for m in evaluation.mistakes[: args.show_errors]]
        errors = [
            {"where": e.where, "task": e.task, "expected": e.answer, "got": answer}
            for e, answer in wrong
        ]
        scores.append(
            {
                "tasks": {task: score(result) for task, result in evaluation.tasks.items()},
                "overall": score(evaluation.overall),
                "seconds": evaluation.seconds,
                "errors": errors,
            }
        )
    names = ("perplexity", "standard_error", "tokens")
    return {
        "model": args.model,
        "data": str(data),
        "constrained": next(iter(evaluations)),
        **scores[0],
        **({"under_constraints": scores[1]} if len(scores) == 2 else {}),
        "perplexity": perplexity and {name: getattr(perplexity, name) for name in names},
    }


def _print(
    args: argparse.Namespace,
    data: Path,
    evaluations: dict[bool, Evaluation],
    perplexity: Perplexity | None,
) -> None:
    for constrained, evaluation in evaluations.items():
        for mistake in evaluation.mistakes[: args.show_errors]:
            under = ", constrained" if constrained else ""
            print(f"{mistake.example.where} ({mistake.example.task}{under})")
            print(f"  expected: {mistake.example.answer!r}")
            print(f"  got:      {mistake.answer!r}")
    print(f"Model: {args.model}")
    seconds = " and ".join(f"{evaluation.seconds:.1f}" for evaluation in evaluations.values())
    count = len(next(iter(evaluations.values())).answers)
    print(f"Data: {data} ({count} examples in {seconds} seconds)")
    print_table(_table(evaluations))
    if perplexity is not None:
        print(
            f"Perplexity: {perplexity.perplexity:.3f} ± {perplexity.standard_error:.3f} "
            f"({perplexity.tokens} tokens of {HELD_OUT})"
        )


def _table(evaluations: dict[bool, Evaluation]) -> list[tuple[Any, ...]]:
    """Return a row for each task; if both are measured, the last two columns are with constraints."""
    first, *others = (
        {**evaluation.tasks, "all": evaluation.overall} for evaluation in evaluations.values()
    )
    titles = ["task", "correct", "of", "accuracy", *["constrained", "accuracy"] * len(others)]
    rows: list[tuple[Any, ...]] = [tuple(titles)]
    for task, score in first.items():
        constrained = [x for o in others for x in (o[task].correct, f"{o[task].accuracy:.1%}")]
        rows.append((task, score.correct, score.total, f"{score.accuracy:.1%}", *constrained))
    return rows
