"""Write an adapter in another format. Numbers keep every bit where the format can hold them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from afm_mlx.cli.adapter.arguments import (
    add_force,
    add_model,
    add_output,
    add_source,
    base_of,
    dtype_of,
    print_written,
    require,
)
from afm_mlx.cli.parser import UsageError

_PACKAGE = {
    "name": "letters, digits and '_'; that of the output by default",
    "author": "of the adapter",
    "description": "of what the adapter does",
    "license": "of the adapter",
    "base_signature": "40 hex digits that name the base model to Apple's runtime",
    "draft": "folder with draft.mil and draft_weights.bin to pass through; that of the source by default",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_source(parser)
    add_output(parser, default=None)
    add_model(
        parser,
        "the adapter must fit it, and formats with a place for every layer need it for other models than "
        "Apple's 3B",
    )
    add_force(parser)
    parser.add_argument(
        "--qkv",
        choices=["fused", "split"],
        default="fused",
        help="what a PEFT folder calls queries, keys and values: qkv_proj, or q_proj, k_proj and v_proj",
    )
    group = parser.add_argument_group(".fmadapter packages")
    for name, help_text in _PACKAGE.items():
        group.add_argument(f"--{name.replace('_', '-')}", help=help_text)
    group.add_argument(
        "--any-rank",
        action="store_true",
        help="write ranks above 32, which Apple's runtime does not load",
    )


def run(args: argparse.Namespace) -> None:
    require(
        args,
        "convert",
        adapter_path="what to convert",
        to="what to convert it to",
        output="what to write",
    )
    package = _package(args)
    if args.qkv != "fused" and args.to != "peft":
        raise UsageError(f"--qkv is for PEFT folders; it has no effect on {args.to}. Leave it out.")
    if args.dtype is not None and args.to in ("toolkit", "fmadapter"):
        raise UsageError(
            f"--dtype is {args.dtype}, and {args.to} has a type of its own. Leave it out."
        )
    from afm_mlx.converters.adapter_formats.conversion import convert_adapter

    config = convert_adapter(
        args.adapter_path,
        args.output,
        args.to,
        base=base_of(args),
        alpha=args.alpha,
        dtype=dtype_of(args),
        package=package,
        any_rank=args.any_rank,
        qkv=args.qkv,
        force=args.force,
    )
    print_written(args.output, config)


def _package(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in _PACKAGE if getattr(args, name) is not None}
    if args.to != "fmadapter" and (given or args.any_rank):
        name = next(iter(given), "any_rank").replace("_", "-")
        raise UsageError(
            f"--{name} is for .fmadapter packages; it has no effect on {args.to}. Leave it out."
        )
    if "draft" in given:
        given["draft"] = Path(given["draft"])
    return given
