"""The functions of a Core ML package, in two arrangements of operators.

| function | inputs | does | output |
| --- | --- | --- | --- |
| `prefill` | `tokens` (1, L), `position` (1,) | writes keys and values of the tokens | `next_position` (1,) |
| `decode` | `tokens` (1, 1), `position` (1,) | the same, and runs all blocks | `logits` (1, vocab_size) |

and `prefill_NAME`, `decode_NAME` with an adapter. L is one of the plan's lengths. Inputs are int32. All
functions have the same two states, keys and values. `prefill` ends once the keys and values of the last writing
block are known: nothing after them is ever read.

`LinearLayout` is for GPU and CPU. `ChannelLayout` has channels first and convolutions of 1 x 1, as Apple's
guide for the Neural Engine asks. Source: Apple, "Deploying Transformers on the Apple Neural Engine" (2022), and
`ml-ane-transformers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Function, Var, get_new_symbol, types

from afm_mlx.config import ModelConfig
from afm_mlx.converters.coreml.compression import Constants, MatrixConstants, Weight
from afm_mlx.converters.graph_source import AdapterSource, Float, Source, check_held, half_split

TARGET = ct.target.iOS18
STATES = ("keys", "values")

_HIDDEN = -1e4
"""Added to the score of a column that a token must not see: its weight is 0 in float16, too."""

_STRIDE = 64
_MAX_ROWS = 1 << 14
"""Output channels of a convolution on the Neural Engine; the head has several."""


class TokenPositions(NamedTuple):
    """Columns of a call's tokens, and what attention computes from them, in the layout's shape.

    `first` and `after` are (1,) int32: the column of the first token, and the one after the last token.
    The mask is added to scores.
    """

    first: Var
    after: Var
    cos: Var
    sin: Var
    mask: Var


class Caches:
    """The states of a function: keys and values, (writing blocks, num_kv_heads, columns, head_dim) float16."""

    def __init__(self, keys: Var, values: Var) -> None:
        self._states = {"keys": keys, "values": values}
        self._now = {name: mb.read_state(input=state) for name, state in self._states.items()}

    def write(self, name: str, block: int, new: Var, positions: TokenPositions) -> None:
        """Write `new` (1, num_kv_heads, L, head_dim) at a block's `positions`; `name` is "keys" or "values"."""
        now = self._now[name]
        _, heads, _, width = now.shape
        corner = [np.array([block, 0], np.int32), positions.first, np.array([0], np.int32)]
        end = [np.array([block + 1, heads], np.int32), positions.after, np.array([width], np.int32)]
        updated = mb.slice_update(
            x=now,
            update=mb.cast(x=new, dtype="fp16"),
            begin=mb.concat(values=corner, axis=0),
            end=mb.concat(values=end, axis=0),
        )
        self._now[name] = mb.coreml_update_state(state=self._states[name], value=updated)

    def read(self, name: str, block: int, dtype: str) -> Var:
        """Return a block's `name` ("keys" or "values"), (1, num_kv_heads, columns, head_dim), as `dtype`."""
        now = self._now[name]
        part = mb.slice_by_index(x=now, begin=[block, 0, 0, 0], end=[block + 1, *now.shape[1:]])
        return part if dtype == "fp16" else mb.cast(x=part, dtype=dtype)


class Layout(ABC):
    """An arrangement of operators; one object builds one function. `x` are activations in the layout's shape.

    `constants` and `matrices` collect what the function uses; it computes in `dtype`.
    """

    weight_axes: tuple[int, ...]
    """Axes of length 1 after the two of a matrix."""
    feature_shape: tuple[int, ...]
    """Shape of one number for each feature of x."""
    feature_axis: int

    def __init__(
        self,
        source: Source,
        constants: Constants,
        matrices: MatrixConstants,
        dtype: Float,
        adapter: AdapterSource | None,
    ) -> None:
        self.config: ModelConfig = source.config
        self._source, self._constants, self._matrices = source, constants, matrices
        self._np_dtype, self._adapter = dtype, adapter
        self._dtype = "fp16" if dtype == np.float16 else "fp32"

    # -- what the layouts differ in

    @abstractmethod
    def embed(self, tokens: Var) -> Var:
        """Return the embeddings of token ids (1, L) int32, as x."""

    @abstractmethod
    def positions(self, columns: Var, first: Var, after: Var) -> TokenPositions:
        """Return what attention needs to know about tokens in `columns` (1, L) int32 of the caches.

        `first` and `after` are `TokenPositions`' fields.
        """

    @abstractmethod
    def norm(self, x: Var, name: str) -> Var:
        """Apply RMSNorm to x, with the model's parameter `name` as its weight."""

    @abstractmethod
    def product(self, x: Var, weight: Var) -> Var:
        """Return x times a matrix, whose variable has the further axes `weight_axes`."""

    @abstractmethod
    def queries(self, x: Var, weight: np.ndarray, positions: TokenPositions) -> Var | list[Var]:
        """Return projected queries x after RoPE and a norm with `weight`, as an argument of `attend`."""

    @abstractmethod
    def keys(self, x: Var, weight: np.ndarray, positions: TokenPositions, codes: bool) -> Var:
        """Return projected keys x after RoPE and a norm, (1, num_kv_heads, L, head_dim), int8 if `codes`."""

    @abstractmethod
    def values(self, x: Var, factor: float, codes: bool) -> Var:
        """Return projected values x, (1, num_kv_heads, L, head_dim); if `codes`, `x * factor` as int8."""

    @abstractmethod
    def attend(
        self, queries: Var | list[Var], keys: Var, values: Var, positions: TokenPositions
    ) -> Var:
        """Return the outputs of all heads side by side, as x; `keys` and `values` come from `Caches.read`."""

    @abstractmethod
    def logits(self, x: Var) -> Var: ...

    # -- what they share

    def write(self, x: Var, block: int, positions: TokenPositions, caches: Caches) -> Var:
        """Write a writing block's keys and values into the states; return its projected queries."""
        config, path = self.config, f"model.layers.{block}"
        qkv = self.linear(
            self.norm(x, f"{path}.input_layernorm.weight"), f"{path}.self_attn.qkv_proj"
        )
        q, k, v = self.split(qkv, [config.hidden_dim, config.kv_dim, config.kv_dim])
        key_scale, value_scale = self._kv_scales(block)
        codes = config.kv_bits is not None
        k_weight = self._head_weight(f"{path}.self_attn.k_norm.weight") / key_scale
        caches.write("keys", block, self.keys(k, k_weight, positions, codes), positions)
        caches.write("values", block, self.values(v, 1 / value_scale, codes), positions)
        return q

    def writing_block(self, x: Var, block: int, positions: TokenPositions, caches: Caches) -> Var:
        """Return x after a block that writes its keys and values."""
        q = self.write(x, block, positions, caches)
        return self._attend_and_feed(x, q, f"model.layers.{block}", block, positions, caches)

    def reuse_block(self, x: Var, block: int, positions: TokenPositions, caches: Caches) -> Var:
        """Return x after a block that reads the keys and values of the last writing block."""
        path = f"model.kv_reuse_layers.{block}"
        normed = self.norm(x, f"{path}.input_layernorm.weight")
        q = self.linear(normed, f"{path}.self_attn.q_proj")
        return self._attend_and_feed(x, q, path, self.config.num_kv_layers - 1, positions, caches)

    def _attend_and_feed(
        self, x: Var, q: Var, path: str, block: int, positions: TokenPositions, caches: Caches
    ) -> Var:
        """Return x after attention and feed-forward of the block at `path`.

        Its projected queries `q` attend to the keys and values of the writing block number `block`.
        """
        key_scale, value_scale = self._kv_scales(block)
        weight = self._head_weight(f"{path}.self_attn.q_norm.weight") * key_scale
        queries = self.queries(q, weight, positions)
        k, v = (caches.read(name, block, self._dtype) for name in STATES)
        y = self.attend(queries, k, v, positions)
        if value_scale != 1:
            y = mb.mul(x=y, y=self._np_dtype.type(value_scale))
        x = mb.add(x=x, y=self.linear(y, f"{path}.self_attn.out_proj"))
        normed = self.norm(x, f"{path}.post_attention_layernorm.weight")
        gate = mb.silu(x=self.linear(normed, f"{path}.mlp.gate_proj"))
        up = self.linear(normed, f"{path}.mlp.up_proj")
        return mb.add(x=x, y=self.linear(mb.mul(x=gate, y=up), f"{path}.mlp.down_proj"))

    def linear(self, x: Var, path: str) -> Var:
        """Return x times the matrix at a path, plus the adapter's product."""
        y = self.scaled_product(
            x, self._matrices.matrix(self._source.matrix(path), None, self.weight_axes)
        )
        added = None if self._adapter is None else self._adapter.matrices(path)
        if added is None:
            return y
        rank = added.b[0].shape[1]
        inner = self.product(x, self._weight(f"{added.key}.a", added.a))
        inners = [inner] if len(added.b) == 1 else self.split(inner, [rank] * len(added.b))
        parts = [
            self.product(part, self._weight(f"{added.key}.b.{i}", b))
            for i, (part, b) in enumerate(zip(inners, added.b, strict=True))
        ]
        return mb.add(x=y, y=parts[0] if len(parts) == 1 else self.join(parts))

    def scaled_product(self, x: Var, weight: Weight) -> Var:
        """Return x times a matrix of the model."""
        y = self.product(x, weight.numbers)
        if weight.row_scales is None:
            return y
        return mb.mul(x=y, y=self._row_scales(weight, self.feature_shape))

    def rows(self, weight: Weight, indices: Var) -> Var:
        """Return rows (1, L, K) of a matrix of the model at `indices` (1, L) int32."""
        where = {"indices": indices, "axis": 0, "validate_indices": False}
        found = mb.gather(x=weight.numbers, **where)
        if weight.row_scales is None:
            return found
        return mb.mul(x=found, y=mb.gather(x=self._row_scales(weight, (-1, 1)), **where))

    def split(self, x: Var, widths: list[int]) -> list[Var]:
        return list(mb.split(x=x, split_sizes=widths, axis=self.feature_axis))

    def join(self, parts: list[Var]) -> Var:
        return mb.concat(values=parts, axis=self.feature_axis)

    def _row_scales(self, weight: Weight, shape: tuple[int, ...]) -> Var:
        assert weight.row_scales is not None
        return self._constants.array(f"{weight.key}.rows", weight.row_scales.reshape(shape))

    def _weight(self, key: str, array: np.ndarray) -> Var:
        return self._constants.array(key, array.reshape(*array.shape, *self.weight_axes))

    def _head_weight(self, name: str) -> np.ndarray:
        """Return the weight of a norm over a head, float32, in the order of `half_split`."""
        return self._source.vector(name)[half_split(self.config.head_dim)]

    def _kv_scales(self, block: int) -> tuple[float, float]:
        """Return the scales of a writing block's keys and values; 1 where the states hold floats."""
        if self.config.kv_bits is None:
            return 1.0, 1.0
        path = f"model.layers.{block}.self_attn.quant"
        key = float(self._source.vector(f"{path}_key_scale"))
        return key, float(self._source.vector(f"{path}_value_scale"))

    def _rope(self, columns: Var) -> tuple[Var, Var]:
        """Return cosines and sines (L, head_dim / 2) of RoPE's angles, float32."""
        half, length = self.config.head_dim // 2, self.config.context_length
        frequencies = self.config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
        flat = mb.reshape(x=columns, shape=[-1])
        high = mb.floor_div(x=flat, y=np.int32(_STRIDE))
        low = mb.sub(x=flat, y=mb.mul(x=high, y=np.int32(_STRIDE)))
        parts = []
        every, first = np.arange(0, length, _STRIDE), np.arange(_STRIDE)
        for name, index, numbers in (("high", high, every), ("low", low, first)):
            angles = numbers[:, None] * frequencies
            for kind, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                whole = self._constants.array(f"rope.{name}.{kind}", table.astype(np.float32))
                parts.append(mb.gather(x=whole, indices=index, axis=0, validate_indices=False))
        cos_high, sin_high, cos_low, sin_low = parts
        cos = mb.sub(x=mb.mul(x=cos_high, y=cos_low), y=mb.mul(x=sin_high, y=sin_low))
        sin = mb.add(x=mb.mul(x=sin_high, y=cos_low), y=mb.mul(x=cos_high, y=sin_low))
        return cos, sin

    def _rotated(self, heads: Var, positions: TokenPositions, axis: int) -> Var:
        """Rotate the first half of each head against the second; heads' dimensions are along `axis`."""
        one, two = mb.split(x=heads, num_splits=2, axis=axis)
        cos, sin = positions.cos, positions.sin
        return mb.concat(
            values=[
                mb.sub(x=mb.mul(x=one, y=cos), y=mb.mul(x=two, y=sin)),
                mb.add(x=mb.mul(x=two, y=cos), y=mb.mul(x=one, y=sin)),
            ],
            axis=axis,
        )

    @staticmethod
    def _int8_codes(x: Var) -> Var:
        """Round numbers to the nearest int8 code."""
        kind = np.float16 if x.dtype.__name__ == "fp16" else np.float32
        return mb.minimum(x=mb.maximum(x=mb.round(x=x), y=kind(-128)), y=kind(127))


class LinearLayout(Layout):
    """Plain linear layers on x (1, L, features). Queries of the heads that share keys are one below the other.

    Norms, RoPE and rounding to codes are computed in float32, as the MLX model computes them.
    """

    weight_axes = ()
    feature_shape = (-1,)
    feature_axis = -1

    def embed(self, tokens: Var) -> Var:
        return self.rows(self._matrices.matrix(self._source.matrix("model.embedding")), tokens)

    def positions(self, columns: Var, first: Var, after: Var) -> TokenPositions:
        config = self.config
        cos, sin = self._rope(columns)
        every = np.arange(config.context_length, dtype=np.int32)[None]
        every = self._constants.array("columns", every)
        seen = mb.less_equal(x=every, y=mb.transpose(x=columns, perm=[1, 0]))
        hidden = mb.sub(x=np.float32(1), y=mb.cast(x=seen, dtype="fp32"))
        mask = mb.expand_dims(x=mb.mul(x=hidden, y=np.float32(_HIDDEN)), axes=[0, 1])
        share = config.num_heads // config.num_kv_heads
        mask = mb.tile(x=mb.cast(x=mask, dtype=self._dtype), reps=[1, 1, share, 1])
        return TokenPositions(first, after, cos, sin, mask)

    def norm(self, x: Var, name: str) -> Var:
        weight = self._constants.array(name, self._source.vector(name))
        return mb.cast(x=self._norm(mb.cast(x=x, dtype="fp32"), weight), dtype=self._dtype)

    def _norm(self, x: Var, weight: Var | np.ndarray) -> Var:
        square = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        inverse = mb.rsqrt(x=square, epsilon=np.float32(self.config.rms_norm_eps))
        return mb.mul(x=mb.mul(x=x, y=inverse), y=weight)

    def product(self, x: Var, weight: Var) -> Var:
        # Core ML's linear layer needs a bias; zeros are written once for each length.
        rows = weight.shape[0]
        zeros = self._constants.array(f"zeros.{rows}", np.zeros(rows, self._np_dtype))
        return mb.linear(x=x, weight=weight, bias=zeros)

    def queries(self, x: Var, weight: np.ndarray, positions: TokenPositions) -> Var:
        config = self.config
        q = self._rotated_and_normed(x, config.num_heads, weight, positions)
        q = mb.cast(x=q, dtype=self._dtype)
        return mb.reshape(x=q, shape=[1, config.num_kv_heads, -1, config.head_dim])

    def keys(self, x: Var, weight: np.ndarray, positions: TokenPositions, codes: bool) -> Var:
        k = self._rotated_and_normed(x, self.config.num_kv_heads, weight, positions)
        return self._int8_codes(k) if codes else k

    def values(self, x: Var, factor: float, codes: bool) -> Var:
        v = self._heads(mb.cast(x=x, dtype="fp32"), self.config.num_kv_heads)
        return self._int8_codes(mb.mul(x=v, y=np.float32(factor))) if codes else v

    def _heads(self, x: Var, heads: int) -> Var:
        """Reshape (1, L, heads * head_dim) to (1, heads, L, head_dim)."""
        x = mb.reshape(x=x, shape=[1, -1, heads, self.config.head_dim])
        return mb.transpose(x=x, perm=[0, 2, 1, 3])

    def _rotated_and_normed(
        self, x: Var, heads: int, weight: np.ndarray, positions: TokenPositions
    ) -> Var:
        x = self._heads(mb.cast(x=x, dtype="fp32"), heads)
        return self._norm(self._rotated(x, positions, -1), weight.astype(np.float32))

    def attend(
        self, queries: Var | list[Var], keys: Var, values: Var, positions: TokenPositions
    ) -> Var:
        config = self.config
        y = mb.scaled_dot_product_attention(
            query=queries, key=keys, value=values, attn_mask=positions.mask
        )
        y = mb.reshape(x=y, shape=[1, config.num_heads, -1, config.head_dim])
        y = mb.transpose(x=y, perm=[0, 2, 1, 3])
        return mb.reshape(x=y, shape=[1, -1, config.hidden_dim])

    def logits(self, x: Var) -> Var:
        weight = self._matrices.matrix(self._source.matrix("model.embedding"))
        logits = self.scaled_product(x, weight)
        return mb.reshape(x=logits, shape=[1, self.config.vocab_size], name="logits")


class ChannelLayout(Layout):
    """Convolutions on x (1, features, 1, L). Queries of the heads that share keys are side by side along L.

    Everything is computed in the program's type, norms too, because the Neural Engine has float16 only. A norm
    divides by the largest number first: squares of numbers in a residual stream exceed float16.
    """

    weight_axes = (1, 1)
    feature_shape = (1, -1, 1, 1)
    feature_axis = 1

    def _pieces(self) -> list[slice]:
        """Return the ranges of rows that the head is cut into."""
        vocab = self.config.vocab_size
        return [slice(start, min(start + _MAX_ROWS, vocab)) for start in range(0, vocab, _MAX_ROWS)]

    def embed(self, tokens: Var) -> Var:
        matrix, pieces = self._source.matrix("model.embedding"), self._pieces()
        total = None
        for rows in pieces:
            weight = self._matrices.matrix(matrix, rows)
            if len(pieces) == 1:
                total = self.rows(weight, tokens)
                break
            # A token's row comes from one piece; the others add zeros.
            local = mb.sub(x=tokens, y=np.int32(rows.start))
            count = rows.stop - rows.start
            inside = mb.logical_and(
                x=mb.greater_equal(x=local, y=np.int32(0)), y=mb.less(x=local, y=np.int32(count))
            )
            index = mb.mul(x=local, y=mb.cast(x=inside, dtype="int32"))
            part = self.rows(weight, index)
            part = mb.mul(
                x=part, y=mb.expand_dims(x=mb.cast(x=inside, dtype=self._dtype), axes=[2])
            )
            total = part if total is None else mb.add(x=total, y=part)
        return mb.expand_dims(x=mb.transpose(x=total, perm=[0, 2, 1]), axes=[2])

    def positions(self, columns: Var, first: Var, after: Var) -> TokenPositions:
        config = self.config
        cos, sin = (
            mb.cast(x=mb.transpose(x=part, perm=[1, 0]), dtype=self._dtype)
            for part in self._rope(columns)
        )
        every = np.arange(config.context_length, dtype=np.int32)[:, None]
        every = self._constants.array("columns.first", every)
        seen = mb.cast(x=mb.less_equal(x=every, y=columns), dtype=self._dtype)
        kind = self._np_dtype.type
        mask = mb.mul(x=mb.sub(x=kind(1), y=seen), y=kind(_HIDDEN))
        mask = mb.expand_dims(x=mask, axes=[0, 2])  # (1, columns, 1, L)
        share = config.num_heads // config.num_kv_heads
        return TokenPositions(first, after, cos, sin, mb.tile(x=mask, reps=[1, 1, 1, share]))

    def norm(self, x: Var, name: str) -> Var:
        weight = self._held(self._source.vector(name), name).reshape(1, -1, 1, 1)
        return self._norm(x, self._constants.array(f"{name}.channels", weight), 1)

    def _held(self, array: np.ndarray, name: str) -> np.ndarray:
        """Return numbers in the program's type; raise `AFMError` if it can't hold them."""
        with np.errstate(over="ignore"):
            found = array.astype(self._np_dtype)
        check_held(found, name)
        return found

    def _norm(self, x: Var, weight: Var | np.ndarray, axis: int) -> Var:
        kind = self._np_dtype.type
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
        largest = mb.maximum(x=largest, y=kind(1e-3))
        small = mb.real_div(x=x, y=largest)
        square = mb.reduce_mean(x=mb.mul(x=small, y=small), axes=[axis], keep_dims=True)
        root = mb.real_div(x=kind(np.sqrt(self.config.rms_norm_eps)), y=largest)
        total = mb.add(x=square, y=mb.mul(x=root, y=root))
        # Above 0 already: of numbers that the largest divides, one is 1. Core ML wants an epsilon all the same.
        inverse = mb.rsqrt(x=total, epsilon=np.finfo(kind).smallest_subnormal)
        return mb.mul(x=mb.mul(x=small, y=inverse), y=weight)

    def product(self, x: Var, weight: Var) -> Var:
        return mb.conv(x=x, weight=weight)

    def queries(self, x: Var, weight: np.ndarray, positions: TokenPositions) -> list[Var]:
        """Return an array (1, head_dim, 1, heads of a group * L) for each head of keys."""
        config = self.config
        share = config.num_heads // config.num_kv_heads
        weight = weight / np.sqrt(config.head_dim)
        q = self._rotated_and_normed(x, config.num_heads, weight, positions)
        count = config.num_kv_heads
        groups = [q] if count == 1 else mb.split(x=q, num_splits=count, axis=1)
        found = []
        for group in groups:
            turned = group if share == 1 else mb.transpose(x=group, perm=[0, 2, 1, 3])
            found.append(mb.reshape(x=turned, shape=[1, config.head_dim, 1, -1]))
        return found

    def keys(self, x: Var, weight: np.ndarray, positions: TokenPositions, codes: bool) -> Var:
        k = self._rotated_and_normed(x, self.config.num_kv_heads, weight, positions)
        return mb.transpose(x=self._int8_codes(k) if codes else k, perm=[0, 1, 3, 2])

    def values(self, x: Var, factor: float, codes: bool) -> Var:
        v = self._heads(x, self.config.num_kv_heads)
        if codes:
            scale = self._held(np.array(factor, np.float32), "the inverse scale of int8 values")
            v = self._int8_codes(mb.mul(x=v, y=scale[()]))
        return mb.transpose(x=v, perm=[0, 1, 3, 2])

    def _heads(self, x: Var, heads: int) -> Var:
        """Reshape (1, heads * head_dim, 1, L) to (1, heads, head_dim, L)."""
        return mb.reshape(x=x, shape=[1, heads, self.config.head_dim, -1])

    def _rotated_and_normed(
        self, x: Var, heads: int, weight: np.ndarray, positions: TokenPositions
    ) -> Var:
        rotated = self._rotated(self._heads(x, heads), positions, 2)
        held = self._held(weight, "a norm's weight with the scale of int8 keys")
        return self._norm(rotated, held[None, None, :, None], 2)

    def attend(
        self, queries: Var | list[Var], keys: Var, values: Var, positions: TokenPositions
    ) -> Var:
        config = self.config
        share = config.num_heads // config.num_kv_heads
        outputs = []
        for head, q in enumerate(queries):
            end = [1, head + 1, config.context_length, config.head_dim]
            k, v = (
                mb.slice_by_index(x=part, begin=[0, head, 0, 0], end=end) for part in (keys, values)
            )
            k = mb.transpose(x=k, perm=[0, 2, 1, 3])  # (1, columns, 1, head_dim)
            v = mb.transpose(x=v, perm=[0, 3, 1, 2])  # (1, head_dim, 1, columns)
            scores = mb.einsum(values=(k, q), equation="nchw,nwhu->nchu")
            weights = mb.softmax(x=mb.add(x=scores, y=positions.mask), axis=1)
            y = mb.einsum(values=(v, weights), equation="nchw,nwhu->nchu")
            y = mb.reshape(x=y, shape=[1, config.head_dim, share, -1])
            outputs.append(mb.transpose(x=y, perm=[0, 2, 1, 3]))
        y = outputs[0] if len(outputs) == 1 else mb.concat(values=outputs, axis=1)
        return mb.reshape(x=y, shape=[1, config.hidden_dim, 1, -1])

    def logits(self, x: Var) -> Var:
        matrix = self._source.matrix("model.embedding")
        parts = [
            self.scaled_product(x, self._matrices.matrix(matrix, rows, self.weight_axes))
            for rows in self._pieces()
        ]
        joined = parts[0] if len(parts) == 1 else self.join(parts)
        return mb.reshape(x=joined, shape=[1, self.config.vocab_size], name="logits")


# -- functions


def prefill_function(layout: Layout, lengths: Sequence[int]) -> Function:
    """Build the function `prefill`, which takes each of `lengths` tokens."""
    config = layout.config
    function = _function(config, lengths[0] if len(lengths) == 1 else get_new_symbol())
    with function:
        tokens, first, caches = _inputs(function)
        # Columns (1, L) of the tokens: a running sum of ones, whose length follows from the tokens' type.
        ones = mb.add(x=mb.mul(x=tokens, y=np.int32(0)), y=np.int32(1))
        columns = mb.add(x=mb.cumsum(x=ones, axis=1), y=mb.sub(x=first, y=np.array([1], np.int32)))
        highest = mb.reduce_max(x=columns, axes=[1], keep_dims=False)
        after = mb.add(x=highest, y=np.array([1], np.int32), name="next_position")
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


def decode_function(layout: Layout) -> Function:
    """Build the function `decode`."""
    config = layout.config
    function = _function(config, 1)
    with function:
        tokens, first, caches = _inputs(function)
        after = mb.add(x=first, y=np.array([1], np.int32))
        positions = layout.positions(mb.expand_dims(x=first, axes=[0]), first, after)
        x = layout.embed(tokens)
        for block in range(config.num_kv_layers):
            x = layout.writing_block(x, block, positions, caches)
        for block in range(config.num_kv_reuse_layers):
            x = layout.reuse_block(x, block, positions, caches)
        function.set_outputs([layout.logits(layout.norm(x, "model.output_norm.weight"))])
    return function


def _function(config: ModelConfig, length: object) -> Function:
    """Return an empty function; `length` is a number of tokens, or a symbol for several."""
    shape = (config.num_kv_layers, config.num_kv_heads, config.context_length, config.head_dim)
    inputs = {
        "tokens": mb.placeholder((1, length), dtype=types.int32),
        "position": mb.placeholder((1,), dtype=types.int32),
        **{name: mb.state_tensor_placeholder(shape, dtype=types.fp16) for name in STATES},
    }
    return Function(inputs, opset_version=TARGET)


def _inputs(function: Function) -> tuple[Var, Var, Caches]:
    tokens, first, *states = (function.inputs[name] for name in ("tokens", "position", *STATES))
    return tokens, first, Caches(*states)
