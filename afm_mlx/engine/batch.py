"""Rows that run together, and their KV caches: made, joined, taken apart, and returned to callers.

A batch has one cache entry for each of the model's blocks, and each entry holds all rows. A prompt cache may
have another bound than the engine: its row then ends at the smaller one. Storage (int8 codes or floats) and
sliding window have to be the engine's, because rows of a batch share one buffer.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.engine.image_features import Features
from afm_mlx.engine.prompt_scores import Target
from afm_mlx.engine.request import Embedding
from afm_mlx.engine.row import Row, batch_adapters
from afm_mlx.errors import RequestError, shown
from afm_mlx.kernels import dispatch
from afm_mlx.model.kv_cache import STEP, Cache, KVCache, NoKVCache
from afm_mlx.model.model import Model, is_afm
from afm_mlx.model.pooling import hidden_states, last_states, normalize
from afm_mlx.model.zoo_kv_cache import ZooKVCache
from afm_mlx.vision_config import VisionConfig

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

Entry = Any
"""An entry of a batch's cache: ours, or one of mlx-lm's."""


@dataclass
class RowBatch:
    """Rows that share one cache."""

    by_block: bool  # see `RowCaches`
    rows: list[Row] = field(default_factory=list)  # B of them
    cache: Cache = field(default_factory=list)  # one entry per block, of B rows
    inputs: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))  # (B,) to feed next
    adapters: BatchAdapters | None = None  # None when no row has one

    def join(self, other: RowBatch) -> None:
        """Append the rows of another batch, which loses its arrays."""
        if self.rows and other.rows:
            extend_cache(self.cache, other.cache, self.by_block)
            self.rows = self.rows + other.rows
            self.inputs = mx.concatenate([self.inputs, other.inputs])
            self.adapters = batch_adapters(self.rows)
        elif other.rows:
            vars(self).update(vars(other))

    def keep(self, indices: list[int]) -> None:
        """Keep the rows of these indices; remove all others, and release the removed rows' adapters."""
        if len(indices) == len(self.rows):
            return
        for i in set(range(len(self.rows))) - set(indices):
            self.rows[i].release()
        self._select(indices)
        if not self.rows:
            self.cache = []
        change_entries(self.cache, lambda entry: _filter_rows(entry, indices), self.by_block)

    def take_out(self, index: int) -> tuple[Row, Cache]:
        """Remove the row at `index` until it joins again, its adapter still leased; return row and cache."""
        row, taken = self.rows[index], self.cache
        others = [i for i in range(len(self.rows)) if i != index]
        if not others:
            self.cache = []
        else:
            taken = []

            def take(entry: Entry) -> None:
                taken.append(entry.extract(index))
                if self.by_block and not taken[-1].empty():
                    mx.eval(taken[-1].state)
                _filter_rows(entry, others)

            change_entries(self.cache, take, self.by_block)
        self._select(others)
        return row, taken

    def _select(self, indices: list[int]) -> None:
        self.rows = [self.rows[i] for i in indices]
        self.adapters = batch_adapters(self.rows)
        self.inputs = self.inputs[mx.array(indices, dtype=mx.int32)]


@dataclass
class ImageColumns:
    """An image of a row that prefills."""

    row: int  # index into the batch
    columns: np.ndarray  # (tokens,) of `Prefill.tokens`; below 0 where the cache has them
    features: Features

    def columns_within(self, start: int, count: int) -> np.ndarray:
        """Return a mask (tokens,): True for tokens in the `count` columns from `start` on."""
        return (self.columns >= start) & (self.columns < start + count)


@dataclass
class Prefill:
    """Rows whose pending tokens are being fed: prompts, or tokens that a constraint forces."""

    batch: RowBatch  # the B rows
    # (B, most tokens), padded on the right: all pending tokens of rows that become vectors, else all but the
    # last, which is the row's next decode step.
    tokens: mx.array
    lengths: list[int]  # of the rows' tokens
    done: int = 0  # columns of `tokens` that are in the cache
    cancelled: set[int] = field(default_factory=set)  # ids of rows
    # First column behind which a row wants the log-probability of a token of its prompt; None if there is none.
    scored_from: int | None = None
    generates: bool = True  # False if all rows end with their prompts, as all or none do
    # How the rows' hidden states become vectors, in one way for all; None if no vectors are wanted.
    pooling: str | None = None
    # (B, hidden_dim) float32: with "mean" the sum of each row's hidden states so far, with "last" the state of
    # the row's last token once it is fed.
    _states: mx.array | None = None
    # With tokens that are not in the cache, and of rows that were not cancelled.
    images: list[ImageColumns] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        cache: Cache,
        by_block: bool,
        features_of: Callable[[Row, PromptImage], Features] | None = None,
    ) -> Prefill:
        """Take over the rows' pending tokens and their merged cache.

        `features_of` returns the features of a row's image; pass None if the rows' prompts are fed already.
        """
        pending = [row.pending for row in rows]
        lengths = [row.prefill_length for row in rows]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for entry in cache:
                entry.prepare(lengths=lengths, right_padding=padding)
        padded = [ids[:n] + [0] * (longest - n) for ids, n in zip(pending, lengths, strict=True)]
        tokens = mx.array(padded, mx.int32).reshape(len(rows), longest)
        last = mx.array([ids[-1] for ids in pending], dtype=mx.int32)
        images = [
            ImageColumns(
                i, placed.places - (row.position - row.start), features_of(row, placed.image)
            )
            for i, row in enumerate(rows)
            for placed in row.unfed_images
            if features_of is not None
        ]
        for row, length in zip(rows, lengths, strict=True):
            row.position += length
            row.pending = []
        batch = RowBatch(by_block, list(rows), cache, last, batch_adapters(rows))
        prefill = cls(batch, tokens, lengths, generates=rows[0].generates, images=images)
        prefill.pooling = None if (asked := rows[0].embedding) is None else asked.pooling
        starts = [span.start for i in range(len(rows)) if (span := prefill._scored_columns(i)[0])]
        prefill.scored_from = min(starts, default=None)
        return prefill

    def _scored_columns(self, i: int) -> tuple[range, int]:
        """Return the columns whose logits row i needs, and the index in its prompt of what follows column 0."""
        row = self.batch.rows[i]
        base = row.position - row.start - self.lengths[i] + 1
        if row.scored_from is None or row.id in self.cancelled:
            return range(0), base
        return range(max(0, row.scored_from - base), len(row.request.prompt) - base), base

    def targets(self, count: int) -> list[Target]:
        """Return the tokens whose log-probabilities are wanted behind the next `count` columns."""
        targets = []
        for i, row in enumerate(self.batch.rows):
            span, base = self._scored_columns(i)
            first, last = max(span.start, self.done), min(span.stop, self.done + count)
            prompt = row.request.prompt
            targets += [Target(i, c - self.done, prompt[base + c]) for c in range(first, last)]
        return targets

    @property
    def left(self) -> int:
        return self.tokens.shape[1] - self.done

    @property
    def is_whole(self) -> bool:
        """True once nothing of the prompts remains to be computed, except a last token that decodes."""
        return not self.left

    def next_to_encode(self, count: int) -> ImageColumns | None:
        """Return the first image without whole features that has one of the next `count` columns.

        Removes images whose columns are fed or whose rows were cancelled.
        """
        self.images = [
            image
            for image in self.images
            if image.columns[-1] >= self.done
            and self.batch.rows[image.row].id not in self.cancelled
        ]
        for image in self.images:
            if not image.features.is_whole and image.columns_within(self.done, count).any():
                return image
        return None

    def inputs(self, model: nn.Module, count: int) -> mx.array:
        """Return the next columns: tokens (B, count or less), or embeddings (B, ..., D) if images are there."""
        tokens = self.tokens[:, self.done : self.done + count]
        images = [i for i in self.images if i.columns_within(self.done, count).any()]
        if not images:
            return tokens
        assert isinstance(model, Model)
        embedded = model.embed(tokens)
        for image in images:
            within = image.columns_within(self.done, count)
            columns = mx.array((image.columns[within] - self.done).astype(np.int32))
            features = image.features.take(np.flatnonzero(within))
            embedded[image.row, columns] = features.astype(embedded.dtype)
        return embedded

    def compute_states(self, model: nn.Module, tokens: mx.array) -> None:
        """Feed the next columns, and keep what the rows' vectors need of their hidden states."""
        width, cache = tokens.shape[1], self.batch.cache
        left = mx.array(self.lengths) - self.done
        if self.pooling == "mean":
            is_token = mx.arange(width) < left[:, None]
            hidden = hidden_states(model, tokens, cache).astype(mx.float32)
            added = mx.where(is_token[..., None], hidden, 0).sum(axis=1)
            self._states = added if self._states is None else self._states + added
        elif not any(self.done < length <= self.done + width for length in self.lengths):
            prefill_tokens(model, tokens, cache)
            return
        else:
            last = last_states(model, tokens, mx.clip(left, 1, width), cache).astype(mx.float32)
            # A row that ended in an earlier chunk keeps its state; one that goes on gets it in a later chunk.
            self._states = (
                last if self._states is None else mx.where(left[:, None] > 0, last, self._states)
            )
        mx.eval(self._states)

    def take_vectors(self) -> None:
        """Have the rows take their vectors, once their prompts are fed."""
        assert self._states is not None
        pooled = self._states
        if self.pooling == "mean":
            counts = mx.array([len(row.request.prompt) for row in self.batch.rows])
            pooled = pooled / counts[:, None]
        vectors = []
        for state, row in zip(pooled, self.batch.rows, strict=True):
            asked = row.embedding or Embedding()
            kept = normalize(state, asked.dimensions) if asked.normalized else state
            vectors.append(kept[: asked.dimensions])
        mx.eval(vectors)
        for row, vector in zip(self.batch.rows, vectors, strict=True):
            row.take_vector(np.array(vector))

    def report(self) -> None:
        """Call the rows' `on_prefill` with how much of their prompts is done."""
        for row, length in zip(self.batch.rows, self.lengths, strict=True):
            if not row.is_prompt_fed and row.id not in self.cancelled:
                row.report(row.position - row.start - max(0, length - self.done))


class RowCaches:
    """Makes, checks, merges and measures the caches of an engine's rows.

    With `by_block`, caches are grown, joined and split one block after the other, so that old and new arrays
    exist at the same time for one block only. With `takes_back`, rejected draft tokens can leave merged caches
    (`trim_rows`). Other arguments are `Engine`'s.
    """

    def __init__(
        self,
        model: nn.Module,
        kv: str,
        max_kv_size: int | None,
        sliding_window: bool = False,
        by_block: bool = False,
        takes_back: bool = False,
    ):
        self._model, self._kv, self._max_kv_size = model, kv, max_kv_size
        self._takes_back = takes_back
        self.sliding, self.by_block = sliding_window, by_block
        self._is_afm = is_afm(model)
        self.limit = max_kv_size or model.args.context_length if self._is_afm else max_kv_size
        marks = [
            getattr(block, "takes_zoo_kv_cache", False) for block in getattr(model, "layers", [])
        ]
        # On a GPU, MLX's attention to several rows would copy this cache's keys and its values.
        is_cpu = dispatch.device() == "cpu"
        self._takes_zoo_kv_cache = is_cpu and bool(marks) and all(marks)

    def check_kind(self) -> None:
        """Raise `RequestError` if the model's caches can't run in a batch."""
        entries = self.make()
        while entries:
            entry = entries.pop()
            entries += getattr(entry, "caches", [])  # of mlx-lm's `CacheList`
            if not hasattr(entry, "merge"):
                raise RequestError(
                    f"This model has a {type(entry).__name__}, of which mlx-lm has no batches, so it does not "
                    "run in this engine. Run it with mlx_lm.generate."
                )

    def make(self) -> Cache:
        if isinstance(self._model, Model):
            return list(self._model.make_cache(self._kv, self.limit, self.sliding))
        from mlx_lm.models.cache import make_prompt_cache

        return list(make_prompt_cache(self._model, max_kv_size=self.limit))

    @functools.cached_property
    def takes_padding(self) -> bool:
        """True if prompts of different lengths can share a chunk, and draft tokens of several rows a step."""
        if self._is_afm:
            return not self.sliding
        from afm_mlx.engine import zoo_caches

        return zoo_caches.takes_padding(self.make(), lambda cache: run_shapes(self._model, cache))

    def checked(self, cache: object) -> Cache:
        """Return a caller's prompt cache under new handles; `RequestError` says how it differs from ours."""
        template = self.make()
        if not isinstance(cache, list | tuple) or len(cache) != len(template):
            got = f"{len(cache)} entries" if isinstance(cache, list | tuple) else shown(cache)
            raise RequestError(
                f"The prompt cache has {got}, and this model's has {len(template)}. Make it with "
                "Engine.make_cache or Model.make_cache."
            )
        for ours, theirs in zip(template, cache, strict=True):
            if (wanted := _described(ours)) != (got := _described(theirs)):
                raise RequestError(
                    f"The prompt cache holds {got}, and this engine {wanted}. Give the engine the cache's "
                    "kv, max_kv_size and sliding_window, or make the cache with Engine.make_cache."
                )
        if isinstance(cache[0], KVCache) and not cache[0].empty() and len(cache[0].lengths) != 1:
            raise RequestError("A prompt cache holds one row; extract one from the batch.")
        self._check_arrays(cache)
        # With handles of the engine's own, the engine can drop the arrays.
        return [entry.copy() if isinstance(entry, KVCache) else copy(entry) for entry in cache]

    def _check_arrays(self, cache: Sequence[Entry]) -> None:
        """Raise `RequestError` for another model's arrays, and for blocks that hold different tokens."""
        filled = [entry for entry in cache if isinstance(entry, KVCache) and not entry.empty()]
        if not filled:
            return
        heads, dim = 2 * self._model.kv_heads, self._model.args.head_dim
        for index, entry in enumerate(filled):
            entry.settle()
            shape, dtype = entry.buffer.shape, entry.buffer.dtype
            is_ours = len(shape) == 4 and (shape[0], shape[1], shape[3]) == (1, heads, dim)
            if not is_ours or (dtype == mx.int8) != entry.int8:
                raise RequestError(
                    f"Block {index} of the prompt cache holds {dtype} of shape {list(shape)}; this model's is "
                    f"[1, {heads}, columns, {dim}]. Was it filled by another model?"
                )
        counts = sorted({entry.lengths[0] for entry in filled})
        blocks = sum(isinstance(entry, KVCache) for entry in cache)
        if len(counts) > 1 or len(filled) < blocks or filled[0].size() > filled[0].buffer.shape[2]:
            raise RequestError(
                f"The blocks of the prompt cache hold different tokens ({shown(counts)}), as after an "
                "interrupt. Begin a new cache."
            )

    def merged(self, caches: Sequence[Cache]) -> Cache:
        """Make one batch's cache of the caches of rows."""
        blocks = list(zip(*caches, strict=True))
        is_zoo = False
        if self._takes_zoo_kv_cache:
            from mlx_lm.models.cache import KVCache as MlxKVCache

            is_zoo = all(type(entry) is MlxKVCache for entries in blocks for entry in entries)
        merged: Cache = []
        for entries in blocks:
            entry = ZooKVCache.of_rows(entries) if is_zoo else entries[0].merge(list(entries))
            if self._takes_back and not isinstance(entry, KVCache | NoKVCache):
                from afm_mlx.engine.zoo_caches import trimmable

                entry = trimmable(entry)
            merged.append(entry)
            if self.by_block:
                for source in entries:
                    _drop_arrays(source)
                _evaluate(entry)
        return merged

    def bound(self, cache: Cache) -> int | None:
        """Return the number of tokens at which a row has to end; None with a sliding window or mlx-lm's model.

        If the engine was given no limit, the cache's limit holds, however large.
        """
        if not self._is_afm or self.sliding:
            return None
        bounds = [size for size in (cache[0].max_size, self._max_kv_size) if size is not None]
        return min(bounds, default=self.limit)

    def bytes_per_token(self) -> list[int]:
        """Return the bytes of one token's keys and values, for each block that has any."""
        cache = self.make()
        run_shapes(self._model, cache)
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

    def tokens_left(self, cache: Cache) -> int:
        """Return how many tokens every row of a batch can still be fed."""
        first = cache[0]
        if not self._is_afm or first.max_size is None:
            return sys.maxsize
        return int(first.max_size - max(first.lengths))

    def position(self, cache: Cache) -> int:
        """Return how many tokens a row's cache holds."""
        return int(max(cache[0].lengths) if self._is_afm else cache[0].size())


def run_shapes(model: nn.Module, cache: Cache) -> None:
    """Feed an empty cache one token that is never computed, so that its arrays have their shapes and types."""
    prefill_tokens(model, mx.zeros((1, 1), mx.int32), cache)


def prefill_tokens(model: nn.Module, inputs: mx.array, cache: Cache) -> None:
    """Feed prompt tokens (B, L) to a batch's cache, or to one of an AFM model's own."""
    # A zoo model's logits are never evaluated, and MLX computes only what is.
    (model.prefill if is_afm(model) else model)(inputs, cache=cache)


def verify(model: nn.Module, inputs: mx.array, cache: Cache) -> mx.array:
    """Return the logits (B, L, vocab_size) behind a few tokens (B, L) of every row; the cache grows by L."""
    logits: mx.array = model.verify(inputs, cache) if is_afm(model) else model(inputs, cache=cache)
    return logits


def verify_greedy(model: nn.Module, inputs: mx.array, cache: Cache) -> tuple[mx.array, mx.array]:
    """Return the most likely tokens (B, L) behind a few tokens of every row, and their logits (B, L)."""
    if isinstance(model, Model):
        return model.verify_greedy(inputs, cache)
    logits = verify(model, inputs, cache)
    return logits.argmax(axis=-1), logits.max(axis=-1)


def trim_rows(cache: Cache, counts: Sequence[int], longest: int) -> None:
    """Remove the last `counts[r]` tokens of each row r from a batch's cache, except from mlx-lm's states.

    `longest` is the number of tokens that the longest row has afterwards.
    """
    if all(isinstance(entry, KVCache | NoKVCache) for entry in cache):
        for entry in cache:
            entry.trim_rows(counts)
        return
    from afm_mlx.engine import zoo_caches

    zoo_caches.trim_rows(cache, counts, longest)


def vocab_size_of(model: nn.Module) -> int | None:
    """Return the number of a model's logits; None if its config doesn't say."""
    # A few of mlx-lm's models have a config, and no args.
    size = getattr(getattr(model, "args", getattr(model, "config", None)), "vocab_size", None)
    return None if size is None else int(size)


def vision_config_of(model: nn.Module) -> VisionConfig | None:
    """Return the config of a model's vision part; None if it reads text only."""
    return model.args.vision_config if is_afm(model) else None


def _described(entry: Entry) -> str:
    if isinstance(entry, KVCache):
        stored = "int8 codes" if entry.int8 else "floats"
        window = f" in a sliding window of {entry.max_size}" if entry.sliding_window else ""
        return stored + window
    size = getattr(entry, "max_size", None)  # of mlx-lm's rotating caches
    return f"a {type(entry).__name__}" + (f" of {size}" if size is not None else "")


def kind_of(cache: Cache) -> tuple[str | None, int | None, bool]:
    """Return a prompt cache's `KVCache.kind`; its storage is None if the cache is mlx-lm's, or has no entry."""
    first = cache[0] if cache else None
    if isinstance(first, KVCache):
        return first.kind
    return None, getattr(first, "max_size", None), False


def fit_empty(cache: Cache, kv: str | None, window: int | None) -> None:
    """Replace an empty cache's entries by ones with another storage or sliding window (None to leave each).

    A cache that holds tokens, or has a window, stays as it is.
    """
    for i, entry in enumerate(cache):
        if isinstance(entry, KVCache) and entry.empty() and not entry.sliding_window:
            int8 = entry.int8 if kv is None else kv == "int8"
            bounds = [size for size in (window, entry.max_size) if size is not None]
            cache[i] = KVCache(int8, min(bounds, default=None), window is not None)


def return_cache(batch: Cache, row: int, theirs: Cache, surplus: int, adapter: str) -> None:
    """Fill a caller's cache (`theirs`) with a row of a batch's, without its last `surplus` tokens.

    If an entry can't be trimmed, all of them keep these tokens. Arrays are evaluated, so that any thread can
    use them. `adapter` is the row's fingerprint, "" for none.
    """
    if surplus and not all(isinstance(entry, KVCache | NoKVCache) for entry in batch):
        from afm_mlx.engine.zoo_caches import can_trim

        surplus = surplus if can_trim(batch, row) else 0
    for source, target in zip(batch, theirs, strict=True):
        ours = source.extract(row)
        if surplus and ours.is_trimmable():
            ours.trim(surplus)
        if not ours.empty():
            target.state = ours.state
        mx.eval(target.state)  # one block after the other: there is one copy at a time
    theirs[0].adapter = adapter


def extend_cache(cache: Cache, other: Cache, by_block: bool) -> None:
    """Append the rows of another batch's cache, which loses its arrays; for `by_block`, see `RowCaches`."""
    for entry, source in zip(cache, other, strict=True):
        entry.extend(source)
        _drop_arrays(source)
        if by_block:
            _evaluate(entry)


def change_entries(
    cache: Iterable[Entry], change: Callable[[Entry], object], by_block: bool
) -> None:
    """Change each entry of a cache; with `by_block`, evaluate it before the next one is changed."""
    for entry in cache:
        change(entry)
        if by_block:
            _evaluate(entry)


def _filter_rows(entry: Entry, rows: Sequence[int]) -> None:
    entry.filter(rows)
    # mlx-lm's keeps all columns.
    if type(entry).__name__ == "BatchKVCache" and entry.keys is not None:
        columns = -(-entry._idx // STEP) * STEP
        entry.keys = mx.contiguous(entry.keys[:, :, :columns])
        entry.values = mx.contiguous(entry.values[:, :, :columns])


def reserve_columns(cache: Cache, inputs: mx.array | None, count: int) -> None:
    """Move and grow a cache's arrays, so that writing `count` more tokens of every row copies none of them.

    MLX writes in place only if nothing else holds an array, so the step that made `inputs` has to have ended.
    """
    ours = [entry for entry in cache if isinstance(entry, KVCache)]
    if all(entry.fits_in_tail(count) for entry in ours):
        return
    if inputs is not None:
        mx.eval(inputs)
    change_entries(ours, lambda entry: entry.reserve(count), by_block=True)


def _evaluate(entry: Entry) -> None:
    if not entry.empty():
        mx.eval(entry.buffer if isinstance(entry, KVCache) else entry.state)


def _drop_arrays(entry: Entry) -> None:
    if isinstance(entry, KVCache):
        entry.buffer = entry.tail = None
    elif hasattr(entry, "keys"):  # of mlx-lm's
        entry.keys = entry.values = None
