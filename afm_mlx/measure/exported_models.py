"""Compare exported models with MLX: logits for the same weights and tokens, and speed.

MLX computes prompts of random tokens and greedy steps after them. An exported model computes the same tokens,
including MLX's choices, so that all logits can be compared.

Every function returns values that JSON can hold, except `make_references`.
"""

from __future__ import annotations

import dataclasses
import datetime
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.config import MODEL_TYPE, ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import AFMError, CheckpointError, reason_of, shown
from afm_mlx.measure.benchmark import BenchmarkCase, run_case
from afm_mlx.measure.describe import Facts, describe_runtime, version_of
from afm_mlx.measure.kernel_report import FORMAT, describe_machine, without_private_words
from afm_mlx.model.exported_model import ExportedModel
from afm_mlx.model.model import Model

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


def read_afm_config(folder: Path, framework: str) -> ModelConfig:
    """Return the architecture of a model folder's text model, whose logits are compared with an export's.

    Raises:
        AFMError: if the folder is of another kind.
    """
    values = read_config_json(folder / "config.json")
    if not is_afm_config(values):
        raise AFMError(
            f"{folder} is a model of the type {shown(values.get('model_type'))}; {framework} packages are made "
            f"of {MODEL_TYPE!r} only."
        )
    config = ModelConfig.from_dict(values, source=str(folder / "config.json"))
    return dataclasses.replace(config, vision_config=None)


def check_same_model(
    path: Path, theirs: ModelConfig, ours: ModelConfig, folder: Path, ignored: Sequence[str] = ()
) -> None:
    """Raise `CheckpointError` unless an export has the architecture of a model folder."""
    found = theirs.to_dict()
    for key, value in ours.to_dict().items():
        if found[key] != value and key not in ignored:
            raise CheckpointError(
                f"{path} was made from another model than {folder}: its {key} is {found[key]}, the "
                f"folder's {value}. Name the folder that it was made from, or make the package again."
            )


def report_facts(
    folder: Path, adapter: str | None, library: str, seed: int, quick: bool, **more: Any
) -> Facts:
    """Return a report; `more` has `packages`, `not_run` and `runs`, see `examine_coreml`."""
    failures = {
        ", ".join(run[key] for key in ("package", "compute_units") if key in run): run["failure"]
        for run in more["runs"]
        if run["failure"] is not None
    }
    facts = {
        "ok": not failures,
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quick": quick,
        "seed": seed,
        "machine": describe_machine(None),
        "runtime": {**describe_runtime(), library: version_of(library)},
        "model": {"folder": folder.name, "adapter": adapter},
        "error_bound": ERROR_BOUND,
        **more,
        "failures": failures,
    }
    return without_private_words(facts)


def mlx_run(model: Model, quick: bool) -> Facts:
    """Return the run of MLX, timed unless `quick`."""
    facts: Facts = {"runs_with": "MLX", "failure": None}
    if not quick:
        prompt, steps = _timed_sizes(model.args.context_length)
        result = run_case(model, BenchmarkCase(prompt, steps), _REPETITIONS)
        facts |= {
            "prompt_tokens": prompt,
            "prefill_tokens_per_second": result.prefill.mean,
            "decode_tokens_per_second": result.decode.mean,
        }
    return facts


def make_references(
    model: Model, rng: np.random.Generator, context: int | None = None
) -> list[Reference]:
    """Compute MLX's greedy answers to prompts of random tokens, which fit into `context` tokens.

    The context is the model's by default.
    """
    config, references = model.args, []
    context = context or config.context_length
    for length in _PROMPTS:
        length = min(length, context - _STEPS)
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


def compared(
    load: Callable[[], ExportedModel], references: Sequence[Reference], quick: bool
) -> Facts:
    """Compare an exported model with MLX, and time it unless `quick`.

    Returns:
        `error`, the root mean square of the differences between logits as a share of the logits' own, for the
        worst prompt; the number of equal tokens; times; and `failure`, None or what is wrong.
    """
    start = time.perf_counter()
    model = load()
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


def _rates(model: ExportedModel) -> Facts:
    """Measure tokens per second of prompts and of steps."""
    prompt, steps = _timed_sizes(model.config.context_length)
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
                "The process that it ran in has ended; the system's crash report says where"
            ) from None


def failure_of(error: Exception) -> str:
    """Return an error's message in one line, after its type unless that is `AFMError`."""
    kind = "" if isinstance(error, AFMError) else f"{type(error).__name__}: "
    return kind + reason_of(error)
