"""Exact match of every adapter on every task, and the tables that show it.

Each adapter, and the model without one, answers the held-out chats of all three new tasks and of the seven that
the model knew before: what it learned, and what it forgot. Besides, each continues chats in which other
adapters answered before it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import afm_mlx  # isort: skip

from inbox import TASKS

from afm_mlx.adapters.adapter_folder import TENSORS_NAME
from afm_mlx.cli.output import progress_bar
from afm_mlx.files import atomic_write
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import evaluate, load_examples

NO_ADAPTER = "no adapter"
SWITCHING = "in a switching chat"
_MODEL = "afm-nano"

Figures = dict[str, dict[str, float]]


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Write a JSONL file, whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(
            "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
        )


def accuracies(test_set: Path, adapter: Path | None, label: str) -> dict[str, float]:
    """Return the share of right greedy answers of each task in a test set, by the embedded model."""
    model, tokenizer = afm_mlx.load(_MODEL, adapter_path=None if adapter is None else str(adapter))
    with progress_bar(label, "example") as progress:
        scores = evaluate(model, tokenizer, load_examples(test_set), progress=progress).tasks
    return {task: score.accuracy for task, score in scores.items()}


def measure(out: Path, adapters: Mapping[str, Path]) -> Figures:
    """Measure the model without an adapter, and with each (by its task); what is known of the same files is
    kept.

    `out` has evaluation.jsonl, and switching-<task>.jsonl of each task, and gets report.json. Returns the
    accuracy of each task, new and old, by adapter, including `NO_ADAPTER`; and each adapter's on its own task
    under `SWITCHING`.
    """
    report = out / "report.json"
    known = json.loads(report.read_text()) if report.is_file() else {}
    old = resolve_model(_MODEL) / "evaluation.jsonl"
    found = {}
    for name, folder in {NO_ADAPTER: None, **adapters}.items():
        sets = [out / "evaluation.jsonl", old]
        if folder is not None:
            sets.append(out / f"switching-{name}.jsonl")
        key = _hash([*sets, *([folder / TENSORS_NAME] if folder else [])])
        if known.get(name, {}).get("key") != key:
            figures = [accuracies(path, folder, f"{name}: {path.stem}") for path in sets]
            own = {SWITCHING: figures[2][name]} if folder is not None else {}
            known[name] = {"key": key, "accuracy": figures[0] | figures[1] | own}
            with atomic_write(report) as temporary:
                temporary.write_text(json.dumps(known, indent=2) + "\n")
        found[name] = known[name]["accuracy"]
    return found


def _hash(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def markdown(figures: Figures) -> str:
    """Return the table: a row for every task, the old ones last, and a column for every adapter."""
    tasks = [*TASKS, *(task for task in figures[NO_ADAPTER] if task not in TASKS)]
    lines = [_line(["task", *(_code(name) for name in figures)])]
    lines.append(_line(["---", *["---:"] * len(figures)]))
    for task in tasks:
        lines.append(_line([f"`{task}`", *(_percent(f.get(task)) for f in figures.values())]))
    if len(figures) > 1:
        own = [_percent(each.get(SWITCHING)) for each in figures.values()]
        lines.append(_line([f"its own task {SWITCHING}", *own]))
    return "\n".join(lines) + "\n"


def _code(name: str) -> str:
    return name if name == NO_ADAPTER else f"`{name}`"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
