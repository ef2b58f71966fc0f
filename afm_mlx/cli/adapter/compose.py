"""Add up adapters of one base model, each with a weight, to one of their ranks' sum."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from afm_mlx.cli.adapter import arguments
from afm_mlx.cli.argument_table import Argument
from afm_mlx.cli.parser import UsageError
from afm_mlx.errors import shown

_ADAPTERS = Argument(
    "adapters",
    None,
    "an adapter of any format, or the name of one that comes with the model, and its weight, such as poet=0.7",
    nargs="*",
    metavar="PATH=WEIGHT",
)
_BASE = arguments.model_argument("the adapters must fit it")
ARGUMENTS = {
    "options": [_ADAPTERS, *arguments.output(default="mlx-lm"), _BASE, arguments.FORCE],
    **arguments.PACKAGE,
}


def run(args: argparse.Namespace) -> None:
    arguments.require(args, "compose", output="what to write")
    options, package = arguments.output_options(args)
    weighted = [_weighted(text) for text in args.adapters]
    if not weighted:
        raise UsageError("no adapter was named; give one or more as PATH=WEIGHT.")
    from afm_mlx.adapters.compose import compose
    from afm_mlx.adapters.formats import write_adapter
    from afm_mlx.converters.adapter_conversion import package_metadata, read_for

    paths, base = arguments.located(args, [name for name, _ in weighted])
    adapters = [read_for(path, base, force=args.force) for path in paths]
    tensors, config = compose(adapters, [weight for _, weight in weighted], force=args.force)
    write_adapter(
        args.output,
        tensors,
        config,
        args.to,
        model_config=base.config if base else None,
        package=package_metadata(Path(args.output), args.to, None, package),
        **options,
    )
    arguments.print_written(args.output, config)


def _weighted(text: str) -> tuple[str, float]:
    path, equals, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not equals or not path or not math.isfinite(value):
        raise UsageError(
            f"{shown(text)} is no adapter with a weight; give PATH=WEIGHT, such as poet=0.7."
        )
    return path, value
