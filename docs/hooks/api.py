"""The Python reference: the public names of each room that programs import, from their docstrings."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "build" / "site-package" / "afm_mlx"
MAPPED = ("adapters", "converters", "kernels")
"""Rooms next to `afm_mlx/` in the repository that an install puts into it."""

ROOMS: dict[str, list[str]] = {
    "afm_mlx": [],
    "fm": [],
    "engine": [
        "speculation.drafting.Speculation",
        "speculation.drafting.Drafter",
        "prefix_cache.PrefixCache",
    ],
    "guidance": [
        "constraint.Constraint",
        "types.answer_type",
        "types.AnswerType",
        "tool_calls.tool_call_constraint",
        "call_forms.call_form",
        "answer_parts.read_answer",
    ],
    "loading": [
        "load.load",
        "load.load_draft",
        "resolve.model_draft",
        "load.load_drafts",
    ],
    "coreml": [],
    "coreai": [],
    "quantization": [],
    "adapters": [
        "pool.AdapterPool",
        "lora.add_lora",
        "lora.save_lora",
        "active.attach_adapter",
        "active.detach_adapter",
        "compose.compose",
        "formats.read_adapter",
        "formats.write_adapter",
        "formats.detect_format",
    ],
    "training": [],
    "measure": [
        "benchmark.Bench",
        "benchmark.BenchmarkCase",
        "benchmark.BenchmarkResult",
        "evaluation.evaluate",
        "evaluation.load_examples",
        "evaluation.Evaluation",
        "continuations.score_continuations",
        "perplexity.measure_perplexity",
        "perplexity.Perplexity",
        "kernel_report.examine",
        "coreml_report.examine_coreml",
    ],
    "converters": [
        "convert.convert",
        "adapter_conversion.convert_adapter",
        "adapter_conversion.verify_adapter",
    ],
    "errors": [],
}
"""What is shown of each room, besides the names in its `__all__`."""


@event_priority(100)  # before mkdocstrings, which leaves out folders that are not there
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay the package out as it is installed: docstrings are found by folders, not by Python's finders."""
    shutil.rmtree(PACKAGE.parent, ignore_errors=True)
    for source, target in ((ROOT / "afm_mlx", PACKAGE), *((ROOT / n, PACKAGE / n) for n in MAPPED)):
        shutil.copytree(source, target, ignore=_no_python)
    return config


def _no_python(folder: str, names: list[str]) -> list[str]:
    paths = {name: Path(folder, name) for name in names}
    return [
        n for n, p in paths.items() if n == "__pycache__" or not (p.is_dir() or p.suffix == ".py")
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for room in ROOMS:
        files.append(File.generated(config, f"api/{room}.md", content=_page(room)))
    return files


def _page(room: str) -> str:
    module = "afm_mlx" if room == "afm_mlx" else f"afm_mlx.{room}"
    text = [f"# {module}", ""]
    for name in names_of(room):
        text += [f"::: {name}", ""]
    return "\n".join(text)


def names_of(room: str) -> list[str]:
    """The full names that a room's page shows, in its order."""
    module = "afm_mlx" if room == "afm_mlx" else f"afm_mlx.{room}"
    imported = import_module(module)
    public = getattr(imported, "__all__", None)
    if room == "errors":
        classes = ((n, v) for n, v in vars(imported).items() if isinstance(v, type))
        public = [n for n, v in classes if v.__module__ == module]
    names = [name for name in public or () if not name.startswith("__")]
    return [f"{module}.{name}" for name in (*names, *ROOMS[room])]
