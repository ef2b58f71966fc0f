"""Test every kernel on this machine, or Core ML, and write a report that can be sent in.

Exit status: 0 when all is well, 1 when a kernel or a package failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

from afm_mlx.cli import doctor_coreml
from afm_mlx.cli.argument_table import FLAG, Argument, flag_of
from afm_mlx.cli.options import JSON, MAX_SEED
from afm_mlx.cli.output import finite, print_facts, print_json, print_table, progress_bar
from afm_mlx.cli.parser import UsageError, integer

FAILED = 1
# Beginnings of obstacles that a whole backend shares.
_OF_BACKEND = ("runs on ", "MLX has no ", "the C++ extension ")


ARGUMENTS = {
    "options": [
        Argument("--quick", FLAG, "a few problems in a second, and nothing is timed"),
        Argument(
            "--report",
            None,
            "where the report goes; afm-mlx-report-DATE.json in this folder by default, with --coreml "
            "afm-mlx-report-coreml-DATE.json",
            metavar="FILE",
        ),
        Argument("--retry", FLAG, "also run kernels that ended the process the last time"),
        Argument(
            "--seed",
            integer(0, MAX_SEED),
            "seed of the random inputs, to repeat a report; fresh by default",
        ),
        JSON,
    ],
    "Core ML": [
        Argument(
            "--coreml",
            None,
            "instead of kernels, test Core ML: a package of convert --to coreml, or packages that are made of "
            "the model and go afterwards. It is compared with MLX, and both are timed",
            nargs="?",
            const=doctor_coreml.MADE,
            metavar="PACKAGE",
        ),
        Argument(
            "--model",
            None,
            "the model folder that the package was made from, or is made from; afm-nano by default",
        ),
        Argument("--adapter-path", None, "name of an adapter that the model and the package have"),
    ],
}
_ONLY_KERNELS, _ONLY_COREML = ("retry",), ("model", "adapter_path")


def run(args: argparse.Namespace) -> int:
    coreml = args.coreml is not None
    for name in _ONLY_KERNELS if coreml else _ONLY_COREML:
        if getattr(args, name):
            raise UsageError(
                f"{flag_of(name)} does not go with --coreml. Leave one of them out."
                if coreml
                else f"{flag_of(name)} is for --coreml. Add that, or leave {flag_of(name)} out."
            )
    name = "afm-mlx-report-coreml" if coreml else "afm-mlx-report"
    path = Path(args.report or f"{name}-{datetime.date.today()}.json")
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise UsageError(f"--report {path} can't be written: name a file in a folder that exists.")
    from afm_mlx.files import atomic_write

    facts = doctor_coreml.examine(args) if coreml else _examine_kernels(args)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(finite(facts), indent=1, allow_nan=False), encoding="utf-8")
    if args.json:
        print_json(facts)
    elif coreml:
        doctor_coreml.print_report(facts, path)
    else:
        _print(facts, path)
    return 0 if facts["ok"] else FAILED


def _examine_kernels(args: argparse.Namespace) -> dict[str, Any]:
    from afm_mlx.measure.doctor import examine

    with progress_bar("testing", " problems") as progress:
        return examine(quick=args.quick, retry=args.retry, seed=args.seed, progress=progress)


def _print(facts: dict[str, Any], path: Path) -> None:
    print_facts({name: facts[name] for name in ("machine", "runtime", "native_extension")})
    print("\nkernels: the worst error, as a share of what rounding explains")
    print_table([("", "problems", "chosen", "worst", ""), *map(_kernel_row, facts["kernels"])])
    if facts["timed"]:
        print("\ncalls of a 3B model; > marks the kernel that runs")
        _print_timed(facts)
    _print_obstacles(facts)
    if facts["asked_for"]:
        print(f"\nOnly {facts['asked_for']} was tested: AFM_MLX_KERNELS asks for it.")
    for name, reason in facts["failures"].items():
        what = "plain MLX" if name == "reference" else f"and switched off from now on: {name}"
        print(f"\nFAILED, {what}\n  {reason}")
    if not facts["ok"]:
        verdict = "Please send the report in."
    elif facts["slow"]:
        verdict = f"Right, but slow: models run without this package's kernels ({facts['slow']})."
    else:
        verdict = "All is well."
    print(f"\n{verdict} Report: {path}")


def _kernel_row(kernel: dict[str, Any]) -> tuple[str, ...]:
    worst, failed = kernel.get("worst_share_of_bound"), kernel["failed"]
    return (
        f"{kernel['op']}  {kernel['variant']}",
        str(kernel["problems"]),
        str(kernel["chosen"]),
        "-" if worst is None else f"{worst:.2f}",
        f"FAILED ({failed})" if failed else "ok" if kernel["problems"] else "not run",
    )


def _print_timed(facts: dict[str, Any]) -> None:
    rows, title = [], None
    for line in facts["timed"]:
        call = f"{line['op']}: {line['case']}"
        if call != title:
            title = call
            rows.append((call, *[""] * 5))
        name = f"  {'>' if line['chosen'] else ' '} {line['variant']}"
        if "not_run" not in line:
            rows.append((name, *_figures(line)))
    print_table([("", "error", "bound", "time", "GB/s", "of memory"), *rows])


def _figures(line: dict[str, Any]) -> tuple[str, ...]:
    error = "-" if line["error"] is None else f"{line['error']:.1e}"
    if line["failure"] is not None:
        return error, f"{line['bound']:.1e}", "FAILED", "", ""
    share = line.get("share_of_bandwidth")
    return (
        error,
        f"{line['bound']:.1e}",
        _time(line["microseconds"]),
        f"{line['gb_per_s']:.1f}",
        "" if share is None else f"{share:.0%}",
    )


def _time(microseconds: float) -> str:
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:,.1f} ms"


def _print_obstacles(facts: dict[str, Any]) -> None:
    """Print why variants were not run; a reason that holds for a whole backend is printed once."""
    lines: dict[str, None] = {}
    for kernel in facts["kernels"]:
        for reason, count in kernel["not_run"].items():
            backend = kernel["variant"].split("/")[0]
            general = reason.startswith(_OF_BACKEND) or reason.endswith(" is selected")
            what = f"{backend}/*" if general else f"{kernel['op']}  {kernel['variant']} ({count})"
            lines[f"  {what}: {reason}"] = None
    if lines:
        print("\nnot run here")
        print("\n".join(lines))
