"""A decode step: feed every row its last token, submit, and read back the step before.

The next step is submitted before the tokens of the one before are read back, so the device never waits for
Python. A row under a constraint needs its token before the next one can be drawn: the token is read back while
the device computes the logits. A row whose constraint forces many tokens leaves for a prefill, and comes back.

With `Speculation`, where draft tokens pay, a step feeds each row its last token and draft tokens after it, and
keeps the draft tokens that the model draws, too. Draft tokens need the last tokens, so these are read back
first, and no step stays submitted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.batch import (
    Prefill,
    RowBatch,
    RowCaches,
    prefill_tokens,
    reserve_columns,
    return_cache,
    trim_rows,
    verify,
    verify_greedy,
)
from afm_mlx.engine.lockstep import agreed
from afm_mlx.engine.request import TokenResponse
from afm_mlx.engine.row import Row, RowAdapters
from afm_mlx.engine.row_prefixes import RowPrefixes
from afm_mlx.engine.sampling import Draw, draw, sample
from afm_mlx.engine.scheduler import Scheduler
from afm_mlx.engine.speculation.draft_tokens import Draft
from afm_mlx.engine.speculation.drafting import Drafting
from afm_mlx.model.decode_step import DecodeStep
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.model import is_afm
from afm_mlx.ranks import ranks_of

# This many forced tokens are fed at once instead of one per step: in a row that runs alone; and in a batch,
# where the other rows wait for them, and the row's cache is taken out and put back.
FORCED_ALONE, FORCED_IN_BATCH = 2, 8
MOST_UNFED = 8  # tokens of a row that are fed again with its next draft; more are fed by themselves


@dataclass
class SubmittedStep:
    """A step whose tokens have not been read back."""

    rows: list[Row]  # the B rows that the tokens belong to
    tokens: mx.array  # (B,)
    max_logits: mx.array  # (B,)
    logprobs: mx.array | None  # (B, vocab_size); None if no row needs them
    forced: frozenset[int] = frozenset()  # ids of rows whose token was forced, and has its response

    def keep(self, indices: list[int]) -> SubmittedStep | None:
        if not indices:
            return None
        index = mx.array(indices, dtype=mx.int32)
        logprobs = None if self.logprobs is None else self.logprobs[index]
        rows, max_logits = [self.rows[i] for i in indices], self.max_logits[index]
        return SubmittedStep(rows, self.tokens[index], max_logits, logprobs, self.forced)


class DecodeBatch:
    """The rows that decode together, and the step that they have submitted.

    The scheduler joins rows to `batch` between steps, and prefills rows that have many forced tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: RowCaches,
        adapters: RowAdapters,
        prefixes: RowPrefixes | None,
        scheduler: Scheduler,
        drafting: Drafting | None,
    ):
        self._model, self._is_afm = model, is_afm(model)
        self._caches, self._adapters, self._prefixes = caches, adapters, prefixes
        self._scheduler, self._drafting = scheduler, drafting
        self._ranks = ranks_of(model)
        self.batch = RowBatch(caches.by_block)
        self._zoo_step = DecodeStep()
        self.submitted: SubmittedStep | None = None
        # (B, vocab_size) logits of the batch's rows, whose tokens wait for the step before to be read back.
        self._logits: mx.array | None = None

    def step(self) -> list[TokenResponse]:
        """Feed every row its last token, and draft tokens where they pay; return what was read back."""
        drafting, rows = self._drafting, self.batch.rows
        count = 0 if drafting is None else drafting.plan(rows)
        if drafting is not None and count and (len(rows) == 1 or self._caches.takes_padding):
            return self._speculative_step(drafting, count)
        self._feed_unfed()
        start = time.perf_counter()
        responses: list[TokenResponse] = []
        # 1) If a row ends with its submitted token, read back first: it must not be fed again.
        before, self.submitted = self.submitted, None
        unread = before
        if unread is not None and any(row.ends for row in unread.rows):
            responses += self._read(unread)
            unread = None
        # 2) Feed every row its last token; nothing waits for the result.
        if self.batch.rows:
            self._forward()
        # 3) Read back the step before, while the device computes the next tokens.
        if unread is not None:
            responses += self._read(unread)
        # 4) Rows under a constraint had to wait for that.
        if self._logits is not None:
            self._draw(self._logits)
        is_comparable = before is not None and len(before.rows) == len(rows)
        if drafting is not None and is_comparable and self.submitted is not None:
            # What a plain step takes decides how many draft tokens pay.
            drafting.costs.observe(len(rows), 1, time.perf_counter() - start)
        return responses

    def _forward(self) -> None:
        """Feed every row its last token, and submit the draw of the next, or leave the logits for later."""
        batch = self.batch
        if self._caches.by_block:
            reserve_columns(batch.cache, batch.inputs, 1)
        rows = list(batch.rows)
        has_constraints = needs_logits = False
        for row in rows:
            row.position += 1
            needs_logits |= row.needs_logits
            has_constraints |= row.matcher is not None
        with self._adapters.using(batch.adapters):
            if self._is_afm and not needs_logits:
                tokens, max_logits = self._model.greedy(batch.inputs[:, None], batch.cache)
                for row in rows:
                    row.sampled += 1
                self._submit(SubmittedStep(rows, tokens.astype(mx.int32), max_logits, None))
                return
            if self._is_afm:
                logits = self._model(batch.inputs[:, None], cache=batch.cache)[:, -1]
            else:
                logits = self._zoo_step.zoo_logits(self._model, batch.inputs[:, None], batch.cache)
        if has_constraints:
            mx.async_eval(logits)
            self._logits = logits
        else:
            self._draw(logits)

    def _draw(self, logits: mx.array) -> None:
        """Submit the draw of the next token of every row, from its logits (B, vocab_size)."""
        self._logits, rows = None, list(self.batch.rows)
        forced = {i: row.pending.pop(0) for i, row in enumerate(rows) if row.pending}
        tokens, max_logits, logprobs = sample(rows, logits, self.batch.inputs, forced)
        tokens, max_logits = agreed(self._ranks, tokens, max_logits)
        ids = frozenset(rows[i].id for i in forced)
        for row in rows:
            row.sampled += row.id not in ids
        self._submit(SubmittedStep(rows, tokens, max_logits, logprobs, ids))

    def _submit(self, step: SubmittedStep) -> None:
        """Submit a step; its tokens are the next inputs."""
        inputs = step.tokens
        sizes = [r.sampler_vocab_size for r in step.rows if r.sampler_vocab_size is not None]
        if sizes:  # what a sampler has returned may be no token
            inputs = mx.where((inputs < 0) | (inputs >= min(sizes)), 0, inputs)
        mx.async_eval(step.tokens, step.max_logits, inputs)
        self.batch.inputs = inputs
        self.submitted = step

    def _read(self, step: SubmittedStep) -> list[TokenResponse]:
        """Wait for a submitted step's tokens, remove the rows that end with them, and return the responses."""
        rows = self.batch.rows
        alive = None if rows == step.rows else {row.id for row in rows}
        responses: list[TokenResponse] = []
        finished: set[int] = set()
        logprobs = step.logprobs
        read_back = zip(step.rows, step.tokens.tolist(), step.max_logits.tolist(), strict=True)
        for i, (row, token, max_logit) in enumerate(read_back):
            if (alive is not None and row.id not in alive) or row.id in step.forced:
                continue  # cancelled, or its response was returned before
            wanted = None if logprobs is None or not row.request.logprobs else logprobs[i]
            new = row.take(token, max_logit, wanted)
            responses += new
            if new[-1].finish_reason is not None:
                finished.add(row.id)
        if finished:
            self.leave(finished, responses)
        self._fast_forward()
        return responses

    def leave(self, finished: set[int], responses: Sequence[TokenResponse] = ()) -> None:
        """Remove finished or cancelled rows, by their ids, and return their caches to the callers.

        `responses` hold the last ones of finished rows: if a caller's cache can't be filled, because it was
        changed meanwhile for example, the error goes there.
        """
        if self._drafting is not None:
            self._drafting.forget(finished)
        if any(row.unfed for row in self.batch.rows if row.id in finished):
            self._feed_unfed()
        failed: list[Exception] = []
        for i, row in enumerate(self.batch.rows):
            if row.id not in finished:
                continue
            if row.request.cache is None:
                if self._prefixes is not None:
                    self._prefixes.keep(row, self.batch.cache, i)
                continue
            adapter = self._adapters.fingerprint(row)
            try:
                return_cache(self.batch.cache, i, row.request.cache, row.surplus, adapter)
            except Exception as error:
                last = [r for r in responses if r.row == row.id and r.finish_reason is not None]
                failed += [] if last else [error]
                for response in last:
                    response.finish_reason, response.error = "error", response.error or error
        keep = [i for i, row in enumerate(self.batch.rows) if row.id not in finished]
        self.submitted = self.submitted and self.submitted.keep(keep)
        self._keep_logits(keep)
        self.batch.keep(keep)
        if failed:  # of a row that was cancelled
            raise failed[0]

    def _fast_forward(self) -> None:
        """Move the first row that has many pending (forced) tokens, if any, from the batch to a prefill."""
        rows = self.batch.rows
        least = FORCED_ALONE if len(rows) == 1 else FORCED_IN_BATCH
        index = next((i for i, row in enumerate(rows) if len(row.pending) >= least), None)
        if index is None or self._caches.sliding:
            return
        if self._logits is None:  # the row's last token is not yet fed
            rows[index].pending.insert(0, rows[index].tokens[-1 - len(rows[index].pending)])
        self._feed_unfed()
        others = [i for i in range(len(rows)) if i != index]
        self._keep_logits(others)
        row, cache = self.batch.take_out(index)
        merged = self._caches.merged([cache]) if others else cache
        self._scheduler.prefills.append(Prefill.of([row], merged, self._caches.by_block))

    def _keep_logits(self, indices: list[int]) -> None:
        if self._logits is not None:
            self._logits = self._logits[mx.array(indices, mx.int32)] if indices else None

    def drop_all(self) -> list[Row]:
        rows = self.batch.rows
        for row in rows:
            row.release()
        self.batch = RowBatch(self._caches.by_block)
        self.submitted = self._logits = None
        return rows

    # -- speculation

    def _speculative_step(self, drafting: Drafting, count: int) -> list[TokenResponse]:
        """Feed every row its last token and up to `count` draft tokens; keep the ones that the model draws."""
        responses: list[TokenResponse] = []
        if (submitted := self.submitted) is not None:
            self.submitted = None
            responses += self._read(submitted)
        batch = self.batch
        if not batch.rows:
            return responses
        drafts = drafting.drafts(batch.rows, count, self._caches.tokens_left(batch.cache))
        start = time.perf_counter()
        fed = [[*draft.row.unfed, *draft.fed] for draft in drafts]
        if self._caches.by_block:
            reserve_columns(batch.cache, batch.inputs, max(map(len, fed)))
        states = self._begin_states(fed)
        with self._adapters.using(batch.adapters):
            drawn = _verify(self._model, batch.cache, drafts, fed)
        kept: list[int] = []
        finished: set[int] = set()
        for draft, tokens in zip(drafts, drawn, strict=True):
            new, n_kept, accepted = _take_drawn(draft, tokens)
            drafting.count(draft, accepted)
            responses += new
            kept.append(n_kept)
            if new and new[-1].finish_reason is not None:
                finished.add(draft.row.id)
        self._take_back(drafts, kept, fed, states)
        width = max(len(draft.fed) for draft in drafts)
        drafting.costs.observe(len(drafts), width, time.perf_counter() - start)
        batch.inputs = mx.array([row.last_token for row in batch.rows], mx.int32)
        if finished:
            self.leave(finished, responses)
        self._fast_forward()
        return responses

    def _begin_states(self, fed: Sequence[Sequence[int]]) -> list[list[mx.array | None]]:
        """Return the states before rows are fed these tokens, to restore them; empty if the model has none."""
        if self._is_afm:
            return []
        from afm_mlx.engine import zoo_caches

        if len({len(tokens) for tokens in fed}) > 1:  # the padding is not to be taken back
            zoo_caches.set_lengths(self.batch.cache, [len(tokens) for tokens in fed])
        return zoo_caches.states_of(self.batch.cache)

    def _take_back(
        self,
        drafts: Sequence[Draft],
        kept: Sequence[int],
        fed: Sequence[Sequence[int]],
        states: list[list[mx.array | None]],
    ) -> None:
        """Leave the first `kept[r]` tokens of row r's draft in the batch's cache, of the tokens `fed[r]`.

        If the model has states (`_begin_states`), a row that has a rejected token loses all of them, and is fed
        the kept ones with its next draft (`Row.unfed`).
        """
        cache, width = self.batch.cache, max(map(len, fed))
        is_whole = [n == len(draft.fed) for n, draft in zip(kept, drafts, strict=True)]
        counts = [
            width - len(t) + len(d.fed) - n for t, d, n in zip(fed, drafts, kept, strict=True)
        ]
        if states:
            from afm_mlx.engine import zoo_caches

            zoo_caches.set_lengths(cache, None)
            zoo_caches.restore_states(cache, states, [not whole for whole in is_whole])
            for r, (draft, n) in enumerate(zip(drafts, kept, strict=True)):
                draft.row.unfed = [] if is_whole[r] else [*draft.row.unfed, *draft.fed[:n]]
                counts[r] += len(draft.row.unfed)
        trim_rows(cache, counts, max(d.row.position - len(d.row.unfed) for d in drafts))
        most = MOST_UNFED if self._caches.takes_padding else 0
        if any(len(draft.row.unfed) > most for draft in drafts):
            self._feed_unfed()

    def _feed_unfed(self) -> None:
        """Feed the rows what was taken back from them together with rejected tokens."""
        unfed = [row.unfed for row in self.batch.rows]
        lengths = [len(tokens) for tokens in unfed]
        if not any(lengths):
            return
        padding = [max(lengths) - n for n in lengths]
        for entry in self.batch.cache if any(padding) else ():
            entry.prepare(lengths=lengths, right_padding=padding)
        tokens = [[*tokens, *[0] * pad] for tokens, pad in zip(unfed, padding, strict=True)]
        with self._adapters.using(self.batch.adapters):
            prefill_tokens(self._model, mx.array(tokens, mx.int32), self.batch.cache)
        for entry in self.batch.cache:
            entry.finalize()
        mx.eval([entry.state for entry in self.batch.cache])
        for row in self.batch.rows:
            row.unfed = []


Drawn = tuple[int, float, mx.array | None]
"""A drawn token, its max logit, and its log-probabilities (vocab_size,) if the row needs them."""


def _verify(
    model: nn.Module, cache: Cache, drafts: Sequence[Draft], fed: Sequence[Sequence[int]]
) -> list[dict[int, Drawn]]:
    """Run the model once on the tokens of all rows, padded, and draw its own token at each position to verify.

    The last tokens of `fed[r]` are `Draft.fed` of draft r. The cache grows by the longest of them in every row.
    Returns, for each draft, the drawn tokens by the index into `Draft.fed` of the token before each, evaluated.
    """
    width = max(map(len, fed))
    inputs = mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens in fed], mx.int32)
    first = [len(tokens) - len(draft.fed) for tokens, draft in zip(fed, drafts, strict=True)]
    if not any(draft.row.needs_logits for draft in drafts):
        tokens, max_logits = agreed(ranks_of(model), *verify_greedy(model, inputs, cache))
        mx.eval(tokens, max_logits)
        pairs = zip(drafts, first, tokens.tolist(), max_logits.tolist(), strict=True)
        return [{i: (t[f + i], m[f + i], None) for i in d.drawn} for d, f, t, m in pairs]
    places = [(b, i) for b, draft in enumerate(drafts) for i in draft.drawn]
    logits = verify(model, inputs, cache)
    found: list[dict[int, Drawn]] = [{} for _ in drafts]
    if not places:
        mx.eval(logits)
        return found
    rows = mx.array([b for b, _ in places])
    columns = mx.array([first[b] + i for b, i in places])
    draws = [
        Draw(drafts[b].row, drafts[b].masks.get(i), drafts[b].fed[1 + drafts[b].n_pending : 1 + i])
        for b, i in places
    ]
    tokens, max_logits, logprobs = draw(draws, logits[rows, columns])
    tokens, max_logits = agreed(ranks_of(model), tokens, max_logits)
    mx.eval(tokens, max_logits)
    values = zip(places, tokens.tolist(), max_logits.tolist(), strict=True)
    for n, ((b, i), token, max_logit) in enumerate(values):
        wanted = logprobs[n] if drafts[b].row.request.logprobs else None
        found[b][i] = (token, max_logit, wanted)
    return found


def _take_drawn(draft: Draft, drawn: Mapping[int, Drawn]) -> tuple[list[TokenResponse], int, int]:
    """Have a row take its drawn tokens, up to the first that differs from what the row was fed.

    Returns:
        The responses; how many of the fed tokens stay in the cache; and how many draft tokens were accepted.
    """
    row, kept, accepted = draft.row, 1, 0
    responses: list[TokenResponse] = []
    while True:
        if row.pending:
            following = row.pending.pop(0)
        else:
            new = row.take(*drawn[kept - 1])
            new[0].from_draft = kept in draft.proposed and draft.fed[kept] == new[0].token
            accepted += new[0].from_draft
            responses += new
            if new[-1].finish_reason is not None:
                break
            following = drawn[kept - 1][0]
        if kept == len(draft.fed) or draft.fed[kept] != following:
            break
        kept += 1
    row.settle(kept)
    return responses, kept, accepted
