"""`afm-mlx doctor --coreml`: Core ML packages beside MLX, as a report."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afm_mlx.cli.output import print_facts, print_table, progress_bar
from afm_mlx.cli.parser import UsageError
from afm_mlx.errors import AFMError

MADE = ""
"""What `--coreml` stands for without a package: packages are made of the model."""

_UNITS = {
    "CPU_ONLY": "CPU",
    "CPU_AND_GPU": "CPU and GPU",
    "CPU_AND_NE": "CPU and Neural Engine",
}


def examine(args: argparse.Namespace) -> dict[str, Any]:
    """The facts of the report.

    Raises:
        AFMError: when the model or the package can't be used.
    """
    from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
    from afm_mlx.measure.coreml import examine_coreml

    if args.coreml != MADE and args.model is None:
        raise UsageError(
            f"--coreml {args.coreml} is compared with the model folder that it was made from: name that with "
            "--model."
        )
    folder = resolve_model(args.model or EMBEDDED_MODEL)
    with (
        _packages(args.coreml, folder) as (packages, not_made),
        progress_bar("comparing", " runs") as progress,
    ):
        facts = examine_coreml(
            packages,
            folder,
            adapter=args.adapter_path,
            quick=args.quick,
            seed=args.seed,
            progress=progress,
        )
    return {**facts, "not_made": not_made}


@contextlib.contextmanager
def _packages(named: str, folder: Path) -> Iterator[tuple[dict[str, Path], dict[str, str]]]:
    """The package that was named, or packages of the model, which go afterwards; and why one can't be made."""
    from afm_mlx.coreml.availability import obstacle

    if named != MADE:
        yield {Path(named).name: Path(named)}, {}
    elif obstacle() is not None:
        yield {}, {}
    else:
        with tempfile.TemporaryDirectory(prefix="afm-mlx-coreml-") as temporary:
            yield _make(folder, Path(temporary))


def _make(folder: Path, place: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Packages of the model in both arrangements, and why one can't be made.

    Raises:
        AFMError: when none can be made.
    """
    from afm_mlx.converters.convert import convert
    from afm_mlx.measure.doctor import without_private_words

    packages, not_made = {}, {}
    for name in ("linear", "neural_engine"):
        path = place / f"{name}.mlpackage"
        with progress_bar(f"making {name}", "B") as progress:
            try:
                convert(folder, path, progress=progress, to="coreml", ane=name == "neural_engine")
            except AFMError as error:
                # Not all weights go with each arrangement.
                not_made[name] = without_private_words(str(error))
                failure = error
            else:
                packages[name] = path
    if not packages:
        raise failure
    return packages, not_made


def print_report(facts: dict[str, Any], path: Path) -> None:
    """Print what a person wants to know of the facts, and where all of them are."""
    print_facts({name: facts[name] for name in ("machine", "runtime")})
    for name, package in facts["packages"].items():
        print_facts({f"package_{name}": package})
    if facts["runs"]:
        print(
            "\nCore ML beside MLX: the difference of logits as a share of their size, and tokens per second"
        )
        print_table([_TITLES, *map(_row, facts["runs"])])
        _print_devices(facts["runs"])
    obstacles = [f"{name}: {reason}" for name, reason in facts["not_made"].items()]
    if facts["not_run"] is not None:
        obstacles.append(facts["not_run"])
    if obstacles:
        print("\nnot run here")
        print("\n".join(f"  {obstacle}" for obstacle in obstacles))
    for name, reason in facts["failures"].items():
        print(f"\nFAILED: {name}\n  {reason}")
    well = "All is well." if facts["runs"] else "Nothing was compared."
    print(f"\n{well if facts['ok'] else 'Please send the report in.'} Report: {path}")


_TITLES = ("", "load", "error", "same tokens", "prefill", "decode", "")


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    figures = tuple(
        f"{run[name]:,.0f}" if name in run else "-"
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second")
    )
    if run["runs_with"] == "MLX":
        return ("MLX", "-", "-", "-", *figures, "")
    compared = "error" in run
    return (
        f"{run['package']}: {_UNITS[run['compute_units']]}",
        f"{run['load_seconds']:.1f} s" if compared else "-",
        f"{run['error']:.1e}" if compared else "-",
        f"{run['same_tokens']} of {run['steps']}" if compared else "-",
        *figures,
        "ok" if run["failure"] is None else "FAILED",
    )


def _print_devices(runs: list[dict[str, Any]]) -> None:
    """Print where operations run, as far as Core ML says it."""
    lines = []
    for run in runs:
        devices = run.get("devices", {})
        name = "" if "package" not in run else f"{run['package']}: {_UNITS[run['compute_units']]}"
        if isinstance(devices, str):
            lines.append(f"  {name}: not known. {devices}")
            continue
        for function, shares in devices.items():
            parts = ", ".join(f"{device} {share:.0%}" for device, share in shares.items())
            lines.append(f"  {name}, {function}: {parts}")
    if lines:
        print("\nwhere Core ML means to run what, by its estimate of the cost")
        print("\n".join(lines))
    elif any("devices" in run for run in runs):
        print("\nCore ML does not say which device runs what.")
