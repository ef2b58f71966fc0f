"""Quantization-aware training: layers whose weights are rounded to a grid in the forward pass.

`prepare_qat` puts these layers into a model, any loop trains it, and `pack_qat` packs the weights: the packed
model returns the same logits to float tolerance, because the codes come from the function that the forward
pass used.

A matrix W is divided into *units* that share a scale: the tensor, its rows, or groups along its inputs. With b
bits and the middle m = (2^b - 1) / 2,

    W~ = c + s * (clamp(round((W - c) / s + m), 0, 2^b - 1) - m)        s = f * max|W - c| / m

where f is the unit's learned clip factor. c is 0 in a balanced grid (2 bits: -1.5 s, -0.5 s, 0.5 s, 1.5 s) and
the middle of the unit's range in an affine one. The maximum and c have no gradient. With g the gradient of W~,
and sums over a unit,

    dW = g within the clamp, 0 outside                                  (straight through)
    ds = sum g * (round(v + m) - m - v) within, g * -m or g * m outside        v = (W - c) / s

Sources: grid and clip factor, "Apple Intelligence Foundation Language Models: Tech Report 2025",
arXiv 2507.13575, section on compression; gradients, "Learned Step Size Quantization", Esser et al. 2020.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.config import KV_SCALES
from afm_mlx.errors import ConfigError
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import (
    Predicate,
    check_layer_types,
    quantized_config,
    replace_modules,
    rule_chooser,
)
from afm_mlx.quantization.rule import AFM_RULE, QuantizationRule

P = TypeVar("P", PackedLinear, PackedEmbedding)


class _QAT(nn.Module):
    """A float layer whose weights are rounded to a grid in the forward pass; `name` is for errors.

    Parameters, all trainable, are `weight` (N, K), `clip` of the shape of the rule's scales, and `bias` (N,) if
    the layer has one. `gradient_scaling` multiplies gradients of the clip factors by `lsq_gradient_scale`.
    """

    def __init__(
        self,
        layer: nn.Linear | nn.Embedding,
        rule: QuantizationRule,
        name: str = "the matrix",
        gradient_scaling: bool = True,
    ):
        super().__init__()
        self.weight = layer.weight
        self.clip = initial_clip(layer.weight, rule, name)
        if "bias" in layer:
            self.bias = layer.bias
        self.rule = rule
        shape = layer.weight.shape
        self.gradient_scale = lsq_gradient_scale(shape, rule) if gradient_scaling else 1.0

    def fake_quantized(self) -> mx.array:
        """Return the rounded matrix (N, K), with gradients to `weight` and `clip`."""
        return fake_quantize(self["weight"], self["clip"], self.rule, self.gradient_scale)

    def _packed_as(self, kind: type[P], **others: Any) -> P:
        rule, weight = self.rule, self["weight"]
        found = quantize(weight, self["clip"], rule)
        # MLX's own layers compute in the type of their scales.
        dtype = weight.dtype if rule.is_mlx_format else mx.float32
        parts = {"scales": found.scales.astype(dtype)}
        if found.biases is not None:
            parts["biases"] = found.biases.astype(dtype)
        packed = kind.from_codes(found.codes, rule.bits, rule.mode, **parts, **others)
        return packed.train(self.training)

    def _extra_repr(self) -> str:
        rows, inputs = self["weight"].shape
        return f"{rows}, {inputs}, rule={self.rule}"


class QATLinear(_QAT):
    """`y = x W~^T + bias`, where W~ is the weight on its grid; see `fake_quantize`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Map x (..., K) to (..., N)."""
        y = x @ self.fake_quantized().T
        return y + self["bias"] if "bias" in self else y

    def to_packed(self) -> PackedLinear:
        return self._packed_as(PackedLinear, bias=self.get("bias"))


class QATEmbedding(_QAT):
    """An embedding of rows of W~, the weight on its grid, which can also be the head."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens (...) to rows (..., K)."""
        return self.fake_quantized()[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        """Map hidden states (..., K) to logits (..., vocab_size), as a tied head."""
        return x @ self.fake_quantized().T

    def to_packed(self) -> PackedEmbedding:
        return self._packed_as(PackedEmbedding, dtype=self["weight"].dtype)


def prepare_qat(
    model: nn.Module,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    *,
    learn_kv_scales: bool = False,
    gradient_scaling: bool = True,
) -> nn.Module:
    """Replace a model's linear layers and embeddings by layers that train on grids, in place.

    Layers are chosen, or refused, as in `quantize_model`. Norms and biases stay float, and trainable or frozen
    as before.

    Args:
        model: a model with float weights, of this package or mlx-lm's zoo.
        rule: rule of linear layers; balanced or affine.
        embedding_rule: rule of embeddings and of an untied head (`lm_head`); pass None for `rule` with at least
            4 bits.
        predicate: chooses for each layer: one of these two rules (True), none (False), or another rule.
        learn_kv_scales: train the int8 scales of keys and values, which are else frozen.
        gradient_scaling: multiply gradients of the clip factors by `lsq_gradient_scale`. This affects the
            clipping of the gradient's norm, and hardly Adam's steps.

    Returns:
        the model.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be packed by its rule, and why.
    """
    choose = rule_chooser(rule, embedding_rule, predicate)
    kinds = {nn.Linear: QATLinear, nn.Embedding: QATEmbedding}
    check_layer_types(model, choose, lambda layer: type(layer) in kinds)
    layers: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        kind = kinds.get(type(module))
        if kind is not None and (own := choose(path, module)) is not None:
            layers.append((path, kind(module, own, path, gradient_scaling).train(module.training)))
    if not layers:
        raise ConfigError(
            "No layer was chosen to be trained on a grid: the rule says no to all float layers, or the model "
            "has none. A packed model is made float again first, by afm_mlx.quantization.dequantize_model."
        )
    replace_modules(model, layers)
    for module in model.modules():
        if all(name in module for name in KV_SCALES):
            switch = module.unfreeze if learn_kv_scales else module.freeze
            switch(recurse=False, keys=list(KV_SCALES))
    return model


def pack_qat(model: nn.Module, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Replace the layers of a prepared model by packed ones with the codes of their weights, in place.

    Args:
        model: a model that `prepare_qat` returned.
        config: the content of its config.json.

    Returns:
        the model, in evaluation mode, and `config` with the keys `quantization` and `quantization_config`, as
        `quantize_model` returns them.

    Raises:
        ConfigError: when the model has no layer on a grid.
    """
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _QAT)]
    if not layers:
        raise ConfigError("The model has no layer to pack: prepare_qat comes before pack_qat.")
    rules = {path: module.rule for path, module in layers}
    for path, module in layers:
        replace_modules(model, [(path, module.to_packed())])
    return model.eval(), quantized_config(config, rules)


# -- rounding to a grid


_TINY = 2.0**-126  # smallest normal float32: the scale of a unit of zeros


class Codes(NamedTuple):
    """The codes of a matrix, in the parts of a `kernels.PackedWeight`.

    `codes` is (N, K) uint8; `scales` and `biases` (None for a balanced grid) are float32, in the shape that the
    rule's `part_shapes` gives.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None


def fake_quantize(
    weight: mx.array, clip: mx.array, rule: QuantizationRule, gradient_scale: float = 1.0
) -> mx.array:
    """Round a matrix (N, K) to its grid, with gradients to the weights and to the clip factors.

    `clip` has the factors f in the shape of the rule's scales: () per tensor, (N,) per row, (N, G) per group.
    Its gradient is multiplied by `gradient_scale`, see `lsq_gradient_scale`. Computes in float32, returns the
    dtype of `weight`.
    """
    units, scale, center = _grid(weight, scale_gradient(clip, gradient_scale), rule)
    values = _snap(rule.bits)(units, scale)
    if center is not None:
        values = values + center
    return values.reshape(weight.shape).astype(weight.dtype)


def quantize(weight: mx.array, clip: mx.array, rule: QuantizationRule) -> Codes:
    """Return the codes of the matrix that `fake_quantize` returns for the same arguments."""
    units, scale, center = _grid(weight, clip, rule)
    codes = _codes(units, scale, rule.bits).astype(mx.uint8).reshape(weight.shape)
    biases = None if center is None else (center - _middle(rule.bits) * scale).reshape(clip.shape)
    return Codes(codes, scale.reshape(clip.shape), biases)


def initial_clip(weight: mx.array, rule: QuantizationRule, name: str = "the matrix") -> mx.array:
    """Return clip factors that nearly minimise the rounding error of every unit, float32 in the shape of the
    scales.

    The scale is searched between the scales for the bulk of the weights and for the largest one, and refined by
    Newton steps: for fixed codes the squared error is quadratic in s, so a step reaches its minimum. Weights
    that are already on a balanced grid keep their codes. Errors name the layer: a palette, shapes that don't
    pack, NaN.

    Source: arXiv 2507.13575 describes a Newton-like initialisation that captures the central mass of the
    weights, without pseudocode. The search is `grids.fit_scales`.
    """
    if rule.mode == "palette":  # entries come from k-means and have no scale to learn
        raise ConfigError(
            f"{name}: mode is 'palette'; quantization-aware training takes balanced and affine. Train with one "
            "of these, or pack the float model to a palette with afm-mlx convert."
        )
    rule.check(weight.shape, name)
    balanced = dataclasses.replace(rule, mode="balanced")
    units, center = _centered(weight, rule)
    centered = weight if center is None else units.reshape(weight.shape)
    scales = pack(centered, balanced, name=name).packed.scales
    assert scales is not None
    largest = mx.abs(units).max(axis=-1).reshape(scales.shape)
    return mx.where(largest > 0, scales * _middle(rule.bits) / mx.maximum(largest, _TINY), 1.0)


def lsq_gradient_scale(shape: tuple[int, int], rule: QuantizationRule) -> float:
    """Return `1 / sqrt(n * m)` for n weights that share a factor, which makes its steps proportional to theirs.

    Source: "Learned Step Size Quantization", Esser et al. 2020, section 2.2.
    """
    rows, inputs = shape
    per_unit = {"tensor": rows * inputs, "row": inputs, "group": rule.group_size or inputs}
    return (per_unit[rule.granularity or ""] * _middle(rule.bits)) ** -0.5


def scale_gradient(x: mx.array, factor: float) -> mx.array:
    """Return `x` with the same numbers; the gradient that passes through it is multiplied by `factor`."""
    if factor == 1:
        return x
    fixed = mx.stop_gradient(x)
    return fixed + factor * (x - fixed)


# -- grids


def _middle(bits: int) -> float:
    return (2**bits - 1) / 2


def _centered(weight: mx.array, rule: QuantizationRule) -> tuple[mx.array, mx.array | None]:
    """Return the matrix as centered units in float32, (U, L), and the centers that were subtracted, (U, 1).

    A unit is the L weights that share a scale. Centers are None for a balanced rule, where all are 0.
    """
    length = {"tensor": weight.size, "row": weight.shape[1], "group": rule.group_size}
    units = weight.astype(mx.float32).reshape(-1, length[rule.granularity or ""])
    if rule.mode == "balanced":
        return units, None
    fixed = mx.stop_gradient(units)
    center = (fixed.max(axis=-1, keepdims=True) + fixed.min(axis=-1, keepdims=True)) / 2
    return units - center, center


def _grid(
    weight: mx.array, clip: mx.array, rule: QuantizationRule
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Return centered units (U, L), scales (U, 1), and centers (U, 1) or None; see `_centered`.

    A unit's scale is |clip factor| * largest magnitude / half of the highest code.
    """
    units, center = _centered(weight, rule)
    largest = mx.abs(mx.stop_gradient(units)).max(axis=-1, keepdims=True)
    # A large step may make a factor negative; its magnitude counts.
    factors = mx.abs(clip.astype(mx.float32)).reshape(-1, 1)
    return units, mx.maximum(factors * (largest / _middle(rule.bits)), _TINY), center


def _codes(units: mx.array, scale: mx.array, bits: int) -> mx.array:
    """Return each weight's nearest code, 0 to 2^bits - 1, in float32, for units with their scales."""
    return mx.clip(mx.round(units / scale + _middle(bits)), 0, 2**bits - 1)


@functools.cache
def _snap(bits: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Return the function that rounds units (U, L) with scales (U, 1) to the grid.

    It defines its own gradients, and so keeps only its arguments for the backward pass, where automatic
    differentiation would keep six arrays of the weights' size.
    """
    middle = _middle(bits)

    @mx.custom_function
    def snap(units: mx.array, scale: mx.array) -> mx.array:
        return scale * (_codes(units, scale, bits) - middle)

    @snap.vjp
    def gradients(
        primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, mx.array]:
        # Without this, `mx.compile` would reuse the forward pass's arrays, and keep them all until here.
        units, scale = mx.depends(list(primals), [cotangent])
        # The gradients of the file's docstring; rounding again would take twice as long as reading `output`.
        within = mx.abs(units) <= scale * (middle + 0.5)
        of_units = mx.where(within, cotangent, 0)
        of_scale = cotangent * (output - mx.where(within, units, 0))
        return of_units, of_scale.sum(axis=-1, keepdims=True) / scale

    return snap
