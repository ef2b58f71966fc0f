"""The functions of an asset for mlx-lm's Llama and Qwen3, whose blocks differ from AFM's.

Queries, keys and values have a matrix each; Qwen3 has norms over heads, before RoPE; the head can have its own
matrix. All blocks write keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coreai import authoring  # noqa: F401  first: coreai-core's modules import each other in circles
from coreai._compiler.dialects import coreai
from coreai._compiler.ir import Value

from afm_mlx.converters.coreai.functions import Columns, FunctionBuilder
from afm_mlx.converters.coreai.zoo_source import ZooSource


class ZooFunctionBuilder(FunctionBuilder):
    """Builds one function of a model of mlx-lm; see `FunctionBuilder`."""

    _embedding = _head = "model.embed_tokens"
    _output_norm = "model.norm.weight"
    _out_proj = "self_attn.o_proj"
    _source: ZooSource

    def __init__(self, source: ZooSource, *arguments: Any) -> None:
        super().__init__(source, *arguments)
        if source.has_head:
            self._head = "lm_head"

    def _rope(self) -> tuple[np.ndarray, np.ndarray]:
        return self._source.rope(self._config.context_length, self._config.head_dim)

    def _qkv(self, x: Value, path: str) -> list[Value]:
        return [self._linear(x, f"{path}.self_attn.{name}_proj") for name in "qkv"]

    def _positioned(self, x: Value, norm: str, factor: float, columns: Columns) -> Value:
        heads = self._heads(coreai.cast(x, np.float32))
        if self._source.has(f"{norm}.weight"):
            weight = self._source.vector(f"{norm}.weight")
            heads = self._norm(heads, self._constants.array(norm, weight))
        heads = self._rotated(heads, columns)
        if factor != 1:
            heads = coreai.broadcasting_mul(heads, np.array(factor, np.float32))
        return heads
