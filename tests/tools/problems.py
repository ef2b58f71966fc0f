"""The self-test's problems as cases of tests, and adapters for the kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import BLOCK, LowRank, Part
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.problems import Problem, make
from afm_mlx.kernels.selftest.specs import Spec


def assert_solved(problem: Problem, run: Callable, bound: float | None = None) -> None:
    """Raise unless `run` gives the answer, up to `bound`; by default up to what rounding explains."""
    bound = problem.bound if bound is None else bound
    error = problem.error(run(*problem.args))
    spec = problem.spec
    assert error <= bound, f"{spec.op}, {spec.label}: error {error:.2g}, allowed {bound:.2g}"


def draw_heads(rng, op, dtype, batch, tokens, shape, **options) -> Problem:
    """A problem of attention or RoPE; `shape` is (heads, kv_heads, head_dim)."""
    sizes = dict(zip(("heads", "kv_heads", "head_dim"), shape, strict=True))
    return make(Spec(op, dtype, batch, tokens, **sizes, **options), rng)


def with_args(problem: Problem, *args: Any) -> Problem:
    """A problem of the same shape with other arguments."""
    wanted = getattr(oracle, problem.spec.op)(*args)
    return replace(problem, args=args, wanted=wanted if isinstance(wanted, tuple) else (wanted,))


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
