"""Arguments and output that `lora` and `qat` share."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import options
from afm_mlx.cli.output import add_json, print_json, progress_bar
from afm_mlx.cli.parser import UsageError, integer, number

if TYPE_CHECKING:
    from afm_mlx.training.events import Event
    from afm_mlx.training.methods import Result
    from afm_mlx.training.recipe import Plan, Recipe

ITERS = 1000  # mlx-lm's default
WARMUP_SHARE = 0.05


def add_training(parser: argparse.ArgumentParser, learning_rate: str) -> None:
    """The arguments of data, loop and teacher.

    Args:
        parser: of a command.
        learning_rate: what `--learning-rate` is by default, in words.
    """
    parser.add_argument(
        "--model",
        default=options.EMBEDDED_MODEL,
        help="model folder, hub id, or the name of the embedded model",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one .jsonl "
        'file. Lines are {"messages"}, {"prompt", "completion"}, {"text"}, or a list of messages',
    )
    _add_data(parser)
    _add_loop(parser, learning_rate)
    _add_teacher(parser)
    _add_run(parser)
    add_json(parser)
    for reason, *names in (
        ("metrics go to metrics.jsonl in the run's folder; --plot draws them", "--report-to"),
        ("there is nothing to report to", "--project-name"),
        ("AdamW's are fixed", "--optimizer-config"),
        (
            "use --learning-rate, --warmup-iters, --schedule and --final-learning-rate",
            "--lr-schedule",
        ),
        ("MLX's cache needs no clearing here", "--clear-cache-threshold"),
        ("all of test.jsonl is measured", "--test-batches"),
    ):
        options.add_unavailable(parser, reason, *names)
    options.add_unavailable(
        parser, "code in a model's folder is not run here", "--trust-remote-code", nargs=0
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--batch-size", type=integer(1), default=4, help="rows of a batch")
    group.add_argument(
        "--max-seq-length",
        type=integer(2),
        default=2048,
        help="the most tokens of a sample, and of a row; longer texts are cut, longer chats an error",
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put several samples into a row, which don't see each other; the default for AFM models",
    )
    group.add_argument(
        "--mask-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train on what the assistant wrote only",
    )
    group.add_argument(
        "--prompt-weight",
        type=number(0),
        help="of the loss of all other tokens; 0, and 1 with --no-mask-prompt",
    )


def _add_loop(parser: argparse.ArgumentParser, learning_rate: str) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--iters", type=integer(1), help=f"steps; {ITERS} by default")
    group.add_argument("--epochs", type=number(0), help="passes over the data, instead of --iters")
    group.add_argument(
        "--learning-rate", type=number(0), help=f"the highest; {learning_rate} by default"
    )
    group.add_argument(
        "--warmup-iters",
        type=integer(0),
        help="steps of linear warm-up; by default 5%% of all, 100 at most",
    )
    group.add_argument(
        "--schedule",
        choices=["cosine", "constant"],
        default="cosine",
        help="what the learning rate does after that",
    )
    group.add_argument(
        "--final-learning-rate", type=number(0), default=0.0, help="at the end of the cosine"
    )
    group.add_argument(
        "--grad-accumulation-steps",
        type=integer(1),
        default=1,
        help="batches that make one step",
    )
    group.add_argument(
        "--grad-checkpoint",
        action="store_true",
        help="compute each block twice instead of keeping its activations, to use less memory",
    )
    group.add_argument(
        "--clip-grad-norm", type=number(0), default=1.0, help="the most it may be; 0 for any"
    )
    group.add_argument("--weight-decay", type=number(0), default=0.0, help="of AdamW")
    group.add_argument(
        "--optimizer", choices=["adamw"], default="adamw", help="AdamW is the one there is"
    )
    group.add_argument("--seed", type=integer(0, options.MAX_SEED), default=0)


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument("--teacher", metavar="MODEL", help="model whose predictions to imitate")
    group.add_argument(
        "--distillation-weight",
        type=number(0, 1),
        help="of the distance from the teacher; the rest is that of the data's cross-entropy. 1 by default",
    )
    group.add_argument(
        "--distillation-temperature",
        type=number(1e-3),
        help="above 1, the teacher's unlikely tokens count more; 1 by default",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was interrupted, with the arguments that it was started with",
    )
    group.add_argument(
        "--val-batches", type=integer(-1), default=25, help="batches of an evaluation; -1 for all"
    )
    group.add_argument("--steps-per-report", type=integer(1), default=10)
    group.add_argument("--steps-per-eval", type=integer(1), default=200)
    group.add_argument(
        "--save-every", type=integer(1), default=100, help="steps between checkpoints"
    )
    group.add_argument(
        "--patience",
        type=integer(1),
        help="stop after this many evaluations without a better one; the best weights are kept anyway",
    )
    group.add_argument(
        "--ema-decay",
        type=number(0, 0.999999),
        help="keep an average of the weights with this decay; 0 for none",
    )
    group.add_argument(
        "--test", action="store_true", help="measure the loss on test.jsonl at the end"
    )
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw losses and learning rate (needs matplotlib)"
    )


def recipe_of(args: argparse.Namespace, learning_rate: float) -> Recipe:
    """What `add_training`'s arguments ask for.

    Raises:
        UsageError: when they contradict each other.
    """
    _check(args)
    from afm_mlx.training.options import TrainingOptions
    from afm_mlx.training.recipe import Recipe

    warmup = args.warmup_iters or 0
    # The number of steps in epochs is only known with the data.
    iters = warmup + 1 if args.epochs is not None else args.iters or ITERS
    same = {field.name for field in dataclasses.fields(TrainingOptions)} & set(vars(args))
    values = {name: getattr(args, name) for name in same}
    loop = TrainingOptions(
        **values
        | {
            "iters": iters,
            "learning_rate": learning_rate if args.learning_rate is None else args.learning_rate,
            "warmup_iters": warmup,
            "clip_grad_norm": args.clip_grad_norm or None,
            "ema_decay": args.ema_decay or None,
        }
    )
    return Recipe(
        data=args.data,
        options=loop,
        model=args.model,
        epochs=args.epochs,
        warmup_share=WARMUP_SHARE if args.warmup_iters is None else None,
        batch_size=args.batch_size,
        max_seq_length=args.max_seq_length,
        packing=args.packing,
        prompt_weight=_prompt_weight(args),
        teacher=args.teacher,
        distillation_weight=1.0 if args.distillation_weight is None else args.distillation_weight,
        distillation_temperature=args.distillation_temperature or 1.0,
        test=args.test,
    )


def _check(args: argparse.Namespace) -> None:
    if args.data is None:
        raise UsageError("--data is missing; it says what to train on.")
    if not Path(args.data).exists():
        raise UsageError(
            f"there is no file or folder {args.data}; data sets of the hub are not fetched."
        )
    if args.iters is not None and args.epochs is not None:
        raise UsageError("--iters and --epochs both say how long; choose one.")
    if args.epochs == 0 or args.learning_rate == 0:
        name = "--epochs" if args.epochs == 0 else "--learning-rate"
        raise UsageError(f"{name} is 0; allowed is more than that.")
    if args.val_batches == 0:
        raise UsageError("--val-batches is 0; allowed are 1 and more, or -1 for all.")
    if args.teacher is None:
        for name in ("distillation_weight", "distillation_temperature"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} without --teacher would do nothing. Add --teacher, or "
                    "leave it out."
                )
    if args.plot is not None:
        _check_plot(args.plot)


def _check_plot(path: str) -> None:
    """What would only be found when hours of training are over."""
    if not path.endswith(".png"):
        raise UsageError(f"--plot is {path}; a name that ends in .png is needed.")
    if not Path(path).parent.is_dir():
        raise UsageError(
            f"--plot is {path}; there is no folder {Path(path).parent}. Make it first."
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed. Install it (pip install 'afm-mlx[train]'), or "
            "leave --plot out."
        )


def _prompt_weight(args: argparse.Namespace) -> float:
    if args.prompt_weight is None:
        return 0.0 if args.mask_prompt else 1.0
    if not args.mask_prompt and args.prompt_weight != 1:
        raise UsageError(
            "--no-mask-prompt is --prompt-weight 1; they contradict each other. Choose one."
        )
    return args.prompt_weight


# -- what is printed


class Reporter:
    """Prints what a run tells, in mlx-lm's lines; on stderr where stdout is for JSON.

    Args:
        args: of the command.
        bar: of `progress_bar`.
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
        from afm_mlx.training.events import Evaluation, Report, Resumed, Stepped

        if isinstance(event, Resumed):
            self._last = None
            self._print(f"Resumed after step {event.step}")
        elif isinstance(event, Stepped):
            if self._bar is not None:
                self._bar(event.step, self._steps)
        elif isinstance(event, Report):
            self._print(self._report_line(event))
        elif isinstance(event, Evaluation):
            line = f"Iter {event.step}: Val loss {event.valid_loss:.3f}"
            # The exponential of a distance from a teacher means nothing.
            self._print(
                line if self._has_teacher else f"{line}, Val ppl {event.valid_perplexity:.3f}"
            )

    def _report_line(self, report: Any) -> str:
        parts = [
            f"Train loss {report.loss:.3f}",
            f"Learning Rate {report.learning_rate:.3e}",
            f"Tokens/sec {report.tokens_per_second:.3f}",
            f"Trained Tokens {report.tokens}",
            f"Peak mem {report.peak_memory / 1e9:.3f} GB",
        ]
        if self._last is not None:
            step, tokens = self._last
            seconds = (report.tokens - tokens) / report.tokens_per_second
            parts.insert(2, f"It/sec {(report.step - step) / seconds:.3f}")
        self._last = report.step, report.tokens
        return f"Iter {report.step}: {', '.join(parts)}"

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self._stream, flush=True)
            return
        from tqdm import tqdm

        tqdm.write(line, file=self._stream)


def _plan_lines(plan: Plan) -> Iterator[str]:
    train, options = plan.data.train, plan.options
    share = plan.trainable / plan.parameters
    yield (
        f"Trainable parameters: {share:.3%} ({plan.trainable / 1e6:.3f}M/{plan.parameters / 1e6:.3f}M)"
    )
    for name, split in (("Train", train), ("Valid", plan.data.valid), ("Test", plan.data.test)):
        if split is not None:
            yield (
                f"{name} data: {split.samples:,} samples, {split.tokens:,} tokens, "
                f"{split.targets:,} of them predicted"
            )
    if plan.data.valid is None:
        yield "No valid.jsonl: nothing is evaluated, and the last weights are the ones that are kept"
    kind = "packed rows" if train.batches.packed else "rows of one sample"
    yield (
        f"Batches: {train.batches.batch_size} {kind} of up to {train.batches.length:,} tokens, "
        f"{train.batches.fill:.1%} full"
    )
    yield (
        f"Steps: {options.iters:,}, {options.iters / plan.steps_per_epoch:.2f} epochs of "
        f"{plan.steps_per_epoch:,.1f}"
    )
    if plan.memory is not None:
        yield f"Memory: up to about {plan.memory / 1e9:.2f} GB"


def run_training(args: argparse.Namespace, start: Callable[..., Result], run_path: Path) -> None:
    """Start a training and print what comes of it.

    Args:
        args: of the command.
        start: a training that still takes `resume`, `on_plan` and `on_event`.
        run_path: folder of the run.
    """
    if args.resume and not (run_path / "run.json").exists():
        raise UsageError(f"--resume: {run_path} holds no run. Leave it out to start one.")
    with _advice_after_interrupt(run_path), progress_bar("training", "step") as bar:
        reporter = Reporter(args, bar)
        result = start(resume=args.resume, on_plan=reporter.on_plan, on_event=reporter.on_event)
    if args.plot is not None:
        from afm_mlx.training.plot import plot_metrics

        plot_metrics(run_path / "metrics.jsonl", args.plot)
    facts = _facts(args, result, reporter.trainable)
    if args.json:
        print_json(facts)
        return
    outcome = result.outcome
    if outcome.stopped_early:
        print(
            f"Stopped early, after {outcome.steps} steps: {args.patience} evaluations without a better one"
        )
    if outcome.best_loss is not None:
        print(f"Best: Val loss {outcome.best_loss:.3f} after step {outcome.best_step}")
    if result.test_loss is not None:
        print(f"Test loss {result.test_loss:.3f}, Test ppl {result.test_perplexity:.3f}.")
    print(f"Saved to {result.path}")


def _facts(args: argparse.Namespace, result: Result, trainable: int) -> dict[str, Any]:
    return {
        "model": str(args.model),
        "data": str(args.data),
        "path": str(result.path),
        "run_path": str(result.run_path),
        "trainable_parameters": trainable,
        **dataclasses.asdict(result.outcome),
        "test_loss": result.test_loss,
        "test_perplexity": result.test_perplexity,
    }


@contextmanager
def _advice_after_interrupt(run_path: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if (run_path / "run.json").exists():
            print(
                f"\nThe run is kept in {run_path}; the same command with --resume goes on with it.",
                file=sys.stderr,
            )
        raise
