"""Adapters for tests of the kernels: their matrices as such, and as the kernels take them."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import BLOCK, LowRank, Part
from tests.tools.compare import exact


class Factors(NamedTuple):
    """One adapter's A (sections, rank, K) and B (N, rank) in float64, and alpha / rank."""

    a: np.ndarray
    b: np.ndarray
    scale: float


class Drawn(NamedTuple):
    """Random adapters: `low_rank` for the kernels, `factors` to know the answer from."""

    low_rank: LowRank
    factors: list[Factors]

    def added(self, x: np.ndarray, magnitudes: bool = False) -> np.ndarray:
        """What they add, (B, ..., N) in float64 for x (B, ..., K); or the magnitudes summed on the way."""
        ends = self.low_rank.sections
        section = np.searchsorted(ends, np.arange(ends[-1]), side="right")
        out = np.zeros((*x.shape[:-1], ends[-1]))
        for row, slot in enumerate(self.low_rank.slots.tolist()):
            if not 0 <= slot < len(self.factors):
                continue
            a, b, scale = self.factors[slot]
            of_row = x[row]
            if magnitudes:
                a, b, of_row = np.abs(a), np.abs(b), np.abs(of_row)
            hidden = np.einsum("...k,srk->...sr", of_row, a)
            out[row] = scale * (hidden[..., section, :] * b).sum(-1)
        return out


def draw_low_rank(
    rng: np.random.Generator,
    slots: list[int],
    in_dims: int,
    sections: tuple[int, ...],
    ranks: list[int],
    dtypes: list[mx.Dtype],
) -> Drawn:
    """Adapters of these ranks and types, for a batch whose rows use `slots`.

    What the kernels have no business to read is NaN: before, between and behind the matrices.
    """
    drawn, numbers, parts = [], [], []
    n = sections[-1]
    for rank, dtype in zip(ranks, dtypes, strict=True):
        a, b = (
            mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
            for shape in ((len(sections), rank, in_dims), (n, rank))
        )
        count = -(-n // BLOCK)
        filled = np.zeros((count * BLOCK, rank), np.float32)
        filled[:n] = exact(b)
        blocks = filled.reshape(count, BLOCK, rank).transpose(0, 2, 1)
        gap = [np.full(BLOCK * int(rng.integers(3)), np.nan, np.float32) for _ in range(2)]
        of_a = exact(a).astype(np.float32).reshape(-1)
        rest = np.full(-of_a.size % BLOCK, np.nan, np.float32)
        pieces = [gap[0], of_a, np.concatenate([rest, gap[1]]), blocks.reshape(-1), gap[0]]
        starts = np.cumsum([0, *(piece.size for piece in pieces)]).tolist()
        numbers.append(mx.array(np.concatenate(pieces)).astype(dtype))
        parts.append(Part(starts[1], starts[3], rank))
        drawn.append(Factors(exact(a), exact(b), float(np.float32(rng.uniform(0.5, 2)))))
    scales = mx.array(np.array([factors.scale for factors in drawn], np.float32))
    of_rows = mx.array(np.array(slots, np.int32))
    return Drawn(LowRank(tuple(numbers), tuple(parts), scales, of_rows, sections), drawn)


def in_shared_arrays(matrices: list[Drawn]) -> list[Drawn]:
    """The same adapters of several matrices, each adapter with one scale and all its numbers in one array."""
    first = matrices[0]
    arrays = zip(*(drawn.low_rank.numbers for drawn in matrices), strict=True)
    numbers = tuple(mx.concatenate(parts) for parts in arrays)
    mx.eval(numbers)  # there before any graph
    starts, shared = [0] * len(numbers), []
    for drawn in matrices:
        moved = tuple(
            part._replace(a=part.a + start, b=part.b + start)
            for part, start in zip(drawn.low_rank.parts, starts, strict=True)
        )
        starts = [s + own.size for s, own in zip(starts, drawn.low_rank.numbers, strict=True)]
        scaled = zip(drawn.factors, first.factors, strict=True)
        factors = [each._replace(scale=one.scale) for each, one in scaled]
        shared.append(Drawn(first.low_rank._replace(numbers=numbers, parts=moved), factors))
    return shared
