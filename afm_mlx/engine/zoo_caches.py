"""Entries of mlx-lm's caches: what of them a prefix cache can keep, and how rejected draft tokens leave them.

| entry | while a batch runs | kept in | rejected tokens |
| --- | --- | --- | --- |
| `KVCache` | `BatchKVCache`, or `ZooKVCache` | pages | columns are dropped |
| `RotatingKVCache` | `BatchRotatingKVCache`; `TrimmableWindow` with draft tokens | snapshots | the same |
| `ArraysCache` | the same class | snapshots | the state before them is restored, see `Row.unfed` |
| `CacheList` | the same class | what its entries are kept in | what its entries do |

Others have no batches in mlx-lm, and models that use them don't run in this engine (`RowCaches.merged`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    dynamic_roll,
)

from afm_mlx.engine.draft_length import MOST
from afm_mlx.model.kv_cache import STEP
from afm_mlx.model.zoo_kv_cache import ZooKVCache


class TrimmableWindow(BatchRotatingKVCache):
    """The windows of a batch's rows, from which up to `SPARE` tokens can be taken back.

    mlx-lm's writes a token over the oldest one. This one keeps `SPARE` columns more than the next token sees,
    and all columns in the order of their tokens.
    """

    SPARE = MOST + 1  # draft tokens, and the one that they follow
    window: int  # tokens that a token sees, itself included

    @classmethod
    def of(cls, batch: BatchRotatingKVCache) -> TrimmableWindow:
        """Take over the arrays of a batch that was merged of rows, and has not been fed since."""
        made: Any = cls.__new__(cls)
        made.__dict__ |= vars(batch)
        made.window, made.max_size = batch.max_size, batch.max_size + cls.SPARE
        return made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return self._update_concat(keys, values)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """Return the boolean mask (B, 1, N, columns) of the next N tokens, before they are written."""
        window = window_size or self.window
        kept = min(self._idx, self.max_size - 1)
        column, query = mx.arange(kept + N), mx.arange(kept, kept + N)[:, None]
        first = (self.left_padding - (self._idx - kept))[:, None, None, None]
        return (column <= query) & (column > query - window) & (column >= first)

    def extract(self, idx: int) -> RotatingKVCache:
        row = super().extract(idx)
        row.max_size = self.window
        return row


CUT = {KVCache, BatchKVCache}
WINDOWS = {RotatingKVCache, BatchRotatingKVCache, TrimmableWindow}
STATES = {ArraysCache}
KEPT = CUT | WINDOWS | STATES


def leaves(cache: Iterable[Any]) -> Iterator[Any]:
    """Yield the entries of a cache, and the entries of its `CacheList`s instead of them."""
    for entry in cache:
        if type(entry) is CacheList:
            yield from leaves(entry.caches)
        else:
            yield entry


def can_be_kept(cache: Iterable[Any]) -> bool:
    """True if a row's cache can begin with what another row has left."""
    return all(type(leaf) in KEPT for leaf in leaves(cache))


def needs_snapshots(cache: Iterable[Any]) -> bool:
    """True if a cache has windows or states, of which only snapshots can be kept."""
    return any(type(leaf) not in CUT for leaf in leaves(cache))


class _Watched(ArraysCache):
    """A state that notes if its block asks how many of a row's tokens are no padding."""

    is_asked = False

    @property
    def lengths(self) -> mx.array | None:
        self.is_asked = True
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: mx.array | None) -> None:
        self._lengths = lengths

    def make_mask(self, N: int) -> mx.array | None:
        # A mask alone is not enough: a convolution's state has the last tokens, masked or not.
        was_asked, mask = self.is_asked, super().make_mask(N)
        self.is_asked = was_asked
        return mask

    def advance(self, N: int) -> None:
        was_asked = self.is_asked
        super().advance(N)
        self.is_asked = was_asked


def takes_padding(cache: Iterable[Any], feed: Callable[[list[Any]], object]) -> bool:
    """True if the blocks of a model keep padding out of their states.

    `feed` gives an empty cache of one row some tokens. Nothing is computed.
    """
    watched: list[_Watched] = []

    def watch(entry: Any) -> Any:
        if type(entry) is CacheList:
            return CacheList(*map(watch, entry.caches))
        if type(entry) not in STATES:
            return entry
        watched.append(_Watched(len(entry.cache)))
        return watched[-1]

    watched_cache = [watch(entry) for entry in cache]
    if watched:
        feed(watched_cache)
    return all(state.is_asked for state in watched)


def window_sizes(cache: Iterable[Any]) -> tuple[int, ...]:
    """Return the sizes of a cache's windows."""
    return tuple(leaf.max_size for leaf in leaves(cache) if type(leaf) in WINDOWS)


def columns_of(cache: Iterable[Any], index: int) -> list[mx.array] | None:
    """Return the keys and values (1, heads, tokens, head_dim) of a batch's row that can be cut.

    None if the row has been fed no token.
    """
    arrays: list[mx.array] = []
    for leaf in leaves(cache):
        if leaf.empty():
            return None
        if type(leaf) in CUT:
            row = leaf.extract(index) if type(leaf) is BatchKVCache else leaf
            arrays += [row.keys, row.values]
    return arrays


def state_of(cache: Iterable[Any], index: int) -> list[mx.array | None]:
    """Return the windows and states of a batch's row, in the form that `fill` takes; some are views."""
    state: list[mx.array | None] = []
    for leaf in leaves(cache):
        if type(leaf) in WINDOWS:
            row = leaf.extract(index)
            # A chunk of a prompt leaves more columns than the next token sees.
            state += [array[:, :, -row.max_size :] for array in (row.keys, row.values)]
        elif type(leaf) in STATES:
            state += [None if part is None else part[index : index + 1] for part in leaf.cache]
    return state


def fill(
    cache: Iterable[Any],
    columns: Iterable[mx.array],
    state: Iterable[mx.array | None],
    tokens: int,
) -> None:
    """Fill the empty cache of a row with the results of `columns_of` and `state_of` after `tokens` tokens."""
    left_columns, left_state = iter(columns), iter(state)
    for leaf in leaves(cache):
        if type(leaf) in STATES:
            leaf.cache = [next(left_state) for _ in leaf.cache]
        else:
            left: Iterator[Any] = left_state if type(leaf) in WINDOWS else left_columns
            leaf.keys, leaf.values = next(left), next(left)
            leaf.offset = tokens
            if type(leaf) in WINDOWS:
                leaf._idx = leaf.keys.shape[2]


# -- rejected draft tokens


def trimmable(entry: Any) -> Any:
    """Return a merged batch's entry in the form from which tokens can be taken back."""
    if type(entry) is CacheList:
        return CacheList(*map(trimmable, entry.caches))
    return TrimmableWindow.of(entry) if type(entry) is BatchRotatingKVCache else entry


def has_states(cache: Iterable[Any]) -> bool:
    """True if a cache has states, which can only be restored."""
    return any(type(leaf) in STATES for leaf in leaves(cache))


def trim_rows(cache: Iterable[Any], counts: Sequence[int], longest: int) -> None:
    """Remove the last `counts[r]` tokens of each row r from a batch's cache, except from its states.

    Columns end where the last token is, in every row. So rows move to the right by what they lose more than
    the row that loses least. `longest` is the number of tokens that the longest row has afterwards.
    """
    least = min(counts)
    padding = mx.array([count - least for count in counts])
    for leaf in leaves(cache):
        if type(leaf) in STATES:
            continue
        if isinstance(leaf, ZooKVCache):
            leaf.trim_rows(counts)
            continue
        leaf.trim(least)
        if max(counts) > least:
            leaf.keys = dynamic_roll(leaf.keys, padding[:, None], axis=2)
            leaf.values = dynamic_roll(leaf.values, padding[:, None], axis=2)
            leaf.offset = leaf.offset - padding
            leaf.left_padding = leaf.left_padding + padding
        if type(leaf) is BatchKVCache and (unused := leaf._idx - longest) >= STEP:
            leaf.keys, leaf.values = leaf.keys[:, :, unused:], leaf.values[:, :, unused:]
            leaf._idx -= unused
            leaf.left_padding = leaf.left_padding - unused


def can_trim(cache: Iterable[Any], index: int) -> bool:
    """True if a batch's row can lose its last tokens: no states, and no window that has forgotten some."""
    for leaf in leaves(cache):
        if type(leaf) in WINDOWS:
            if leaf.offset[index].item() >= getattr(leaf, "window", leaf.max_size):
                return False
        elif type(leaf) in STATES:
            return False
    return True


def states_of(cache: Iterable[Any]) -> list[list[mx.array | None]]:
    """Return the states of all rows; models replace these arrays, and don't write to them."""
    return [list(leaf.cache) for leaf in leaves(cache) if type(leaf) in STATES]


def restore_states(
    cache: Iterable[Any], states: Iterable[list[mx.array | None]], rows: Sequence[bool]
) -> None:
    """Restore the result of `states_of` in each row r for which `rows[r]` is True."""
    if not any(rows):
        return
    entries = [leaf for leaf in leaves(cache) if type(leaf) in STATES]
    for leaf, state in zip(entries, states, strict=True):
        if all(rows):
            leaf.cache = list(state)
            continue
        for i, (new, old) in enumerate(zip(leaf.cache, state, strict=True)):
            if new is not None:  # None before the first token is a state of zeros
                mask = mx.array(rows).reshape(-1, *[1] * (new.ndim - 1))
                leaf.cache[i] = mx.where(mask, mx.zeros_like(new) if old is None else old, new)


def set_lengths(cache: Iterable[Any], lengths: Sequence[int] | None) -> None:
    """Have states stop after `lengths[r]` of the next tokens of row r; None for after all of them."""
    for leaf in leaves(cache):
        if type(leaf) in STATES:
            leaf.lengths = None if lengths is None else mx.array(lengths)
