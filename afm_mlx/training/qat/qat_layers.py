"""Quantization-aware training: layers that compute with the numbers that they will be packed to.

`prepare_qat` puts them into a model, any loop trains it, and `pack_qat` snaps the weights to their grids and
packs them: the packed model gives the same logits to float tolerance, because the codes come from the
function that the forward pass ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.config import KV_SCALES
from afm_mlx.errors import ConfigError
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import (
    Predicate,
    quantized_config,
    replace_modules,
    rule_chooser,
)
from afm_mlx.quantization.rule import AFM_RULE, QuantizationRule
from afm_mlx.training.qat.fake_quantize import (
    fake_quantize,
    initial_clip,
    lsq_gradient_scale,
    quantize,
)


class _QAT(nn.Module):
    """A float matrix whose weights are rounded to a grid where they are used.

    Parameters are `weight` (N, K), `clip` of the shape of the rule's scales, and `bias` (N,) if there is one;
    all are trainable.

    Args:
        layer: the layer whose weight and bias are trained.
        rule: the grid.
        name: name of the layer, for errors.
        gradient_scaling: scale gradients of the clip factors as `lsq_gradient_scale` says.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be on such a grid, and why.
    """

    def __init__(
        self,
        layer: nn.Linear | nn.Embedding,
        rule: QuantizationRule,
        name: str = "the matrix",
        gradient_scaling: bool = True,
    ):
        super().__init__()
        self.weight = layer.weight
        self.clip = initial_clip(layer.weight, rule, name)
        if "bias" in layer:
            self.bias = layer.bias
        self.rule = rule
        shape = layer.weight.shape
        self.gradient_scale = lsq_gradient_scale(shape, rule) if gradient_scaling else 1.0

    def fake_quantized(self) -> mx.array:
        """The matrix that the layer computes with, (N, K), with gradients to `weight` and `clip`."""
        return fake_quantize(self["weight"], self["clip"], self.rule, self.gradient_scale)

    def _packed_as(self, kind: Any, **others: Any) -> Any:
        """A layer of a kind, `PackedLinear` or `PackedEmbedding`, with the codes of the weights."""
        rule, weight = self.rule, self["weight"]
        found = quantize(weight, self["clip"], rule)
        # MLX's own layers compute in the type of their scales.
        dtype = weight.dtype if rule.is_mlx_format else mx.float32
        parts = {"scales": found.scales.astype(dtype)}
        if found.biases is not None:
            parts["biases"] = found.biases.astype(dtype)
        packed = kind.from_codes(found.codes, rule.bits, rule.mode, **parts, **others)
        return packed.train(self.training)

    def _extra_repr(self) -> str:
        rows, inputs = self["weight"].shape
        return f"{rows}, {inputs}, rule={self.rule}"


class QATLinear(_QAT):
    """`y = x W~^T + bias`, where W~ is the weight on its grid; see `fake_quantize`."""

    def __call__(self, x: mx.array) -> mx.array:
        """(..., K) to (..., N)."""
        y = x @ self.fake_quantized().T
        return y + self["bias"] if "bias" in self else y

    def to_packed(self) -> PackedLinear:
        """The layer with the codes of its weights."""
        return self._packed_as(PackedLinear, bias=self.get("bias"))


class QATEmbedding(_QAT):
    """Rows of a matrix on its grid, and the same matrix as a head."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """(...) integers to (..., K)."""
        return self.fake_quantized()[tokens]

    def as_linear(self, x: mx.array) -> mx.array:
        """Logits (..., vocab_size) of hidden states (..., K), for a tied head."""
        return x @ self.fake_quantized().T

    def to_packed(self) -> PackedEmbedding:
        """The layer with the codes of its weights."""
        return self._packed_as(PackedEmbedding, dtype=self["weight"].dtype)


def prepare_qat(
    model: nn.Module,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    *,
    learn_kv_scales: bool = False,
    gradient_scaling: bool = True,
) -> nn.Module:
    """Have the linear layers and embeddings of a model, ours or one of mlx-lm's zoo, train on grids, in place.

    Layers are chosen as in `quantize_model`. Norms, biases and layers of other types stay in float, and as
    trainable as they were.

    Args:
        model: a model with float weights.
        rule: rule of linear layers; balanced or affine.
        embedding_rule: rule of embeddings and of a head that is none (`lm_head`); `rule` with 4 bits at least
            when None.
        predicate: decides for each layer: one of these two rules (True), none (False), or its own.
        learn_kv_scales: train the int8 scales of keys and values; otherwise they are frozen.
        gradient_scaling: scale gradients of the clip factors, see `lsq_gradient_scale`. Adam's steps hardly
            depend on it; the clipping of the gradient's norm does.

    Returns:
        the model.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be packed so, and why.
    """
    choose = rule_chooser(rule, embedding_rule, predicate)
    kinds = {nn.Linear: QATLinear, nn.Embedding: QATEmbedding}
    layers: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        kind = kinds.get(type(module))
        if kind is not None and (own := choose(path, module)) is not None:
            layers.append((path, kind(module, own, path, gradient_scaling).train(module.training)))
    if not layers:
        raise ConfigError(
            "No layer was chosen to be trained on a grid: the rule says no to all float layers, or the model "
            "has none. A packed model is made float again first, by afm_mlx.quantization.dequantize_model."
        )
    replace_modules(model, layers)
    for module in model.modules():
        if all(name in module for name in KV_SCALES):
            switch = module.unfreeze if learn_kv_scales else module.freeze
            switch(recurse=False, keys=list(KV_SCALES))
    return model


def pack_qat(model: nn.Module, config: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """Snap the weights of a prepared model to their grids and pack them, in place.

    Args:
        model: a model that `prepare_qat` returned.
        config: the content of its config.json.

    Returns:
        the model, in evaluation mode, and `config` with the keys `quantization` and `quantization_config`, as
        `quantize_model` returns them.

    Raises:
        ConfigError: when no layer of the model trains on a grid.
    """
    layers = [(path, m) for path, m in model.named_modules() if isinstance(m, _QAT)]
    if not layers:
        raise ConfigError("The model has no layer to pack: prepare_qat comes before pack_qat.")
    rules = {path: module.rule for path, module in layers}
    for path, module in layers:
        replace_modules(model, [(path, module.to_packed())])
    return model.eval(), quantized_config(config, rules)
