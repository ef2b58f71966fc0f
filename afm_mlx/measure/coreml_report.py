"""Compare Core ML packages with MLX on each kind of compute unit; see `exported_models.py`.

Each run has a process of its own, because a fault inside Core ML may end the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from afm_mlx.config import ModelConfig
from afm_mlx.coreml.availability import obstacle
from afm_mlx.coreml.coreml_model import CoreMLModel, planned_devices
from afm_mlx.coreml.package import CoreMLPackage
from afm_mlx.loading.load import load
from afm_mlx.measure.describe import Facts
from afm_mlx.measure.exported_models import (
    Reference,
    check_same_model,
    compared,
    failure_of,
    in_own_process,
    make_references,
    mlx_run,
    read_afm_config,
    report_facts,
)
from afm_mlx.model.model import Model
from afm_mlx.progress import Progress

UNITS = ("CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")


def examine_coreml(
    packages: Mapping[str, Path],
    folder: Path,
    *,
    adapter: str | None = None,
    quick: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Compare packages with the model folder that they were made from, and time both.

    Args:
        packages: the packages by what the report calls them; none where Core ML can't run.
        folder: the model folder.
        adapter: name of an adapter that both have; pass None for none.
        quick: True to compare only, and time nothing.
        seed: seed of the random tokens; a fresh one by default.
        progress: called with (runs done, runs in all).

    Returns:
        `ok`; facts about the machine; `not_run`, why nothing could run here, or None; `runs`, one line for MLX
        and for each package and kind of compute unit; `failures` by run.

    Raises:
        AFMError: when a package is damaged, or was not made from this folder.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    config = read_afm_config(folder, "Core ML")
    described = {name: _describe(path, config, folder, adapter) for name, path in packages.items()}
    runs: list[Facts] = []
    if (reason := obstacle()) is None:
        model, _ = load(folder, adapter_path=adapter)
        runs = _run_all(packages, model, adapter, quick, np.random.default_rng(seed), progress)
    return report_facts(
        folder,
        adapter,
        "coremltools",
        seed,
        quick,
        packages=described,
        not_run=reason,
        runs=runs,
    )


def _describe(path: Path, config: ModelConfig, folder: Path, adapter: str | None) -> Facts:
    """Return the facts about a package; raise if it was not made from this model."""
    package = CoreMLPackage.read(path)
    package.function_names(adapter)
    check_same_model(path, package.config, config, folder)
    return {
        "arrangement": package.arrangement,
        "prompt_lengths": list(package.prompt_lengths),
        "adapters": list(package.adapters),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
    }


def _run_all(
    packages: Mapping[str, Path],
    model: Model,
    adapter: str | None,
    quick: bool,
    rng: np.random.Generator,
    progress: Progress | None,
) -> list[Facts]:
    references = make_references(model, rng)
    jobs = [(name, path, units) for name, path in packages.items() for units in UNITS]
    runs: list[Facts] = []

    def done(facts: Facts) -> None:
        runs.append(facts)
        if progress is not None:
            progress(len(runs), 1 + len(jobs))

    done(mlx_run(model, quick))
    for name, path, units in jobs:
        facts: Facts = {"runs_with": "Core ML", "package": name, "compute_units": units}
        try:
            facts |= in_own_process(run_package, path, units, adapter, references, quick)
        except Exception as error:  # coremltools raises many types, and each is a finding
            facts["failure"] = failure_of(error)
        else:
            try:
                facts["devices"] = in_own_process(planned_devices, path, units, adapter)
            except Exception as error:  # not a failure of the package
                facts["devices"] = failure_of(error)
        done(facts)
    return runs


def run_package(
    path: Path, units: str, adapter: str | None, references: Sequence[Reference], quick: bool
) -> Facts:
    """Compare a package with MLX on one kind of compute unit, see `compared`."""
    return compared(lambda: CoreMLModel(path, units, adapter), references, quick)
