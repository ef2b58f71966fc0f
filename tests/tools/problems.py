"""The self-test's problems as cases of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
