"""The caches of an engine's rows: made, taken from callers, and handed back to them.

A prompt cache may have another bound than the engine: its row then ends at the smaller one. Storage (int8 codes
or floats) and sliding window have to be the engine's, because rows of a batch share one buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import RequestError, shown
from afm_mlx.model.kv_cache import STEP, KVCache, NoKVCache, ZooKVCache
from afm_mlx.model.model import is_afm

Cache = list[Any]


class RowCaches:
    """Makes, checks and measures the caches of an engine's rows.

    Args:
        model: the model that the engine runs.
        kv, max_kv_size, sliding_window: see `Engine`.
        by_block: whether caches are grown, joined and taken apart one block after the other, each evaluated
            before the next, so that old and new arrays of one block only are there at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        kv: str,
        max_kv_size: int | None,
        sliding_window: bool = False,
        by_block: bool = False,
    ):
        self._model, self._kv, self._asked = model, kv, max_kv_size
        self.sliding, self.by_block = sliding_window, by_block
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
        self._check_arrays(cache)
        # Under handles of the engine's own, so that these can be let go.
        return [entry.copy() if isinstance(entry, KVCache) else copy(entry) for entry in cache]

    def _check_arrays(self, cache: Sequence[Any]) -> None:
        """Raise `RequestError` for another model's arrays, and for blocks that hold different tokens."""
        filled = [entry for entry in cache if isinstance(entry, KVCache) and not entry.empty()]
        if not filled:
            return
        wanted = (2 * self._model.args.num_kv_heads, self._model.args.head_dim)
        for index, entry in enumerate(filled):
            entry.settle()
            shape, dtype = entry.buffer.shape, entry.buffer.dtype
            is_ours = len(shape) == 4 and (shape[0], shape[1], shape[3]) == (1, *wanted)
            if not is_ours or (dtype == mx.int8) != entry.int8:
                raise RequestError(
                    f"Block {index} of the prompt cache holds {dtype} of shape {list(shape)}; this model's is "
                    f"[1, {wanted[0]}, columns, {wanted[1]}]. Was it filled by another model?"
                )
        counts = sorted({entry.lengths[0] for entry in filled})
        blocks = sum(isinstance(entry, KVCache) for entry in cache)
        if len(counts) > 1 or len(filled) < blocks or filled[0].size() > filled[0].buffer.shape[2]:
            raise RequestError(
                f"The blocks of the prompt cache hold different tokens ({shown(counts)}), as after an "
                "interrupt. Begin a new cache."
            )

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
        merge: Callable[[Any], Any] = lambda entries: entries[0].merge(list(entries))  # noqa: E731
        if self._takes_zoo_kv_cache:
            from mlx_lm.models.cache import KVCache as MlxKVCache

            if all(type(entry) is MlxKVCache for entries in blocks for entry in entries):
                merge = ZooKVCache.of_rows
        merged = []
        for entries in blocks:
            merged.append(merge(entries))
            if self.by_block:
                for entry in entries:
                    let_go(entry)
                _evaluate(merged[-1])
        return merged

    def bound(self, cache: Cache) -> int | None:
        """Tokens after which a row has to end; None with a sliding window, and for models of mlx-lm's zoo.

        An engine that was given no limit of its own takes the cache's, however large.
        """
        if not self._is_afm or self.sliding:
            return None
        bounds = [size for size in (cache[0].max_size, self._asked) if size is not None]
        return min(bounds, default=self.limit)

    def bytes_per_token(self) -> list[int]:
        """Bytes of one token's keys and values in each block that has any.

        Raises:
            RequestError: when the model's caches are of a kind that doesn't say.
        """
        cache, token = self.make(), mx.zeros((1, 1), mx.int32)
        # Nothing of this is computed: the shapes tell.
        (self._model.prefill if self._is_afm else self._model)(token, cache=cache)
        blocks: list[list[mx.array]] = []
        for entry in cache:
            if isinstance(entry, KVCache):
                blocks.append([entry.buffer])
            elif not isinstance(entry, NoKVCache):
                if not hasattr(entry, "keys") or hasattr(entry, "max_size"):
                    raise RequestError(
                        f"kv_memory can't be honoured: a {type(entry).__name__} of this model doesn't say what "
                        "a token takes."
                    )
                blocks.append([entry.keys, entry.values])
        return [sum(a.nbytes // a.shape[2] for a in arrays) for arrays in blocks]

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


def hand_back(batch: Cache, row: int, theirs: Cache, surplus: int, adapter: str) -> None:
    """Fill the caller's cache with what a batch's row has computed, evaluated for any thread.

    Args:
        batch: the batch's cache.
        row: the row's index there.
        theirs: the caller's cache, which is changed.
        surplus: tokens at the row's end that its caller's cache is not to hold.
        adapter: fingerprint of the row's adapter.
    """
    for source, target in zip(batch, theirs, strict=True):
        mine = source.extract(row)
        if surplus and mine.is_trimmable():
            mine.trim(surplus)
        if not mine.empty():
            target.state = mine.state
        mx.eval(target.state)  # one block after the other: there is one copy at a time
    theirs[0].adapter = adapter


def change_blocks(cache: Sequence[Any], change: Callable[[Any], None], by_block: bool) -> None:
    """Change each entry of a cache; with `by_block`, evaluate it before the next one is changed."""
    for entry in cache:
        change(entry)
        if by_block:
            _evaluate(entry)


def _evaluate(entry: Any) -> None:
    if not entry.empty():
        mx.eval(entry.buffer if isinstance(entry, KVCache) else entry.state)


def filter_rows(entry: Any, rows: Sequence[int]) -> None:
    """Keep only these rows of a batch's entry, and the columns that they use."""
    entry.filter(rows)
    if (
        type(entry).__name__ == "BatchKVCache" and entry.keys is not None
    ):  # mlx-lm's keeps all columns
        columns = -(-entry._idx // STEP) * STEP
        entry.keys = mx.contiguous(entry.keys[:, :, :columns])
        entry.values = mx.contiguous(entry.values[:, :, :columns])


def make_ready(cache: Sequence[Any], inputs: mx.array | None, count: int) -> None:
    """Move and grow a cache's arrays, block by block, so that the next step copies none of them.

    MLX writes in place only where nothing else holds an array, so the step before has to have ended.

    Args:
        cache: one entry per block.
        inputs: tokens that the step before has made; None without one.
        count: tokens of every row that the next step writes.
    """
    ours = [entry for entry in cache if isinstance(entry, KVCache)]
    if all(entry.has_room_in_tail(count) for entry in ours):
        return
    if inputs is not None:
        mx.eval(inputs)
    change_blocks(ours, lambda entry: entry.reserve(count), by_block=True)


def let_go(entry: Any) -> None:
    """Drop the arrays of a cache's entry whose rows are in another one now."""
    if isinstance(entry, KVCache):
        entry.buffer = entry.tail = None
    elif hasattr(entry, "keys"):  # of mlx-lm's
        entry.keys = entry.values = None
