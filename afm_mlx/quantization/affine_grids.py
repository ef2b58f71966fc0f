"""Affine grids, `scale * code + bias`, that weights lie on: those that `mx.quantize` makes, and any other.

`mx.quantize` gives code 0 to a group's weight of largest magnitude, which is its bias, and divides that by a
whole number for the scale. The other end of the group then has the last code or the one before it. Run again
on its own numbers, it stretches the grid over both ends, so that about every sixth group gets other codes.
Here the scales that it may have taken are tried, and accepted when they give all weights back bit for bit.

A grid with any other bias (of rows and matrices, of quantization-aware training) is a line through the
weights over their codes: the number of steps between the ends of a unit is tried from the finest grid on, and
accepted when a scale and a bias are found that pass within half a unit in the last place of every weight.

As in `grids`, a *unit* is what shares a scale and a bias; functions take (U, L) float32, one unit per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import unpack_codes
from afm_mlx.quantization.grids import Array, affine_codes, digits, round_to

_SMALLEST = {mx.float16: 2.0**-24}  # number; below 2**-14 all of float16's are that far apart
_FIT_STEPS = 12
_NEARLY_WHOLE = 0.1
_SHARE_LEFT = 0.75  # of the searched units: with fewer left, the search goes on with these alone


class AffineGrids(NamedTuple):
    """Scales and biases (U,) float32, and (U,) whether the weights lie on their grid; 0 where not."""

    scales: Array
    biases: Array
    found: Array


class AffineCodes(NamedTuple):
    """Codes (U, L) uint8, scales and biases (U,) float32, and (U,) whether the weights lay on their grid."""

    codes: Array
    scales: Array
    biases: Array
    found: Array


def mlx_codes(units: Array, bits: int, dtype: mx.Dtype, look: bool) -> AffineCodes:
    """Groups as MLX's own format holds them: on their grid where they lie on one, by `mx.quantize` otherwise.

    Args:
        units: (U, L) float32; L is a group size that MLX has.
        bits: 2, 4 or 8.
        dtype: type of the weights, and of scales and biases.
        look: whether to look for grids; False leaves all to `mx.quantize`.
    """
    words, *parts = mx.quantize(mx.array(units).astype(dtype), units.shape[1], bits)
    codes = np.array(unpack_codes(words, bits))
    scales, biases = (np.array(part.astype(mx.float32)).reshape(-1) for part in parts)
    if not look:
        return AffineCodes(codes, scales, biases, np.zeros(len(units), bool))
    found = reproduces_affine(units, codes, scales, biases, dtype)
    for search in (mlx_grids, _stored_grids):
        left = np.flatnonzero(~found)
        part = units[left]
        grids = search(part, bits, dtype)
        left, part = left[grids.found], part[grids.found]
        scales[left], biases[left] = (round_to(n[grids.found], dtype) for n in grids[:2])
        codes[left] = affine_codes(part, scales[left, None], biases[left, None], bits)
        found[left] = True
    return AffineCodes(codes, scales, biases, found)


def _stored_grids(units: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Grids with any bias, in numbers of `dtype`, where codes are the same under these.

    Where nearly all biases are whole numbers of steps, codes begin at the weight of largest magnitude, as in
    `mx.quantize`, else at the lowest.
    """
    low, high = units.min(axis=1), units.max(axis=1)
    scales, biases, found = any_grids(units, low + (high - low) / 2, bits, dtype)
    if not found.any():
        return AffineGrids(scales, biases, found)
    steps = np.divide(biases, scales, out=np.zeros_like(biases), where=scales > 0)
    if (np.abs(steps - np.rint(steps)) <= _NEARLY_WHOLE)[found].mean() > 1 - _NEARLY_WHOLE:
        biases = np.where(found, low, 0)
        turned = found & (np.abs(low) <= np.abs(high))
        biases[turned], scales[turned] = high[turned], -scales[turned]
    stored = round_to(scales, dtype), round_to(biases, dtype)
    same = _codes(units, *stored, bits) == _codes(units, scales, biases, bits)
    return AffineGrids(*stored, found & same.all(axis=1))


def reproduces_affine(
    units: Array, codes: Array, scale: Array, bias: Array, dtype: mx.Dtype
) -> Array:
    """Which units (U,) are, in their own dtype, the numbers of codes (U, L) under scales and biases (U,).

    They may have been computed in float32 and rounded then, as here, or in their dtype, as in `mx.dequantize`.
    """
    products = codes * scale[:, None]
    bias = bias[:, None]
    same = (round_to(products + bias, dtype) == units).all(axis=1)
    if dtype != mx.float32 and not same.all():
        rounded = round_to(products[~same], dtype) + bias[~same]
        same[~same] = (round_to(rounded, dtype) == units[~same]).all(axis=1)
    return same


def mlx_grids(units: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Grids of `mx.quantize` that weights lie on.

    Args:
        units: (U, L) float32.
        bits: 2, 4 or 8.
        dtype: type that the weights were rounded to. Scales and biases may have been of any type.
    """
    result = no_grids(len(units))
    low, high = units.min(axis=1), units.max(axis=1)
    from_low = np.abs(low) > np.abs(high)
    edge, other = np.where(from_low, low, high), np.where(from_low, high, low)
    # Which of two ends is larger may be a matter of their rounding.
    even = np.abs(low + high) <= np.abs(edge) * np.float32(2.0 ** (3 - digits(dtype)))
    for first, last, which in ((edge, other, low != high), (other, edge, even & (low != high))):
        left = np.flatnonzero(which & ~result.found)
        for steps, off, kind in _guesses(bits, dtype):
            if not len(left):
                break
            bias = first[left]
            whole = np.rint(bias / ((last[left] - bias) / np.float32(steps))) + np.float32(off)
            scale = round_to(bias / np.where(whole == 0, np.float32(1), whole), kind)
            same = _lie_on(units, left, (scale, bias), bits, dtype)
            result.scales[left[same]], result.biases[left[same]] = scale[same], bias[same]
            result.found[left[same]] = True
            left = left[~same]
    return result


def _guesses(bits: int, dtype: mx.Dtype) -> Iterator[tuple[int, int, mx.Dtype]]:
    """What a grid may have been: steps from end to end, an error of the whole number, and the scale's type.

    The whole number is the bias over the scale. The other end is rounded, so in bfloat16 it may be off by one.
    """
    stored = dict.fromkeys((dtype, mx.float32, mx.float16, mx.bfloat16))
    return itertools.product((2**bits - 1, 2**bits - 2), (0, -1, 1), stored)


def _lie_on(
    units: Array, which: Array, grid: tuple[Array, Array], bits: int, dtype: mx.Dtype
) -> Array:
    """True if the units at the indices `which` lie on their grids, of scales and biases."""

    def reproduced(part: Array, scale: Array, bias: Array) -> Array:
        return reproduces_affine(part, _codes(part, scale, bias, bits), scale, bias, dtype)

    # A few weights of each unit tell most of the wrong grids.
    same = reproduced(units[which, :16], *grid)
    same[same] = reproduced(units[which[same]], *(part[same] for part in grid))
    return same


def _codes(units: Array, scale: Array, bias: Array, bits: int) -> Array:
    return affine_codes(units, scale[:, None], bias[:, None], bits).astype(np.float32)


def no_grids(count: int) -> AffineGrids:
    """Units of which none lies on a grid."""
    return AffineGrids(
        np.zeros(count, np.float32), np.zeros(count, np.float32), np.zeros(count, bool)
    )


def any_grids(units: Array, centers: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Grids with any positive scale and any bias that weights lie on, the finest there are.

    Args:
        units: (U, L) float32.
        centers: (U,), which lie near the middle of the codes: where a unit has fewer levels than there are
            codes, this is what tells which codes they are.
        bits: 2, 4 or 8. With no more digits than that, `dtype` can't tell levels apart, and no grid is found.
        dtype: type that the weights were rounded to.
    """
    result = no_grids(len(units))
    low, high = units.min(axis=1), units.max(axis=1)
    flat = low == high
    result.biases[flat] = low[flat]
    result.found[flat] = True
    if digits(dtype) <= bits:
        return result
    left, top = np.flatnonzero(~flat), 2**bits - 1
    part, slack = _along_range(units[left, :16], low[left], high[left], dtype)
    few, few_slack = (np.ascontiguousarray(array[:, :3]) for array in (part, slack))
    for steps in range(top, 0, -1):
        near = np.flatnonzero(_whole(few, few_slack, steps))
        near = near[~result.found[left[near]]]
        near = near[_whole(part[near], slack[near], steps)]
        if not len(near):
            continue
        which = left[near]
        scale, bias, fits = _fit(units[which], low[which], high[which], steps, dtype)
        which, scale, bias = which[fits], scale[fits], bias[fits]
        # Codes below the unit's lowest: as many as put its center into the middle.
        below = np.rint((low[which] - centers[which]) / scale + np.float32(top / 2))
        below = np.clip(below, 0, top - steps)
        result.scales[which] = scale
        result.biases[which] = bias - below * scale
        result.found[which] = True
        rest = ~result.found[left]
        if rest.mean() < _SHARE_LEFT:
            left, part, slack = left[rest], part[rest], slack[rest]
            few, few_slack = few[rest], few_slack[rest]
        if not len(left):
            break
    return result


def _along_range(units: Array, low: Array, high: Array, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Weights (U, S) as shares of their unit's range, and how far rounding may have moved these."""
    width = (high - low)[:, None]
    share = (units - low[:, None]) / width
    ends = np.maximum(np.abs(low), np.abs(high))[:, None]
    moved = (np.abs(units) + ends) * np.float32(2.0 ** -digits(dtype)) + np.float32(
        _SMALLEST.get(dtype, 0)
    )
    return share, moved / width + np.float32(2.0**-21)


def _whole(share: Array, slack: Array, steps: int) -> Array:
    """Which units may lie on a grid of so many steps."""
    place = share * np.float32(steps)
    return np.asarray((np.abs(place - np.rint(place)) <= slack * np.float32(steps)).all(axis=1))


def _half_places(units: Array, dtype: mx.Dtype) -> tuple[Array, Array]:
    """How far below weights and above them the numbers lie that rounding to `dtype` makes these weights."""
    magnitude = np.abs(units)
    power = (magnitude.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    away = power * np.float32(2.0 ** -digits(dtype))
    inward = np.where(magnitude == power, away / 2, away)  # numbers lie closer below a power of two
    least = np.float32(_SMALLEST.get(dtype, 0) / 2)
    away, inward = np.maximum(away, least), np.maximum(inward, least)
    return np.where(units > 0, inward, away), np.where(units > 0, away, inward)


# -- a line through intervals


def _fit(
    units: Array, low: Array, high: Array, steps: int, dtype: mx.Dtype
) -> tuple[Array, Array, Array]:
    """Scales and biases (U,) under which codes 0 to `steps` round to the weights, and whether there are any.

    A bias that suits a scale s is at least all `weight - half - s * code`, and at most all `weight + half - s *
    code`. How far these bounds are apart is a concave function of s, whose tangents at both sides of its
    maximum meet above it: the next s is where they meet, until the bounds are half as far apart as there,
    or can't be in order.
    """
    width = (high - low).astype(np.float64)
    codes = np.rint((units - low[:, None]) * (np.float32(steps) / (high - low))[:, None])
    upper, lower = _intervals(units, low, high, dtype)
    scale = width / steps
    apart, _, bias = _bounds(upper, lower, codes, scale)
    reach = 2 * (upper - lower).max(axis=1) / steps
    open_ = np.flatnonzero(apart < (upper - lower).min(axis=1) / 4)
    ends = []
    for side in (-1, 1):
        at = scale[open_] + side * reach[open_]
        gap, slope, _ = _bounds(upper[open_], lower[open_], codes[open_], at)
        ends.append([at, gap, slope])
    for _ in range(_FIT_STEPS):
        (a, gap_a, slope_a), (c, gap_c, slope_c) = ends
        with np.errstate(divide="ignore", invalid="ignore"):
            at = (gap_c - gap_a + slope_a * a - slope_c * c) / (slope_a - slope_c)
            most = gap_a + slope_a * (at - a)
            live = (slope_a > slope_c) & (at >= a) & (at <= c) & (most >= 0)
        open_, at, most = open_[live], at[live], most[live]
        ends = [[part[live] for part in end] for end in ends]
        if not len(open_):
            break
        gap, slope, middle = _bounds(upper[open_], lower[open_], codes[open_], at)
        better = gap > apart[open_]
        for kept, new in ((scale, at), (bias, middle), (apart, gap)):
            kept[open_[better]] = new[better]
        for end, moves in zip(ends, (slope > 0, slope <= 0), strict=True):
            for part, new in zip(end, (at, gap, slope), strict=True):
                part[moves] = new[moves]
        rest = (gap < most / 2) | (gap < 0)
        open_ = open_[rest]
        ends = [[part[rest] for part in end] for end in ends]
    return scale.astype(np.float32), bias.astype(np.float32), apart >= 0


def _intervals(units: Array, low: Array, high: Array, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Upper and lower ends, float64, of the numbers that are these weights when they are rounded to `dtype`.

    The numbers were computed in float32, from terms as large as the ends of their unit.
    """
    below, above = _half_places(units, dtype)
    largest = np.maximum(np.maximum(np.abs(low), np.abs(high)), high - low)
    computed = (largest * np.float32(2.0**-23)).astype(np.float64)[:, None]
    return units + above + computed, units - below - computed


def _bounds(upper: Array, lower: Array, codes: Array, scale: Array) -> tuple[Array, Array, Array]:
    """How far apart the bounds of the bias are under scales (U,), the slope of that, and their middle."""
    levels = codes * scale[:, None]
    above, below = upper - levels, lower - levels
    top, bottom = above.argmin(axis=1), below.argmax(axis=1)
    each = np.arange(len(codes))
    most, least = above[each, top], below[each, bottom]
    return most - least, codes[each, bottom] - codes[each, top], (most + least) / 2
