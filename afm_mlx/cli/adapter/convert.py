"""Write an adapter in another format. Numbers keep every bit where the format can hold them."""

from __future__ import annotations

import argparse

from afm_mlx.cli.adapter.arguments import (
    FORCE,
    SOURCE,
    add_output,
    dtype_of,
    located,
    model_argument,
    package_fields,
    print_written,
    require,
)
from afm_mlx.cli.argument_table import add_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_table(parser, SOURCE)
    add_output(parser, default=None)
    base = model_argument(
        "the adapter must fit it, and formats with a place for every layer need it for other models than "
        "Apple's 3B; by default the one that the adapter's config names, if it is here"
    )
    add_table(parser, [base, FORCE])


def run(args: argparse.Namespace) -> None:
    require(
        args,
        "convert",
        adapter_path="what to convert",
        to="what to convert it to",
        output="what to write",
    )
    package = package_fields(args)
    from afm_mlx.converters.adapter_conversion import base_of, convert_adapter

    (path,), base = located(args, [args.adapter_path])
    config = convert_adapter(
        path,
        args.output,
        args.to,
        base=base or base_of(path),
        alpha=args.alpha,
        dtype=dtype_of(args),
        package=package,
        any_rank=args.any_rank,
        qkv=args.qkv,
        force=args.force,
    )
    print_written(args.output, config)
