"""The launches of a model's decode step on Metal, recorded without Metal and without numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.config import ModelConfig
from afm_mlx.kernels import PackedWeight, dispatch, replay
from afm_mlx.kernels.metal import runtime as metal_runtime
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import replace_modules
from afm_mlx.quantization.rule import QuantizationRule


class Recorded(NamedTuple):
    """A call of `kernels.metal.runtime.launch`."""

    kernel: metal_runtime.Kernel
    inputs: Sequence[mx.array]
    options: dict[str, Any]

    @property
    def key(self) -> tuple:
        """Equal for calls that cost the same."""
        shapes = tuple((x.shape, x.dtype) for x in self.inputs)
        return self.kernel.name, shapes, str(sorted(self.options.items()))


def record(run: Callable[[], Any]) -> list[Recorded]:
    """The launches that `run` makes; their results are zeros that nothing computes."""
    calls: list[Recorded] = []

    def launch(
        kernel: metal_runtime.Kernel, inputs: Sequence[mx.array], **options: Any
    ) -> list[mx.array]:
        calls.append(Recorded(kernel, inputs, {"template": (), **options}))
        shapes = zip(options["output_shapes"], options["output_dtypes"], strict=True)
        return [mx.zeros(shape, dtype) for shape, dtype in shapes]

    untraced = mock.patch.object(replay, "is_available", return_value=False)
    with untraced, dispatch.force("metal"), mock.patch.object(metal_runtime, "launch", launch):
        run()
    return calls


def shapes_only(
    config: ModelConfig, rule: QuantizationRule, embedding_rule: QuantizationRule
) -> Model:
    """A packed model in bfloat16 whose arrays are never computed."""
    model, layers = Model(config), []

    def packed(module: nn.Module, rule: QuantizationRule) -> PackedWeight:
        parts = rule.part_shapes(module.weight.shape)
        floats = {k: mx.zeros(shape) for k, shape in parts.items() if k != "weight"}
        codes = mx.zeros(parts["weight"], mx.uint32)
        return PackedWeight(
            codes, rule.bits, rule.mode, *map(floats.get, ("scales", "biases", "table"))
        )

    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            layers.append((path, PackedLinear(packed(module, rule))))
        elif type(module) is nn.Embedding:
            layers.append((path, PackedEmbedding(packed(module, embedding_rule), mx.bfloat16)))
        elif isinstance(module, nn.RMSNorm):
            module.weight = mx.zeros(module.weight.shape, mx.bfloat16)
    replace_modules(model, layers)
    return model.eval()


def cache_of(model: Model, length: int, capacity: int) -> list[Any]:
    """A cache of one row with `length` tokens, whose keys and values are never computed."""
    config, cache = model.args, model.make_cache()
    shape = (1, 2 * config.num_kv_heads, capacity, config.head_dim)
    dtype = mx.int8 if config.kv_bits == 8 else mx.bfloat16
    for entry in cache[: config.num_kv_layers]:
        entry.buffer = mx.zeros(shape, dtype)
        entry._lengths = [length]
    return cache


def decode_step(model: Model, length: int) -> Counter[tuple]:
    """Launches of the next token after `length`."""
    cache = cache_of(model, length, -(-(length + 1) // 256) * 256)
    return record(lambda: model.greedy(mx.zeros((1, 1), mx.int32), cache))
