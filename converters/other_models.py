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

from afm_mlx.checkpoint.stored_layers import quantization_of, stored_settings
from afm_mlx.checkpoint.weights import Progress
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import Wishes
from afm_mlx.converters.mixed_bits import calibration_file, check_stock, choose_mix
from afm_mlx.converters.mlx_lm import QUANTIZATION_KEYS, check_wishes
from afm_mlx.converters.quantize import MLX_LM_RECIPES, as_stock, stock_rule
from afm_mlx.errors import AFMError, named, shown
from afm_mlx.loading.mlx_lm_models import has_packed_layers, load_zoo_model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize import (
    dequantize_model,
    quantization_entries,
    quantize_model,
    replace_modules,
)
from afm_mlx.quantization.rule import QuantizationRule, rule_of

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

    if packed:
        check_wishes(source, True, wishes.mlx_dtype, wishes.quantize, wishes.dequantize)
    if isinstance(wishes.quant_predicate, str) and wishes.target_bpw is None:
        raise AFMError(
            f"The recipe {shown(wishes.quant_predicate)} is affine in mlx-lm; leave --q-mode, --q-granularity "
            "and --q-embedding-bits out."
        )
    if wishes.target_bpw is not None and wishes.stock:
        check_stock(wishes, "affine")
    model, config = load_zoo_model(source)
    if wishes.mlx_dtype is not None:
        _cast(model, wishes.mlx_dtype)
    quantization = quantization_of(config, source / "config.json")
    config = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
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
    elif wishes.quantize:
        assert not isinstance(wishes.quant_predicate, str)
        rule = wishes.rule("affine")
        embedding = wishes.embedding_rule(rule)
        _, config = quantize_model(model, config, rule, embedding, wishes.quant_predicate)
    else:
        config |= dict.fromkeys(QUANTIZATION_KEYS, quantization)
    if wishes.stock and not wishes.dequantize:
        config |= dict.fromkeys(
            QUANTIZATION_KEYS, _to_stock_layers(model, quantization_of(config, source))
        )
    utils.save(inner, source, model, tokenizer, config)
    if mix is not None:
        mix.write(inner)


def _to_stock_layers(model: nn.Module, quantization: dict[str, Any]) -> dict[str, Any]:
    """Give packed layers the format of MLX's own that holds the same numbers.

    Returns:
        `quantization` of config.json; MLX's own layers in the model keep their settings.

    Raises:
        AFMError: names the layer that MLX has no format for.
    """
    rules: dict[str, QuantizationRule] = {}
    others: dict[str, Any] = {}
    layers: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding):
            packed, rule = module.packed, rule_of(module.packed)
            rules[path] = stock_rule(rule, (packed.out_dims, packed.in_dims), path)
            own = as_stock(packed, rules[path])
            assert own.scales is not None
            if isinstance(module, PackedEmbedding):
                layers.append((path, PackedEmbedding(own, own.scales.dtype)))
            else:
                layers.append((path, PackedLinear(own, module.get("bias"))))
        elif isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            others[path] = {"mode": "affine", **stored_settings(quantization, path)}
    replace_modules(model, layers)
    return quantization_entries(rules) | others


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Give all floating parameters a type."""

    def cast(array: mx.array) -> mx.array:
        return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array

    model.update(tree_map(cast, model.parameters()))
