"""Dispatches of a decode step of zoo models on Metal: this package's, and mlx-lm's own, counted in the graph.

A step takes one token of one row to the next token, the likeliest one. Blocks are alike, so two models of one
and of two blocks tell what all of them take.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache, KVCache
from mlx_lm.utils import _get_classes

from afm_mlx.checkpoint.stored_layers import repack_mlx_layers, settle_scales
from afm_mlx.engine.sampling import Draw, draw
from afm_mlx.kernels import dispatch
from afm_mlx.model.zoo_blocks import replace_blocks
from bench.peer_zoo import CONFIGS
from tests.tools import graph
from tests.tools.graph import Cost

NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-3.2-1b": "Llama-3.2-1B"}
CONTEXTS = (512, 4096)


def dispatches(name: str, context: int, ours: bool) -> tuple[int, int]:
    """Return the dispatches of a model's step with `context` tokens in its cache, and of one of its blocks."""
    step = our_step if ours else mlx_lm_step
    one, two = (step(CONFIGS[name] | {"num_hidden_layers": n}, context) for n in (1, 2))
    block = two.dispatches - one.dispatches
    return one.dispatches + (CONFIGS[name]["num_hidden_layers"] - 1) * block, block


def our_step(config: dict[str, Any], context: int) -> Cost:
    """Count a step of this package's engine, which runs rows in mlx-lm's batched caches."""
    row: Any = SimpleNamespace(request=SimpleNamespace(logits_processors=None, sampler=None))

    def choose(logits: mx.array) -> Sequence[mx.array]:
        return draw([Draw(row)], logits, mx.array([0]))[:2]

    with dispatch.force("metal"), mock.patch.object(dispatch, "device", return_value="gpu"):
        model = quantized(config)
        repack_mlx_layers(model)
        settle_scales(model)
        replace_blocks(model.eval())
        return _step(model, config, context, choose, batched=True)


def mlx_lm_step(config: dict[str, Any], context: int) -> Cost:
    """Count a step of mlx-lm's `generate_step` with its greedy sampler."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")

    def choose(logits: mx.array) -> Sequence[mx.array]:
        return [mx.argmax(logits - mx.logsumexp(logits, keepdims=True), axis=-1)]

    with contextlib.ExitStack() as stack:
        # Traced where there is no GPU, these would be the many operations that they are made of.
        compiled = graph._stand_in(f"{graph.COMPILED}swiglu")
        stack.enter_context(mock.patch.object(module, "swiglu", compiled))
        stack.enter_context(mock.patch.object(mx, "dequantize", _dequantize))
        return _step(quantized(config), config, context, choose, batched=False)


def _step(
    model: Any,
    config: dict[str, Any],
    context: int,
    choose: Callable[[mx.array], Sequence[mx.array]],
    batched: bool,
) -> Cost:
    """Count `choose` on the logits of a token that makes `context` tokens in the model's cache."""
    cache: list[Any] = [BatchKVCache([0]) if batched else KVCache() for _ in model.layers]
    arrays = dict(tree_flatten(model.parameters()))
    shape = 1, config["num_key_value_heads"], -(-context // 256) * 256, config["head_dim"]
    for i in range(len(cache)):
        arrays |= {f"{which}.{i}": mx.zeros(shape, mx.bfloat16) for which in ("keys", "values")}
        if batched:
            arrays[f"offset.{i}"] = mx.array([context - 1])

    def run(tokens: mx.array, **arrays: mx.array) -> list[mx.array]:
        for i, entry in enumerate(cache):
            entry.keys, entry.values = arrays.pop(f"keys.{i}"), arrays.pop(f"values.{i}")
            entry._idx = context - 1
            entry.offset = arrays.pop(f"offset.{i}") if batched else context - 1
        model.update(tree_unflatten(list(arrays.items())))
        results = [*choose(model(tokens, cache=cache)[:, -1, :])]
        for entry in cache:
            results += [entry.keys, entry.values, *([entry.offset] if batched else [])]
        return results

    return graph.count_dispatches(run, mx.zeros((1, 1), mx.int32), **arrays)


def quantized(config: dict[str, Any]) -> Any:
    """Make mlx-lm's model at 4 bits in groups of 64; its weights are never computed."""
    architecture, arguments = _get_classes(config)
    model = architecture(arguments.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    for layer in model.layers:
        mx.eval(getattr(layer.self_attn.rope, "_freqs", []))  # of the constructor
    return model


def _dequantize(codes: mx.array, scales: mx.array, *biases: mx.array, **options: Any) -> mx.array:
    shape = *codes.shape[:-1], codes.shape[-1] * 32 // options["bits"]
    like = mx.zeros(shape, scales.dtype)
    mx.eval(like)
    return graph._stand_in("dequantize")(like, codes, scales, *biases, **options)


def table() -> str:
    """The counts of all models as Markdown."""
    lines = [
        "| model | tokens in the cache | mlx-lm | afm-mlx | of each block |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for name, label in NAMES.items():
        for context in CONTEXTS:
            (theirs, their_block), (ours, our_block) = (
                dispatches(name, context, which) for which in (False, True)
            )
            blocks = f"{their_block} and {our_block}"
            lines.append(f"| {label} | {context:,} | {theirs:,} | {ours:,} | {blocks} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
