"""Packed models of random codes, with real shapes and bytes, for benchmarks."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.config import ModelConfig
from afm_mlx.kernels import PackedWeight
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear, activation_dtype
from afm_mlx.quantization.quantize_model import replace_modules, rule_chooser
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE, QuantizationRule


def random_packed_model(
    config: ModelConfig,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule = AFM_EMBEDDING_RULE,
    seed: int = 0,
) -> Model:
    """Make a packed model with random codes, without any float matrix.

    Weights have a fresh model's variance, norms are 1, and the scales of keys and values fit normed
    activations, so that sums stay in a trained model's range.
    """
    model = Model(config)
    fill_with_random_codes(model, rule, embedding_rule, seed)
    if config.kv_bits:
        for layer in model.model.layers:
            # A normed value rarely passes 4 standard deviations.
            layer.self_attn.quant_key_scale = mx.array(4 / 127)
            layer.self_attn.quant_value_scale = mx.array(4 / 127)
    mx.eval(model.parameters())
    prefer_huge_pages(array for _, array in tree_flatten(model.parameters()))
    return model.eval()


def fill_with_random_codes(
    model: nn.Module, rule: QuantizationRule, embedding_rule: QuantizationRule, seed: int = 0
) -> None:
    """Replace linear layers and embeddings of any model by packed ones of random codes; set norms to 1.

    Float weights of the model that are not evaluated yet never will be.
    """
    rng = np.random.default_rng(seed)
    dtype = activation_dtype()
    choose = rule_chooser(rule, embedding_rule)
    leaves: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.RMSNorm):
            module.weight = mx.ones(module.weight.shape, dtype)
        if type(module) not in (nn.Linear, nn.Embedding) or (own := choose(path, module)) is None:
            continue
        packed = _random_packed(module.weight.shape, own, rng, path)
        if type(module) is nn.Linear:
            leaves.append((path, PackedLinear(packed, module.get("bias"))))
        else:
            leaves.append((path, PackedEmbedding(packed, dtype)))
    replace_modules(model, leaves)


def _random_packed(
    shape: tuple[int, ...], rule: QuantizationRule, rng: np.random.Generator, name: str
) -> PackedWeight:
    rule.check(shape, name)
    parts = rule.part_shapes(shape)
    codes = rng.integers(0, 2**32, parts["weight"], dtype=np.uint32)
    deviation = shape[1] ** -0.5
    table = scales = biases = None
    if rule.mode == "palette":
        table = mx.array(np.sort(rng.normal(0, deviation, parts["table"])).astype(np.float32))
    else:
        # Codes are uniform, so their variance is (4^bits - 1) / 12.
        step = deviation * (12 / (4**rule.bits - 1)) ** 0.5
        values = rng.uniform(0.8 * step, 1.2 * step, parts["scales"])
        scales = mx.array(np.asarray(values, np.float32))
    if rule.mode == "affine":
        biases = scales * -((2**rule.bits - 1) / 2)
    return PackedWeight(mx.array(codes), rule.bits, rule.mode, scales, biases, table)
