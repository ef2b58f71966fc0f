"""Entries of mlx-lm's caches: which ones can be kept in a prefix cache, and what of them.

| entry | while a batch runs | kept as |
| --- | --- | --- |
| `KVCache` | `BatchKVCache`, or `ZooKVCache` | pages: any number of first tokens can be cut off |
| `RotatingKVCache` | `BatchRotatingKVCache` | snapshots: a window has forgotten the tokens before it |
| `ArraysCache` | the same class | snapshots: a state says nothing of the states before it |
| `CacheList` | the same class | each of its entries by itself |

Others have no batches in mlx-lm, and models that use them don't run in this engine (`RowCaches.merged`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

CUT = {KVCache, BatchKVCache}
WINDOWS = {RotatingKVCache, BatchRotatingKVCache}
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


def has_state(cache: Iterable[Any]) -> bool:
    """True if a cache has windows or states, of which only snapshots can be kept."""
    return any(type(leaf) not in CUT for leaf in leaves(cache))


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
