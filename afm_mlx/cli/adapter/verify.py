"""Look for all that keeps an adapter from being used. Exit status 2 when something does."""

from __future__ import annotations

import argparse

from afm_mlx.cli.adapter.arguments import SOURCE, located, model_argument, require
from afm_mlx.cli.argument_table import Argument
from afm_mlx.cli.options import JSON
from afm_mlx.cli.output import print_json
from afm_mlx.errors import CheckpointError

_BASE = model_argument("names, shapes and fingerprint are compared with it")
_SIGNATURE = Argument(
    "--base-signature", None, "40 hex digits that an .fmadapter package must name"
)
ARGUMENTS = {"options": [*SOURCE, _BASE, _SIGNATURE, JSON]}


def run(args: argparse.Namespace) -> None:
    require(args, "verify", adapter_path="what to look at")
    from afm_mlx.converters.adapter_conversion import verify_adapter

    (path,), base = located(args, [args.adapter_path])
    verdict = verify_adapter(path, base, alpha=args.alpha, base_signature=args.base_signature)
    if args.json:
        result = {"ok": not verdict.problems, "problems": verdict.problems, "notes": verdict.notes}
        print_json(result | (verdict.facts or {"adapter": args.adapter_path}))
    else:
        for problem in verdict.problems:
            print(f"wrong: {problem}")
        for note in verdict.notes:
            print(f"note: {note}")
    if verdict.problems:
        count = len(verdict.problems)
        raise CheckpointError(
            f"{args.adapter_path} can't be used: {count} thing{'s' * (count > 1)} wrong with it, listed above."
        )
    if not args.json:
        assert verdict.facts is not None
        print(f"{args.adapter_path} is a whole adapter of rank {verdict.facts['rank']}.")
