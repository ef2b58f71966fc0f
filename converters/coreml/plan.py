"""Check that a Core ML package can hold a model folder, without importing coremltools, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afm_mlx.converters.conversion_options import prompt_lengths
from afm_mlx.converters.graph_source import AdapterSource, Float, Source, adapter_sources
from afm_mlx.errors import AFMError, named


@dataclass(frozen=True)
class PackagePlan:
    """A model folder that can become a Core ML package, and how; see `plan_package`."""

    source: Source
    adapters: tuple[AdapterSource, ...]
    dtype: Float
    neural_engine: bool
    lengths: tuple[int, ...]


def plan_package(
    folder: Path,
    *,
    dtype: str = "float16",
    neural_engine: bool = False,
    lengths: Sequence[int] | None = None,
) -> PackagePlan:
    """Check that a Core ML package can hold a model folder, float or packed, and the adapters inside it.

    `lengths` are the numbers of tokens that `prefill` takes; pass None for the default of `prompt_lengths`.

    Raises:
        AFMError: if the folder is damaged, holds a format that Core ML has no operation for, or has a shorter
            context than one of the lengths.
    """
    source, kind = Source.read(folder), np.dtype(dtype)
    for name, rule in source.rules.items() if neural_engine else ():
        # Scales of 2-bit codes that can be neither in the table nor after the product; see `compression.py`.
        if rule.bits != 2 or rule.mode == "palette":
            continue
        if rule.granularity == "group" or (rule.granularity, rule.mode) == ("row", "affine"):
            raise AFMError(
                f"{named(name)} is packed to 2 bits with a scale per group or affine rows, in a form "
                "that the Neural Engine can't load. Pack the float model as balanced rows, which is the "
                "default (-q). A package that is not for the Neural Engine can hold this form."
            )
    adapters = adapter_sources(folder, source, kind)
    chosen = prompt_lengths(lengths, source.config.context_length, neural_engine)
    return PackagePlan(source, adapters, kind, neural_engine, chosen)
