"""The rows that decode together: a step feeds each of them its last token.

The next step is submitted before the tokens of the one before are read back. A row whose constraint forces many
tokens leaves for a prefill, and comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.batch import Feed, Flight, Prefill, RowBatch
from afm_mlx.engine.prefills import Prefills
from afm_mlx.engine.request import Response
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import RowAdapters
from afm_mlx.engine.row_caches import RowCaches, hand_back, make_ready
from afm_mlx.engine.row_prefixes import RowPrefixes
from afm_mlx.engine.row_responses import RowResponses
from afm_mlx.engine.sampling import sample
from afm_mlx.model.model import is_afm

# So many forced tokens are fed at once instead of one per step: in a row that runs alone; and in a batch, where
# the other rows wait for them, and the row's cache is taken out and put back.
FORCED_ALONE, FORCED_IN_BATCH = 2, 8


class Decoding:
    """The rows that decode together.

    Args:
        model: the model that they run through.
        caches: makes batches of the rows' caches.
        adapters: the rows' adapters.
        prefixes: takes what rows that end have computed.
        responses: has rows take their tokens, and makes the responses.
        prefills: takes rows whose forced tokens are many.

    Attributes:
        batch: the rows; those whose prompts are whole may join it between steps.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: RowCaches,
        adapters: RowAdapters,
        prefixes: RowPrefixes,
        responses: RowResponses,
        prefills: Prefills,
    ):
        self._model, self._is_afm = model, is_afm(model)
        self._caches, self._adapters, self._prefixes = caches, adapters, prefixes
        self._responses, self._prefills = responses, prefills
        self.batch = RowBatch(by_block=caches.by_block)
        self._feed: Feed | None = None
        self._flight: Flight | None = None

    def __bool__(self) -> bool:
        """True if there are rows, or tokens to be read back."""
        return bool(self.batch.rows or self._flight)

    def drop_all(self) -> list[Row]:
        """Take out all rows, and release their adapters. Nothing is handed back to their caches."""
        rows = self.batch.rows
        for row in rows:
            row.release()
        self.batch, self._flight, self._feed = RowBatch(by_block=self._caches.by_block), None, None
        return rows

    def step(self) -> list[Response]:
        """Feed every row its last token; returns what was read back."""
        responses = []
        # 1) The tokens of the step before are read back first where they end a row: it must not be fed again.
        previous, self._flight = self._flight, None
        if previous and any(row.ends for row in previous.rows):
            responses += self._read(previous)
            previous = None
        # 2) Every row is fed its last token; nothing waits for the result.
        if self.batch.rows:
            self._forward()
        # 3) The tokens of the step before are read back while the device computes the next ones.
        if previous:
            responses += self._read(previous)
        # 4) Rows under a constraint had to wait for those.
        if self._feed is not None:
            self._flight = self._choose(self._feed)
        return responses

    def leave(self, finished: set[int], responses: Sequence[Response] = ()) -> None:
        """Take finished or cancelled rows out of the batch, and hand their caches back to the callers.

        Args:
            finished: ids of the rows.
            responses: the last ones of finished rows are among them; they get the error where a caller's cache
                can't be filled, as one that was changed meanwhile.
        """
        failed: list[Exception] = []
        for i, row in enumerate(self.batch.rows):
            if row.id in finished and row.request.cache is not None:
                adapter = self._adapters.fingerprint(row)
                try:
                    hand_back(self.batch.cache, i, row.request.cache, row.surplus, adapter)
                except Exception as error:
                    last = [r for r in responses if r.row == row.id and r.finish_reason is not None]
                    failed += [] if last else [error]
                    for response in last:
                        response.finish_reason, response.error = "error", response.error or error
            elif row.id in finished:
                self._prefixes.keep(row, self.batch.cache, i)
        keep = [i for i, row in enumerate(self.batch.rows) if row.id not in finished]
        self._flight = self._flight and self._flight.keep(keep)
        self._feed = self._feed and self._feed.keep(keep)
        self.batch.keep(keep)
        if failed:  # of a row that was cancelled
            raise failed[0]

    def _forward(self) -> None:
        """Feed every row its last token: the next tokens are in flight then, or the logits in the feed."""
        batch = self.batch
        if self._caches.by_block:
            make_ready(batch.cache, batch.inputs, 1)
        for row in batch.rows:
            row.position += 1
        with self._adapters.using(batch.adapters):
            if self._is_afm and not any(row.needs_logits for row in batch.rows):
                tokens, peaks = self._model.greedy(batch.inputs[:, None], batch.cache)
                tokens = tokens.astype(mx.int32)
                for row in batch.rows:
                    row.sampled += 1
                self._flight = self._submitted(Flight(list(batch.rows), tokens, peaks, None))
                return
            logits = self._model(batch.inputs[:, None], cache=batch.cache)[:, -1]
        feed = Feed(list(batch.rows), logits)
        if feed.waits:
            mx.async_eval(logits)
            self._feed = feed
        else:
            self._flight = self._choose(feed)

    def _choose(self, feed: Feed) -> Flight:
        """Submit the next token of every row that was fed."""
        self._feed = None
        known = {i: row.known.pop(0) for i, row in enumerate(feed.rows) if row.known}
        tokens, peaks, logprobs = sample(feed.rows, feed.logits, self.batch.inputs, known)
        told = frozenset(feed.rows[i].id for i in known)
        for row in feed.rows:
            row.sampled += row.id not in told
        return self._submitted(Flight(feed.rows, tokens, peaks, logprobs, told))

    def _submitted(self, flight: Flight) -> Flight:
        inputs = flight.tokens
        known = [row.vocab_size for row in flight.rows if row.vocab_size is not None]
        if known:  # a sampler has returned something, which may be no token
            inputs = mx.where((inputs < 0) | (inputs >= min(known)), 0, inputs)
        mx.async_eval(flight.tokens, flight.peaks, inputs)
        self.batch.inputs = inputs
        return flight

    def _read(self, flight: Flight) -> list[Response]:
        """Wait for tokens that were submitted, and take the rows that end with them out of the batch."""
        alive = {row.id for row in self.batch.rows}
        responses, finished = [], set()
        read_back = zip(flight.rows, flight.tokens.tolist(), flight.peaks.tolist(), strict=True)
        for i, (row, token, peak) in enumerate(read_back):
            if row.id not in alive or row.id in flight.told:  # cancelled, or told before
                continue
            new = self._responses.to_token(row, token, peak, flight.logprobs_of(i))
            responses += new
            if new[-1].finish_reason is not None:
                finished.add(row.id)
        if finished:
            self.leave(finished, responses)
        self._fast_forward()
        return responses

    def _fast_forward(self) -> None:
        """Take a row out of the batch whose forced tokens are many, for a prefill."""
        if self._caches.sliding:
            return
        rows = self.batch.rows
        least = FORCED_ALONE if len(rows) == 1 else FORCED_IN_BATCH
        index = next((i for i, row in enumerate(rows) if len(row.known) >= least), None)
        if index is None:
            return
        if self._feed is None:  # its last token is not yet fed
            rows[index].known.insert(0, rows[index].tokens[-1 - len(rows[index].known)])
        others = [i for i in range(len(rows)) if i != index]
        self._feed = self._feed and self._feed.keep(others)
        row, cache = self.batch.take_out(index)
        merged = self._caches.merged([cache]) if others else cache
        self._prefills.append(Prefill.of([row], merged, self._caches.by_block))
