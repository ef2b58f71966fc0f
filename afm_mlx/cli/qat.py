"""Train a model to keep its quality in 2 or 4 bits, and pack it (quantization-aware training)."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.cli.parser import UsageError, integer
from afm_mlx.cli.training_arguments import ALTERNATIVES as ALTERNATIVES
from afm_mlx.cli.training_arguments import add_training
from afm_mlx.cli.training_output import run_training
from afm_mlx.cli.training_recipe import recipe_of

if TYPE_CHECKING:
    from afm_mlx.quantization.quantize import Predicate
    from afm_mlx.quantization.rule import QuantizationRule
    from afm_mlx.training.methods.methods import QATTraining
    from afm_mlx.training.methods.source import Source

LEARNING_RATE = 2e-5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--save-path", default="qat_model", help="model folder to make; it must not exist"
    )
    parser.add_argument(
        "--run-path", help="folder of checkpoints and metrics; SAVE_PATH-run by default"
    )
    add_training(parser, f"{LEARNING_RATE:g}")
    group = parser.add_argument_group("quantization")
    _add_grids(group)
    group.add_argument(
        "--calibrate-kv",
        type=integer(1),
        metavar="N",
        help="set the int8 scales of keys and values anew, by N batches before training",
    )
    group.add_argument(
        "--learn-kv-scales", action="store_true", help="train these scales with the weights"
    )


def _add_grids(group: argparse._ArgumentGroup) -> None:
    """What weights are rounded to."""
    group.add_argument(
        "--bits", "--q-bits", type=integer(1, 8), choices=[2, 4, 8], help="per weight; 2 by default"
    )
    group.add_argument(
        "--q-mode",
        choices=["balanced", "affine"],
        help="balanced (scale only), which is the default for AFM models, or affine (MLX's own format)",
    )
    group.add_argument(
        "--q-granularity",
        choices=["tensor", "row", "group"],
        help="what has a scale of its own: tensor by default for balanced weights, as in Apple's report, "
        "group for affine",
    )
    group.add_argument(
        "--q-group-size",
        type=integer(1),
        help="inputs that share a scale; 64 by default for groups",
    )
    group.add_argument(
        "--embedding-bits",
        "--q-embedding-bits",
        type=integer(1, 8),
        choices=[2, 4, 8],
        default=4,
        help="of the embedding, which is the head too",
    )
    group.add_argument(
        "--q-embedding-granularity",
        choices=["tensor", "row", "group"],
        help="what of the embedding has a scale of its own; row by default, group where the rest has groups",
    )
    group.add_argument(
        "--quant-predicate",
        metavar="RECIPE",
        help="more bits for the layers that mlx-lm's recipes choose: mixed_2_4, mixed_2_8 or mixed_4_8",
    )


def run(args: argparse.Namespace) -> None:
    from afm_mlx.training.methods.train import train_qat

    recipe = recipe_of(args, LEARNING_RATE)
    run_path = Path(args.run_path or f"{args.save_path}-run")
    method = _method(args)
    start = partial(train_qat, recipe, args.save_path, method, run_path=run_path)
    run_training(args, start, run_path)


def _method(args: argparse.Namespace) -> QATTraining:
    from afm_mlx.training.methods.methods import QATTraining
    from afm_mlx.training.methods.source import Source

    source = Source.open(args.model)
    rule = _rule(args, "balanced" if source.is_afm else "affine")
    return QATTraining(
        rule=rule,
        embedding_rule=_embedding_rule(args, rule),
        predicate=_predicate(args, source, rule),
        calibrate_kv=args.calibrate_kv or 0,
        learn_kv_scales=args.learn_kv_scales,
        average=args.ema_decay is None,
    )


def _rule(args: argparse.Namespace, mode: str) -> QuantizationRule:
    from afm_mlx.quantization.rule import QuantizationRule

    if args.bits is not None and args.quant_predicate is not None:
        raise UsageError("--bits and --quant-predicate both say how many bits; choose one.")
    mode, granularity = args.q_mode or mode, args.q_granularity
    if granularity is None and mode == "balanced" and args.q_group_size is None:
        granularity = "tensor"
    return QuantizationRule(args.bits or 2, mode, granularity, args.q_group_size)


def _embedding_rule(args: argparse.Namespace, rule: QuantizationRule) -> QuantizationRule:
    from afm_mlx.quantization.rule import QuantizationRule

    granularity = args.q_embedding_granularity
    if granularity is None:
        granularity = "group" if rule.granularity == "group" else "row"
    size = rule.group_size if granularity == "group" else None
    return QuantizationRule(args.embedding_bits, rule.mode, granularity, size)


def _predicate(
    args: argparse.Namespace, source: Source, rule: QuantizationRule
) -> Predicate | None:
    from afm_mlx.config import ModelConfig
    from afm_mlx.converters.conversion_options import recipe

    if args.quant_predicate is None:
        return None
    if not source.is_afm:
        raise UsageError(
            f"--quant-predicate {args.quant_predicate} is for AFM models; leave it out, or say --bits."
        )
    config = ModelConfig.from_dict(source.values, source=str(source.folder / "config.json"))
    return recipe(args.quant_predicate, config, rule)
