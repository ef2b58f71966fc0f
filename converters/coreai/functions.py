"""The functions of a Core AI asset.

| function | inputs | does |
| --- | --- | --- |
| `prompt_N` | `tokens` (1, N), `position` (1,), `count` (1,) | reuse blocks for token `count - 1` alone |
| `step` | `tokens` (1, 1), `position` (1,) | one token |
| `prompt_N_adapter`, `step_adapter` | the same, and an A and a B for each matrix | the same with an adapter |
| `main` | `input_ids` (1, L), `position_ids` (1, S) | all blocks for the last L of S tokens |
| `prompt_N_NAME`, `step_NAME`, `main_NAME` | as without `_NAME` | the same with an adapter as constants |
| `image_prompt_N`, `image_step`, and with these endings | and `features` (N, hidden_dim) | reads images |

An image token's embedding is its row of `features`. `vision_functions.py` has the functions that encode images.

All write keys and values of their tokens, from column `position` on. The output is `logits` (1, vocab_size),
and of `main` (1, L, vocab_size).

Inputs are int32. All functions have the states `keys` and `values`, (writing blocks, 1, num_kv_heads, columns,
head_dim). `main` has the signature of Apple's model zoo, with dynamic sizes L, S and columns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from coreai._compiler.dialects import coreai
from coreai._compiler.ir import ArrayAttr, DictAttr, StringAttr, Value

from afm_mlx.config import Matrix, ModelConfig
from afm_mlx.converters.coreai.constants import Constants, tensor_type
from afm_mlx.converters.graph_source import AdapterSource, Float, Source, half_split
from afm_mlx.coreai.bundle import ZooConfig, adapter_inputs

STATES = ("keys", "values")
_HIDDEN = -1e4
"""Added to the score of a column that a token must not see: its weight is 0 in float16, too."""
_DYNAMIC = -1


class Columns(NamedTuple):
    """Where a call's L tokens are in the states, and what attention computes from that.

    `first` and `after` are (1,) int32: the column of the first token, and the one after the last token. `read`
    is the number of columns that attention reads, (1,) int32. `cos` and `sin` are (L, head_dim / 2) float32.
    The mask (1, L, read), which is added to scores, is repeated for the heads that share keys.
    """

    first: Value
    after: Value
    read: Value
    cos: Value
    sin: Value
    mask: Value


class FunctionBuilder:
    """Builds one function, on activations x (L, features); call one of its three methods, once.

    The blocks are AFM's; `zoo_functions.py` has mlx-lm's.

    Products, attention and adapters are computed in `dtype`; norms, RoPE and the rounding of keys and values in
    float32, as the MLX model computes them.

    Args:
        source: the model's parameters.
        config: the architecture, with the number of columns of the states as its context.
        constants: collects what the functions use.
        dtype: type of activations, logits, adapters, and states without int8 codes.
        adapter: the rank of an adapter that is an input, or an adapter whose matrices are constants; pass None
            for no adapter.
    """

    def __init__(
        self,
        source: Source,
        config: ModelConfig | ZooConfig,
        constants: Constants,
        dtype: Float,
        adapter: int | AdapterSource | None = None,
    ) -> None:
        self._source, self._config, self._constants = source, config, constants
        self._dtype, self._adapter = dtype, adapter
        self._matrices: dict[str, Matrix] = source.matrices
        self._states: dict[str, Value] = {}
        self._arguments: dict[str, Value] = {}

    # -- names of parameters

    _embedding = _head = "model.embedding"
    _output_norm = "model.output_norm.weight"
    _out_proj = "self_attn.out_proj"

    # -- functions

    def prompt(self, name: str, length: int, with_images: bool = False) -> None:
        """Build `prompt_N` or `image_prompt_N`; the module must be open."""
        inputs = {"tokens": (1, length), "position": (1,), "count": (1,)}
        graph = self._open(name, inputs, self._config.context_length, with_images)
        with graph.block:
            tokens, first, count = graph.arguments[:3]
            columns = self._static_columns(first, length)
            x = self._writing_blocks(self._seen(tokens, with_images), columns)
            start = coreai.broadcasting_sub(count, ints(1))
            x = self._rows(x, start, count)
            seen = Columns(
                columns.first,
                columns.after,
                columns.read,
                self._rows(columns.cos, start, count),
                self._rows(columns.sin, start, count),
                self._last_mask(columns.mask, start, count),
            )
            logits = self._logits(self._reuse_blocks(x, seen))
            self._close(graph, logits)

    def step(self, name: str, with_images: bool = False) -> None:
        """Build `step` or `image_step`; the module must be open."""
        inputs = {"tokens": (1, 1), "position": (1,)}
        graph = self._open(name, inputs, self._config.context_length, with_images)
        with graph.block:
            tokens, first = graph.arguments[:2]
            columns = self._static_columns(first, 1)
            x = self._writing_blocks(self._seen(tokens, with_images), columns)
            self._close(graph, self._logits(self._reuse_blocks(x, columns)))

    def main(self, name: str) -> None:
        """Build `main`; the module must be open."""
        inputs = {"input_ids": (1, _DYNAMIC), "position_ids": (1, _DYNAMIC)}
        graph = self._open(name, inputs, _DYNAMIC)
        with graph.block:
            tokens, positions = graph.arguments[:2]
            columns = self._dynamic_columns(tokens, positions)
            x = self._writing_blocks(self._embedded(tokens), columns)
            logits = self._logits(self._reuse_blocks(x, columns))
            self._close(graph, coreai.expand_dims(logits, axes(0)))

    def _open(
        self,
        name: str,
        inputs: Mapping[str, tuple[int, ...]],
        columns: int,
        with_images: bool = False,
    ) -> Any:
        config = self._config
        kind = np.int8 if config.kv_bits is not None else self._dtype
        shape = (config.num_kv_layers, 1, config.num_kv_heads, columns, config.head_dim)
        types: dict[str, tuple[tuple[int, ...], Any]] = {
            key: (size, np.int32) for key, size in inputs.items()
        }
        if with_images:
            types["features"] = (inputs["tokens"][1], config.hidden_dim), self._dtype
        types |= dict.fromkeys(STATES, (shape, kind))
        if isinstance(self._adapter, int):
            assert isinstance(config, ModelConfig)
            types |= {
                key: (size, self._dtype) for key, size in adapter_inputs(config, self._adapter)
            }
        graph = coreai.GraphOp(
            name=name,
            input_types=[tensor_type(*each) for each in types.values()],
            result_types=[],
            input_names=list(types),
        )
        arguments = dict(zip(types, graph.arguments, strict=True))
        self._states = {state: arguments[state] for state in STATES}
        self._arguments = arguments
        return graph

    def _close(self, graph: Any, logits: Value) -> None:
        """Set the outputs; the last outputs of states make their inputs mutable."""
        outputs = {f"new_{name}": value for name, value in self._states.items()}
        graph.set_outputs_spec_from_dict(OrderedDict(logits=logits, **outputs))
        attributes = []
        for argument in graph.arg_attrs:
            named = {entry.name: entry.attr for entry in argument}
            if (name := StringAttr(named["coreai.name"]).value) in STATES:
                named["MutableBuffers.buffer_mutation"] = StringAttr.get(f"new_{name}")
            attributes.append(DictAttr.get(named))
        graph.arg_attrs = ArrayAttr.get(attributes)

    # -- columns

    def _static_columns(self, first: Value, length: int) -> Columns:
        columns = coreai.broadcasting_add(first, ints(*range(length)))
        after = coreai.broadcasting_add(first, ints(length))
        count = self._config.context_length
        every = self._constants.array("columns", np.arange(count, dtype=np.int32))
        return self._columns(first, after, ints(count), columns, every)

    def _dynamic_columns(self, tokens: Value, positions: Value) -> Columns:
        after, length = (
            coreai.cast(coreai.slice_(coreai.get_shape(x), [1], [2], [1]), np.int32)
            for x in (positions, tokens)
        )
        first = coreai.broadcasting_sub(after, length)
        every = coreai.reshape(positions, [-1])
        columns = coreai.slice_(every, first, after, [1])
        return self._columns(first, after, after, columns, every)

    def _columns(
        self, first: Value, after: Value, read: Value, columns: Value, every: Value
    ) -> Columns:
        """Return `Columns` of tokens in `columns` (L,); `every` (read,) has the numbers of all columns read."""
        config = self._config
        index = coreai.expand_dims(columns, axes(1))
        cos, sin = (
            coreai.gather_nd(self._constants.array(key, table.astype(np.float32)), index)
            for key, table in zip(("rope.cos", "rope.sin"), self._rope(), strict=True)
        )
        hidden = coreai.broadcasting_greater(coreai.expand_dims(every, axes(0)), index)
        mask = coreai.broadcasting_mul(
            coreai.cast(hidden, self._dtype), np.array(_HIDDEN, self._dtype)
        )
        share = config.num_heads // config.num_kv_heads
        mask = coreai.tile(mask, np.array([share, 1], np.uint32))
        return Columns(first, after, read, cos, sin, coreai.expand_dims(mask, axes(0)))

    def _rope(self) -> tuple[np.ndarray, np.ndarray]:
        """Return cosines and sines of all positions, each (context_length, head_dim / 2)."""
        config = self._config
        assert isinstance(config, ModelConfig)
        half = config.head_dim // 2
        frequencies = config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
        angles = np.arange(config.context_length)[:, None] * frequencies
        return np.cos(angles), np.sin(angles)

    def _last_mask(self, mask: Value, start: Value, after: Value) -> Value:
        """Return the mask of one token of a prompt, repeated for the heads that share keys."""
        share = self._config.num_heads // self._config.num_kv_heads
        width = mask.type.shape[2]
        row = coreai.slice_(mask, _joined([0], start, [0]), _joined([1], after, [width]), [1, 1, 1])
        return coreai.tile(coreai.reshape(row, [1, 1, width]), np.array([1, share, 1], np.uint32))

    # -- blocks

    def _embedded(self, tokens: Value) -> Value:
        """Return the embeddings (L, hidden_dim) of tokens (1, L)."""
        path, constants = self._embedding, self._constants
        index = coreai.reshape(tokens, [-1, 1])
        matrix = self._source.matrix(path)
        if matrix.rule is None:
            return coreai.gather_nd(constants.floats(path), index)
        if (parts := constants.scales(path)) is None:
            return coreai.gather_nd(constants.decoded(path), index)
        # Rows are decoded after they are found: the whole matrix would take memory.
        codes = coreai.cast(coreai.gather_nd(constants.codes(path), index), self._dtype)
        scale, offset = (
            part if part.type.shape[0] == 1 else coreai.gather_nd(part, index) for part in parts
        )
        width, groups = matrix.shape[1], scale.type.shape[1]
        if groups > 1:
            codes = coreai.reshape(codes, [-1, groups, width // groups])
            scale, offset = (coreai.expand_dims(part, axes(2)) for part in (scale, offset))
        numbers = coreai.broadcasting_add(coreai.broadcasting_mul(codes, scale), offset)
        return coreai.reshape(numbers, [-1, width]) if groups > 1 else numbers

    def _seen(self, tokens: Value, with_images: bool) -> Value:
        """Return `_embedded`, with the input `features` in the rows of image tokens."""
        x = self._embedded(tokens)
        if not with_images:
            return x
        assert isinstance(self._config, ModelConfig)
        assert self._config.vision_config is not None
        image = ints(self._config.vision_config.image_token_id)
        is_image = coreai.broadcasting_equal(coreai.reshape(tokens, [-1, 1]), image)
        return coreai.broadcasting_where(is_image, self._arguments["features"], x)

    def _writing_blocks(self, x: Value, columns: Columns) -> Value:
        config = self._config
        for block in range(config.num_kv_layers):
            path = f"model.layers.{block}"
            normed = self._normed(x, f"{path}.input_layernorm.weight")
            q, k, v = self._qkv(normed, path)
            key_scale, value_scale = self._kv_scales(block)
            k = self._positioned(k, f"{path}.self_attn.k_norm", 1 / key_scale, columns)
            self._write("keys", block, k, columns)
            v = self._heads(coreai.cast(v, np.float32))
            if config.kv_bits is not None:
                v = coreai.broadcasting_mul(v, np.array(1 / value_scale, np.float32))
            self._write("values", block, v, columns)
            x = self._attend_and_feed(x, q, path, block, columns)
        return x

    def _reuse_blocks(self, x: Value, columns: Columns) -> Value:
        last = self._config.num_kv_layers - 1
        for block in range(self._config.num_kv_reuse_layers):
            path = f"model.kv_reuse_layers.{block}"
            normed = self._normed(x, f"{path}.input_layernorm.weight")
            q = self._linear(normed, f"{path}.self_attn.q_proj")
            x = self._attend_and_feed(x, q, path, last, columns)
        return x

    def _write(self, name: str, block: int, heads: Value, columns: Columns) -> None:
        """Write `heads` (num_kv_heads, L, head_dim) float32 into a block's columns of a state."""
        state, config = self._states[name], self._config
        kind: Any = self._dtype
        if config.kv_bits is not None:
            heads = coreai.broadcasting_maximum(coreai.round_(heads), np.array(-128, np.float32))
            heads = coreai.broadcasting_minimum(heads, np.array(127, np.float32))
            kind = np.int8
        self._states[name] = coreai.slice_update(
            state,
            _joined([block, 0, 0], columns.first, [0]),
            _joined([block + 1, 1, config.num_kv_heads], columns.after, [config.head_dim]),
            ints(1, 1, 1, 1, 1),
            coreai.expand_dims(coreai.cast(heads, kind), axes(0, 1)),
        )

    def _read(self, name: str, block: int, columns: Columns) -> Value:
        """Return a block's keys or values, (num_kv_heads, read, head_dim)."""
        config = self._config
        part = coreai.slice_(
            self._states[name],
            ints(block, 0, 0, 0, 0),
            _joined([block + 1, 1, config.num_kv_heads], columns.read, [config.head_dim]),
            ints(1, 1, 1, 1, 1),
        )
        part = coreai.reshape(part, [config.num_kv_heads, -1, config.head_dim])
        return coreai.cast(part, self._dtype)

    def _attend_and_feed(
        self, x: Value, q: Value, path: str, block: int, columns: Columns
    ) -> Value:
        """Return x after attention and feed-forward of the block at `path`.

        Its projected queries `q` attend to the keys and values of the writing block number `block`.
        """
        config = self._config
        key_scale, value_scale = self._kv_scales(block)
        factor = key_scale / np.sqrt(config.head_dim)
        q = self._positioned(q, f"{path}.self_attn.q_norm", factor, columns)
        # Queries of the heads that share keys are one below the other.
        q = coreai.reshape(coreai.cast(q, self._dtype), [config.num_kv_heads, -1, config.head_dim])
        k, v = (self._read(name, block, columns) for name in STATES)
        scores = coreai.broadcasting_batch_matmul(q, transposed(k, 0, 2, 1))
        weights = coreai.softmax(coreai.broadcasting_add(scores, columns.mask), -1)
        y = coreai.reshape(
            coreai.broadcasting_batch_matmul(weights, v), [config.num_heads, -1, config.head_dim]
        )
        y = coreai.reshape(transposed(y, 1, 0, 2), [-1, config.num_heads * config.head_dim])
        if value_scale != 1:
            y = coreai.broadcasting_mul(y, np.array(value_scale, self._dtype))
        x = coreai.broadcasting_add(x, self._linear(y, f"{path}.{self._out_proj}"))
        normed = self._normed(x, f"{path}.post_attention_layernorm.weight")
        gate = coreai.silu(self._linear(normed, f"{path}.mlp.gate_proj"))
        up = self._linear(normed, f"{path}.mlp.up_proj")
        down = self._linear(coreai.broadcasting_mul(gate, up), f"{path}.mlp.down_proj")
        return coreai.broadcasting_add(x, down)

    def _logits(self, x: Value) -> Value:
        """Return logits (L, vocab_size) of hidden states x (L, hidden_dim)."""
        path = self._head
        x = self._normed(x, self._output_norm)
        if self._source.matrix(path).rule is None:
            # A transposed constant would be a second copy of the embedding.
            y = coreai.broadcasting_batch_matmul(self._constants.floats(path), transposed(x, 1, 0))
            return transposed(y, 1, 0)
        return coreai.broadcasting_batch_matmul(x, self._constants.transposed(path))

    # -- parts of blocks

    def _qkv(self, x: Value, path: str) -> list[Value]:
        """Return projected queries, keys and values of the writing block at `path`."""
        config = self._config
        assert isinstance(config, ModelConfig)
        qkv = self._linear(x, f"{path}.self_attn.qkv_proj")
        return self._split(qkv, [config.hidden_dim, config.kv_dim, config.kv_dim])

    def _positioned(self, x: Value, norm: str, factor: float, columns: Columns) -> Value:
        """Return heads (heads, L, head_dim) float32 of projected queries or keys x (L, features).

        They are after RoPE and the norm at the path `norm`, and times `factor`.
        """
        weight = self._source.vector(f"{norm}.weight")[half_split(self._config.head_dim)] * factor
        rotated = self._rotated(self._heads(coreai.cast(x, np.float32)), columns)
        return self._norm(rotated, self._constants.array(norm, weight.astype(np.float32)))

    def _linear(self, x: Value, path: str) -> Value:
        """Return x times the matrix at a path, plus the adapter's product."""
        y = coreai.broadcasting_batch_matmul(x, self._constants.transposed(path))
        if (pair := self._lora(path)) is None:
            return y
        a, b = pair
        count = len(b)
        inner = coreai.broadcasting_batch_matmul(x, a)
        inners = [inner] if count == 1 else self._split(inner, [a.type.shape[1] // count] * count)
        parts = [
            coreai.broadcasting_batch_matmul(part, each)
            for part, each in zip(inners, b, strict=True)
        ]
        return coreai.broadcasting_add(y, parts[0] if count == 1 else coreai.concat(1, parts))

    def _lora(self, path: str) -> tuple[Value, list[Value]] | None:
        """Return the adapter's A (K, projections * rank) and each projection's B (rank, N); None without."""
        if isinstance(self._adapter, int):
            count = len(self._matrices[path].projections)
            names = [f"{path}.lora_b.{i}" for i in range(count)]
            return self._arguments[f"{path}.lora_a"], [self._arguments[name] for name in names]
        found = None if self._adapter is None else self._adapter.matrices(path)
        if found is None:
            return None
        array, key = self._constants.array, found.key
        return array(f"{key}.a", found.a.T), [
            array(f"{key}.b.{i}", b.T) for i, b in enumerate(found.b)
        ]

    def _normed(self, x: Value, name: str) -> Value:
        weight = self._constants.array(name, self._source.vector(name))
        return coreai.cast(self._norm(coreai.cast(x, np.float32), weight), self._dtype)

    def _norm(self, x: Value, weight: Value) -> Value:
        square = coreai.reduce_mean(coreai.broadcasting_mul(x, x), [-1])
        eps = np.array(self._config.rms_norm_eps, np.float32)
        inverse = coreai.rsqrt(coreai.broadcasting_add(square, eps))
        return coreai.broadcasting_mul(coreai.broadcasting_mul(x, inverse), weight)

    def _heads(self, x: Value) -> Value:
        """Reshape (L, heads * head_dim) to (heads, L, head_dim)."""
        width = self._config.head_dim
        return transposed(coreai.reshape(x, [-1, x.type.shape[1] // width, width]), 1, 0, 2)

    def _rotated(self, heads: Value, columns: Columns) -> Value:
        """Apply RoPE to heads (heads, L, head_dim) float32, the first half of each against the second."""
        half = self._config.head_dim // 2
        one, two = self._split(heads, [half, half])
        cos, sin = columns.cos, columns.sin
        mul = coreai.broadcasting_mul
        return coreai.concat(
            2,
            [
                coreai.broadcasting_sub(mul(one, cos), mul(two, sin)),
                coreai.broadcasting_add(mul(two, cos), mul(one, sin)),
            ],
        )

    def _split(self, x: Value, widths: Sequence[int]) -> list[Value]:
        """Split the last axis."""
        return list(coreai.split(x, np.array(widths, np.uint32), x.type.rank - 1))

    def _rows(self, x: Value, start: Value, after: Value) -> Value:
        """Return one row of x (L, features), as (1, features)."""
        width = x.type.shape[1]
        row = coreai.slice_(x, _joined([], start, [0]), _joined([], after, [width]), ints(1, 1))
        return coreai.reshape(row, [1, width])

    def _kv_scales(self, block: int) -> tuple[float, float]:
        """Return the scales of a writing block's keys and values; 1 where the states hold floats."""
        if self._config.kv_bits is None:
            return 1.0, 1.0
        path = f"model.layers.{block}.self_attn.quant"
        key = float(self._source.vector(f"{path}_key_scale"))
        return key, float(self._source.vector(f"{path}_value_scale"))


# -- operations


def ints(*numbers: int) -> Value:
    return coreai.constant(np.array(numbers, np.int32))


def axes(*axes: int) -> np.ndarray:
    return np.array(axes, np.int32)


def _joined(before: Sequence[int], middle: Value, after: Sequence[int]) -> Value:
    """Return numbers, one of which is known only when the function runs, as one (n,) int32."""
    parts = [ints(*before), middle, ints(*after)]
    if not before:
        del parts[0]
    return coreai.concat(0, parts if after else parts[:-1])


def transposed(x: Value, *order: int) -> Value:
    return coreai.transpose(x, np.array(order, np.uint32))
