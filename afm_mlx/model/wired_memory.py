"""Memory that macOS keeps resident while a model runs, as mlx-lm does it, without importing mlx-lm."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.threads import call, in_main_thread

CLOSE = 0.9  # share of the recommended size above which a model can be slow


@contextmanager
def wired_memory(model: nn.Module) -> Iterator[None]:
    """On Metal, raise the limit of wired memory to the device's recommendation while a model runs.

    In threads other than the main one the limit stays raised, for it is unknown which thread is the last to run
    the model. Without Metal, do nothing.
    """
    info = mx.device_info() if mx.metal.is_available() else {}
    recommended = info.get("max_recommended_working_set_size")
    if recommended is None:
        yield
        return
    if not in_main_thread():
        call(mx.set_wired_limit, recommended)
        yield
        return
    size = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if size > CLOSE * recommended:
        warnings.warn(
            f"The model has {size / 1e9:.1f} GB, and macOS recommends {recommended / 1e9:.1f} at most to stay "
            "resident: it may be slow. sudo sysctl iogpu.wired_limit_mb=N raises that.",
            stacklevel=3,
        )
    before = mx.set_wired_limit(recommended)
    try:
        yield
    finally:
        mx.synchronize()  # the limit must not change under a computation
        mx.set_wired_limit(before)
