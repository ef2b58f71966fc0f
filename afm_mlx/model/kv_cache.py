"""Keys and values of the tokens seen so far.

A `KVCache` holds one block's keys and values, for one row or a batch. Column c of a row holds its c-th token,
so rows of different lengths share one buffer, each with its own offset; a row joins, leaves, or is trimmed
without moving the others. The buffer grows by `STEP` columns, and shrinks when a row leaves.

MLX writes a buffer in place only if nothing else holds it, and the previous step, which still runs when the
next one is submitted, does. So a decode step leaves the buffer alone, and writes its token into a copy of a
short tail. Once the tail has `TAIL` columns, they move to the buffer together.

Methods have the names of mlx-lm's caches (`mlx_lm/models/cache.py`), batch caches included, so this engine and
mlx-lm's own loops run either kind of model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import mlx.core as mx
import numpy as np

from afm_mlx.errors import CacheFileError, ContextLengthError, shown
from afm_mlx.kernels import (
    KeyValues,
    decode_attention,
    write_tokens,
)

STEP = 256  # columns that are added at a time
# Columns of the tail: a longer one is copied at more cost, a shorter one moves more often.
TAIL = 64
KEEP = 4  # first tokens that a sliding window never forgets, as in mlx-lm's rotating cache
MOST_TOKENS = 1 << 30  # positions are int32

Cache: TypeAlias = list[Any]
"""One entry for each block: a `KVCache`, a `NoKVCache`, or one of `mlx_lm.models.cache`."""


class OpenTail(NamedTuple):
    """The arrays of a cache that a decode step reads and writes."""

    buffer: mx.array  # (B, 2 * n_kv_heads, capacity, head_dim), heads of keys and then of values
    tail: mx.array  # (B, 2 * n_kv_heads, TAIL, head_dim), the newest tokens' columns
    starts: mx.array  # (B,) int32, columns of each row in the buffer

    def attend(
        self, queries: mx.array, kv: mx.array, lengths: mx.array, ends: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Return the attention of one new token of every row, and the tail with its keys and values.

        Args:
            queries: (B, n_heads, 1, head_dim), the shape of the attention.
            kv: (B, 2 * n_kv_heads, 1, head_dim), the tokens' keys and then their values.
            lengths: (B,) int32, columns that each row's token sees, its own included.
            ends: (B,) int32, how many of them are in the tail, `lengths - starts`.
        """
        tail = write_tokens(self.tail, kv.astype(self.tail.dtype), ends)
        stored = KeyValues(self.buffer, tail=tail, starts=self.starts)
        y = decode_attention(queries, stored, lengths)
        assert isinstance(y, mx.array)
        return y, tail


class TailWriter(Protocol):
    """A cache whose tail a decode step writes: a `KVCache`, or its stand-in while a step is traced.

    The tail is a short array of the newest tokens' columns, which are not in the cache's buffer yet.
    """

    def open_tail(self, heads: int, head_dim: int, count: int = 1) -> OpenTail: ...

    def take_tail(self, tail: mx.array, count: int = 1) -> None: ...


class KVCache:
    """Keys and values of one block, with one offset per row.

    `buffer` is (B, 2 * n_kv_heads, capacity, head_dim), heads of keys and then of values; None before the first
    token. While a batch decodes, its newest tokens can be in `tail`; `settle` moves them to the buffer.

    Past `max_size` tokens of a row, a `sliding_window` forgets the oldest ones except the first `KEEP`; without
    it more tokens raise `ContextLengthError`.
    """

    def __init__(
        self,
        int8: bool = True,  # store codes, not floats
        max_size: int | None = None,
        sliding_window: bool = False,
        rows: int = 1,
    ):
        if sliding_window and (max_size is None or max_size <= KEEP):
            raise ContextLengthError(
                f"A sliding window needs a size over {KEEP}, the first tokens that it keeps; got {max_size}."
            )
        self.int8, self.max_size, self.sliding_window = int8, max_size, sliding_window
        self._window = max_size if sliding_window and max_size else 0
        self.buffer: Any = None  # mx.array once something was written
        self._lengths = [0] * rows  # tokens fed, per row
        self._forgotten = [0] * rows  # of these, tokens that a sliding window has dropped
        self._padding: list[int] | None = None  # of a ragged prompt, until `finalize`
        # Fingerprint of the adapter that computed the keys and values, "" for none; None if unknown.
        self.adapter: str | None = None
        self.tail: Any = None  # (B, 2 * n_kv_heads, TAIL, head_dim) once a decode step began
        # While a tail is in use: columns of the buffer, per row.
        self._in_buffer: list[int] | None = None
        self._starts: Any = None  # the same as an array, (B,) int32

    @property
    def kind(self) -> tuple[str, int | None, bool]:
        """Arguments of `Model.make_cache`: storage, limit of tokens, sliding window."""
        return ("int8" if self.int8 else "float", self.max_size, self.sliding_window)

    # -- positions

    @property
    def lengths(self) -> list[int]:
        """Number of tokens that each row has been fed."""
        return list(self._lengths)

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int when all rows agree, else (B,) int32."""
        one = len(set(self._lengths)) == 1
        return self._lengths[0] if one else mx.array(self._lengths, dtype=mx.int32)

    @property
    def _columns(self) -> list[int]:
        return list(map(operator.sub, self._lengths, self._forgotten))

    def size(self) -> int:
        """Return the number of columns that the longest row uses."""
        return max(self._columns)

    def empty(self) -> bool:
        return self.buffer is None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer and its tail, spare capacity included."""
        return sum(array.nbytes for array in (self.buffer, self.tail) if array is not None)

    def make_mask(self, length: int) -> mx.array | str | None:
        """Return the mask of the next `length` tokens, before they are written: None or "causal" if that is
        enough, else boolean (B, 1, length, columns).
        """
        drops = self._drops(length)
        columns = [c - d for c, d in zip(self._columns, drops, strict=True)]
        window = self._window
        reaches_past = bool(window) and max(self._lengths) + length > window
        if len(set(columns)) == 1 and not reaches_past:
            return causal_mask(length)

        forgotten = [f + d for f, d in zip(self._forgotten, drops, strict=True)]
        forgotten = mx.array(forgotten)[:, None, None, None]
        column = mx.arange(max(columns) + length)
        position = mx.where(column < KEEP, column, column + forgotten)  # (B, 1, 1, columns)
        query = mx.array(self._lengths)[:, None, None, None] + mx.arange(length)[:, None]
        visible = position <= query  # (B, 1, length, columns)
        if reaches_past:
            visible &= (position < KEEP) | (query - position < window - KEEP)
        return visible

    def decode_lengths(self, count: int = 1) -> mx.array | None:
        """Return how many columns each row's next token sees, its own included, (B,) int32.

        Call it before the `count` tokens of every row are written. None if a sliding window drops tokens, where
        only `make_mask` says what is visible.
        """
        if self._window and max(self._lengths) + count > self._window:
            return None
        return mx.array([n + 1 for n in self._lengths], dtype=mx.int32)

    # -- writing

    def update(self, kv: mx.array) -> None:
        """Append the next L tokens of every row: (B, 2 * n_kv_heads, L, head_dim), keys and then values.

        Raises:
            ContextLengthError: past `max_size` without a sliding window.
        """
        length = kv.shape[2]
        self.settle()
        if self.buffer is None:
            # The first tokens are the buffer: rows that end with them, such as embeddings, need no capacity.
            self._check_new(length)
            self.buffer = _handle(kv)
        else:
            self._ensure_capacity(length)
            self._write(kv, self._columns)
        self._lengths = [n + length for n in self._lengths]

    def begin_with(self, buffer: mx.array) -> None:
        """Fill an empty cache of one row with a buffer (1, 2 * n_kv_heads, tokens, head_dim); no copy."""
        self.buffer, self._lengths = buffer, [buffer.shape[2]]

    def _write(self, kv: mx.array, columns: list[int]) -> None:
        """Write tokens into the buffer, of row r from `columns[r]` on."""
        length = kv.shape[2]
        if len(set(columns)) == 1:
            self.buffer[:, :, columns[0] : columns[0] + length] = kv
        else:
            self.buffer[_ragged_index(tuple(columns), kv.shape[1], length)] = kv

    @property
    def in_tail(self) -> int:
        """Number of columns of the tail that are in use, in the row that uses most."""
        if self._in_buffer is None:
            return 0
        return max(map(operator.sub, self._columns, self._in_buffer), default=0)

    def open_tail(self, heads: int, head_dim: int, count: int = 1) -> OpenTail:
        """Return the arrays of a decode step, with space for `count` more tokens of every row in the tail.

        Not for a sliding window that is about to forget tokens, nor for floats before the first token, whose
        dtype is not known yet.

        Args:
            heads: heads of keys plus heads of values.
            head_dim: width of a head.
            count: number of tokens of every row that the step writes, up to `TAIL`.

        Raises:
            ContextLengthError: past `max_size`.
        """
        if self._padding is None:  # as in `_check_new`
            self._check_bound(max(self._lengths) + count)
        if not self.fits_in_tail(count):
            self.settle()
            shape = (len(self._lengths), heads, TAIL, head_dim)
            if self.tail is None:
                dtype = mx.int8 if self.buffer is None else self.buffer.dtype
                self.tail = mx.zeros(shape, dtype)
            if self.buffer is None:
                self.buffer = self.tail[:, :, :0]
            # Steps are traced for each capacity: multiples of one number are few.
            self._grow(max(1, self.size()))
            self._in_buffer = self._columns
            self._starts = mx.array(self._in_buffer, dtype=mx.int32)
        return OpenTail(self.buffer, self.tail, self._starts)

    def take_tail(self, tail: mx.array, count: int = 1) -> None:
        """Store the tail of `open_tail`, to which a decode step has added `count` tokens of every row."""
        self.tail = tail
        self._lengths = [n + count for n in self._lengths]

    def settle(self) -> None:
        """Move the tail's tokens (the newest, not yet in the buffer) to the buffer.

        In rows with fewer tokens than others, unused columns are copied too; later tokens overwrite them.
        """
        if self._in_buffer is not None and (count := self.in_tail):
            self._grow(max(self._in_buffer) + count)
            self._write(self.tail[:, :, :count], self._in_buffer)
        self._in_buffer = None

    def fits_in_tail(self, count: int) -> bool:
        """True if a tail is open and has space for `count` more tokens of every row."""
        return 0 < self.in_tail <= TAIL - count

    def reserve(self, count: int) -> None:
        """Settle, and grow the buffer for `count` more tokens of every row: writing them then copies nothing.

        Raises:
            ContextLengthError: past `max_size` without a sliding window.
        """
        if self.buffer is not None:
            self.settle()
            self._ensure_capacity(count)

    def in_use(self) -> mx.array:
        """Settle, and return the buffer's columns in use; the cache must not be empty."""
        self.settle()
        return self.buffer[:, :, : self.size()]

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Settle, and return keys and values of all columns in use; the cache must not be empty."""
        keys, values = self.in_use().split(2, axis=1)
        return keys, values

    def _ensure_capacity(self, length: int) -> None:
        """Grow the settled buffer for `length` more tokens of every row, if needed."""
        if self.sliding_window and any(drops := self._drops(length)):
            self.buffer = _drop_columns(self.buffer, drops)
            self._forgotten = list(map(operator.add, self._forgotten, drops))
        self._check_new(length)
        if self.size() + length > self.buffer.shape[2]:
            self._grow(self.size() + length)

    def _grow(self, needed: int) -> None:
        """Grow the buffer to a multiple of `STEP` columns, at least `needed`; never shrink it."""
        columns = _whole_steps(max(needed, self.buffer.shape[2])) - self.buffer.shape[2]
        if columns:
            self.buffer = _padded(self.buffer, columns)

    def _check_new(self, length: int) -> None:
        """Raise `ContextLengthError` if `length` more tokens exceed the bound; padding has its check later."""
        if not self.sliding_window and self._padding is None:
            self._check_bound(max(self._lengths) + length)

    def _check_bound(self, needed: int) -> None:
        if self.max_size is not None and needed > self.max_size:
            raise ContextLengthError(
                f"The KV cache is bounded to {self.max_size} tokens and {needed} were needed. "
                "Raise the bound, shorten the prompt, or use a sliding window."
            )

    def _drops(self, length: int) -> list[int]:
        """Return the number of columns per row to forget before `length` tokens are written: many, or none."""
        if not self._window or self.size() + length <= self._window + STEP:
            return [0] * len(self._lengths)
        stay = self._window - 1  # the first KEEP, and what the next query's window reaches
        return [max(0, columns - stay) for columns in self._columns]

    # -- ragged prompts, in mlx-lm's protocol: right padding is written, and no longer counted after `finalize`

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce that the next tokens, up to `finalize`, end with padding in some rows.

        `right_padding` is the number of padding tokens of each row; `lengths` of the real ones is not needed.
        Left padding is refused, because column c holds token c.
        """
        if left_padding is not None and any(left_padding):
            raise ValueError("[KVCache] left_padding is not supported; pad prompts on the right.")
        if right_padding is not None:
            if self.sliding_window and any(right_padding):
                raise ContextLengthError(
                    "A sliding window takes no padded prompts, because padding would displace tokens. "
                    "Prefill rows of different lengths one by one."
                )
            self._padding = list(right_padding)

    def finalize(self) -> None:
        """Stop counting the padding as tokens; the next tokens overwrite it."""
        if self._padding is not None:
            self.trim_rows(self._padding)
            self._padding = None
            self._check_bound(max(self._lengths))

    # -- rows

    def extract(self, row: int) -> KVCache:
        """Return a copy of the batch's row of this index, as a cache of one row."""
        self.settle()
        cache = self._like([row])
        if self.buffer is not None:
            used = self._columns[row]
            cache.buffer = mx.contiguous(self.buffer[row : row + 1, :, :used])
        return cache

    def filter(self, rows: Sequence[int] | mx.array) -> None:
        """Keep only the rows of these indices, in this order, and drop columns that none of them uses."""
        rows = rows.tolist() if isinstance(rows, mx.array) else list(rows)
        self.settle()
        self.tail = None
        self._lengths = [self._lengths[r] for r in rows]
        self._forgotten = [self._forgotten[r] for r in rows]
        if self.buffer is not None:
            columns = _whole_steps(max(self._columns, default=0))
            self.buffer = self.buffer[:, :, :columns][mx.array(rows, dtype=mx.int32)]

    def extend(self, other: KVCache) -> None:
        """Append the rows of another cache of the same block."""
        vars(self).update(vars(KVCache.merge([self, other])))

    @staticmethod
    def merge(caches: Sequence[KVCache]) -> KVCache:
        """Make one batch of the rows of several caches of the same block.

        Its limit is the largest of theirs; callers end rows that had a smaller one.

        Raises:
            ValueError: if some store codes and others floats, or if their windows differ.
        """
        if len({(cache.int8, cache._window) for cache in caches}) > 1:
            raise ValueError(
                "[KVCache] rows of one batch need caches of one kind; got (storage, bound, sliding "
                f"window) of {sorted({cache.kind for cache in caches}, key=str)}."
            )
        for cache in caches:
            cache.settle()
        first = caches[0]
        merged = first._like([0])
        bounds = [cache.max_size for cache in caches]
        merged.max_size = None if None in bounds else max(bounds)  # type: ignore[type-var]
        merged._lengths = [n for c in caches for n in c._lengths]
        merged._forgotten = [n for c in caches for n in c._forgotten]
        if any(cache.adapter != first.adapter for cache in caches):
            merged.adapter = None
        filled = [cache.buffer for cache in caches if cache.buffer is not None]
        if len(caches) == 1:
            merged.buffer = _handle(first.buffer)
        elif filled:
            _, heads, _, dim = filled[0].shape
            shape = (len(merged._lengths), heads, _whole_steps(merged.size()), dim)
            merged.buffer = mx.zeros(shape, filled[0].dtype)
            first_row = 0
            for cache in caches:
                end = first_row + len(cache._lengths)
                if cache.buffer is not None and (used := cache.size()):
                    merged.buffer[first_row:end, :, :used] = cache.buffer[:, :, :used]
                first_row = end
        return merged

    def _like(self, rows: Sequence[int]) -> KVCache:
        cache = KVCache(self.int8, self.max_size, self.sliding_window, rows=len(rows))
        cache._lengths = [self._lengths[r] for r in rows]
        cache._forgotten = [self._forgotten[r] for r in rows]
        cache.adapter = self.adapter
        return cache

    # -- removing tokens

    def is_trimmable(self) -> bool:
        """True unless a sliding window has forgotten tokens."""
        return not any(self._forgotten)

    def trim(self, count: int) -> int:
        """Remove up to `count` tokens from the end of every row; return how many were removed."""
        count = min(count, min(self._lengths))
        self.trim_rows([count] * len(self._lengths))
        return count

    def trim_rows(self, counts: Sequence[int]) -> None:
        """Remove the last `counts[r]` tokens of each row r, which must have that many."""
        lengths = [n - count for n, count in zip(self._lengths, counts, strict=True)]
        if self._in_buffer and any(map(operator.lt, lengths, self._in_buffer)):
            self.settle()
        self._lengths = lengths

    def copy(self, length: int | None = None) -> KVCache:
        """Return an independent cache of the first `length` tokens of every row, by default of all.

        The buffer is shared until one of the two is written to.

        Raises:
            ValueError: if a row has fewer tokens, or a window has forgotten some.
        """
        self.settle()
        cache = self._like(range(len(self._lengths)))
        if length is not None and length != min(self._lengths):
            if length > min(self._lengths) or not self.is_trimmable():
                raise ValueError(
                    f"[KVCache] a prefix of {length} tokens can't be copied: the shortest row has "
                    f"{min(self._lengths)}, and {max(self._forgotten)} were forgotten by the window."
                )
            cache._lengths = [length] * len(self._lengths)
        cache.buffer = _handle(self.buffer)
        return cache

    # -- state, for evaluation and files

    @property
    def state(self) -> list[mx.array]:
        """Keys, values, and tokens fed and forgotten per row, (2, B) int32; [] before the first token."""
        if self.buffer is None:
            return []
        return [*self.keys_and_values(), mx.array([self._lengths, self._forgotten], dtype=mx.int32)]

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        self.tail = self._in_buffer = None
        if not state:
            self.buffer = None
            self._lengths, self._forgotten = [0], [0]
            return
        keys, values, rows = state
        _check_state(keys, values, rows, self.kind)
        self.buffer = mx.concatenate([keys, values], axis=1)
        self._lengths, self._forgotten = rows.tolist()


class NoKVCache:
    """The entry of a block that writes no keys and values: mlx-lm expects `len(model.layers)` entries."""

    offset = 0
    nbytes = 0
    state: tuple[()] = ()

    def size(self) -> int:
        return 0

    def empty(self) -> bool:
        return True

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> int:
        return count

    def trim_rows(self, counts: Sequence[int]) -> None: ...

    def copy(self, length: int | None = None) -> NoKVCache:
        return NoKVCache()

    def extract(self, row: int) -> NoKVCache:
        return NoKVCache()

    def filter(self, rows: object) -> None: ...

    def extend(self, other: object) -> None: ...

    def prepare(self, **padding: object) -> None: ...

    def finalize(self) -> None: ...

    @staticmethod
    def merge(caches: Sequence[object]) -> NoKVCache:
        return NoKVCache()


def open_tails(
    caches: Sequence[KVCache], heads: int, head_dim: int, count: int
) -> tuple[list[mx.array], list[mx.array], mx.array]:
    """Return buffers, tails and `starts` of `KVCache.open_tail` for all writing blocks."""
    if (
        len({cache.in_tail for cache in caches}) > 1
    ):  # a caller has settled one of them, for instance
        for cache in caches:
            cache.settle()
    opened = [cache.open_tail(heads, head_dim, count) for cache in caches]
    return [each.buffer for each in opened], [each.tail for each in opened], opened[0].starts


def take_tails(caches: Sequence[KVCache], tails: Sequence[mx.array], count: int) -> None:
    """Store the tails of `open_tails`, to which a decode step has added `count` tokens of every row."""
    for cache, tail in zip(caches, tails, strict=True):
        cache.take_tail(tail, count)


def causal_mask(length: int) -> str | None:
    """Return the mask of `length` tokens that see only themselves and the tokens before them."""
    return "causal" if length > 1 else None


@functools.lru_cache(maxsize=4)
def _ragged_index(
    columns: tuple[int, ...], heads: int, length: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Return indices of `length` columns per row and head, from `columns[row]` on, for all blocks of a step."""
    row = np.arange(len(columns))[:, None, None]
    head = np.arange(heads)[:, None]
    column = np.array(columns)[:, None, None] + np.arange(length)
    return mx.array(row), mx.array(head), mx.array(column)


def _handle(x: mx.array | None) -> mx.array | None:
    """Return the same array in another Python object: assigning to columns changes an object's array."""
    return None if x is None else x[...]


def _whole_steps(columns: int) -> int:
    return -(-columns // STEP) * STEP


def _padded(buffer: mx.array, columns: int) -> mx.array:
    return mx.pad(buffer, [(0, 0), (0, 0), (0, columns), (0, 0)])


def _drop_columns(buffer: mx.array, drops: Sequence[int]) -> mx.array:
    """Remove `drops[row]` columns of each row after its first KEEP; zeros fill the end."""
    rows = []
    for row, drop in enumerate(drops):
        own = buffer[row : row + 1]
        kept = mx.concatenate([own[:, :, :KEEP], own[:, :, KEEP + drop :]], axis=2)
        rows.append(_padded(kept, drop))
    return mx.concatenate(rows, axis=0)


def _check_state(
    keys: mx.array, values: mx.array, rows: mx.array, kind: tuple[str, int | None, bool]
) -> None:
    """Raise `CacheFileError` unless a cache of this kind can have this state."""
    storage, max_size, slides = kind
    dtype, wanted = (mx.int8, "int8") if storage == "int8" else (mx.floating, "floats")
    for name, array in (("keys", keys), ("values", values)):
        if array.ndim != 4 or 0 in array.shape[:2] or not mx.issubdtype(array.dtype, dtype):
            raise CacheFileError(
                f"{name} are {array.dtype} {shown(list(array.shape))}; "
                f"{wanted} [rows, heads, columns, head_dim] are needed."
            )
    if (keys.shape, keys.dtype) != (values.shape, values.dtype):
        raise CacheFileError(
            f"keys are {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)}; "
            "both must be the same."
        )
    count, columns = keys.shape[0], keys.shape[2]
    if rows.dtype != mx.int32 or rows.shape != (2, count):
        raise CacheFileError(
            f"rows are {rows.dtype} {shown(list(rows.shape))}; int32 [2, {count}] is needed, tokens seen "
            "and forgotten by each row."
        )
    window = max_size if slides and max_size else 0
    bound = columns if window or max_size is None else min(columns, max_size)
    for seen, forgotten in rows.T.tolist():
        held = seen - forgotten
        # A window forgets down to one column less than its width.
        sound = forgotten == 0 or (forgotten > 0 and 0 < window <= held + 1)
        if not (sound and 0 <= held <= bound and seen <= MOST_TOKENS):
            raise CacheFileError(
                f"a row has seen {seen} tokens and forgotten {forgotten}, which does not go with {columns} "
                f"columns in a cache of kind {shown(kind)}."
            )
    if columns != int((rows[0] - rows[1]).max().item()):
        raise CacheFileError(f"no row has tokens for all of the {columns} columns.")
