"""Layers of two kinds of bits, chosen by what they suffer on text: `convert --target-bpw`.

The model is read into memory for that, once, and forgotten before its folder is written; nothing else in
`convert` needs it whole.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import KV_SCALES, read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.mlx_lm import read_config
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, DataError
from afm_mlx.loading.load import load_model
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.measure.perplexity import cut, load_documents
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import (
    Predicate,
    is_outer,
    layer_rules,
    pack_layer,
    replace_modules,
)
from afm_mlx.quantization.rule import QuantizationRule
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


# -- sensitivity

TOKENS_PER_BATCH = 1024

Rules: TypeAlias = dict[str, QuantizationRule]


@dataclass(frozen=True)
class LayerSensitivity:
    """How much a layer suffers from fewer bits, and what they save.

    Args:
        path: the layer's path in the model.
        weights: numbers in its matrix.
        rise: how much the divergence from the float model rises when this layer alone goes from `high` to
            `low`, in nats per token. A negative one is noise.
        low, high: rules with fewer and with more bits.
        low_bytes, high_bytes: bytes of the matrix packed by either rule, scales and tables included.
    """

    path: str
    weights: int
    rise: float
    low: QuantizationRule
    high: QuantizationRule
    low_bytes: int
    high_bytes: int

    @property
    def saved_bytes(self) -> int:
        """Bytes that the low rule saves; fewer than none where small groups have large tables."""
        return self.high_bytes - self.low_bytes

    @property
    def rise_per_byte(self) -> float:
        """The rise over the saved bytes; infinite for a layer that saves nothing."""
        return self.rise / self.saved_bytes if self.saved_bytes > 0 else math.inf


# -- measurement


def measure_sensitivity(
    model: nn.Module,
    pieces: Sequence[Sequence[int]],
    low_rule: QuantizationRule,
    high_rule: QuantizationRule,
    progress: Progress | None = None,
    *,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    dtype: mx.Dtype | None = None,
) -> list[LayerSensitivity]:
    """Measure how much every linear layer suffers from fewer bits.

    Every batch of text is read by the float model, by the one with all layers packed at the high number of
    bits, and once more for each layer. Memory holds the float weights, the packed ones of both kinds, and
    three times the logits of 1,024 tokens. The model has its float layers again afterwards.

    Args:
        model: a model with float weights, ours or one of mlx-lm's; called as `model(tokens)`.
        pieces: token ids of the calibration text.
        low_rule, high_rule: rules of linear layers, with fewer and with more bits.
        progress: called with passes done and passes in all.
        embedding_rule: rule of embeddings and heads, which are not measured; see `quantize_model`.
        predicate: as in `quantize_model`. Layers for which it says True are measured; those that get a rule
            of their own keep it, and those for which it says False stay float.
        dtype: type of the folder's floats, for the bytes of scales in MLX's own format; that of the layer's
            weights when None.

    Returns:
        the measured layers.

    Raises:
        DataError: when the text has no tokens.
        ConfigError, CheckpointError: when the rules fit no layer, or one that is named can't be packed so.
    """
    if low_rule.bits >= high_rule.bits:
        raise ConfigError(
            f"The low rule has {low_rule.bits} bits and the high one {high_rule.bits}; it needs fewer."
        )
    batches = list(_batches(pieces))
    rules, free = plan_layers(model, high_rule, embedding_rule, predicate)
    layers = _prepare(model, rules, free, low_rule)
    rises = _measure(model, batches, layers, progress)

    def entry(path: str) -> LayerSensitivity:
        weight = layers.whole[path].weight
        own = dtype or weight.dtype
        sizes = (rule.nbytes(weight.shape, own) for rule in (low_rule, high_rule))
        return LayerSensitivity(path, weight.size, rises[path], low_rule, high_rule, *sizes)

    return [entry(path) for path in layers.low]


class _Layers(NamedTuple):
    """The layers of a model by path, in three forms: float, packed, and packed at the low number of bits."""

    whole: dict[str, nn.Module]
    packed: dict[str, nn.Module]
    low: dict[str, nn.Module]


def plan_layers(
    model: nn.Module,
    high_rule: QuantizationRule,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
) -> tuple[Rules, list[str]]:
    """The rule of every packed layer, by its path, and the paths of those whose bits are free to choose.

    Layers that are free have the high rule. Arguments and errors are those of `measure_sensitivity`.
    """
    rules, modules = (
        layer_rules(model, high_rule, embedding_rule, predicate),
        dict(model.named_modules()),
    )
    free = [p for p, rule in rules.items() if rule == high_rule and not is_outer(p, modules[p])]
    if not free:
        raise ConfigError(
            "No linear layer is left to choose bits for; the predicate decides for all of them."
        )
    return rules, free


def _prepare(
    model: nn.Module, rules: Rules, free: Sequence[str], low_rule: QuantizationRule
) -> _Layers:
    found = dict(model.named_modules())
    layers = _Layers(
        {path: found[path] for path in rules},
        {path: pack_layer(found[path], rule, path) for path, rule in rules.items()},
        {path: pack_layer(found[path], low_rule, path) for path in free},
    )
    mx.eval([module.parameters() for form in layers[1:] for module in form.values()])
    return layers


def _measure(
    model: nn.Module,
    batches: Sequence[tuple[mx.array, mx.array]],
    layers: _Layers,
    progress: Progress | None,
) -> dict[str, float]:
    """The rise of every layer in `layers.low`."""
    sums = dict.fromkeys(layers.low, 0.0)
    tokens = sum(int(mask.sum().item()) for _, mask in batches)
    total, done = len(batches) * (len(layers.low) + 2), 0

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    try:
        for inputs, mask in batches:
            replace_modules(model, list(layers.whole.items()))
            wanted = _log_probabilities(model, inputs)
            mx.eval(wanted)
            report()
            replace_modules(model, list(layers.packed.items()))
            base = _divergence(model, inputs, mask, wanted)
            report()
            for path, low in layers.low.items():
                replace_modules(model, [(path, low)])
                sums[path] += _divergence(model, inputs, mask, wanted) - base
                replace_modules(model, [(path, layers.packed[path])])
                report()
    finally:
        replace_modules(model, list(layers.whole.items()))
    for path, rise in sums.items():
        if not math.isfinite(rise):
            raise CheckpointError(
                f"The outputs with {path} at fewer bits are not finite, or those of the float model are not. "
                "Check the checkpoint, and leave this layer out."
            )
    return {path: rise / tokens for path, rise in sums.items()}


def _log_probabilities(model: nn.Module, inputs: mx.array) -> mx.array:
    return nn.log_softmax(model(inputs).astype(mx.float32), axis=-1)


def _divergence(model: nn.Module, inputs: mx.array, mask: mx.array, wanted: mx.array) -> float:
    """KL of every token that is no padding, summed."""
    got = _log_probabilities(model, inputs)
    return ((mx.exp(wanted) * (wanted - got)).sum(axis=-1) * mask).sum().item()


def _batches(pieces: Sequence[Sequence[int]]) -> Iterator[tuple[mx.array, mx.array]]:
    """Tokens (B, L) of pieces of like length, and (B, L) 1 where they are no padding."""
    ordered = sorted((piece for piece in pieces if len(piece)), key=len, reverse=True)
    if not ordered:
        raise DataError("The calibration text has no tokens. Give a file with text.")
    while ordered:
        width = len(ordered[0])
        count = max(1, TOKENS_PER_BATCH // width)
        batch, ordered = ordered[:count], ordered[count:]
        tokens, mask = np.zeros((2, len(batch), width), np.int32)
        for row, piece in enumerate(batch):
            tokens[row, : len(piece)], mask[row, : len(piece)] = piece, 1
        yield mx.array(tokens), mx.array(mask)


# -- choice


def stored_size(
    model: nn.Module, rules: Mapping[str, QuantizationRule], dtype: mx.Dtype | None = None
) -> tuple[int, int]:
    """Weights of a float model, and the bytes of the folder that holds it packed.

    Args:
        model: a model with float weights.
        rules: how layers are packed, by path; others stay float.
        dtype: type of the folder's floats; as in the model when None. int8 scales are float32, and no weights.
    """
    weights = nbytes = 0
    for name, array in tree_flatten(model.parameters()):
        path, _, kind = name.rpartition(".")
        own = dtype or array.dtype
        if kind in KV_SCALES:
            nbytes += 4
            continue
        weights += array.size
        packed = kind == "weight" and path in rules
        nbytes += rules[path].nbytes(array.shape, own) if packed else array.size * own.size
    return weights, nbytes


def choose_bits(
    sensitivities: Sequence[LayerSensitivity],
    target_bpw: float,
    size: tuple[int, int] | None = None,
) -> Rules:
    """Choose the layers that go low so that a weight takes at most the wanted bits on average.

    Layers go low in the order of rise per byte saved until the average holds. Then those that suffer and for
    which there is room after all go back, the most sensitive first. The order of the list makes no difference.

    Args:
        sensitivities: what `measure_sensitivity` returned.
        target_bpw: bits per weight, scales and tables included.
        size: weights and bytes of the whole model with these layers high, as `stored_size` counts them; by
            default those of these layers alone.

    Returns:
        the rule of every layer, by its path.

    Raises:
        ConfigError: when no choice meets the target; says what can be met.
    """
    weights, nbytes = size or (
        sum(s.weights for s in sensitivities),
        sum(s.high_bytes for s in sensitivities),
    )
    saving = [s for s in sensitivities if s.saved_bytes > 0]
    check_target(target_bpw, weights, nbytes - sum(s.saved_bytes for s in saving), nbytes)
    # In whole bytes, so that the rounding of a target that is met exactly sends no layer low.
    excess = math.ceil(nbytes - target_bpw * weights / 8 - 1e-12 * nbytes)
    ordered = sorted(saving, key=lambda s: (s.rise_per_byte, s.path))
    low: dict[str, LayerSensitivity] = {}
    for layer in ordered:
        if excess <= 0:
            break
        low[layer.path] = layer
        excess -= layer.saved_bytes
    for layer in reversed(list(low.values())):
        if layer.rise > 0 and excess + layer.saved_bytes <= 0:
            excess += layer.saved_bytes
            del low[layer.path]
    return {s.path: s.low if s.path in low else s.high for s in sensitivities}


def check_target(target_bpw: float, weights: int, low_bytes: int, high_bytes: int) -> None:
    """Raise `ConfigError` when no choice of bits meets the target; says what can be met.

    Args:
        target_bpw: bits per weight.
        weights: number of weights in the whole model.
        low_bytes, high_bytes: bytes of the whole model with all free layers low, and high.
    """
    least, most = 8 * low_bytes / weights, 8 * high_bytes / weights
    if not least <= target_bpw <= most:
        # Rounded inwards, so that the figures shown are allowed themselves.
        low, high = math.ceil(least * 1000) / 1000, math.floor(most * 1000) / 1000
        raise ConfigError(
            f"The target is {target_bpw} bits per weight; {low:.3f} to {high:.3f} can be met with these rules, "
            "scales and tables included. Choose a target between, or other bits for layers or embedding."
        )
