"""Layers of mlx-lm, computed for a training step with less memory or time; results are the same up to rounding.

- SwiGLU keeps its inputs only, see `silu_product`.
- On a CPU, `mx.gather_mm` multiplies the tokens of a mixture of experts one at a time, and reads a matrix for
  each. Here the tokens of an expert fill blocks of up to 64 rows, padded with zeros; a block is one product.
  Gradients of the moves between tokens and blocks are gathers as well, where MLX would add up single rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.model.fused_layers import silu_product
from afm_mlx.quantization.packed_layers import is_experts, is_stack

_LARGEST_BLOCK, _SMALLEST_BLOCK = 64, 8  # rows


@contextmanager
def lean_layers(model: nn.Module) -> Iterator[None]:
    """Let a model of mlx-lm compute its layers as this module's description says, inside the context.

    Of mixtures, only the model's own instances are changed, and they are restored on leaving.
    """
    modules = list(model.modules())
    kinds = {type(module).__module__ for module in modules}
    files: list[Any] = [sys.modules[name] for name in kinds if name.startswith("mlx_lm.models.")]
    before = [(file, file.swiglu) for file in files if hasattr(file, "swiglu")]
    is_on_cpu = mx.default_device() == mx.Device(mx.cpu)
    mixtures = [module for module in modules if is_on_cpu and _is_float_mixture(module)]
    own: list[type] = [type(mixture) for mixture in mixtures]
    try:
        for file, _ in before:
            file.swiglu = silu_product
        for mixture, kind in zip(mixtures, own, strict=True):
            mixture.__class__ = _in_blocks(kind)
        yield
    finally:
        for file, swiglu in before:
            file.swiglu = swiglu
        for mixture, kind in zip(mixtures, own, strict=True):
            mixture.__class__ = kind


def _is_float_mixture(module: nn.Module) -> bool:
    """True for mlx-lm's mixtures of float experts; packed ones have kernels of their own."""
    switch_layers = sys.modules.get("mlx_lm.models.switch_layers")
    if switch_layers is None or type(module) not in (
        switch_layers.SwitchGLU,
        switch_layers.SwitchMLP,
    ):
        return False
    return all(is_experts(part) for part in module.modules() if is_stack(part))


@functools.cache
def _in_blocks(kind: type) -> type:
    """Return a subclass of mlx-lm's `SwitchGLU` or `SwitchMLP` that computes blocks of tokens."""

    def call(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        """Map x (..., D) to (..., k, D) by the experts at indices (..., k)."""
        count = next(part.num_experts for part in self.modules() if is_experts(part))
        blocks = ExpertBlocks.of(mx.stop_gradient(indices), count)
        if blocks is None:
            return kind.__call__(self, x, indices)
        rows = blocks.gather(x)

        def layer(name: str, x: mx.array) -> mx.array:
            return self[name](x, blocks.experts, sorted_indices=True)

        if "gate_proj" in self:
            rows = self.activation(layer("up_proj", rows), layer("gate_proj", rows))
            rows = layer("down_proj", rows)
        else:
            rows = layer("fc2", self.activation(layer("fc1", rows)))
        return blocks.scatter(rows).reshape(*indices.shape, -1)

    return type(kind.__name__, (kind,), {"__call__": call})


class ExpertBlocks(NamedTuple):
    """Blocks of the tokens that chose one expert, padded to one size.

    Args:
        experts: (blocks,) the expert of each block, in ascending order.
        rows: number of rows of a block.
        places: (n, k) the row, of all blocks' rows, of each token for each of its experts.
        sources: (blocks * rows,) the index into the flat `places` that has each row; n * k for padding.
    """

    experts: mx.array
    rows: int
    places: mx.array
    sources: mx.array

    @classmethod
    def of(cls, indices: mx.array, experts: int) -> ExpertBlocks | None:
        """Plan the blocks for the experts of each token, (..., k); None if there are too few tokens."""
        count = indices.size
        rows = min(_LARGEST_BLOCK, count // (2 * experts))
        if rows < _SMALLEST_BLOCK:
            return None
        flat = indices.flatten().astype(mx.int32)
        order = mx.argsort(flat)
        per_expert = (flat == mx.arange(experts)[:, None]).sum(axis=1).astype(mx.int32)
        ends = mx.cumsum((per_expert + rows - 1) // rows)  # in blocks
        blocks = count // rows + experts  # at most; the last ones may be empty
        of_block = (ends <= mx.arange(blocks)[:, None]).sum(axis=1)
        # A token's place is its number in the order, moved by what was padded before its expert.
        starts = rows * mx.concatenate([mx.array([0]), ends[:-1]])
        moved = starts - (mx.cumsum(per_expert) - per_expert)
        places = mx.zeros(count, mx.int32)
        places[order] = mx.arange(count) + moved[flat[order]]
        sources = mx.full(blocks * rows, count, mx.int32)
        sources[places] = mx.arange(count)
        return cls(
            mx.minimum(of_block, experts - 1).astype(indices.dtype),
            rows,
            places.reshape(-1, indices.shape[-1]),
            sources,
        )

    def gather(self, x: mx.array) -> mx.array:
        """Return blocks (blocks, rows, D) of tokens (..., D), with zeros as padding."""
        k = self.places.shape[1]
        moved = _moved(x.reshape(-1, x.shape[-1]), self.sources // k, self.places)
        return moved.reshape(self.experts.size, self.rows, -1)

    def scatter(self, x: mx.array) -> mx.array:
        """Return the tokens' results (n * k, D) of blocks (blocks, rows, D)."""
        return _moved(x.flatten(0, 1), self.places.flatten(), self.sources[:, None])


@mx.custom_function
def _moved(x: mx.array, places: mx.array, uses: mx.array) -> mx.array:
    """Return `_rows_at(x, places)`; `uses` (n, k) are the results that each row went to, m or more for none."""
    return _rows_at(x, places)


@_moved.vjp
def _moved_gradient(
    primals: tuple[mx.array, ...], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, ...]:
    _, places, uses = primals
    gradient = _rows_at(cotangent, uses.flatten()).reshape(*uses.shape, -1).sum(axis=1)
    return gradient, mx.zeros_like(places), mx.zeros_like(uses)


def _rows_at(x: mx.array, places: mx.array) -> mx.array:
    """Return rows of x (n, D) at `places` (m,); zeros where a place is n or more."""
    zeros = mx.zeros((1, x.shape[-1]), x.dtype)
    return mx.concatenate([x, zeros])[mx.minimum(places, x.shape[0])]
