"""Models of other architectures, which mlx-lm converts.

`afm-mlx convert` takes the place of `mlx_lm.convert` for whoever types it, and mlx-lm is installed anyway.
Its own formats are written by it; balanced and palette weights, which it does not have, by this package.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from afm_mlx.config import read_config_json
from afm_mlx.converters.mixed_bits import calibration_file, choose_mix
from afm_mlx.converters.quantize import MLX_LM_RECIPES
from afm_mlx.converters.wishes import Wishes
from afm_mlx.errors import AFMError, named, shown
from afm_mlx.quantization import dequantize_model, quantize_model
from afm_mlx.stored_layers import quantization_of
from afm_mlx.weights import Progress
from afm_mlx.zoo import has_packed_layers, load_zoo_model

_MLX_LM_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")


def write_zoo(
    source: Path,
    folder: Path,
    kind: str,
    wishes: Wishes,
    measuring: Progress | None = None,
) -> None:
    """Convert a model of architecture `kind` into an empty folder.

    Args:
        source, folder: where from and where to.
        kind: of config.json.
        wishes: type, and how to quantize.
        measuring: see `convert`.

    Raises:
        AFMError: when neither mlx-lm nor this package can.
    """
    inner = folder / "converted"
    packed = has_packed_layers(quantization_of(read_config_json(source / "config.json"), source))
    ours = wishes.quantize and not _is_mlx_lms(wishes)
    try:
        # mlx-lm reports on stdout, which belongs to the caller.
        with contextlib.redirect_stdout(sys.stderr):
            if packed or ours:
                _write_packed(source, inner, wishes, packed, measuring)
            else:
                _write_by_mlx_lm(source, inner, wishes)
    except AFMError:
        raise
    except Exception as error:  # whatever a damaged folder makes mlx-lm raise
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # the disk's: `convert` says what it lacks
        reason = named(" ".join(str(error).split()) or type(error).__name__)
        raise AFMError(
            f"{source} is a model of the architecture {shown(kind)}, which mlx-lm can't convert: {reason}"
        ) from error
    for path in list(inner.iterdir()):
        shutil.move(path, folder / path.name)
    inner.rmdir()


def _is_mlx_lms(wishes: Wishes) -> bool:
    """Whether mlx-lm has the format and the choice of layers that are asked for."""
    return (
        (wishes.q_mode or "affine") in _MLX_LM_MODES
        and wishes.q_granularity in (None, "group")
        and wishes.q_embedding_bits is None
        and wishes.q_embedding_mode is None
        and wishes.q_embedding_granularity is None
        and wishes.target_bpw is None
    )


def _write_by_mlx_lm(source: Path, inner: Path, wishes: Wishes) -> None:
    from mlx_lm.convert import convert

    if isinstance(wishes.quant_predicate, str) and wishes.quant_predicate not in MLX_LM_RECIPES:
        raise AFMError(
            f"The recipe {shown(wishes.quant_predicate)} is for AFM models; others take "
            f"{', '.join(MLX_LM_RECIPES)}."
        )
    options: dict[str, Any] = {}
    if wishes.quantize:
        group = wishes.q_group_size
        if isinstance(wishes.quant_predicate, str):
            group = group or 64  # mlx-lm's recipes have no default
        options = {
            "quantize": True,
            "q_bits": wishes.q_bits,
            "q_group_size": group,
            "q_mode": wishes.q_mode or "affine",
            "quant_predicate": wishes.quant_predicate,
        }
    convert(str(source), str(inner), dtype=wishes.dtype, dequantize=wishes.dequantize, **options)


def _write_packed(
    source: Path,
    inner: Path,
    wishes: Wishes,
    packed: bool,
    measuring: Progress | None,
) -> None:
    from mlx_lm import utils

    if packed and not wishes.dequantize:
        raise AFMError(
            f"{source} is packed already, in a format that is only loaded here. Dequantize it (-d), or convert "
            "the model that it was made of."
        )
    if isinstance(wishes.quant_predicate, str) and wishes.target_bpw is None:
        raise AFMError(
            f"The recipe {shown(wishes.quant_predicate)} is affine in mlx-lm; leave --q-mode, --q-granularity "
            "and --q-embedding-bits out."
        )
    model, config = load_zoo_model(source)
    if wishes.mlx_dtype is not None:
        _cast(model, wishes.mlx_dtype)
    config = {k: v for k, v in config.items() if not k.startswith("quantization")}
    tokenizer = utils.load_tokenizer(source, eos_token_ids=config.get("eos_token_id"))
    mix = None
    if wishes.target_bpw is not None:
        data = calibration_file(wishes, source)
        mix = choose_mix(
            model, tokenizer, wishes, data, mode="affine", dtype=None, progress=measuring
        )
        wishes = mix.wishes
    if wishes.dequantize:
        dequantize_model(model, wishes.mlx_dtype or mx.float32)
    else:
        assert not isinstance(wishes.quant_predicate, str)
        rule = wishes.rule("affine")
        embedding = wishes.embedding_rule(rule)
        _, config = quantize_model(model, config, rule, embedding, wishes.quant_predicate)
    utils.save(inner, source, model, tokenizer, config)
    if mix is not None:
        mix.write(inner)


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give all floating parameters a type."""

    def cast(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(cast, model.parameters()))
