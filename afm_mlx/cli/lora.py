"""Train a LoRA adapter, or all float weights; with a teacher, let a packed model recover its quality."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli import options
from afm_mlx.cli.parser import UsageError, integer, json_object, number
from afm_mlx.cli.training import add_training, recipe_of, run_training

if TYPE_CHECKING:
    from afm_mlx.training.kinds import LoRATraining

LEARNING_RATES = {"lora": 1e-3, "full": 1e-5}
ADAPTER_PATH = "adapters"  # mlx-lm's default
_OF_LORA = (
    "adapter_path",
    "rank",
    "alpha",
    "scale",
    "dropout",
    "keys",
    "lora_parameters",
    "initial_adapter",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train", action="store_true", help="as in mlx-lm; training is what is done anyway"
    )
    parser.add_argument(
        "--fine-tune-type",
        choices=["lora", "full", "dora"],
        default="lora",
        help="lora trains an adapter, full all float weights; dora is not available",
    )
    parser.add_argument(
        "--adapter-path",
        help=f"folder of the adapter, {ADAPTER_PATH} by default; its run is the folder run in it",
    )
    parser.add_argument(
        "--save-path", help="of full: model folder to make, whose run is SAVE_PATH-run"
    )
    add_training(parser, "1e-3 for lora, as in Apple's toolkit, and 1e-5 for full")
    parser.add_argument(
        "--num-layers",
        type=integer(-1),
        default=-1,
        help="blocks that are trained, counted from the last; -1 for all",
    )
    group = parser.add_argument_group("LoRA")
    group.add_argument("--rank", type=integer(1), help="of every pair; 16 by default")
    group.add_argument(
        "--scale",
        type=number(0),
        help="factor of the adapter, which is alpha / rank; 0.5 by default",
    )
    group.add_argument("--alpha", type=number(0), help="scale * rank, instead of --scale")
    group.add_argument(
        "--dropout", type=number(0, 0.999), help="of the adapter's inputs; 0 by default"
    )
    group.add_argument(
        "--keys",
        nargs="+",
        metavar="NAME",
        help="layers by their names in a block, such as mlp.up_proj; all linear ones by default",
    )
    group.add_argument(
        "--lora-parameters",
        type=json_object,
        help="rank, scale, dropout and keys in one object, as in mlx-lm's YAML files",
    )
    group.add_argument(
        "--initial-adapter",
        metavar="FOLDER",
        help="adapter to start from, such as a recovery adapter; rank, scale and layers are its own",
    )
    options.add_unavailable(
        parser, "use --initial-adapter FOLDER, or --resume for a run", "--resume-adapter-file"
    )


def run(args: argparse.Namespace) -> None:
    if args.fine_tune_type == "dora":
        raise UsageError("--fine-tune-type dora is not available; allowed are lora and full.")
    recipe = recipe_of(args, LEARNING_RATES[args.fine_tune_type])
    if args.fine_tune_type == "full":
        _run_full(args, recipe)
        return
    from afm_mlx.training.methods import train_lora

    if args.save_path is not None:
        raise UsageError("--save-path is for --fine-tune-type full; an adapter is --adapter-path.")
    method = _lora(args)
    path = Path(args.adapter_path or ADAPTER_PATH)
    run_training(args, partial(train_lora, recipe, path, method), path / "run")


def _run_full(args: argparse.Namespace, recipe: Any) -> None:
    from afm_mlx.training.kinds import FullTraining
    from afm_mlx.training.methods import train_full

    given = [name for name in _OF_LORA if getattr(args, name) is not None]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags} would do nothing with --fine-tune-type full; leave it out.")
    if args.save_path is None:
        raise UsageError("--save-path is missing: the model folder that full training makes.")
    method = FullTraining(args.num_layers)
    run_training(
        args, partial(train_full, recipe, args.save_path, method), Path(f"{args.save_path}-run")
    )


def _lora(args: argparse.Namespace) -> LoRATraining:
    from afm_mlx.training.kinds import RANK, LoRATraining

    values = {name: getattr(args, name) for name in ("rank", "scale", "dropout", "keys")}
    for name, value in _parameters(args).items():
        values[name] = value if values[name] is None else values[name]
    if args.alpha is not None:
        if args.scale is not None:
            raise UsageError("--alpha and --scale both say how strong; choose one.")
        if values["rank"] is None and args.initial_adapter is not None:
            raise UsageError("--alpha needs --rank beside it; with --initial-adapter leave it out.")
        values["scale"] = args.alpha / (values["rank"] or RANK)
    return LoRATraining(
        rank=values["rank"],
        scale=values["scale"],
        keys=None if values["keys"] is None else tuple(values["keys"]),
        num_layers=args.num_layers,
        dropout=values["dropout"] or 0.0,
        initial_adapter=args.initial_adapter,
    )


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The content of `--lora-parameters`, checked."""
    kinds = {"rank": (int,), "scale": (int, float), "dropout": (int, float), "keys": (list,)}
    found = args.lora_parameters or {}
    for name, value in found.items():
        if name not in kinds:
            raise UsageError(
                f"--lora-parameters has the key {name!r}; known are {', '.join(kinds)}."
            )
        if type(value) not in kinds[name]:
            wanted = " or ".join(kind.__name__ for kind in kinds[name])
            raise UsageError(f"--lora-parameters: {name} is {value!r}; {wanted} is needed.")
    return found
