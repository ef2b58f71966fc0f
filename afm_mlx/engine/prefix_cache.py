"""Keys and values of prompts and answers, kept for later prompts that begin with the same tokens.

They are kept in pages of `PAGE` tokens, in a tree: each page is below the page of the tokens before it, and
prompts share the pages of a common beginning. The last page of a prompt may have fewer tokens. What two prompts
have in common is found to the token, within a page too. Tokens are known by names: their ids, and for tokens
of an image numbers that are made of it (`image_features.prefix_names`).

A page's arrays are copies that are never written to. What is found is joined into new arrays, so a row never
holds a page's memory, and a page never keeps a row from writing in place.

Some entries of mlx-lm's caches can't be cut: windows that have forgotten tokens, and states of recurrent blocks
and convolutions. Of these there are snapshots: where a prompt or an answer ended, and where a later prompt went
on otherwise. A row of such a model begins at the last snapshot of its beginning.

`PrefixCache` is the tree; `row_prefixes` looks the rows of one engine up in it.
"""

from __future__ import annotations

import itertools
import json
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import arrays_fingerprint, base_model_fingerprint
from afm_mlx.engine.prefix_cache_folder import (
    Places,
    PrefixFolder,
    StoredPage,
    page_name,
)
from afm_mlx.errors import RequestError
from afm_mlx.model.model import is_afm

PAGE = 64  # tokens of a page: 1.1 MB of the 3B's codes
FOLDER_BUDGET = 8 << 30  # bytes
_VERSION = 2  # of files
_OVERHEAD = 1024  # bytes that Python takes for a page, about
_ID = 8  # bytes of a token's name


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

    @classmethod
    def whole(cls, arrays: Sequence[mx.array | None]) -> Columns:
        """Copy arrays of any shapes, each with one row; None stays None."""
        groups: dict[Hashable, list[mx.array]] = {}
        places = []
        for array in arrays:
            if array is None:
                places.append((-1, 0))
                continue
            group = groups.setdefault((array.shape, array.dtype), [])
            places.append((list(groups.values()).index(group), len(group)))
            group.append(array)
        # MLX returns a single array as it is, which may be a view of a batch's; with another it copies.
        return cls([mx.concatenate([*g, g[0][:0]]) for g in groups.values()], tuple(places))

    def separate(self) -> list[mx.array | None]:
        """Return the arrays of `whole`, as views."""
        return [None if i < 0 else self.groups[i][at : at + 1] for i, at in self.places]

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
    name: bytes = b""  # the tokens' names, eight bytes each
    columns: Columns = field(default_factory=lambda: Columns([], ()))  # their keys and values
    below: dict[bytes, _Page] = field(default_factory=dict)
    names: list[bytes] = field(default_factory=list)  # of `below`, sorted
    snapshots: dict[bytes, _Snapshot] = field(
        default_factory=dict
    )  # by the tokens below, as `name`
    stored_as: str = ""  # name of its file, if the page is full
    used: int = 0  # when it was used last, by `PrefixBudget.tick`

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


@dataclass(eq=False)
class _Snapshot:
    """The windows and states of a row's cache behind up to `PAGE` tokens that follow a page."""

    above: weakref.ref[_Page]
    name: bytes  # these tokens, as `_Page.name`
    columns: Columns
    used: int = 0  # as `_Page.used`

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes + len(self.name) + _OVERHEAD


@dataclass
class Found:
    """The kept beginning of some tokens."""

    tokens: int  # whose keys and values, windows and states were found
    arrays: list[mx.array] = field(default_factory=list)  # (1, heads, tokens, head_dim), in order
    state: list[mx.array | None] = field(default_factory=list)  # of a snapshot, in order
    shared: int = 0  # tokens that others began with, too, with a snapshot or without


class PrefixBudget:
    """Bytes that prefix caches of several models may take together; the least recently used pages go first.

    The caches are used in one thread.
    """

    def __init__(self, nbytes: int):
        if nbytes < 1:
            raise RequestError(
                f"The prefix cache's budget is {nbytes} bytes; at least 1 is needed."
            )
        self.nbytes = nbytes
        self._caches: weakref.WeakSet[PrefixCache] = weakref.WeakSet()
        self._clock = itertools.count()

    def join(self, cache: PrefixCache) -> None:
        """Add a cache, whose bytes count from now on."""
        self._caches.add(cache)

    def tick(self) -> int:
        """Return a number for the use of a page, larger than all before."""
        return next(self._clock)

    def make_room(self, nbytes: int, path: Sequence[_Page]) -> bool:
        """Evict old pages, none of `path`, until `nbytes` are free; return False if they can't be."""
        while sum(cache.nbytes for cache in self._caches) + nbytes > self.nbytes:
            oldest = [(page.used, cache) for cache in self._caches if (page := cache.oldest)]
            _, cache = min(oldest, key=lambda each: each[0], default=(0, None))
            if cache is None or not cache.evict(path):
                return False
        return True


class PrefixCache:
    """Keys and values of prompts and answers under a budget; the least recently used pages are evicted.

    It is for one model, and for the engines of one thread. A client's rows find only what the same client's
    rows have left, under the same adapter and storage. The model's weights must not change meanwhile.

    Rows of AFM models use it, int8 and float, with a sliding window as long as nothing was forgotten. So do
    rows of mlx-lm's models whose caches can run in a batch. Rows that come with a prompt cache don't.

    With a folder, full pages are written there too, and found by later processes that run the same model. They
    hold prompts and answers: whoever can read the folder can find these out. Pages that need snapshots are kept
    in memory only.

    All figures may be read in any thread.

    Args:
        budget: maximum bytes of memory, or the budget that the cache shares with others.
        folder: path of a folder for pages; pass None for none.
        folder_budget: maximum bytes of the files in that folder.

    Attributes:
        nbytes: bytes in use.
        tokens: tokens that are kept.
        queries: tokens that were looked for.
        hits: tokens that were found.
        evictions: pages and snapshots that were evicted.

    Raises:
        RequestError: for a budget below 1, and a folder that can't be used.
    """

    def __init__(
        self,
        budget: int | PrefixBudget,
        folder: str | Path | None = None,
        folder_budget: int = FOLDER_BUDGET,
    ):
        self._shared = PrefixBudget(budget) if isinstance(budget, int) else budget
        self._shared.join(self)
        self.budget = self._shared.nbytes
        self.nbytes = self.tokens = self.queries = self.hits = self.evictions = 0
        self._model: weakref.ref[nn.Module] | None = None
        self._roots: dict[Hashable, _Page] = {}
        # By last use, with their keys.
        self._pages: OrderedDict[_Page | _Snapshot, Hashable] = OrderedDict()
        # What was kept in this step and in the one before: its arrays may still be computed.
        self._newest: list[_Page | _Snapshot] = []
        self._newer: list[_Page | _Snapshot] = []
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
        self,
        key: Hashable,
        tokens: Sequence[int],
        apart: bool = False,
        needs_snapshot: bool = False,
    ) -> Found:
        """Find the longest kept beginning of some tokens; with `needs_snapshot`, the longest that has one.

        `key` is what keys and values depend on besides the tokens, and who may see them. With `apart`, each
        array owns its memory; else some are views of one, which is faster.
        """
        self.queries += len(tokens)
        path, shared = self._path(key, _named(tokens))
        found = Found(shared, shared=shared)
        parts = [page.columns for page in path]
        if needs_snapshot:
            found.tokens, snapshot = self._last_snapshot(key, path, _named(tokens[:shared]))
            parts = parts[: -(-found.tokens // PAGE)]
            if snapshot is not None:
                self._use(snapshot)
                found.state = snapshot.columns.separate()
        self._touch(path)
        self.hits += found.tokens
        if found.tokens:
            found.arrays = Columns.joined(parts, found.tokens, apart)
        return found

    def keep(
        self,
        key: Hashable,
        tokens: Sequence[int],
        arrays: Sequence[mx.array],
        state: Sequence[mx.array | None] | None = None,
    ) -> None:
        """Keep the keys and values of some tokens that are not kept yet, as far as the budget allows.

        `tokens` begin with the first one; `arrays` are (1, heads, number of tokens or more, head_dim) each.
        `state` has the windows and states after the last token; None if the model has none.
        """
        if not tokens:
            return
        per_token = sum(array.nbytes // array.shape[2] for array in arrays)
        path = self._insert(
            key,
            tokens,
            per_token,
            lambda *span: Columns.of(arrays, *span),
            is_stored=state is None and self.folder is not None,
        )
        if state is None or len(path) * PAGE < len(tokens):
            return
        above = ([self._roots[key], *path])[len(path) - 1]
        part = _named(tokens[(len(path) - 1) * PAGE :])
        nbytes = sum(array.nbytes for array in state if array is not None)
        if part not in above.snapshots and self._shared.make_room(
            nbytes + len(part) + _OVERHEAD, path
        ):
            snapshot = _Snapshot(weakref.ref(above), part, Columns.whole(state))
            above.snapshots[part] = snapshot
            self._pages[snapshot] = key
            self._use(snapshot)
            self.nbytes += snapshot.nbytes
            self._newest.append(snapshot)
            mx.async_eval(snapshot.columns.groups)
        self._touch(path)

    def _insert(
        self,
        key: Hashable,
        tokens: Sequence[int],
        per_token: int,
        columns_of: Callable[[int, int], Columns | None],
        is_stored: bool = True,
    ) -> list[_Page]:
        """Add pages for the tokens that have none, at `per_token` bytes each, as far as the budget allows.

        `columns_of(start, stop)` returns the columns of a page's tokens, or None to end there. Returns the
        tokens' pages, new and old.
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
                if not self._shared.make_room(count * per_token + len(part) + _OVERHEAD, path):
                    break
                columns = columns_of(start, start + count)
                if columns is None:
                    break
                near = _Page(weakref.ref(page), part, columns)
                if count == PAGE and is_stored and self.folder is not None:
                    near.stored_as = page_name(page.stored_as, part)
                page.below[part] = near
                insort(page.names, part)
                self._pages[near] = key
                self._use(near)
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
        return path

    def advance(self) -> None:
        """End a step: what was kept in the step before it is now known to be computed, and may be written."""
        if self._newer:
            mx.eval([page.columns.groups for page in self._newer])
            for page in self._newer:
                if self.folder is not None and isinstance(page, _Page) and page.stored_as:
                    self.folder.write(page.stored_as, page.columns.places, page.columns.groups)
        self._newer, self._newest = self._newest, []

    def drop_newest(self) -> None:
        """Forget what was kept by a step that raised and by the step before, whose arrays may be wrong."""
        for page in [*self._newer, *self._newest]:
            if isinstance(page, _Page):
                self._remove_with_all_below(page)
            elif page in self._pages:
                self._remove(page)
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

    def _last_snapshot(
        self, key: Hashable, path: Sequence[_Page], name: bytes
    ) -> tuple[int, _Snapshot | None]:
        """Return the last snapshot on a path whose tokens are the first of `name`, and their number."""
        above = [self._roots[key], *path] if path else []
        for i in reversed(range(len(path))):
            part = name[i * PAGE * _ID :]
            names = [known for known in above[i].snapshots if part.startswith(known)]
            if names:
                longest = max(names, key=len)
                return i * PAGE + len(longest) // _ID, above[i].snapshots[longest]
        return 0, None

    def _touch(self, path: Sequence[_Page]) -> None:
        """Record a use. A page counts as used after the pages below it, so that the oldest one has none."""
        for page in reversed(path):
            self._use(page)

    def _use(self, page: _Page | _Snapshot) -> None:
        self._pages.move_to_end(page)
        page.used = self._shared.tick()

    @property
    def oldest(self) -> _Page | _Snapshot | None:
        """The least recently used page or snapshot."""
        return next(iter(self._pages), None)

    def evict(self, path: Sequence[_Page]) -> bool:
        """Evict the oldest page or snapshot; return False if it is one of `path`."""
        oldest = self.oldest
        if oldest is None or oldest in path:
            return False
        self._remove(oldest)
        self.evictions += 1
        return True

    def _remove(self, page: _Page | _Snapshot) -> None:
        """Remove a snapshot, or a page that has no pages below it and no snapshots."""
        key = self._pages.pop(page)
        self.nbytes -= page.nbytes
        assert page.above is not None
        above = page.above()
        assert above is not None
        if isinstance(page, _Snapshot):
            del above.snapshots[page.name]
        else:
            del above.below[page.name]
            del above.names[bisect_left(above.names, page.name)]
            self.tokens -= page.tokens
        if above.above is None and not (above.below or above.snapshots):
            self._roots.pop(key, None)

    def _remove_with_all_below(self, page: _Page) -> None:
        for other in [*page.below.values()]:
            self._remove_with_all_below(other)
        for snapshot in [*page.snapshots.values()]:
            self._remove(snapshot)
        if page in self._pages:
            self._remove(page)


def _named(tokens: Sequence[int]) -> bytes:
    """Return names of tokens as bytes, in whose order texts with a common beginning are neighbours."""
    return np.array(tokens, ">u8").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Return the number of tokens that two names have in common from the first on."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count // _ID
    differ = np.frombuffer(one, ">u8", count // _ID) != np.frombuffer(other, ">u8", count // _ID)
    return int(differ.argmax())


def _model_name(model: nn.Module) -> str:
    """Return text that is equal for models with equal keys and values, including their type."""
    parameters = dict(tree_flatten(model.parameters()))
    kinds = {str(p.dtype) for p in parameters.values() if mx.issubdtype(p.dtype, mx.floating)}
    if is_afm(model):
        name = base_model_fingerprint(model)
    else:
        config = getattr(model, "args", getattr(model, "config", None))
        name = arrays_fingerprint(str(config), parameters)
    return f"{name} {sorted(kinds)}"
