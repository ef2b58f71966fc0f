"""What the engine needs of a language model and of its caches: this package's, and mlx-lm's.

`is_afm(model)` (`model.py`) narrows a `LanguageModel` to this package's `Model`, which also has `greedy`,
`verify` and `prefill`. `isinstance(entry, KVCache)` (`kv_cache.py`) narrows a cache entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import mlx.core as mx


class CacheEntry(Protocol):
    """Keys and values of one block for one row: a `KVCache`, or one of `mlx_lm.models.cache`."""

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


class BatchEntry(CacheEntry, Protocol):
    """Keys and values of one block for the rows of a batch."""

    def extract(self, row: int) -> Any:
        """Return a copy of one row, as a cache entry."""

    def filter(self, rows: Any) -> None:
        """Keep only these rows, given by their indices, in this order."""

    def extend(self, other: Any) -> None:
        """Append the rows of another entry for the same block."""

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce that the tokens up to `finalize` end with padding in some rows."""

    def finalize(self) -> None:
        """Remove the padding."""


Cache: TypeAlias = list[Any]
"""One `CacheEntry` (of a batch: `BatchEntry`) for each block. They also have what `isinstance` says."""


class LanguageModel(Protocol):
    """A causal language model: this package's `Model`, or one of mlx-lm's."""

    training: bool

    def __call__(self, inputs: mx.array, /, cache: Any = None) -> mx.array:
        """Return logits (B, L, vocab_size) for token ids (B, L); the cache grows by L tokens."""

    @property
    def layers(self) -> Sequence[Any]:
        """The blocks, each with one cache entry."""

    def parameters(self) -> dict[str, Any]:
        """Every parameter, in nested dicts and lists."""

    def eval(self) -> Any:
        """Leave the training mode."""

    def train(self, mode: bool = True) -> Any:
        """Set the training mode."""
