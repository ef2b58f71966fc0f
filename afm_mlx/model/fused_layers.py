"""A layer together with what stands before and after it, as one operation where the layer can.

A packed layer does the norm before it, its adapters and the addition after it in its own kernel. Any other
layer (float, MLX's quantized ones, a wrapper with adapters or LoRA) is called between norm and addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.kernels import (
    AttentionParts,
    LowRank,
    PackedWeight,
    Part,
    ProductOptions,
    packed_argmax,
    packed_matmul,
    packed_swiglu,
    rms_norm,
)
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear


def project(
    layer: nn.Module,
    x: mx.array | AttentionParts,
    norm: nn.RMSNorm | None = None,
    residual: mx.array | None = None,
) -> mx.array:
    """`residual + layer(norm(x))`.

    Args:
        layer: maps (..., K) to (..., N).
        x: (..., K); attention's output may come in parts where `merges_parts` says so.
        norm: the norm before the layer; None for no norm.
        residual: (..., N), or None.

    Returns:
        (..., N).
    """
    if _is_fusable(layer):
        adapters = _adapters(layer.low_rank(x.shape[0]))
        return packed_matmul(x, layer.packed, _options(layer, norm, residual, adapters))
    assert not isinstance(x, AttentionParts)
    y = layer(x if norm is None else norm(x))
    return y if residual is None else residual + y


def project_each(layers: Sequence[nn.Module], x: mx.array, norm: nn.RMSNorm) -> list[mx.array]:
    """`layer(norm(x))` for several layers; the norm is computed once where they don't do it themselves."""
    if all(map(_is_fusable, layers)):
        return [project(layer, x, norm=norm) for layer in layers]
    x = norm(x)
    return [project(layer, x) for layer in layers]


def merges_parts(layer: nn.Module) -> bool:
    """True if `project` takes attention's output in parts for this layer."""
    return _is_fusable(layer)


def swiglu(gate: nn.Module, up: nn.Module, x: mx.array, norm: nn.RMSNorm) -> mx.array:
    """`silu(gate(norm(x))) * up(norm(x))`: (..., N) for x (..., K)."""
    if _is_fusable(gate) and _is_fusable(up) and _alike(gate, up):
        adapters = _adapters(gate.low_rank(x.shape[0]), up.low_rank(x.shape[0]))
        return packed_swiglu(x, gate.packed, up.packed, _options(gate, norm, adapters=adapters))
    x = norm(x)
    return nn.silu(gate(x)) * up(x)


def _adapters(*of_matrices: LowRank | None) -> tuple[LowRank, ...]:
    """The adapters of a product's matrices, as `ProductOptions` takes them."""
    some = next((adapters for adapters in of_matrices if adapters is not None), None)
    if some is None:
        return ()
    none = some._replace(parts=(Part(0, 0, 0),) * len(some.parts))
    return tuple(adapters or none for adapters in of_matrices)


def project_head(embedding: nn.Module, x: mx.array, norm: nn.RMSNorm) -> mx.array:
    """Logits of a tied head: (..., vocab_size) for x (..., K)."""
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        return packed_matmul(x, embedding.packed, _options(embedding, norm))
    return embedding.as_linear(rms_norm(x, norm.weight, norm.eps))


def head_argmax(embedding: nn.Module, x: mx.array, norm: nn.RMSNorm) -> tuple[mx.array, mx.array]:
    """The largest logit of a tied head, for x (..., K).

    Returns:
        its index, (...) uint32, and itself, (...): NaN or infinity if any logit is NaN or +infinity.
    """
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        return packed_argmax(x, embedding.packed, _options(embedding, norm))
    logits = embedding.as_linear(rms_norm(x, norm.weight, norm.eps))
    return mx.argmax(logits, axis=-1), mx.max(logits, axis=-1)


def _is_fusable(layer: nn.Module) -> bool:
    # A bias is added by the layer itself; training needs what can be differentiated.
    return isinstance(layer, PackedLinear) and not layer.training and "bias" not in layer


def _alike(a: PackedLinear, b: PackedLinear) -> bool:
    """True if two layers differ only in their weights, so that one kernel can run both."""
    first: PackedWeight = a.packed
    second: PackedWeight = b.packed
    return (
        first.codes.shape == second.codes.shape
        and first[1:3] == second[1:3]
        and first.granularity == second.granularity
        and first.group_size == second.group_size
        and a.activation_bits == b.activation_bits
    )


def _options(
    layer: PackedLinear | PackedEmbedding,
    norm: nn.RMSNorm | None,
    residual: mx.array | None = None,
    adapters: tuple[LowRank, ...] = (),
) -> ProductOptions:
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    return ProductOptions(weight, eps, residual, adapters, layer.activation_bits)
