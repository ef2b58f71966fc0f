"""Write an adapter in another format. Numbers keep every bit where the format can hold them."""

from __future__ import annotations

import argparse

from afm_mlx.cli.adapter import arguments

_BASE = arguments.model_argument(
    "the adapter must fit it, and formats with a place for every layer need it for other models than Apple's "
    "3B; by default the one that the adapter's config names, if it is here"
)
ARGUMENTS = {
    "options": [*arguments.SOURCE, *arguments.output(default=None), _BASE, arguments.FORCE],
    **arguments.PACKAGE,
}


def run(args: argparse.Namespace) -> None:
    arguments.require(
        args,
        "convert",
        adapter_path="what to convert",
        to="what to convert it to",
        output="what to write",
    )
    options, package = arguments.output_options(args)
    from afm_mlx.converters.adapter_conversion import base_of, convert_adapter

    (path,), base = arguments.located(args, [args.adapter_path])
    config = convert_adapter(
        path,
        args.output,
        args.to,
        base=base or base_of(path),
        alpha=args.alpha,
        package=package,
        force=args.force,
        **options,
    )
    arguments.print_written(args.output, config)
