"""The caches of an engine's rows: made, taken from callers, and handed back to them.

A prompt cache may have another bound than the engine: its row then ends at the smaller one. Storage (int8 codes
or floats) and sliding window have to be the engine's, because rows of a batch share one buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import RequestError, shown
from afm_mlx.model.kv_cache import KVCache
from afm_mlx.model.kv_cache_placeholder import NoKVCache
from afm_mlx.model.model import is_afm
from afm_mlx.model.zoo_kv_cache import ZooKVCache

Cache = list[Any]


class RowCaches:
    """Makes, checks and measures the caches of an engine's rows.

    Args:
        model: the model that the engine runs.
        kv, max_kv_size, sliding_window: see `Engine`.
    """

    def __init__(
        self, model: nn.Module, kv: str, max_kv_size: int | None, sliding_window: bool = False
    ):
        self._model, self._kv, self._asked = model, kv, max_kv_size
        self.sliding = sliding_window
        self._is_afm = is_afm(model)
        self.limit = max_kv_size or model.args.context_length if self._is_afm else max_kv_size
        blocks = getattr(model, "layers", [])
        marks = [getattr(block, "takes_zoo_kv_cache", False) for block in blocks]
        self._takes_zoo_kv_cache = bool(marks) and all(marks)

    def make(self) -> Cache:
        """See `Engine.make_cache`."""
        if self._is_afm:
            return self._model.make_cache(self._kv, self.limit, self.sliding)
        from mlx_lm.models.cache import make_prompt_cache

        return make_prompt_cache(self._model, max_kv_size=self.limit)

    def checked(self, cache: Cache) -> Cache:
        """A prompt cache that the engine can go on with.

        Raises:
            RequestError: says how it differs from the engine's own.
        """
        template = self.make()
        if not isinstance(cache, list | tuple) or len(cache) != len(template):
            got = f"{len(cache)} entries" if isinstance(cache, list | tuple) else shown(cache)
            raise RequestError(
                f"The prompt cache has {got}, and this model's has {len(template)}. Make it with "
                "Engine.make_cache or Model.make_cache."
            )
        for mine, theirs in zip(template, cache, strict=True):
            if (wanted := _kind(mine)) != (got := _kind(theirs)):
                raise RequestError(
                    f"The prompt cache holds {got}, and this engine {wanted}. Give the engine the cache's "
                    "kv, max_kv_size and sliding_window, or make the cache with Engine.make_cache."
                )
        if not cache[0].empty() and len(getattr(cache[0], "lengths", [0])) != 1:
            raise RequestError("A prompt cache holds one row; extract one from the batch.")
        return list(cache)

    def merged(self, caches: Sequence[Cache]) -> Cache:
        """One batch of rows, one entry per block.

        Raises:
            RequestError: for caches that can't be batched.
        """
        if not all(hasattr(layer, "merge") for layer in caches[0]):
            raise RequestError(
                f"{type(caches[0][0]).__name__} caches can't be batched; this model does not run here."
            )
        blocks = list(zip(*caches, strict=True))
        if self._takes_zoo_kv_cache:
            from mlx_lm.models.cache import KVCache as MlxKVCache

            if all(type(entry) is MlxKVCache for entries in blocks for entry in entries):
                return [ZooKVCache.of_rows(entries) for entries in blocks]
        return [entries[0].merge(list(entries)) for entries in blocks]

    def bound(self, cache: Cache) -> int | None:
        """Tokens after which a row has to end; None with a sliding window, and for models of mlx-lm's zoo.

        An engine that was given no limit of its own takes the cache's, however large.
        """
        if not self._is_afm or self.sliding:
            return None
        bounds = [size for size in (cache[0].max_size, self._asked) if size is not None]
        return min(bounds, default=self.limit)

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all blocks.

        Raises:
            RequestError: when the model's caches are of a kind that doesn't say.
        """
        cache, token = self.make(), mx.zeros((1, 1), mx.int32)
        # Nothing of this is computed: the shapes tell.
        (self._model.prefill if self._is_afm else self._model)(token, cache=cache)
        arrays: list[mx.array] = []
        for entry in cache:
            if isinstance(entry, KVCache):
                arrays.append(entry.buffer)
            elif not isinstance(entry, NoKVCache):
                if not hasattr(entry, "keys") or hasattr(entry, "max_size"):
                    raise RequestError(
                        f"kv_memory can't be honoured: a {type(entry).__name__} of this model doesn't say what "
                        "a token takes."
                    )
                arrays += [entry.keys, entry.values]
        return sum(array.nbytes // array.shape[2] for array in arrays)

    def room(self, cache: Cache) -> int:
        """Tokens that every row of an AFM model's batch may still be fed; a large number without a bound."""
        first = cache[0]
        return sys.maxsize if first.max_size is None else first.max_size - max(first.lengths)

    def position(self, cache: Cache) -> int:
        """Tokens that a row's cache holds."""
        return max(cache[0].lengths) if self._is_afm else cache[0].size()


def _kind(entry: Any) -> str:
    """The kind of a cache's entry, in words; rows of one batch must have the same."""
    if isinstance(entry, KVCache):
        stored = "int8 codes" if entry.int8 else "floats"
        window = f" in a sliding window of {entry.max_size}" if entry.sliding_window else ""
        return stored + window
    size = getattr(entry, "max_size", None)  # of mlx-lm's rotating caches
    return f"a {type(entry).__name__}" + (f" of {size}" if size is not None else "")


def kind_of(cache: Cache) -> tuple[str | None, int | None, bool]:
    """`KVCache.kind` of a prompt cache; its storage is None where it is none of ours, or empty."""
    first = cache[0] if cache else None
    if isinstance(first, KVCache):
        return first.kind
    return None, getattr(first, "max_size", None), False


def fit_empty(cache: Cache, kv: str | None, window: int | None) -> None:
    """Replace an empty cache's entries by ones that store what is asked for, which its maker could not know.

    Args:
        cache: the cache; it stays as it is where it holds tokens, or has a window.
        kv: see `Model.make_cache`; None for no change.
        window: tokens of a sliding window, if the bound is not smaller; None for no change.
    """
    for i, entry in enumerate(cache):
        if isinstance(entry, KVCache) and entry.empty() and not entry.sliding_window:
            int8 = entry.int8 if kv is None else kv == "int8"
            bounds = [size for size in (window, entry.max_size) if size is not None]
            cache[i] = KVCache(int8, min(bounds, default=None), window is not None)


def hand_back(mine: Sequence[Any], theirs: Cache, surplus: int) -> None:
    """Fill the caller's cache with prompt and answer, but for the answer's last token.

    Args:
        mine: the row's cache, taken out of the batch.
        theirs: the caller's cache, which is changed.
        surplus: tokens that were fed before it was known that they are past the end.
    """
    for source, target in zip(mine, theirs, strict=True):
        if surplus and source.is_trimmable():
            source.trim(surplus)
        target.state = source.state
