"""Show what an adapter is. Its numbers are not looked at."""

from __future__ import annotations

import argparse

from afm_mlx.cli.adapter.arguments import SOURCE, located, model_argument, require
from afm_mlx.cli.options import JSON
from afm_mlx.cli.output import print_facts, print_json

_BASE = model_argument("packages of other models than Apple's 3B can't be read without it")
ARGUMENTS = {"options": [*SOURCE, _BASE, JSON]}


def run(args: argparse.Namespace) -> None:
    require(args, "info", adapter_path="what to show")
    from afm_mlx.converters.adapter_conversion import describe_adapter

    (path,), base = located(args, [args.adapter_path])
    facts = describe_adapter(path, base, args.alpha)
    if args.json:
        print_json(facts)
    else:
        facts["base_model_fingerprint"] = facts["base_model_fingerprint"] or "none"
        print_facts(facts)
