"""Inputs of tests: random arrays, tables of cases, and selections from products of parameters.

Selections and arrays are drawn from the run's seed, so that `make fuzz` comes to the rest of a product.
"""

from __future__ import annotations

import functools
import inspect
import os
import reprlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np


def all_pairs(*axes: Sequence[Any]) -> list[tuple]:
    """Rows with one value of each axis, in which any two values of any two axes meet at least once."""
    sizes = [len(axis) for axis in axes]
    rng = np.random.default_rng([int(os.environ.get("AFM_TEST_SEED") or 0), *sizes])
    values = [(i, k) for i, size in enumerate(sizes) for k in range(size)]
    first = np.cumsum([0, *sizes[:-1]])  # where an axis begins among the values
    axis_of = np.array([i for i, _ in values])
    missing = axis_of[:, None] < axis_of  # pairs of values that have not met
    one, other = np.triu_indices(len(axes), 1)
    rows = []
    while (places := np.flatnonzero(missing)).size:
        # Of some rows that hold a pair still missing, the one that holds most of those.
        candidates = rng.integers(0, sizes, (20, len(axes)))
        for which in divmod(places[int(rng.integers(places.size))], len(values)):
            i, value = values[which]
            candidates[:, i] = value
        met = candidates + first
        best = missing[met[:, one], met[:, other]].sum(1).argmax()
        missing[met[best, one], met[best, other]] = False
        rows.append(tuple(axis[k] for axis, k in zip(axes, candidates[best], strict=True)))
    return rows


def draw(rng: np.random.Generator, shape: Any, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def until(holds: Callable[[], Any], seconds: float = 60) -> None:
    """Wait for another thread; the machine may have much else to do."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it has not come true"
        time.sleep(0.005)


def each(names: str | Sequence[str], rows: Sequence[Any]) -> Callable[[Callable], Callable]:
    """What `pytest.mark.parametrize` does, as one test: it goes through all rows, which share its fixtures.

    For tables of which every line is the same thing, such as values that are refused. A failure names its row.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)

    def decorate(test: Callable) -> Callable:
        assert rows, f"{test.__name__} has no row to go through"
        assert not inspect.iscoroutinefunction(test), f"nobody awaits {test.__name__}"

        @functools.wraps(test)
        def through_all_rows(**fixtures: Any) -> None:
            for row in rows:
                values = dict(zip(names, row if len(names) > 1 else [row], strict=True))
                try:
                    test(**fixtures, **values)
                except BaseException as error:
                    error.add_note(f"in the row {reprlib.repr(row)}")
                    raise

        signature = inspect.signature(test)
        fixtures = [p for name, p in signature.parameters.items() if name not in names]
        through_all_rows.__signature__ = signature.replace(parameters=fixtures)
        return through_all_rows

    return decorate
