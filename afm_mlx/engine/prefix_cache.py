"""Keys and values of prompts and answers, kept for later prompts that begin with the same tokens.

They are kept in pages of `PAGE` tokens, in a tree: each page is below the page of the tokens before it, and
prompts share the pages of a common beginning. The last page of a prompt may have fewer tokens. What two prompts
have in common is found to the token, within a page too.

A page's arrays are copies that are never written to. What is found is joined into new arrays, so a row never
holds a page's memory, and a page never keeps a row from writing in place.

`PrefixCache` is the tree; `RowPrefixes` looks the rows of one engine up in it.
"""

from __future__ import annotations

import copy
import json
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import arrays_fingerprint, base_model_fingerprint
from afm_mlx.engine.batch import run_shapes
from afm_mlx.engine.prefix_cache_folder import (
    PageLayout,
    Places,
    PrefixFolder,
    StoredPage,
    page_name,
)
from afm_mlx.engine.row import Row, RowAdapters
from afm_mlx.errors import RequestError
from afm_mlx.model.kv_cache import Cache, KVCache, NoKVCache, ZooKVCache
from afm_mlx.model.model import is_afm

PAGE = 64  # tokens of a page: 1.1 MB of the 3B's codes
FOLDER_BUDGET = 8 << 30  # bytes
_VERSION = 1  # of files
_OVERHEAD = 1024  # bytes that Python takes for a page, about
_ID = 4  # bytes of a token's id


@dataclass
class Columns:
    """Keys and values of some tokens, for all of a model's blocks."""

    groups: list[mx.array]  # (arrays of one shape and type, heads, tokens, head_dim)
    places: Places  # for each array of the cache, its group and its index there

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @classmethod
    def of(cls, arrays: Sequence[mx.array], start: int, stop: int) -> Columns:
        """Copy the keys and values of tokens `start` to `stop` from arrays (1, heads, tokens, head_dim)."""
        groups: dict[Hashable, list[mx.array]] = {}
        places = []
        for array in arrays:
            group = groups.setdefault((array.shape[1], array.shape[3], array.dtype), [])
            places.append((list(groups.values()).index(group), len(group)))
            group.append(array[:, :, start:stop])
        joined = [mx.contiguous(mx.concatenate(group)) for group in groups.values()]
        return cls(joined, tuple(places))

    @staticmethod
    def joined(parts: Sequence[Columns], tokens: int, apart: bool = False) -> list[mx.array]:
        """Return the arrays (1, heads, tokens, head_dim) of consecutive parts, up to a number of tokens.

        With `apart`, each array owns its memory; else the arrays of a group are views of one, which is faster.
        """

        def join(arrays: Iterable[mx.array]) -> mx.array:
            return mx.concatenate(list(arrays), axis=2)[:, :, :tokens]

        if apart:
            return [join(p.groups[i][at : at + 1] for p in parts) for i, at in parts[0].places]
        groups = [join(group) for group in zip(*(part.groups for part in parts), strict=True)]
        return [groups[i][at : at + 1] for i, at in parts[0].places]


@dataclass(eq=False)
class _Page:
    """Tokens that follow the tokens of the pages above."""

    above: weakref.ref[_Page] | None = None  # None for a root, which has no tokens
    name: bytes = b""  # the tokens, four bytes each
    columns: Columns = field(default_factory=lambda: Columns([], ()))  # their keys and values
    below: dict[bytes, _Page] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)  # of `below`, sorted
    stored_as: str = ""  # name of its file, if the page is full

    @property
    def tokens(self) -> int:
        return len(self.name) // _ID

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + len(self.name) + _OVERHEAD

    def nearest(self, name: bytes) -> tuple[_Page | None, int]:
        """Find the page below that has most first tokens in common with `name`, and their number."""
        # In the order of names, it is one of the two neighbours.
        at = bisect_left(self.names, name)
        best, most = None, 0
        for neighbour in self.names[max(0, at - 1) : at + 1]:
            common = _common(neighbour, name)
            if common > most:
                best, most = self.below[neighbour], common
        return best, most


class PrefixCache:
    """Keys and values of prompts and answers under a budget; the least recently used pages are evicted.

    It is for one model, and for the engines of one thread. A client's rows find only what the same client's
    rows have left, under the same adapter and storage. The model's weights must not change meanwhile.

    Rows of AFM models use it, int8 and float, with a sliding window as long as nothing was forgotten. So do
    rows of mlx-lm's models whose caches are all mlx-lm's `KVCache`. Rows of other models, and rows that come
    with a prompt cache, don't.

    With a folder, full pages are written there too, and found by later processes that run the same model.
    They hold prompts and answers: whoever can read the folder can find these out.

    All figures may be read in any thread.

    Args:
        budget: maximum bytes of memory.
        folder: path of a folder for pages; pass None for none.
        folder_budget: maximum bytes of the files in that folder.

    Attributes:
        nbytes: bytes in use.
        tokens: tokens that are kept.
        queries: tokens that were looked for.
        hits: tokens that were found.
        evictions: pages that were evicted.

    Raises:
        RequestError: for a budget below 1, and a folder that can't be used.
    """

    def __init__(
        self, budget: int, folder: str | Path | None = None, folder_budget: int = FOLDER_BUDGET
    ):
        if budget < 1:
            raise RequestError(
                f"The prefix cache's budget is {budget} bytes; at least 1 is needed."
            )
        self.budget = budget
        self.nbytes = self.tokens = self.queries = self.hits = self.evictions = 0
        self._model: weakref.ref[nn.Module] | None = None
        self._roots: dict[Hashable, _Page] = {}
        self._pages: OrderedDict[_Page, Hashable] = OrderedDict()  # by last use, with their keys
        # Pages of this step and of the one before: their arrays may still be computed.
        self._newest: list[_Page] = []
        self._newer: list[_Page] = []
        self.folder = None if folder is None else PrefixFolder(folder, folder_budget)
        self._model_name = ""  # in names of files

    def close(self) -> None:
        """Finish writing to the folder, and stop using it."""
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.close()

    def serve(self, model: nn.Module) -> None:
        """Bind the cache to a model; raise `RequestError` if it serves another."""
        if self._model is None:
            self._model = weakref.ref(model)
            if self.folder is not None:
                self._model_name = _model_name(model)
        if self._model() is not model:
            raise RequestError(
                "The prefix cache holds keys and values of another model; make one for each model."
            )

    def find(
        self, key: Hashable, tokens: Sequence[int], apart: bool = False
    ) -> tuple[list[mx.array], int]:
        """Find the longest kept beginning of some tokens.

        `key` is what keys and values depend on besides the tokens, and who may see them. With `apart`, each
        array owns its memory; else some are views of one, which is faster. Returns arrays (1, heads, found
        tokens, head_dim) in the cache's order, none if nothing was found, and how many tokens were found.
        """
        self.queries += len(tokens)
        path, found = self._path(key, _named(tokens))
        self._touch(path)
        self.hits += found
        parts = [page.columns for page in path]
        return (Columns.joined(parts, found, apart) if found else []), found

    def keep(self, key: Hashable, tokens: Sequence[int], arrays: Sequence[mx.array]) -> None:
        """Keep the keys and values of some tokens that are not kept yet, as far as the budget allows.

        `tokens` begin with the first one; `arrays` are (1, heads, number of tokens or more, head_dim) each.
        """
        if tokens and arrays:
            per_token = sum(array.nbytes // array.shape[2] for array in arrays)
            self._insert(key, tokens, per_token, lambda *span: Columns.of(arrays, *span))

    def _insert(
        self,
        key: Hashable,
        tokens: Sequence[int],
        per_token: int,
        columns_of: Callable[[int, int], Columns | None],
    ) -> None:
        """Add pages for the tokens that have none, at `per_token` bytes each, as far as the budget allows.

        `columns_of(start, stop)` returns the columns of a page's tokens, or None to end there.
        """
        name = _named(tokens)
        path, _ = self._path(key, name)
        self._touch(path)
        page = root = self._roots.get(key) or _Page(stored_as=self._root_name(key))
        path = []
        new: list[_Page] = []
        for start in range(0, len(tokens), PAGE):
            part = name[start * _ID : (start + PAGE) * _ID]
            near, common = page.nearest(part)
            if near is None or common < len(part) // _ID:
                count = len(part) // _ID
                if near is not None and common == near.tokens:
                    self._remove(near)  # the new page has the same tokens, and more
                if not self._make_room(count * per_token + len(part) + _OVERHEAD, path):
                    break
                columns = columns_of(start, start + count)
                if columns is None:
                    break
                near = _Page(weakref.ref(page), part, columns)
                if count == PAGE and self.folder is not None:
                    near.stored_as = page_name(page.stored_as, part)
                page.below[part] = near
                insort(page.names, part)
                self._pages[near] = key
                self.nbytes += near.nbytes
                self.tokens += near.tokens
                new.append(near)
            path.append(near)
            page = near
        self._touch(path)
        if root.below:  # eviction may have taken it out
            self._roots[key] = root
        self._newest += new
        # Together with the running step, which the pages may depend on.
        mx.async_eval([near.columns.groups for near in new])

    def advance(self) -> None:
        """End a step: what was kept in the step before it is now known to be computed, and may be written."""
        if self._newer:
            mx.eval([page.columns.groups for page in self._newer])
            for page in self._newer:
                if self.folder is not None and page.stored_as:
                    self.folder.write(page.stored_as, page.columns.places, page.columns.groups)
        self._newer, self._newest = self._newest, []

    def drop_newest(self) -> None:
        """Forget what was kept by a step that raised and by the step before, whose arrays may be wrong."""
        for page in [*self._newer, *self._newest]:
            self._remove_with_all_below(page)
        self._newer, self._newest = [], []

    # -- the folder

    def stored(self, key: Hashable, tokens: Sequence[int]) -> tuple[int, list[str]]:
        """Find the pages of `tokens` that only the folder has; return the first one's index and all names."""
        if self.folder is None:
            return 0, []
        name = _named(tokens)
        path, found = self._path(key, name)
        above = path[found // PAGE - 1].stored_as if found >= PAGE else self._root_name(key)
        first, names = found // PAGE, []
        for start in range(first * PAGE, len(tokens) - PAGE + 1, PAGE):
            above = page_name(above, name[start * _ID : (start + PAGE) * _ID])
            if above not in self.folder:
                break
            names.append(above)
        return first, names

    def take_in(
        self, key: Hashable, tokens: Sequence[int], first: int, stored: Sequence[StoredPage]
    ) -> None:
        """Add pages of `tokens` that were read from the folder; the first of them has the index `first`."""
        parts = [Columns(page.groups(), page.layout.places) for page in stored]

        def columns_of(start: int, stop: int) -> Columns | None:
            index = start // PAGE - first  # below 0 when memory has forgotten those before
            return parts[index] if index >= 0 else None

        if parts:
            known = tokens[: (first + len(parts)) * PAGE]
            self._insert(key, known, parts[0].nbytes // PAGE, columns_of)

    def _root_name(self, key: Hashable) -> str:
        return "" if self.folder is None else json.dumps([_VERSION, self._model_name, key])

    # -- the tree

    def _path(self, key: Hashable, name: bytes) -> tuple[list[_Page], int]:
        """Return the pages, from the root of `key`, that begin as the tokens `name` (`_Page.name`) do.

        The last page may share only its first tokens. The second result is the number of shared tokens.
        """
        path: list[_Page] = []
        page, found = self._roots.get(key), 0
        while page is not None and found * _ID < len(name):
            near, common = page.nearest(name[found * _ID : (found + PAGE) * _ID])
            if near is not None:
                path.append(near)
                found += common
            page = near if common == PAGE else None
        return path, found

    def _touch(self, path: Sequence[_Page]) -> None:
        """Record a use. A page counts as used after the pages below it, so that the oldest one has none."""
        for page in reversed(path):
            self._pages.move_to_end(page)

    def _make_room(self, nbytes: int, path: Sequence[_Page]) -> bool:
        """Evict old pages, none of `path`, until `nbytes` are free; return False if they can't be."""
        while self.nbytes + nbytes > self.budget:
            oldest = next(iter(self._pages), None)
            if oldest is None or oldest in path:
                return False
            self._remove(oldest)
            self.evictions += 1
        return True

    def _remove(self, page: _Page) -> None:
        """Remove a page that has no pages below it."""
        key = self._pages.pop(page)
        assert page.above is not None
        above = page.above()
        assert above is not None
        del above.below[page.name]
        del above.names[bisect_left(above.names, page.name)]
        self.nbytes -= page.nbytes
        self.tokens -= page.tokens
        if above.above is None and not above.below:
            self._roots.pop(key, None)

    def _remove_with_all_below(self, page: _Page) -> None:
        for other in list(page.below.values()):
            self._remove_with_all_below(other)
        if page in self._pages:
            self._remove(page)


def _named(tokens: Sequence[int]) -> bytes:
    """Return ids of tokens as bytes, in whose order texts with a common beginning are neighbours."""
    return np.array(tokens, ">u4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Return the number of tokens that two names have in common from the first on."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count // _ID
    differ = np.frombuffer(one, ">u4", count // _ID) != np.frombuffer(other, ">u4", count // _ID)
    return int(differ.argmax())


def _model_name(model: nn.Module) -> str:
    """Return text that is equal for models with equal keys and values, including their type."""
    parameters = dict(tree_flatten(model.parameters()))
    kinds = {str(p.dtype) for p in parameters.values() if mx.issubdtype(p.dtype, mx.floating)}
    if is_afm(model):
        name = base_model_fingerprint(model)
    else:
        name = arrays_fingerprint(str(model.args), parameters)
    return f"{name} {sorted(kinds)}"


# -- rows


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
        if folder is None or row.request.cache is not None or not _can_be_cut(row.cache):
            return True
        tokens = row.pending[:-1]
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
        if row.request.cache is not None or not _can_be_cut(row.cache):
            return
        self._reads.pop(row.id, None)
        row.prefix_key = self._key(row)
        arrays, found = self._prefixes.find(row.prefix_key, row.pending[:-1], self._by_block)
        row.cached_tokens = min(found, len(row.request.prompt))
        if found:
            _fill(row.cache, arrays)
            row.position += found
            row.pending = row.pending[found:]

    def keep(self, row: Row, cache: Cache, index: int, fed: int | None = None) -> None:
        """Keep the keys and values that a row has computed, at `index` in a batch's cache.

        `fed` is the number of the row's tokens in the cache; None for its whole prompt and answer.
        """
        if row.prefix_key is not None and (arrays := _arrays(cache, index)) is not None:
            count = row.position - row.surplus if fed is None else fed
            tokens = [*row.request.prompt, *row.tokens][:count]
            self._prefixes.keep(row.prefix_key, tokens, arrays)

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
        return (row.request.client, self._adapters.fingerprint(row), kind[0], window)

    def _layout(self, cache: Cache) -> PageLayout:
        kind = cache[0].kind if isinstance(cache[0], KVCache) else None
        if kind not in self._layouts:
            probe = copy.deepcopy(cache)
            run_shapes(self._model, probe)
            token = Columns.of(_arrays(probe, 0) or [], 0, 1)
            self._layouts[kind] = PageLayout.of(token.places, token.groups, PAGE)
        return self._layouts[kind]


def _can_be_cut(cache: Cache) -> bool:
    """True if the tokens of a row's cache can be taken apart and put together."""
    others = [entry for entry in cache if not isinstance(entry, KVCache | NoKVCache)]
    if not others:
        return True
    from mlx_lm.models.cache import KVCache as MlxKVCache

    return all(type(entry) is MlxKVCache for entry in others)


def _arrays(cache: Cache, index: int) -> list[mx.array] | None:
    """Return the arrays (1, heads, columns, head_dim) of a batch's row; None if a window has forgotten some."""
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
    left = iter(arrays)
    for entry in cache:
        if isinstance(entry, KVCache):
            entry.begin_with(next(left))
        elif not isinstance(entry, NoKVCache):
            entry.keys, entry.values = next(left), next(left)
            entry.offset = entry.keys.shape[2]
