"""A draft model as the two files that an `.fmadapter` package may hold: a program as text, and its weights.

The program is that of a Core ML package of the model, with the functions that `functions.py` describes. It is
arranged for the Neural Engine, and `prefill` takes one length only: how a choice of lengths is written as text
is not known.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

from coremltools.proto import Model_pb2

from afm_mlx.adapters.formats.fmadapter import DRAFT_NAMES
from afm_mlx.config import ModelConfig
from afm_mlx.converters.coreml.mil_text import program_text
from afm_mlx.converters.coreml.plan import plan_package
from afm_mlx.converters.coreml.write import write_package
from afm_mlx.progress import Progress

PREFILL_LENGTH = 64
"""Tokens that `prefill` of a draft takes, unless its context is shorter."""


def write_draft(source: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write a draft model's `draft.mil` and `draft_weights.bin`.

    Args:
        source: a model folder of an AFM model, float or packed.
        folder: an empty folder, which takes the two files.
        progress: called with bytes written and bytes in all.

    Raises:
        AFMError: see `plan_package` and `write_package`.
    """
    text_name, weights_name = DRAFT_NAMES
    length = min(PREFILL_LENGTH, ModelConfig.from_file(source / "config.json").context_length)
    spec = Model_pb2.Model()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        package = Path(place, "draft.mlpackage")
        package.mkdir()
        write_package(plan_package(source, neural_engine=True, lengths=[length]), package, progress)
        spec.ParseFromString(next(package.glob("Data/*/*.mlmodel")).read_bytes())
        os.replace(next(package.glob("Data/*/weights/weight.bin")), folder / weights_name)
    versions = {name: importlib.metadata.version(name) for name in ("afm-mlx", "coremltools")}
    text = program_text(
        spec.mlProgram,
        build_info={f"{name}-version": version for name, version in versions.items()},
        weights=lambda path: f"@model_path/{weights_name}",
    )
    (folder / text_name).write_text(text, encoding="utf-8")
