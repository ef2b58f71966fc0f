"""Layers of two kinds of bits, chosen by what they suffer on text: `convert --target-bpw`.

The model is read into memory for that, once, and forgotten before its folder is written; nothing else in
`convert` needs it whole.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.mlx_lm import read_config
from afm_mlx.errors import AFMError, DataError
from afm_mlx.loading.load import load_model
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.measure.perplexity import cut, load_documents
from afm_mlx.progress import Progress
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.quantization.sensitivity import (
    LayerSensitivity,
    check_target,
    choose_bits,
    measure_sensitivity,
    plan_layers,
    stored_size,
)
from afm_mlx.tokenizer.tokenizer import load_tokenizer

REPORT = "sensitivity.json"
HELD_OUT = "heldout.jsonl"
TOKENS = 2048
_PIECE = 256


@dataclass(frozen=True)
class Mix:
    """Options that give each layer its bits, and why.

    Args:
        options: the options that were given, with a predicate in the place of the target.
        report: the content of `sensitivity.json`.
    """

    options: ConversionOptions
    report: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Put the table of sensitivities into a model folder."""
        text = json.dumps(self.report, indent=2)
        (folder / REPORT).write_text(text, encoding="utf-8")


def calibration_file(options: ConversionOptions, source: Path) -> Path:
    """Where the text comes from: what was given, or the model folder's own.

    Raises:
        DataError: when there is neither.
    """
    if options.data is not None:
        path = Path(options.data)
        if not path.exists():
            raise DataError(
                f"There is no file or folder {path}; data sets of the hub are not fetched."
            )
        # Texts that a model will be judged by are not those to choose its bits by.
        names = ("train.jsonl", "valid.jsonl")
        return next((path / name for name in names if (path / name).is_file()), path)
    path = (source if source.is_dir() else source.parent) / HELD_OUT
    if not path.is_file():
        raise DataError(
            f"--target-bpw measures layers on text, and {path.parent} has no {HELD_OUT}. Give --data: a .jsonl "
            "file, a .txt file, or a folder with train.jsonl; a few thousand words are enough."
        )
    return path


def mix_of_folder(
    source: Path, options: ConversionOptions, data: Path, progress: Progress | None
) -> Mix:
    """`choose_mix` for an AFM model folder.

    Args:
        source: a folder with float weights.
        options, data, progress: see `choose_mix`.
    """
    tensors = stored_tensors(source)
    config = read_config(source, tensors)
    values = read_config_json(source / "config.json")
    quantization = quantization_of(values, source / "config.json")
    options.check_source(source, bool(quantization))
    model = load_model(source, values | config.to_dict())
    warn_if_slow(model)
    dtype = options.mlx_dtype or tensors["model.output_norm.weight"].dtype
    tokenizer = load_tokenizer(source)
    return choose_mix(
        model, tokenizer, options, data, mode="balanced", dtype=dtype, progress=progress
    )


def choose_mix(
    model: nn.Module,
    tokenizer: Any,
    options: ConversionOptions,
    data: Path,
    *,
    mode: str,
    dtype: mx.Dtype | None,
    progress: Progress | None = None,
) -> Mix:
    """Measure a model's layers and choose the bits of each.

    Args:
        model: a model with float weights.
        tokenizer: the model's.
        options: options with a target (`target_bpw`).
        data: the file that `calibration_file` returns.
        mode: the default of `q_mode`.
        dtype: type of the folder's floats; as in the model when None.
        progress: called with passes done and passes in all.

    Raises:
        AFMError: when the text can't be used, a layer can't be packed, or the target can't be met.
    """
    assert options.target_bpw is not None
    high = options.rule(mode)
    low = dataclasses.replace(high, bits=options.bits_to_mix[0])
    embedding = options.embedding_rule(high)
    own = None if isinstance(options.quant_predicate, str) else options.quant_predicate
    rules, free = plan_layers(model, high, embedding, own)
    size = stored_size(model, rules, dtype)
    _, least = stored_size(model, rules | dict.fromkeys(free, low), dtype)
    check_target(options.target_bpw, size[0], least, size[1])  # before minutes of measuring
    pieces = calibration_pieces(data, tokenizer)
    layers = measure_sensitivity(
        model, pieces, low, high, progress, embedding_rule=embedding, predicate=own, dtype=dtype
    )
    chosen = choose_bits(layers, options.target_bpw, size)

    def predicate(path: str, module: nn.Module) -> Any:
        if path in chosen:
            return chosen[path]
        return True if own is None else own(path, module)

    report = {
        "target_bpw": options.target_bpw,
        "data": data.name,
        "tokens": sum(map(len, pieces)),
        "rise": "of KL(float || packed) in nats per token, when this layer alone goes to the low bits",
        "layers": [
            _entry(layer, chosen[layer.path])
            for layer in sorted(layers, key=lambda layer: (-layer.rise_per_byte, layer.path))
        ],
    }
    # The same options without a target; the predicate gives each layer the rule that was chosen.
    chosen_options = dataclasses.replace(
        options, q_bits=high.bits, quant_predicate=predicate, target_bpw=None, data=None
    )
    return Mix(chosen_options, report)


def calibration_pieces(data: Path, tokenizer: Any) -> list[list[int]]:
    """Pieces of a text's documents, drawn at random with a fixed seed until they have some 2,000 tokens."""
    pieces = cut(load_documents(data, tokenizer), _PIECE)
    order = np.random.default_rng(0).permutation(len(pieces))
    chosen: list[list[int]] = []
    for index in order:
        if sum(map(len, chosen)) >= TOKENS:
            break
        chosen.append(pieces[index])
    return chosen


def _entry(layer: LayerSensitivity, chosen: QuantizationRule) -> dict[str, Any]:
    return {
        "path": layer.path,
        "bits": chosen.bits,
        "rise": layer.rise,
        "weights": layer.weights,
        "low": {**layer.low.to_dict(), "bytes": layer.low_bytes},
        "high": {**layer.high.to_dict(), "bytes": layer.high_bytes},
    }


def check_mlx_format(options: ConversionOptions, mode: str) -> None:
    """Raise `AFMError` for formats that a folder for mlx-lm holds in other bytes than are counted."""
    rule = options.rule(mode)
    if not (rule.is_mlx_format and options.embedding_rule(rule).is_mlx_format):
        raise AFMError(
            "--target-bpw counts the bytes of this package's formats, and a folder for stock mlx-lm has "
            "others. Choose --q-mode affine for all layers, the embedding too, or leave --to out."
        )
