"""Show what a model is, and what would run it here, without loading it."""

from __future__ import annotations

import argparse

from afm_mlx.cli.arguments import Argument, UsageError
from afm_mlx.cli.model_options import JSON
from afm_mlx.cli.output import print_facts, print_json
from afm_mlx.config import PRESETS
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.track_config import TRACK_PRESETS

# fmt: off
ARGUMENTS = {
    "options": [
        Argument("--model", None, f"model folder or hub id; the embedded model ({EMBEDDED_MODEL}) by default"),
        Argument("--preset", [*PRESETS, *TRACK_PRESETS],
                 "figures of an architecture, without any weights"),
        JSON,
    ],
}
# fmt: on


def run(args: argparse.Namespace) -> None:
    if args.model is not None and args.preset is not None:
        raise UsageError("--model and --preset can't both be given; a preset has no folder.")
    from afm_mlx.loading.resolve import resolve_model
    from afm_mlx.measure import describe

    if args.preset in TRACK_PRESETS:
        facts = {"preset": args.preset, **describe.describe_tracks(TRACK_PRESETS[args.preset])}
    elif args.preset is not None:
        facts = {"preset": args.preset, **describe.describe_config(PRESETS[args.preset])}
    else:
        name = args.model or EMBEDDED_MODEL
        folder = resolve_model(name)
        facts = {"model": name, "folder": str(folder), **describe.describe_folder(folder)}
    facts["runtime"] = describe.describe_runtime()
    if args.json:
        print_json(facts)
    else:
        print_facts(facts)
