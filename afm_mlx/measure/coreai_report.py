"""Compare a Core AI bundle with MLX, in a process of its own; see `exported_models.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.coreai.availability import obstacle
from afm_mlx.coreai.bundle import CoreAIBundle, ZooConfig
from afm_mlx.coreai.coreai_model import CoreAIModel
from afm_mlx.errors import AFMError, CheckpointError
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
from afm_mlx.progress import Progress


def examine_coreai(
    path: Path | None,
    folder: Path,
    *,
    adapter: str | None = None,
    quick: bool = False,
    seed: int | None = None,
    progress: Progress | None = None,
) -> Facts:
    """Compare a bundle with the model folder that it was made from, and time both.

    Args:
        path: the bundle; None where Core AI can't run.
        folder: the model folder.
        adapter: an adapter's path, or its name in the model folder; the bundle has functions
            or a file for it.
        quick: True to compare only, and time nothing.
        seed: seed of the random tokens; a fresh one by default.
        progress: called with (runs done, runs in all).

    Returns:
        the report, with the keys of `examine_coreml`'s and one run of the bundle.

    Raises:
        AFMError: when the bundle is damaged, or was not made from this folder.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
    config = read_afm_config(folder, "Core AI")
    described, runs, reason = {}, [], obstacle()
    if path is not None:
        bundle = CoreAIBundle.read(path)
        if isinstance(bundle.config, ZooConfig):
            raise CheckpointError(
                f"{path} was made of a model of mlx-lm, and {folder} is an AFM model's folder. Name a bundle "
                "of that folder."
            )
        check_same_model(path, bundle.config, config, folder, ignored=["context_length"])
        # The fingerprint is the whole model's; `config` has no image encoder.
        whole = ModelConfig.from_file(folder / "config.json")
        if bundle.fingerprint != folder_fingerprint(whole, folder):
            raise CheckpointError(
                f"{path} was made from other weights than {folder} has. Name the folder that it was made from, "
                "or make the bundle again."
            )
        described[path.name] = {
            "context_length": bundle.config.context_length,
            "prompt_lengths": list(bundle.prompt_lengths),
            "adapter_rank": bundle.adapter_rank,
            "adapters": list(bundle.adapters),
            "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        }
    if path is not None and reason is None:
        model, _ = load(folder, adapter_path=adapter)
        context = min(config.context_length, bundle.config.context_length)
        references = make_references(model, np.random.default_rng(seed), context)
        runs.append(mlx_run(model, quick))
        if progress is not None:
            progress(1, 2)
        given: str | Path | None = None
        if adapter is not None:
            name = Path(adapter).stem
            given = name if name in bundle.adapters else bundle.adapter_file(adapter)
        facts: Facts = {"runs_with": "Core AI", "package": path.name}
        try:
            facts |= in_own_process(run_bundle, path, given, references, quick)
        except (AFMError, RuntimeError) as error:
            facts["failure"] = failure_of(error)
        runs.append(facts)
        if progress is not None:
            progress(2, 2)
    return report_facts(
        folder,
        adapter,
        "coreai-core",
        seed,
        quick,
        packages=described,
        not_run=reason,
        runs=runs,
    )


def run_bundle(
    path: Path, adapter: str | Path | None, references: Sequence[Reference], quick: bool
) -> Facts:
    """Compare a bundle with MLX, see `compared`."""
    return compared(lambda: CoreAIModel(path, adapter), references, quick)
