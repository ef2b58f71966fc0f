"""`afm-mlx bench --predict`: what a cost model says of chips that are not here."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from typing import Any

from afm_mlx.cli.output import print_json, print_markdown_table
from afm_mlx.measure.prediction import CHIPS, CONTEXTS, Chip, predict

PRESET = "afm-3b"  # what is predicted unless --preset says otherwise
ALL = "all"
CHOICES = [*CHIPS, ALL]

_TITLES = (
    "chip|cores|GB/s|context|decode tok/s|arithmetic ms|memory ms|launches ms|MB/token|dispatches|of limit|"
    "over MLX"
).split("|")
_NOTE = """
A prediction, not a measurement: no Mac was asked. Operations of the Metal kernels were counted in their text
and priced as published for M1 and M2; clocks, bandwidths and the cost of a launch are published, too. Most
published speeds of MLX's own kernels are within 15 % of what this model says, and rather lower
(docs/benchmarks.md). Over MLX: how much longer MLX's own kernel would take for the blocks' matrices, at the
same bits in groups of 64."""


def run(args: argparse.Namespace) -> None:
    """Print what `args.predict` asks for, in the form `args.output`."""
    preset = args.preset or PRESET
    names = list(CHIPS) if args.predict == ALL else [args.predict]
    rows = [_row(preset, name, CHIPS[name], context) for name in names for context in CONTEXTS]
    if args.output == "json":
        print_json({"predicted": True, "preset": preset, "results": rows})
    elif args.output == "csv":
        writer = csv.DictWriter(sys.stdout, ["predicted", "preset", *rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows({"predicted": True, "preset": preset} | row for row in rows)
    else:
        _print(preset, rows)


def _row(preset: str, name: str, chip: Chip, context: int) -> dict[str, Any]:
    found = predict(preset, context, chip)
    return {
        "chip": name,
        "gpu_cores": chip.cores,
        "bandwidth_bytes_per_second": chip.bandwidth * 1e9,
        "context": context,
        "decode_tokens_per_second": found.tokens_per_second,
        "seconds": found.seconds.total,
        "arithmetic_seconds": found.seconds.arithmetic,
        "memory_seconds": found.seconds.memory,
        "launch_seconds": found.seconds.launch,
        "bytes_per_token": found.nbytes,
        "dispatches_per_token": found.dispatches,
        "share_of_bandwidth": found.share,
        "over_mlx": found.over_mlx,
    }


def _print(preset: str, rows: Sequence[dict[str, Any]]) -> None:
    table = [_TITLES]
    for row in rows:
        parts = (row[f"{part}_seconds"] for part in ("arithmetic", "memory", "launch"))
        table.append(
            [
                row["chip"],
                str(row["gpu_cores"]),
                f"{row['bandwidth_bytes_per_second'] / 1e9:.0f}",
                f"{row['context']:,}",
                f"{row['decode_tokens_per_second']:.0f}",
                *(f"{part * 1e3:.2f}" for part in parts),
                f"{row['bytes_per_token'] / 1e6:.0f}",
                str(row["dispatches_per_token"]),
                f"{row['share_of_bandwidth']:.0%}",
                "-" if row["over_mlx"] is None else f"{row['over_mlx']:.2f}x",
            ]
        )
    print(f"predicted: one row of {preset}, packed as --random-weights packs it\n")
    print_markdown_table(table)
    print(_NOTE)
