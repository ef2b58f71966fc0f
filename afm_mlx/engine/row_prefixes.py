"""Fill rows' caches from the prefix cache, and keep in the prefix cache what rows have computed."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.batch import run_shapes
from afm_mlx.engine.prefix_cache import PAGE, Columns, Found, PrefixCache
from afm_mlx.engine.prefix_cache_folder import PageLayout, StoredPage
from afm_mlx.engine.row import Row, RowAdapters
from afm_mlx.model.kv_cache import Cache, KVCache, NoKVCache
from afm_mlx.model.zoo_kv_cache import ZooKVCache


class RowPrefixes:
    """Fills the caches of an engine's rows from its prefix cache, and keeps there what rows have computed."""

    def __init__(
        self, model: nn.Module, prefixes: PrefixCache, adapters: RowAdapters, by_block: bool
    ):
        self._model, self._prefixes, self._adapters = model, prefixes, adapters
        self._by_block = by_block
        # By rows that wait: the first stored page's number, and pages that are read; None once they are kept.
        self._reads: dict[int, tuple[int, Future[list[StoredPage]]] | None] = {}
        self._layouts: dict[Hashable, PageLayout] = {}  # by kind of cache
        prefixes.serve(model)

    def is_ready(self, row: Row) -> bool:
        """True once the prompt's stored pages are in memory; else starts reading them."""
        folder = self._prefixes.folder
        if folder is None or row.request.cache is not None or not _can_be_kept(row.cache):
            return True
        if _needs_snapshots(row.cache):
            return True
        tokens = row.reusable
        if row.id not in self._reads:
            first, names = self._prefixes.stored(self._key(row), tokens)
            if not names:
                return True
            self._reads[row.id] = first, folder.read(names, self._layout(row.cache))
        if (read := self._reads[row.id]) is not None:
            first, pages = read
            if not pages.done():
                return False
            # Once, even if memory is too small for all pages.
            self._prefixes.take_in(self._key(row), tokens, first, pages.result())
            self._reads[row.id] = None
        return True

    def wait(self, seconds: float) -> None:
        if reads := [read[1] for read in self._reads.values() if read is not None]:
            wait(reads, seconds, FIRST_COMPLETED)

    def begin(self, row: Row) -> None:
        """Fill a row's empty cache with the kept beginning of its prompt; the last token remains to be fed."""
        if row.request.cache is not None or not _can_be_kept(row.cache):
            return
        self._reads.pop(row.id, None)
        row.prefix_key = self._key(row)
        needs_snapshots = _needs_snapshots(row.cache)
        found = self._prefixes.find(
            row.prefix_key, row.reusable, self._by_block, needs_snapshot=needs_snapshots
        )
        row.cached_tokens = min(found.tokens, len(row.request.prompt))
        if needs_snapshots and found.shared - found.tokens >= PAGE:
            row.branch = found.shared
        if found.tokens:
            _fill(row.cache, found)
            row.position += found.tokens
            row.pending = row.pending[found.tokens :]
        if row.embedding is not None or not row.request.keeps_prefix:
            # Of many texts no two begin alike, and they would displace what chats go on with.
            row.prefix_key, row.branch = None, 0

    def keep(
        self, row: Row, cache: Cache, index: int, fed: int | None = None, is_last: bool = False
    ) -> None:
        """Keep what a row has computed, at `index` in a batch's cache.

        `fed` is the number of the row's tokens in the cache; None for its whole prompt and answer. Windows and
        states are kept only then, at `Row.branch`, and if it `is_last` what the row computes.
        """
        if row.prefix_key is None:
            return
        start = row.scored_from
        if start is not None and row.request.max_tokens == 0 and 1 < start == row.cached_tokens + 1:
            return  # one of several continuations of a context: others begin where it begins
        tokens, count = [*row.prefix_names, *row.tokens], fed
        needs_snapshots = _needs_snapshots(cache)
        if count is None:
            # No surplus token is taken back from a state. It is known: it is the one that ended the answer.
            count = row.position - (0 if needs_snapshots else row.surplus)
        elif needs_snapshots and count != row.branch and not is_last:
            return  # snapshots after each chunk would be too many
        if count > len(tokens) or (arrays := _arrays(cache, index)) is None:
            return
        state = _state(cache, index) if needs_snapshots else None
        self._prefixes.keep(row.prefix_key, tokens[:count], arrays, state)

    def forget(self, row_id: int) -> None:
        self._reads.pop(row_id, None)

    def advance(self, until_all_is_computed: bool = False) -> None:
        self._prefixes.advance()
        if until_all_is_computed:
            self._prefixes.advance()

    def drop_newest(self) -> None:
        self._reads.clear()
        self._prefixes.drop_newest()

    def _key(self, row: Row) -> Hashable:
        first = row.cache[0]
        kind = first.kind if isinstance(first, KVCache) else ("float", None, False)
        window = kind[1] if kind[2] else None
        if (zoo := _zoo_caches(row.cache)) is not None:
            window = zoo.window_sizes(row.cache)
        return (row.request.client, self._adapters.fingerprint(row), kind[0], window)

    def _layout(self, cache: Cache) -> PageLayout:
        kind = cache[0].kind if isinstance(cache[0], KVCache) else None
        if kind not in self._layouts:
            probe = copy.deepcopy(cache)
            run_shapes(self._model, probe)
            token = Columns.of(_arrays(probe, 0) or [], 0, 1)
            self._layouts[kind] = PageLayout.of(token.places, token.groups, PAGE)
        return self._layouts[kind]


def _zoo_caches(cache: Cache) -> ModuleType | None:
    """Return the module for mlx-lm's caches if an entry is one; it takes a second to import mlx-lm."""
    if all(isinstance(entry, KVCache | NoKVCache) for entry in cache):
        return None
    from afm_mlx.engine import zoo_caches

    return zoo_caches


def _can_be_kept(cache: Cache) -> bool:
    """True if a row's cache can begin with what another row has left."""
    zoo = _zoo_caches(cache)
    return zoo is None or zoo.can_be_kept(cache)


def _needs_snapshots(cache: Cache) -> bool:
    """True if only snapshots of some entries can be kept."""
    zoo = _zoo_caches(cache)
    return zoo is not None and zoo.needs_snapshots(cache)


def _state(cache: Cache, index: int) -> list[mx.array | None]:
    from afm_mlx.engine.zoo_caches import state_of

    return state_of(cache, index)


def _arrays(cache: Cache, index: int) -> list[mx.array] | None:
    """Return the arrays (1, heads, columns, head_dim) of a batch's row that can be cut into pages.

    None if nothing can be kept: an entry is empty, or a sliding window of ours has forgotten tokens.
    """
    if (zoo := _zoo_caches(cache)) is not None:
        return zoo.columns_of(cache, index)
    arrays: list[mx.array] = []
    for entry in cache:
        if isinstance(entry, NoKVCache):
            continue
        if entry.empty() or not entry.is_trimmable():
            return None
        if isinstance(entry, ZooKVCache):
            row = entry.extract(index)
            arrays += [row.keys, row.values]
        else:
            entry.settle()
            arrays.append(entry.buffer[index : index + 1])
    return arrays


def _fill(cache: Cache, found: Found) -> None:
    if (zoo := _zoo_caches(cache)) is not None:
        zoo.fill(cache, found.arrays, found.state, found.tokens)
        return
    left = iter(found.arrays)
    for entry in cache:
        if isinstance(entry, KVCache):
            entry.begin_with(next(left))
