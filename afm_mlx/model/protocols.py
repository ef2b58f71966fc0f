"""What the engine needs of a language model and of its caches: this package's, and mlx-lm's.

`is_afm(model)` (`model.py`) narrows a `LanguageModel` to this package's `Model`, which also has `greedy`,
`verify` and `prefill`. `isinstance(entry, KVCache)` (`kv_cache.py`) narrows a cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import mlx.core as mx


class CacheEntry(Protocol):
    """Keys and values of one block: a `KVCache`, or one of `mlx_lm.models.cache`.

    Entries of a batch also have `extract`, `filter`, `extend`, `prepare` and `finalize`, see `KVCache`.
    """

    state: Any
    """Arrays in nested lists and tuples, to evaluate, store and restore; empty before the first token."""

    def empty(self) -> bool:
        """True before the first token."""

    def size(self) -> int:
        """Tokens that are stored, in the longest row."""

    def is_trimmable(self) -> bool:
        """True if tokens can be removed from the end."""

    def trim(self, count: int) -> int:
        """Remove up to `count` tokens from the end of every row; return how many were removed."""


Cache: TypeAlias = list[Any]
"""One `CacheEntry` for each block; `isinstance` tells what more an entry has."""


class LanguageModel(Protocol):
    """A causal language model: this package's `Model`, or one of mlx-lm's."""

    training: bool

    def __call__(self, inputs: mx.array, /, cache: Cache | None = None) -> mx.array:
        """Return logits (B, L, vocab_size) for token ids (B, L); the cache grows by L tokens."""

    @property
    def layers(self) -> Sequence[object]:
        """The blocks, each with one cache entry."""

    def parameters(self) -> dict[str, Any]:
        """Every parameter, in nested dicts and lists."""
