"""Channels first and convolutions of 1 x 1, as Apple's guide for the Neural Engine asks.

All is computed in the program's type, norms too, because the Neural Engine has float16 only. A norm divides by
the largest number first: squares of what a residual stream holds exceed float16.

Source: Apple, "Deploying Transformers on the Apple Neural Engine" (2022), and `ml-ane-transformers`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb

from afm_mlx.converters.coreml.layouts import HIDDEN, Layout, Positions, rounded
from afm_mlx.converters.coreml.source import check_held

_MAX_ROWS = 1 << 14
"""Output channels of a convolution on the Neural Engine; the head has several."""


class ChannelLayout(Layout):
    """x is (1, features, 1, L). The queries of the heads that share keys lie side by side along L."""

    weight_axes = (1, 1)
    feature_axes = (1, -1, 1, 1)

    def _pieces(self) -> list[slice]:
        vocab = self.config.vocab_size
        return [slice(start, min(start + _MAX_ROWS, vocab)) for start in range(0, vocab, _MAX_ROWS)]

    def embed(self, tokens: Any) -> Any:
        matrix, pieces = self._source.matrix("model.embedding"), self._pieces()
        total = None
        for rows in pieces:
            weight = self._matrices.matrix(matrix, rows)
            if len(pieces) == 1:
                total = self.rows(weight, tokens)
                break
            local = mb.sub(x=tokens, y=np.int32(rows.start))
            count = rows.stop - rows.start
            inside = mb.logical_and(
                x=mb.greater_equal(x=local, y=np.int32(0)), y=mb.less(x=local, y=np.int32(count))
            )
            index = mb.mul(x=local, y=mb.cast(x=inside, dtype="int32"))
            few = self.rows(weight, index)
            few = mb.mul(x=few, y=mb.expand_dims(x=mb.cast(x=inside, dtype=self._dtype), axes=[2]))
            total = few if total is None else mb.add(x=total, y=few)
        return mb.expand_dims(x=mb.transpose(x=total, perm=[0, 2, 1]), axes=[2])

    def positions(self, columns: Any, first: Any, after: Any) -> Positions:
        config = self.config
        cos, sin = (
            mb.cast(x=mb.transpose(x=part, perm=[1, 0]), dtype=self._dtype)
            for part in self._turns(columns)
        )
        every = self._constants.array(
            "columns.first", np.arange(config.context_length, dtype=np.int32)[:, None]
        )
        seen = mb.cast(x=mb.less_equal(x=every, y=columns), dtype=self._dtype)
        kind = self._np_dtype.type
        mask = mb.mul(x=mb.sub(x=kind(1), y=seen), y=kind(HIDDEN))
        mask = mb.expand_dims(x=mask, axes=[0, 2])  # (1, columns, 1, L)
        share = config.num_heads // config.num_kv_heads
        return Positions(first, after, cos, sin, mb.tile(x=mask, reps=[1, 1, 1, share]))

    def norm(self, x: Any, name: str) -> Any:
        weight = self._held(self._source.vector(name), name).reshape(1, -1, 1, 1)
        return self._norm(x, self._constants.array(f"{name}.channels", weight), 1)

    def _held(self, array: np.ndarray, name: str) -> np.ndarray:
        """Numbers in the program's type, which must be able to hold them."""
        with np.errstate(over="ignore"):
            found = array.astype(self._np_dtype)
        check_held(found, name)
        return found

    def _norm(self, x: Any, weight: Any, axis: int) -> Any:
        kind = self._np_dtype.type
        peak = mb.reduce_max(x=mb.abs(x=x), axes=[axis], keep_dims=True)
        peak = mb.maximum(x=peak, y=kind(1e-3))
        small = mb.real_div(x=x, y=peak)
        square = mb.reduce_mean(x=mb.mul(x=small, y=small), axes=[axis], keep_dims=True)
        root = mb.real_div(x=kind(np.sqrt(self.config.rms_norm_eps)), y=peak)
        total = mb.add(x=square, y=mb.mul(x=root, y=root))
        # Above 0 already: of numbers that the largest divides, one is 1. Core ML wants an epsilon all the same.
        inverse = mb.rsqrt(x=total, epsilon=np.finfo(kind).smallest_subnormal)
        return mb.mul(x=mb.mul(x=small, y=inverse), y=weight)

    def product(self, x: Any, weight: Any) -> Any:
        return mb.conv(x=x, weight=weight)

    def split(self, x: Any, widths: list[int]) -> list[Any]:
        return list(mb.split(x=x, split_sizes=widths, axis=1))

    def join(self, parts: list[Any]) -> Any:
        return mb.concat(values=parts, axis=1)

    def queries(self, x: Any, weight: np.ndarray, positions: Positions) -> Any:
        """One array (1, head_dim, 1, heads of a group * L) for each head of keys."""
        config = self.config
        share = config.num_heads // config.num_kv_heads
        q = self._turned(x, config.num_heads, weight / np.sqrt(config.head_dim), positions)
        alone = config.num_kv_heads == 1
        groups = [q] if alone else mb.split(x=q, num_splits=config.num_kv_heads, axis=1)
        found = []
        for group in groups:
            turned = group if share == 1 else mb.transpose(x=group, perm=[0, 2, 1, 3])
            found.append(mb.reshape(x=turned, shape=[1, config.head_dim, 1, -1]))
        return found

    def keys(self, x: Any, weight: np.ndarray, positions: Positions, codes: bool) -> Any:
        k = self._turned(x, self.config.num_kv_heads, weight, positions)
        return mb.transpose(x=rounded(k) if codes else k, perm=[0, 1, 3, 2])

    def values(self, x: Any, factor: float, codes: bool) -> Any:
        v = self._heads(x, self.config.num_kv_heads)
        if codes:
            scale = self._held(np.array(factor, np.float32), "the inverse scale of int8 values")
            v = rounded(mb.mul(x=v, y=scale[()]))
        return mb.transpose(x=v, perm=[0, 1, 3, 2])

    def _heads(self, x: Any, heads: int) -> Any:
        """(1, heads * head_dim, 1, L) to (1, heads, head_dim, L)."""
        return mb.reshape(x=x, shape=[1, heads, self.config.head_dim, -1])

    def _turned(self, x: Any, heads: int, weight: np.ndarray, positions: Positions) -> Any:
        """RoPE and norm of heads, (1, heads, head_dim, L)."""
        one, two = mb.split(x=self._heads(x, heads), num_splits=2, axis=2)
        cos, sin = positions.cos, positions.sin
        turned = mb.concat(
            values=[
                mb.sub(x=mb.mul(x=one, y=cos), y=mb.mul(x=two, y=sin)),
                mb.add(x=mb.mul(x=two, y=cos), y=mb.mul(x=one, y=sin)),
            ],
            axis=2,
        )
        held = self._held(weight, "a norm's weight with the scale of int8 keys")
        return self._norm(turned, held[None, None, :, None], 2)

    def attend(self, queries: Any, keys: Any, values: Any, positions: Positions) -> Any:
        config = self.config
        share = config.num_heads // config.num_kv_heads
        outputs = []
        for head, q in enumerate(queries):
            k, v = (
                mb.slice_by_index(
                    x=part,
                    begin=[0, head, 0, 0],
                    end=[1, head + 1, config.context_length, config.head_dim],
                )
                for part in (keys, values)
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

    def logits(self, x: Any) -> Any:
        matrix = self._source.matrix("model.embedding")
        parts = [
            self.scaled_product(x, self._matrices.matrix(matrix, rows, self.weight_axes))
            for rows in self._pieces()
        ]
        joined = parts[0] if len(parts) == 1 else self.join(parts)
        return mb.reshape(x=joined, shape=[1, self.config.vocab_size], name="logits")
