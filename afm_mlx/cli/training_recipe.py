"""From the arguments of `lora` and `qat` to the recipe of a training: defaults, and contradictions."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.argument_table import flag_of
from afm_mlx.cli.parser import MAX_NUMBER, UsageError
from afm_mlx.cli.training_arguments import DISTILLATION, EPOCHS, FEATURES, STEPS_BETWEEN
from afm_mlx.errors import shown
from afm_mlx.installation import install_command

if TYPE_CHECKING:
    from afm_mlx.training.loop.training_options import TrainingOptions
    from afm_mlx.training.methods.recipe import Recipe

WARMUP_SHARE = 0.05


def fill(args: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Give a value to each of these arguments that has none."""
    for name, value in values.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def fields_given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of a dataclass that an argument of the same name has a value for."""
    values = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def recipe_of(args: argparse.Namespace, learning_rate: float) -> Recipe:
    """The recipe that the arguments of `training_tables` ask for.

    Args:
        args: the parsed arguments.
        learning_rate: the highest learning rate, where `--learning-rate` is not given.

    Raises:
        UsageError: when they contradict each other.
    """
    _check(args)
    options = _options(args, learning_rate)
    from afm_mlx.training.methods.recipe import Recipe

    values = fields_given(args, Recipe)
    if args.iters is None and args.epochs is None:
        values |= {"epochs": EPOCHS, "steps_between": STEPS_BETWEEN}
    if args.warmup_iters is None and args.warmup_epochs is None and args.lr_schedule is None:
        values["warmup_share"] = WARMUP_SHARE
    if args.distillation_divergence is not None:
        values["divergence"] = args.distillation_divergence
    values |= {"prompt_weight": _prompt_weight(args), "features": _features(args)}
    return Recipe(options=options, **values)


def _options(args: argparse.Namespace, learning_rate: float) -> TrainingOptions:
    """The options of the loop; how long it runs may depend on the data, see `Recipe.loop_options`."""
    values = {"learning_rate": learning_rate, "warmup_iters": 0} | optimizer_settings(args)
    from afm_mlx.training.loop.training_options import TrainingOptions

    values |= fields_given(args, TrainingOptions)
    # Messages name the rate that `--lr-schedule` starts from.
    arguments = (args.lr_schedule or {}).get("arguments")
    first = arguments[0] if isinstance(arguments, list) and arguments else 0
    if isinstance(first, int | float) and first > 0:
        values["learning_rate"] = first
    if args.optimizer == "adam" and values.get("weight_decay"):
        raise UsageError("adam has no weight decay; take --optimizer adamw, or leave it out.")
    # The number of steps in epochs is only known with the data.
    values.setdefault("iters", values["warmup_iters"] + 1)
    without = [name for name in ("clip_grad_norm", "ema_decay") if values.get(name) == 0]
    return TrainingOptions(**values | dict.fromkeys(without))


def _check(args: argparse.Namespace) -> None:
    if args.data is None:
        raise UsageError("--data is missing; it says what to train on.")
    if not Path(args.data).exists():
        raise UsageError(
            f"there is no file or folder {args.data}; data sets of the hub are not fetched."
        )
    if args.teacher is None:
        for row in DISTILLATION:
            if getattr(args, row.name) is not None:
                raise UsageError(
                    f"{flag_of(row.name)} without --teacher would do nothing. Add --teacher, or leave it out."
                )
    if args.plot is not None:
        _check_plot(args.plot)


def optimizer_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `--optimizer-config` says of the optimizer, as fields of `TrainingOptions`."""
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
    others = {name: given[name] for name in ("eps", "weight_decay") if given.get(name) is not None}
    numbers = [*betas, *others.values()] if isinstance(betas, list) else []
    are_numbers = all(type(n) in (int, float) and abs(n) <= MAX_NUMBER for n in numbers)
    if len(numbers) != 2 + len(others) or not are_numbers:
        raise UsageError(
            f"--optimizer-config has {shown(given)}; betas are a list of two numbers, and eps and "
            f"weight_decay are one each, up to {MAX_NUMBER:g}."
        )
    return {"betas": tuple(betas)} | others


def _features(args: argparse.Namespace) -> dict[str, str]:
    """Keys that the data has in place of "prompt", "completion", "messages" and "text", by these."""
    names = {name: getattr(args, f"{name}_feature") for name in FEATURES}
    names["messages"] = names.pop("chat")
    return {name: key for name, key in names.items() if key not in (None, name)}


def _check_plot(path: str) -> None:
    """Raise `UsageError` for a plot that can't be drawn, before hours of training and not after them."""
    if not path.endswith(".png"):
        raise UsageError(f"--plot is {path}; a name that ends in .png is needed.")
    if not Path(path).parent.is_dir():
        raise UsageError(
            f"--plot is {path}; there is no folder {Path(path).parent}. Make it first."
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            f"--plot needs matplotlib, which is not installed. Install it ({install_command('train')}), or "
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
