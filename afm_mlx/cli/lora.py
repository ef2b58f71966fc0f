"""Train a LoRA adapter, all float weights, or a draft model; with a teacher, let a packed model recover."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx import config
from afm_mlx.cli import training_arguments
from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.cli.parser import UsageError, integer, json_object, number
from afm_mlx.cli.training_arguments import add_training
from afm_mlx.cli.training_output import data_line, print_scores, run_training, scores_dict
from afm_mlx.cli.training_recipe import fill, recipe_of, refuse_both
from afm_mlx.errors import did_you_mean, shown
from afm_mlx.loading.resolve import EMBEDDED_MODEL

if TYPE_CHECKING:
    from afm_mlx.training.methods.methods import LoRATraining
    from afm_mlx.training.methods.recipe import Recipe, Split

LEARNING_RATES = {"lora": 1e-3, "full": 1e-5, "draft": 1e-3}
ADAPTER_PATH = "adapters"  # mlx-lm's default

DRAFT_PRESETS = [name for name in config.PRESETS if name.endswith("-draft")]

PRESETS: dict[str, dict[str, Any]] = {
    "toolkit": {
        "rank": 32,
        "alpha": 16.0,
        "learning_rate": 1e-3,
        "epochs": 2.0,
        "warmup_epochs": 1.0,
        "schedule": "cosine",
        "final_learning_rate": 0.0,
        "batch_size": 4,
        "packing": False,  # so that a batch is four samples, and an epoch as many steps as there
        "grad_accumulation_steps": 1,
        "clip_grad_norm": 1.0,
        "weight_decay": 1e-2,
    }
}
"""Command line and file come before a preset, and a preset before the defaults."""

_OF_LORA_ALONE = (
    ("alpha", "scale", "how strong the adapter is"),
    ("initial_adapter", "resume_adapter_file", "where to start"),
)
ALTERNATIVES = (*training_arguments.ALTERNATIVES, *_OF_LORA_ALONE)

_OF_AN_ADAPTER = ("rank", "alpha")
"""What an adapter that training starts from brings along, so that a preset does not say it."""

_OF_LORA = (
    "adapter_path",
    "rank",
    "alpha",
    "scale",
    "dropout",
    "keys",
    "lora_parameters",
    "initial_adapter",
    "resume_adapter_file",
    "save_dtype",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--train",
        action="store_true",
        help="train, which is done anyway but with --test: that alone only measures an adapter",
    )
    parser.add_argument(
        "--fine-tune-type",
        choices=["lora", "full", "draft", "dora"],
        default="lora",
        help="lora trains an adapter, full all float weights, draft a model that proposes tokens to --teacher "
        "for speculative decoding; dora is not available",
    )
    parser.add_argument(
        "--preset",
        choices=list(PRESETS),
        help="toolkit has the settings of Apple's adapter training toolkit: rank 32, alpha 16, 2 epochs, the "
        "first of them warm-up to a rate of 1e-3, then a cosine to 0, batches of 4 samples, gradients clipped "
        "to 1, weight decay 0.01; other arguments come before it",
    )
    parser.add_argument(
        "--adapter-path",
        help=f"folder of the adapter, {ADAPTER_PATH} by default; its run is the folder run in it",
    )
    parser.add_argument(
        "--save-path", help="of full and draft: model folder to make, whose run is SAVE_PATH-run"
    )
    parser.add_argument(
        "--draft-preset",
        choices=DRAFT_PRESETS,
        help="of draft: start from a model of these sizes with random weights (by --seed) and the teacher's "
        "tokenizer, instead of --model",
    )
    add_training(parser, "1e-3 for lora and draft, as in Apple's toolkit, and 1e-5 for full")
    parser.add_argument(
        "--num-layers",
        type=integer(-1),
        default=-1,
        help="blocks that are trained, counted from the last; -1 for all",
    )
    _add_lora(parser)


def _add_lora(parser: argparse.ArgumentParser) -> None:
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
    group.add_argument(
        "--resume-adapter-file",
        metavar="PATH",
        help="likewise, under mlx-lm's name; an adapter's folder, or a .safetensors file in it. (To go on with "
        "a run there is --resume.)",
    )
    group.add_argument(
        "--save-dtype",
        choices=["float16", "float32"],
        help="of the saved adapter; float16 by default. Training is in float32 either way",
    )


def run(args: argparse.Namespace) -> None:
    if args.fine_tune_type == "dora":
        raise UsageError(
            "--fine-tune-type dora is not available; allowed are lora, full and draft."
        )
    if args.fine_tune_type == "lora":
        _take_parameters(args)
    if args.draft_preset is not None and args.fine_tune_type != "draft":
        raise UsageError("--draft-preset is for --fine-tune-type draft; leave it out.")
    if args.test and not (args.train or args.resume):
        _run_test(args)
        return
    kind = args.fine_tune_type
    if kind != "lora":
        _check_whole(args)
    _take_preset(args)
    if kind == "draft":
        schedule = None if args.lr_schedule is not None else "constant"
        fill(args, {"schedule": schedule, "distillation_divergence": "reverse"})
    recipe = recipe_of(args, LEARNING_RATES[kind])
    if kind == "lora":
        _run_lora(args, recipe)
    else:
        _run_whole(args, recipe)


def _take_preset(args: argparse.Namespace) -> None:
    if args.preset is None:
        return
    values = dict(PRESETS[args.preset])
    if args.fine_tune_type == "full":
        raise UsageError(f"--preset {args.preset} is for lora and draft; leave it out.")
    if args.fine_tune_type == "draft":
        # The toolkit trains draft models with a linear warm-up and nothing behind it.
        values |= {"rank": None, "alpha": None, "schedule": "constant"}
    for one, other, _ in ALTERNATIVES:
        for given, name in ((one, other), (other, one)):
            if name in values and getattr(args, given) is not None:
                values[name] = None
    if args.initial_adapter or args.resume_adapter_file:
        values |= dict.fromkeys(_OF_AN_ADAPTER)
    if args.optimizer == "adam" or "weight_decay" in (args.optimizer_config or {}).get("adamw", {}):
        values["weight_decay"] = None
    fill(args, values)


def _run_lora(args: argparse.Namespace, recipe: Recipe) -> None:
    from afm_mlx.training.methods.train import train_lora

    if args.save_path is not None:
        raise UsageError("--save-path is for full and draft; an adapter is --adapter-path.")
    if args.adapter_path == "":
        raise UsageError("--adapter-path is empty; a trained adapter needs a folder.")
    method = _lora(args)
    path = Path(args.adapter_path or ADAPTER_PATH)
    run_training(args, partial(train_lora, recipe, path, method), path / "run")


def _check_whole(args: argparse.Namespace) -> None:
    """Arguments of a training that saves a model folder."""
    kind = args.fine_tune_type
    given = [name for name in _OF_LORA if getattr(args, name) is not None]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{flags} would do nothing with --fine-tune-type {kind}; leave it out.")
    if args.save_path is None:
        raise UsageError(f"--save-path is missing: the model folder that {kind} training makes.")
    if kind == "draft" and args.teacher is None:
        raise UsageError("--teacher is missing: the model that the draft model proposes tokens to.")
    has_folder = args.model != EMBEDDED_MODEL
    if kind == "draft" and has_folder == (args.draft_preset is not None):
        fault = "both are given, choose one" if has_folder else "name one"
        raise UsageError(
            "Draft training starts from a float model folder (--model FOLDER) or from random weights "
            f"(--draft-preset {DRAFT_PRESETS[0]}); {fault}."
        )


def _run_whole(args: argparse.Namespace, recipe: Recipe) -> None:
    from afm_mlx.training.methods.methods import DraftTraining, FullTraining
    from afm_mlx.training.methods.source import FreshSource
    from afm_mlx.training.methods.train import train_draft, train_full

    start: partial[Any]
    if args.fine_tune_type == "draft":
        if args.draft_preset is not None:
            fresh = FreshSource.for_target(args.teacher, args.draft_preset, args.seed)
            recipe = dataclasses.replace(recipe, model=fresh)
            args.model = args.draft_preset  # what is shown
        start = partial(train_draft, recipe, args.save_path, DraftTraining(args.num_layers))
    else:
        start = partial(train_full, recipe, args.save_path, FullTraining(args.num_layers))
    run_training(args, start, Path(f"{args.save_path}-run"))


def _run_test(args: argparse.Namespace) -> None:
    """`--test` alone, as in mlx-lm: an adapter that there is, and nothing trained."""
    if args.fine_tune_type != "lora":
        raise UsageError(
            "--test alone measures an adapter. Add --train to train first; afm-mlx perplexity measures model "
            "folders."
        )
    if args.teacher is not None:
        raise UsageError("--teacher would do nothing with --test alone; add --train to train.")
    recipe = recipe_of(args, LEARNING_RATES["lora"])
    from afm_mlx.training.methods.scores import measure_adapter

    path = ADAPTER_PATH if args.adapter_path is None else args.adapter_path

    def on_data(data: Split) -> None:
        if not args.json:
            print(f"Testing {path or 'the model'}; nothing is trained without --train")
            print(data_line("Test", data))

    with progress_bar("testing", "batch") as bar:
        scores = measure_adapter(recipe, path or None, on_data=on_data, progress=bar)
    if args.json:
        facts = {"model": str(args.model), "data": str(args.data), "adapter_path": path or None}
        print_json(facts | {"test": scores_dict(scores)})
    else:
        print_scores(scores)


# -- settings of LoRA


def _lora(args: argparse.Namespace) -> LoRATraining:
    from afm_mlx.training.methods.methods import RANK, LoRATraining

    initial = args.initial_adapter or args.resume_adapter_file
    refuse_both(args, _OF_LORA_ALONE)
    scale = args.scale
    if args.alpha is not None:
        if args.rank is None and initial is not None:
            raise UsageError("--alpha needs --rank beside it; with --initial-adapter leave it out.")
        scale = args.alpha / (args.rank or RANK)
    return LoRATraining(
        rank=args.rank,
        scale=scale,
        keys=None if args.keys is None else tuple(args.keys),
        num_layers=args.num_layers,
        dropout=args.dropout or 0.0,
        initial_adapter=initial,
        save_dtype=args.save_dtype or "float16",
        force=args.force,
    )


def _take_parameters(args: argparse.Namespace) -> None:
    """Put `--lora-parameters` in the place of arguments that are not given."""
    values = _parameters(args)
    if args.alpha is not None:
        values.pop("scale", None)
    fill(args, values)


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    """The content of `--lora-parameters`, checked; ranges of rank and scale are the training's to check."""
    kinds = {"rank": (int,), "scale": (int, float), "dropout": (int, float), "keys": (list,)}
    found = dict(args.lora_parameters or {})
    for name, value in found.items():
        if name not in kinds:
            raise UsageError(
                f"--lora-parameters has the key {shown(name)}{did_you_mean(name, kinds)}; known are "
                f"{', '.join(kinds)}."
            )
        if type(value) not in kinds[name]:
            wanted = " or ".join(kind.__name__ for kind in kinds[name])
            raise UsageError(f"--lora-parameters: {name} is {shown(value)}; {wanted} is needed.")
        if name == "dropout" and not 0 <= value < 1:
            raise UsageError(
                f"--lora-parameters: dropout is {shown(value)}; allowed is 0 to 0.999."
            )
        if name == "keys" and not all(isinstance(key, str) for key in value):
            raise UsageError(
                f"--lora-parameters: keys is {shown(value)}; names are needed, such as mlp.up_proj."
            )
    return found
