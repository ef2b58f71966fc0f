"""Draft tokens of a smaller model with the same vocabulary.

It has a cache of its own for each row. Before it drafts, it is fed the row's tokens since it was last fed:
usually the token that the model drew after the accepted ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.batch import (
    RowCaches,
    change_entries,
    extend_cache,
    prefill_tokens,
    reserve_columns,
    trim_rows,
    verify,
    verify_greedy,
    vocab_size_of,
)
from afm_mlx.engine.request import MOST_TOKENS
from afm_mlx.engine.row import Row
from afm_mlx.engine.sampling import Draw, draw
from afm_mlx.engine.speculation.draft_tokens import Draft
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.model import Model

FEW = 32  # tokens that a row is fed in a step of all rows; more are prefilled


class DraftModel:
    """A draft model, and its caches of the rows that it drafts for."""

    def __init__(self, model: nn.Module, prefill_step_size: int, by_block: bool = False):
        self.model, self._by_block = model, by_block
        self.row_caches = RowCaches(model, "int8", None, takes_back=True)
        self._vocab_size = vocab_size_of(model) or MOST_TOKENS
        self._chunk = prefill_step_size
        self._prefilling: dict[int, tuple[Cache, _Held]] = {}  # by row
        self._held: dict[int, _Held] = {}  # by row of the batch, in its order
        self._cache: Cache = []

    @property
    def caches(self) -> list[Cache]:
        """The caches of all rows; safe in any thread."""
        return [self._cache, *(cache for cache, _ in list(self._prefilling.values()))]

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        """Append up to `count` draft tokens to each draft; none while the row's prompt is being prefilled."""
        held = self._held
        # The draft tokens that the model rejected leave the caches.
        rejected = dict.fromkeys(held, 0)
        rejected |= {d.row.id: held[d.row.id].take_back(d.row) for d in drafts if d.row.id in held}
        if any(rejected.values()):
            self._trim(list(rejected.values()))
        self.forget(
            d.row.id
            for d in drafts
            if d.row.id in held and len(held[d.row.id].missing(d.row, d.assumed)) > FEW
        )
        for draft in drafts:
            if draft.row.id not in self._held:
                self._prefill(draft.row)
        drafting = {draft.row.id: draft for draft in drafts if draft.row.id in self._held}
        for _ in range(count):
            drafting = {row: draft for row, draft in drafting.items() if draft.is_open}
            if not drafting:
                return
            for draft, token in zip(drafting.values(), self.next_tokens(drafting), strict=True):
                if 0 <= token < self._vocab_size:
                    draft.extend([token])
                else:  # the row's sampler has drawn no token, and will draw none for the model either
                    draft.close()

    def forget(self, rows: Iterable[int]) -> None:
        """Drop the caches of rows, by their ids."""
        gone = set(rows)
        self._prefilling = {row: pair for row, pair in self._prefilling.items() if row not in gone}
        keep = [i for i, row in enumerate(self._held) if row not in gone]
        if len(keep) == len(self._held):
            return
        self._held = {row: held for row, held in self._held.items() if row not in gone}
        if not keep:
            self._cache = []
        change_entries(self._cache, lambda entry: entry.filter(keep), self._by_block)

    def _prefill(self, row: Row) -> None:
        """Feed the next chunk of a new row's tokens; after the last one, join the row to the draft batch."""
        if row.id not in self._prefilling:
            if isinstance(self.model, Model):
                new = list(self.model.make_cache())
            else:
                new = self.row_caches.merged([self.row_caches.make()])
            self._prefilling[row.id] = new, _Held()
        cache, held = self._prefilling[row.id]
        missing = held.missing(row)
        if len(missing) > FEW // 2:
            chunk = missing[: min(self._chunk, len(missing) - 1)]
            if self._by_block:
                reserve_columns(cache, None, len(chunk))
            prefill_tokens(self.model, mx.array([chunk], mx.int32), cache)
            mx.eval([entry.state for entry in cache])
            held.add(row, chunk)
        if len(held.missing(row)) <= FEW // 2:
            del self._prefilling[row.id]
            if self._cache:
                extend_cache(self._cache, cache, self._by_block)
            self._cache = self._cache or cache
            self._held[row.id] = held

    def _trim(self, counts: list[int]) -> None:
        longest = max(held.known + len(held.drafted) for held in self._held.values())
        trim_rows(self._cache, counts, longest)

    def next_tokens(self, drafting: dict[int, Draft]) -> list[int]:
        """Feed the draft caches what these drafts (by row) have more, then draw one token for each."""
        missing = [
            held.missing(drafting[row].row, drafting[row].assumed) if row in drafting else []
            for row, held in self._held.items()
        ]
        width = max(map(len, missing))
        inputs = mx.array([tokens + [0] * (width - len(tokens)) for tokens in missing], mx.int32)
        if self._by_block:
            reserve_columns(self._cache, None, width)
        drafts = list(drafting.values())
        is_greedy = not any(
            draft.mask is not None
            or draft.row.request.sampler
            or draft.row.request.logits_processors
            for draft in drafts
        )
        if is_greedy:
            found, _ = verify_greedy(self.model, inputs, self._cache)
        else:
            found = verify(self.model, inputs, self._cache)
        for (row, held), tokens in zip(self._held.items(), missing, strict=True):
            if tokens:
                held.add(drafting[row].row, tokens)
        self._trim([width - len(tokens) for tokens in missing])
        order = list(self._held)
        rows = [order.index(row) for row in drafting]
        ends = [len(missing[i]) - 1 for i in rows]
        if is_greedy:
            likeliest: list[list[int]] = found.tolist()
            return [likeliest[row][end] for row, end in zip(rows, ends, strict=True)]
        draws = [Draw(draft.row, draft.mask, draft.assumed) for draft in drafts]
        sampled, _, _ = draw(draws, found[mx.array(rows), mx.array(ends)])
        drawn: list[int] = sampled.tolist()
        return drawn


class _Held:
    """The tokens of a row that the draft model's cache holds: of prompt and answer, then draft tokens."""

    def __init__(self) -> None:
        self.known = 0  # tokens of prompt and answer
        self.drafted: list[int] = []  # draft tokens after them

    def missing(self, row: Row, assumed: Sequence[int] = ()) -> list[int]:
        """Return the tokens of prompt and answer, and the assumed ones, that the cache does not hold yet."""
        if self.drafted:
            return list(assumed[len(self.drafted) :])
        prompt, done = row.request.prompt, self.known
        if done < len(prompt):
            return [*prompt[done:], *row.tokens, *assumed]
        return [*row.tokens[done - len(prompt) :], *assumed]

    def add(self, row: Row, tokens: Sequence[int]) -> None:
        """Record the next tokens that the cache was fed."""
        known = min(len(tokens), len(row.request.prompt) + len(row.tokens) - self.known)
        self.known += known
        self.drafted += tokens[known:]

    def take_back(self, row: Row) -> int:
        """Drop the rejected draft tokens, and return their number."""
        answer = row.tokens[self.known - len(row.request.prompt) :] if self.drafted else []
        # The row's last token is fed again in any case: its logits are needed.
        pairs = zip(self.drafted, answer[:-1], strict=False)
        accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        rejected = len(self.drafted) - accepted
        self.known, self.drafted = self.known + accepted, []
        return rejected
