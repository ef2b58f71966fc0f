"""Memory that macOS keeps resident while a model runs, as mlx-lm does it, without importing mlx-lm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.threads import call, in_main_thread

CLOSE = 0.9
"""Share of the recommended size from which on a model may be slow."""


@contextmanager
def wired_memory(model: nn.Module) -> Iterator[None]:
    """On Metal, keep the model's memory resident while it runs; elsewhere do nothing.

    In other threads than the main one it stays resident, for nobody knows which of them is the last to run it.
    """
    if not mx.metal.is_available():
        yield
    elif not in_main_thread():
        call(maybe_set_recommended_wired_limit)
        yield
    else:
        with wired_limit(model):
            yield


def maybe_set_recommended_wired_limit() -> int | None:
    """Let MLX keep as much resident as Metal recommends.

    Returns:
        The limit before, bytes; None where the device recommends none.
    """
    recommended = mx.device_info().get("max_recommended_working_set_size")
    return None if recommended is None else mx.set_wired_limit(recommended)


@contextmanager
def wired_limit(model: nn.Module) -> Iterator[None]:
    """Set the recommended limit, and restore the one before; warn of a model that is about as large."""
    before = maybe_set_recommended_wired_limit()
    if before is None:
        yield
        return
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    recommended = mx.device_info()["max_recommended_working_set_size"]
    if size > CLOSE * recommended:
        warnings.warn(
            f"The model has {size / 1e9:.1f} GB, and macOS recommends {recommended / 1e9:.1f} at most to stay "
            "resident: it may be slow. sudo sysctl iogpu.wired_limit_mb=N raises that.",
            stacklevel=2,
        )
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not change under a computation
        mx.set_wired_limit(before)
