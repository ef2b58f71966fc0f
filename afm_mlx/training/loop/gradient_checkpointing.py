"""Gradient checkpointing: blocks keep their inputs only, and compute the rest again in the backward pass.

Memory of activations falls from all of a block's to one (B, L, D) per block, plus one block's at a time, for a
forward pass more (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import TrainingError
from afm_mlx.training.loop.ordered_checkpoint import recomputed


@contextmanager
def recomputed_blocks(model: nn.Module) -> Iterator[None]:
    """Have every block of `model.layers` recompute its activations while it trains.

    Of AFM models these are the blocks that reuse keys and values, too. Only these instances are changed, and
    on leaving they are what they were. Dropout draws the same mask both times (`nn.Dropout`; no other layer of
    a block may be random).

    Raises:
        TrainingError: when the model has no `layers`.
    """
    blocks = [block for block in getattr(model, "layers", []) if isinstance(block, nn.Module)]
    if not blocks:
        raise TrainingError(
            f"{type(model).__name__} has no list `layers` of blocks to recompute. Leave gradient "
            "checkpointing off."
        )
    dropouts = [m for block in blocks for m in block.modules() if type(m) is nn.Dropout]
    changed = {id(m): (m, type(m)) for m in [*blocks, *dropouts]}
    try:
        for block in blocks:
            block.__class__ = _recomputed(type(block))  # type: ignore[arg-type]
        for dropout in dropouts:
            dropout.__class__ = _KeyedDropout
        yield
    finally:
        for module, kind in changed.values():
            module.__class__ = kind


class _KeyedDropout(nn.Dropout):
    """Dropout whose masks come from `key`, () or one key; the global generator's where it is None."""

    def __call__(self, x: mx.array) -> mx.array:
        key = self.__dict__.get("_key")
        if key is None or self._p_1 == 1 or not self.training:
            return super().__call__(x)
        following, key = mx.random.split(key)
        self.__dict__["_key"] = following
        return mx.random.bernoulli(self._p_1, x.shape, key) * x * (1 / self._p_1)


@functools.cache
def _recomputed(kind: type) -> type:
    """A subclass whose calls keep their inputs only."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return kind.__call__(self, *args, **kwargs)
        parameters = self.trainable_parameters()
        dropouts = [m for m in self.modules() if isinstance(m, _KeyedDropout)]

        def forward(traced: dict, *args: Any, **kwargs: Any) -> Any:
            self.update(traced)
            for dropout, key in zip(dropouts, keys, strict=True):
                dropout.__dict__["_key"] = key
            try:
                return kind.__call__(self, *args, **kwargs)
            finally:
                # What was traced must not outlive the trace.
                self.update(parameters)
                for dropout in dropouts:
                    dropout.__dict__["_key"] = None

        # Drawn outside of the function: keys drawn inside would be others when the block is computed again.
        keys = [mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32) for _ in dropouts]
        return recomputed(forward)(parameters, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})
