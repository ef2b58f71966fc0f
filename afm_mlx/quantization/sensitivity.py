"""Which layers can do with fewer bits: a measurement on text, and a choice that meets a size.

The 2024 on-device model mixes 2- and 4-bit layers so that a weight takes a wanted number of bits on average.
How much a layer suffers is measured here, not guessed from its place: with every layer at the high number of
bits, one after the other goes to the low one, and the rise of

    KL(float model || packed model), the mean over tokens, in nats

is what its bits are worth. Layers go low in the order of that rise per byte that they save.

Source: arXiv 2407.21075, its part on compression, for the scheme; measure and choice are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.architecture import KV_SCALES
from afm_mlx.errors import CheckpointError, ConfigError, DataError
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import (
    Predicate,
    is_outer,
    layer_rules,
    pack_layer,
    replace_modules,
)
from afm_mlx.quantization.rule import QuantizationRule

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
