"""Gradient checkpointing: blocks keep their inputs only, and compute the rest again in the backward pass.

The memory of activations falls to one (B, L, D) array per block, plus all activations of one block, at the
cost of a second forward pass (Chen et al. 2016, arXiv 1604.06174).

`recomputed` is `mx.checkpoint` with a backward pass that runs in order. MLX evaluates a graph in an order of
its own, and two freedoms of a checkpointed function then cost memory:

- The recomputation depends on the function's outputs only, which exist once the forward pass has ended, so
  blocks are recomputed long before their turn. Here it also depends on the incoming gradient.
- The gradient of a block's input does not depend on the gradients of its weights, so these are computed late,
  and all that was recomputed for them stays. Here a block's input gradient depends on its weights' gradients.

Blocks of width 64 with rows of 256 tokens then keep 165 numbers per token and block instead of 1,334, weights'
gradients included, in the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from afm_mlx.errors import TrainingError

R = TypeVar("R")

Tree: TypeAlias = Any
"""Nested dictionaries and lists of arrays, as `nn.Module.parameters` returns them."""

PER_CALL = "_per_call"
"""Key of a tree of arrays that a layer has for one forward pass.

A recomputed block takes it as an argument, so that gradients reach it, and the backward pass has it, too.
"""

Arrays: TypeAlias = mx.array | Sequence[mx.array]


@contextmanager
def recomputed_blocks(model: nn.Module) -> Iterator[None]:
    """Recompute the activations of every block of `model.layers` in the backward pass, inside the context.

    For AFM models this includes the reuse blocks. Only the model's own instances are changed, and they are
    restored on leaving. Dropout draws the same mask both times; no layer other than `nn.Dropout` may be random.

    Raises `TrainingError` when the model has no `layers`.
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
        for module, kind in changed.values():
            module.__class__ = _KeyedDropout if kind is nn.Dropout else _recomputed(kind)  # type: ignore[arg-type]
        yield
    finally:
        for module, kind in changed.values():
            module.__class__ = kind


class _KeyedDropout(nn.Dropout):
    """Dropout that draws masks from its `_key`; from the global generator if `_key` is None."""

    def __call__(self, x: mx.array) -> mx.array:
        key = self.__dict__.get("_key")
        if key is None or self._p_1 == 1 or not self.training:
            return super().__call__(x)
        following, key = mx.random.split(key)
        self.__dict__["_key"] = following
        return mx.random.bernoulli(self._p_1, x.shape, key) * x * (1 / self._p_1)


@functools.cache
def _recomputed(kind: type) -> type:
    """Return a subclass of a block's class whose calls keep only their inputs for the backward pass."""

    def call(self: nn.Module, *args: object, **kwargs: object) -> object:
        if not self.training:
            return kind.__call__(self, *args, **kwargs)
        parameters = self.trainable_parameters()
        dropouts = [m for m in self.modules() if isinstance(m, _KeyedDropout)]

        owners = [module for module in self.modules() if PER_CALL in module]

        def forward(traced: Tree, per_call: Tree, *args: object, **kwargs: object) -> object:
            self.update(traced)
            before = [owner.get(PER_CALL) for owner in owners]
            _set_per_call(owners, per_call)
            for dropout, key in zip(dropouts, keys, strict=True):
                dropout.__dict__["_key"] = key
            try:
                return kind.__call__(self, *args, **kwargs)
            finally:
                # Traced arrays must not outlive the trace.
                self.update(parameters)
                _set_per_call(owners, before)
                for dropout in dropouts:
                    dropout.__dict__["_key"] = None

        # Drawn outside the function: keys drawn inside would differ in the recomputation.
        keys = [mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32) for _ in dropouts]
        per_call = [owner[PER_CALL] for owner in owners]
        return recomputed(forward)(parameters, per_call, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def _set_per_call(owners: Sequence[nn.Module], trees: Sequence[Tree | None]) -> None:
    for owner, tree in zip(owners, trees, strict=True):
        owner.pop(PER_CALL, None)
        if tree is not None:
            owner[PER_CALL] = tree


def recomputed(function: Callable[..., R]) -> Callable[..., R]:
    """Wrap a function so that only its arguments are kept for the backward pass, which calls it again.

    The function takes and returns trees of arrays; leaves other than float arrays are passed through. Gradients
    reach only the arguments, not arrays that the function gets elsewhere. It must return the same numbers both
    times.
    """

    def call(*args: object, **kwargs: object) -> R:
        given, result = _structure((args, kwargs)), None

        def flat(*leaves: mx.array) -> tuple[mx.array, ...]:
            nonlocal result
            args, kwargs = _filled(given, leaves)
            answer = function(*args, **kwargs)
            result = _structure(answer)
            return tuple(_leaves(answer))

        ordered = mx.custom_function(flat)

        @ordered.vjp
        def gradients(primals: Arrays, cotangents: Arrays, outputs: Arrays) -> tuple[mx.array, ...]:
            coming = _listed(cotangents)
            _, found = mx.vjp(flat, mx.depends(_listed(primals), coming), coming)
            return tuple(mx.depends(found, found))

        leaves = _listed(ordered(*_leaves((args, kwargs))))
        return _filled(result, leaves)  # `result` is known once the function ran

    return call


def with_gradient(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
    """Wrap a function of rows, (n, D) -> (n,), so that it computes their gradient together with its result.

    Row i of the result must depend on row i alone. Nothing else is kept for the backward pass, which is one
    product; as in `recomputed`, gradients reach only the argument.
    """

    @mx.custom_function
    def both(h: mx.array) -> tuple[mx.array, mx.array]:
        (found,), (slopes,) = mx.vjp(function, [h], [mx.ones(h.shape[0])])
        return found, slopes

    @both.vjp
    def gradient(primal: mx.array, cotangents: Arrays, outputs: Sequence[mx.array]) -> mx.array:
        return (cotangents[0][:, None] * outputs[1]).astype(primal.dtype)

    return lambda h: both(h)[0]


_FLOAT = object()
"""Replaces a float array in a tree's structure, so that the structure keeps no array alive."""


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, mx.array) and mx.issubdtype(leaf.dtype, mx.floating)


def _leaves(tree: Tree) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(tree) if _is_float(leaf)]


def _structure(tree: Tree) -> Tree:
    return tree_map(lambda leaf: _FLOAT if _is_float(leaf) else leaf, tree)


def _filled(structure: Tree, leaves: Iterable[mx.array]) -> Tree:
    given = iter(leaves)
    return tree_map(lambda leaf: next(given) if leaf is _FLOAT else leaf, structure)


def _listed(arrays: Arrays) -> list[mx.array]:
    """Return arrays as a list; MLX passes a single array without one."""
    return [arrays] if isinstance(arrays, mx.array) else list(arrays)
