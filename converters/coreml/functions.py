"""The functions of a package.

| function | inputs | does | output |
| --- | --- | --- | --- |
| `prefill` | `tokens` (1, L), `position` (1,) | writes keys and values of the tokens | `next_position` (1,) |
| `decode` | `tokens` (1, 1), `position` (1,) | the same, and all blocks | `logits` (1, vocab_size) |

and `prefill_NAME`, `decode_NAME` with an adapter. L is one of the lengths. Inputs are int32. All functions have
the same two states. `prefill` ends where the last writing block's keys and values are known: nothing behind it
is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Program, get_new_symbol, types

from afm_mlx.config import ModelConfig
from afm_mlx.converters.coreml.layouts import Caches, Layout
from afm_mlx.converters.coreml.package import TARGET

STATES = ("keys", "values")


def add_functions(
    program: Program, prefill: Layout, decode: Layout, lengths: Sequence[int], suffix: str = ""
) -> None:
    """Add a pair of functions to a program.

    Args:
        program: takes them.
        prefill: builds the first.
        decode: builds the second.
        lengths: numbers of tokens that the first takes.
        suffix: what is added to their names.
    """
    program.add_function(f"prefill{suffix}", _prefill(prefill, lengths))
    program.add_function(f"decode{suffix}", _decode(decode))


def _prefill(layout: Layout, lengths: Sequence[int]) -> Function:
    config = layout.config
    length: Any = lengths[0] if len(lengths) == 1 else get_new_symbol()
    function = _function(config, length)
    with function:
        tokens, first, caches = _inputs(function)
        columns = _columns(tokens, first)
        after = mb.add(
            x=mb.reduce_max(x=columns, axes=[1], keep_dims=False),
            y=np.array([1], np.int32),
            name="next_position",
        )
        positions = layout.positions(columns, first, after)
        x = layout.embed(tokens)
        last = config.num_kv_layers - 1
        for block in range(last):
            x = layout.writing_block(x, block, positions, caches)
        layout.write(x, last, positions, caches)
        function.set_outputs([after])
    if len(lengths) > 1:
        shape = ct.EnumeratedShapes([(1, length) for length in lengths])
        function.input_types = [ct.TensorType("tokens", shape=shape, dtype=np.int32)]
    return function


def _decode(layout: Layout) -> Function:
    config = layout.config
    function = _function(config, 1)
    with function:
        tokens, first, caches = _inputs(function)
        after = mb.add(x=first, y=np.array([1], np.int32))
        columns = mb.expand_dims(x=first, axes=[0])
        positions = layout.positions(columns, first, after)
        x = layout.embed(tokens)
        for block in range(config.num_kv_layers):
            x = layout.writing_block(x, block, positions, caches)
        for block in range(config.num_kv_reuse_layers):
            x = layout.reuse_block(x, block, positions, caches)
        x = layout.norm(x, "model.output_norm.weight")
        function.set_outputs([layout.logits(x)])
    return function


def _function(config: ModelConfig, length: Any) -> Function:
    shape = (config.num_kv_layers, config.num_kv_heads, config.context_length, config.head_dim)
    inputs = {
        "tokens": mb.placeholder((1, length), dtype=types.int32),
        "position": mb.placeholder((1,), dtype=types.int32),
        **{name: mb.state_tensor_placeholder(shape, dtype=types.fp16) for name in STATES},
    }
    return Function(inputs, opset_version=TARGET)


def _inputs(function: Function) -> tuple[Any, Any, Caches]:
    tokens, first, keys, values = (
        function.inputs[name] for name in ("tokens", "position", *STATES)
    )
    return tokens, first, Caches(keys, values)


def _columns(tokens: Any, first: Any) -> Any:
    """(1, L) columns of the tokens: a running sum of ones, which has the length of the tokens by its type."""
    ones = mb.add(x=mb.mul(x=tokens, y=np.int32(0)), y=np.int32(1))
    return mb.add(x=mb.cumsum(x=ones, axis=1), y=mb.sub(x=first, y=np.array([1], np.int32)))
