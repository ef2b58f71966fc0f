"""Plain linear layers on (1, L, features), for GPU and CPU.

Norms, RoPE and rounding to codes are computed in float32, as the MLX model computes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb

from afm_mlx.converters.coreml.layouts import HIDDEN, Layout, Positions, rounded


class LinearLayout(Layout):
    """x is (1, L, features). Queries of the heads that share keys lie one below the other."""

    def embed(self, tokens: Any) -> Any:
        return self.rows(self._matrices.matrix(self._source.matrix("model.embedding")), tokens)

    def positions(self, columns: Any, first: Any, after: Any) -> Positions:
        config = self.config
        cos, sin = self._turns(columns)
        every = self._constants.array(
            "columns", np.arange(config.context_length, dtype=np.int32)[None]
        )
        seen = mb.less_equal(x=every, y=mb.transpose(x=columns, perm=[1, 0]))
        hidden = mb.sub(x=np.float32(1), y=mb.cast(x=seen, dtype="fp32"))
        mask = mb.expand_dims(x=mb.mul(x=hidden, y=np.float32(HIDDEN)), axes=[0, 1])
        share = config.num_heads // config.num_kv_heads
        mask = mb.tile(x=mb.cast(x=mask, dtype=self._dtype), reps=[1, 1, share, 1])
        return Positions(first, after, cos, sin, mask)

    def norm(self, x: Any, name: str) -> Any:
        weight = self._constants.array(name, self._source.vector(name))
        return mb.cast(x=self._norm(mb.cast(x=x, dtype="fp32"), weight), dtype=self._dtype)

    def _norm(self, x: Any, weight: Any) -> Any:
        square = mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[-1], keep_dims=True)
        return mb.mul(
            x=mb.mul(x=x, y=mb.rsqrt(x=square, epsilon=np.float32(self.config.rms_norm_eps))),
            y=weight,
        )

    def product(self, x: Any, weight: Any) -> Any:
        return mb.linear(x=x, weight=weight, bias=self._zeros(weight.shape[0]))

    def split(self, x: Any, widths: list[int]) -> list[Any]:
        return list(mb.split(x=x, split_sizes=widths, axis=-1))

    def join(self, parts: list[Any]) -> Any:
        return mb.concat(values=parts, axis=-1)

    def queries(self, x: Any, weight: np.ndarray, positions: Positions) -> Any:
        config = self.config
        q = mb.cast(x=self._turned(x, config.num_heads, weight, positions), dtype=self._dtype)
        return mb.reshape(x=q, shape=[1, config.num_kv_heads, -1, config.head_dim])

    def keys(self, x: Any, weight: np.ndarray, positions: Positions, codes: bool) -> Any:
        k = self._turned(x, self.config.num_kv_heads, weight, positions)
        return rounded(k) if codes else k

    def values(self, x: Any, factor: float, codes: bool) -> Any:
        v = self._heads(mb.cast(x=x, dtype="fp32"), self.config.num_kv_heads)
        return rounded(mb.mul(x=v, y=np.float32(factor))) if codes else v

    def _heads(self, x: Any, heads: int) -> Any:
        """(1, L, heads * head_dim) to (1, heads, L, head_dim)."""
        x = mb.reshape(x=x, shape=[1, -1, heads, self.config.head_dim])
        return mb.transpose(x=x, perm=[0, 2, 1, 3])

    def _turned(self, x: Any, heads: int, weight: np.ndarray, positions: Positions) -> Any:
        """RoPE and norm of heads, (1, heads, L, head_dim) float32."""
        x = self._heads(mb.cast(x=x, dtype="fp32"), heads)
        one, two = mb.split(x=x, num_splits=2, axis=-1)
        cos, sin = positions.cos, positions.sin
        turned = mb.concat(
            values=[
                mb.sub(x=mb.mul(x=one, y=cos), y=mb.mul(x=two, y=sin)),
                mb.add(x=mb.mul(x=two, y=cos), y=mb.mul(x=one, y=sin)),
            ],
            axis=-1,
        )
        return self._norm(turned, weight.astype(np.float32))

    def attend(self, queries: Any, keys: Any, values: Any, positions: Positions) -> Any:
        config = self.config
        y = mb.scaled_dot_product_attention(
            query=queries, key=keys, value=values, attn_mask=positions.mask
        )
        y = mb.reshape(x=y, shape=[1, config.num_heads, -1, config.head_dim])
        y = mb.transpose(x=y, perm=[0, 2, 1, 3])
        return mb.reshape(x=y, shape=[1, -1, config.hidden_dim])

    def logits(self, x: Any) -> Any:
        weight = self._matrices.matrix(self._source.matrix("model.embedding"))
        logits = self.scaled_product(x, weight)
        return mb.reshape(x=logits, shape=[1, self.config.vocab_size], name="logits")
