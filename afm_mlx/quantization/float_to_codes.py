"""Float matrices to codes: the codes of the grid that the weights are on, or the nearest ones.

Weights that are on a grid (after quantization-aware training, or in a checkpoint that was dequantized) get its
codes back. A balanced scale and a palette are accepted if their numbers equal the weights in their own dtype;
affine scales and biases if the numbers are within rounding of the weights (`grids.py`). Without a grid, a
balanced scale minimizes the squared error, an affine group is packed by `mx.quantize`, and a palette is the 1-D
k-means of its weights. A unit of few levels is on several grids: it keeps its numbers, and gets the codes of
the finest.

Matrices are read in blocks of rows, so that one larger than memory can be packed. All is NumPy, and
deterministic.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.errors import CheckpointError
from afm_mlx.kernels import PackedWeight
from afm_mlx.quantization.grids import (
    AffineGrids,
    Array,
    affine_codes,
    any_grids,
    balanced_codes,
    fit_scales,
    grid_scales,
    k_means,
    mlx_codes,
    nearest_entries,
    pack_words,
    reproduces,
    round_to,
    scale_bounds,
)

if TYPE_CHECKING:
    from afm_mlx.quantization.rule import QuantizationRule

_BLOCK_ELEMENTS = 4 << 20
_SAMPLE_ELEMENTS = 1 << 20
_ROWS_OF_SAMPLE = 16
_UNITS_OF_SAMPLE = 256


@dataclass(frozen=True)
class Rows:
    """A float matrix (N, K) that is read in blocks of rows, as float32, and exact in `dtype`."""

    shape: tuple[int, int]
    dtype: mx.Dtype
    read: Callable[[int, int], Array]
    name: str = "the matrix"

    @classmethod
    def of(cls, array: mx.array, name: str = "the matrix") -> Rows:
        """Make rows of an array in memory; raise `CheckpointError` if it is no float matrix."""
        if array.ndim != 2 or not mx.issubdtype(array.dtype, mx.floating):
            raise CheckpointError(
                f"{name}: the weight is {array.dtype} of shape {list(array.shape)}; a float matrix [N, K] is "
                "needed."
            )

        def read(start: int, stop: int) -> Array:
            return np.array(array[start:stop].astype(mx.float32))

        return cls(tuple(array.shape), array.dtype, read, name)

    def rounded(self, dtype: mx.Dtype) -> Rows:

        def read(start: int, stop: int) -> Array:
            return round_to(self.read(start, stop), dtype)

        return self if dtype == self.dtype else Rows(self.shape, dtype, read, self.name)

    def blocks(self, multiple: int = 1) -> Iterator[tuple[int, int, Array]]:
        """Yield start, stop and rows of blocks of at most 4 million numbers, whose height is a `multiple`.

        Raises:
            CheckpointError: on NaN and infinity.
        """
        height = max(1, _BLOCK_ELEMENTS // self.shape[1] // multiple) * multiple
        for start in range(0, self.shape[0], height):
            stop = min(start + height, self.shape[0])
            rows = self.read(start, stop)
            if not np.isfinite(rows).all():
                raise CheckpointError(
                    f"{self.name} holds NaN or infinity: the checkpoint is damaged, or its training diverged."
                )
            yield start, stop, rows

    def sample(self) -> Array:
        """Return (S, K) rows at equal distances; all rows of a small matrix."""
        count = max(1, _SAMPLE_ELEMENTS // self.shape[1])
        step = -(-self.shape[0] // count)
        if step == 1:
            return self.read(0, self.shape[0])
        starts = range(0, self.shape[0], step)
        return np.concatenate([self.read(start, start + 1) for start in starts])


class Packing(NamedTuple):
    """A packed matrix; `exact` is True if the weights were on a grid, and the codes are on the same one."""

    packed: PackedWeight
    exact: bool


def pack(weight: mx.array | Rows, rule: QuantizationRule, *, name: str = "the matrix") -> Packing:
    """Pack a float matrix (N, K).

    Raises:
        CheckpointError, ConfigError: name the layer: shapes that don't pack, groups that don't divide, NaN
            and infinity.
    """
    rows = weight if isinstance(weight, Rows) else Rows.of(weight, name)
    rule.check(rows.shape, rows.name)
    if rule.mode == "palette":
        return _pack_palette(rows, rule)
    if rule.mode == "affine":
        return _pack_affine(rows, rule)
    return _pack_balanced(rows, rule)


# -- balanced


def _pack_balanced(rows: Rows, rule: QuantizationRule) -> Packing:
    if rule.granularity == "tensor":
        scales, exact = _tensor_scale(rows, rule.bits)
        words, _ = _pack_units(rows, rule, lambda u: (balanced_codes(u, scales, rule.bits), []))
    else:

        def encode(units: Array) -> tuple[Array, list[Array]]:
            scales, exact = grid_scales(units, rule.bits, rows.dtype)
            if not exact.all():
                scales[~exact] = fit_scales(units[~exact], rule.bits)
            return balanced_codes(units, scales[:, None], rule.bits), [exact, scales]

        words, (found, scales) = _pack_units(rows, rule, encode)
        exact = bool(found.all())
    return Packing(PackedWeight(mx.array(words), rule.bits, "balanced", mx.array(scales)), exact)


def _tensor_scale(rows: Rows, bits: int) -> tuple[Array, bool]:
    """Return one balanced scale for a whole matrix, and True if every weight is on its grid."""
    sample = rows.sample().reshape(1, -1)
    scale, exact = grid_scales(sample, bits, rows.dtype)
    if not exact[0]:
        return fit_scales(sample, bits)[0], False
    low, high, whole = np.float64(0), np.float64(np.inf), True
    for _, _, block in rows.blocks():
        whole = whole and bool(reproduces(block, scale, bits, rows.dtype).all())
        if scale[0] > 0:
            bounds = scale_bounds(block, scale, bits, rows.dtype)
            low, high = max(low, bounds[0].max()), min(high, bounds[1].min())
    if whole:
        return scale[0], True
    middle = np.asarray((low + high) / 2, np.float32)
    if low <= high and all(
        reproduces(block, middle, bits, rows.dtype).all() for _, _, block in rows.blocks()
    ):
        return middle, True
    return fit_scales(sample, bits)[0], False


# -- affine


def _pack_affine(rows: Rows, rule: QuantizationRule) -> Packing:
    dtype = rows.dtype if rule.is_mlx_format else mx.float32
    first = rows.read(0, 1).reshape(-1, rule.group_size or rows.shape[1])
    if grid_scales(first, rule.bits, rows.dtype)[1].all():
        # Biases of a balanced grid are half a step from where `mx.quantize` may have them.
        balanced, exact = _pack_balanced(rows, dataclasses.replace(rule, mode="balanced"))
        if exact:
            scales = np.array(balanced.scales)
            biases = -np.float32((2**rule.bits - 1) / 2) * scales
            return Packing(_affine(balanced.codes, rule, scales, biases, dtype), True)
    if rule.granularity == "tensor":
        return _pack_affine_tensor(rows, rule)
    search = _sample_is_on_grid(rows, rule)

    def encode(units: Array) -> tuple[Array, list[Array]]:
        codes, grids = _affine_units(units, rule, rows.dtype, search)
        return codes, [*grids]

    words, (scales, biases, found) = _pack_units(rows, rule, encode)
    packed = _affine(mx.array(words), rule, scales, biases, dtype)
    return Packing(packed, bool(found.all()))


def _affine_units(
    units: Array, rule: QuantizationRule, dtype: mx.Dtype, search: bool
) -> tuple[Array, AffineGrids]:
    """Return codes of units (U, L) and their grids, on which the weights are if one is found by `search`."""
    if rule.is_mlx_format:
        return mlx_codes(units, rule.bits, dtype, search)
    centers = units.mean(axis=1)
    grids = any_grids(units, centers, rule.bits, dtype) if search else AffineGrids.none(len(units))
    left = ~grids.found
    if left.any():
        scales = fit_scales(units[left] - centers[left, None], rule.bits)
        grids.scales[left] = scales
        grids.biases[left] = centers[left] - np.float32((2**rule.bits - 1) / 2) * scales
    codes = affine_codes(units, grids.scales[:, None], grids.biases[:, None], rule.bits)
    return codes, grids


def _pack_affine_tensor(rows: Rows, rule: QuantizationRule) -> Packing:
    """Pack with one scale and bias; a grid is searched among the distinct weights."""
    sample = rows.sample().reshape(1, -1)
    distinct, found = _distinct(rows, 2**rule.bits), np.zeros(1, bool)
    if distinct is not None:
        grids = any_grids(distinct[None], sample.mean(axis=1), rule.bits, rows.dtype)
        found = grids.found
    if not found:
        _, grids = _affine_units(sample, rule, rows.dtype, False)
    scale, bias = grids.scales[0], grids.biases[0]
    words, _ = _pack_units(rows, rule, lambda u: (affine_codes(u, scale, bias, rule.bits), []))
    return Packing(_affine(mx.array(words), rule, scale, bias, mx.float32), bool(found))


def _distinct(rows: Rows, most: int) -> Array | None:
    """Return the distinct weights of a matrix, ascending; None if there are more than `most` of them."""
    distinct = np.empty(0, np.float32)
    # The first row alone rules out nearly every matrix that has more.
    for block in itertools.chain([rows.read(0, 1)], (block for _, _, block in rows.blocks())):
        distinct = np.union1d(distinct, block)
        if len(distinct) > most:
            return None
    return distinct


def _sample_is_on_grid(rows: Rows, rule: QuantizationRule) -> bool:
    """True if a group, or a row without groups, of a few sampled rows is on an affine grid.

    A matrix is on grids as a whole or not at all.
    """
    step = -(-rows.shape[0] // _ROWS_OF_SAMPLE)
    sample = [rows.read(start, start + 1) for start in range(0, rows.shape[0], step)]
    units = np.concatenate(sample).reshape(-1, rule.group_size or rows.shape[1])
    units = units[:: -(-len(units) // _UNITS_OF_SAMPLE)]
    # A constant is on any grid; numbers that are not finite are an error later.
    units = units[np.isfinite(units).all(axis=1) & (units != units[:, :1]).any(axis=1)]
    _, grids = _affine_units(units, rule, rows.dtype, True)
    return bool(grids.found.any())


def _affine(
    codes: mx.array, rule: QuantizationRule, scales: Array, biases: Array, dtype: mx.Dtype
) -> PackedWeight:
    parts = (mx.array(part).astype(dtype) for part in (scales, biases))
    return PackedWeight(codes, rule.bits, "affine", *parts)


# -- palette


def _pack_palette(rows: Rows, rule: QuantizationRule) -> Packing:
    count, entries = rule.part_shapes(rows.shape)["table"]
    per_table = rows.shape[0] // count
    words = np.empty(rule.part_shapes(rows.shape)["weight"], np.uint32)
    tables, exact = np.empty((count, entries), np.float32), True
    if (
        count == 1
    ):  # the distinct weights of the whole matrix if they are few, else k-means of a sample
        tables[:], fits = k_means(rows.sample().reshape(1, -1), entries)
        distinct = _distinct(rows, entries) if fits[0] else None
        exact = distinct is not None
        if distinct is not None:
            tables[0] = np.pad(distinct, (0, entries - len(distinct)), mode="edge")
        per_table = 1  # blocks of any height
    for start, stop, block in rows.blocks(per_table):
        if count == 1:
            own = slice(0, 1)
        else:
            own = slice(start // per_table, stop // per_table)
            tables[own], found = k_means(block.reshape(own.stop - own.start, -1), entries)
            exact = exact and bool(found.all())
        codes = nearest_entries(block.reshape(own.stop - own.start, -1), tables[own])
        words[start:stop] = pack_words(codes.reshape(block.shape), rule.bits)
    packed = PackedWeight(mx.array(words), rule.bits, "palette", table=mx.array(tables))
    return Packing(packed, exact)


# -- blocks


def _pack_units(
    rows: Rows, rule: QuantizationRule, encode: Callable[[Array], tuple[Array, list[Array]]]
) -> tuple[Array, list[Array]]:
    """Pack a matrix block by block; `encode` maps units to their codes and to arrays with an entry per unit.

    Returns the packed words, and the arrays in the shape of the scales.
    """
    shapes = rule.part_shapes(rows.shape)
    words, blocks = np.empty(shapes["weight"], np.uint32), []
    for start, stop, block in rows.blocks():
        codes, parts = encode(block.reshape(-1, rule.group_size or block.shape[1]))
        words[start:stop] = pack_words(codes.reshape(block.shape), rule.bits)
        blocks.append(parts)
    joined = [np.concatenate(p).reshape(shapes["scales"]) for p in zip(*blocks, strict=True)]
    return words, joined
