"""Make the quantized variants of the trained model, and compare them.

    python examples/nano/quantize.py ptq --source nano        # float, and quantized without training
    python examples/nano/quantize.py qat --source nano        # quantization-aware training
    python examples/nano/quantize.py recover --source nano    # recovery adapters on what that made
    python examples/nano/quantize.py report --source nano     # table and figure of all that is there

Each variant is one command of `afm-mlx`, which is printed; `variants.py` has them all. What exists is left as
it is, and a training run that was interrupted goes on. To make a variant again, remove its folder in
`nano/models`, and its run.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import variants
from variants import STAGES, VARIANTS, Variant

from afm_mlx import cli


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the exit status of the first `afm-mlx` that fails, else 0."""
    args = _parser().parse_args(argv)
    data = args.data or args.source / "data"
    if not (args.source / "checkpoint" / "base-model.pt").is_file():
        return _fail(f"{args.source} has no trained checkpoint; build.py makes it.")
    if args.stage == "report":
        import quality

        return quality.report(args.source, args.limit)
    if not (data / "train.jsonl").is_file():
        return _fail(f"{data} has no train.jsonl; write_data.py makes it.")
    for variant in _wanted(args.stage, args.only):
        status = make(variant, args.source, data)
        if status:
            return status
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=[*STAGES, "report"])
    parser.add_argument("--source", type=Path, required=True, help="folder that build.py made")
    parser.add_argument("--data", type=Path, help="folder that write_data.py made; SOURCE/data")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="VARIANT",
        choices=[variant.name for variant in VARIANTS],
        help="some of the stage's variants",
    )
    parser.add_argument(
        "--limit", type=int, help="held-out chats per task in the report; all of them"
    )
    return parser


def _wanted(stage: str, only: list[str] | None) -> list[Variant]:
    return [v for v in VARIANTS if v.stage == stage and (only is None or v.name in only)]


def make(variant: Variant, source: Path, data: Path) -> int:
    """Make a variant unless it is there; return the exit status of its command."""
    place = variants.folder(variant.name, source)
    if variants.is_made(variant, source):
        print(f"{place} exists")
        return 0
    needed = [v for v in VARIANTS if f"{{{v.name}}}" in variant.command]
    missing = [v for v in needed if not variants.is_made(v, source)]
    if missing:
        stage = missing[0].stage
        return _fail(f"{variant.name} needs {missing[0].name}; quantize.py {stage} makes it.")
    place.parent.mkdir(parents=True, exist_ok=True)
    argv = variants.arguments(variant, source, data)
    print(f"\n$ afm-mlx {shlex.join(argv)}", flush=True)
    return cli.main(argv)


def _fail(message: str) -> int:
    print(f"quantize.py: {message}", file=sys.stderr)
    return cli.USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
