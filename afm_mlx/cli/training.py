"""Arguments that `lora` and `qat` share."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import options
from afm_mlx.cli.output import add_json
from afm_mlx.cli.parser import UsageError, integer, json_object, number

if TYPE_CHECKING:
    from afm_mlx.training.recipe import Recipe

ITERS = 1000  # mlx-lm's default
WARMUP_SHARE = 0.05
FEATURES = ("prompt", "completion", "chat", "text")  # what mlx-lm's YAML files may rename

# What arguments are when neither the command line, nor a file, nor a preset says. The parser has None for
# these, so that a preset can tell what is given.
_DEFAULTS = {
    "batch_size": 4,
    "schedule": "cosine",
    "final_learning_rate": 0.0,
    "grad_accumulation_steps": 1,
    "clip_grad_norm": 1.0,
    "weight_decay": 0.0,
}
ALTERNATIVES = (
    ("iters", "epochs", "how long to train"),
    ("warmup_iters", "warmup_epochs", "how long to warm up"),
    *(
        (name, "lr_schedule", "what the learning rate does")
        for name in ("warmup_iters", "warmup_epochs", "schedule", "final_learning_rate")
    ),
)
"""Two arguments that say the same thing, and what they say; see `parser.parse`."""

_OF_DISTILLATION = (
    "teacher_adapter",
    "distillation_weight",
    "distillation_temperature",
    "distillation_divergence",
)


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
        (
            "nothing is sent to wandb or swanlab; metrics go to metrics.jsonl in the run's folder, and --plot "
            "draws them",
            "--report-to",
        ),
        ("it names a project for --report-to, which is not available", "--project-name"),
        ("data sets of the hub are not fetched; --data takes files", "--hf-dataset"),
    ):
        options.add_unavailable(parser, reason, *names)
    options.add_unavailable(
        parser, "code in a model's folder is not run here", "--trust-remote-code", nargs=0
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--batch-size", type=integer(1), help="rows of a batch; 4 by default")
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
    for name in FEATURES:
        key = "messages" if name == "chat" else name
        group.add_argument(
            f"--{name}-feature", metavar="KEY", help=f"what the data calls {key!r}, as in mlx-lm"
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
    group.add_argument("--warmup-epochs", type=number(0), help="likewise, in passes over the data")
    group.add_argument(
        "--schedule",
        choices=["cosine", "constant"],
        help="what the learning rate does after that; cosine by default, constant for draft models",
    )
    group.add_argument(
        "--final-learning-rate", type=number(0), help="at the end of the cosine; 0 by default"
    )
    group.add_argument(
        "--lr-schedule",
        type=json_object,
        help="the learning rate in mlx-lm's words: name, arguments, warmup and warmup_init in one object",
    )
    group.add_argument(
        "--grad-accumulation-steps",
        type=integer(1),
        help="batches that make one step; 1 by default",
    )
    group.add_argument(
        "--grad-checkpoint",
        action="store_true",
        help="compute each block twice instead of keeping its activations, to use less memory",
    )
    group.add_argument(
        "--clip-grad-norm", type=number(0), help="the most it may be, 1 by default; 0 for any"
    )
    group.add_argument("--weight-decay", type=number(0), help="of AdamW; 0 by default")
    group.add_argument(
        "--optimizer",
        choices=["adamw", "adam"],
        default="adamw",
        help="adam is AdamW without weight decay; there are no others",
    )
    group.add_argument(
        "--optimizer-config",
        type=json_object,
        help='its betas, eps and weight_decay, by its name as in mlx-lm: {"adamw": {"betas": [0.9, 0.95]}}',
    )
    group.add_argument(
        "--clear-cache-threshold",
        type=size,
        metavar="SIZE",
        help="memory, such as 2GB, that MLX may keep for reuse between steps; its own limit by default",
    )
    group.add_argument("--seed", type=integer(0, options.MAX_SEED), default=0)


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument("--teacher", metavar="MODEL", help="model whose predictions to imitate")
    group.add_argument(
        "--teacher-adapter", metavar="FOLDER", help="adapter that the teacher runs with"
    )
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
    group.add_argument(
        "--distillation-divergence",
        choices=["forward", "reverse"],
        help="forward, KL(teacher || model), by default; reverse, KL(model || teacher), for draft models",
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
        "--test",
        action="store_true",
        help="measure the loss on test.jsonl at the end, with what was trained and without",
    )
    group.add_argument(
        "--test-batches",
        type=integer(-1),
        default=-1,
        help="batches of test.jsonl that are measured; -1 for all",
    )
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw losses and learning rate (needs matplotlib)"
    )


def size(text: str) -> int:
    """Bytes: a number, or one with M, MB, G or GB behind it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; allowed are such as 0, 500MB and 2GB"
        )
    unit = (match[2] or "").upper()[:1]
    return int(float(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[unit])


def fill(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Give arguments that nobody gave a value."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def recipe_of(args: argparse.Namespace, learning_rate: float) -> Recipe:
    """What `add_training`'s arguments ask for.

    Args:
        args: what is not given gets its default.
        learning_rate: by default.

    Raises:
        UsageError: when they contradict each other.
    """
    _check(args)
    of_optimizer = _optimizer(args)
    fill(args, _DEFAULTS | {"learning_rate": learning_rate})
    from afm_mlx.training.options import TrainingOptions
    from afm_mlx.training.recipe import Recipe

    warmup = args.warmup_iters or 0
    # The number of steps in epochs is only known with the data.
    iters = warmup + 1 if args.epochs is not None else args.iters or ITERS
    same = {field.name for field in dataclasses.fields(TrainingOptions)} & set(vars(args))
    values = {name: getattr(args, name) for name in same}
    loop = TrainingOptions(
        **values
        | of_optimizer
        | {
            "iters": iters,
            "warmup_iters": warmup,
            **_peak(args),
            "clip_grad_norm": args.clip_grad_norm or None,
            "ema_decay": args.ema_decay or None,
        }
    )
    of_warmup = (args.warmup_iters, args.warmup_epochs, args.lr_schedule)
    has_share = all(value is None for value in of_warmup)
    return Recipe(
        data=args.data,
        options=loop,
        model=args.model,
        epochs=args.epochs,
        warmup_share=WARMUP_SHARE if has_share else None,
        warmup_epochs=args.warmup_epochs,
        batch_size=args.batch_size,
        max_seq_length=args.max_seq_length,
        packing=args.packing,
        prompt_weight=_prompt_weight(args),
        features=_features(args),
        teacher=args.teacher,
        teacher_adapter=args.teacher_adapter,
        distillation_weight=1.0 if args.distillation_weight is None else args.distillation_weight,
        distillation_temperature=args.distillation_temperature or 1.0,
        divergence=args.distillation_divergence or "forward",
        test=args.test,
        test_batches=args.test_batches,
    )


def _peak(args: argparse.Namespace) -> dict[str, float]:
    """The highest rate of `--lr-schedule`, which messages name."""
    arguments = (args.lr_schedule or {}).get("arguments")
    first = arguments[0] if isinstance(arguments, list) and arguments else 0
    return {"learning_rate": first} if isinstance(first, int | float) and first > 0 else {}


def _check(args: argparse.Namespace) -> None:
    if args.data is None:
        raise UsageError("--data is missing; it says what to train on.")
    if not Path(args.data).exists():
        raise UsageError(
            f"there is no file or folder {args.data}; data sets of the hub are not fetched."
        )
    _check_length(args)
    for name in ("val_batches", "test_batches"):
        if getattr(args, name) == 0:
            flag = _flag(name)
            raise UsageError(f"{flag} is 0; allowed are 1 and more, or -1 for all.")
    if args.teacher is None:
        for name in _OF_DISTILLATION:
            if getattr(args, name) is not None:
                raise UsageError(
                    f"{_flag(name)} without --teacher would do nothing. Add --teacher, or leave it out."
                )
    if args.plot is not None:
        _check_plot(args.plot)


def _check_length(args: argparse.Namespace) -> None:
    """How long, and how fast."""
    refuse_both(args, ALTERNATIVES)
    if args.epochs == 0 or args.learning_rate == 0:
        name = "--epochs" if args.epochs == 0 else "--learning-rate"
        raise UsageError(f"{name} is 0; allowed is more than that.")


def refuse_both(args: argparse.Namespace, alternatives: Iterable[tuple[str, str, str]]) -> None:
    """Raise `UsageError` when both of two alternatives are given."""
    for one, other, what in alternatives:
        if None not in (getattr(args, one), getattr(args, other)):
            raise UsageError(f"{_flag(one)} and {_flag(other)} both say {what}; choose one.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _optimizer(args: argparse.Namespace) -> dict[str, Any]:
    """AdamW's settings of `--optimizer-config`, whose weight decay `--weight-decay` comes before."""
    given = (args.optimizer_config or {}).get(args.optimizer) or {}
    wanted = {"betas", "eps", "weight_decay", "bias_correction"}
    if not isinstance(given, dict) or not given.keys() <= wanted:
        raise UsageError(
            f"--optimizer-config has {given!r} for {args.optimizer}; allowed are {', '.join(sorted(wanted))}."
        )
    if given.get("bias_correction") is False:
        raise UsageError("--optimizer-config: bias_correction is always on here; leave it out.")
    betas = given.get("betas", [0.9, 0.999])
    numbers = [*betas, given.get("eps", 0.0)] if isinstance(betas, list) else []
    if len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
        raise UsageError(
            f"--optimizer-config has {given!r}; betas are a list of two numbers, and eps is one."
        )
    fill(args, {"weight_decay": given.get("weight_decay")})
    if args.optimizer == "adam" and args.weight_decay:
        raise UsageError("adam has no weight decay; take --optimizer adamw, or leave it out.")
    values = {"betas": tuple(betas)}
    return values | ({"eps": float(given["eps"])} if "eps" in given else {})


def _features(args: argparse.Namespace) -> dict[str, str]:
    """What the data calls things, by our names, where that is something else."""
    names = {name: getattr(args, f"{name}_feature") for name in FEATURES}
    names["messages"] = names.pop("chat")
    return {name: key for name, key in names.items() if key not in (None, name)}


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
