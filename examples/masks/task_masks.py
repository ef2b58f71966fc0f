"""Make a task mask for each of the embedded model's seven tasks, measure them, and plot accuracy by kept share.

    python examples/masks/task_masks.py --out OUT --seed 0

For each task: training chats as JSONL, one `afm-mlx prune --recover lora` for each share, and the answers to
held-out chats of all seven tasks, whose values never occur in training. A mask with its adapter is compared
with the mask alone, and with a random mask of the same size. Run it again to go on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nano"))

import afm_mlx  # isort: skip

import numpy as np
import tasks
from values import Values

from afm_mlx import cli
from afm_mlx.adapters.task_mask import GROUP, TaskMask, write_mask
from afm_mlx.files import atomic_folder, atomic_write
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, read_split
from afm_mlx.training.pruning.channel_scores import gradient_scores
from afm_mlx.training.pruning.kept_groups import group_scores, kept_counts, kept_groups

EXAMPLES, ITERS, SHARE = 600, 40, 0.5
SCORE_BATCHES = 40
CURVE = (0.25, 0.5, 0.75, 0.875)
"""Shares at which masks without an adapter are measured, too."""

_VALID = 48
_MODEL = "afm-nano"
_PRUNING = (
    "prune --model afm-nano --data {data} --save-path {out} --seed {seed} --ffn {share} --criterion gradient "
    "--task {task} --recover lora --rank 16 --iters {iters} --learning-rate 5e-3 --batch-size 4 "
    "--score-batches {batches} --steps-per-eval 20 --val-batches -1 --save-every 20"
)
WHOLE, RECOVERED, ALONE, RANDOM = "whole model", "mask and recovery", "mask alone", "random mask"

Figures = dict[str, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the tables, and return the exit status of the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data, training and random masks")
    parser.add_argument("--only", nargs="+", choices=list(tasks.TASKS), help="some of the tasks")
    parser.add_argument("--shares", nargs="+", type=float, default=[SHARE], help="0.5 by default")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="training chats of a task")
    parser.add_argument("--iters", type=int, default=ITERS, help="training steps of about 16 chats")
    parser.add_argument("--limit", type=int, help="held-out chats of a task, 50 by default")
    args = parser.parse_args(argv)
    chosen = args.only or list(tasks.TASKS)
    for task in chosen:
        write_data(args.out / "data" / task, task, args.seed, args.examples)
        for share in args.shares:
            status = make_mask(args.out, task, share, args.seed, args.iters)
            if status:
                return status
    report = measure(args.out, chosen, args.shares, args.seed, args.limit)
    text = "\n".join(table(report, chosen, share) for share in args.shares)
    with atomic_write(args.out / "table.md") as path:
        path.write_text(text)
    plot(report, chosen, args.out / "accuracy.png")
    print(f"\n{text}")
    return 0


def write_data(folder: Path, task: str, seed: int, count: int) -> None:
    """Write a task's data folder, unless it is there: `count` training chats, and a few for validation."""
    if folder.is_dir():
        return
    values = Values(random.Random(f"mask-{seed}-{task}"), "train")
    with atomic_folder(folder) as made:
        for split, chats in (("train", count), ("valid", _VALID)):
            samples = (tasks.draw_sample(task, values) for _ in range(chats))
            lines = ({k: v for k, v in sample.items() if k != "task"} for sample in samples)
            (made / f"{split}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def folder_of(out: Path, task: str, share: float) -> Path:
    return out / "masks" / f"{task}-{share:g}"


def make_mask(out: Path, task: str, share: float, seed: int, iters: int) -> int:
    """Make a mask with its adapter unless it is there; return the exit status of `afm-mlx prune`."""
    folder = folder_of(out, task, share)
    if folder.is_dir():
        return 0
    places = {"data": out / "data" / task, "out": folder, "seed": seed, "batches": SCORE_BATCHES}
    argv = shlex.split(_PRUNING.format(**places, share=share, task=task, iters=iters))
    if Path(f"{folder}-run", "run.json").is_file():
        argv.append("--resume")
    print(f"\n$ afm-mlx {shlex.join(argv)}", flush=True)
    return cli.main(argv)


def random_mask(mask: TaskMask, seed: int) -> TaskMask:
    """Return a mask that keeps as many groups of each block as another one, drawn at random."""
    rng = np.random.default_rng(seed)
    kept = np.stack([rng.permutation(row) for row in mask.kept])
    return TaskMask(kept, mask.group, "random", "random", mask.base_model_fingerprint)


def accuracies(folder: Path | None, names: Sequence[str], limit: int | None) -> dict[str, float]:
    """Return the share of right greedy answers of each named task, with a mask's folder or without."""
    model, tokenizer = afm_mlx.load(_MODEL, adapter_path=None if folder is None else str(folder))
    examples = load_examples(resolve_model(_MODEL) / "evaluation.jsonl", limit)
    found = evaluate(model, tokenizer, [each for each in examples if each.task in names]).tasks
    return {task: score.accuracy for task, score in found.items()}


def measure(
    out: Path, chosen: Sequence[str], shares: Sequence[float], seed: int, limit: int | None
) -> dict[str, dict[str, float]]:
    """Return accuracies by task, of `WHOLE` and of each mask's variants; what report.json knows is kept.

    Keys are `WHOLE`, and "<variant> <task> <share>"; a mask with its adapter answers all of the tasks.
    """
    path = out / "report.json"
    report: Figures = json.loads(path.read_text()) if path.is_file() else {}

    def add(key: str, folder: Path | None, names: Sequence[str]) -> None:
        if key not in report:
            report[key] = accuracies(folder, names, limit)
            with atomic_write(path) as temporary:
                temporary.write_text(json.dumps(report, indent=2) + "\n")
            print(f"{key}: {report[key]}", flush=True)

    add(WHOLE, None, list(tasks.TASKS))
    for task in chosen:
        for share in shares:
            add(f"{RECOVERED} {task} {share:g}", folder_of(out, task, share), list(tasks.TASKS))
        wanted = [*sorted({*shares, *CURVE})]
        if all(f"{RANDOM} {task} {share:g}" in report for share in wanted):
            continue
        for share, mask in zip(wanted, masks_of(out / "data" / task, wanted, seed), strict=True):
            with tempfile.TemporaryDirectory() as place:
                for variant, own in ((ALONE, mask), (RANDOM, random_mask(mask, seed))):
                    write_mask(Path(place, variant), own)
                    add(f"{variant} {task} {share:g}", Path(place, variant), [task])
    return report


def masks_of(data: Path, shares: Sequence[float], seed: int) -> list[TaskMask]:
    """Return the masks of several shares, by the scores of one pass, as `make_mask` chooses them."""
    source = ModelSource.open(_MODEL)
    options = TrainingOptions(iters=1, learning_rate=1e-3, seed=seed)
    recipe = Recipe(data, options, batch_size=4, packing=False)
    scores = gradient_scores(source.load(), read_split(recipe, source, "train"), SCORE_BATCHES)
    groups = group_scores(scores, GROUP)
    kept = [kept_groups(groups, kept_counts(groups, share)) for share in shares]
    return [TaskMask(each, GROUP, data.name, "gradient") for each in kept]


def table(report: Figures, chosen: Sequence[str], share: float) -> str:
    """Return a table of all tasks at one share: the variants on a mask's own task, and its mean on others."""
    heads = ["mask of", WHOLE, RECOVERED, "the same on other tasks", ALONE, RANDOM]
    lines = [f"Kept: {share:.0%}", "", _line(heads), _line(["---", *["---:"] * (len(heads) - 1)])]
    for task in chosen:
        own = report[f"{RECOVERED} {task} {share:g}"]
        others = [value for name, value in own.items() if name != task]
        cells = [report[WHOLE][task], own[task], sum(others) / len(others)]
        cells += [report[f"{variant} {task} {share:g}"][task] for variant in (ALONE, RANDOM)]
        lines.append(_line([f"`{task}`", *(f"{cell:.0%}" for cell in cells)]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plot(report: Figures, chosen: Sequence[str], path: Path) -> None:
    """Draw the mean accuracy of masks on their own tasks by the kept share, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    whole = sum(report[WHOLE][task] for task in chosen) / len(chosen)
    for variant, color in ((RECOVERED, "#0072B2"), (ALONE, "#E69F00"), (RANDOM, "#000000")):
        points: dict[float, list[float]] = {}
        for key, found in report.items():
            if key.startswith(f"{variant} "):
                task, share = key.removeprefix(f"{variant} ").split()
                points.setdefault(float(share), []).append(found[task])
        shares = sorted(points)
        means = [100 * sum(points[share]) / len(points[share]) for share in shares]
        axes.plot([*shares, 1], [*means, 100 * whole], marker="o", color=color, label=variant)
    axes.set(
        xlabel="kept share of feed-forward channels", ylabel="right answers, %", ylim=(-3, 103)
    )
    axes.grid(alpha=0.3)
    axes.legend()
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


if __name__ == "__main__":
    sys.exit(main())
