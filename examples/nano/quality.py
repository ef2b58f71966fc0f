"""Measure the variants of the model, and write what came out: `quality.json`, `quality.md`, `quality.png`.

Of each variant: exact match on the held-out chats of every task, perplexity of the held-out docstrings, and
what it takes. Measurements are kept under the hash of the files that they depend on, so a second report
measures only what changed.

SentencePiece puts a dummy prefix in front of a text. The float model never saw it, for its training left it
out; a model that the commands trained did. So perplexity here leaves out the first token of each text, where
such a model would gain 8 % by predicting nothing but the prefix. `perplexity_of_all` is what `afm-mlx
perplexity` prints.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import afm_mlx  # isort: skip

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import variants
from variants import VARIANTS, Variant

from afm_mlx.adapters.adapter_folder import TENSORS_NAME
from afm_mlx.checkpoint.safetensors_file import read_header
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.cli.output import progress_bar
from afm_mlx.config import ModelConfig, parameter_shapes, read_config_json
from afm_mlx.files import atomic_write
from afm_mlx.measure.evaluation import evaluate, load_examples
from afm_mlx.measure.perplexity import cut, load_documents, token_losses
from afm_mlx.tokenizer.protocol import Tokenizer

# One answer of the fifty of a task is two points.
GOAL_POINTS, GOAL_PERPLEXITY = 2.0, 1.05
_DATA = ("evaluation.jsonl", "heldout.jsonl")

Row = dict[str, Any]


def report(source: Path, limit: int | None = None) -> int:
    """Measure what is there and write the three files into `source/report`; return 0.

    With a limit, only the first held-out chats of each task count, for a quick look into
    `source/report-<limit>`.
    """
    out = source / ("report" if limit is None else f"report-{limit}")
    out.mkdir(exist_ok=True)
    path = out / "quality.json"
    known = json.loads(path.read_text())["variants"] if path.is_file() else []
    rows: list[Row] = []
    for variant in VARIANTS:
        if not variants.is_made(variant, source):
            print(f"{variant.label}: not made yet", flush=True)
            continue
        rows.append(_row(variant, source, known, limit))
        print(summary(rows[-1]), flush=True)
        # After each, so that an interrupt loses none; figures of the last report stay until they are replaced.
        later = [row for row in known if row["name"] not in {r["name"] for r in rows}]
        content = {"machine": _machine(), "chats_per_task": limit, "variants": [*rows, *later]}
        _write(path, json.dumps(content, indent=2) + "\n")
    if not rows:
        print(f"{source / 'models'} holds no variant; quantize.py ptq makes the first.")
        return 0
    _write(path, json.dumps({**content, "variants": rows}, indent=2) + "\n")
    _write(out / "quality.md", markdown(rows))
    from quality_plot import plot

    with atomic_write(out / "quality.png") as temporary:
        plot(rows, temporary)
    print(f"\n{markdown(rows)}")
    return 0


def _row(variant: Variant, source: Path, known: Iterable[Row], limit: int | None) -> Row:
    """Return a variant's figures, from the last report if no file has changed since."""
    facts = {key: getattr(variant, key) for key in ("name", "label", "stage", "base")}
    facts["command"] = f"afm-mlx {variant.command}"
    model, adapter = places(variant, source)
    key = content_key(model, adapter, source, limit)
    for row in known:
        if row["key"] == key:
            return row | facts
    figures = measure(model, adapter, source, limit)
    return {**facts, "key": key, **describe(model, adapter), **figures}


def places(variant: Variant, source: Path) -> tuple[Path, Path | None]:
    """Return the folders of a variant's model and of its adapter."""
    own = variants.folder(variant.name, source)
    return (variants.folder(variant.base, source), own) if variant.base else (own, None)


def content_key(model: Path, adapter: Path | None, data: Path, limit: int | None = None) -> str:
    """Return a hash of what the figures depend on: weights, configs, and the test data in `data`."""
    files = [data / name for name in _DATA]
    for folder in (model, adapter):
        if folder is not None:
            files += sorted(folder.glob("*.safetensors"))
            files += sorted(folder.glob("*config.json"))
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return hashlib.sha256(json.dumps([*hashes, limit]).encode()).hexdigest()


# -- figures


def describe(model: Path, adapter: Path | None) -> Row:
    """Return a model folder's bytes, and the bits per weight of its embedding and of its linear layers."""
    config = ModelConfig.from_dict(read_config_json(model / "config.json"), source=str(model))
    weights = {"embedding": 0, "linear": 0, "other": 0}
    nbytes = dict(weights)
    for name, shape in parameter_shapes(config).items():
        weights[_group(name.rpartition(".")[0])] += math.prod(shape)
    for name, tensor in stored_tensors(model).items():
        nbytes[_group(name.rpartition(".")[0])] += tensor.nbytes
    extra = read_header(adapter / TENSORS_NAME).values() if adapter else ()
    adapter_bytes = sum(tensor.nbytes for tensor in extra)
    total = sum(nbytes.values())
    return {
        "weight_bytes": total,
        "adapter_bytes": adapter_bytes,
        "bits_per_weight": 8 * (total + adapter_bytes) / config.num_parameters,
        "linear_bits": 8 * nbytes["linear"] / weights["linear"],
        "embedding_bits": 8 * nbytes["embedding"] / weights["embedding"],
    }


def _group(path: str) -> str:
    last = path.rpartition(".")[2]
    return "embedding" if last == "embedding" else "linear" if last.endswith("_proj") else "other"


def measure(model_folder: Path, adapter: Path | None, data: Path, limit: int | None = None) -> Row:
    """Measure exact match per task, and perplexity of the held-out docstrings."""
    model, tokenizer = afm_mlx.load(
        model_folder, adapter_path=None if adapter is None else str(adapter)
    )
    examples = load_examples(data / "evaluation.jsonl", limit)
    with progress_bar("answering", "example") as progress:
        evaluation = evaluate(model, tokenizer, examples, progress=progress)
    tasks = {task: score.accuracy for task, score in evaluation.tasks.items()}
    documents = load_documents(data / "heldout.jsonl", tokenizer)
    return {
        "tasks": tasks,
        "mean": sum(tasks.values()) / len(tasks),
        **_perplexities(model, tokenizer, documents),
    }


def _perplexities(model: nn.Module, tokenizer: Tokenizer, documents: list[list[int]]) -> Row:
    pieces: list[list[int]] = []
    scored: list[bool] = []
    for document in documents:
        own = cut([document])
        pieces += own
        count = sum(len(piece) - 1 for piece in own)
        scored += [i > 0 for i in range(count)]
    with progress_bar("perplexity", "sample") as progress:
        losses = token_losses(model, tokenizer, pieces, progress=progress).astype(np.float64)
    return {
        "perplexity": math.exp(losses[np.array(scored)].mean()),
        "perplexity_of_all": math.exp(losses.mean()),
        "tokens": sum(scored),
    }


# -- tables


def summary(row: Row) -> str:
    """Return one line about a variant, for the terminal."""
    return f"{row['label']}: {row['mean']:.1%} right, perplexity {row['perplexity']:.1f}, {_megabytes(row)} MB"


def markdown(rows: list[Row]) -> str:
    """Return the table, and how far each variant is from float."""
    names = list(rows[0]["tasks"])
    header = ["", "MB", "bits: linear", "embedding", *(f"`{name}`" for name in names)]
    header += ["mean", "worst against float", "perplexity", "against float"]
    lines = [_line(header), _line(["---", *["---:"] * (len(header) - 1)])]
    reference = next((row for row in rows if row["name"] == "float"), None)
    for row in rows:
        cells = [row["label"], _megabytes(row)]
        cells += [f"{row[key]:.2f}" for key in ("linear_bits", "embedding_bits")]
        cells += [f"{row['tasks'][name]:.0%}" for name in names]
        cells.append(f"{row['mean']:.1%}")
        worst, ratio = "", ""
        if reference is not None and row is not reference:
            points, factor = distance(row, reference)
            worst = f"{points:+.0f} points"
            ratio = f"{factor - 1:+.1%}" if factor < 2 else f"{factor:,.0f} times"
        lines.append(_line([*cells, worst, _perplexity(row), ratio]))
    return "\n".join([*lines, "", *_verdict(rows, reference)]) + "\n"


def _verdict(rows: list[Row], reference: Row | None) -> list[str]:
    if reference is None:
        return []
    names = [r["label"] for r in rows if r is not reference and reaches_goal(r, reference)]
    return [
        f"Within {GOAL_POINTS:.0f} points of float on every task, and {GOAL_PERPLEXITY - 1:.0%} in perplexity: "
        f"{'; '.join(names) or 'none'}."
    ]


def distance(row: Row, reference: Row) -> tuple[float, float]:
    """Return the worst change of a task, in points (below 0 for a loss), and the ratio of perplexities."""
    worst = min(100 * (row["tasks"][task] - right) for task, right in reference["tasks"].items())
    return worst, row["perplexity"] / reference["perplexity"]


def reaches_goal(row: Row, reference: Row) -> bool:
    """True if every task is within two points of float, and perplexity within 5 %."""
    worst, ratio = distance(row, reference)
    return worst >= -GOAL_POINTS - 1e-9 and ratio <= GOAL_PERPLEXITY


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _megabytes(row: Row) -> str:
    text = f"{row['weight_bytes'] / 1e6:.2f}"
    return f"{text} + {row['adapter_bytes'] / 1e6:.2f}" if row["adapter_bytes"] else text


def _perplexity(row: Row) -> str:
    return f"{row['perplexity']:.1f}" if row["perplexity"] < 1000 else f"{row['perplexity']:,.0f}"


def _machine() -> Row:
    versions = {name: version(name) for name in ("afm-mlx", "mlx", "numpy")}
    device = mx.default_device().type.name
    return {"python": platform.python_version(), "system": platform.machine(), "device": device} | {
        "versions": versions
    }


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text(text)
