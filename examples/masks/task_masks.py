"""Make a task mask for each of the embedded model's seven tasks, recover what it loses, and measure both.

    python examples/masks/task_masks.py --out OUT --seed 0

For each task: training chats as JSONL, a mask of half of the channels, and an adapter that is trained with the
mask, as `afm-mlx prune --recover lora` does. The adapter is saved at some steps of its training, and each one
answers held-out chats whose values never occur in training. For comparison, the same training is done with a
random mask, and with another task's mask. The tables and the two plots are in OUT. Run it again to resume.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "nano"))

import afm_mlx  # isort: skip

import mlx.nn as nn
import numpy as np
import tasks
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from values import Values

from afm_mlx.adapters.task_mask import GROUP, TaskMask, read_mask, write_mask
from afm_mlx.files import atomic_folder, atomic_write
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.training.loop.trainer import Event, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, read_split
from afm_mlx.training.methods.train import train_by
from afm_mlx.training.pruning.channel_scores import gradient_scores
from afm_mlx.training.pruning.kept_groups import group_scores, kept_counts, kept_groups
from afm_mlx.training.pruning.mask_training import RecoveryTraining

EXAMPLES, STEPS, SHARE, QUESTIONS = 1200, 120, 0.5, 200
LEARNING_RATE, RANK, SCORE_BATCHES = 1e-2, 16, 20
SAVED = (0, 5, 10, 20, 40, 60)
"""Steps at which an adapter is saved, besides the last."""

SHARES = (0.25, 0.5, 0.75, 0.875)
"""Kept shares at which masks without an adapter are measured."""

COMPARED = ("suggest_reply", "summarize_thread", "rewrite_tone")
"""Tasks for which other masks are trained, too."""

OF_TASK, OF_ANOTHER, RANDOM = "its own mask", "another task's mask", "a random mask"
COLORS = {OF_TASK: "#0072B2", OF_ANOTHER: "#E69F00", RANDOM: "#000000"}
WHOLE, ELSEWHERE = "whole model", "on other tasks"
_FEW = 50  # questions of a task, where many models are measured
_VALID = 48
_MODEL = "afm-nano"
Figures = dict[str, dict[str, float]]


def main(argv: Sequence[str] | None = None) -> None:
    """Make what is missing, measure it, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data, training and random masks")
    parser.add_argument("--only", nargs="+", choices=list(tasks.TASKS), help="some of the tasks")
    parser.add_argument("--compared", nargs="*", choices=list(tasks.TASKS), default=COMPARED)
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="training chats of a task")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of some 16 chats")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="held-out chats of a task")
    args = parser.parse_args(argv)
    chosen = args.only or list(tasks.TASKS)
    report = Report(args.out, args.questions)
    report.add(WHOLE, None, list(tasks.TASKS))
    for task in chosen:
        write_data(args.out / "data" / task, task, args.seed, args.examples)
        run(report, args, task, OF_TASK)
        last = folder_of(args.out, task, OF_TASK) / f"step-{args.steps}"
        report.add(f"{ELSEWHERE} {task}", last, [t for t in tasks.TASKS if t != task], _FEW)
    for task in chosen:
        for kind in (RANDOM, OF_ANOTHER) if task in args.compared else ():
            run(report, args, task, kind)
    for task in chosen:
        measure_shares(report, args.out / "data" / task, task, args.seed)
    text = tables(report.figures, chosen, args.steps)
    with atomic_write(args.out / "tables.md") as path:
        path.write_text(text)
    plot_steps(report.figures, [t for t in chosen if t in args.compared], args.out / "steps.png")
    plot_shares(report.figures, chosen, args.steps, args.out / "accuracy.png")
    print(f"\n{text}")


class Report:
    """Accuracies by task, under a name for each model that answered; `report.json` keeps them."""

    def __init__(self, out: Path, questions: int):
        self._path, self._examples = out / "report.json", out / "questions.jsonl"
        if not self._examples.is_file():
            out.mkdir(parents=True, exist_ok=True)
            # Seed 0 made the 50 questions of each task that ship with the model.
            lines = (json.dumps(sample) for sample in tasks.test_samples(1, questions))
            self._examples.write_text("".join(f"{line}\n" for line in lines))
        known = self._path.is_file()
        self.figures: Figures = json.loads(self._path.read_text()) if known else {}

    def add(self, name: str, folder: Path | None, of: Sequence[str], limit: int | None = None):
        """Measure the share of right greedy answers with a mask's folder, unless it is known."""
        if name in self.figures:
            return
        model, tokenizer = afm_mlx.load(_MODEL, adapter_path=folder and str(folder))
        examples = load_examples(self._examples, limit)
        found = evaluate(model, tokenizer, [each for each in examples if each.task in of]).tasks
        self.figures[name] = {task: score.accuracy for task, score in found.items()}
        with atomic_write(self._path) as temporary:
            temporary.write_text(json.dumps(self.figures, indent=2) + "\n")
        print(f"{name}: {self.figures[name]}", flush=True)


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


def folder_of(out: Path, task: str, kind: str) -> Path:
    return out / "runs" / f"{task} {kind}".replace("'", "").replace(" ", "-")


def name_of(task: str, kind: str, step: int) -> str:
    return f"{kind}, {task}, step {step}"


# -- masks


def masks_of(data: Path, shares: Sequence[float], seed: int) -> list[TaskMask]:
    """Return the masks of several shares by the scores of one pass, as `afm-mlx prune` chooses them."""
    source = ModelSource.open(_MODEL)
    scores = gradient_scores(
        source.load(), read_split(recipe_of(data, seed, 1), source, "train"), SCORE_BATCHES
    )
    groups = group_scores(scores, GROUP)
    kept = [kept_groups(groups, kept_counts(groups, share)) for share in shares]
    return [TaskMask(each, GROUP, data.name, "gradient") for each in kept]


def random_mask(mask: TaskMask, seed: int) -> TaskMask:
    """Return a mask that keeps as many groups of each block as another one, drawn at random."""
    rng = np.random.default_rng(seed)
    kept = np.stack([rng.permutation(row) for row in mask.kept])
    return TaskMask(kept, mask.group, "random", "random", mask.base_model_fingerprint)


def mask_of(out: Path, task: str, kind: str, seed: int, examples: int) -> TaskMask:
    """Return a mask of one of the kinds; a task's own mask is made once."""
    tasks_list = list(tasks.TASKS)
    if kind == OF_ANOTHER:
        other = tasks_list[(tasks_list.index(task) + 1) % len(tasks_list)]
        write_data(out / "data" / other, other, seed, examples)
        return mask_of(out, other, OF_TASK, seed, examples)
    folder = out / "masks" / task
    if not folder.is_dir():
        write_mask(folder, masks_of(out / "data" / task, [SHARE], seed)[0])
    mask = read_mask(folder)
    return random_mask(mask, seed) if kind == RANDOM else mask


# -- recovery


@dataclasses.dataclass(frozen=True)
class SavedRecovery(RecoveryTraining):
    """A recovery whose model can be saved while it trains."""

    seen: list[tuple[nn.Module, ModelSource]] = dataclasses.field(default_factory=list)

    def prepare(self, model: nn.Module, source: ModelSource, *rest: Any) -> None:
        super().prepare(model, source, *rest)
        self.seen.append((model, source))


def recipe_of(data: Path, seed: int, steps: int, packing: bool | None = False) -> Recipe:
    options = TrainingOptions(
        iters=steps,
        learning_rate=LEARNING_RATE,
        seed=seed,
        steps_per_eval=5,
        val_batches=1,
        save_every=max(steps, 1000),
    )
    return Recipe(data, options, batch_size=4, packing=packing, teacher="self")


def run(report: Report, args: argparse.Namespace, task: str, kind: str) -> None:
    """Train an adapter for a mask, unless it is there, and measure it at the saved steps."""
    folder, steps = folder_of(args.out, task, kind), args.steps
    if not (folder / f"step-{steps}").is_dir():
        mask = mask_of(args.out, task, kind, args.seed, args.examples)
        write_mask(folder / "step-0", mask)
        method = SavedRecovery(rank=RANK, mask=mask)

        def on_event(event: Event) -> None:
            if isinstance(event, Validation):
                print(f"{task}, {kind}: step {event.step}, {event.valid_loss:.4f} nats", flush=True)
                if event.step in SAVED[1:] and event.step < steps and task in args.compared:
                    method.save(folder / f"step-{event.step}", *method.seen[-1], {})

        with tempfile.TemporaryDirectory() as place:
            recipe = recipe_of(args.out / "data" / task, args.seed, steps, packing=None)
            # An interrupted run begins again.
            for made in folder.glob("step-*[1-9]*"):
                made.rename(Path(place, made.name))
            train_by(
                method,
                recipe,
                folder / f"step-{steps}",
                run_path=Path(place, "run"),
                on_event=on_event,
            )
    for step in (step for step in SAVED if step < steps and (not step or task in args.compared)):
        report.add(name_of(task, kind, step), folder / f"step-{step}", [task])
    report.add(name_of(task, kind, steps), folder / f"step-{steps}", [task])


def measure_shares(report: Report, data: Path, task: str, seed: int) -> None:
    """Measure masks without an adapter, and random ones, by the kept share."""
    names = {
        (share, kind): f"{kind}, {task}, {share:g} kept" for share in SHARES for kind in COLORS
    }
    if all(names[share, kind] in report.figures for share in SHARES for kind in (OF_TASK, RANDOM)):
        return
    for share, mask in zip(SHARES, masks_of(data, SHARES, seed), strict=True):
        with tempfile.TemporaryDirectory() as place:
            for kind, own in ((OF_TASK, mask), (RANDOM, random_mask(mask, seed))):
                write_mask(Path(place, kind), own)
                report.add(names[share, kind], Path(place, kind), [task], _FEW)


# -- tables and plots


def tables(figures: Figures, chosen: Sequence[str], steps: int) -> str:
    """Return the table of all tasks with their own masks, and the table of kinds of masks."""
    heads = ["mask for", WHOLE, "mask and recovery", ELSEWHERE, "mask alone"]
    rows = []
    for task in chosen:
        elsewhere = list(figures[f"{ELSEWHERE} {task}"].values())
        own = [figures[name_of(task, OF_TASK, step)][task] for step in (steps, 0)]
        rows.append([task, figures[WHOLE][task], own[0], sum(elsewhere) / len(elsewhere), own[1]])
    saved = [*(step for step in SAVED if step < steps), steps]
    others = [
        [f"{task}, {kind}", *(figures[name_of(task, kind, step)][task] for step in saved)]
        for task in chosen
        if name_of(task, RANDOM, steps) in figures
        for kind in COLORS
        if name_of(task, kind, steps) in figures
    ]
    by_step = ["right answers to, with", *(f"{step} steps" for step in saved)]
    return _table(heads, rows) + "\n" + _table(by_step, others)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[row[0], *(f"{100 * cell:.1f}%" for cell in row[1:])] for row in rows]
    rule = ["---", *["---:"] * (len(heads) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in [heads, rule, *cells])


def plot_steps(figures: Figures, compared: Sequence[str], path: Path) -> None:
    """Draw the accuracy of each kind of mask by the steps of its recovery, a panel for each task."""
    figure = Figure(figsize=(3.6 * max(len(compared), 1), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, max(len(compared), 1), squeeze=False)[0]
    for axes, task in zip(panels, compared, strict=False):
        for kind, color in COLORS.items():
            start = f"{kind}, {task}, step "
            points = sorted(
                (int(name.removeprefix(start)), 100 * found[task])
                for name, found in figures.items()
                if name.startswith(start)
            )
            if points:
                axes.plot(*zip(*points, strict=True), "o-", color=color, label=kind)
        axes.axhline(100 * figures[WHOLE][task], color="#999999", ls=":", label=WHOLE)
        axes.set(title=task, xlabel="steps of recovery", ylabel="right answers, %", ylim=(-3, 103))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    _save(figure, path)


def plot_shares(figures: Figures, chosen: Sequence[str], steps: int, path: Path) -> None:
    """Draw the mean accuracy of masks on their own tasks by the kept share."""
    figure = Figure(figsize=(6.5, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    whole = 100 * np.mean([figures[WHOLE][task] for task in chosen])
    for kind in (OF_TASK, RANDOM):
        means = [
            100 * np.mean([figures[f"{kind}, {task}, {share:g} kept"][task] for task in chosen])
            for share in SHARES
        ]
        axes.plot([*SHARES, 1], [*means, whole], "o-", color=COLORS[kind], label=f"{kind}, alone")
    own = 100 * np.mean([figures[name_of(task, OF_TASK, steps)][task] for task in chosen])
    axes.plot([SHARE], [own], "*", ms=12, color=COLORS[OF_TASK], label=f"{OF_TASK} and recovery")
    axes.set(xlabel="kept share of feed-forward channels", ylabel="right answers, %")
    axes.set_ylim(-3, 103)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


if __name__ == "__main__":
    main()
