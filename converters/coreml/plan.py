"""What a Core ML package is made of, and refusals that don't need coremltools, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx.checkpoint.stored_layers import check_folder_tensors, quantization_of
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import prompt_lengths
from afm_mlx.converters.coreml.low_rank import AdapterConstants
from afm_mlx.converters.coreml.source import Source
from afm_mlx.converters.mlx_lm import read_config, stored_parameters
from afm_mlx.errors import AFMError, named
from afm_mlx.quantization.rule import QuantizationRule


@dataclass(frozen=True)
class PackagePlan:
    """A model folder that can become a Core ML package, and how.

    Args:
        source: the model's parameters.
        adapters: the folder's adapters.
        dtype: float16 or float32, the type that the package computes in.
        neural_engine: True for operators in the Neural Engine's arrangement.
        lengths: numbers of tokens that `prefill` takes, ascending, each at most the context's.
    """

    source: Source
    adapters: tuple[AdapterConstants, ...]
    dtype: np.dtype[Any]
    neural_engine: bool
    lengths: tuple[int, ...]


def plan_package(
    folder: Path,
    *,
    dtype: str = "float16",
    neural_engine: bool = False,
    lengths: Sequence[int] | None = None,
) -> PackagePlan:
    """Check a model folder and the adapters inside it against what a Core ML package can hold.

    Args:
        folder: a model folder of an AFM model, float or packed.
        dtype: "float16" or "float32", the type that the package computes in.
        neural_engine: arrange operators as the Neural Engine asks.
        lengths: numbers of tokens that `prefill` takes; None for the default of `prompt_lengths`.

    Raises:
        AFMError: when the folder is damaged, holds what Core ML has no operation for, or has a shorter
            context than one of the lengths.
    """
    tensors, path = stored_tensors(folder), folder / "config.json"
    config = read_config(folder, tensors)
    quantization = quantization_of(read_config_json(path), path)
    rules = check_folder_tensors(config, quantization, tensors, path)
    parameters = stored_parameters(config, tensors, rules, quantization)
    source, number = Source(config, parameters, folder), np.dtype(dtype)
    if neural_engine:
        for name, rule in rules.items():
            if rule is not None:  # MLX's own formats are refused by `Source`
                _refuse_scales_behind_tables(name, rule)
    adapters = tuple(
        AdapterConstants(file.parent, source, number)
        for file in sorted(folder.glob("adapters/*/adapter_config.json"))
    )
    chosen = prompt_lengths(lengths, config.context_length, neural_engine)
    return PackagePlan(source, adapters, number, neural_engine, chosen)


def _refuse_scales_behind_tables(path: str, rule: QuantizationRule) -> None:
    """Raise `AFMError` for 2-bit codes whose scales can be neither in the table nor behind the product."""
    by_row = rule.granularity == "row" and rule.mode == "affine"
    if rule.bits == 2 and rule.mode != "palette" and (by_row or rule.granularity == "group"):
        raise AFMError(
            f"{named(path)} is packed to 2 bits with a scale per group or affine rows, in a form "
            "that the Neural Engine can't load. Pack the float model as balanced rows, which is the "
            "default (-q). A package that is not for the Neural Engine can hold this form."
        )
