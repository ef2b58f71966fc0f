"""Train a model to keep its quality in 2 or 4 bits, and pack it (quantization-aware training)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.cli import training_runs
from afm_mlx.cli.arguments import FLAG, Argument, UsageError, integer
from afm_mlx.cli.training_runs import (
    TRAIN_PARTS,
    fields_given,
    recipe_of,
    run_training,
    training_tables,
)

if TYPE_CHECKING:
    from afm_mlx.training.methods.method import QATTraining

LEARNING_RATE = 2e-5
ALTERNATIVES = (*training_runs.ALTERNATIVES, ("bits", "quant_predicate", "how many bits"))

# fmt: off
_PATHS = [
    Argument("--save-path", None, "model folder to make; it must not exist", "qat_model"),
    Argument("--run-path", None, "folder of checkpoints and metrics; SAVE_PATH-run by default"),
]
_QUANTIZATION = [
    Argument("--bits --q-bits", integer(1, 8), "bits per weight; 2 by default", choices=[2, 4, 8]),
    Argument("--q-mode", ["balanced", "affine"],
             "balanced (scale only), which is the default for AFM models, or affine (MLX's own format)"),
    Argument("--q-granularity", ["tensor", "row", "group"],
             "what shares a scale: tensor by default for balanced weights, as in Apple's report, "
             "group for affine"),
    Argument("--q-group-size", integer(1), "inputs that share a scale; 64 by default for groups"),
    Argument("--embedding-bits --q-embedding-bits", integer(1, 8),
             "bits per weight of the embedding, which is the head too", 4, choices=[2, 4, 8]),
    Argument("--q-embedding-granularity", ["tensor", "row", "group"],
             "--q-granularity of the embedding; row by default, group if the other layers have groups"),
    Argument("--quant-predicate", None,
             "more bits for the layers that mlx-lm's recipes choose: mixed_2_4, mixed_2_8 or mixed_4_8",
             metavar="RECIPE"),
    Argument("--calibrate-kv", integer(1),
             "recompute the int8 scales of keys and values from N batches before training", metavar="N"),
    TRAIN_PARTS,
    Argument("--learn-kv-scales", FLAG, "train the int8 scales of keys and values with the weights"),
]
# fmt: on
ARGUMENTS = {**training_tables(f"{LEARNING_RATE:g}", *_PATHS), "quantization": _QUANTIZATION}


def run(args: argparse.Namespace) -> None:
    recipe = recipe_of(args, LEARNING_RATE)
    run_training(args, _method(args), recipe, Path(args.save_path))


def _method(args: argparse.Namespace) -> QATTraining:
    from afm_mlx.quantization.rule import QuantizationRule
    from afm_mlx.training.methods.method import QATTraining
    from afm_mlx.training.methods.model_source import ModelSource

    source = ModelSource.open(args.model)
    mode, granularity = args.q_mode, args.q_granularity
    if mode is None:
        mode = "balanced" if source.is_afm else "affine"
    if granularity is None and mode == "balanced" and args.q_group_size is None:
        granularity = "tensor"
    rule = QuantizationRule(args.bits or 2, mode, granularity, args.q_group_size)
    granularity = args.q_embedding_granularity
    if granularity is None:
        granularity = "group" if rule.granularity == "group" else "row"
    group_size = rule.group_size if granularity == "group" else None
    predicate = None
    if args.quant_predicate is not None:
        from afm_mlx.config import ModelConfig
        from afm_mlx.converters.conversion_options import recipe

        if not source.is_afm:
            raise UsageError(
                f"--quant-predicate {args.quant_predicate} is for AFM models; leave it out, or say --bits."
            )
        config = ModelConfig.from_dict(source.values, source=str(source.folder / "config.json"))
        predicate = recipe(args.quant_predicate, config, rule)
    return QATTraining(
        rule=rule,
        embedding_rule=QuantizationRule(args.embedding_bits, mode, granularity, group_size),
        predicate=predicate,
        average=args.ema_decay is None,
        **fields_given(args, QATTraining),
    )
