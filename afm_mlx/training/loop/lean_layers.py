"""Layers of mlx-lm, computed for a training step with less memory or time; results are the same up to rounding.

- SwiGLU keeps its inputs only, see `silu_product`.
- On a CPU, `mx.gather_mm` multiplies the tokens of a mixture of experts one at a time, and reads a matrix for
  each. Here the tokens of an expert, which mlx-lm has sorted, fill blocks of up to 64 rows, padded with zeros,
  and a block is one product. Gradients of the moves between tokens and blocks are gathers as well, where MLX
  would add up single rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.model.fused_layers import silu_product
from afm_mlx.quantization.packed_layers import is_experts, is_stack

_LARGEST_BLOCK, _SMALLEST_BLOCK = 64, 8  # rows


@contextmanager
def lean_layers(model: nn.Module) -> Iterator[None]:
    """Let a model of mlx-lm compute its layers as this module's description says, inside the context."""
    kinds = {type(module).__module__ for module in model.modules()}
    modules: list[Any] = [sys.modules[name] for name in kinds if name.startswith("mlx_lm.models.")]
    replaced = [(each, "swiglu", silu_product) for each in modules if hasattr(each, "swiglu")]
    stacks = [module for module in model.modules() if is_stack(module)]
    # Packed stacks take single rows, and have kernels of their own.
    if stacks and all(map(is_experts, stacks)) and mx.default_device() == mx.Device(mx.cpu):
        owner = sys.modules["mlx_lm.models.switch_layers"]
        blocks = ExpertBlocks(max(stack.num_experts for stack in stacks), owner._gather_sort)
        replaced.append((owner, "_gather_sort", blocks.gather))
        replaced.append((owner, "_scatter_unsort", blocks.scatter))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


class ExpertBlocks:
    """The pair of functions that mlx-lm's mixtures sort tokens with, for blocks of the tokens of one expert.

    Mixtures call `gather`, then layers with its blocks and experts, then `scatter`. For few tokens, `gather`
    returns what `otherwise` does.
    """

    def __init__(self, experts: int, otherwise: Callable[..., Any]):
        self.experts, self.otherwise = experts, otherwise

    def gather(
        self, x: mx.array, indices: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | tuple[mx.array, mx.array]]:
        """Return blocks of tokens, the expert of each block, and what `scatter` needs.

        Args:
            x: tokens (..., 1, 1, D).
            indices: experts of each token (..., k).

        Returns:
            (blocks, M, D), zeros where an expert has too few tokens; (blocks,); and two arrays of indices.
        """
        count, experts = indices.size, self.experts
        rows = min(_LARGEST_BLOCK, count // (2 * experts))
        if rows < _SMALLEST_BLOCK:
            return self.otherwise(x, indices)
        flat = indices.flatten().astype(mx.int32)
        order = mx.argsort(flat)
        per_expert = (flat == mx.arange(experts)[:, None]).sum(axis=1).astype(mx.int32)
        ends = mx.cumsum((per_expert + rows - 1) // rows)  # in blocks
        blocks = count // rows + experts  # at most; the last ones may be empty
        # Place of each sorted token: its number, moved by what was padded before its expert.
        moved = (
            rows * mx.concatenate([mx.array([0]), ends[:-1]]) + per_expert - mx.cumsum(per_expert)
        )
        places = mx.zeros(count, mx.int32)
        places[order] = mx.arange(count) + moved[flat[order]]
        tokens = mx.full(
            blocks * rows, count, mx.int32
        )  # of each place, of count * k; count for none
        tokens[places] = mx.arange(count)
        of_block = (ends <= mx.arange(blocks)[:, None]).sum(axis=1)
        found = _moved(
            x.flatten(0, -2), tokens // indices.shape[-1], places.reshape(-1, indices.shape[-1])
        )
        block_experts = mx.minimum(of_block, experts - 1).astype(indices.dtype)
        return found.reshape(blocks, rows, -1), block_experts, (places, tokens)

    def scatter(
        self,
        x: mx.array,
        order: mx.array | tuple[mx.array, mx.array],
        shape: tuple[int, ...] | None = None,
    ) -> mx.array:
        """Return the tokens' results (*shape, 1, D) from blocks (blocks, M, D)."""
        if isinstance(order, tuple):
            places, tokens = order
            x = _moved(x.flatten(0, 1), places, tokens[:, None])[:, None]
        else:
            x = x[order]
        return x if shape is None else mx.unflatten(x, 0, shape)


@mx.custom_function
def _moved(x: mx.array, places: mx.array, back: mx.array) -> mx.array:
    """Return rows of x (n, D) at `places` (m,); zeros where a place is n or more.

    `back` (n, k) has, for each row of x, the k results that it went to, or m and more for none.
    """
    zeros = mx.zeros((1, x.shape[-1]), x.dtype)
    return mx.concatenate([x, zeros])[mx.minimum(places, x.shape[0])]


@_moved.vjp
def _moved_vjp(
    primals: tuple[mx.array, ...], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, ...]:
    _, places, back = primals
    gradient = _moved(cotangent, back.flatten(), places[:, None])
    gradient = gradient.reshape(*back.shape, -1).sum(axis=1)
    return gradient, mx.zeros_like(places), mx.zeros_like(back)
