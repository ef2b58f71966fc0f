"""Linear layers with the norm before them, the adapters and masks of the rows, and the addition after them.

A `PackedLinear` does all of it in its own kernel. Any other layer (float, MLX's quantized ones, with LoRA) is
called between norm and addition, and wrapped in an `AdaptedLinear` to add adapters.

A layer's `adapters` (`LayerAdapters`) and `mask` (`LayerMask`), and a feed-forward's `by_mask` (`ByMask`), come
from the model's `afm_mlx.adapters.active.ActiveAdapters`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.kernels import (
    AttentionPartials,
    LowRank,
    PackedWeight,
    Part,
    ProductOptions,
    packed_argmax,
    packed_matmul,
    packed_matmul_each,
    packed_swiglu,
    rms_norm,
)
from afm_mlx.kernels.reference import low_rank_factors, low_rank_product
from afm_mlx.model.split_layers import best_token, joined_logits
from afm_mlx.quantization.packed_layers import (
    LayerAdapters,
    LayerMask,
    PackedEmbedding,
    PackedLinear,
)

ACTIVE = "_active_adapters"
"""Key of a model's adapters in its state, where MLX finds their arrays; no parameter, for the underscore."""


ByMask: TypeAlias = Callable[[Callable[[mx.array], mx.array], mx.array], mx.array]
"""Takes a function of rows and all rows (B, ...); calls the function for the rows of each task mask in turn."""


class Normed(NamedTuple):
    """x (..., K) and a norm, which the next layer applies to it."""

    x: mx.array
    norm: nn.RMSNorm

    def computed(self) -> mx.array:
        return self.norm(self.x)


def project(
    layer: nn.Module, x: mx.array | Normed | AttentionPartials, residual: mx.array | None = None
) -> mx.array:
    """Return `residual + layer(x)`, (..., N), for x (..., K) or its norm; without `residual`, `layer(x)`.

    Attention's partials are accepted only where `is_fusable(layer)`.
    """
    if is_fusable(layer):
        x, norm = x if isinstance(x, Normed) else (x, None)
        packed, adapters, bits = layer.operands(x.shape[0])
        if (group := layer.group) is None:
            return packed_matmul(x, packed, _options(norm, bits, residual, (packed, adapters)))
        residual = residual if group.rank() == 0 else None
        part = packed_matmul(x, packed, _options(norm, bits, residual, (packed, adapters)))
        return mx.distributed.all_sum(part, group=group)
    assert not isinstance(x, AttentionPartials)
    y = layer(x.computed() if isinstance(x, Normed) else x)
    return y if residual is None else residual + y


def project_each(layers: Sequence[nn.Module], x: Normed) -> list[mx.array]:
    """Return `layer(norm(x))` for several layers; the norm is computed once unless all of them compute it."""
    if all(map(is_fusable, layers)):
        operands = [layer.operands(x.x.shape[0]) for layer in layers]
        matrices, bits = [each[:2] for each in operands], operands[0][2]
        if len({(*packed.format, packed.bits, bits) for packed, _, bits in operands}) == 1:
            packed = [packed for packed, _ in matrices]
            return packed_matmul_each(x.x, packed, _options(x.norm, bits, None, *matrices))
        return [project(layer, x) for layer in layers]
    normed = x.computed()
    return [project(layer, normed) for layer in layers]


def swiglu(gate: nn.Module, up: nn.Module, x: Normed) -> mx.array:
    """Return `silu(gate(norm(x))) * up(norm(x))`, (..., N), for x (..., K)."""
    if is_fusable(gate) and is_fusable(up):
        a, a_adapters, a_bits = gate.operands(x.x.shape[0])
        b, b_adapters, b_bits = up.operands(x.x.shape[0])
        if a_bits == b_bits and a.layout == b.layout:
            options = _options(x.norm, a_bits, None, (a, a_adapters), (b, b_adapters))
            return packed_swiglu(x.x, a, b, options)
    normed = x.computed()
    product = silu_product if gate.training else _silu_product
    return product(gate(normed), up(normed))


@mx.custom_function
def silu_product(gate: mx.array, up: mx.array) -> mx.array:
    """Return `silu(gate) * up`, of which only the two inputs are kept for the backward pass.

    MLX's own keeps `sigmoid(gate)` and `silu(gate)`, too: a quarter of what a block of AFM keeps.
    """
    return _silu_product(gate, up)


def _silu_product(gate: mx.array, up: mx.array) -> mx.array:
    return nn.silu(gate) * up


@silu_product.vjp
def _silu_product_gradients(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
) -> tuple[mx.array, mx.array]:
    # Depends on the cotangent; otherwise a compiled graph would keep the forward pass's sigmoid for it.
    gate, up = mx.depends(list(primals), [cotangent])
    sigmoid = mx.sigmoid(gate)
    silu = gate * sigmoid
    return cotangent * up * (sigmoid + silu * (1 - sigmoid)), cotangent * silu


def feed_forward(mlp: Any, x: Normed) -> mx.array:
    """Return `x + down(silu(gate(norm(x))) * up(norm(x)))`, (B, L, D), of a block's `mlp` for x (B, L, D)."""

    def compute(rows: mx.array) -> mx.array:
        hidden = swiglu(mlp.gate_proj, mlp.up_proj, Normed(rows, x.norm))
        return project(mlp.down_proj, hidden, rows)

    by_mask: ByMask | None = getattr(mlp, "by_mask", None)
    return compute(x.x) if by_mask is None else by_mask(compute, x.x)


def head_logits(embedding: nn.Module, x: Normed) -> mx.array:
    """Apply the norm to hidden states (..., K), then a head with the embedding's matrix.

    Returns logits (..., vocab_size).
    """
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        options = _options(x.norm, embedding.activation_bits)
        return joined_logits(embedding, packed_matmul(x.x, embedding.packed, options))
    return embedding.as_linear(rms_norm(x.x, x.norm.weight, x.norm.eps))


def head_argmax(embedding: nn.Module, x: Normed) -> tuple[mx.array, mx.array]:
    """Find the largest of `head_logits`.

    Returns:
        Its token, (...) uint32; and the logit, (...), NaN or infinity if any logit is NaN or +infinity.
    """
    if isinstance(embedding, PackedEmbedding) and not embedding.training:
        options = _options(x.norm, embedding.activation_bits)
        return best_token(embedding, *packed_argmax(x.x, embedding.packed, options))
    logits = head_logits(embedding, x)
    return mx.argmax(logits, axis=-1), mx.max(logits, axis=-1)


def is_fusable(layer: nn.Module) -> TypeGuard[PackedLinear]:
    """True if a layer's kernel computes the norm and the addition, and takes attention's partials."""
    # A bias is added by the layer itself; training needs differentiable operations.
    return isinstance(layer, PackedLinear) and not layer.training and "bias" not in layer


def _options(
    norm: nn.RMSNorm | None,
    activation_bits: int,
    residual: mx.array | None = None,
    *matrices: tuple[PackedWeight, LowRank | None],
) -> ProductOptions:
    """Return the options of a product with `matrices`, each with its adapters if it has any."""
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    adapters: tuple[LowRank, ...] = ()
    if some := next((each for _, each in matrices if each is not None), None):
        none = some._replace(parts=(Part(0, 0, 0),) * len(some.parts))
        adapters = tuple(
            each or none._replace(sections=(packed.out_dims,)) for packed, each in matrices
        )
    return ProductOptions(weight, eps, residual, adapters, activation_bits)


class LinearWrapper(nn.Module):
    """A layer that replaces a linear layer and calls it; in parameters the linear layer is named `linear`."""

    def __init__(self, linear: nn.Module):
        super().__init__()
        self.linear = linear
        self.train(linear.training)


class AdaptedLinear(LinearWrapper):
    """`linear(x)`, under the rows' task mask, plus the active adapters' product.

    For layers whose kernel can't add adapters.
    """

    def __init__(self, linear: nn.Module, adapters: LayerAdapters, mask: LayerMask | None = None):
        super().__init__(linear)
        self.adapters, self.mask = adapters, mask

    def __call__(self, x: mx.array) -> mx.array:
        """Map (B, ..., K) to (B, ..., N), in the dtype that `linear` returns."""
        taken = None if self.mask is None else self.mask()
        low_rank = self.adapters(x.shape[0])
        if (group := getattr(self.linear, "group", None)) is not None:
            y = self.linear.partial(x)  # masks are not split
            if low_rank is not None:
                y = y + low_rank_product(x, low_rank).astype(y.dtype)
            return mx.distributed.all_sum(y, group=group)
        y = (self.linear if taken is None else with_arrays(self.linear, taken))(x)
        return y if low_rank is None else y + low_rank_product(x, low_rank).astype(y.dtype)


class AdaptedStack(LinearWrapper):
    """A stack of matrices, called as the stack is, plus the product of the active adapters' pairs.

    `adapters` takes no number of rows. It has a slot for each row of the batch if M counts rows times tokens,
    in this order; else one slot for all.
    """

    def __init__(self, linear: nn.Module, adapters: Callable[[], LowRank | None]):
        super().__init__(linear)
        self.adapters = adapters

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Map x (..., M, K) to (..., M, N) with the matrices and pairs at `indices` (...)."""
        y = self.linear(x, indices, sorted_indices)
        if (low_rank := self.adapters()) is None:
            return y
        slots = low_rank.slots
        if slots.size > 1:
            slots = mx.repeat(slots, x.shape[-2] // slots.size)[:, None]
        for slot, part in enumerate(low_rank.parts):
            if not part.rank:
                continue
            a, b = low_rank_factors(low_rank, slot, x.shape[-1])
            count = len(low_rank.sections)
            product = x.astype(mx.float32)
            for factor in (a, b):  # (count, rank, K) and (count, N, rank)
                factor = factor.reshape(count, -1, factor.shape[-1]).swapaxes(-1, -2)
                product = mx.gather_mm(
                    product, factor, rhs_indices=indices, sorted_indices=sorted_indices
                )
            added = low_rank.scales[slot] * product
            y = y + mx.where(slots == slot, added, 0).astype(y.dtype)
        return y


def with_arrays(linear: nn.Module, arrays: Mapping[str, mx.array]) -> nn.Module:
    """Return a copy of a linear layer that has these parameters, and shares the others."""
    made = copy.copy(linear)
    dict.update(made, arrays)
    return made


def adapters_layout(model: nn.Module) -> str:
    """Return the layout of a model's active adapters, on which a traced step depends; "" if none are active."""
    active = model.get(ACTIVE)
    return "" if active is None else active.layout
