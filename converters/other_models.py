"""Models of other architectures: mlx-lm writes its own formats, this package balanced and palette weights."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files
from afm_mlx.checkpoint.stored_layers import quantization_of, stored_settings
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.folder_writer import mlx_rule, to_mlx_format
from afm_mlx.converters.mixed_bits import calibration_file, check_mlx_format, choose_mix
from afm_mlx.errors import AFMError, named, shown
from afm_mlx.installation import package_problem
from afm_mlx.loading.mlx_lm_models import (
    has_packed_layers,
    load_mlx_lm_model,
    register_models,
)
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    packed_layer_for,
    stacked,
)
from afm_mlx.quantization.quantize_model import (
    dequantize_model,
    quantization_entries,
    quantize_model,
    replace_modules,
    with_quantization,
)
from afm_mlx.quantization.rule import QuantizationRule, rule_of
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL

_MLX_LM_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_MLX_LM_RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")


def write_other_model(
    source: Path,
    folder: Path,
    kind: str,
    options: ConversionOptions,
    measuring: Progress | None = None,
) -> None:
    """Convert a model of architecture `kind` (its `model_type`) into an empty folder; see `convert`.

    Raises:
        AFMError: if neither mlx-lm nor this package can convert it with these options.
    """
    inner = folder / "converted"
    packed = has_packed_layers(quantization_of(read_config_json(source / "config.json"), source))
    ours = options.quantize and not _is_mlx_lm_format(options)
    if options.q_vision_bits is not None:
        raise AFMError(f"--q-vision-bits is for AFM models, and {source} is a {shown(kind)}.")
    try:
        # mlx-lm reports on stdout, which belongs to the caller.
        with contextlib.redirect_stdout(sys.stderr):
            if packed or ours:
                _write_packed(source, inner, options, packed, measuring)
            else:
                _write_by_mlx_lm(source, inner, options)
    except AFMError:
        raise
    except ImportError as error:
        raise AFMError(package_problem(error) or str(error)) from error
    except Exception as error:  # a damaged folder may make mlx-lm raise anything
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise  # of the disk: `convert` handles it
        reason = named(" ".join(str(error).split()) or type(error).__name__)
        raise AFMError(
            f"{source} is a model of the architecture {shown(kind)}, which mlx-lm can't convert: {reason}"
        ) from error
    if kind == TRACK_MODEL:  # mlx-lm writes no SentencePiece model
        copy_tokenizer_files(source, inner)
    for path in list(inner.iterdir()):
        shutil.move(path, folder / path.name)
    inner.rmdir()


def _is_mlx_lm_format(options: ConversionOptions) -> bool:
    """True if mlx-lm has the requested format and choice of layers."""
    ours = ("q_embedding_bits", "q_embedding_mode", "q_embedding_granularity", "target_bpw")
    return (
        (options.q_mode or "affine") in _MLX_LM_MODES
        and options.q_granularity in (None, "group")
        and all(getattr(options, name) is None for name in ours)
    )


def _write_by_mlx_lm(source: Path, inner: Path, options: ConversionOptions) -> None:
    from mlx_lm.convert import convert

    register_models()
    if isinstance(options.quant_predicate, str) and options.quant_predicate not in _MLX_LM_RECIPES:
        raise AFMError(
            f"The recipe {shown(options.quant_predicate)} is for AFM models; others take "
            f"{', '.join(_MLX_LM_RECIPES)}."
        )
    group = options.q_group_size
    if isinstance(options.quant_predicate, str):
        group = group or 64  # mlx-lm's recipes have no default
    convert(
        str(source),
        str(inner),
        quantize=options.quantize,
        q_bits=options.q_bits,
        q_group_size=group,
        q_mode=options.q_mode or "affine",
        quant_predicate=options.quant_predicate,
        dtype=options.dtype,
        dequantize=options.dequantize,
    )


def _write_packed(
    source: Path, inner: Path, options: ConversionOptions, packed: bool, measuring: Progress | None
) -> None:
    from mlx_lm import utils

    if packed:
        options.check_source(source, quantized=True)
    if isinstance(options.quant_predicate, str) and options.target_bpw is None:
        raise AFMError(
            f"The recipe {shown(options.quant_predicate)} is affine in mlx-lm; leave --q-mode, --q-granularity "
            "and --q-embedding-bits out."
        )
    model, config = load_mlx_lm_model(source)
    if options.mlx_dtype is not None:
        model.set_dtype(options.mlx_dtype)
    quantization = quantization_of(config, source / "config.json")
    config = with_quantization(config, {})
    tokenizer = utils.load_tokenizer(source, eos_token_ids=config.get("eos_token_id"))
    mix = None
    if options.target_bpw is not None:
        if options.for_mlx_lm:
            check_mlx_format(options, "affine")
        data = calibration_file(options, source)
        mix = choose_mix(
            model, tokenizer, options, data, mode="affine", dtype=None, progress=measuring
        )
        options = mix.options
    if options.dequantize:
        dequantize_model(model, options.mlx_dtype or mx.float32)
    elif options.quantize:
        assert not isinstance(options.quant_predicate, str)
        rule = options.rule("affine")
        embedding = options.embedding_rule(rule)
        _, config = quantize_model(model, config, rule, embedding, options.quant_predicate)
    else:
        config = with_quantization(config, quantization)
    if options.for_mlx_lm and not options.dequantize:
        entries = _to_mlx_layers(model, quantization_of(config, source))
        config = with_quantization(config, entries)
    utils.save(inner, source, model, tokenizer, config)
    if mix is not None:
        mix.write(inner)


def _to_mlx_layers(model: nn.Module, quantization: dict[str, Any]) -> dict[str, Any]:
    """Convert packed layers to MLX's own format, with the same numbers; return the new `quantization`."""
    rules: dict[str, QuantizationRule] = {}
    others: dict[str, Any] = {}
    layers: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear | PackedEmbedding | PackedExperts):
            packed, rule = module.packed, rule_of(module.packed)
            rules[path] = mlx_rule(rule, (packed.out_dims, packed.in_dims), path)
            own = to_mlx_format(packed, rules[path])
            if isinstance(module, PackedExperts):
                own = stacked(own, module.experts)
            assert own.scales is not None
            layers.append((path, packed_layer_for(module, own, own.scales.dtype)))
        elif "scales" in module:  # in a format of MLX's own layers only
            others[path] = stored_settings(quantization, path)
    replace_modules(model, layers)
    return quantization_entries(rules) | others
