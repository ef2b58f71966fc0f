"""Adapters for tests of the kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import BLOCK, LowRank, Part


def draw_low_rank(
    rng: np.random.Generator,
    slots: Sequence[int],
    in_dims: int,
    sections: tuple[int, ...],
    ranks: Sequence[int],
    dtypes: Sequence[mx.Dtype] = (mx.float16,),
) -> LowRank:
    """Evaluated adapters of these ranks, and of these types in turn, for a batch whose rows use `slots`.

    They add about 1 to products with random vectors. What the kernels have no business to read is NaN: before,
    between and behind the matrices.
    """
    numbers, parts, out_dims = [], [], sections[-1]
    blocks = -(-out_dims // BLOCK)
    for rank, dtype in zip(ranks, itertools.cycle(dtypes)):
        a = rng.normal(0, in_dims**-0.5, len(sections) * rank * in_dims)
        b = np.zeros((blocks * BLOCK, rank))
        b[:out_dims] = rng.normal(0, max(1, rank) ** -0.5, (out_dims, rank))
        b = b.reshape(blocks, BLOCK, rank).swapaxes(1, 2).reshape(-1)
        gap, after = (np.full(BLOCK * int(rng.integers(3)), np.nan) for _ in range(2))
        rest = np.full(-a.size % BLOCK, np.nan)
        pieces = [gap, a, rest, after, b, gap]
        starts = np.cumsum([0, *map(np.size, pieces)]).tolist()
        numbers.append(mx.array(np.concatenate(pieces).astype(np.float32)).astype(dtype))
        parts.append(Part(starts[1], starts[4], rank))
    scales = mx.array(rng.uniform(0.5, 2, len(numbers)).astype(np.float32))
    mx.eval(numbers, scales)  # there before any graph
    of_rows = mx.array(np.array(slots, np.int32))
    return LowRank(tuple(numbers), tuple(parts), scales, of_rows, sections)


def in_shared_arrays(first: LowRank, second: LowRank) -> tuple[LowRank, LowRank]:
    """The adapters of gate and up, each adapter with one scale and all its numbers in one array."""
    pairs = zip(first.numbers, second.numbers, strict=True)
    numbers = tuple(mx.concatenate(pair) for pair in pairs)
    mx.eval(numbers)  # there before any graph
    moved = tuple(
        Part(part.a + before.size, part.b + before.size, part.rank)
        for part, before in zip(second.parts, first.numbers, strict=True)
    )
    first = first._replace(numbers=numbers)
    return first, first._replace(parts=moved)
