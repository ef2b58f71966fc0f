"""Weights to codes, in NumPy: the grid that weights lie on, the best one where there is none, and words.

A *unit* is what shares a scale or a table; functions take many at once, (U, L) float32 with one unit per row.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
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


# -- balanced


def grid_scales(units: Array, bits: int, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Scales of balanced grids that weights lie on.

    Args:
        units: (U, L) float32, each row with a scale of its own.
        bits: 2, 4 or 8.
        dtype: type that the weights were rounded to.

    Returns:
        scales (U,) float32, and (U,) whether they give the weights back bit for bit; 0 where not.
    """
    scales = np.zeros(len(units), np.float32)
    exact = np.asarray(~units.any(axis=1))  # a row of zeros lies on the grid of scale 0
    left = np.flatnonzero(~exact & _may_be_grid(units, bits))
    top, largest = (2**bits - 1) / 2, np.abs(units).max(axis=1)
    # Where the type has too few digits for that many levels, few weights tell a wrong scale from a right one.
    tried = 1 << (bits - 1) if digits(dtype) > bits else _LEVELS_TRIED
    for below in range(tried):
        if not len(left):
            break
        # As if the largest weight were on the top level, on the one below, ...
        guess = largest[left] / np.float32(top - below)
        likely = np.arange(len(left))
        for few in (4, 16):
            part = units[left[likely], :few]
            likely = likely[_close_to_grid(part, guess[likely, None], bits, dtype)]
        _accept(units, left[likely], guess[likely], (scales, exact), bits, dtype)
        left = left[~exact[left]]
    return scales, exact


def _accept(
    units: Array,
    likely: Array,
    guess: Array,
    found: tuple[Array, Array],
    bits: int,
    dtype: mx.Dtype,
) -> None:
    """Note the scales that reproduce their units; candidates in the order of what they cost."""

    def middle(step: int) -> Callable[[Array, Array], Array]:
        return lambda part, guess: _middle_scale(part, guess, bits, dtype, step)

    def lowest_level(part: Array, guess: Array) -> Array:
        return 2 * np.abs(part).min(axis=1)  # exact where a weight is on a lowest level

    scales, exact = found
    candidates = (lambda part, guess: guess, lowest_level, middle(0), middle(-1), middle(1))
    for candidate in candidates:
        if not len(likely):
            return
        part = units[likely]
        scale = candidate(part, guess)
        hit = reproduces(part, scale[:, None], bits, dtype).all(axis=1)
        scales[likely[hit]] = scale[hit]
        exact[likely[hit]] = True
        likely, guess = likely[~hit], guess[~hit]


def _may_be_grid(units: Array, bits: int) -> Array:
    """False where a few weights already have more magnitudes than a grid has levels."""
    sample = np.sort(np.abs(units[:, : 4 << bits]), axis=1)
    return 1 + (sample[:, 1:] != sample[:, :-1]).sum(axis=1) <= 1 << (bits - 1)


def _close_to_grid(units: Array, scale: Array, bits: int, dtype: mx.Dtype) -> Array:
    """Which units lie as near to a guess's levels as rounding of weights and guess would leave them."""
    values = balanced_values(units, scale, bits)
    slack = np.float32(2.0 ** (2 - digits(dtype)))
    return (np.abs(values - units) <= slack * np.abs(units)).all(axis=1)


def digits(dtype: mx.Dtype) -> int:
    """Binary digits of a float's significand, the leading 1 included."""
    return {mx.bfloat16: 8, mx.float16: 11}.get(dtype, 24)


def _middle_scale(units: Array, guess: Array, bits: int, dtype: mx.Dtype, step: int) -> Array:
    """The middle of all scales under which every weight rounds to what it is, at the codes near a guess.

    Where a single float32 is left of them, the middle may be its neighbour, for bounds are those of exact
    products: `step` -1 and 1 take the floats next to the middle.
    """
    for _ in range(8 if digits(dtype) <= bits else 1):  # settles in one to four
        guess = _least_squares(units, guess, bits)
    low, high = scale_bounds(units, guess[:, None], bits, dtype)
    middle = ((low.max(axis=1) + high.min(axis=1)) / 2).astype(np.float32)
    return np.nextafter(middle, np.float32(step * np.inf)) if step else middle


def scale_bounds(units: Array, scale: Array, bits: int, dtype: mx.Dtype) -> tuple[Array, Array]:
    """Smallest and largest scale that rounds to each weight, in float64."""
    levels = np.abs(_levels(units, scale, bits))
    magnitudes = np.abs(units).astype(np.float64)
    fraction, exponent = np.frexp(magnitudes)
    half_step = np.ldexp(1.0, exponent - digits(dtype) - 1)
    # Below a power of two, numbers lie twice as close.
    below = np.where(fraction == 0.5, half_step / 2, half_step)
    return (magnitudes - below) / levels, (magnitudes + half_step) / levels


def reproduces(units: Array, scale: Array, bits: int, dtype: mx.Dtype) -> Array:
    """Which weights are, in their own dtype, the numbers that their codes stand for."""
    return round_to(balanced_values(units, scale, bits), dtype) == units


def round_to(values: Array, dtype: mx.Dtype) -> Array:
    """float32 numbers rounded to those that `dtype` holds, as float32."""
    if dtype == mx.float32:
        return values
    return np.array(mx.array(values).astype(dtype).astype(mx.float32))


def balanced_codes(units: Array, scale: Array, bits: int) -> Array:
    """Nearest codes, uint8; a scale broadcasts to its weights."""
    return (_levels(units, scale, bits) + np.float32((2**bits - 1) / 2)).astype(np.uint8)


def balanced_values(units: Array, scale: Array, bits: int) -> Array:
    """The grid's points nearest to weights, computed in float32 as `kernels.dequantize` does."""
    levels = _levels(units, scale, bits)
    levels *= scale
    return levels


def _levels(units: Array, scale: Array, bits: int) -> Array:
    """Nearest of `code - (2**bits - 1) / 2`, float32; the lower of the middle two under a scale of 0."""
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
    """Scales (U,) of balanced grids near the least squared error of weights (U, L).

    The best of a dozen steps between that of a normal distribution and that of the largest weight, on a
    sample of each unit; then codes and scale are fitted to each other twice on all weights.
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
    """The scales (U,) that fit weights best at the codes that they have under given ones."""
    levels = _levels(units, scales[:, None], bits)
    fitted = np.einsum("ul,ul->u", units, levels) / np.einsum("ul,ul->u", levels, levels)
    return np.maximum(fitted, np.finfo(np.float32).tiny)


# -- affine


def affine_codes(units: Array, scale: Array, bias: Array, bits: int) -> Array:
    """Nearest codes of `scale * code + bias`, uint8."""
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale != 0, (units - bias) / scale, np.float32(0))
    return np.clip(np.rint(levels), 0, 2**bits - 1).astype(np.uint8)


# -- palette


def k_means(values: Array, entries: int) -> tuple[Array, Array]:
    """Tables (T, entries) near the least squared error of weights (T, M), each table for its own row.

    Lloyd's algorithm on sorted weights; sums of a cluster are differences of running sums. It finds the
    optimum nearest to its start: from equal shares of the weights, 16 entries never reach the tails, which
    costs 20 to 50 % of squared error. So tables of up to 16 entries start at the best clusters of whole bins.

    Returns:
        the tables, ascending, and (T,) whether a table holds all the weights there are.
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
    """The table of least squared error whose clusters end where bins end, by dynamic programming.

    Half of the edges cut the weights into equal shares, and half into equal widths, which follow the tails.
    """
    width = np.linspace(ordered[0], ordered[-1], _BINS // 2 + 1)[1:-1]
    share = np.linspace(0, len(ordered), _BINS // 2 + 1).astype(np.int64)
    edges = np.union1d(share, np.searchsorted(ordered, width))
    values = ordered.astype(np.float64)
    sums = np.concatenate([[0], np.cumsum(values)])[edges]
    squares = np.concatenate([[0], np.cumsum(values * values)])[edges]
    counts = edges - edges[:, None]
    # error[i, j] is that of one entry for the weights between edges i and j.
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
    """Index of the entry nearest to each weight, (T, M) uint8, for ascending tables (T, entries)."""
    codes = np.zeros(values.shape, np.uint8)
    middles = (tables[:, 1:].astype(np.float64) + tables[:, :-1]) / 2
    for i, (line, limits) in enumerate(zip(values, middles, strict=True)):
        codes[i] = np.searchsorted(limits, line)
    return codes


# -- words


def pack_words(codes: Array, bits: int) -> Array:
    """`kernels.pack_codes` in NumPy: (N, K) uint8 to (N, K * bits / 32) uint32."""
    parts = codes.reshape(codes.shape[0], -1, 8 // bits)
    octets = parts[..., 0].copy()
    for i in range(1, 8 // bits):
        octets |= parts[..., i] << np.uint8(i * bits)
    return octets.view("<u4")


# -- affine_grids

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
