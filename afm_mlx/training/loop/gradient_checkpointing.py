"""Gradient checkpointing: blocks keep their inputs only, and compute the rest again in the backward pass.

Memory of activations falls from all of a block's to one (B, L, D) per block, plus one block's at a time, for a
forward pass more (Chen et al. 2016, arXiv 1604.06174).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from afm_mlx.errors import TrainingError


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


# -- recomputation


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, of which only the arguments are kept for the backward pass.

    Gradients reach float arrays among the arguments, and nothing else: neither integers nor what the function
    finds elsewhere. It has to give the same numbers both times.

    Args:
        function: takes and returns trees of arrays (lists, tuples, named tuples, dictionaries; leaves of other
            types are passed through).
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given, result = _shape((args, kwargs)), None

        def flat(*leaves: mx.array) -> tuple[mx.array, ...]:
            nonlocal result
            args, kwargs = _filled(given, leaves)
            answer = function(*args, **kwargs)
            result = _shape(answer)
            return tuple(_leaves(answer))

        ordered = mx.custom_function(flat)

        @ordered.vjp
        def gradients(primals: Any, cotangents: Any, outputs: Any) -> Any:
            coming = _listed(cotangents)
            _, found = mx.vjp(flat, mx.depends(_listed(primals), coming), coming)
            return tuple(mx.depends(found, found))

        leaves = _listed(ordered(*_leaves((args, kwargs))))
        return _filled(result, leaves)  # `result` is known once the function ran

    return call


_FLOAT = object()
"""Stands for a float array in the shape of a tree, so that a shape keeps no array alive."""


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _leaves(tree: Any) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if _is_float(leaf)]


def _shape(tree: Any) -> Any:
    return tree_map(lambda leaf: _FLOAT if _is_float(leaf) else leaf, tree)


def _filled(shape: Any, leaves: Iterable[mx.array]) -> Any:
    given = iter(leaves)
    return tree_map(lambda leaf: next(given) if leaf is _FLOAT else leaf, shape)


def _listed(arrays: Any) -> list[mx.array]:
    """MLX hands a single array over as it is, and several in a list."""
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)
