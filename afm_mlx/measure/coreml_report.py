"""Compare Core ML packages with MLX: logits for the same weights and tokens, and speed.

MLX computes prompts of random tokens and greedy steps after them. Each package computes the same tokens on each
kind of compute unit, including MLX's choices, so that all logits can be compared. Each run has a process of its
own, because a fault inside Core ML may end the process.

Every function returns values that JSON can hold.
"""

from __future__ import annotations

import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.config import MODEL_TYPE, ModelConfig, is_afm_config, read_config_json
from afm_mlx.coreml.availability import obstacle
from afm_mlx.coreml.coreml_model import CoreMLModel, planned_devices
from afm_mlx.coreml.package import CoreMLPackage
from afm_mlx.errors import AFMError, CheckpointError, shown
from afm_mlx.loading.load import load
from afm_mlx.measure.benchmark import BenchmarkCase, run_case
from afm_mlx.measure.describe import Facts, describe_runtime, version_of
from afm_mlx.measure.kernel_report import FORMAT, describe_machine, without_private_words
from afm_mlx.model.model import Model
from afm_mlx.progress import Progress

UNITS = ("CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE")
ERROR_BOUND = 0.05
"""Maximum root mean square of differences between logits, as a share of the logits' own."""

# A short prompt is mostly padding; a long one takes several calls.
_PROMPTS = (5, 101)
_STEPS = 10
_TIMED_STEPS = 64
_TIMED_PROMPT = 512
_REPETITIONS = 3


@dataclass(frozen=True)
class Reference:
    """MLX's greedy answer to a prompt: tokens, and the logits (steps, vocab_size) that they come from."""

    prompt: list[int]
    tokens: list[int]
    logits: np.ndarray


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
    values = read_config_json(folder / "config.json")
    if not is_afm_config(values):
        raise AFMError(
            f"{folder} is a model of the type {shown(values.get('model_type'))}; Core ML packages are made of "
            f"{MODEL_TYPE!r} only."
        )
    config = ModelConfig.from_dict(values, source=str(folder / "config.json"))
    described = {name: _describe(path, config, folder, adapter) for name, path in packages.items()}
    runs: list[Facts] = []
    if (reason := obstacle()) is None:
        model, _ = load(folder, adapter_path=adapter)
        runs = _run_all(packages, model, adapter, quick, np.random.default_rng(seed), progress)
    failures = {
        f"{run['package']}, {run['compute_units']}": run["failure"]
        for run in runs
        if run["failure"] is not None
    }
    facts = {
        "ok": not failures,
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seed": seed,
        "machine": describe_machine(None),
        "runtime": {**describe_runtime(), "coremltools": version_of("coremltools")},
        "model": {"folder": folder.name, "adapter": adapter},
        "packages": described,
        "not_run": reason,
        "error_bound": ERROR_BOUND,
        "runs": runs,
        "failures": failures,
    }
    return without_private_words(facts)


def _describe(path: Path, config: ModelConfig, folder: Path, adapter: str | None) -> Facts:
    """Return the facts about a package; raise if it was not made from this model."""
    package = CoreMLPackage.read(path)
    package.function_names(adapter)
    ours, theirs = config.to_dict(), package.config.to_dict()
    for key, value in ours.items():
        if theirs[key] != value:
            raise CheckpointError(
                f"{path} was made from another model than {folder}: its {key} is {theirs[key]}, the "
                f"folder's {value}. Name the folder that it was made from, or make the package again."
            )
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

    of_mlx: Facts = {"runs_with": "MLX", "failure": None}
    if not quick:
        prompt, steps = _timed_sizes(model.args.context_length)
        result = run_case(model, BenchmarkCase(prompt, steps), _REPETITIONS)
        of_mlx |= {
            "prompt_tokens": prompt,
            "prefill_tokens_per_second": result.prefill.mean,
            "decode_tokens_per_second": result.decode.mean,
        }
    done(of_mlx)
    for name, path, units in jobs:
        facts: Facts = {"runs_with": "Core ML", "package": name, "compute_units": units}
        try:
            facts |= in_own_process(run_package, path, units, adapter, references, quick)
        except Exception as error:  # coremltools raises many types, and each is a finding
            facts["failure"] = _said(error)
        else:
            try:
                facts["devices"] = in_own_process(planned_devices, path, units, adapter)
            except Exception as error:  # not a failure of the package
                facts["devices"] = _said(error)
        done(facts)
    return runs


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, AFMError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())


def make_references(model: Model, rng: np.random.Generator) -> list[Reference]:
    """Compute MLX's greedy answers to prompts of random tokens."""
    config, references = model.args, []
    for length in _PROMPTS:
        length = min(length, config.context_length - _STEPS)
        prompt = rng.integers(0, config.vocab_size, length).tolist()
        cache = model.make_cache()
        model.prefill(mx.array([prompt[:-1]]), cache)
        tokens, rows = [prompt[-1]], []
        for _ in range(_STEPS):
            row = model(mx.array([tokens[-1:]]), cache)[0, -1].astype(mx.float32)
            rows.append(np.array(row))
            tokens.append(int(rows[-1].argmax()))
        references.append(Reference(prompt, tokens[1:], np.stack(rows)))
    return references


def run_package(
    path: Path, units: str, adapter: str | None, references: Sequence[Reference], quick: bool
) -> Facts:
    """Compare a package with MLX on one kind of compute unit, and time it unless `quick`.

    Returns:
        `error`, the root mean square of the differences between logits as a share of the logits' own, for the
        worst prompt; the number of equal tokens; times; and `failure`, None or what is wrong.
    """
    start = time.perf_counter()
    model = CoreMLModel(path, units, adapter)
    facts: Facts = {"load_seconds": time.perf_counter() - start, "failure": None}
    errors, same = [], 0
    for reference in references:
        model.rewind()
        rows = [model.logits(reference.prompt)]
        rows += [model.decode(token) for token in reference.tokens[:-1]]
        found, right = np.stack(rows), reference.logits
        errors.append(float(np.sqrt(np.square(found - right).mean() / np.square(right).mean())))
        same += int((found.argmax(1) == reference.tokens).sum())
    error = float(np.max(errors))  # NaN if any is
    steps = sum(len(reference.tokens) for reference in references)
    facts |= {"error": error, "steps": steps, "same_tokens": same}
    if not error <= ERROR_BOUND:
        facts["failure"] = (
            f"logits are {error:.2g} of their size away from MLX's; {ERROR_BOUND} is allowed"
        )
    if not quick:
        facts |= _rates(model)
    return facts


def _rates(model: CoreMLModel) -> Facts:
    """Measure tokens per second of prompts and of steps."""
    prompt, steps = _timed_sizes(model.package.config.context_length)
    reading, stepping = [], []
    for _ in range(_REPETITIONS):
        model.rewind()
        start = time.perf_counter()
        model.prefill([0] * prompt)
        reading.append(time.perf_counter() - start)
        for _ in range(steps):
            start = time.perf_counter()
            model.decode(0)
            stepping.append(time.perf_counter() - start)
    return {
        "prompt_tokens": prompt,
        "prefill_tokens_per_second": prompt / statistics.median(reading),
        "decode_tokens_per_second": 1 / statistics.median(stepping),
    }


def _timed_sizes(context: int) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of steps to time, which fit in the context together."""
    steps = min(_TIMED_STEPS, context // 4)
    return min(_TIMED_PROMPT, context - steps), steps


def in_own_process(function: Callable[..., Facts], *arguments: Any) -> Facts:
    """Call a module's function in a child process; raise `AFMError` if that ends before it returns."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            raise AFMError(
                "Core ML ended the process that it ran in; the system's crash report says where"
            ) from None
