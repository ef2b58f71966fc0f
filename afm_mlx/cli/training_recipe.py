"""What the arguments of `lora` and `qat` ask for: defaults, contradictions, and the recipe of a training."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.parser import UsageError
from afm_mlx.cli.training_arguments import ALTERNATIVES, EPOCHS, FEATURES, STEPS_BETWEEN
from afm_mlx.errors import shown

if TYPE_CHECKING:
    from afm_mlx.training.loop.training_options import TrainingOptions
    from afm_mlx.training.methods.recipe import Recipe

WARMUP_SHARE = 0.05
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

_OF_DISTILLATION = (
    "teacher_adapter",
    "distillation_weight",
    "distillation_temperature",
    "distillation_divergence",
)


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
    from afm_mlx.training.methods.recipe import Recipe

    of_warmup = (args.warmup_iters, args.warmup_epochs, args.lr_schedule)
    has_share = all(value is None for value in of_warmup)
    says_nothing = args.iters is None and args.epochs is None
    return Recipe(
        data=args.data,
        options=_options(args, of_optimizer),
        model=args.model,
        epochs=EPOCHS if says_nothing else args.epochs,
        steps_between=STEPS_BETWEEN if says_nothing else None,
        warmup_share=WARMUP_SHARE if has_share else None,
        warmup_epochs=args.warmup_epochs,
        batch_size=args.batch_size,
        max_seq_length=args.max_seq_length,
        packing=args.packing,
        prompt_weight=_prompt_weight(args),
        features=_features(args),
        teacher=args.teacher,
        teacher_adapter=args.teacher_adapter,
        force=args.force,
        distillation_weight=1.0 if args.distillation_weight is None else args.distillation_weight,
        distillation_temperature=args.distillation_temperature or 1.0,
        divergence=args.distillation_divergence or "forward",
        test=args.test,
        test_batches=args.test_batches,
    )


def _options(args: argparse.Namespace, of_optimizer: dict[str, Any]) -> TrainingOptions:
    from afm_mlx.training.loop.training_options import TrainingOptions

    warmup = args.warmup_iters or 0
    # The number of steps in epochs is only known with the data.
    iters = warmup + 1 if args.iters is None else args.iters
    same = {field.name for field in dataclasses.fields(TrainingOptions)} & set(vars(args))
    values = {name: getattr(args, name) for name in same} | of_optimizer | _peak(args)
    return TrainingOptions(
        **values
        | {
            "iters": iters,
            "warmup_iters": warmup,
            "clip_grad_norm": args.clip_grad_norm or None,
            "ema_decay": args.ema_decay or None,
        }
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
            f"--optimizer-config has {shown(given)} for {args.optimizer}; allowed are "
            f"{', '.join(sorted(wanted))}."
        )
    if given.get("bias_correction") is False:
        raise UsageError("--optimizer-config: bias_correction is always on here; leave it out.")
    betas = given.get("betas", [0.9, 0.999])
    numbers = [*betas, given.get("eps", 0.0)] if isinstance(betas, list) else []
    if len(numbers) != 3 or not all(type(n) in (int, float) for n in numbers):
        raise UsageError(
            f"--optimizer-config has {shown(given)}; betas are a list of two numbers, and eps is one."
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
