"""SoftTopK: numbers in [0, 1] with a given sum from scores, and the masks that they become.

    lambda_i = sigmoid((z_i - tau) / T), with tau such that sum lambda = t

In training a mask keeps the t largest of these soft numbers and is 0 elsewhere; at inference it is 1 for the t
largest scores. The gradient needs nothing of the search for tau: with w = lambda (1 - lambda),

    d lambda / d z = (diag(w) - w w^T / sum w) / T

Source: arXiv 2501.02086, section 3 (the operator); the sigmoid form and its gradient are ours.
"""

from __future__ import annotations

from functools import cache, partial
from typing import cast

import mlx.core as mx

from afm_mlx.errors import ConfigError

_BISECTIONS = 32
_ONE = 1 << 24  # float32 has every multiple of its inverse up to 1


def soft_top_k(scores: mx.array, kept: int, temperature: float = 1.0) -> mx.array:
    """Return numbers in [0, 1] that sum to `kept` in each row, by scores.

    Args:
        scores: z, (..., n) floats; rows are independent.
        kept: t, 1 to n.
        temperature: T, above 0; the lower it is, the nearer the numbers are to 0 and 1.

    Returns:
        (..., n) float32. The gradient is exact; a second derivative is not defined.

    Raises:
        ConfigError: for another `kept` or `temperature`.
    """
    _check(scores, kept, temperature)
    if kept == scores.shape[-1]:
        return mx.ones(scores.shape, mx.float32)
    return cast(mx.array, _operator(kept, temperature)(scores.astype(mx.float32)))


def top_k_mask(scores: mx.array, kept: int) -> mx.array:
    """Return True for the `kept` largest scores of each row, (..., n) bool; of equal ones, for the first."""
    _check(scores, kept, 1.0)
    order = mx.argsort(-scores, axis=-1)[..., :kept]
    none = mx.zeros(scores.shape, mx.bool_)
    return mx.put_along_axis(none, order, mx.array(True), axis=-1)


def training_mask(scores: mx.array, kept: int, temperature: float = 1.0) -> mx.array:
    """Return `soft_top_k` of the `kept` largest scores of each row, and 0 for the others, (..., n) float32.

    Exactly `kept` numbers of a row are above 0. Arguments and errors are as in `soft_top_k`.
    """
    soft = soft_top_k(scores, kept, temperature)
    return mx.where(top_k_mask(mx.stop_gradient(scores), kept), soft, 0.0)


def to_channels(mask: mx.array, group: int) -> mx.array:
    """Repeat the number of each group of neighbouring channels: (..., groups) to (..., groups * group)."""
    return mask if group == 1 else mx.repeat(mask, group, axis=-1)


def _check(scores: mx.array, kept: int, temperature: float) -> None:
    if not 1 <= kept <= scores.shape[-1]:
        raise ConfigError(
            f"{kept} of {scores.shape[-1]} scores can't be kept; allowed are 1 to {scores.shape[-1]}."
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(
            f"The temperature of a mask is {temperature}; allowed are positive numbers, 1 as a rule."
        )


@cache
def _operator(kept: int, temperature: float) -> mx.custom_function:
    """Return `soft_top_k` of float32 scores with its gradient."""
    operator = mx.custom_function(partial(_soft, kept, temperature))

    @operator.vjp
    def gradient(scores: mx.array, cotangent: mx.array, soft: mx.array) -> mx.array:
        w = soft * (1 - soft)
        weighted = cotangent * w
        mean = weighted.sum(-1, keepdims=True) / mx.maximum(w.sum(-1, keepdims=True), 1e-30)
        return (weighted - w * mean) / temperature

    return operator


def _soft(kept: int, temperature: float, scores: mx.array) -> mx.array:
    n = scores.shape[-1]
    z = scores / temperature
    shift = mx.log(mx.array(kept / (n - kept)))
    # At the least score's bound all numbers are kept / n or more, at the largest one's or less.
    low = z.min(-1, keepdims=True) - shift
    high = z.max(-1, keepdims=True) - shift
    for _ in range(_BISECTIONS):
        tau = (low + high) / 2
        is_low = mx.sigmoid(z - tau).sum(-1, keepdims=True) > kept
        low, high = mx.where(is_low, tau, low), mx.where(is_low, high, tau)
    soft = mx.sigmoid(z - (low + high) / 2)
    # Float32 rounds tau and every number: one Newton step for tau, and then the sum in fixed point, where the
    # first numbers that are neither 0 nor 1 make up for what rounding left, by 6e-8 each.
    w = soft * (1 - soft)
    _, excess = _fixed_point(soft, kept)
    step = excess.astype(mx.float32) / (_ONE * mx.maximum(w.sum(-1, keepdims=True), 1e-30))
    units, excess = _fixed_point(mx.clip(soft - w * step, 0, 1), kept)
    is_inner = (units > 0) & (units < _ONE)
    is_moved = is_inner & (mx.cumsum(is_inner.astype(mx.int64), axis=-1) <= mx.abs(excess))
    return (units - mx.where(is_moved, mx.sign(excess), 0)).astype(mx.float32) / _ONE


def _fixed_point(soft: mx.array, kept: int) -> tuple[mx.array, mx.array]:
    """Return numbers in units of 2^-24, (..., n) int64, and by how much their sum exceeds `kept`, (..., 1)."""
    units = mx.round(soft * _ONE).astype(mx.int64)
    return units, units.sum(-1, keepdims=True) - kept * _ONE
