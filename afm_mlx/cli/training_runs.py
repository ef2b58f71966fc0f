"""Tables of arguments, recipes, and output of runs, for the commands that train: `lora`, `qat` and `prune`.

An argument that has the name of a field of `Recipe`, `TrainingOptions` or a method's class sets that field. An
argument that a preset may set is None unless given; the field's default then holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import model_options
from afm_mlx.cli.arguments import (
    FLAG,
    MAX_NUMBER,
    MAX_ROWS,
    SWITCH,
    Argument,
    Tables,
    UsageError,
    count_or_all,
    flag_of,
    integer,
    json_object,
    number,
    positive,
    unavailable,
)
from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.cli.signals import Terminated, deferred_signals
from afm_mlx.errors import named, shown
from afm_mlx.installation import install_command
from afm_mlx.progress import Progress

if TYPE_CHECKING:
    from afm_mlx.training.data.batches import AnyBatches
    from afm_mlx.training.loop.trainer import Event
    from afm_mlx.training.loop.training_options import TrainingOptions
    from afm_mlx.training.methods.method import Method
    from afm_mlx.training.methods.recipe import Plan, Recipe
    from afm_mlx.training.methods.train import Scores


MAX_EPOCHS, MAX_SIZE = 10**6, 10**15  # MAX_SIZE is in bytes
EPOCHS, STEPS_BETWEEN = 3, (100, 1000)
"""Default length of training: passes over the data, and the minimum and maximum of steps."""

FEATURES = ("prompt", "completion", "chat", "text")  # keys that mlx-lm's YAML files may rename

ALTERNATIVES = (
    ("iters", "epochs", "how long to train"),
    ("warmup_iters", "warmup_epochs", "how long to warm up"),
    *(
        (name, "lr_schedule", "what the learning rate does")
        for name in ("warmup_iters", "warmup_epochs", "schedule", "final_learning_rate")
    ),
)
"""Pairs of arguments that set the same thing, and what they set; see `arguments.parse`."""


def size(text: str) -> int:
    """Convert a number of bytes, which may have the unit M, MB, G or GB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a size; allowed are sizes such as 0, 500MB and 2GB"
        )
    unit = (match[2] or "").upper()[:1]
    nbytes = float(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[unit]
    if nbytes > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{named(text)} is too much; allowed is up to 1000000GB")
    return int(nbytes)


def parts_of_model(text: str) -> tuple[str, ...]:
    """Convert names of parts that are separated by commas; `image_inputs.check_parts` checks them."""
    return tuple(part.strip() for part in text.split(","))


# fmt: off
_DISTILLATION = [
    Argument("--teacher", None, "model whose predictions to imitate", metavar="MODEL"),
    Argument("--teacher-adapter", None, "adapter that the teacher runs with", metavar="FOLDER"),
    Argument("--distillation-weight", number(0, 1),
             "weight of the distance from the teacher, 1 by default; the loss on the data itself gets the "
             "rest"),
    Argument("--distillation-temperature", number(1e-3),
             "temperature of the predictions: above 1, the teacher's unlikely tokens count more; 1 by default"),
    Argument("--distillation-divergence", ["forward", "reverse"],
             "forward, KL(teacher || model), by default; reverse, KL(model || teacher), for draft models"),
]
LORA_PARAMETERS = [
    Argument("--rank", integer(1), "columns of A and rows of B; 16 by default"),
    Argument("--scale", number(0), "factor of the adapter, which is alpha / rank; 0.5 by default"),
    Argument("--dropout", number(0, 0.999),
             "share of the adapter's inputs that is dropped in training; 0 by default"),
    Argument("--keys", None,
             "layers to adapt, by their names in a block, such as mlp.up_proj; all linear ones by default",
             nargs="+", metavar="NAME"),
]
TRAIN_PARTS = Argument("--train-parts", parts_of_model,
                       "parts of a model that takes images to train, separated by commas: text, adaptor and "
                       "encoder; text by default",
                       metavar="PARTS")
_DATA = [
    Argument("--batch-size", integer(1, MAX_ROWS), "rows of a batch; 4 by default"),
    Argument("--max-seq-length", integer(2),
             "maximum tokens of a sample, and of a row; longer texts are cut, longer chats an error. "
             "By default 2048, or the model's context if that is less, and packed rows of some four "
             "samples"),
    Argument("--packing", SWITCH,
             "put several samples, which don't see each other, into a row; the default for AFM models"),
    Argument("--mask-prompt", SWITCH, "train only on what the assistant wrote", True),
    Argument("--prompt-weight", number(0),
             "weight of the loss of tokens that the assistant did not write; by default 0, and 1 with "
             "--no-mask-prompt"),
    *(Argument(f"--{name}-feature", None,
               f"what the data calls {'messages' if name == 'chat' else name!r}, as in mlx-lm",
               metavar="KEY")
      for name in FEATURES),
]
_RUN = [
    Argument("--resume", FLAG,
             "go on with a run that was interrupted, with the arguments that it was started with"),
    Argument("--val-batches", count_or_all, "batches of an evaluation; -1 for all", 25),
    Argument("--steps-per-report", integer(1), "steps between reports", 10),
    Argument("--steps-per-eval", integer(1), "steps between evaluations on valid.jsonl", 200),
    Argument("--save-every", integer(1), "steps between checkpoints", 100),
    Argument("--best-by", None,
             "metric of an evaluation by which the best weights are chosen, such as accuracy; the "
             "loss by default",
             metavar="METRIC"),
    Argument("--patience", integer(1),
             "stop after this many evaluations without improvement; the best weights are kept in "
             "any case"),
    Argument("--ema-decay", number(0, 0.999999),
             "keep an average of the weights with this decay; 0 for none"),
    Argument("--test", FLAG,
             "measure the loss on test.jsonl at the end, with what was trained and without"),
    Argument("--test-batches", count_or_all, "batches of test.jsonl that are measured; -1 for all", -1),
    Argument("--plot", None, "draw losses and learning rate (needs matplotlib)", metavar="FILE.png"),
]


def training_tables(learning_rate: str, *own: Argument) -> Tables:
    """Return tables of arguments: a command's `own`, and the ones of all commands that train.

    `learning_rate` describes the default of `--learning-rate`.
    """
    return {
        "options": [
            *own,
            model_options.MODEL,
            Argument("--force", FLAG, "take an adapter that was made for another model, if its shapes fit"),
            Argument("--data", None,
                     "a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one "
                     '.jsonl file; .json, .csv and .gz are read, too. Lines are {"messages"}, {"prompt", '
                     '"completion"}, {"text"}, a list of messages, or records of ShareGPT or Alpaca',
                     metavar="PATH"),
            model_options.JSON,
            unavailable("--report-to",
                        "nothing is sent to wandb or swanlab; metrics go to metrics.jsonl in the run's folder, "
                        "and --plot draws them"),
            unavailable("--project-name", "it names a project for --report-to, which is not available"),
            unavailable("--hf-dataset", "data sets of the hub are not fetched; --data takes files"),
            unavailable("--trust-remote-code", "code in a model's folder is not run here", nargs=0),
        ],
        "data": _DATA,
        "training": [
            Argument("--iters", integer(1),
                     f"steps; by default {EPOCHS} passes over the data, but {STEPS_BETWEEN[0]} steps at least "
                     f"and {STEPS_BETWEEN[1]} at most"),
            Argument("--epochs", positive(MAX_EPOCHS), "passes over the data, instead of --iters"),
            Argument("--learning-rate", positive(), f"the highest learning rate; {learning_rate} by default"),
            Argument("--warmup-iters", integer(0),
                     "steps of linear warm-up; by default 5%% of all, 100 at most"),
            Argument("--warmup-epochs", number(0, MAX_EPOCHS),
                     "passes over the data of linear warm-up, instead of --warmup-iters"),
            Argument("--schedule", ["cosine", "constant"],
                     "what the learning rate does after the warm-up; cosine by default, constant for draft "
                     "models"),
            Argument("--final-learning-rate", number(0),
                     "learning rate at the end of the cosine; 0 by default"),
            Argument("--lr-schedule", json_object,
                     "learning rate schedule in mlx-lm's form: name, arguments, warmup and warmup_init in one "
                     "object"),
            Argument("--grad-accumulation-steps", integer(1), "batches that make one step; 1 by default"),
            Argument("--grad-checkpoint", FLAG,
                     "compute each block twice instead of keeping its activations, to use less memory"),
            Argument("--clip-grad-norm", number(0),
                     "maximum norm of a gradient, 1 by default; 0 for no limit"),
            Argument("--weight-decay", number(0), "weight decay of all weights; 0 by default"),
            Argument("--optimizer", ["adamw", "adam", "muon"],
                     "adam is AdamW without weight decay; muon is Muon for matrices of blocks and adapters, "
                     "and AdamW for the rest, at AdamW's learning rate", "adamw"),
            Argument("--optimizer-config", json_object,
                     "betas, eps, weight_decay and muon's momentum, by the optimizer's name as in mlx-lm: "
                     '{"adamw": {"betas": [0.9, 0.95]}}'),
            Argument("--clear-cache-threshold", size,
                     "memory, such as 2GB, that MLX may keep for reuse between steps; MLX's own limit by "
                     "default",
                     metavar="SIZE"),
            Argument("--seed", integer(0, model_options.MAX_SEED), "seed of the random numbers", 0),
        ],
        "distillation": _DISTILLATION,
        "run": _RUN,
    }
# fmt: on


# -- the recipe

WARMUP_SHARE = 0.05


def fill(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Set each argument of `args` that has no value to its value in `values`."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def fields_given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the values of the arguments that are named like a field of the dataclass `kind`."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def recipe_of(args: argparse.Namespace, learning_rate: float) -> Recipe:
    """Make the recipe that the arguments of `training_tables` describe.

    Args:
        args: the parsed arguments.
        learning_rate: default of `--learning-rate`.

    Raises:
        UsageError: if arguments contradict each other.
    """
    if args.data is None:
        raise UsageError("--data is missing; it says what to train on.")
    if not Path(args.data).exists():
        raise UsageError(
            f"there is no file or folder {args.data}; data sets of the hub are not fetched."
        )
    for name in (row.name for row in _DISTILLATION if args.teacher is None):
        if getattr(args, name) is not None:
            raise UsageError(
                f"{flag_of(name)} without --teacher would do nothing. Add --teacher, or leave it out."
            )
    if args.plot is not None:  # hours of training are not to be spent before an error
        folder = Path(args.plot).parent
        if not args.plot.endswith(".png"):
            raise UsageError(f"--plot is {args.plot}; a name that ends in .png is needed.")
        if not folder.is_dir():
            raise UsageError(f"--plot is {args.plot}; there is no folder {folder}. Make it first.")
        if find_spec("matplotlib") is None:
            raise UsageError(
                f"--plot needs matplotlib, which is not installed. Install it ({install_command('train')}), "
                "or leave --plot out."
            )
    options = _options(args, learning_rate)
    from afm_mlx.training.methods.recipe import Recipe

    values = fields_given(args, Recipe)
    if args.iters is None and args.epochs is None:
        values |= {"epochs": EPOCHS, "steps_between": STEPS_BETWEEN}
    if args.warmup_iters is None and args.warmup_epochs is None and args.lr_schedule is None:
        values["warmup_share"] = WARMUP_SHARE
    if args.distillation_divergence is not None:
        values["divergence"] = args.distillation_divergence
    if args.prompt_weight is None:
        values["prompt_weight"] = 0.0 if args.mask_prompt else 1.0
    elif not args.mask_prompt and args.prompt_weight != 1:
        raise UsageError(
            "--no-mask-prompt is --prompt-weight 1; they contradict each other. Choose one."
        )
    return Recipe(options=options, features=features_of(args), **values)


def features_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the data's keys by the standard names that they stand for."""
    names = {name: getattr(args, f"{name}_feature") for name in FEATURES}
    names["messages"] = names.pop("chat")
    return {name: key for name, key in names.items() if key not in (None, name)}


def _options(args: argparse.Namespace, learning_rate: float) -> TrainingOptions:
    """Make the loop's options; the number of steps may depend on the data, see `Recipe.loop_options`."""
    values = {"learning_rate": learning_rate, "warmup_iters": 0} | optimizer_settings(args)
    from afm_mlx.training.loop.training_options import TrainingOptions

    values |= fields_given(args, TrainingOptions)
    # Messages name the rate that `--lr-schedule` starts from.
    arguments = (args.lr_schedule or {}).get("arguments")
    first = arguments[0] if isinstance(arguments, list) and arguments else 0
    if isinstance(first, int | float) and first > 0:
        values["learning_rate"] = first
    if args.optimizer == "adam" and values.get("weight_decay"):
        raise UsageError(
            "adam has no weight decay; use --optimizer adamw, or leave --weight-decay out."
        )
    # The number of steps in epochs is only known with the data.
    values.setdefault("iters", values["warmup_iters"] + 1)
    values["optimizer"] = "adamw" if args.optimizer == "adam" else args.optimizer
    without = [name for name in ("clip_grad_norm", "ema_decay") if values.get(name) == 0]
    return TrainingOptions(**values | dict.fromkeys(without))


def optimizer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `TrainingOptions` that `--optimizer-config` sets."""
    given = (args.optimizer_config or {}).get(args.optimizer) or {}
    number_keys = ("eps", "weight_decay", *(["momentum"] if args.optimizer == "muon" else []))
    allowed = {"betas", "bias_correction", *number_keys}
    if not isinstance(given, dict) or not given.keys() <= allowed:
        raise UsageError(
            f"--optimizer-config has {shown(given)} for {args.optimizer}; allowed are "
            f"{', '.join(sorted(allowed))}."
        )
    if given.get("bias_correction") is False:
        raise UsageError("--optimizer-config: bias_correction is always on here; leave it out.")
    betas = given.get("betas", [0.9, 0.999])
    others = {name: given[name] for name in number_keys if given.get(name) is not None}
    numbers = [*betas, *others.values()] if isinstance(betas, list) else []
    are_numbers = all(type(n) in (int, float) and abs(n) <= MAX_NUMBER for n in numbers)
    if len(numbers) != 2 + len(others) or not are_numbers:
        raise UsageError(
            f"--optimizer-config has {shown(given)}; betas are a list of two numbers, and "
            f"{' and '.join(number_keys)} are one each, up to {MAX_NUMBER:g}."
        )
    return {"betas": tuple(betas)} | others


# -- the run and its output


class Reporter:
    """Print a run's events in mlx-lm's format; on stderr with `--json`, above the bars on a terminal.

    `bar` shows steps; what is computed before the first one has a bar of its own, which `bars` closes.
    """

    def __init__(self, args: argparse.Namespace, bar: Progress | None, bars: ExitStack):
        self._stream = sys.stderr if args.json else sys.stdout
        self._bar, self._bars = bar, bars
        self._preparing: Progress | None = None
        self._unit = "tokens"
        self._steps = 0  # of the whole run
        self._last: tuple[int, int] | None = (0, 0)  # step and tokens of the last report
        self.trainable = 0

    def on_plan(self, plan: Plan) -> None:
        self._steps = plan.options.iters
        self._last = (0, 0)  # of this run: there may be several
        self.trainable = plan.trainable
        self._unit = plan.data.train.unit
        for line in _plan_lines(plan):
            self.line(line)

    def on_event(self, event: Event) -> None:
        from afm_mlx.training.loop.trainer import (
            Preparing,
            Report,
            Resumed,
            Stepped,
            Testing,
            Validation,
        )

        match event:
            case Preparing():
                if event.done == 0:
                    self.line(f"Computing {event.what}")
                    self._preparing = self._bars.enter_context(progress_bar("preparing", "batch"))
                elif self._preparing is not None:
                    self._preparing(event.done, event.total)
                if event.done == event.total:
                    self._bars.close()
            case Resumed():
                self._last = None
                self.line(f"Resumed after step {event.step}")
            case Stepped():
                if self._bar is not None:
                    self._bar(event.step, self._steps)
            case Testing():
                self.line(f"Testing {event.what or 'what was trained'}")
            case Report():
                speed, unit = "", self._unit.capitalize()
                if self._last is not None:
                    step, tokens = self._last
                    seconds = (event.tokens - tokens) / event.tokens_per_second
                    speed = f"It/sec {(event.step - step) / seconds:.3f}, "
                self._last = event.step, event.tokens
                more = "".join(f", {metric_text(*each)}" for each in event.metrics.items())
                self.line(
                    f"Iter {event.step}: Train loss {event.loss:.3f}, Learning Rate {event.learning_rate:.3e}, "
                    f"{speed}{unit}/sec {event.tokens_per_second:.3f}, Trained {unit} {event.tokens}, "
                    f"Peak mem {event.peak_memory / 1e9:.3f} GB{more}"
                )
            case Validation():
                more = "".join(f", Val {metric_text(*each)}" for each in event.metrics.items())
                if event.valid_perplexity is not None:
                    more = f", Val ppl {event.valid_perplexity:.3f}{more}"
                self.line(f"Iter {event.step}: Val loss {event.valid_loss:.3f}{more}")

    def line(self, line: str) -> None:
        """Print a line above the bar."""
        if self._bar is None:
            print(line, file=self._stream, flush=True)
            return
        from tqdm import tqdm

        tqdm.write(line, file=self._stream)


def _plan_lines(plan: Plan) -> Iterator[str]:
    data, options = plan.data, plan.options
    if plan.ranks > 1:
        yield f"Ranks: {plan.ranks}, which split the rows of each batch"
    millions = f"{plan.trainable / 1e6:.3f}M/{plan.parameters / 1e6:.3f}M"
    yield f"Trainable parameters: {plan.trainable / plan.parameters:.3%} ({millions})"
    for name, split in (("Train", data.train), ("Valid", data.valid), ("Test", data.test)):
        if split is not None:
            yield data_line(name, split)
    if data.valid is None:
        yield "No valid.jsonl: nothing is evaluated, and the last weights are the ones that are kept"
    yield f"Batches: {data.train.layout}"
    epochs = f"{options.iters / plan.steps_per_epoch:.2f} epochs of {plan.steps_per_epoch:,.1f}"
    yield f"Steps: {options.iters:,}, {epochs}"
    cosine = f"a cosine down to {options.final_learning_rate:g}"
    then = cosine if options.schedule == "cosine" else "constant"
    rate = f"{options.learning_rate:g} after {options.warmup_iters:,} steps of warm-up, then {then}"
    yield f"Learning rate: {rate if options.lr_schedule is None else options.lr_schedule}"
    if plan.memory is not None:
        yield f"Memory: up to about {plan.memory / 1e9:.2f} GB" + " on each rank" * (plan.ranks > 1)


def data_line(name: str, split: AnyBatches) -> str:
    """Return a line with the number of samples and tokens of a split."""
    return f"{name} data: {split.summary}"


def run_training(args: argparse.Namespace, method: Method, recipe: Recipe, path: Path) -> None:
    """Train as `train_by` does; rank 0 prints progress and the result."""
    from afm_mlx.ranks import join_ranks
    from afm_mlx.training.methods.train import train_by

    is_first = join_ranks().is_first

    run_path = Path(getattr(args, "run_path", None) or method.default_run_path(path))
    if is_first and args.resume and not (run_path / "run.json").exists():
        raise UsageError(f"--resume: {run_path} holds no run. Leave it out to start one.")
    shown_bar = progress_bar("training", "step", is_first)
    with run_advice(args, run_path), shown_bar as bar, ExitStack() as bars:
        reporter = Reporter(args, bar, bars)
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
    if not is_first:
        return
    if args.plot is not None:
        from afm_mlx.training.loop.run_folder import plot_metrics

        plot_metrics(run_path / "metrics.jsonl", args.plot)
    if args.json:
        facts: dict[str, Any] = {
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
        return
    outcome = result.outcome
    if outcome.stopped_early:
        evaluations = f"{args.patience} evaluations without a better one"
        print(f"Stopped early, after {outcome.steps} steps: {evaluations}")
    if outcome.best_loss is not None:
        best = metric_text("loss", outcome.best_loss)
        if args.best_by is not None and args.best_by != "loss":
            best = metric_text(args.best_by, outcome.best_metrics[args.best_by])
        print(f"Best: Val {best} after step {outcome.best_step}")
    if result.test is not None:
        print_scores(result.test)
    print(f"Saved to {result.path}")


_SHARES = ("accuracy", "recall_at_1", "exchanges")  # metrics that are shown in percent


def metric_text(name: str, value: float) -> str:
    """Return a metric's name and value, for people."""
    shown_name = name.replace("_at_", "@").replace("_", " ")
    return f"{shown_name} {value:.1%}" if name in _SHARES else f"{shown_name} {value:.3f}"


def print_scores(scores: Scores) -> None:
    """Print the loss on test.jsonl with and without the training; the first line is mlx-lm's."""
    before, after = scores.untrained, scores.trained or scores.untrained
    if after.unit != "tokens":
        metrics = "".join(f", Test {metric_text(*each)}" for each in after.metrics.items())
        print(f"Test loss {after.loss:.3f}{metrics}, over {after.count:,} {after.unit}")
        if scores.trained is not None:
            label = scores.label[:1].upper() + scores.label[1:]
            metrics = "".join(f", {metric_text(*each)}" for each in before.metrics.items())
            print(f"{label}: loss {before.loss:.3f}{metrics}")
        return
    print(f"Test loss {after.loss:.3f}, Test ppl {after.perplexity:.3f}.")
    tokens = f"{after.count:,} tokens"
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
    """Return the scores for JSON: `trained` and `untrained`."""
    return {
        "trained": None if scores.trained is None else scores.trained.to_dict(),
        "untrained": scores.untrained.to_dict(),
    }


@contextmanager
def run_advice(args: argparse.Namespace, run_path: Path) -> Iterator[None]:
    """Add notes on how to resume a run, and how to start over, to an error that prevents or stops the run."""
    from afm_mlx.training.loop.run_folder import RunExistsError

    resume = args.command_line if args.resume else f"{args.command_line} --resume"
    flag = "--adapter-path" if args.save_path is None else "--save-path"
    advice = f"To go on with it: {resume}. To start over, choose another folder ({flag})."
    try:
        yield
    except RunExistsError as error:
        raise UsageError(f"{error.path} holds a training run already. {advice}") from None
    except (KeyboardInterrupt, Terminated) as stopped:
        if (run_path / "run.json").exists():
            stopped.add_note(f"The run is kept in {run_path}. {advice}")
        raise
