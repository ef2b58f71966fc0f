"""Train a model to keep its quality in 2 or 4 bits, and pack it (quantization-aware training)."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.cli.argument_table import FLAG, Argument, add_table
from afm_mlx.cli.parser import UsageError, integer
from afm_mlx.cli.training_arguments import ALTERNATIVES as ALTERNATIVES
from afm_mlx.cli.training_arguments import add_training
from afm_mlx.cli.training_output import run_training
from afm_mlx.cli.training_recipe import fields_given, recipe_of

if TYPE_CHECKING:
    from afm_mlx.quantization.quantize_model import Predicate
    from afm_mlx.quantization.rule import QuantizationRule
    from afm_mlx.training.methods.model_source import ModelSource
    from afm_mlx.training.methods.qat_training import QATTraining

LEARNING_RATE = 2e-5


# fmt: off
PATHS = [
    Argument("--save-path", None, "model folder to make; it must not exist", "qat_model"),
    Argument("--run-path", None, "folder of checkpoints and metrics; SAVE_PATH-run by default"),
]

QUANTIZATION = [
    Argument("--bits --q-bits", integer(1, 8), "per weight; 2 by default", choices=[2, 4, 8]),
    Argument("--q-mode", ["balanced", "affine"],
             "balanced (scale only), which is the default for AFM models, or affine (MLX's own format)"),
    Argument("--q-granularity", ["tensor", "row", "group"],
             "what has a scale of its own: tensor by default for balanced weights, as in Apple's report, "
             "group for affine"),
    Argument("--q-group-size", integer(1), "inputs that share a scale; 64 by default for groups"),
    Argument("--embedding-bits --q-embedding-bits", integer(1, 8),
             "of the embedding, which is the head too", 4, choices=[2, 4, 8]),
    Argument("--q-embedding-granularity", ["tensor", "row", "group"],
             "what of the embedding has a scale of its own; row by default, group where the rest has groups"),
    Argument("--quant-predicate", None,
             "more bits for the layers that mlx-lm's recipes choose: mixed_2_4, mixed_2_8 or mixed_4_8",
             metavar="RECIPE"),
    Argument("--calibrate-kv", integer(1),
             "set the int8 scales of keys and values anew, by N batches before training", metavar="N"),
    Argument("--learn-kv-scales", FLAG, "train these scales with the weights"),
]
# fmt: on


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table(parser, PATHS)
    add_training(parser, f"{LEARNING_RATE:g}")
    add_table(parser, QUANTIZATION, "quantization")


def run(args: argparse.Namespace) -> None:
    from afm_mlx.training.methods.train import train_qat

    recipe = recipe_of(args, LEARNING_RATE)
    method = _method(args)
    run_path = Path(args.run_path or method.default_run_path(Path(args.save_path)))
    start = partial(train_qat, recipe, args.save_path, method, run_path=run_path)
    run_training(args, start, run_path)


def _method(args: argparse.Namespace) -> QATTraining:
    from afm_mlx.training.methods.model_source import ModelSource
    from afm_mlx.training.methods.qat_training import QATTraining

    source = ModelSource.open(args.model)
    rule = _rule(args, "balanced" if source.is_afm else "affine")
    return QATTraining(
        rule=rule,
        embedding_rule=_embedding_rule(args, rule),
        predicate=_predicate(args, source, rule),
        average=args.ema_decay is None,
        **fields_given(args, QATTraining),
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
    args: argparse.Namespace, source: ModelSource, rule: QuantizationRule
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
