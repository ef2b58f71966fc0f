"""A batch's keys and values of one block of a zoo model, for the kernels that attend to them where they lie.

Rows have mlx-lm's own caches before they join a batch and after they leave it, as callers know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from afm_mlx.kernels import (
    KeyValues,
    attention,
    causal_attention,
    decode_attention,
    reads_tails,
    write_tokens,
)
from afm_mlx.model.kv_cache import KVCache


class ZooKVCache(KVCache):
    """A `KVCache` of floats, which is made of mlx-lm's `KVCache`s and gives them back.

    Args:
        rows: rows of the batch.
    """

    def __init__(self, rows: int = 1):
        super().__init__(int8=False, rows=rows)

    @classmethod
    def of_rows(cls, caches: Sequence[Any]) -> ZooKVCache:
        """One batch of the rows of mlx-lm's caches, each of which holds one row of the same block."""
        rows = []
        for cache in caches:
            row = KVCache(int8=False)
            if cache.offset:
                parts = [part[:, :, : cache.offset] for part in (cache.keys, cache.values)]
                row.buffer = mx.concatenate(parts, axis=1)
                row._lengths = [cache.offset]
            rows.append(row)
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
        """See `KVCache.make_mask`. Blocks that attend to this cache ask for neither an array nor a window."""
        if return_array or window_size is not None:
            raise ValueError(
                f"[ZooKVCache] return_array is {return_array} and window_size is {window_size}; allowed are "
                "False and None."
            )
        return super().make_mask(length)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> mx.array:
        """Append the next tokens of every row, and attend to all tokens so far.

        Args:
            queries: (B, n_heads, L, head_dim).
            keys, values: (B, n_kv_heads, L, head_dim).
            mask: of `make_mask`.

        Returns:
            (B, n_heads, L, head_dim).
        """
        kv = mx.concatenate([keys, values], axis=1)
        if kv.shape[2] == 1 and not self.empty() and reads_tails(kv.dtype, kv.shape[3]):
            lengths = mx.array([n + 1 for n in self.lengths], dtype=mx.int32)
            buffer, tail, starts = self.open_tail(kv.shape[1], kv.shape[3])
            tail = write_tokens(tail, kv.astype(tail.dtype), lengths - starts)
            self.take_tail(tail)
            whole = decode_attention(queries, KeyValues(buffer, tail=tail, starts=starts), lengths)
            assert isinstance(whole, mx.array)
            return whole
        self.update(kv)
        stored = KeyValues(self.in_use())
        if isinstance(mask, str):
            return causal_attention(queries, stored)
        return attention(queries, stored, mask)
