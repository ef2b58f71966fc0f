"""The linear layers of a model's blocks, which adapters change."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.config import block_kinds
from afm_mlx.kernels import dispatch
from afm_mlx.model.fused_layers import LinearWrapper
from afm_mlx.model.model import is_afm
from afm_mlx.model.split_layers import Cut
from afm_mlx.quantization.packed_layers import PackedExperts, PackedLinear, is_stack
from afm_mlx.quantization.quantize_model import replace_modules
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL

Shapes = Mapping[str, Mapping[str, tuple[int, int]]]
"""`TargetModule.shapes` of every target module, by its path."""


class ZooBase(NamedTuple):
    """The architecture of a base model of mlx-lm's zoo, as far as adapters depend on it."""

    model_type: str
    shapes: Shapes


TEXT, ADAPTOR, ENCODER = "text", "adaptor", "encoder"
PARTS = (TEXT, ADAPTOR, ENCODER)
"""Parts of a model: its blocks; and of a model that takes images, the adaptor and the encoder of `vision`."""


class TargetModule(NamedTuple):
    """A linear layer of a block, or of the image encoder or its adaptor, which an adapter can change."""

    path: str  # within the model, such as `model.layers.0.mlp.up_proj`
    key: str  # within the block, such as `mlp.up_proj`
    block: int  # -1 for layers of `vision`
    layer: nn.Module  # the linear layer, or the wrapper around it
    # end of the outputs of each projection in a fused layer, or of each matrix in a stack, else None
    sections: tuple[int, ...] | None

    @property
    def part(self) -> str:
        """The one of `PARTS` that the layer belongs to."""
        return TEXT if self.block >= 0 else self.path.split(".")[1]

    @property
    def is_stack(self) -> bool:
        """True if the layer is a stack of matrices, each of which has a LoRA pair."""
        return is_stack(self.linear)

    @property
    def linear(self) -> nn.Module:
        return self.layer.linear if isinstance(self.layer, LinearWrapper) else self.layer

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each LoRA pair, by the suffix of its tensors' names: "", or ".0", ".1", ...

        Of the whole layer, if ranks hold parts of it.
        """
        if self.is_stack:
            count, outputs, inputs = self._stack_shape
            return {f".{i}": (inputs, outputs) for i in range(count)}
        inputs, outputs = linear_shape(self.linear)
        cut: Cut | None = getattr(self.linear, "cut", None)
        if cut is not None:
            outputs, inputs = (cut.whole, inputs) if cut.axis == 0 else (outputs, cut.whole)
        if self.sections is None:
            return {"": (inputs, outputs)}
        widths = (end - start for start, end in pairwise([0, *self.sections]))
        return {f".{i}": (inputs, width) for i, width in enumerate(widths)}

    @property
    def _stack_shape(self) -> tuple[int, int, int]:
        """Numbers of matrices of the whole stack, and of outputs and inputs of each."""
        assert self.sections is not None
        inputs, outputs = linear_shape(self.linear)
        held = len(self.sections)
        cut: Cut | None = getattr(self.linear, "track_cut", None)
        count = held if cut is None else held * cut.whole // cut.held
        return count, outputs // held, inputs

    @property
    def own_names(self) -> dict[str, str | None]:
        """Map names of a whole stack's tensors to names in a rank's part; to None for other ranks' tensors.

        Empty if this process holds the whole layer, or the layer is no stack.
        """
        cut: Cut | None = getattr(self.linear, "track_cut", None)
        if cut is None or not self.is_stack:
            return {}
        count, *_ = self._stack_shape
        ((start, end),) = cut.ranges
        first, after = (each * count // cut.whole for each in (start, end))
        return {
            f"{self.path}.{name}.{i}": f"{self.path}.{name}.{i - first}"
            if first <= i < after
            else None
            for i in range(count)
            for name in ("lora_a", "lora_b")
        }

    @property
    def channels(self) -> dict[str, np.ndarray]:
        """Rows of A, or columns of B, that belong to a rank's part of the layer, by the names of tensors.

        Empty if this process holds the whole layer.
        """
        cut: Cut | None = getattr(self.linear, "cut", None)
        if cut is None:
            return {}
        kept = np.concatenate([np.arange(*each) for each in cut.ranges])
        if cut.axis == 1:
            return {f"{self.path}.lora_a{end}": kept for end in self.shapes}
        found, start = {}, 0
        for end, (_, width) in self.shapes.items():
            own = kept[(kept >= start) & (kept < start + width)]
            found[f"{self.path}.lora_b{end}"] = own - start
            start += width
        return found

    @property
    def part_shapes(self) -> dict[str, tuple[int, int]]:
        """`shapes` of a rank's part of the layer."""
        if self.is_stack:
            assert self.sections is not None
            return dict(list(self.shapes.items())[: len(self.sections)])
        channels = self.channels
        return {
            end: (
                channels[a].size if (a := f"{self.path}.lora_a{end}") in channels else inputs,
                channels[b].size if (b := f"{self.path}.lora_b{end}") in channels else outputs,
            )
            for end, (inputs, outputs) in self.shapes.items()
        }


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a float, packed or MLX-quantized linear layer.

    For a stack of matrices, these are the outputs of all matrices.
    """
    if isinstance(layer, PackedLinear | PackedExperts):
        return layer.packed.in_dims, layer.packed.out_dims
    *stack, outputs, inputs = layer.weight.shape
    return (inputs * 32 // layer.bits if "scales" in layer else inputs), math.prod(stack) * outputs


def linear_weight(layer: nn.Module) -> mx.array:
    """Return the matrix (outputs, inputs) float32 of a float, packed or MLX-quantized linear layer.

    For a stack of matrices, these are the rows of one matrix after the other.
    """
    if isinstance(layer, PackedLinear | PackedExperts):
        return layer.dequantize()
    weight = layer.weight
    if "scales" in layer:
        settings = layer.group_size, layer.bits, layer.mode
        weight = mx.dequantize(weight, layer.scales, layer.get("biases"), *settings)
    return weight.astype(mx.float32).reshape(-1, weight.shape[-1])


def target_modules(model: nn.Module) -> list[TargetModule]:
    """Return the linear layers of all blocks, block by block, and then of the image encoder and its adaptor.

    A wrapper counts as the layer that it wraps. Stacks of matrices count in models of parallel tracks; in other
    mixtures, adapters leave experts alone.
    """
    blocks = {id(block): index for index, block in enumerate(model.layers)}
    paths = {blocks[id(m)]: path for path, m in model.named_modules() if id(m) in blocks}
    sections: dict[str, tuple[int, ...]] = {}  # of fused layers, by their keys
    for kind in block_kinds(model.args) if is_afm(model) else ():
        for matrix in kind.matrices:
            if len(matrix.projections) > 1:
                sections[matrix.name] = tuple(accumulate(p.outputs for p in matrix.projections))
    takes_stacks = getattr(model, "model_type", None) == TRACK_MODEL
    found = []
    for index, block in enumerate(model.layers):
        for key, layer in _linear_layers(block, takes_stacks):
            path = f"{paths[index]}.{key}"
            target = TargetModule(path, key, index, layer, sections.get(key))
            if target.is_stack:
                count, outputs = target.linear["weight"].shape[:2]
                target = target._replace(
                    sections=tuple(range(outputs, (count + 1) * outputs, outputs))
                )
            found.append(target)
    if is_afm(model) and model.vision is not None:
        for path, layer in _linear_layers(model.vision, False):
            key = re.sub(r"^encoder\.blocks\.\d+\.", "", path)
            found.append(TargetModule(f"vision.{path}", key, -1, layer, None))
    return found


def _linear_layers(module: nn.Module, with_stacks: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the paths and the linear layers, or the wrappers around them, in a module."""
    inside: tuple[str, ...] = ()
    # Owners come before what they own when sorted by name.
    for path, layer in sorted(module.named_modules(), key=lambda item: item[0]):
        if path.startswith(inside):
            continue
        if isinstance(layer, LinearWrapper):
            inside = (*inside, f"{path}.")
        elif not isinstance(layer, nn.Linear | nn.QuantizedLinear | PackedLinear) and not (
            with_stacks and is_stack(layer)
        ):
            continue
        yield path, layer


def target_shapes(model: nn.Module) -> Shapes:
    """Return the shapes that adapters of a model must have, by the target modules' paths."""
    return {target.path: target.shapes for target in target_modules(model)}


def zoo_base(model: nn.Module) -> ZooBase:
    """Describe a model of mlx-lm's zoo; its weights are not read."""
    return ZooBase(getattr(model.args, "model_type", ""), target_shapes(model))


def replace_layers(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    """Replace layers, given by path, in place; select kernels and trace steps again. No layers: do nothing."""
    if layers:
        replace_modules(model, layers)
        dispatch.invalidate()


def unwrap_layers(model: nn.Module) -> None:
    """Replace each wrapper in a model by the linear layer that it wraps."""
    wrapped = [t for t in target_modules(model) if isinstance(t.layer, LinearWrapper)]
    replace_layers(model, [(target.path, target.linear) for target in wrapped])
