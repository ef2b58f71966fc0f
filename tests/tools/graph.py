"""Counting dispatches and bytes on Metal in the traced graph, without Metal.

What MLX's Metal backend does with a primitive is read in its sources (`mlx/backend/gpu/primitives.cpp`,
`mlx/backend/common/common.cpp`, `mlx/backend/metal/*.cpp`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.metal import prompts

# New strides over the same buffer. A reshape is one where the strides allow, and a copy otherwise.
VIEWS = set(
    """
    Broadcast BroadcastAxes Copy Depends ExpandDims Flatten Reshape Slice Split Squeeze StopGradient Transpose
    Unflatten View
    """.split()
)
# One kernel each, whatever the strides of their inputs are.
SINGLE = set(
    """
    Abs Add AddMM Arange ArgReduce AsType BitwiseBinary Compiled Cos Divide Equal Exp Full Gather GatherAxis
    Greater GreaterEqual Less LessEqual Log LogSumExp LogicalAnd LogicalNot LogicalOr Matmul Maximum
    Minimum Multiply Negative NotEqual Power QuantizedMatmul Reduce Remainder Round Select Sigmoid Sin
    Softmax Sqrt Square Subtract Tanh
    """.split()
)
# A copy of the target unless its buffer can be taken over, then a kernel that writes the update.
UPDATES = {"SliceUpdate", "Scatter", "ScatterAxis"}
# Read as many numbers of the table as they return.
LOOKUPS = ("Gather", "GatherAxis", "embedding")
# Operations of `mx.fast` with a kernel of their own on Metal.
FUSED = ("rms_norm", "rope", "scaled_dot_product_attention")
# Keys from which on attention over few queries takes two passes on the larger chips.
TWO_PASSES = 1024
FEW_QUERIES = 8
COMPILED = "compiled_"  # first part of the names of functions that `mx.compile` makes a kernel of


@dataclass
class Cost:
    """Cost of a traced function on Metal.

    Args:
        bytes_read: of arrays that were there before: weights and caches, once per kernel that reads them, a
            cache at its whole capacity. Numbers that the function computes itself are not counted.
        kernels: dispatches by name of the primitive or custom kernel.
        inputs: arrays that are bound to the kernels.
        source_bytes: characters of the custom kernels' sources, which MLX goes through at each launch.
    """

    dispatches: int = 0
    bytes_read: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    inputs: int = 0
    source_bytes: int = 0


def count_dispatches(function: Callable, *args: Any, **options: Any) -> Cost:
    """Count the cost of `function` on Metal in its graph; nothing is computed, and no Metal is needed."""
    events: list[dict] = []
    # On another device, MLX's fused operations are traced as the many of their fallback.
    fused = mock.patch.multiple(mx.fast, **{name: _stand_in(name) for name in FUSED})
    # In a trace, compiled functions are traced as they are written.
    compiled = mock.patch.object(
        prompts, "_fused", lambda function, dtype: _stand_in(COMPILED + function.__name__, dtype)
    )
    with dispatch.force("metal"), fused, compiled:
        mx.export_function(events.append, function, *args, **options)
    return _Count(events).cost


def decode_cost(
    model: nn.Module,
    run: Callable[[Any, mx.array, Any], Any],
    tokens: mx.array,
    cache: Sequence[Any],
) -> Cost:
    """The cost of `run(model, tokens, cache)`, which returns arrays.

    The model's weights may be arrays that were never computed: they are inputs of the graph. Entries of the
    cache that hold keys and values are used up.
    """
    filled = [entry for entry in cache if not entry.empty()]

    def traced(tokens: mx.array, **arrays: mx.array) -> list[mx.array]:
        for i, entry in enumerate(filled):
            entry.buffer, entry.tail = arrays.pop(f"cache.{i}"), arrays.pop(f"tail.{i}")
        model.update(tree_unflatten(arrays))
        results = run(model, tokens, cache)
        results = list(results) if isinstance(results, (tuple, list)) else [results]
        return results + [entry.tail for entry in filled]

    arrays = dict(tree_flatten(model.parameters()))
    for i, entry in enumerate(filled):
        arrays[f"cache.{i}"], arrays[f"tail.{i}"], _ = entry.open_tail(*entry.buffer.shape[1::2])
    return count_dispatches(traced, tokens, **arrays)


class _Count:
    """Walks the events of a trace.

    Layouts are NumPy views over no memory, since NumPy decides like MLX what is contiguous and which reshapes
    need a copy. Strides count elements.
    """

    def __init__(self, events: Sequence[dict]):
        self.cost = Cost()
        self._layouts: dict[str, np.ndarray] = {}
        self._stored: set[str] = set()  # arrays that were there before, and views of them
        self._uses: Counter[str] = Counter()
        for event in events:
            self._uses.update(
                name for name, *_ in event.get("inputs", ()) if event["type"] == "primitive"
            )
        for event in events:
            if event["type"] == "inputs":
                self._given(event["inputs"])
            elif event["type"] == "constants":
                self._given(
                    [(name, array.shape, array.dtype) for name, array in event["constants"]]
                )
            elif event["type"] == "primitive":
                self._primitive(event)

    def _given(self, arrays: Sequence[tuple]) -> None:
        for name, shape, _ in arrays:
            self._layouts[name] = _contiguous(shape)
            self._stored.add(name)

    def _primitive(self, event: dict) -> None:
        name, inputs, outputs = event["name"], event["inputs"], event["outputs"]
        for output, shape, _ in outputs:
            self._layouts[output] = _contiguous(shape)
        if name in VIEWS:
            self._view(event)
        elif name in UPDATES:
            target = inputs[0][0]
            # The step before may still be reading the function's inputs, which nobody takes over then.
            held = target in self._stored or self._uses[target] > 1
            self._launch(name, 1 + held, inputs[0 if held else 1 :], outputs)
        elif name == "CustomKernel":
            name = _kernel_name(event)
            if name.startswith(COMPILED):
                self._launch(name, 1, inputs, outputs)
                return
            many = name.startswith("scaled") and inputs[0][1][2] > FEW_QUERIES
            if many:  # a token's heads side by side
                batch, heads, length, dim = outputs[0][1]
                layout = _contiguous((batch, length, heads, dim))
                self._layouts[outputs[0][0]] = layout.swapaxes(1, 2)
            layouts = [self._layouts[i] for i in dict.fromkeys(i for i, *_ in inputs)]
            twice = name.startswith("scaled") and not many and inputs[1][1][2] >= TWO_PASSES
            if many:  # rows of a head may be anywhere
                copied = 0
            elif name.startswith("scaled"):
                copied = sum(not _fits_attention(x, i == 0) for i, x in enumerate(layouts[:3]))
            else:  # inputs that aren't contiguous are copied first
                copied = sum(not x.flags.c_contiguous for x in layouts)
            self._launch(name, 1 + copied + twice, inputs, outputs)
            self.cost.source_bytes += sum(
                len(argument) for argument in event["arguments"] if isinstance(argument, str)
            )
        elif name == "Concatenate":
            self._launch(name, len(inputs), inputs, outputs)
        elif name == "Pad":  # fills, then copies
            self._launch(name, 2, inputs, outputs)
        elif name in SINGLE:
            self._launch(name, 1, inputs, outputs)
        else:
            raise NotImplementedError(f"no rule says what {name} costs on Metal; add one here.")

    def _launch(
        self, name: str, count: int, inputs: Sequence[tuple], outputs: Sequence[tuple]
    ) -> None:
        self.cost.dispatches += count
        self.cost.kernels[name] += count
        self.cost.inputs += len(inputs)
        written = sum(math.prod(shape) * dtype.size for _, shape, dtype in outputs)
        for source in {
            source: array for array in inputs if (source := array[0]) in self._stored
        }.values():
            nbytes = _elements(self._layouts[source[0]]) * source[2].size
            self.cost.bytes_read += min(nbytes, written) if name.endswith(LOOKUPS) else nbytes

    def _view(self, event: dict) -> None:
        source = event["inputs"][0][0]
        shapes = [shape for _, shape, _ in event["outputs"]]
        views = _views(event["name"], self._layouts[source], event["arguments"], shapes)
        if views is None:
            self._launch(event["name"], 1, event["inputs"], event["outputs"])
            return
        for (output, *_), view in zip(event["outputs"], views, strict=True):
            self._layouts[output] = view
            self._stored |= {output} if source in self._stored else set()


def _fits_attention(x: np.ndarray, is_query: bool) -> bool:
    """True if MLX's attention over few queries takes this input as it lies, (B, heads, L, head_dim).

    Source: `q_copy_unless` and `kv_copy_unless` in `mlx/backend/metal/scaled_dot_product_attention.cpp`.
    """
    if x.flags.c_contiguous:
        return True
    if not is_query:
        return x.strides[3] == 1 and (1 in x.shape[:2] or x.strides[0] == x.strides[1] * x.shape[1])
    other = 1 if x.shape[0] == 1 else 0
    apart = (x.shape[3], x.shape[3] * x.shape[other], 1)
    return 1 in x.shape[:2] and (x.strides[other], *x.strides[2:]) == apart


def _contiguous(shape: Sequence[int]) -> np.ndarray:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), shape, strides)


def _elements(layout: np.ndarray) -> int:
    """Numbers in memory; a broadcast repeats them."""
    return math.prod(n for n, stride in zip(layout.shape, layout.strides, strict=True) if stride)


def _views(
    name: str, layout: np.ndarray, arguments: Sequence[Any], shapes: Sequence[tuple]
) -> list[np.ndarray] | None:
    """Layouts of a view's outputs; None where the strides demand a copy."""
    if name == "Transpose":
        return [layout.transpose(arguments[0])]
    if name == "Slice":
        return [layout[tuple(slice(*bounds) for bounds in zip(*arguments, strict=True))]]
    if name == "Split":
        return np.split(layout, arguments[0], axis=arguments[1])
    if name in ("Broadcast", "BroadcastAxes"):
        return [np.broadcast_to(layout, shapes[0])]
    if name == "View":
        # Strided numbers keep their strides; no kernel of ours returns them.
        return [_contiguous(shapes[0])] if layout.flags.c_contiguous else None
    if name in ("Copy", "Depends", "StopGradient"):
        return [layout] * len(shapes)
    try:
        return [layout.reshape(shapes[0], copy=False)]
    except ValueError:
        return None


def _kernel_name(event: dict) -> str:
    """The name that a custom kernel was given, without what MLX adds."""
    return event["arguments"][0].removeprefix("custom_kernel_").split("__")[0]


def _stand_in(name: str, dtype: mx.Dtype | None = None) -> Callable:
    """A kernel of this name that is traced and never runs.

    Its result has the shape of the first array, and its type unless `dtype` is given.
    """

    def run(*args: Any, **options: Any) -> mx.array:
        values = [value for _, value in tree_flatten([*args, *options.values()])]
        arrays = [value for value in values if isinstance(value, mx.array)]
        kernel = mx.fast.metal_kernel(
            name, [f"x{i}" for i in range(len(arrays))], ["out"], source=""
        )
        (out,) = kernel(
            inputs=arrays,
            template=[("stand_in", True)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[arrays[0].shape],
            output_dtypes=[dtype or arrays[0].dtype],
        )
        return out

    return run
