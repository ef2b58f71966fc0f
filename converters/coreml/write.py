"""A planned Core ML package into files."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coremltools.converters.mil.mil import Block, Builder, Program

from afm_mlx.converters.coreml.channel_layout import ChannelLayout
from afm_mlx.converters.coreml.compression import MatrixConstants
from afm_mlx.converters.coreml.constants import Constants
from afm_mlx.converters.coreml.functions import add_functions
from afm_mlx.converters.coreml.linear_layout import LinearLayout
from afm_mlx.converters.coreml.package import write_program
from afm_mlx.converters.coreml.plan import PackagePlan
from afm_mlx.progress import Progress


def write_package(plan: PackagePlan, folder: Path, progress: Progress | None = None) -> None:
    """Write a model and its adapters as a Core ML package.

    Args:
        plan: what the package is made of.
        folder: an empty folder whose name ends with `.mlpackage`; it becomes the package.
        progress: called with bytes written and bytes in all.

    Raises:
        AFMError: when weights can't be read, or hold numbers that the package's type can't hold.
    """
    with _own_names():
        _write(plan, folder, progress)


@contextmanager
def _own_names() -> Iterator[None]:
    """Count names from 0: coremltools goes on from the last program of the process."""
    before = Builder.name_count, Block.counter
    Builder.name_count, Block.counter = defaultdict(int), 0
    try:
        yield
    finally:
        Builder.name_count, Block.counter = before


def _write(plan: PackagePlan, folder: Path, progress: Progress | None) -> None:
    constants = Constants()
    matrices = MatrixConstants(constants, plan.dtype)
    kind = ChannelLayout if plan.neural_engine else LinearLayout
    program = Program()
    for adapter in (None, *plan.adapters):
        prefill, decode = (
            kind(plan.source, constants, matrices, plan.dtype, adapter) for _ in range(2)
        )
        suffix = "" if adapter is None else f"_{adapter.name}"
        add_functions(program, prefill, decode, plan.lengths, suffix)
    program.default_function_name = "decode"
    program.export_as_multifunction = True
    metadata = {
        "description": "AFM text model by afm-mlx: prefill and decode with a shared cache of keys and values",
        "afm_config": json.dumps(plan.source.config.to_dict()),
        "arrangement": "neural_engine" if plan.neural_engine else "linear",
        "prompt_lengths": json.dumps(plan.lengths),
        "adapters": json.dumps([adapter.name for adapter in plan.adapters]),
    }
    write_program(program, constants, folder, metadata, progress)
