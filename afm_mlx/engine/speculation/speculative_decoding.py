"""Decoding with guesses: a step feeds each row its last token and guesses behind it.

The guesses need the last tokens, so these are read back first, and nothing is in flight then. Where no guesses
pay, steps are those of `Decoding`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from afm_mlx.engine.decoding import Decoding
from afm_mlx.engine.request import Response
from afm_mlx.engine.row_caches import make_ready
from afm_mlx.engine.speculation.drafting import Drafting
from afm_mlx.engine.speculation.verification import verified


class SpeculativeDecoding(Decoding):
    """The rows that decode together, with guesses.

    Args:
        drafting: the guesses for the rows.
        parts: what `Decoding` is given.
    """

    def __init__(self, drafting: Drafting, *parts: Any):
        super().__init__(*parts)
        self._drafting = drafting

    def step(self) -> list[Response]:
        """Feed every row its last token, and guesses where they pay; returns what was read back."""
        if guesses := self._drafting.plan(self.batch.rows):
            return self._step_with_guesses(guesses)
        return self._timed_step()

    def leave(self, finished: set[int], responses: Sequence[Response] = ()) -> None:
        self._drafting.forget(finished)
        super().leave(finished, responses)

    def _timed_step(self) -> list[Response]:
        """A step without guesses; how long it takes decides whether they pay."""
        before, rows = self._flight, self.batch.rows
        start = time.perf_counter()
        responses = super().step()
        seconds = time.perf_counter() - start
        if before is not None and self._flight is not None and len(rows) == len(before.rows):
            self._drafting.costs.observe(len(rows), 1, seconds)
        return responses

    def _step_with_guesses(self, guesses: int) -> list[Response]:
        """Feed every row its last token and guesses, and keep those that the model draws, too."""
        responses: list[Response] = []
        if self._flight is not None:
            flight, self._flight = self._flight, None
            responses += self._read(flight)
        batch = self.batch
        if not batch.rows:
            return responses
        room = self._caches.room(batch.cache)
        drafts = self._drafting.drafts(batch.rows, guesses, room)
        start = time.perf_counter()
        width = max(len(draft.fed) for draft in drafts)
        if self._caches.by_block:
            make_ready(batch.cache, batch.inputs, width)
        with self._adapters.using(batch.adapters):
            drawn = verified(self._model, batch.cache, drafts)
        kept, finished = [], set()
        for draft, tokens in zip(drafts, drawn, strict=True):
            new, count = self._responses.to_draft(draft, tokens)
            responses += new
            kept.append(count)
            if new and new[-1].finish_reason is not None:
                finished.add(draft.row.id)
        for layer in batch.cache:
            layer.trim_rows([width - count for count in kept])
        self._drafting.costs.observe(len(drafts), width, time.perf_counter() - start)
        batch.inputs = mx.array([row.last_token for row in batch.rows], mx.int32)
        if finished:
            self.leave(finished, responses)
        self._fast_forward()
        return responses
