"""Rows that run together: their prompts, their decode steps, and the tokens that are not yet read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import batch_adapters
from afm_mlx.engine.row_caches import change_blocks, filter_rows, let_go


@dataclass
class RowBatch:
    """Rows that decode together.

    Args:
        rows: B of them.
        cache: one entry per block, of B rows.
        inputs: (B,) tokens to feed next.
        adapters: adapters of the rows; None when no row has one.
        by_block: see `RowCaches`.
    """

    rows: list[Row] = field(default_factory=list)
    cache: list[Any] = field(default_factory=list)
    inputs: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))
    adapters: BatchAdapters | None = None
    by_block: bool = False

    def join(self, other: RowBatch) -> None:
        """Append the rows of another batch."""
        if not other.rows:
            return
        if not self.rows:
            self.rows, self.cache, self.inputs = other.rows, other.cache, other.inputs
            self.adapters = other.adapters
            return
        theirs = iter(other.cache)

        def extend(mine: Any) -> None:
            entry = next(theirs)
            mine.extend(entry)
            let_go(entry)

        change_blocks(self.cache, extend, self.by_block)
        self.rows = self.rows + other.rows
        self.inputs = mx.concatenate([self.inputs, other.inputs])
        self.adapters = batch_adapters(self.rows)

    def drop(self, ids: set[int]) -> None:
        """Take rows out, by their ids, and release their adapters."""
        self.keep([i for i, row in enumerate(self.rows) if row.id not in ids])

    def keep(self, indices: list[int]) -> None:
        """Take out all rows but these, and release their adapters."""
        if len(indices) == len(self.rows):
            return
        for i in set(range(len(self.rows))) - set(indices):
            self.rows[i].release()
        self.rows = [self.rows[i] for i in indices]
        self.adapters = batch_adapters(self.rows)
        self.inputs = self.inputs[mx.array(indices, dtype=mx.int32)]
        if not self.rows:
            self.cache = []
        change_blocks(self.cache, lambda entry: filter_rows(entry, indices), self.by_block)

    def take_out(self, index: int) -> tuple[Row, list[Any]]:
        """Take a row out that is to come back: it keeps its adapter.

        Returns:
            The row; and its cache, which is the batch's own where there are no other rows, else as callers know
            caches (`RowCaches.merged` makes a batch of it).
        """
        row = self.rows[index]
        if len(self.rows) == 1:
            cache, self.rows, self.cache = self.cache, [], []
            self.inputs, self.adapters = self.inputs[:0], None
            return row, cache
        others = [i for i in range(len(self.rows)) if i != index]
        mine: list[Any] = []

        def take(entry: Any) -> None:
            mine.append(entry.extract(index))
            if self.by_block and not mine[-1].empty():
                mx.eval(mine[-1].state)
            filter_rows(entry, others)

        change_blocks(self.cache, take, self.by_block)
        self.rows = [self.rows[i] for i in others]
        self.adapters = batch_adapters(self.rows)
        self.inputs = self.inputs[mx.array(others, dtype=mx.int32)]
        return row, mine


@dataclass
class Prefill:
    """Known tokens on their way into the cache, padded on the right to the longest: prompts, and forced tokens.

    Args:
        batch: the rows of the tokens.
        tokens: (B, most known tokens - 1); the last known token is its row's next decode step.
        lengths: for each row, how many of its tokens there are.
        done: columns of `tokens` that are in the cache.
        cancelled: ids of rows that nobody waits for any more.
    """

    batch: RowBatch
    tokens: mx.array
    lengths: list[int]
    done: int = 0
    cancelled: set[int] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Columns that are not yet in the cache."""
        return self.tokens.shape[1] - self.done

    def report(self) -> None:
        """Tell those who asked for it how much of their prompts is done."""
        for index, row in enumerate(self.batch.rows):
            if not row.is_prompt_fed and row.id not in self.cancelled:
                row.report(row.position - row.start - self.left_of(index))

    def left_of(self, index: int) -> int:
        """Tokens of a row that are not yet in the cache."""
        return max(0, self.lengths[index] - self.done)

    @classmethod
    def of(cls, rows: Sequence[Row], cache: list[Any], by_block: bool = False) -> Prefill:
        """Make the prefill of B rows.

        Args:
            rows: the rows.
            cache: one entry per block, of all rows.
            by_block: see `RowCaches`.
        """
        known = [row.known for row in rows]
        lengths = [len(tokens) - 1 for tokens in known]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for layer in cache:
                layer.prepare(lengths=lengths, right_padding=padding)
        tokens = mx.array(
            [ids[:-1] + [0] * pad for ids, pad in zip(known, padding, strict=True)], dtype=mx.int32
        ).reshape(len(rows), longest)
        last = mx.array([ids[-1] for ids in known], dtype=mx.int32)
        for row, length in zip(rows, lengths, strict=True):
            row.position += length
            row.known = []
        batch = RowBatch(list(rows), cache, last, batch_adapters(rows), by_block)
        return cls(batch, tokens, lengths)


@dataclass
class Feed:
    """Rows that were fed, and whose next tokens are not yet chosen.

    Args:
        rows: the B rows.
        logits: (B, vocab_size).
    """

    rows: list[Row]
    logits: mx.array

    @property
    def waits(self) -> bool:
        """True if the tokens before have to be read back first, because constraints depend on them."""
        return any(row.matcher is not None for row in self.rows)

    def keep(self, indices: list[int]) -> Feed | None:
        """Those of these rows only; None when there are none."""
        if not indices:
            return None
        return Feed([self.rows[i] for i in indices], self.logits[mx.array(indices, mx.int32)])


@dataclass
class Flight:
    """Tokens that were submitted and not yet read back.

    Args:
        rows: the B rows that the tokens belong to.
        tokens: (B,) token ids.
        peaks: (B,) largest logits.
        logprobs: (B, vocab_size), None when no row asked for them.
        told: ids of the rows whose token was known before, and told to the caller.
    """

    rows: list[Row]
    tokens: mx.array
    peaks: mx.array
    logprobs: mx.array | None
    told: frozenset[int] = frozenset()

    def logprobs_of(self, index: int) -> mx.array | None:
        if self.logprobs is None or not self.rows[index].request.logprobs:
            return None
        return self.logprobs[index]

    def keep(self, indices: list[int]) -> Flight | None:
        """The tokens of these rows only; None when there are none."""
        if not indices:
            return None
        index = mx.array(indices, dtype=mx.int32)
        logprobs = None if self.logprobs is None else self.logprobs[index]
        rows, peaks = [self.rows[i] for i in indices], self.peaks[index]
        return Flight(rows, self.tokens[index], peaks, logprobs, self.told)
