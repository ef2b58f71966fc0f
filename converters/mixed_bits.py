"""Two kinds of bits for the layers of a model, chosen by measuring them on text: `convert --target-bpw`.

The 2024 on-device model mixes 2- and 4-bit layers so that a weight takes a wanted number of bits on average.
Here, the sensitivity of each layer is measured: with every layer at the high number of bits, one after the
other goes to the low one, and the rise of

    KL(float model || packed model), the mean over tokens, in nats

is what the layer's bits are worth. Layers go low in the order of rise per byte saved.

The model is read into memory for that, once, and dropped before its folder is written; nothing else in
`convert` needs a whole model in memory.

Source: arXiv 2407.21075, its part on compression, for the scheme; measure and choice are ours.
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
from afm_mlx.model.model import is_afm
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import (
    Predicate,
    is_outer,
    is_vision,
    layer_rules,
    pack_layer,
    replace_modules,
)
from afm_mlx.quantization.rule import VISION_RULE, QuantizationRule
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer

REPORT = "sensitivity.json"
HELD_OUT = "heldout.jsonl"
TOKENS = 2048
TOKENS_PER_BATCH = 1024
_PIECE = 256

Rules: TypeAlias = dict[str, QuantizationRule]


@dataclass(frozen=True)
class Mix:
    """`ConversionOptions` that name each layer's bits instead of a target; and `sensitivity.json`'s content."""

    options: ConversionOptions
    report: dict[str, Any]

    def write(self, folder: Path) -> None:
        text = json.dumps(self.report, indent=2)
        (folder / REPORT).write_text(text, encoding="utf-8")


# -- text


def calibration_file(options: ConversionOptions, source: Path) -> Path:
    """Return the file of calibration text: the `data` of the options, or the folder's own text."""
    if options.data is not None:
        path = Path(options.data)
        if not path.exists():
            raise DataError(
                f"There is no file or folder {path}; data sets of the hub are not fetched."
            )
        # A test set judges the model; it must not choose the bits.
        names = ("train.jsonl", "valid.jsonl")
        return next((path / name for name in names if (path / name).is_file()), path)
    path = (source if source.is_dir() else source.parent) / HELD_OUT
    if not path.is_file():
        raise DataError(
            f"--target-bpw measures layers on text, and {path.parent} has no {HELD_OUT}. Give --data: a .jsonl "
            "file, a .txt file, or a folder with train.jsonl; a few thousand words are enough."
        )
    return path


def _batches(pieces: Sequence[Sequence[int]]) -> Iterator[tuple[mx.array, mx.array]]:
    """Yield tokens (B, L) of pieces of similar length, and a mask (B, L) that is 0 where they are padding."""
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


# -- measurement


@dataclass(frozen=True)
class LayerSensitivity:
    """How much a model suffers from fewer bits in one layer of `weights` numbers, and the bytes that they save.

    `rise` is by how much the divergence from the float model rises if this layer alone goes from the rule
    `high` to `low`, in nats per token; a negative rise is noise. Bytes include scales and tables.
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
        """Bytes that the low rule saves; negative if small groups have large tables."""
        return self.high_bytes - self.low_bytes

    @property
    def rise_per_byte(self) -> float:
        """The rise over the saved bytes; infinite for a layer that saves none."""
        return self.rise / self.saved_bytes if self.saved_bytes > 0 else math.inf


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
    """Measure how much every linear layer of a float model suffers from fewer bits.

    Every batch of text runs through the float model, through the model with all layers at the high number of
    bits, and once more for each layer. Memory holds the float weights, the packed ones of both kinds, and three
    times the logits of 1,024 tokens. The model has its float layers again afterwards.

    Args:
        model: ours or one of mlx-lm's; called as `model(tokens)`.
        pieces: token ids of the calibration text.
        low_rule, high_rule: rules of linear layers, with fewer and with more bits.
        progress: called with the passes done and their total number.
        embedding_rule: rule of embeddings and heads, which are not measured; see `quantize_model`.
        predicate: as in `quantize_model`. Only layers for which it returns True are measured.
        dtype: type of scales in MLX's own format, for their bytes; by default the type of the layer's weights.

    Raises:
        DataError: if the text has no tokens.
        ConfigError, CheckpointError: if the rules fit no layer, or one that is named can't be packed by them.
    """
    if low_rule.bits >= high_rule.bits:
        raise ConfigError(
            f"The low rule has {low_rule.bits} bits and the high one {high_rule.bits}; it needs fewer."
        )
    batches = list(_batches(pieces))
    rules, free = plan_layers(model, high_rule, embedding_rule, predicate)
    modules = dict(model.named_modules())
    floats = {path: modules[path] for path in rules}
    packed = {path: pack_layer(floats[path], rule, path) for path, rule in rules.items()}
    low = {path: pack_layer(floats[path], low_rule, path) for path in free}
    mx.eval([module.parameters() for form in (packed, low) for module in form.values()])
    rises, tokens = dict.fromkeys(free, 0.0), sum(int(mask.sum().item()) for _, mask in batches)
    total, done = len(batches) * (len(free) + 2), 0

    def report() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    try:
        for inputs, mask in batches:
            replace_modules(model, list(floats.items()))
            wanted = _log_probabilities(model, inputs)
            mx.eval(wanted)
            report()
            replace_modules(model, list(packed.items()))
            base = _divergence(model, inputs, mask, wanted)
            report()
            for path, layer in low.items():
                replace_modules(model, [(path, layer)])
                rises[path] += _divergence(model, inputs, mask, wanted) - base
                replace_modules(model, [(path, packed[path])])
                report()
    finally:
        replace_modules(model, list(floats.items()))
    found = []
    for path in free:
        if not math.isfinite(rises[path]):
            raise CheckpointError(
                f"The outputs with {path} at fewer bits are not finite, or the float model's outputs are not. "
                "Check the checkpoint, and leave this layer out."
            )
        weight = floats[path].weight
        sizes = [rule.nbytes(weight.shape, dtype or weight.dtype) for rule in (low_rule, high_rule)]
        rise = rises[path] / tokens
        found.append(LayerSensitivity(path, weight.size, rise, low_rule, high_rule, *sizes))
    return found


def plan_layers(
    model: nn.Module,
    high_rule: QuantizationRule,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    vision_rule: QuantizationRule = VISION_RULE,
) -> tuple[Rules, list[str]]:
    """Return the rule of every packed layer, and the paths of those whose bits are free to choose."""
    rules = layer_rules(model, high_rule, embedding_rule, predicate, vision_rule)
    modules = dict(model.named_modules())
    free = [
        p
        for p, rule in rules.items()
        if rule == high_rule and not is_outer(p, modules[p]) and not is_vision(p)
    ]
    if not free:
        raise ConfigError(
            "No linear layer is left to choose bits for; the predicate decides for all of them."
        )
    return rules, free


def _log_probabilities(model: nn.Module, inputs: mx.array) -> mx.array:
    return nn.log_softmax(model(inputs).astype(mx.float32), axis=-1)


def _divergence(model: nn.Module, inputs: mx.array, mask: mx.array, wanted: mx.array) -> float:
    """Return the sum over unpadded tokens of KL(`wanted` || model), for log-probabilities `wanted`."""
    got = _log_probabilities(model, inputs)
    return ((mx.exp(wanted) * (wanted - got)).sum(axis=-1) * mask).sum().item()


# -- choice


class ModelSize(NamedTuple):
    """Number of weights in a model, and bytes of the folder that holds it packed."""

    weights: int
    nbytes: int


def stored_size(
    model: nn.Module, rules: Mapping[str, QuantizationRule], dtype: mx.Dtype | None = None
) -> ModelSize:
    """Compute the size of a float model once the layers at the paths of `rules` are packed; see `Mix`."""
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
    return ModelSize(weights, nbytes)


def choose_bits(
    sensitivities: Sequence[LayerSensitivity],
    target_bpw: float,
    size: tuple[int, int] | None = None,
) -> Rules:
    """Choose the rule of each layer, by path, so that the average of bits per weight is within the target.

    Layers get their low rule in the order of rise per byte saved until the average holds. Then layers that
    suffer go back if the average allows it, the most sensitive first. The order of the list has no effect.
    `size` is the whole model's `ModelSize` with these layers high, by default the size of these layers alone.

    Raises:
        ConfigError: if no choice meets the target; says which targets can be met.
    """
    own = sum(s.weights for s in sensitivities), sum(s.high_bytes for s in sensitivities)
    weights, nbytes = size or own
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
    """Raise `ConfigError` unless the target is between the bits per weight with all free layers low, and high.

    `weights` and the bytes are the whole model's.
    """
    least, most = 8 * low_bytes / weights, 8 * high_bytes / weights
    if not least <= target_bpw <= most:
        # Rounded inwards, so that the printed figures are allowed themselves.
        low, high = math.ceil(least * 1000) / 1000, math.floor(most * 1000) / 1000
        raise ConfigError(
            f"The target is {target_bpw} bits per weight; {low:.3f} to {high:.3f} can be met with these rules, "
            "scales and tables included. Choose a target between, or other bits for layers or embedding."
        )


# -- conversion


def mix_of_folder(
    source: Path, options: ConversionOptions, data: Path, progress: Progress | None
) -> Mix:
    """Choose how many bits each layer of a folder with float weights gets; see `choose_mix`."""
    tensors = stored_tensors(source)
    config = read_config(source, tensors)
    values = read_config_json(source / "config.json")
    quantization = quantization_of(values, source / "config.json")
    options.check_source(source, bool(quantization))
    model = load_model(source, values | config.to_dict())
    warn_if_slow(model)
    dtype = options.mlx_dtype or tensors["model.output_norm.weight"].dtype
    given = (model, load_tokenizer(source), options, data)
    return choose_mix(*given, mode="balanced", dtype=dtype, progress=progress)


def choose_mix(
    model: nn.Module,
    tokenizer: Tokenizer,
    options: ConversionOptions,
    data: Path,
    *,
    mode: str,
    dtype: mx.Dtype | None,
    progress: Progress | None = None,
) -> Mix:
    """Measure a float model's layers on a file of text, and choose the bits of each.

    `mode` is the default of `q_mode`, and `dtype` the type of the folder's floats; pass None for the model's.

    Raises:
        AFMError: if the text can't be used, a layer can't be packed, or the target can't be met.
    """
    assert options.target_bpw is not None
    high = options.rule(mode)
    low = dataclasses.replace(high, bits=options.bits_to_mix[0])
    embedding = options.embedding_rule(high)
    own = None if isinstance(options.quant_predicate, str) else options.quant_predicate
    vision = options.vision_rule(model.args if is_afm(model) else None)
    rules, free = plan_layers(model, high, embedding, own, vision)
    size = stored_size(model, rules, dtype)
    least = stored_size(model, rules | dict.fromkeys(free, low), dtype).nbytes
    # Before measuring, which takes minutes.
    check_target(options.target_bpw, size.weights, least, size.nbytes)
    parts = cut(load_documents(data, tokenizer), _PIECE)
    pieces: list[list[int]] = []  # drawn with a fixed seed, until they have some 2,000 tokens
    for index in np.random.default_rng(0).permutation(len(parts)):
        if sum(map(len, pieces)) >= TOKENS:
            break
        pieces.append(parts[index])
    layers = measure_sensitivity(
        model, pieces, low, high, progress, embedding_rule=embedding, predicate=own, dtype=dtype
    )
    chosen = choose_bits(layers, options.target_bpw, size)

    def predicate(path: str, module: nn.Module) -> QuantizationRule | bool:
        return (rules | chosen).get(path, False)

    report = {
        "target_bpw": options.target_bpw,
        "data": data.name,
        "tokens": sum(map(len, pieces)),
        "rise": "of KL(float || packed) in nats per token, when this layer alone goes to the low bits",
        "layers": [
            {
                "path": layer.path,
                "bits": chosen[layer.path].bits,
                "rise": layer.rise,
                "weights": layer.weights,
                "low": {**layer.low.to_dict(), "bytes": layer.low_bytes},
                "high": {**layer.high.to_dict(), "bytes": layer.high_bytes},
            }
            for layer in sorted(layers, key=lambda layer: (-layer.rise_per_byte, layer.path))
        ],
    }
    without_target = dataclasses.replace(
        options, q_bits=high.bits, quant_predicate=predicate, target_bpw=None, data=None
    )
    return Mix(without_target, report)


def check_mlx_format(options: ConversionOptions, mode: str) -> None:
    """Raise `AFMError` if a folder for mlx-lm holds the format in other bytes than `target_bpw` counts."""
    rule = options.rule(mode)
    if not (rule.is_mlx_format and options.embedding_rule(rule).is_mlx_format):
        raise AFMError(
            "--target-bpw counts the bytes of this package's formats, and a folder for stock mlx-lm has "
            "others. Choose --q-mode affine for all layers, the embedding too, or leave --to out."
        )
