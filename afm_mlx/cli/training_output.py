"""What `lora` and `qat` print: what is about to be trained, how it goes, and the scores at the end."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.cli.parser import UsageError
from afm_mlx.cli.signals import Terminated, deferred_signals

if TYPE_CHECKING:
    from afm_mlx.training.data.batches import Batches
    from afm_mlx.training.loop.trainer import Event, Report
    from afm_mlx.training.loop.training_options import TrainingOptions
    from afm_mlx.training.methods.method import Method
    from afm_mlx.training.methods.recipe import Plan, Recipe
    from afm_mlx.training.methods.train import Scores, TrainingResult


class Reporter:
    """Prints a run's events, in mlx-lm's lines; on stderr where stdout is for JSON.

    Args:
        args: arguments of the command.
        bar: what `progress_bar` gives: draws how many steps are done, or None.
    """

    def __init__(self, args: argparse.Namespace, bar: Callable[[int, int], None] | None):
        self._stream = sys.stderr if args.json else sys.stdout
        self._bar = bar
        self._has_teacher = args.teacher is not None
        self._steps = 0  # of the whole run
        self._last: tuple[int, int] | None = (0, 0)  # step and tokens of the last report
        self.trainable = 0

    def on_plan(self, plan: Plan) -> None:
        self._steps = plan.options.iters
        self.trainable = plan.trainable
        for line in _plan_lines(plan):
            self._print(line)

    def on_event(self, event: Event) -> None:
        from afm_mlx.training.loop.trainer import Report, Resumed, Stepped, Testing, Validation

        match event:
            case Resumed():
                self._last = None
                self._print(f"Resumed after step {event.step}")
            case Stepped():
                if self._bar is not None:
                    self._bar(event.step, self._steps)
            case Testing():
                self._print(f"Testing {event.what or 'what was trained'}")
            case Report():
                self._print(self._report_line(event))
            case Validation():
                # The exponential of a distance from a teacher means nothing.
                perplexity = f", Val ppl {event.valid_perplexity:.3f}" * (not self._has_teacher)
                self._print(f"Iter {event.step}: Val loss {event.valid_loss:.3f}{perplexity}")

    def _report_line(self, report: Report) -> str:
        speed = ""
        if self._last is not None:
            step, tokens = self._last
            seconds = (report.tokens - tokens) / report.tokens_per_second
            speed = f"It/sec {(report.step - step) / seconds:.3f}, "
        self._last = report.step, report.tokens
        return (
            f"Iter {report.step}: Train loss {report.loss:.3f}, Learning Rate {report.learning_rate:.3e}, "
            f"{speed}Tokens/sec {report.tokens_per_second:.3f}, Trained Tokens {report.tokens}, "
            f"Peak mem {report.peak_memory / 1e9:.3f} GB"
        )

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self._stream, flush=True)
            return
        from tqdm import tqdm

        tqdm.write(line, file=self._stream)


def _plan_lines(plan: Plan) -> Iterator[str]:
    data, options = plan.data, plan.options
    millions = f"{plan.trainable / 1e6:.3f}M/{plan.parameters / 1e6:.3f}M"
    yield f"Trainable parameters: {plan.trainable / plan.parameters:.3%} ({millions})"
    for name, split in (("Train", data.train), ("Valid", data.valid), ("Test", data.test)):
        if split is not None:
            yield data_line(name, split)
    if data.valid is None:
        yield "No valid.jsonl: nothing is evaluated, and the last weights are the ones that are kept"
    kind = "packed rows" if data.train.packed else "rows of one sample"
    rows = f"{data.train.batch_size} {kind} of up to {data.train.length:,} tokens"
    yield f"Batches: {rows}, {data.train.fill:.1%} full"
    epochs = f"{options.iters / plan.steps_per_epoch:.2f} epochs of {plan.steps_per_epoch:,.1f}"
    yield f"Steps: {options.iters:,}, {epochs}"
    yield f"Learning rate: {_rate(options)}"
    if plan.memory is not None:
        yield f"Memory: up to about {plan.memory / 1e9:.2f} GB"


def data_line(name: str, split: Batches) -> str:
    """How many samples and tokens a split holds, as a line."""
    return (
        f"{name} data: {len(split):,} samples, {split.n_tokens:,} tokens, "
        f"{split.n_targets:,} of them predicted"
    )


def _rate(options: TrainingOptions) -> str:
    if options.lr_schedule is not None:
        return str(options.lr_schedule)
    cosine = f"a cosine down to {options.final_learning_rate:g}"
    then = cosine if options.schedule == "cosine" else "constant"
    return f"{options.learning_rate:g} after {options.warmup_iters:,} steps of warm-up, then {then}"


def run_training(args: argparse.Namespace, method: Method, recipe: Recipe, path: Path) -> None:
    """Train, print how it goes, and print the result.

    Args:
        args: arguments of the command.
        method, recipe, path: what is trained, by what, and the folder to make; see `train_by`.
    """
    from afm_mlx.training.methods.train import train_by

    run_path = Path(getattr(args, "run_path", None) or method.default_run_path(path))
    if args.resume and not (run_path / "run.json").exists():
        raise UsageError(f"--resume: {run_path} holds no run. Leave it out to start one.")
    with _advice(args, run_path), progress_bar("training", "step") as bar:
        reporter = Reporter(args, bar)
        result = train_by(
            method,
            recipe,
            path,
            run_path=run_path,
            resume=args.resume,
            on_plan=reporter.on_plan,
            on_event=reporter.on_event,
            stopping=deferred_signals,
        )
    if args.plot is not None:
        from afm_mlx.training.loop.run_folder import plot_metrics

        plot_metrics(run_path / "metrics.jsonl", args.plot)
    if args.json:
        facts = {
            "model": str(args.model),
            "data": str(args.data),
            "path": str(result.path),
            "run_path": str(result.run_path),
            "trainable_parameters": reporter.trainable,
            **dataclasses.asdict(result.outcome),
            "test_loss": result.test_loss,
            "test_perplexity": result.test_perplexity,
            "test": None if result.test is None else scores_dict(result.test),
        }
        print_json(facts)
    else:
        _print_result(args, result)


def _print_result(args: argparse.Namespace, result: TrainingResult) -> None:
    outcome = result.outcome
    if outcome.stopped_early:
        evaluations = f"{args.patience} evaluations without a better one"
        print(f"Stopped early, after {outcome.steps} steps: {evaluations}")
    if outcome.best_loss is not None:
        print(f"Best: Val loss {outcome.best_loss:.3f} after step {outcome.best_step}")
    if result.test is not None:
        print_scores(result.test)
    print(f"Saved to {result.path}")


def print_scores(scores: Scores) -> None:
    """Print the loss on test.jsonl with and without what was trained; the first line is as mlx-lm has it."""
    before, after = scores.untrained, scores.trained or scores.untrained
    print(f"Test loss {after.loss:.3f}, Test ppl {after.perplexity:.3f}.")
    tokens = f"{after.tokens:,} tokens"
    if scores.trained is None:
        print(f"Over {tokens}, {scores.label}")
        return
    label = scores.label[:1].upper() + scores.label[1:]
    figures = f"loss {before.loss:.3f}, ppl {before.perplexity:.3f}"
    print(f"{label}: {figures}; both over the same {tokens}")
    if after.acceptance is not None and before.acceptance is not None:
        print(
            f"The target keeps {after.acceptance:.1%} of what is proposed; {scores.label} it was "
            f"{before.acceptance:.1%}"
        )


def scores_dict(scores: Scores) -> dict[str, Any]:
    """The scores as JSON: `trained` and `untrained`."""
    return {
        "trained": None if scores.trained is None else scores.trained.to_dict(),
        "untrained": scores.untrained.to_dict(),
    }


@contextmanager
def _advice(args: argparse.Namespace, run_path: Path) -> Iterator[None]:
    """When a training can't start or is stopped, say how to go on with its run and how to start anew."""
    from afm_mlx.training.loop.run_folder import RunExistsError

    resume = args.command_line if args.resume else f"{args.command_line} --resume"
    flag = "--adapter-path" if args.save_path is None else "--save-path"
    advice = f"To go on with it: {resume}. To start anew, choose another folder ({flag})."
    try:
        yield
    except RunExistsError as error:
        raise UsageError(f"{error.path} holds a training run already. {advice}") from None
    except (KeyboardInterrupt, Terminated) as stopped:
        if (run_path / "run.json").exists():
            stopped.add_note(f"The run is kept in {run_path}. {advice}")
        raise
