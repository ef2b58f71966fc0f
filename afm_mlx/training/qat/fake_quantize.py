"""Weights on a grid while they train: rounded in the forward pass, straight through in the backward pass.

A matrix W is cut into *units* that share a scale: the tensor, its rows, or groups along its inputs. With
b bits and the middle m = (2^b - 1) / 2,

    W~ = c + s * (clamp(round((W - c) / s + m), 0, 2^b - 1) - m)        s = f * max|W - c| / m

where f is the unit's learnable clip factor. c is 0 in a balanced grid (2 bits: -1.5 s, -0.5 s, 0.5 s, 1.5 s)
and the middle of the unit's range in an affine one. The maximum and c carry no gradient. With g the gradient
of W~, and sums over a unit,

    dW = g within the clamp, 0 outside
    ds = sum g * (round(v + m) - m - v) within, g * -m or g * m outside        v = (W - c) / s

Sources: grid and clip factor, "Apple Intelligence Foundation Language Models: Tech Report 2025",
arXiv 2507.13575, section on compression; gradients, "Learned Step Size Quantization", Esser et al. 2020.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from afm_mlx.errors import ConfigError
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.rule import QuantizationRule

_TINY = 2.0**-126  # smallest normal float32: the scale of a unit of zeros


class Codes(NamedTuple):
    """A matrix as codes, in the parts of a `kernels.PackedWeight`.

    Args:
        codes: (N, K) uint8.
        scales: float32, in the shape that the rule's `part_shapes` gives.
        biases: biases of an affine grid, in the shape of `scales`; None for a balanced grid.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None


def fake_quantize(
    weight: mx.array, clip: mx.array, rule: QuantizationRule, gradient_scale: float = 1.0
) -> mx.array:
    """The matrix that the codes stand for, with gradients to the weights and to the clip factors.

    Args:
        weight: (N, K) float.
        clip: factors f, of the shape of the rule's scales: () per tensor, (N,) per row, (N, G) per group.
        rule: balanced or affine.
        gradient_scale: factor of the gradient of `clip`, see `lsq_gradient_scale`.

    Returns:
        (N, K) in the dtype of `weight`; computed in float32.
    """
    units, scale, center = _grid(weight, scale_gradient(clip, gradient_scale), rule)
    values = _snap(rule.bits)(units, scale)
    if center is not None:
        values = values + center
    return values.reshape(weight.shape).astype(weight.dtype)


def quantize(weight: mx.array, clip: mx.array, rule: QuantizationRule) -> Codes:
    """The codes behind `fake_quantize`: the same rounding of the same numbers. Arguments as there."""
    units, scale, center = _grid(weight, clip, rule)
    codes = _codes(units, scale, rule.bits).astype(mx.uint8).reshape(weight.shape)
    biases = None if center is None else (center - _middle(rule.bits) * scale).reshape(clip.shape)
    return Codes(codes, scale.reshape(clip.shape), biases)


def initial_clip(weight: mx.array, rule: QuantizationRule, name: str = "the matrix") -> mx.array:
    """Clip factors under which the rounding error of every unit is near its least.

    The scale is searched between that of the bulk of the weights and that of the largest one, and refined by
    Newton steps: for fixed codes the squared error is quadratic in s, so that a step lands on its minimum.
    Weights that lie on a balanced grid already keep their codes.

    Args:
        weight: (N, K) float.
        rule: balanced or affine.
        name: the layer's name, for errors.

    Returns:
        float32, of the shape of the rule's scales.

    Raises:
        ConfigError, CheckpointError: name the layer: a palette, shapes that don't pack, NaN.

    Source: arXiv 2507.13575 describes a Newton-like start that captures the central mass of the weights; its
    pseudocode is not published. The search is `grids.fit_scales`.
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
    """`1 / sqrt(n * m)` for n weights that share a factor: its steps are then in proportion to the weights'.

    Source: "Learned Step Size Quantization", Esser et al. 2020, section 2.2.
    """
    rows, inputs = shape
    per_unit = {"tensor": rows * inputs, "row": inputs, "group": rule.group_size or inputs}
    return (per_unit[rule.granularity or ""] * _middle(rule.bits)) ** -0.5


def scale_gradient(x: mx.array, factor: float) -> mx.array:
    """`x`, whose gradient is multiplied by a factor."""
    if factor == 1:
        return x
    fixed = mx.stop_gradient(x)
    return fixed + factor * (x - fixed)


# -- grids


def _middle(bits: int) -> float:
    return (2**bits - 1) / 2


def _centered(weight: mx.array, rule: QuantizationRule) -> tuple[mx.array, mx.array | None]:
    """Units (U, L) float32 minus their centers (U, 1); None for centers that are 0."""
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
    """Centered units (U, L), scales (U, 1), and centers (U, 1) or None."""
    units, center = _centered(weight, rule)
    largest = mx.abs(mx.stop_gradient(units)).max(axis=-1, keepdims=True)
    # A factor that a large step made negative stands for its magnitude.
    factors = mx.abs(clip.astype(mx.float32)).reshape(-1, 1)
    return units, mx.maximum(factors * (largest / _middle(rule.bits)), _TINY), center


def _codes(units: mx.array, scale: mx.array, bits: int) -> mx.array:
    """Nearest codes, float32."""
    return mx.clip(mx.round(units / scale + _middle(bits)), 0, 2**bits - 1)


@functools.cache
def _snap(bits: int) -> Callable[[mx.array, mx.array], mx.array]:
    """Units (U, L) and scales (U, 1) to the grid's points.

    A function with gradients of its own keeps nothing but its arguments for the backward pass, where
    automatic differentiation would keep half a dozen arrays of the weights' size.
    """
    middle = _middle(bits)

    @mx.custom_function
    def snap(units: mx.array, scale: mx.array) -> mx.array:
        return scale * (_codes(units, scale, bits) - middle)

    @snap.vjp
    def gradients(
        primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, mx.array]:
        # Without this, `mx.compile` finds the forward pass's numbers again and keeps them all until here.
        units, scale = mx.depends(list(primals), [cotangent])
        # The gradients of the file's docstring by what the forward pass left: half the time of rounding again.
        within = mx.abs(units) <= scale * (middle + 0.5)
        of_units = mx.where(within, cotangent, 0)
        of_scale = cotangent * (output - mx.where(within, units, 0))
        return of_units, of_scale.sum(axis=-1, keepdims=True) / scale

    return snap
