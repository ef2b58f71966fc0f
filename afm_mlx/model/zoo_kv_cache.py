"""Keys and values of mlx-lm's blocks that run through this package's operations (`zoo_blocks.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from afm_mlx.kernels import (
    KeyValues,
    NewToken,
    attention,
    causal_attention,
    norm_rope_attend,
    reads_tails,
)
from afm_mlx.model.kv_cache import KVCache


class ZooKVCache(KVCache):
    """Keys and values of one block of a zoo model while its rows run in a batch.

    Rows have mlx-lm's own `KVCache`s before they join a batch and after they leave it.
    """

    def __init__(self, rows: int = 1):
        super().__init__(int8=False, rows=rows)

    @classmethod
    def of_rows(cls, caches: Sequence[Any]) -> ZooKVCache:
        """Make a batch of mlx-lm's caches, each of which holds one row of the same block."""
        rows = []
        for cache in caches:
            rows.append(KVCache(int8=False))
            if cache.offset:
                parts = [part[:, :, : cache.offset] for part in (cache.keys, cache.values)]
                rows[-1].begin_with(mx.concatenate(parts, axis=1))
        batch = cls(len(rows))
        vars(batch).update(vars(KVCache.merge(rows)))
        return batch

    def extract(self, row: int) -> Any:
        """Return a copy of one row, as mlx-lm's `KVCache`."""
        from mlx_lm.models.cache import KVCache as MlxKVCache

        mine, cache = super().extract(row), MlxKVCache()
        if mine.buffer is not None:
            cache.keys, cache.values = map(mx.contiguous, mine.buffer.split(2, axis=1))
            cache.offset = cache.keys.shape[2]
        return cache

    def make_mask(
        self, length: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """See `KVCache.make_mask`; `return_array` and `window_size` are mlx-lm's, and not supported."""
        if return_array or window_size is not None:
            raise ValueError(
                f"[ZooKVCache] return_array is {return_array} and window_size is {window_size}; allowed are "
                "False and None."
            )
        return super().make_mask(length)

    def takes_new_token(self, dtype: mx.Dtype) -> bool:
        """True if `attend_new` can run: not before the first token, nor for other types than the cache's."""
        return (
            self.buffer is not None
            and self.buffer.dtype == dtype
            and reads_tails(dtype, self.buffer.shape[3], "norm_rope_attend")
        )

    def attend_new(self, token: NewToken) -> mx.array:
        """Append the next token of every row, and return its attention, (B, 1, n_heads * head_dim)."""
        lengths, (_, heads, _, head_dim) = self.decode_lengths(), self.buffer.shape
        assert lengths is not None
        opened = self.open_tail(heads, head_dim)
        kv = KeyValues(opened.buffer, tail=opened.tail, starts=opened.starts)
        y, tail = norm_rope_attend(token, kv, lengths)
        self.take_tail(tail)
        return y

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> mx.array:
        """Append the L new tokens of every row, and return their attention over the whole cache.

        Args:
            queries: (B, n_heads, L, head_dim), the shape of the result.
            keys, values: (B, n_kv_heads, L, head_dim).
            mask: the result of `make_mask(L)`, called before the tokens are appended.
        """
        kv = mx.concatenate([keys, values], axis=1)
        if kv.shape[2] == 1 and not self.empty() and reads_tails(kv.dtype, kv.shape[3]):
            lengths = self.decode_lengths()
            assert lengths is not None
            opened = self.open_tail(kv.shape[1], kv.shape[3])
            y, tail = opened.attend(queries, kv, lengths, lengths - opened.starts)
            self.take_tail(tail)
            return y
        self.update(kv)
        stored = KeyValues(self.in_use())
        if isinstance(mask, str):
            return causal_attention(queries, stored)
        return attention(queries, stored, mask)
