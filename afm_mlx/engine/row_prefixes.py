"""What an engine's rows find in its prefix cache, and what they leave there."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.prefix_cache import BLOCK, Columns, PrefixCache
from afm_mlx.engine.prefix_cache_folder import BlockLayout, StoredBlock
from afm_mlx.engine.request import Response
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import RowAdapters
from afm_mlx.engine.row_caches import Cache
from afm_mlx.model.kv_cache import KVCache, NoKVCache, ZooKVCache
from afm_mlx.model.model import is_afm


@dataclass(frozen=True)
class _Read:
    """Blocks that are read for a row.

    Args:
        key, tokens, first: see `PrefixCache.take_in`.
        blocks: what is read.
        is_over: whether it is in memory.
    """

    key: Hashable
    tokens: Sequence[int]
    first: int
    blocks: Future[list[StoredBlock]]
    is_over: bool = False


class RowPrefixes:
    """Looks the prompts of an engine's rows up, and keeps what they have computed.

    Args:
        model: the model that the engine runs.
        prefixes: the engine's prefix cache; None for none.
        adapters: the adapters of the engine's rows.
        by_block: see `RowCaches`.

    Raises:
        RequestError: when the prefix cache is another model's.
    """

    def __init__(
        self,
        model: nn.Module,
        prefixes: PrefixCache | None,
        adapters: RowAdapters,
        by_block: bool = False,
    ):
        self._model, self._prefixes, self._adapters = model, prefixes, adapters
        self._by_block = by_block
        self._keys: dict[int, Hashable] = {}  # of the rows that use the prefix cache
        self._found: dict[int, int] = {}  # prompt tokens that were found, by row
        self._reads: dict[int, _Read] = {}  # what is read for rows that wait
        self._layouts: dict[Hashable, BlockLayout] = {}  # by kind of cache
        if prefixes is not None:
            prefixes.serve(model)

    def is_ready(self, row: Row, cache: Cache) -> bool:
        """True once the prompt's stored pages are in memory; else starts reading them."""
        if self._prefixes is None or self._prefixes.folder is None or row.request.cache is not None:
            return True
        if not _can_be_cut(cache):
            return True
        if (read := self._reads.get(row.id)) is None:
            key, tokens = self._key(row, cache), row.known[:-1]
            first, names = self._prefixes.stored(key, tokens)
            if not names:
                return True
            read = _Read(key, tokens, first, self._prefixes.folder.read(names, self._layout(cache)))
            self._reads[row.id] = read
        if not read.blocks.done():
            return False
        if not read.is_over:  # once: where memory is too small for all, what there is has to do
            self._prefixes.take_in(read.key, read.tokens, read.first, read.blocks.result())
            self._reads[row.id] = replace(read, is_over=True)
        return True

    def wait(self, seconds: float) -> None:
        """Wait for files that are being read, if there are any."""
        reads = [read.blocks for read in self._reads.values() if not read.is_over]
        if reads:
            wait(reads, seconds, FIRST_COMPLETED)

    def _key(self, row: Row, cache: Cache) -> Hashable:
        kind = cache[0].kind if isinstance(cache[0], KVCache) else ("float", None, False)
        window = kind[1] if kind[2] else None
        return (row.request.client, self._adapters.fingerprint(row), kind[0], window)

    def _layout(self, cache: Cache) -> BlockLayout:
        """What stored blocks of rows with such an empty cache look like."""
        kind = cache[0].kind if isinstance(cache[0], KVCache) else None
        if kind not in self._layouts:
            probe = copy.deepcopy(cache)
            # Nothing of this is computed: the shapes tell.
            run = self._model.prefill if is_afm(self._model) else self._model
            run(mx.zeros((1, 1), mx.int32), cache=probe)
            token = Columns.of(_arrays(probe, 0) or [], 0, 1)
            self._layouts[kind] = BlockLayout.of(token.places, token.groups, BLOCK)
        return self._layouts[kind]

    def begin(self, row: Row, cache: Cache) -> None:
        """Fill a row's empty cache with what is known of its prompt; the last token remains to be fed."""
        if self._prefixes is None or row.request.cache is not None or not _can_be_cut(cache):
            return
        self._reads.pop(row.id, None)
        key = self._keys[row.id] = self._key(row, cache)
        arrays, found = self._prefixes.find(key, row.known[:-1], self._by_block)
        self._found[row.id] = min(found, len(row.request.prompt))
        if found:
            _fill(cache, arrays)
            row.position += found
            row.known = row.known[found:]

    def keep(self, row: Row, cache: Sequence[Any], index: int, fed: int | None = None) -> None:
        """Keep what a row has computed.

        Args:
            row: the row.
            cache: the cache of its batch, one entry per block.
            index: the row's index there.
            fed: tokens of the row that are in the cache; None for those of prompt and answer.
        """
        if self._prefixes is None or row.id not in self._keys:
            return
        if (arrays := _arrays(cache, index)) is not None:
            right = row.position - row.surplus if fed is None else fed
            tokens = [*row.request.prompt, *row.tokens][:right]
            self._prefixes.keep(self._keys[row.id], tokens, arrays)

    def tell(self, responses: Iterable[Response]) -> None:
        """Write into responses how many tokens of their prompts were found."""
        for response in responses:
            response.cached_tokens = self._found.get(response.row, 0)
            if response.finish_reason is not None:
                self.forget(response.row)

    def forget(self, row_id: int) -> None:
        """A row has ended; unknown ids are ignored."""
        self._keys.pop(row_id, None)
        self._found.pop(row_id, None)
        self._reads.pop(row_id, None)

    def advance(self, until_all_is_computed: bool = False) -> None:
        """A step has ended."""
        if self._prefixes is not None:
            self._prefixes.advance()
            if until_all_is_computed:
                self._prefixes.advance()

    def drop_newest(self) -> None:
        """A step has raised: none of its rows is left, and nothing of what it may have kept."""
        self._keys.clear()
        self._found.clear()
        self._reads.clear()
        if self._prefixes is not None:
            self._prefixes.drop_newest()


def _can_be_cut(cache: Cache) -> bool:
    """True if the tokens of a row's cache can be taken apart and put together."""
    others = [entry for entry in cache if not isinstance(entry, KVCache | NoKVCache)]
    if not others:
        return True
    from mlx_lm.models.cache import KVCache as MlxKVCache

    return all(type(entry) is MlxKVCache for entry in others)


def _arrays(cache: Sequence[Any], index: int) -> list[mx.array] | None:
    """Arrays (1, heads, columns, head_dim) of a batch's row; None when a window has forgotten some of it."""
    arrays: list[mx.array] = []
    for entry in cache:
        if isinstance(entry, KVCache) and not isinstance(entry, ZooKVCache):
            if entry.empty() or not entry.is_trimmable():
                return None
            entry.settle()
            arrays.append(entry.buffer[index : index + 1])
        elif not isinstance(entry, NoKVCache):
            row = entry.extract(index) if hasattr(entry, "extract") else entry
            arrays += [row.keys, row.values]
    return arrays


def _fill(cache: Cache, arrays: Iterable[mx.array]) -> None:
    """Fill a row's empty cache with arrays of `_arrays`."""
    left = iter(arrays)
    for entry in cache:
        if isinstance(entry, KVCache):
            entry.begin_with(next(left))
        elif not isinstance(entry, NoKVCache):
            entry.keys, entry.values = next(left), next(left)
            entry.offset = entry.keys.shape[2]
