"""Comparisons whose failures say what differs, where, and by how much.

Arrays are MLX's, NumPy's or PyTorch's; bounds are shares of the largest number wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

# By how much of itself a number moves when it is rounded to the type.
UNIT_ROUNDOFF = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def exact(array: Any) -> np.ndarray:
    """The array's numbers in float64; integers and bools too."""
    if isinstance(array, mx.array):
        array = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
    elif hasattr(array, "detach"):
        array = array.detach().numpy()
    return np.array(array).astype(np.float64)


def error(got: Any, wanted: Any, least: float = 0.0) -> float:
    """The largest difference, as a share of the largest magnitude wanted, at least `least`; or NaN."""
    got, wanted = exact(got), exact(wanted)
    assert got.shape == wanted.shape, f"shape {got.shape} instead of {wanted.shape}"
    if not wanted.size:
        return 0.0
    difference = np.abs(got - wanted).max()
    return float(difference / (max(np.abs(wanted).max(), least) or 1.0))


def assert_within(got: Any, wanted: Any, allowed: Any, what: Any = "array") -> None:
    """Raise unless every element differs by `allowed` at most: one number, or one for each element."""
    got, wanted = exact(got), exact(wanted)
    assert got.shape == wanted.shape, f"{what}: shape {got.shape} instead of {wanted.shape}"
    excess = np.abs(got - wanted) - allowed
    bad = ~(excess <= 0)  # NaN is no difference that is allowed
    if bad.any():
        at = np.unravel_index(
            np.where(bad, np.nan_to_num(excess, nan=np.inf), -1).argmax(), bad.shape
        )
        limit = np.broadcast_to(allowed, bad.shape)[at]
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.size} elements differ by more than allowed; at "
            f"{tuple(map(int, at))}: {got[at]:.7g} instead of {wanted[at]:.7g}, allowed {limit:.3g}; "
            f"the largest wanted is {np.abs(wanted).max():.4g}"
        )


def assert_close(
    got: Any, wanted: Any, bound: float = 1e-3, what: Any = "array", least: float = 0.0
) -> None:
    """Raise unless no element differs by more than `bound` times the largest magnitude wanted, or `least`."""
    size = max(float(np.abs(exact(wanted)).max(initial=0)), least)
    assert_within(got, wanted, bound * size, what)


def same(got: Any, wanted: Any) -> bool:
    """True if two arrays have one shape and the same numbers, to the last bit; NaN equals NaN."""
    return np.array_equal(exact(got), exact(wanted), equal_nan=True)


def assert_same(got: Any, wanted: Any, what: Any = "array") -> None:
    """Raise unless two arrays have one type, one shape and the same numbers, to the last bit."""
    if isinstance(got, mx.array) and isinstance(wanted, mx.array):
        assert got.dtype == wanted.dtype, f"{what}: {got.dtype} instead of {wanted.dtype}"
    if not same(got, wanted):
        assert_within(got, wanted, 0.0, what)


def assert_same_tensors(
    got: Mapping[str, Any], wanted: Mapping[str, Any], dtypes: bool = True
) -> None:
    """Raise unless both hold the same numbers under the same names, of the same types if `dtypes`."""
    missing, extra = sorted(wanted.keys() - got.keys()), sorted(got.keys() - wanted.keys())
    if missing or extra:
        raise AssertionError(f"names missing: {missing}; not wanted: {extra}")
    for name, array in wanted.items():
        found = got[name]
        if dtypes:
            assert_same(found, array, name)
        else:
            assert_same(exact(found), exact(array), name)


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    """The names whose numbers are no longer the same."""
    return {name for name in before if not same(before[name], after[name])}


def assert_parity(
    ours: Callable[[np.ndarray], Any],
    theirs: Callable[[np.ndarray], Any],
    prompts: Iterable[np.ndarray],
    bound: float = 1e-4,
    ties: float | None = None,
) -> None:
    """Raise unless two models give the same logits on several prompts: every error is within `bound`.

    Where keys and values are int8, `ties` bounds the median error, and `bound` the least one. A number on the
    boundary between two codes may fall to either side, which moves the logits of its prompt, rarely by much; a
    wrong weight moves the logits of every prompt.
    """
    errors = [error(ours(tokens), theirs(tokens)) for tokens in prompts]
    listed = ", ".join(f"{e:.2g}" for e in errors)
    if ties is not None:
        assert min(errors) <= bound, f"the least error of all prompts is above {bound}: {listed}"
        assert np.median(errors) <= ties, f"the median error is above {ties}: {listed}"
    else:
        assert max(errors) <= bound, f"errors above {bound}: {listed}"
