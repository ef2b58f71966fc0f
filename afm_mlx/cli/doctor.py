"""Test every kernel on this machine, Core ML or Core AI, and write a report that can be sent in.

Exit status: 0 when all is well, 1 when a kernel or a package failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from afm_mlx.cli.arguments import FLAG, Argument, UsageError, flag_of, integer
from afm_mlx.cli.model_options import JSON, MAX_SEED
from afm_mlx.cli.output import finite, print_facts, print_json, print_table, progress_bar
from afm_mlx.errors import AFMError

FAILED = 1
MADE = ""
"""Value of `--coreml` or `--coreai` without a path: packages are made from the model."""
# Beginnings of reasons that hold for a whole backend.
_OF_BACKEND = ("runs on ", "MLX has no ", "the C++ extension ")


# fmt: off
ARGUMENTS = {
    "options": [
        Argument("--quick", FLAG, "run a few problems, in about a second, without timing"),
        Argument("--report", None,
                 "where the report goes; afm-mlx-report-DATE.json in this folder by default, with --coreml "
                 "afm-mlx-report-coreml-DATE.json, and so with --coreai",
                 metavar="FILE"),
        Argument("--retry", FLAG, "also run kernels that crashed the process last time"),
        Argument("--seed", integer(0, MAX_SEED),
                 "seed of the random inputs, to repeat a report; fresh by default"),
        JSON,
    ],
    "Core ML and Core AI": [
        Argument("--coreml", None,
                 "test Core ML instead of kernels: a package of convert --to coreml, or packages that are made "
                 "from the model and removed afterwards. They are compared with MLX, and both are timed",
                 nargs="?", const=MADE, metavar="PACKAGE"),
        Argument("--coreai", None,
                 "test Core AI in the same way: a bundle of convert --to coreai, or one that is made from the "
                 "model and removed afterwards",
                 nargs="?", const=MADE, metavar="BUNDLE"),
        Argument("--model", None, "model folder of the package; afm-nano by default"),
        Argument("--adapter-path", None, "name of an adapter that the model and the package have"),
    ],
}
# fmt: on
_ONLY_KERNELS, _ONLY_EXPORTS = ("retry",), ("model", "adapter_path")


def run(args: argparse.Namespace) -> int:
    if args.coreml is not None and args.coreai is not None:
        raise UsageError("--coreml does not go with --coreai. Leave one of them out.")
    flag = "coreml" if args.coreml is not None else "coreai" if args.coreai is not None else None
    for name in _ONLY_EXPORTS if flag is None else _ONLY_KERNELS:
        if getattr(args, name):
            raise UsageError(
                f"{flag_of(name)} is for --coreml and --coreai. Add one, or leave {flag_of(name)} out."
                if flag is None
                else f"{flag_of(name)} does not go with --{flag}. Leave one of them out."
            )
    name = f"afm-mlx-report-{flag}" if flag else "afm-mlx-report"
    path = Path(args.report or f"{name}-{datetime.date.today()}.json")
    if (path.exists() and not path.is_file()) or not path.absolute().parent.is_dir():
        raise UsageError(f"--report {path} can't be written: name a file in a folder that exists.")
    from afm_mlx.files import atomic_write

    if flag is not None:
        facts = _examine_coreml(args) if flag == "coreml" else _examine_coreai(args)
    else:
        from afm_mlx.measure.kernel_report import examine

        with progress_bar("testing", " problems") as progress:
            facts = examine(quick=args.quick, retry=args.retry, seed=args.seed, progress=progress)
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(finite(facts), indent=1, allow_nan=False), encoding="utf-8")
    if args.json:
        print_json(facts)
    elif flag is not None:
        _print_export(facts, path, "Core ML" if flag == "coreml" else "Core AI")
    else:
        _print_kernels(facts, path)
    return 0 if facts["ok"] else FAILED


def _print_kernels(facts: dict[str, Any], path: Path) -> None:
    print_facts({name: facts[name] for name in ("machine", "runtime", "native_extension")})
    print("\nkernels: the largest error, as a share of its bound")
    rows: list[tuple[Any, ...]] = [("", "problems", "chosen", "worst", "")]
    for kernel in facts["kernels"]:
        worst, failed = kernel.get("worst_share_of_bound"), kernel["failed"]
        verdict = f"FAILED ({failed})" if failed else "ok" if kernel["problems"] else "not run"
        name, share = (
            f"{kernel['op']}  {kernel['variant']}",
            "-" if worst is None else f"{worst:.2f}",
        )
        rows.append((name, kernel["problems"], kernel["chosen"], share, verdict))
    print_table(rows)
    if facts["timed"]:
        print("\ncalls of a 3B model; > marks the kernel that runs")
        _print_timed(facts)
    if facts["steps"] is not None:
        _print_steps(facts["steps"])
    # A reason that holds for a whole backend is printed once.
    obstacles: dict[str, None] = {}
    for kernel in facts["kernels"]:
        for reason, count in kernel["not_run"].items():
            backend = kernel["variant"].split("/")[0]
            general = reason.startswith(_OF_BACKEND) or reason.endswith(" is selected")
            what = f"{backend}/*" if general else f"{kernel['op']}  {kernel['variant']} ({count})"
            obstacles[f"  {what}: {reason}"] = None
    if obstacles:
        print("\nnot run here", *obstacles, sep="\n")
    if facts["asked_for"]:
        print(f"\nOnly {facts['asked_for']} was tested: AFM_MLX_KERNELS says so.")
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


def _print_timed(facts: dict[str, Any]) -> None:
    rows, title = [], None
    for line in facts["timed"]:
        call = f"{line['op']}: {line['case']}"
        if call != title:
            title = call
            rows.append((call, *[""] * 5))
        if "not_run" in line:
            continue
        error = "-" if line["error"] is None else f"{line['error']:.1e}"
        figures: tuple[str, ...] = ("FAILED", "", "")
        if line["failure"] is None:
            time, share = line["microseconds"], line.get("share_of_bandwidth")
            figures = (
                f"{time:.1f} us" if time < 1000 else f"{time / 1000:,.1f} ms",
                f"{line['gb_per_s']:.1f}",
                "" if share is None else f"{share:.0%}",
            )
        name = f"  {'>' if line['chosen'] else ' '} {line['variant']}"
        rows.append((name, error, f"{line['bound']:.1e}", *figures))
    print_table([("", "error", "bound", "time", "GB/s", "of memory"), *rows])


def _print_steps(steps: dict[str, Any]) -> None:
    """Print how long Metal's kernels took to compile, and decode steps with sizes of command buffers."""
    if "not_run" in steps:
        print(f"\ndecode steps were not timed: {steps['not_run']}")
        return
    compiling = steps["compiling"]
    print(
        f"\ncompiling what a server can meet: {compiling['libraries']} libraries, "
        f"{compiling['seconds']:.1f} s"
    )
    print("\ndecode steps of a third of a 3B model, by MLX's command buffers")
    rows: list[tuple[str, ...]] = [("operations", "MB", "tokens/s")]
    for each in steps["command_buffers"]:
        is_other = each["operations"] is not None
        sizes = (each["operations"], each["megabytes"]) if is_other else ("as it is", "")
        rows.append((*map(str, sizes), f"{each['tokens_per_second']:.1f}"))
    print_table(rows)
    if steps["recommended"] is None:
        print("No other size is clearly faster.")
    else:
        variables = " ".join(f"{name}={value}" for name, value in steps["recommended"].items())
        print(f"Faster here: {variables}, set before Python starts.")


# -- Core ML and Core AI

_UNITS = {"CPU_ONLY": "CPU", "CPU_AND_GPU": "CPU and GPU", "CPU_AND_NE": "CPU and Neural Engine"}


def _examine_coreml(args: argparse.Namespace) -> dict[str, Any]:
    from afm_mlx.measure.coreml_report import examine_coreml

    folder = _compared_folder("coreml", args)
    with (
        _packages(args.coreml, folder) as (packages, not_made),
        progress_bar("comparing", " runs") as progress,
    ):
        options = {"adapter": args.adapter_path, "quick": args.quick, "seed": args.seed}
        facts = examine_coreml(packages, folder, progress=progress, **options)
    return {**facts, "not_made": not_made}


def _compared_folder(flag: str, args: argparse.Namespace) -> Path:
    """Return the model folder that a package is compared with."""
    from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model

    if (named := getattr(args, flag)) != MADE and args.model is None:
        raise UsageError(
            f"--{flag} {named} is compared with the model folder that it was made from: name that with "
            "--model."
        )
    return resolve_model(args.model or EMBEDDED_MODEL)


def _examine_coreai(args: argparse.Namespace) -> dict[str, Any]:
    from afm_mlx.measure.coreai_report import examine_coreai

    folder = _compared_folder("coreai", args)
    with (
        _bundle(args.coreai, folder, args.adapter_path) as path,
        progress_bar("comparing", " runs") as progress,
    ):
        options = {"adapter": args.adapter_path, "quick": args.quick, "seed": args.seed}
        facts = examine_coreai(path, folder, progress=progress, **options)
    return {**facts, "not_made": {}}


@contextlib.contextmanager
def _bundle(named: str, folder: Path, adapter: str | None) -> Iterator[Path | None]:
    """Yield the bundle `named`, or one that is made of the model and removed; None without Core AI."""
    from afm_mlx.adapters.adapter_folder import load_adapter
    from afm_mlx.converters.convert import convert
    from afm_mlx.coreai.availability import obstacle
    from afm_mlx.coreai.bundle import CoreAIBundle
    from afm_mlx.loading.resolve import resolve_adapter

    if named != MADE or obstacle() is not None:
        yield None if named == MADE else Path(named)
        return
    found = None if adapter is None else resolve_adapter(adapter, folder)
    rank = None if found is None else load_adapter(found)[1].rank
    with tempfile.TemporaryDirectory(prefix="afm-mlx-coreai-") as temporary:
        path = Path(temporary) / "bundle"
        with progress_bar("making a bundle", "B") as progress:
            convert(folder, path, progress=progress, to="coreai", adapter_rank=rank)
        if found is not None:
            from afm_mlx.converters.coreai.adapter_file import write_adapter_file

            bundle = CoreAIBundle.read(path)
            write_adapter_file(found, bundle, bundle.adapter_file(found))
        yield path


@contextlib.contextmanager
def _packages(named: str, folder: Path) -> Iterator[tuple[dict[str, Path], dict[str, str]]]:
    """Yield Core ML packages by name, and by name the reasons why others can't be made.

    If `named` is a path, the package there is yielded. If it is `MADE`, packages of the model in `folder` are
    made, and removed at the end; an `AFMError` is raised if none can be. Without Core ML, none are made.
    """
    from afm_mlx.converters.convert import convert
    from afm_mlx.coreml.availability import obstacle
    from afm_mlx.measure.kernel_report import without_private_words

    if named != MADE or obstacle() is not None:
        yield {} if named == MADE else {Path(named).name: Path(named)}, {}
        return
    packages, not_made = {}, {}
    with tempfile.TemporaryDirectory(prefix="afm-mlx-coreml-") as temporary:
        for name in ("linear", "neural_engine"):
            path = Path(temporary) / f"{name}.mlpackage"
            with progress_bar(f"making {name}", "B") as progress:
                try:
                    ane = name == "neural_engine"
                    convert(folder, path, progress=progress, to="coreml", ane=ane)
                except AFMError as error:
                    # Some weights can't be written in one of the arrangements.
                    not_made[name] = without_private_words(str(error))
                    failure = error
                else:
                    packages[name] = path
        if not packages:
            raise failure
        yield packages, not_made


def _print_export(facts: dict[str, Any], path: Path, framework: str) -> None:
    print_facts({name: facts[name] for name in ("machine", "runtime")})
    for name, package in facts["packages"].items():
        print_facts({f"package_{name}": package})
    if facts["runs"]:
        print(
            f"\n{framework} compared with MLX: difference of logits as a share of their size, and tokens per "
            "second"
        )
        print_table([_EXPORT_TITLES, *map(_export_row, facts["runs"])])
        _print_devices(facts["runs"])
    obstacles = [f"{name}: {reason}" for name, reason in facts["not_made"].items()]
    if facts["not_run"] is not None:
        obstacles.append(facts["not_run"])
    if obstacles:
        print("\nnot run here", *(f"  {obstacle}" for obstacle in obstacles), sep="\n")
    for name, reason in facts["failures"].items():
        print(f"\nFAILED: {name}\n  {reason}")
    well = "All is well." if facts["runs"] else "Nothing was compared."
    print(f"\n{well if facts['ok'] else 'Please send the report in.'} Report: {path}")


_EXPORT_TITLES = ("", "load", "error", "same tokens", "prefill", "decode", "")


def _export_row(run: dict[str, Any]) -> tuple[str, ...]:
    figures = tuple(
        f"{run[name]:,.0f}" if name in run else "-"
        for name in ("prefill_tokens_per_second", "decode_tokens_per_second")
    )
    if run["runs_with"] == "MLX":
        return ("MLX", "-", "-", "-", *figures, "")
    compared = "error" in run
    return (
        _run_name(run),
        f"{run['load_seconds']:.1f} s" if compared else "-",
        f"{run['error']:.1e}" if compared else "-",
        f"{run['same_tokens']} of {run['steps']}" if compared else "-",
        *figures,
        "ok" if run["failure"] is None else "FAILED",
    )


def _run_name(run: dict[str, Any]) -> str:
    units = run.get("compute_units")
    return run["package"] if units is None else f"{run['package']}: {_UNITS[units]}"


def _print_devices(runs: list[dict[str, Any]]) -> None:
    """Print which devices run the operations, as far as Core ML tells."""
    lines = []
    for run in runs:
        devices = run.get("devices", {})
        name = "" if "package" not in run else _run_name(run)
        if isinstance(devices, str):
            lines.append(f"  {name}: not known. {devices}")
            continue
        for function, shares in devices.items():
            parts = ", ".join(f"{device} {share:.0%}" for device, share in shares.items())
            lines.append(f"  {name}, {function}: {parts}")
    if lines:
        print(
            "\nthe devices that Core ML plans to use, by its estimate of the cost", *lines, sep="\n"
        )
    elif any("devices" in run for run in runs):
        print("\nCore ML does not say which device runs what.")
