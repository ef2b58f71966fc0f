"""Float weights to codes, in NumPy: the grid that they are on, or the best one for them, and packed words.

All weights that share a scale or a table are a *unit*: a group, a row, or a tensor. Functions take many units
at once, as (U, L) float32 with one unit per row. Weights are on a grid after quantization-aware training, and
in checkpoints that were dequantized. Three kinds of grid are searched:

- balanced, `scale * (code - (2**bits - 1) / 2)`: the largest weight over each of its possible levels;
- of `mx.quantize`, `scale * code + bias`, whose bias is the weight of largest magnitude;
- affine with any bias: every number of steps in the range, from the finest grid on, and a line through the
  weights over their codes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import unpack_codes

Array: TypeAlias = np.ndarray[Any, Any]

# Step of the uniform quantizer with the least squared error of a normal distribution, in deviations.
# Source: J. Max, "Quantizing for minimum distortion", 1960, table II; 8 bits computed likewise.
_NORMAL_STEP = {2: 0.9957, 4: 0.3352, 8: 0.0308}
_LEVELS_TRIED = 24
_LLOYD_STEPS = 40
_BINS = 128
_SAMPLE = 1 << 18
# Distance of float16's numbers below 2**-14; the other types reach further.
_SMALLEST = {mx.float16: 2.0**-24}
_BISECTIONS = 24
_NEARLY_WHOLE = 0.1
_SHARE_LEFT = 0.75  # of the searched units: with fewer left, the search goes on with these alone


def digits(dtype: mx.Dtype) -> int:
    return {mx.bfloat16: 8, mx.float16: 11}.get(dtype, 24)


def round_to(values: Array, dtype: mx.Dtype) -> Array:
    """Round float32 numbers to those that `dtype` holds; returns float32."""
    if dtype == mx.float32:
        return values
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


# -- balanced


def grid_scales(units: Array, bits: int, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Find balanced grids that weights (U, L) float32 are on, which were rounded to `dtype`.

    Returns scales (U,) float32, and (U,) bool, True for those that give the weights back bit for bit; others
    are 0.
    """
    scales = np.zeros(len(units), np.float32)
    exact = np.asarray(~units.any(axis=1))  # a unit of zeros is on the grid of scale 0
    # Units in which a few weights have more magnitudes than a grid has levels are on none.
    sample = np.sort(np.abs(units[:, : 4 << bits]), axis=1)
    magnitudes = 1 + (sample[:, 1:] != sample[:, :-1]).sum(axis=1)
    left = np.flatnonzero(~exact & (magnitudes <= 1 << (bits - 1)))
    top, largest = (2**bits - 1) / 2, np.abs(units).max(axis=1)
    # Where the type has too few digits for that many levels, a few weights rule out most wrong scales.
    tried = 1 << (bits - 1) if digits(dtype) > bits else _LEVELS_TRIED
    slack = np.float32(2.0 ** (2 - digits(dtype)))
    for below in range(tried):
        if not len(left):
            break
        # As if the largest weight were on the top level, on the one below, ...
        estimate = largest[left] / np.float32(top - below)
        likely = np.arange(len(left))
        for few in (4, 16):
            # As near to the scale's levels as rounding would leave the weights.
            part = units[left[likely], :few]
            off = np.abs(balanced_values(part, estimate[likely, None], bits) - part)
            likely = likely[(off <= slack * np.abs(part)).all(axis=1)]
        _accept(units, left[likely], estimate[likely], (scales, exact), bits, dtype)
        left = left[~exact[left]]
    return scales, exact


def _accept(
    units: Array,
    likely: Array,
    estimate: Array,
    found: tuple[Array, Array],
    bits: int,
    dtype: mx.Dtype,
) -> None:
    """Find scales for the units at the indices `likely`, near an `estimate` for each, that reproduce them.

    They are written into `found`, the result of `grid_scales`. Cheap candidates come first.
    """

    def middle(step: int) -> Callable[[Array, Array], Array]:
        return lambda part, estimate: _middle_scale(part, estimate, bits, dtype, step)

    def lowest_level(part: Array, estimate: Array) -> Array:
        return 2 * np.abs(part).min(axis=1)  # exact where a weight is on a lowest level

    scales, exact = found
    candidates = (lambda part, estimate: estimate, lowest_level, middle(0), middle(-1), middle(1))
    for candidate in candidates:
        if not len(likely):
            return
        part = units[likely]
        scale = candidate(part, estimate)
        hit = reproduces(part, scale[:, None], bits, dtype).all(axis=1)
        scales[likely[hit]] = scale[hit]
        exact[likely[hit]] = True
        likely, estimate = likely[~hit], estimate[~hit]


def _middle_scale(units: Array, estimate: Array, bits: int, dtype: mx.Dtype, step: int) -> Array:
    """Return the middle of all scales near an estimate under which each weight is rounded to itself.

    If there is only one such float32, the middle may be its neighbour, because the bounds are exact: `step` -1
    and 1 take the floats next to the middle.
    """
    for _ in range(8 if digits(dtype) <= bits else 1):  # settles in one to four
        estimate = _least_squares(units, estimate, bits)
    low, high = scale_bounds(units, estimate[:, None], bits, dtype)
    middle = ((low.max(axis=1) + high.min(axis=1)) / 2).astype(np.float32)
    return np.nextafter(middle, np.float32(step * np.inf)) if step else middle


def scale_bounds(units: Array, scale: Array, bits: int, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Return the smallest and the largest scale, float64, under which each weight is rounded to itself."""
    levels = np.abs(_levels(units, scale, bits))
    magnitudes = np.abs(units).astype(np.float64)
    fraction, exponent = np.frexp(magnitudes)
    half_step = np.ldexp(1.0, exponent - digits(dtype) - 1)
    # Below a power of two, numbers are twice as close.
    below = np.where(fraction == 0.5, half_step / 2, half_step)
    return (magnitudes - below) / levels, (magnitudes + half_step) / levels


def reproduces(units: Array, scale: Array, bits: int, dtype: mx.Dtype) -> Array:
    """Return True for each weight that its nearest code gives back bit for bit, in the weight's dtype.

    `units` are the weights themselves, undivided; `scale` broadcasts to their shape.
    """
    return round_to(balanced_values(units, scale, bits), dtype) == units


def balanced_codes(units: Array, scale: Array, bits: int) -> Array:
    """Return the nearest codes, uint8; a scale broadcasts to its weights."""
    return (_levels(units, scale, bits) + np.float32((2**bits - 1) / 2)).astype(np.uint8)


def balanced_values(units: Array, scale: Array, bits: int) -> Array:
    """Return the grid's nearest numbers, computed in float32 as `kernels.dequantize` does."""
    levels = _levels(units, scale, bits)
    levels *= scale
    return levels


def _levels(units: Array, scale: Array, bits: int) -> Array:
    """Return the nearest of `code - (2**bits - 1) / 2`, float32; the lower middle one if the scale is 0."""
    scale = np.asarray(scale, np.float32)
    steps = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    middle = np.float32((2**bits - 1) / 2)
    levels = units * steps
    levels += middle
    np.rint(levels, out=levels)
    np.clip(levels, 0, 2**bits - 1, out=levels)
    levels -= middle
    return levels


def fit_scales(units: Array, bits: int) -> Array:
    """Return scales (U,) of balanced grids near the least squared error of weights (U, L).

    A dozen scales, from the best one for normal weights to the one that reaches the largest weight, are tried
    on a sample of each unit. Then codes and scale are fitted to each other twice on all weights.
    """
    stride = -(-units.shape[1] // max(1024 if bits == 8 else 512, _SAMPLE // len(units)))
    sample = units[:, ::stride]
    largest = np.abs(units).max(axis=1) / np.float32((2**bits - 1) / 2)
    largest = np.maximum(largest, np.finfo(np.float32).tiny)
    normal = np.sqrt(np.square(units).mean(axis=1)) * np.float32(_NORMAL_STEP[bits] * 0.7)
    first = np.clip(normal, np.finfo(np.float32).tiny, largest)
    best, least = largest, np.full(len(units), np.inf)
    for share in np.linspace(0, 1, 12, dtype=np.float32):
        scale = (first ** (1 - share) * largest**share).astype(np.float32)
        error = np.square(balanced_values(sample, scale[:, None], bits) - sample).sum(axis=1)
        best, least = np.where(error < least, scale, best), np.minimum(error, least)
    for _ in range(2):
        best = _least_squares(units, best, bits)
    return best


def _least_squares(units: Array, scales: Array, bits: int) -> Array:
    """Return scales (U,) of least squared error for the codes that weights have under the given scales."""
    levels = _levels(units, scales[:, None], bits)
    fitted = np.einsum("ul,ul->u", units, levels) / np.einsum("ul,ul->u", levels, levels)
    return np.maximum(fitted, np.finfo(np.float32).tiny)


# -- affine


class AffineGrids(NamedTuple):
    """Affine grids of units: scales and biases (U,) float32, and `found` (U,), True for units on their grid."""

    scales: Array
    biases: Array
    found: Array

    @classmethod
    def none(cls, count: int) -> AffineGrids:
        return cls(np.zeros(count, np.float32), np.zeros(count, np.float32), np.zeros(count, bool))


def affine_codes(units: Array, scale: Array, bias: Array, bits: int) -> Array:
    """Return the nearest codes of `scale * code + bias`, uint8; scale and bias broadcast to the weights."""
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale != 0, (units - bias) / scale, np.float32(0))
    return np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8)


def mlx_codes(units: Array, bits: int, dtype: mx.Dtype, search: bool) -> tuple[Array, AffineGrids]:
    """Return groups in MLX's own format: codes (U, L) uint8, scales and biases.

    Groups that are on a grid get its codes; `mx.quantize` packs the others, and all unless `search`. Applied
    to its own numbers, `mx.quantize` stretches the grid over both ends: about every sixth group changes.
    """
    words, *parts = mx.quantize(mx.array(units).astype(dtype), units.shape[1], bits)
    codes = np.array(unpack_codes(words, bits))
    scales, biases = (np.array(part.astype(mx.float32)).reshape(-1) for part in parts)
    if not search:
        return codes, AffineGrids(scales, biases, np.zeros(len(units), bool))
    found = _reproduces_affine(units, codes, scales, biases, dtype)
    for search_grids in (mlx_grids, _stored_grids):
        left = np.flatnonzero(~found)
        grids = search_grids(units[left], bits, dtype)
        left = left[grids.found]
        scales[left] = round_to(grids.scales[grids.found], dtype)
        biases[left] = round_to(grids.biases[grids.found], dtype)
        codes[left] = affine_codes(units[left], scales[left, None], biases[left, None], bits)
        found[left] = True
    return codes, AffineGrids(scales, biases, found)


def mlx_grids(units: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Find grids of `mx.quantize` that weights (U, L) float32 are on, which were rounded to `dtype`.

    `mx.quantize` gives code 0 to a group's weight of largest magnitude, which is the bias, and divides it by a
    whole number for the scale. The other end of the group has the last code or the one before it. Scales that
    may have been taken, of any type, are tried; one is accepted if it gives all weights back bit for bit.
    """
    result = AffineGrids.none(len(units))
    low, high = units.min(axis=1), units.max(axis=1)
    from_low = np.abs(low) > np.abs(high)
    edge, other = np.where(from_low, low, high), np.where(from_low, high, low)
    # Rounding may have changed which of two ends has the larger magnitude.
    even = np.abs(low + high) <= np.abs(edge) * np.float32(2.0 ** (3 - digits(dtype)))
    stored_types = dict.fromkeys((dtype, mx.float32, mx.float16, mx.bfloat16))
    # Steps from end to end; an error of the whole number, because the other end is rounded; the scale's type.
    candidates = [*itertools.product((2**bits - 1, 2**bits - 2), (0, -1, 1), stored_types)]
    for first, last, which in ((edge, other, low != high), (other, edge, even & (low != high))):
        left = np.flatnonzero(which & ~result.found)
        for steps, off, kind in candidates:
            if not len(left):
                break
            bias = first[left]
            whole = np.rint(bias / ((last[left] - bias) / np.float32(steps))) + np.float32(off)
            scale = round_to(bias / np.where(whole == 0, np.float32(1), whole), kind)
            same = np.ones(len(left), bool)
            for width in (16, None):  # a few weights of each unit rule out most of the wrong grids
                part = units[left[same], :width]
                codes = affine_codes(part, scale[same, None], bias[same, None], bits)
                same[same] = _reproduces_affine(part, codes, scale[same], bias[same], dtype)
            result.scales[left[same]], result.biases[left[same]] = scale[same], bias[same]
            result.found[left[same]] = True
            left = left[~same]
    return result


def _reproduces_affine(
    units: Array, codes: Array, scale: Array, bias: Array, dtype: mx.Dtype
) -> Array:
    """Return (U,), True for units that codes (U, L) under scales and biases (U,) give back bit for bit."""
    products = codes.astype(np.float32) * scale[:, None]
    bias = bias[:, None]
    same = (round_to(products + bias, dtype) == units).all(axis=1)
    if dtype != mx.float32 and not same.all():
        rounded = round_to(products[~same], dtype) + bias[~same]
        same[~same] = (round_to(rounded, dtype) == units[~same]).all(axis=1)
    return same


def _stored_grids(units: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Find grids with any bias whose codes stay the same under scales and biases rounded to `dtype`.

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
    before, after = (
        affine_codes(units, scale[:, None], bias[:, None], bits)
        for scale, bias in ((scales, biases), stored)
    )
    return AffineGrids(*stored, found & (before == after).all(axis=1))


def any_grids(units: Array, centers: Array, bits: int, dtype: mx.Dtype) -> AffineGrids:
    """Find grids with any positive scale and any bias that weights (U, L) float32 are on, the finest ones.

    `centers` (U,) are numbers near the middle of the codes. Where a unit has fewer levels than there are
    codes, they decide which codes the levels get. If `dtype`, to which weights were rounded, has no more
    digits than `bits`, its numbers can't tell levels apart, and only constant units are found.
    """
    result = AffineGrids.none(len(units))
    low, high = units.min(axis=1), units.max(axis=1)
    flat = low == high
    result.biases[flat], result.found[flat] = low[flat], True
    if digits(dtype) <= bits:
        return result
    left, top = np.flatnonzero(~flat), 2**bits - 1
    # Where weights are in their unit's range, 0 to 1, and how far rounding may have moved them.
    part, width = units[left, :16], (high - low)[left, None]
    ends = np.maximum(np.abs(low), np.abs(high))[left, None]
    moved = (np.abs(part) + ends) * np.float32(2.0 ** -digits(dtype))
    moved += np.float32(_SMALLEST.get(dtype, 0))
    share, slack = (part - low[left, None]) / width, moved / width + np.float32(2.0**-21)
    few, few_slack = (np.ascontiguousarray(array[:, :3]) for array in (share, slack))
    for steps in range(top, 0, -1):
        near = np.flatnonzero(_are_whole(few, few_slack, steps) & ~result.found[left])
        near = near[_are_whole(share[near], slack[near], steps)]
        if not len(near):
            continue
        which = left[near]
        scale, bias, fits = _fit_line(units[which], low[which], high[which], steps, dtype)
        which, scale, bias = which[fits], scale[fits], bias[fits]
        # Codes below the unit's lowest: as many as put its center into the middle.
        below = np.rint((low[which] - centers[which]) / scale + np.float32(top / 2))
        below = np.clip(below, 0, top - steps)
        result.scales[which], result.biases[which] = scale, bias - below * scale
        result.found[which] = True
        rest = ~result.found[left]
        if rest.mean() < _SHARE_LEFT:
            left, share, slack = left[rest], share[rest], slack[rest]
            few, few_slack = few[rest], few_slack[rest]
        if not len(left):
            break
    return result


def _are_whole(share: Array, slack: Array, steps: int) -> Array:
    """Return (U,), True for units whose weights may all be whole numbers of `steps` equal steps of the range.

    `share` (U, L) is each weight's share of the range from the lowest one, and `slack` its rounding error.
    """
    place = share * np.float32(steps)
    return np.asarray((np.abs(place - np.rint(place)) <= slack * np.float32(steps)).all(axis=1))


def _fit_line(
    units: Array, low: Array, high: Array, steps: int, dtype: mx.Dtype
) -> tuple[Array, Array, Array]:
    """Find a scale and a bias for each unit with which codes 0 to `steps` reproduce its weights.

    Under a scale s, a bias has to be at least every `lower - s * code` and at most every `upper - s * code`,
    where `lower` to `upper` are the numbers that round to a weight. The gap between these two bounds is a
    concave function of s. Its maximum is bisected by the sign of its slope, until 2/3 of it are reached, or it
    is known to be below 0. Returns scales and biases (U,), and True (U,) where all weights come back.
    """
    codes = np.rint((units - low[:, None]) * (np.float32(steps) / (high - low))[:, None])
    upper, lower = _roundable(units, low, high, dtype)
    scale = (high - low).astype(np.float64) / steps
    bias, widest = np.zeros(len(units)), np.full(len(units), -np.inf)
    reach = 2 * (upper - lower).max(axis=1) / steps
    left, right, enough = scale - reach, scale + reach, (upper - lower).min(axis=1) / 4
    rows = np.arange(len(units))
    for _ in range(_BISECTIONS):
        at = (left[rows] + right[rows]) / 2
        levels = codes[rows] * at[:, None]
        above, below = upper[rows] - levels, lower[rows] - levels
        each, top, bottom = np.arange(len(rows)), above.argmin(axis=1), below.argmax(axis=1)
        most, least = above[each, top], below[each, bottom]
        gap, rises = most - least, codes[rows, bottom] > codes[rows, top]
        better = gap > widest[rows]
        for kept, new in ((scale, at), (bias, (most + least) / 2), (widest, gap)):
            kept[rows[better]] = new[better]
        left[rows[rises]], right[rows[~rises]] = at[rises], at[~rises]
        # The gap rises by `steps` per unit of the scale at most.
        gain = steps * (right - left)[rows] / 2
        found = widest[rows]
        rows = rows[(found < enough[rows]) & (found < 2 * gain) & (found + gain >= 0)]
        if not len(rows):
            break
    return scale.astype(np.float32), bias.astype(np.float32), widest >= 0


def _roundable(units: Array, low: Array, high: Array, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Return the largest and smallest numbers, float64, that are these weights once rounded to `dtype`."""
    magnitude = np.abs(units)
    power = (magnitude.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    away = power * np.float32(2.0 ** -digits(dtype))
    inward = np.where(magnitude == power, away / 2, away)  # numbers are closer below a power of two
    least = np.float32(_SMALLEST.get(dtype, 0) / 2)
    away, inward = np.maximum(away, least), np.maximum(inward, least)
    largest = np.maximum(np.maximum(np.abs(low), np.abs(high)), high - low)
    computed = (largest * np.float32(2.0**-23)).astype(np.float64)[:, None]
    positive = units > 0
    above, below = np.where(positive, away, inward), np.where(positive, inward, away)
    return units + above + computed, units - below - computed


# -- palette


def k_means(values: Array, entries: int) -> tuple[Array, Array]:
    """Return tables (T, entries) near the least squared error of weights (T, M), one table for each row.

    Lloyd's algorithm on sorted weights; sums of a cluster are differences of running sums. It finds the
    optimum nearest to its start: from equal shares of the weights, 16 entries never reach the tails, which
    costs 20 to 50 % of squared error. So tables of up to 16 entries start at the best clusters of whole bins.

    Returns:
        The tables, ascending, and (T,) bool, True for tables that hold every distinct weight of their row.
    """
    ordered = np.sort(values, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    exact = fresh.sum(axis=1) <= entries
    sums = np.zeros((ordered.shape[0], ordered.shape[1] + 1))
    np.cumsum(ordered, axis=1, out=sums[:, 1:], dtype=np.float64)
    tables = np.empty((len(values), entries), np.float32)
    for i, line in enumerate(ordered):
        if exact[i]:
            distinct = line[fresh[i]]
            tables[i] = np.pad(distinct, (0, entries - len(distinct)), mode="edge")
        else:
            tables[i] = _lloyd(line, sums[i], entries)
    return tables, exact


def _lloyd(ordered: Array, sums: Array, entries: int) -> Array:
    if entries <= 16:
        table = _best_of_bins(ordered, entries)
    else:
        shares = (np.arange(entries) * 2 + 1) * len(ordered) // (2 * entries)
        table = ordered[shares].astype(np.float64)
    for _ in range(_LLOYD_STEPS):
        ends = np.searchsorted(ordered, (table[1:] + table[:-1]) / 2)
        edges = np.concatenate([[0], ends, [len(ordered)]])
        counts = np.diff(edges)
        moved = np.where(counts > 0, np.diff(sums[edges]) / np.maximum(counts, 1), table)
        if np.array_equal(moved, table):
            break
        table = moved
    return table.astype(np.float32)


def _best_of_bins(ordered: Array, entries: int) -> Array:
    """Return the table of least squared error whose clusters end where bins end, by dynamic programming.

    Half of the edges cut the weights into equal shares, and half into equal widths, which follow the tails.
    """
    width = np.linspace(ordered[0], ordered[-1], _BINS // 2 + 1)[1:-1]
    share = np.linspace(0, len(ordered), _BINS // 2 + 1).astype(np.int64)
    edges = np.union1d(share, np.searchsorted(ordered, width))
    values = ordered.astype(np.float64)
    sums = np.concatenate([[0], np.cumsum(values)])[edges]
    squares = np.concatenate([[0], np.cumsum(values * values)])[edges]
    counts = edges - edges[:, None]
    # error[i, j]: the squared error of one entry for the weights between edges i and j.
    error = np.full(counts.shape, np.inf)
    error = np.divide(np.square(sums - sums[:, None]), counts, out=error, where=counts > 0)
    error = np.where(counts > 0, squares - squares[:, None] - error, np.inf)
    least, begins = error[0], []
    for _ in range(entries - 1):
        total = least[:, None] + error
        begins.append(total.argmin(axis=0))
        least = total.min(axis=0)
    cuts = [len(edges) - 1]
    for begin in reversed(begins):
        cuts.append(begin[cuts[-1]])
    ends = np.array([0, *reversed(cuts)])
    return np.diff(sums[ends]) / np.diff(edges[ends])


def nearest_entries(values: Array, tables: Array) -> Array:
    """Return the index of the entry nearest to each weight, (T, M) uint8, for ascending tables (T, entries)."""
    codes = np.zeros(values.shape, np.uint8)
    middles = (tables[:, 1:].astype(np.float64) + tables[:, :-1]) / 2
    for i, (line, limits) in enumerate(zip(values, middles, strict=True)):
        codes[i] = np.searchsorted(limits, line)
    return codes


# -- words


def pack_words(codes: Array, bits: int) -> Array:
    """Pack (N, K) uint8 codes into (N, K * bits / 32) uint32: `kernels.pack_codes` in NumPy."""
    parts = codes.reshape(codes.shape[0], -1, 8 // bits)
    octets = parts[..., 0].copy()
    for i in range(1, 8 // bits):
        octets |= parts[..., i] << np.uint8(i * bits)
    return octets.view("<u4")
