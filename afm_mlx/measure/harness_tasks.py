"""Running tasks of lm-evaluation-harness ("lm-eval"): finding them, their results in files and by question."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from numbers import Real
from pathlib import Path
from traceback import walk_tb
from typing import Any

# lm-eval's bootstrap would fork, which a process that runs MLX must not do.
os.environ.setdefault("LMEVAL_DISABLE_MULTIPROC", "1")

import numpy as np
from lm_eval import evaluator
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from tqdm import tqdm

from afm_mlx.errors import AFMError, DataError, did_you_mean, reason_of, shown
from afm_mlx.measure import harness_model
from afm_mlx.measure.comparison import Score
from afm_mlx.measure.harness_model import HarnessModel

Results = dict[str, Any]
"""What `lm_eval.simple_evaluate` returns."""


def find_tasks(names: Sequence[str], folder: Path | None = None) -> TaskManager:
    """Return a task manager that has all of the named tasks, groups and tags.

    Args:
        names: may have `*`, as in `mmlu_*`.
        folder: folder of YAML files, whose tasks come before lm-eval's own.

    Raises:
        DataError: names the task that doesn't exist.
    """
    if folder is not None and not folder.is_dir():
        raise DataError(f"There is no folder {folder}; the tasks' YAML files are in one.")
    path = None if folder is None else str(folder)
    manager = TaskManager(include_path=path, include_defaults=False)
    if not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=path)  # lm-eval's 14,000 tasks, which takes seconds
    for name in names:
        if not manager.match_tasks([name]):
            raise DataError(
                f"There is no task {shown(name)}{did_you_mean(name, manager.all_tasks)}. `lm_eval ls tasks` "
                "lists lm-eval's; --include-path names a folder of others."
            )
    return manager


def run_tasks(
    model: HarnessModel,
    name: str,
    tasks: TaskManager,
    names: Sequence[str],
    folder: Path,
    log_samples: bool = False,
    seed: int = 123,
    **options: Any,
) -> tuple[Results, Path]:
    """Let a model answer tasks; write the results as lm-eval does, and return them and their file.

    Of several ranks, only the first one writes.

    Args:
        model: the model; `name` is what results call it.
        tasks: what `find_tasks` returned.
        names: the tasks.
        folder: folder of the results: `NAME/results_DATE.json`.
        log_samples: True to write each question and answer, too: `NAME/samples_TASK_DATE.jsonl`.
        seed: seed of the choice of examples.
        options: other arguments of `lm_eval.simple_evaluate`.

    Raises:
        DataError: if lm-eval can't run a task, such as one whose data can't be read, or one that runs the
            model's code while `confirm_run_unsafe_code` is False; and if the results can't be written.
    """
    names = [each for name in names for each in tasks.match_tasks([name])]
    tracker = EvaluationTracker(output_path=str(folder))
    with _quiet():
        try:
            results = evaluator.simple_evaluate(
                model,
                {"pretrained": name},
                names,
                task_manager=tasks,
                evaluation_tracker=tracker,
                batch_size=model.batch_size,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=None,  # no torch runs here; a seed would import it
                fewshot_random_seed=seed,
                **options,
            )
        except Exception as error:
            frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
            if isinstance(error, AFMError | ImportError) or harness_model.__file__ in frames:
                raise
            if "marked as unsafe" in str(error):
                raise DataError(
                    f"A task of {', '.join(names)} runs code that the model writes. If you trust the model, or "
                    "this machine holds nothing of value, add --confirm-run-unsafe-code."
                ) from None
            # Of their YAML files, or of `datasets`: no such file, no such data set, no connection.
            reason = f"{type(error).__name__}: {' '.join(reason_of(error).split())}"
            raise DataError(f"lm-eval can't run {', '.join(names)}: {reason}") from error
    if not model.ranks.is_first:
        return results, folder
    samples = results["samples"]
    tracker.save_results_aggregated({k: v for k, v in results.items() if k != "samples"}, samples)
    config = tracker.general_config_tracker
    file = folder / config.model_name_sanitized / f"results_{tracker.date_id}.json"
    if not file.is_file():  # lm-eval only logs a failure
        raise DataError(
            f"The results can't be written to {file.parent}: check the folder and the disk."
        )
    if log_samples:
        for task, lines in samples.items():
            tracker.save_results_samples(task, lines)
    return results, file


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide progress bars unless stderr is a terminal, and what git says where there is no repository."""
    init, git_hash = tqdm.__init__, evaluator.get_git_commit_hash
    tqdm.__init__ = partialmethod(init, disable=None)
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        tqdm.__init__, evaluator.get_git_commit_hash = init, git_hash


# -- scores by question


def question_scores(results: Results) -> dict[tuple[str, str], Score]:
    """Return the scores of all tasks and groups, by task and metric.

    A metric's name is followed by its filter if that is another than "none": `exact_match,strict-match`.
    """
    found = {}
    for task, values in results["results"].items():
        for name, value in values.items():
            metric, comma, filtered = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, Real):
                questions = _questions(results, task, metric, filtered)
                shown_name = metric if filtered == "none" else name
                found[task, shown_name] = Score(float(value), _if_mean(questions, float(value)))
    return found


def _questions(results: Results, task: str, metric: str, filtered: str) -> list[Any]:
    """Return a metric's value of each question of a task, or of all tasks of a group."""
    subtasks: Mapping[str, Sequence[str]] = results["group_subtasks"]
    if task in results["samples"]:
        samples = results["samples"][task]
        return [s[metric] for s in samples if s["filter"] == filtered and metric in s]
    inner = subtasks.get(task, ())
    return [value for each in inner for value in _questions(results, each, metric, filtered)]


def _if_mean(questions: Sequence[Any], value: float) -> list[float] | None:
    """Return the questions' values if `value` is their mean."""
    if not questions or not all(isinstance(each, Real | np.bool_) for each in questions):
        return None
    values = [float(each) for each in questions]
    return values if math.isclose(math.fsum(values) / len(values), value, abs_tol=1e-9) else None
