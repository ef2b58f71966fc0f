"""The cache entry of a block that writes no keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NoKVCache:
    """The cache entry of a block that stores nothing.

    mlx-lm counts cache entries by `len(model.layers)`, for instance to split those of a draft model off;
    one entry per block keeps that count right.
    """

    offset = 0
    nbytes = 0
    state: Any = ()

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return True

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        return count

    def trim_rows(self, counts: Sequence[int]) -> None: ...

    def copy(self, length: int | None = None) -> NoKVCache:
        return NoKVCache()

    def extract(self, row: int) -> NoKVCache:
        return NoKVCache()

    def filter(self, rows: Any) -> None: ...

    def extend(self, other: Any) -> None: ...

    def prepare(self, **padding: Any) -> None: ...

    def finalize(self) -> None: ...

    @staticmethod
    def merge(caches: Sequence[Any]) -> NoKVCache:
        return NoKVCache()
