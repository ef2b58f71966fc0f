"""Layers whose matrix stays packed: 2, 4 or 8 bits a weight, in the formats of `kernels.operands`.

They take the place of `nn.Linear` and `nn.Embedding` in any model, and of mlx-lm's `SwitchLinear`, which has
the matrices of a mixture's experts. Parameters have the names of a model folder: `weight` (the codes),
`scales`, `biases`, `table`, and `bias` of the layer; absent ones are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.errors import CheckpointError, RequestError
from afm_mlx.kernels import (
    BITS,
    MODES,
    LowRank,
    PackedWeight,
    ProductOptions,
    dequantize,
    dispatch,
    pack_codes,
    packed_embedding,
    packed_gather,
    packed_matmul,
    reference,
)
from afm_mlx.kernels import mlx as mlx_products

PARTS = ("weight", "scales", "biases", "table")
"""Names of a packed matrix's parameters, in the order of files."""

LayerAdapters: TypeAlias = Callable[[int], LowRank | None]
"""Takes the number of rows of a batch; returns their adapters for one layer, None if none changes it."""

LayerMask: TypeAlias = Callable[[], Mapping[str, mx.array] | None]
"""Returns the parameters that replace a layer's under the rows' task mask, by name; None without a mask."""


def activation_dtype() -> mx.Dtype:
    """Return bfloat16 on a GPU, float32 on MLX's CPU backend, whose half types are 10 to 100 times slower."""
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16


class _Packed(nn.Module):
    """Base of layers whose packed matrix, or stack of matrices, is frozen."""

    def __init__(self, packed: PackedWeight):
        super().__init__()
        check_packed(flattened(packed), type(self).__name__)
        self.bits = packed.bits
        self.mode = packed.mode
        self.weight = packed.codes
        for name in PARTS[1:]:
            if getattr(packed, name) is not None:
                self[name] = getattr(packed, name)
        self.freeze()

    @classmethod
    def from_codes(
        cls,
        codes: mx.array,
        bits: int,
        mode: str = "balanced",
        *,
        scales: mx.array | None = None,
        biases: mx.array | None = None,
        table: mx.array | None = None,
        name: str = "the matrix",
        **options: Any,
    ) -> Self:
        """Make a layer of known codes, which are stored unchanged.

        Args:
            codes: (N, K) integers of [0, 2**bits).
            bits, mode, scales, biases, table: see `kernels.PackedWeight`.
            name: the layer's name, for errors.
            options: further arguments of the layer.

        Raises:
            CheckpointError: if a code does not fit, K does not fill whole words, or the parts do not fit.
        """
        if bits not in BITS:
            raise CheckpointError(f"{name}: bits is {bits!r}; allowed are {_listed(BITS)}.")
        if codes.ndim != 2 or not mx.issubdtype(codes.dtype, mx.integer):
            raise CheckpointError(
                f"{name}: codes are {_described(codes)}; integers of shape [N, K] are needed."
            )
        check_width(codes.shape[1], bits, name)
        low, high = codes.min().item(), codes.max().item()
        if low < 0 or high >= 2**bits:
            raise CheckpointError(
                f"{name}: codes reach from {low} to {high}; {bits} bits hold 0 to {2**bits - 1}. Take more "
                "bits, or subtract the lowest code."
            )
        packed = PackedWeight(pack_codes(codes, bits), bits, mode, scales, biases, table)
        check_packed(packed, name)
        return cls(packed, **options)

    @property
    def activation_bits(self) -> int:
        """Bits of activations in products: 16, or 8 if a kernel may round them to int8."""
        return self._activation_bits

    @activation_bits.setter
    def activation_bits(self, bits: int) -> None:
        object.__setattr__(self, "_activation_bits", bits)
        dispatch.invalidate()

    @property
    def packed(self) -> PackedWeight:
        """The matrix, or a stack's matrices one after the other, as an argument of operations in `kernels`."""
        return self._packed_of(self)

    def _packed_of(self, parameters: Mapping[str, mx.array]) -> PackedWeight:
        get = parameters.get
        parts = get("scales"), get("biases"), get("table")
        return flattened(PackedWeight(parameters["weight"], self.bits, self.mode, *parts))

    @property
    def granularity(self) -> str:
        return self.packed.granularity

    @property
    def group_size(self) -> int:
        return self.packed.group_size

    def dequantize(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        return dequantize(self.packed, dtype)

    def _format(self) -> str:
        packed = self.packed
        if packed.table is not None:
            per = f"tables={packed.table.shape[0]}"
        elif packed.granularity == "group":
            per = f"group_size={packed.group_size}"
        else:
            per = f"granularity={packed.granularity}"
        return f"bits={self.bits}, mode={self.mode}, {per}"


class PackedLinear(_Packed):
    """`y = x W^T + bias` with a packed `W` (N, K), plus `scale * B A x` if its model runs with adapters.

    While the layer trains (`self.training`), the product is the differentiable reference; otherwise the
    fastest kernel for the device and the shape runs. `activation_bits` is 16, or 8 to let a kernel round
    activations to int8, which is faster and less exact.
    """

    # Set if the layer has a part of the inputs: products are added up over these ranks.
    group: mx.distributed.Group | None = None
    # Set if the layer's model is bound to adapters.
    adapters: LayerAdapters | None = None
    mask: LayerMask | None = None

    def __init__(
        self, packed: PackedWeight, bias: mx.array | None = None, activation_bits: int = 16
    ):
        super().__init__(packed)
        self.activation_bits = activation_bits
        if bias is not None:
            self.bias = bias
            self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        matmul = reference.packed_matmul if self.training else packed_matmul
        packed, low_rank, bits = self.operands(x.shape[0])
        adapters = () if low_rank is None else (low_rank,)
        y = matmul(x, packed, ProductOptions(adapters=adapters, activation_bits=bits))
        if self.group is not None:
            y = mx.distributed.all_sum(y, group=self.group)
        return y + self._masked()["bias"].astype(y.dtype) if "bias" in self else y

    def operands(self, batch: int) -> tuple[PackedWeight, LowRank | None, int]:
        """Return the matrix, the adapters of a batch of `batch` rows (None if there are none), and the bits of
        activations.

        Under a task mask, the matrix has the kept channels alone.
        """
        low_rank = None if self.adapters is None else self.adapters(batch)
        return self._packed_of(self._masked()), low_rank, self._activation_bits

    def _masked(self) -> Mapping[str, mx.array]:
        """Return the layer's parameters by name, under the rows' task mask if they have one."""
        taken = None if self.mask is None else self.mask()
        return self if taken is None else {**self, **taken}

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> nn.Linear:
        packed = self.packed
        linear = nn.Linear(packed.in_dims, packed.out_dims, bias="bias" in self)
        linear.weight = self.dequantize(dtype)
        if "bias" in self:
            linear.bias = self["bias"].astype(dtype)
        return linear.train(self.training)

    def _extra_repr(self) -> str:
        packed = self.packed
        return (
            f"input_dims={packed.in_dims}, output_dims={packed.out_dims}, bias={'bias' in self}, "
            f"{self._format()}"
        )


class PackedExperts(_Packed):
    """Products `y = x W_e^T + bias_e` with the packed matrices (N, K) of a mixture's experts.

    Called as mlx-lm's `SwitchLinear`. Takes and stores stacked parts: codes (experts, N, K * bits / 32), scales
    () for all, (experts, N) or (experts, N, groups), and `bias` (experts, N).
    """

    def __init__(
        self, packed: PackedWeight, bias: mx.array | None = None, activation_bits: int = 16
    ):
        super().__init__(packed)
        self.activation_bits = activation_bits
        if bias is not None:
            self.bias = bias
            self.freeze()

    @property
    def experts(self) -> int:
        return self["weight"].shape[0]

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return (..., L, N) for x (..., L, K) and the experts' indices (...), whose axes are broadcast.

        `sorted_indices` promises ascending indices.
        """
        packed, (rows, inputs) = self.packed, x.shape[-2:]
        shape = np.broadcast_shapes(x.shape[:-2], indices.shape)
        chosen = mx.broadcast_to(indices, shape)
        own = (1,) * (len(shape) - x.ndim + 2) + x.shape[:-2]
        leading = next((i for i, size in enumerate(own) if size != shape[i]), len(shape))
        # The operation takes one vector for each few consecutive indices.
        if rows > 1 or any(size > 1 for size in own[leading:]):
            x = mx.broadcast_to(x, (*shape, rows, inputs))
            chosen = mx.broadcast_to(chosen[..., None], (*shape, rows))
        # The reference would dequantize all experts; MLX's product has a gradient, too.
        gather = mlx_products.packed_gather if self.training else packed_gather
        x, chosen = x.reshape(x.size // inputs, inputs), chosen.reshape(-1)
        y = gather(x, packed, chosen, self.experts, sorted_indices, self._activation_bits)
        y = y.reshape(*shape, rows, packed.out_dims // self.experts)
        return y + self["bias"].astype(y.dtype)[indices][..., None, :] if "bias" in self else y

    def prepare_for_mlx(self, dtype: mx.Dtype) -> None:
        """Give the experts scales and biases in MLX's format and of `dtype`, the activations' type, in place.

        MLX's product would otherwise make scales and biases of all experts at every call. Experts that share a
        grid keep their scales.
        """
        if not mlx_products.is_grid(self.packed):
            packed = stacked(mlx_products.in_mlx_format(self.packed, dtype), self.experts)
            self.mode, self.scales, self.biases = packed.mode, packed.scales, packed.biases
            self.freeze()

    def to_switch_linear(self, dtype: mx.Dtype = mx.float32) -> nn.Module:
        from mlx_lm.models.switch_layers import SwitchLinear

        packed = self.packed
        outputs = packed.out_dims // self.experts
        layer = SwitchLinear(packed.in_dims, outputs, self.experts, bias="bias" in self)
        layer.weight = self.dequantize(dtype).reshape(self.experts, outputs, packed.in_dims)
        if "bias" in self:
            layer.bias = self["bias"].astype(dtype)
        return layer.train(self.training)

    def _extra_repr(self) -> str:
        packed = self.packed
        return (
            f"input_dims={packed.in_dims}, output_dims={packed.out_dims // self.experts}, "
            f"num_experts={self.experts}, bias={'bias' in self}, {self._format()}"
        )


class PackedEmbedding(_Packed):
    """Embedding whose packed matrix (vocab_size, K) is also the head; a lookup returns rows of `dtype`.

    `activation_bits` is 16, or 8 to let a kernel round the head's inputs to int8.
    """

    def __init__(
        self, packed: PackedWeight, dtype: mx.Dtype = mx.float32, activation_bits: int = 16
    ):
        super().__init__(packed)
        self.dtype = dtype
        self.activation_bits = activation_bits

    @property
    def dtype(self) -> mx.Dtype:
        return getattr(mx, self._dtype)

    @dtype.setter
    def dtype(self, dtype: mx.Dtype) -> None:
        self._dtype = str(dtype).rpartition(".")[2]  # a Dtype can't be copied or pickled

    def __call__(self, tokens: mx.array) -> mx.array:
        lookup = reference.packed_embedding if self.training else packed_embedding
        return lookup(tokens, self.packed, self.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """Return logits (..., vocab_size) of hidden states (..., K), for a tied head."""
        matmul = reference.packed_matmul if self.training else packed_matmul
        return matmul(x, self.packed, ProductOptions(activation_bits=self.activation_bits))

    def to_embedding(self, dtype: mx.Dtype = mx.float32) -> nn.Embedding:
        packed = self.packed
        embedding = nn.Embedding(packed.out_dims, packed.in_dims)
        embedding.weight = self.dequantize(dtype)
        return embedding.train(self.training)

    def _extra_repr(self) -> str:
        packed = self.packed
        return f"{packed.out_dims}, {packed.in_dims}, {self._format()}"


def packed_layer_for(module: nn.Module, packed: PackedWeight, dtype: mx.Dtype) -> nn.Module:
    """Return a packed layer that replaces a linear layer or experts, whose bias it keeps, or an embedding.

    `packed` is stacked for experts. `dtype` is the type of the rows that an embedding returns.
    """
    if packed.codes.ndim > 2:
        return PackedExperts(packed, module.get("bias")).train(module.training)
    if isinstance(module, nn.Embedding | nn.QuantizedEmbedding | PackedEmbedding):
        return PackedEmbedding(packed, dtype).train(module.training)
    return PackedLinear(packed, module.get("bias")).train(module.training)


def is_experts(layer: nn.Module, quantized: bool = False) -> bool:
    """True if a layer is mlx-lm's `SwitchLinear`, float, or `quantized` in MLX's own format."""
    module = sys.modules.get("mlx_lm.models.switch_layers")  # there if any layer is of it
    kind = "QuantizedSwitchLinear" if quantized else "SwitchLinear"
    return module is not None and type(layer) is getattr(module, kind)


def is_stack(layer: nn.Module) -> bool:
    """True if a layer is a stack of matrices: mlx-lm's `SwitchLinear`, quantized or not, or `PackedExperts`."""
    return isinstance(layer, PackedExperts) or is_experts(layer) or is_experts(layer, True)


def flattened(packed: PackedWeight) -> PackedWeight:
    """Return the matrices of a stack one after the other, (experts * N, K); a matrix as it is."""
    if packed.codes.ndim == 2:
        return packed
    arrays = {part: getattr(packed, part) for part in ("codes", "scales", "biases")}
    found = {part: array for part, array in arrays.items() if array is not None and array.ndim > 1}
    return packed._replace(**{part: array.flatten(0, 1) for part, array in found.items()})


def stacked(packed: PackedWeight, experts: int) -> PackedWeight:
    """Return a matrix (experts * N, K) as a stack, whose parts have `experts` as their first axis."""
    arrays = {part: getattr(packed, part) for part in ("codes", "scales", "biases")}
    found = {part: array for part, array in arrays.items() if array is not None and array.ndim > 0}
    return packed._replace(**{p: a.reshape(experts, -1, *a.shape[1:]) for p, a in found.items()})


def set_activation_bits(model: nn.Module, bits: int) -> None:
    """Set the bits of activations, 16 or 8, in every packed layer of a model.

    Raises:
        RequestError: for other bits, and for 8 in a model without packed layers.
    """
    layers = [m for m in model.modules() if isinstance(m, _Packed)]
    if bits not in (8, 16):
        raise RequestError(f"activation_bits is {bits}; allowed are 16 and 8.")
    if bits != 16 and not layers:
        raise RequestError(
            f"activation_bits is {bits}, which is for packed layers, and this model has none. Convert it "
            "with -q, or leave it at 16."
        )
    for layer in layers:
        layer.activation_bits = bits


def check_width(in_dims: int, bits: int, name: str) -> None:
    """Raise `CheckpointError` unless `in_dims` codes fill whole 32-bit words."""
    if in_dims * bits % 32:
        raise CheckpointError(
            f"{name} has {in_dims} inputs, which can't be packed in {bits} bits: rows have to fill 32-bit "
            f"words, so a multiple of {32 // bits} is needed. Leave this layer out, or take more bits."
        )


def check_packed(packed: PackedWeight, name: str) -> None:
    """Raise `CheckpointError`, which names the layer and the part, unless a packed matrix is consistent."""

    def need(holds: bool, part: str, wanted: str) -> None:
        if not holds:
            value = packed.codes if part == "weight" else getattr(packed, part)
            got = repr(value) if part in ("bits", "mode") else _described(value)
            raise CheckpointError(f"{name}: {part} is {got}; it must be {wanted}.")

    need(packed.bits in BITS, "bits", f"one of {_listed(BITS)}")
    need(packed.mode in MODES, "mode", f"one of {_listed(MODES)}")
    codes, table, scales, biases = packed.codes, packed.table, packed.scales, packed.biases
    whole = codes.dtype == mx.uint32 and codes.ndim == 2 and codes.size > 0
    need(whole, "weight", "uint32 of shape [N, K * bits / 32]")
    rows, inputs, entries = packed.out_dims, packed.in_dims, 2**packed.bits
    if packed.mode == "palette":
        shape: tuple[int, ...] = ()
        if table is not None and _is_float(table):
            shape = table.shape
        fits = len(shape) == 2 and shape[1] == entries and shape[0] > 0 and rows % shape[0] == 0
        need(fits, "table", f"float of shape [T, {entries}], where T divides {rows}")
        need(scales is None, "scales", "absent in a palette")
        need(biases is None, "biases", "absent in a palette")
        return
    fits = False
    if scales is not None and _is_float(scales):
        fits = scales.shape in ((), (rows,))
        if scales.ndim == 2 and scales.shape[0] == rows:
            fits = scales.shape[1] > 0 and inputs % scales.shape[1] == 0
    need(fits, "scales", f"float of shape [], [{rows}] or [{rows}, G], where G divides {inputs}")
    need(table is None, "table", "absent outside a palette")
    if packed.mode == "balanced":
        need(biases is None, "biases", "absent in a balanced matrix")
    else:
        assert scales is not None
        fits = biases is not None and _is_float(biases) and biases.shape == scales.shape
        need(fits, "biases", f"float of shape {list(scales.shape)}, as its scales")


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def _described(array: mx.array | None) -> str:
    if array is None:
        return "missing"
    return f"{str(array.dtype).removeprefix('mlx.core.')} of shape {list(array.shape)}"


def _listed(values: tuple) -> str:
    return ", ".join(map(str, values))
