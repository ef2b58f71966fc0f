"""How a model's layers get the adapters of a batch's rows, and which kind of layer adds them.

A layer has `adapters`, a function from the number of a batch's rows to the adapters of these rows for the
layer's matrix (`LayerAdapters`). A `PackedLinear` adds them in its kernel; any other linear layer stands in an
`AdaptedLinear`. The functions are those of the model's `afm_mlx.adapters.active.ActiveAdapters`.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.kernels.reference import low_rank_product
from afm_mlx.quantization.packed_layers import LayerAdapters

ACTIVE = "_active_adapters"
"""Key of a model's adapters in its state, where MLX sees their arrays; a parameter has no underscore first."""


def adapters_layout(model: nn.Module) -> str:
    """What a model's traced step depends on besides the shapes of its adapters' arrays; "" without adapters."""
    active = model.get(ACTIVE)
    return "" if active is None else active.layout


class LinearWrapper(nn.Module):
    """A layer that wraps a linear layer, `linear`, and stands in its place."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear
        self.train(linear.training)


class AdaptedLinear(LinearWrapper):
    """`linear(x)` plus what the active adapters add, for layers that can't add them in their own kernel.

    Args:
        linear: maps (B, ..., K) to (B, ..., N).
        adapters: gives the layer's adapters for a number of rows.
    """

    def __init__(self, linear: nn.Module, adapters: LayerAdapters):
        super().__init__(linear)
        self.adapters = adapters

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, ..., K) to (B, ..., N), in the dtype that `linear` gives."""
        y, low_rank = self.linear(x), self.adapters(x.shape[0])
        return y if low_rank is None else y + low_rank_product(x, low_rank).astype(y.dtype)
