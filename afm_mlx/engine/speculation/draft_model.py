"""Guesses of a smaller model with the same vocabulary.

It has a cache of its own for each row. Before it guesses, it is fed what the row has got since: as a rule, the
tokens that the model drew instead of its last guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import mlx.core as mx

from afm_mlx.engine.row import Row
from afm_mlx.engine.row_caches import change_blocks, let_go, make_ready
from afm_mlx.engine.sampling import Place, draw
from afm_mlx.engine.speculation.draft import Draft
from afm_mlx.model.model import Model

FEW = 32
"""Tokens that a row is fed in a step of all rows; more go into its cache like a prompt."""


class DraftModel:
    """A draft model, and its caches of the rows that it guesses for.

    Args:
        model: the draft model.
        prefill_step_size: prompt tokens of a row that it takes in one round at most.
        by_block: see `RowCaches`.
    """

    def __init__(self, model: Model, prefill_step_size: int, by_block: bool = False):
        self.model, self._by_block = model, by_block
        self._chunk = prefill_step_size
        self._joining: dict[int, tuple[list[Any], _Held]] = {}  # rows whose prompt it is being fed
        self._held: dict[int, _Held] = {}  # rows of the batch, in its order
        self._cache: list[Any] = []

    @property
    def caches(self) -> list[list[Any]]:
        """The caches of all rows; safe in any thread."""
        return [self._cache, *(cache for cache, _ in list(self._joining.values()))]

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        """Append `count` guesses at most to each draft; a row whose prompt is still being fed gets none."""
        self._take_back([draft.row for draft in drafts])
        left_behind = [d.row.id for d in drafts if d.row.id in self._held and not self._keeps_up(d)]
        self.forget(left_behind)
        for draft in drafts:
            if draft.row.id not in self._held:
                self._feed_prompt(draft.row)
        guessing = {draft.row.id: draft for draft in drafts if draft.row.id in self._held}
        for _ in range(count):
            guessing = {row: draft for row, draft in guessing.items() if draft.is_open}
            if not guessing:
                return
            for draft, token in zip(guessing.values(), self.guess(guessing), strict=True):
                if 0 <= token < self.model.args.vocab_size:
                    draft.extend([token])
                else:  # of the row's sampler, which will return none either when the model is asked
                    draft.close()

    def forget(self, rows: Iterable[int]) -> None:
        """Drop the caches of rows, by their ids."""
        gone = set(rows)
        self._joining = {row: pair for row, pair in self._joining.items() if row not in gone}
        keep = [i for i, row in enumerate(self._held) if row not in gone]
        if len(keep) == len(self._held):
            return
        self._held = {row: held for row, held in self._held.items() if row not in gone}
        change_blocks(self._cache, lambda entry: entry.filter(keep), self._by_block)
        if not keep:
            self._cache = []

    def _keeps_up(self, draft: Draft) -> bool:
        return len(self._held[draft.row.id].missing(draft.row, draft.assumed)) <= FEW

    def _feed_prompt(self, row: Row) -> None:
        """Feed a new row's prompt, a chunk a round, and take the row into the batch in the end."""
        cache, held = self._joining.setdefault(row.id, (self.model.make_cache(), _Held()))
        missing = held.missing(row)
        if len(missing) > FEW // 2:
            chunk = missing[: min(self._chunk, len(missing) - 1)]
            if self._by_block:
                make_ready(cache, None, len(chunk))
            self.model.prefill(mx.array([chunk], mx.int32), cache)
            mx.eval([layer.state for layer in cache])
            held.take(row, chunk)
        if len(held.missing(row)) <= FEW // 2:
            del self._joining[row.id]
            if self._cache:
                theirs = iter(cache)

                def extend(mine: Any) -> None:
                    entry = next(theirs)
                    mine.extend(entry)
                    let_go(entry)

                change_blocks(self._cache, extend, self._by_block)
            self._cache = self._cache or cache
            self._held[row.id] = held

    def _take_back(self, rows: Sequence[Row]) -> None:
        """Take the guesses back that the model refused, and that the caches hold."""
        refused = dict.fromkeys(self._held, 0)
        for row in rows:
            if row.id in refused:
                refused[row.id] = self._held[row.id].take_back(row)
        if any(refused.values()):
            self._trim(list(refused.values()))

    def _trim(self, counts: list[int]) -> None:
        for layer in self._cache:
            layer.trim_rows(counts)

    def guess(self, guessing: dict[int, Draft]) -> list[int]:
        """Feed the rows that guess what they lack, and draw the next token of each.

        Args:
            guessing: drafts of rows, by the rows' ids.
        """
        missing = [
            held.missing(guessing[row].row, guessing[row].assumed) if row in guessing else []
            for row, held in self._held.items()
        ]
        width = max(map(len, missing))
        inputs = mx.array([tokens + [0] * (width - len(tokens)) for tokens in missing], mx.int32)
        if self._by_block:
            make_ready(self._cache, None, width)
        drafts = list(guessing.values())
        takes_likeliest = all(_takes_likeliest(draft) for draft in drafts)
        if takes_likeliest:
            found, _ = self.model.verify_greedy(inputs, self._cache)
        else:
            found = self.model.verify(inputs, self._cache)
        self._trim([width - len(tokens) for tokens in missing])
        for (row, held), tokens in zip(self._held.items(), missing, strict=True):
            if tokens:
                held.take(guessing[row].row, tokens)
        order = list(self._held)
        rows = [order.index(row) for row in guessing]
        ends = [len(missing[i]) - 1 for i in rows]
        if takes_likeliest:
            likeliest: list[list[int]] = found.tolist()
            return [likeliest[row][end] for row, end in zip(rows, ends, strict=True)]
        places = [Place(draft.row, draft.mask, draft.assumed) for draft in drafts]
        drawn, _, _ = draw(places, found[mx.array(rows), mx.array(ends)])
        return drawn.tolist()  # type: ignore[return-value]


def _takes_likeliest(draft: Draft) -> bool:
    """True if the next guess is the token with the largest logit, of all tokens."""
    request = draft.row.request
    return draft.mask is None and not (request.sampler or request.logits_processors)


class _Held:
    """What the draft model's cache holds of a row: tokens of its prompt and answer, and guesses behind them."""

    def __init__(self) -> None:
        self.known = 0
        self.guessed: list[int] = []

    def missing(self, row: Row, assumed: Sequence[int] = ()) -> list[int]:
        """Tokens of prompt, answer, and those assumed behind it, that the cache does not hold yet."""
        if self.guessed:
            return list(assumed[len(self.guessed) :])
        prompt, done = row.request.prompt, self.known
        if done < len(prompt):
            return [*prompt[done:], *row.tokens, *assumed]
        return [*row.tokens[done - len(prompt) :], *assumed]

    def take(self, row: Row, tokens: Sequence[int]) -> None:
        """Take note of the next tokens that the cache was fed."""
        known = min(len(tokens), len(row.request.prompt) + len(row.tokens) - self.known)
        self.known += known
        self.guessed += tokens[known:]

    def take_back(self, row: Row) -> int:
        """Drop the guesses that were wrong; returns how many they were."""
        answer = row.tokens[self.known - len(row.request.prompt) :] if self.guessed else []
        # The row's last token is fed anew in any case: its logits are wanted.
        pairs = zip(self.guessed, answer[:-1], strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        wrong = len(self.guessed) - right
        self.known, self.guessed = self.known + right, []
        return wrong
