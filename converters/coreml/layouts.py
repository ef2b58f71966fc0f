"""What the two arrangements of operators share: a block's formula, parameters, and the states.

A layout has activations in a shape of its own; `x` below is one such. `Positions` are the same in both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from coremltools.converters.mil import Builder as mb

from afm_mlx.config import ModelConfig
from afm_mlx.converters.coreml.compression import MatrixConstants, Weight
from afm_mlx.converters.coreml.constants import Constants
from afm_mlx.converters.coreml.low_rank import AdapterConstants
from afm_mlx.converters.coreml.source import Source, half_split

HIDDEN = -1e4
"""Added to the score of a column that a token must not see: its weight is 0 in float16, too."""

_STRIDE = 64


class Positions(NamedTuple):
    """Where the tokens of a call stand.

    Args:
        first: (1,) int32, column of the first one.
        after: (1,) int32, column behind the last one.
        cos: cosines of RoPE's angles, in the shape that the layout wants.
        sin: their sines.
        mask: what is added to scores, in the shape that the layout wants.
    """

    first: Any
    after: Any
    cos: Any
    sin: Any
    mask: Any


class Caches:
    """The states of a function: keys and values of all writing blocks.

    Args:
        keys: the state of keys, (writing blocks, num_kv_heads, columns, head_dim) float16.
        values: that of values, in the same shape.
    """

    def __init__(self, keys: Any, values: Any) -> None:
        self._states = {"keys": keys, "values": values}
        self._now = {name: mb.read_state(input=state) for name, state in self._states.items()}

    def write(self, name: str, block: int, new: Any, positions: Positions) -> None:
        """Write (1, num_kv_heads, L, head_dim) of a block from `positions.first` on."""
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

    def read(self, name: str, block: int, dtype: str) -> Any:
        """All columns of a block, (1, num_kv_heads, columns, head_dim)."""
        now = self._now[name]
        part = mb.slice_by_index(x=now, begin=[block, 0, 0, 0], end=[block + 1, *now.shape[1:]])
        return part if dtype == "fp16" else mb.cast(x=part, dtype=dtype)


class Layout(ABC):
    """An arrangement of operators; one object builds one function.

    Args:
        source: the model.
        constants: takes vectors.
        matrices: takes matrices.
        dtype: float16 or float32, the type that is computed in.
        adapter: what the function adds to matrices; None for nothing.
    """

    def __init__(
        self,
        source: Source,
        constants: Constants,
        matrices: MatrixConstants,
        dtype: np.dtype[Any],
        adapter: AdapterConstants | None,
    ) -> None:
        self.config: ModelConfig = source.config
        self._source, self._constants, self._matrices = source, constants, matrices
        self._np_dtype, self._adapter = dtype, adapter
        self._dtype = "fp16" if dtype == np.float16 else "fp32"

    # -- what a layout has of its own

    @abstractmethod
    def embed(self, tokens: Any) -> Any:
        """x of tokens (1, L) int32."""

    @abstractmethod
    def positions(self, columns: Any, first: Any, after: Any) -> Positions:
        """`columns` (1, L) int32 are those of the tokens."""

    @abstractmethod
    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm with the weight of that name."""

    @abstractmethod
    def product(self, x: Any, weight: Any) -> Any:
        """x times a matrix, whose variable has `weight_axes` behind its own two."""

    @abstractmethod
    def split(self, x: Any, widths: list[int]) -> list[Any]:
        """x in parts along its features."""

    @abstractmethod
    def join(self, parts: list[Any]) -> Any:
        """Undoes `split`."""

    @abstractmethod
    def queries(self, x: Any, weight: np.ndarray, positions: Positions) -> Any:
        """RoPE and norm of projected queries; what `attend` takes."""

    @abstractmethod
    def keys(self, x: Any, weight: np.ndarray, positions: Positions, codes: bool) -> Any:
        """RoPE and norm of projected keys; (1, num_kv_heads, L, head_dim) for the state."""

    @abstractmethod
    def values(self, x: Any, factor: float, codes: bool) -> Any:
        """Projected values times a factor; (1, num_kv_heads, L, head_dim) for the state."""

    @abstractmethod
    def attend(self, queries: Any, keys: Any, values: Any, positions: Positions) -> Any:
        """x of the heads' outputs; `keys` and `values` as `Caches.read` gives them."""

    @abstractmethod
    def logits(self, x: Any) -> Any:
        """(1, vocab_size) of one token's x after the final norm."""

    weight_axes: tuple[int, ...] = ()
    feature_axes: tuple[int, ...] = (-1,)
    """The shape of one number for each feature of x."""

    # -- what both share

    def linear(self, x: Any, path: str) -> Any:
        """The matrix at a path, and what the adapter adds to it."""
        y = self.scaled_product(
            x, self._matrices.matrix(self._source.matrix(path), None, self.weight_axes)
        )
        low = None if self._adapter is None else self._adapter.of(path)
        if low is None:
            return y
        rank = low.b[0].shape[1]
        inner = self.product(x, self._weight(f"{low.key}.a", low.a))
        inners = [inner] if len(low.b) == 1 else self.split(inner, [rank] * len(low.b))
        parts = [
            self.product(part, self._weight(f"{low.key}.b.{i}", b))
            for i, (part, b) in enumerate(zip(inners, low.b, strict=True))
        ]
        return mb.add(x=y, y=parts[0] if len(parts) == 1 else self.join(parts))

    def scaled_product(self, x: Any, weight: Weight) -> Any:
        """x times a matrix of the model."""
        y = self.product(x, weight.numbers)
        if weight.row_scales is None:
            return y
        return mb.mul(x=y, y=self._row_scales(weight, self.feature_axes))

    def rows(self, weight: Weight, indices: Any) -> Any:
        """Rows (1, L, K) of a matrix of the model; `indices` (1, L) int32."""
        found = mb.gather(x=weight.numbers, indices=indices, axis=0, validate_indices=False)
        if weight.row_scales is None:
            return found
        scales = self._row_scales(weight, (-1, 1))
        return mb.mul(
            x=found, y=mb.gather(x=scales, indices=indices, axis=0, validate_indices=False)
        )

    def _row_scales(self, weight: Weight, shape: tuple[int, ...]) -> Any:
        assert weight.row_scales is not None
        return self._constants.array(f"{weight.key}.rows", weight.row_scales.reshape(shape))

    def _weight(self, key: str, array: np.ndarray) -> Any:
        return self._constants.array(key, array.reshape(*array.shape, *self.weight_axes))

    def write(self, x: Any, block: int, positions: Positions, caches: Caches) -> tuple[Any, Any]:
        """A writing block's keys and values into the states; returns its queries and its normed input."""
        config, path = self.config, f"model.layers.{block}"
        qkv = self.linear(
            self.norm(x, f"{path}.input_layernorm.weight"), f"{path}.self_attn.qkv_proj"
        )
        q, k, v = self.split(qkv, [config.hidden_dim, config.kv_dim, config.kv_dim])
        key_scale, value_scale = self._scales(block)
        codes = config.kv_bits is not None
        k_weight = self._head_weight(f"{path}.self_attn.k_norm.weight") / key_scale
        caches.write("keys", block, self.keys(k, k_weight, positions, codes), positions)
        caches.write("values", block, self.values(v, 1 / value_scale, codes), positions)
        return q

    def writing_block(self, x: Any, block: int, positions: Positions, caches: Caches) -> Any:
        """x after a block that writes its keys and values."""
        q = self.write(x, block, positions, caches)
        return self._rest(x, q, f"model.layers.{block}", block, positions, caches)

    def reuse_block(self, x: Any, block: int, positions: Positions, caches: Caches) -> Any:
        """x after a block that reads the keys and values of the last one that writes."""
        path = f"model.kv_reuse_layers.{block}"
        normed = self.norm(x, f"{path}.input_layernorm.weight")
        q = self.linear(normed, f"{path}.self_attn.q_proj")
        return self._rest(x, q, path, self.config.num_kv_layers - 1, positions, caches)

    def _rest(
        self, x: Any, q: Any, path: str, block: int, positions: Positions, caches: Caches
    ) -> Any:
        """Attention of projected queries to the columns of a writing block, and the feed-forward."""
        key_scale, value_scale = self._scales(block)
        weight = self._head_weight(f"{path}.self_attn.q_norm.weight") * key_scale
        q = self.queries(q, weight, positions)
        k, v = (caches.read(name, block, self._dtype) for name in ("keys", "values"))
        y = self.attend(q, k, v, positions)
        if value_scale != 1:
            y = mb.mul(x=y, y=self._np_dtype.type(value_scale))
        x = mb.add(x=x, y=self.linear(y, f"{path}.self_attn.out_proj"))
        normed = self.norm(x, f"{path}.post_attention_layernorm.weight")
        gate = mb.silu(x=self.linear(normed, f"{path}.mlp.gate_proj"))
        up = self.linear(normed, f"{path}.mlp.up_proj")
        return mb.add(x=x, y=self.linear(mb.mul(x=gate, y=up), f"{path}.mlp.down_proj"))

    def _head_weight(self, name: str) -> np.ndarray:
        """The weight of a norm over a head, float32, in the order of `half_split`."""
        return self._source.vector(name)[half_split(self.config.head_dim)]

    def _scales(self, block: int) -> tuple[float, float]:
        """Scales of a writing block's keys and values; 1 where the states hold floats."""
        if self.config.kv_bits is None:
            return 1.0, 1.0
        path = f"model.layers.{block}.self_attn.quant"
        return tuple(
            float(self._source.vector(f"{path}_{kind}_scale")) for kind in ("key", "value")
        )  # type: ignore[return-value]

    def _turns(self, columns: Any) -> tuple[Any, Any]:
        """Cosines and sines (L, head_dim / 2) of RoPE's angles, float32.

        The angle of column 64 a + b is the sum of two from tables: a GPU's own cosine is inexact for large
        angles.
        """
        half, length = self.config.head_dim // 2, self.config.context_length
        frequencies = self.config.rope_theta ** -(np.arange(half, dtype=np.float64) / half)
        flat = mb.reshape(x=columns, shape=[-1])
        high = mb.floor_div(x=flat, y=np.int32(_STRIDE))
        low = mb.sub(x=flat, y=mb.mul(x=high, y=np.int32(_STRIDE)))
        parts = []
        for name, index, numbers in (
            ("high", high, np.arange(0, length, _STRIDE)),
            ("low", low, np.arange(_STRIDE)),
        ):
            angles = numbers[:, None] * frequencies
            for kind, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
                whole = self._constants.array(f"rope.{name}.{kind}", table.astype(np.float32))
                parts.append(mb.gather(x=whole, indices=index, axis=0, validate_indices=False))
        cos_high, sin_high, cos_low, sin_low = parts
        cos = mb.sub(x=mb.mul(x=cos_high, y=cos_low), y=mb.mul(x=sin_high, y=sin_low))
        sin = mb.add(x=mb.mul(x=sin_high, y=cos_low), y=mb.mul(x=cos_high, y=sin_low))
        return cos, sin

    def _zeros(self, count: int) -> Any:
        """The bias of a linear layer, which Core ML has one for; written once for each length."""
        return self._constants.array(f"zeros.{count}", np.zeros(count, self._np_dtype))


def rounded(x: Any) -> Any:
    """Numbers to the nearest code of int8."""
    kind = np.float16 if x.dtype.__name__ == "fp16" else np.float32
    return mb.minimum(x=mb.maximum(x=mb.round(x=x), y=kind(-128)), y=kind(127))
