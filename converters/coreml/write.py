"""A model folder into a Core ML package."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from coremltools.converters.mil.mil import Program

from afm_mlx.checkpoint.stored_layers import check_folder_tensors, quantization_of
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import PROMPT_LENGTHS
from afm_mlx.converters.coreml.channel_layout import ChannelLayout
from afm_mlx.converters.coreml.compression import MatrixConstants
from afm_mlx.converters.coreml.constants import Constants
from afm_mlx.converters.coreml.functions import add_functions
from afm_mlx.converters.coreml.linear_layout import LinearLayout
from afm_mlx.converters.coreml.low_rank import AdapterConstants
from afm_mlx.converters.coreml.package import write_program
from afm_mlx.converters.coreml.source import Source
from afm_mlx.converters.mlx_lm import read_config, stored_parameters
from afm_mlx.errors import AFMError
from afm_mlx.progress import Progress


def write_package(
    source: Path,
    folder: Path,
    *,
    dtype: str = "float16",
    neural_engine: bool = False,
    lengths: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a model folder, and the adapters inside it, as a Core ML package.

    Args:
        source: a model folder of an AFM model, float or packed.
        folder: an empty folder whose name ends with `.mlpackage`; it becomes the package.
        dtype: "float16" or "float32", the type that the package computes in.
        neural_engine: arrange operators as the Neural Engine asks.
        lengths: numbers of tokens that `prefill` takes, each at most the context's; None for those of
            `PROMPT_LENGTHS` that are, or the context's.
        progress: called with bytes written and bytes in all.

    Raises:
        AFMError: when the folder is damaged, holds what Core ML has no operation for, or has a shorter
            context than one of the lengths.
    """
    tensors, path = stored_tensors(source), source / "config.json"
    config = read_config(source, tensors)
    quantization = quantization_of(read_config_json(path), path)
    rules = check_folder_tensors(config, quantization, tensors, path)
    model = Source(config, stored_parameters(config, tensors, rules, quantization), source)
    lengths = _lengths(lengths, config.context_length)
    number = np.dtype(dtype)
    constants = Constants()
    matrices = MatrixConstants(constants, number, neural_engine)
    adapters = [
        AdapterConstants(path.parent, model, number)
        for path in sorted(source.glob("adapters/*/adapter_config.json"))
    ]
    kind = ChannelLayout if neural_engine else LinearLayout
    program = Program()
    for adapter in (None, *adapters):
        prefill, decode = (kind(model, constants, matrices, number, adapter) for _ in range(2))
        suffix = "" if adapter is None else f"_{adapter.name}"
        add_functions(program, prefill, decode, lengths, suffix)
    program.default_function_name = "decode"
    program.export_as_multifunction = True
    metadata = {
        "description": "AFM text model by afm-mlx: prefill and decode with a shared cache of keys and values",
        "afm_config": json.dumps(config.to_dict()),
        "arrangement": "neural_engine" if neural_engine else "linear",
        "prompt_lengths": json.dumps(lengths),
        "adapters": json.dumps([adapter.name for adapter in adapters]),
    }
    write_program(program, constants, folder, metadata, progress)


def _lengths(asked: Sequence[int] | None, context: int) -> list[int]:
    """The lengths that are asked for, ascending."""
    if asked is None:
        return [length for length in PROMPT_LENGTHS if length <= context] or [context]
    if max(asked) > context:
        raise AFMError(
            f"--prompt-lengths has {max(asked)}; the model's context is {context} tokens, which is the most."
        )
    return sorted(set(asked))
