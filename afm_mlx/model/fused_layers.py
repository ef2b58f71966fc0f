"""Linear layers with the norm before them, the adapters of a batch's rows, and the addition after them.

A `PackedLinear` does all of it in its own kernel. Any other layer (float, MLX's quantized ones, with LoRA) is
called between norm and addition, and wrapped in an `AdaptedLinear` to add adapters.

A layer has `adapters`, a function from the number of a batch's rows to these rows' adapters for the layer
(`LayerAdapters`), which the model's `afm_mlx.adapters.active.ActiveAdapters` provides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.kernels import (
    AttentionPartials,
    LowRank,
    Part,
    ProductOptions,
    packed_argmax,
    packed_matmul,
    packed_swiglu,
    rms_norm,
)
from afm_mlx.kernels.reference import low_rank_product
from afm_mlx.quantization.packed_layers import LayerAdapters, PackedEmbedding, PackedLinear

ACTIVE = "_active_adapters"
"""Key of a model's adapters in its state, where MLX finds their arrays; no parameter, for the underscore."""


class Normed(NamedTuple):
    """`norm(x)`, which the next layer computes.

    Args:
        x: (..., K).
        norm: the norm.
    """

    x: mx.array
    norm: nn.RMSNorm

    def computed(self) -> mx.array:
        """`norm(x)` as an array."""
        return self.norm(self.x)


def project(
    layer: nn.Module, x: mx.array | Normed | AttentionPartials, residual: mx.array | None = None
) -> mx.array:
    """Return `residual + layer(x)`, (..., N).

    Args:
        layer: maps (..., K) to (..., N).
        x: (..., K), or a norm of it; attention's partials only where `is_fusable(layer)`.
        residual: (..., N), or None for no addition.
    """
    if is_fusable(layer):
        x, norm = x if isinstance(x, Normed) else (x, None)
        adapters = _adapters(layer.low_rank(x.shape[0]))
        return packed_matmul(x, layer.packed, _options(layer, norm, residual, adapters))
    assert not isinstance(x, AttentionPartials)
    y = layer(x.computed() if isinstance(x, Normed) else x)
    return y if residual is None else residual + y


def project_each(layers: Sequence[nn.Module], x: Normed) -> list[mx.array]:
    """Return `layer(norm(x))` for several layers; the norm is computed once unless all of them compute it."""
    if all(map(is_fusable, layers)):
        return [project(layer, x) for layer in layers]
    normed = x.computed()
    return [project(layer, normed) for layer in layers]


def swiglu(gate: nn.Module, up: nn.Module, x: Normed) -> mx.array:
    """Return `silu(gate(norm(x))) * up(norm(x))`, (..., N), for x (..., K)."""
    if is_fusable(gate) and is_fusable(up) and gate.activation_bits == up.activation_bits:
        a, b = gate.packed, up.packed
        if a.layout == b.layout:
            adapters = _adapters(gate.low_rank(x.x.shape[0]), up.low_rank(x.x.shape[0]))
            return packed_swiglu(x.x, a, b, _options(gate, x.norm, adapters=adapters))
    normed = x.computed()
    return nn.silu(gate(normed)) * up(normed)


def head_logits(embedding: nn.Module, x: Normed) -> mx.array:
    """Return the logits (..., vocab_size) of a tied head.

    Args:
        embedding: the embedding, whose matrix is the head's.
        x: the norm of hidden states (..., K).
    """
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        return packed_matmul(x.x, embedding.packed, _options(embedding, x.norm))
    return embedding.as_linear(rms_norm(x.x, x.norm.weight, x.norm.eps))


def head_argmax(embedding: nn.Module, x: Normed) -> tuple[mx.array, mx.array]:
    """Find the largest logit of a tied head.

    Args:
        embedding: the embedding, whose matrix is the head's.
        x: the norm of hidden states (..., K).

    Returns:
        The largest logit's index (the token), (...) uint32; and the largest logit, (...), which is NaN or
        infinity if any logit is NaN or +infinity.
    """
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        return packed_argmax(x.x, embedding.packed, _options(embedding, x.norm))
    logits = head_logits(embedding, x)
    return mx.argmax(logits, axis=-1), mx.max(logits, axis=-1)


def is_fusable(layer: nn.Module) -> TypeGuard[PackedLinear]:
    """True if a layer's kernel computes the norm and the addition, and takes attention's partials."""
    # A bias is added by the layer itself; training needs differentiable operations.
    return isinstance(layer, PackedLinear) and not layer.training and "bias" not in layer


def _adapters(*of_matrices: LowRank | None) -> tuple[LowRank, ...]:
    """The adapters of a product's matrices, as `ProductOptions` takes them."""
    some = next((adapters for adapters in of_matrices if adapters is not None), None)
    if some is None:
        return ()
    none = some._replace(parts=(Part(0, 0, 0),) * len(some.parts))
    return tuple(adapters or none for adapters in of_matrices)


def _options(
    layer: PackedLinear | PackedEmbedding,
    norm: nn.RMSNorm | None,
    residual: mx.array | None = None,
    adapters: tuple[LowRank, ...] = (),
) -> ProductOptions:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return ProductOptions(weight, eps, residual, adapters, layer.activation_bits)


class LinearWrapper(nn.Module):
    """A layer that replaces a linear layer and calls it.

    Args:
        linear: the linear layer; its name in the module's parameters is `linear`.
    """

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear
        self.train(linear.training)


class AdaptedLinear(LinearWrapper):
    """`linear(x)` plus the active adapters' product, for layers whose kernel can't add adapters.

    Args:
        linear: maps (B, ..., K) to (B, ..., N).
        adapters: function from the batch size B to the adapters of its rows for this layer; it returns None
            if no row has one.
    """

    def __init__(self, linear: nn.Module, adapters: LayerAdapters):
        super().__init__(linear)
        self.adapters = adapters

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, ..., K) to (B, ..., N), in the dtype that `linear` returns."""
        y, low_rank = self.linear(x), self.adapters(x.shape[0])
        return y if low_rank is None else y + low_rank_product(x, low_rank).astype(y.dtype)


def adapters_layout(model: nn.Module) -> str:
    """Return a key of the layout of a model's active adapters; "" if none are active.

    A traced step depends on the layout.
    """
    active = model.get(ACTIVE)
    return "" if active is None else active.layout
