"""Counting work in the traced graph, without doing it."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx.config import ModelConfig
from afm_mlx.model import Model


def matmul_flops(config: ModelConfig, run: Callable, length: int) -> int:
    """Floating-point operations of the matrix products that `run(model, tokens)` needs.

    The model's weights are never computed: the graph is traced, and only what leads to the output is
    in it.
    """
    model = Model(config)
    flops = 0

    def count(event: dict) -> None:
        nonlocal flops
        if event.get("type") != "primitive":
            return
        shapes = [shape for _, shape, _ in event["inputs"]]
        if event["name"] in ("Matmul", "AddMM"):
            outputs = [shape for _, shape, _ in event["outputs"]]
            flops += 2 * math.prod(outputs[0]) * shapes[0][-1]
        elif event["name"] == "ScaledDotProductAttention":
            flops += 4 * math.prod(shapes[0]) * shapes[1][-2]

    def traced(tokens: mx.array, **weights: mx.array) -> mx.array:
        model.update(tree_unflatten(weights))
        return run(model, tokens)

    weights = dict(tree_flatten(model.parameters()))
    mx.export_function(count, traced, mx.zeros((1, length), mx.int32), **weights)
    return flops
