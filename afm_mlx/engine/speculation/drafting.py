"""What an engine drafts with, for which of its rows, and how many tokens at a time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from afm_mlx.engine.row import Row
from afm_mlx.engine.row_caches import RowCaches
from afm_mlx.engine.speculation.draft import Draft
from afm_mlx.engine.speculation.draft_length import (
    MOST,
    Acceptance,
    RowGuesses,
    StepCosts,
    best_count,
)
from afm_mlx.engine.speculation.draft_model import FEW, DraftModel
from afm_mlx.engine.speculation.prompt_lookup import PromptLookup
from afm_mlx.errors import RequestError, shown
from afm_mlx.model.model import Model, is_afm


@dataclass(frozen=True)
class Speculation:
    """How an engine guesses tokens for its model to check, several in one step.

    Answers have the tokens that they have without it. Samplers and logits processors are called for tokens that
    may be refused, so they must depend on nothing but their arguments.

    Args:
        draft_model: a smaller AFM model with the same vocabulary, or a `Drafter` of your own; None for none.
        prompt_lookup: whether to guess what followed the last few tokens where they stood before. That is tried
            first, for it costs nothing.
        adapter_drafts: draft models of adapters, by the names that requests give; rows with other adapters have
            `draft_model`.
        num_draft_tokens: guesses at a time, 1 to 7; None lets the engine find out how many pay, and none where
            they don't.
    """

    draft_model: Any = None
    prompt_lookup: bool = False
    adapter_drafts: Mapping[str, Any] = field(default_factory=dict)
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        count = self.num_draft_tokens
        if count is not None and not (type(count) is int and 1 <= count <= MOST):
            raise RequestError(
                f"num_draft_tokens is {shown(count)}; allowed are 1 to {MOST}, or None for as many as pay."
            )
        if not isinstance(self.adapter_drafts, Mapping):
            raise RequestError(
                f"adapter_drafts is {shown(self.adapter_drafts)}; draft models by names of adapters are needed."
            )

    def check(self, model: Any, sliding_window: bool) -> None:
        """Raise `RequestError` where it can't be honoured for a model."""
        if not is_afm(model):
            raise RequestError(
                f"Speculative decoding is for AFM models; this is a {type(model).__name__} of mlx-lm's zoo. "
                "Leave the draft model out, or run it with mlx_lm.stream_generate."
            )
        if sliding_window:
            raise RequestError(
                "Speculative decoding takes tokens back, and a sliding window has forgotten what lay before "
                "them. Leave out one of the two."
            )
        named = {"draft_model": self.draft_model, **self.adapter_drafts}
        for name, draft in named.items():
            if draft is None or _is_drafter(draft):
                continue
            if not is_afm(draft):
                raise RequestError(
                    f"{name} is {shown(draft)}; an AFM model is needed, such as load_draft returns, or a "
                    "Drafter with the methods propose and forget."
                )
            if draft.args.vocab_size != model.args.vocab_size:
                raise RequestError(
                    f"{name} has {draft.args.vocab_size} tokens and the model {model.args.vocab_size}; a draft "
                    "model has its model's vocabulary."
                )


class Drafter(Protocol):
    """Proposes draft tokens for rows.

    If `propose` raises, the rows of its drafts end with the error in their last responses. If `forget` raises,
    one warning is issued, because no answer depends on it.
    """

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        """Append `count` guesses at most to each draft."""

    def forget(self, rows: Iterable[int]) -> None:
        """Drop what is known of rows, by their ids."""


def _is_drafter(given: Any) -> bool:
    return callable(getattr(given, "propose", None)) and callable(getattr(given, "forget", None))


class Drafting:
    """The guesses for an engine's rows.

    Args:
        options: what to guess with.
        model: the model that checks the guesses.
        end_tokens: ids that end an answer.
        prefill_step_size: prompt tokens that a draft model takes at a time, at most.
        by_block: see `RowCaches`.

    Attributes:
        costs: what the model's steps take.
        overall: how often guesses are right, over all rows.
    """

    def __init__(
        self,
        options: Speculation,
        model: Model,
        end_tokens: Collection[int],
        prefill_step_size: int,
        by_block: bool = False,
    ):
        self.costs = StepCosts()
        self.overall = Acceptance()
        self._fixed = options.num_draft_tokens
        self._end_tokens, self._vocab_size = end_tokens, model.args.vocab_size
        self._warned: set[int] = set()
        self._lookup = PromptLookup() if options.prompt_lookup else None
        drafters: dict[int, Drafter] = {
            id(given): given
            if _is_drafter(given)
            else DraftModel(given, prefill_step_size, by_block)
            for given in [options.draft_model, *options.adapter_drafts.values()]
            if given is not None
        }
        self._drafters = list(drafters.values())
        self._default = drafters.get(id(options.draft_model))
        self._of_adapters = {
            name: drafters[id(given)] for name, given in options.adapter_drafts.items()
        }
        self._rows: dict[int, RowGuesses] = {}
        self._guess_costs = StepCosts()

    @property
    def _draft_models(self) -> list[DraftModel]:
        return [drafter for drafter in self._drafters if isinstance(drafter, DraftModel)]

    @property
    def draft_caches(self) -> list[RowCaches]:
        """The kinds of the draft models' caches."""
        return [RowCaches(drafter.model, "int8", None) for drafter in self._draft_models]

    @property
    def caches(self) -> list[list[Any]]:
        """The draft models' caches."""
        return [cache for drafter in self._draft_models for cache in drafter.caches]

    @property
    def surplus(self) -> int:
        """Tokens that a row may be fed in vain, at most: guesses, and padding in a draft model's batch."""
        return max(MOST, FEW) if self._draft_models else MOST

    def plan(self, rows: Sequence[Row]) -> int:
        """Number of guesses for each row in the next step; 0 where a step of one token is faster."""
        guessing = self._guessing(rows)
        if not guessing:
            return 0
        if self._fixed is not None:
            return self._fixed
        acceptances = [guesses.acceptance for _, guesses in guessing]
        guess = self._guess_costs.of(len(rows), 1) or 0.0
        count = best_count(len(rows), acceptances, self.costs, guess)
        one = self.costs.of(len(rows), 1)
        if one is None:
            return 0
        several = self.costs.of(len(rows), 1 + count) or one
        slowdown = (several + count * guess) / one
        for row, guesses in guessing:
            if not count or guesses.acceptance.tokens(count) < slowdown:
                guesses.pause(len(row.tokens))
                self._forget_drafts([row.id])
        return count if self._guessing(rows) else 0

    def drafts(self, rows: Sequence[Row], count: int, limit: int) -> list[Draft]:
        """What each row is fed next.

        Args:
            rows: the rows of a batch; all of their answers was read back.
            count: guesses for each row, of `plan`.
            limit: tokens that a row may be fed at most.
        """
        start = time.perf_counter()
        drafts = [self._draft(row, min(limit, _room(row))) for row in rows]
        guessing = {row.id for row, _ in self._guessing(rows)}
        open_drafts = [d for d in drafts if d.row.id in guessing and d.is_open]
        if self._lookup is not None:
            self._lookup.propose(open_drafts, count)
        for drafter in self._drafters:
            unguessed = [d for d in open_drafts if not d.proposed]
            self._propose(
                drafter, [d for d in unguessed if self._drafter_of(d.row) is drafter], count
            )
        drafts = [self._draft(d.row, 1) if d.row.error is not None else d for d in drafts]
        most = max((len(draft.proposed) for draft in drafts), default=0)
        if most:
            seconds = time.perf_counter() - start
            self._guess_costs.observe(len(rows), 1, seconds / most)
        return drafts

    def _draft(self, row: Row, limit: int) -> Draft:
        return Draft(row, limit, self._end_tokens, self._vocab_size)

    def _propose(self, drafter: Drafter, drafts: Sequence[Draft], count: int) -> None:
        """Have a drafter guess. What it raises is the error of its drafts' rows."""
        try:
            drafter.propose(list(drafts), count)
        except Exception as error:
            for draft in drafts:
                failed = RequestError(
                    f"The drafter {type(drafter).__name__} failed to guess ({type(error).__name__}: {error}). "
                    "Leave it out, or have it guess nothing."
                )
                failed.__cause__ = error
                draft.row.error = draft.row.error or failed

    def count(self, draft: Draft, right: int) -> None:
        """Take note of how many guesses of a draft were right."""
        guesses = self._of(draft.row)
        guesses.rounds += bool(draft.proposed)
        guesses.proposed += len(draft.proposed)
        guesses.accepted += right
        if draft.proposed:  # behind a wrong one nothing is known
            checked = min(len(draft.proposed), right + 1)
            guesses.acceptance.count(checked, right)
            self.overall.count(checked, right)

    def counts(self, row: Row) -> RowGuesses:
        """The guesses for a row so far."""
        return self._of(row)

    def forget(self, rows: Collection[int]) -> None:
        """Drop what is known of rows that have left, by their ids."""
        for row in rows:
            self._rows.pop(row, None)
        self._forget_drafts(rows)

    def _forget_drafts(self, rows: Collection[int]) -> None:
        for drafter in [*self._drafters, *([self._lookup] if self._lookup else [])]:
            try:
                drafter.forget(rows)
            except Exception as error:
                if id(drafter) not in self._warned:  # once
                    self._warned.add(id(drafter))
                    warnings.warn(
                        f"The drafter {type(drafter).__name__} failed to forget rows ({type(error).__name__}: "
                        f"{error}). Answers are right, but what it keeps of rows that have ended may stay.",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _guessing(self, rows: Sequence[Row]) -> list[tuple[Row, RowGuesses]]:
        """The rows that guesses are made for now."""
        pairs = [(row, self._of(row)) for row in rows if row.request.draft]
        return [
            (row, guesses)
            for row, guesses in pairs
            if len(row.tokens) >= guesses.paused_until and self._has_drafter(row)
        ]

    def _has_drafter(self, row: Row) -> bool:
        return self._lookup is not None or self._drafter_of(row) is not None

    def _of(self, row: Row) -> RowGuesses:
        known = self._rows.get(row.id)
        if known is None:
            known = self._rows[row.id] = RowGuesses(self.overall.child())
        return known

    def _drafter_of(self, row: Row) -> Drafter | None:
        adapter = row.request.adapter
        own = self._of_adapters.get(adapter) if isinstance(adapter, str) else None
        return own or self._default


def _room(row: Row) -> int:
    """Tokens that a row may be fed in one step, so that nothing behind its end is computed."""
    room, most = MOST + 1, row.request.max_tokens
    if most >= 0:
        room = min(room, most - len(row.tokens) + len(row.known))
    if row.bound is not None:
        room = min(room, row.bound - row.position)
    return max(1, room)
