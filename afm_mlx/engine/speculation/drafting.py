"""How an engine drafts (`Speculation`); how many tokens in each step, and by which drafter (`Drafting`)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.nn as nn

from afm_mlx.engine.batch import RowCaches, vocab_size_of
from afm_mlx.engine.draft_length import MOST, Acceptance, DraftCounts, StepCosts, best_count
from afm_mlx.engine.request import MOST_TOKENS
from afm_mlx.engine.row import Row
from afm_mlx.engine.speculation.draft_model import FEW, DraftModel
from afm_mlx.engine.speculation.draft_tokens import Draft, Drafter, PromptLookup
from afm_mlx.errors import RequestError, shown
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.model import is_afm
from afm_mlx.ranks import Ranks


@dataclass(frozen=True)
class Speculation:
    """How an engine drafts tokens that its model verifies, several in one step.

    Answers have the same tokens as without it. Samplers and logits processors are called for tokens that may be
    rejected, so they must depend on nothing except their arguments.

    Args:
        draft_model: a smaller model with the same vocabulary, or a `Drafter` of your own; pass None for none.
        prompt_lookup: True to propose what followed the last few tokens where they occurred before. That is
            tried first, because it costs nothing.
        adapter_drafts: draft models of adapters, by the names that requests give; rows with other adapters have
            `draft_model`.
        num_draft_tokens: draft tokens at a time, 1 to 7; pass None to let the engine find out how many pay, and
            none where they don't.
    """

    draft_model: nn.Module | Drafter | None = None
    prompt_lookup: bool = False
    adapter_drafts: Mapping[str, nn.Module | Drafter] = field(default_factory=dict)
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

    def check(self, model: nn.Module, sliding_window: bool) -> None:
        """Raise `RequestError` if these options can't be honoured for a model or its cache."""
        if sliding_window:
            raise RequestError(
                "Speculative decoding takes tokens back, and a sliding window has forgotten the tokens before "
                "them. Leave out one of the two."
            )
        for name, draft in {"draft_model": self.draft_model, **self.adapter_drafts}.items():
            methods = getattr(draft, "propose", None), getattr(draft, "forget", None)
            if draft is None or all(map(callable, methods)):
                continue
            if not isinstance(draft, nn.Module):
                raise RequestError(
                    f"{name} is {shown(draft)}; a model is needed, such as load_draft returns, or a "
                    "Drafter with the methods propose and forget."
                )
            sizes = vocab_size_of(draft), vocab_size_of(model)
            if sizes[0] != sizes[1]:
                raise RequestError(
                    f"{name} has {sizes[0]} tokens and the model {sizes[1]}; a draft model has its model's "
                    "vocabulary."
                )
            if not is_afm(draft) and _has_states(draft):
                raise RequestError(
                    f"{name} is a {type(draft).__module__.rpartition('.')[2]} model, whose states can't give "
                    "back rejected tokens. Choose a draft model that has keys and values in all blocks."
                )


class Drafting:
    """Drafts tokens for an engine's rows; for `by_block`, see `RowCaches`.

    Of the ranks of a split model, the first one drafts, and the others are sent its draft tokens.
    """

    def __init__(
        self,
        options: Speculation,
        model: nn.Module,
        end_tokens: Collection[int],
        prefill_step_size: int,
        by_block: bool = False,
        ranks: Ranks | None = None,
    ):
        self._ranks = ranks
        self.costs = StepCosts()  # of the model's steps
        self.overall = Acceptance()  # of all rows' draft tokens
        self._fixed = options.num_draft_tokens
        self._end_tokens, self._vocab_size = end_tokens, vocab_size_of(model) or MOST_TOKENS
        self._lookup = PromptLookup() if options.prompt_lookup else None

        # Adapters that share a draft model share its caches.
        drafters: dict[int, Drafter] = {
            id(given): DraftModel(given, prefill_step_size, by_block)
            if isinstance(given, nn.Module) and not hasattr(given, "propose")
            else given
            for given in [options.draft_model, *options.adapter_drafts.values()]
            if given is not None
        }
        self._drafters = list(drafters.values())
        self._default = drafters.get(id(options.draft_model))
        self._of_adapters = {
            name: drafters[id(given)] for name, given in options.adapter_drafts.items()
        }
        self._warned: set[int] = set()
        self._draft_costs = StepCosts()

    @property
    def _draft_models(self) -> list[DraftModel]:
        return [drafter for drafter in self._drafters if isinstance(drafter, DraftModel)]

    @property
    def draft_caches(self) -> list[RowCaches]:
        return [drafter.row_caches for drafter in self._draft_models]

    @property
    def caches(self) -> list[Cache]:
        """The draft models' caches; safe in any thread."""
        return [cache for drafter in self._draft_models for cache in drafter.caches]

    @property
    def surplus(self) -> int:
        """Maximum number of tokens fed to a row in a step that its cache drops again: rejected, or padding."""
        return max(MOST, FEW) if self._draft_models else MOST

    def plan(self, rows: Sequence[Row]) -> int:
        """Return the number of draft tokens for each row in the next step; 0 if a plain step is faster."""
        for row in rows:
            if row.draft_counts is None:
                row.draft_counts = DraftCounts(self.overall.child())
        if not rows or self._ranks is None:
            return self._plan(rows)
        count: int = self._ranks.first(self._plan(rows) if self._ranks.is_first else None)
        return count

    def _plan(self, rows: Sequence[Row]) -> int:
        drafting = self._drafting(rows)
        if not drafting:
            return 0
        if self._fixed is not None:
            return self._fixed
        acceptances = [counts.acceptance for _, counts in drafting]
        draft_seconds = self._draft_costs.of(len(rows), 1) or 0.0
        one = self.costs.of(len(rows), 1)
        if one is None:
            return 0
        count = best_count(len(rows), acceptances, self.costs, draft_seconds)
        several = self.costs.of(len(rows), 1 + count) or one
        slowdown = (several + count * draft_seconds) / one
        for row, counts in drafting:
            if not count or counts.acceptance.tokens(count) < slowdown:
                counts.pause(len(row.tokens))
                self.forget([row.id])
        return count if self._drafting(rows) else 0

    def drafts(self, rows: Sequence[Row], count: int, limit: int) -> list[Draft]:
        """Return what each row is fed next: up to `count` draft tokens, and no more than `limit` in all."""
        if self._ranks is None:
            return self._drafted(rows, count, limit)
        if self._ranks.is_first:
            drafts = self._drafted(rows, count, limit)
            tokens = [[draft.fed[i] for i in draft.proposed] for draft in drafts]
            errors = [None if row.error is None else str(row.error) for row in rows]
            self._ranks.first([tokens, errors])
            return drafts
        tokens, errors = self._ranks.first(None)
        for row, error in zip(rows, errors, strict=True):
            if error is not None:
                row.error = row.error or RequestError(error)
        drafts = [self._draft(r, 1 if r.error else min(limit, _most_tokens(r))) for r in rows]
        for draft, proposed in zip(drafts, tokens, strict=True):
            draft.extend(proposed)
        return drafts

    def _drafted(self, rows: Sequence[Row], count: int, limit: int) -> list[Draft]:
        start = time.perf_counter()
        drafts = [self._draft(row, min(limit, _most_tokens(row))) for row in rows]
        drafting = {row.id for row, _ in self._drafting(rows)}
        open_drafts = [d for d in drafts if d.row.id in drafting and d.is_open]
        if self._lookup is not None:
            self._lookup.propose(open_drafts, count)
        for drafter in self._drafters:
            own = [d for d in open_drafts if not d.proposed and self._drafter_of(d.row) is drafter]
            try:
                drafter.propose(own, count)
            except Exception as error:
                for draft in own:
                    failed = RequestError(
                        f"The drafter {type(drafter).__name__} failed to propose tokens "
                        f"({type(error).__name__}: {error}). Leave it out, or have it propose nothing."
                    )
                    failed.__cause__ = error
                    draft.row.error = draft.row.error or failed
        drafts = [self._draft(d.row, 1) if d.row.error is not None else d for d in drafts]
        most = max((len(draft.proposed) for draft in drafts), default=0)
        if most:
            seconds = time.perf_counter() - start
            self._draft_costs.observe(len(rows), 1, seconds / most)
        return drafts

    def _draft(self, row: Row, limit: int) -> Draft:
        return Draft(row, limit, self._end_tokens, self._vocab_size)

    def count(self, draft: Draft, accepted: int) -> None:
        counts, proposed = draft.row.draft_counts, len(draft.proposed)
        assert counts is not None
        if proposed:
            counts.rounds += 1
            counts.proposed += proposed
            counts.accepted += accepted
            verified = min(proposed, accepted + 1)  # nothing is known of those after a rejected one
            counts.acceptance.count(verified, accepted)
            self.overall.count(verified, accepted)

    def forget(self, rows: Collection[int]) -> None:
        """Have all drafters drop what they keep for rows, by their ids."""
        for drafter in [*self._drafters, *([self._lookup] if self._lookup else [])]:
            try:
                drafter.forget(rows)
            except Exception as error:
                if id(drafter) not in self._warned:  # once
                    self._warned.add(id(drafter))
                    warnings.warn(
                        f"The drafter {type(drafter).__name__} failed to forget rows ({type(error).__name__}: "
                        f"{error}). Answers are right, but it may keep memory of rows that have ended.",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    def _drafting(self, rows: Sequence[Row]) -> list[tuple[Row, DraftCounts]]:
        """Return the rows that have draft tokens in the next step, with their counts."""
        return [
            (row, row.draft_counts)
            for row in rows
            if row.request.draft
            and row.draft_counts is not None
            and len(row.tokens) >= row.draft_counts.paused_until
            and (self._lookup is not None or self._drafter_of(row) is not None)
        ]

    def _drafter_of(self, row: Row) -> Drafter | None:
        adapter = row.request.adapter
        own = self._of_adapters.get(adapter) if isinstance(adapter, str) else None
        return own or self._default


def _most_tokens(row: Row) -> int:
    """Return how many tokens a row may be fed in one step, so that nothing past its end is computed."""
    most, max_tokens = MOST + 1, row.request.max_tokens
    if max_tokens >= 0:
        most = min(most, max_tokens - len(row.tokens) + len(row.pending))
    if row.bound is not None:
        most = min(most, row.bound - row.position)
    return max(1, most)


def _has_states(model: nn.Module) -> bool:
    from afm_mlx.engine.zoo_caches import has_states

    return has_states(RowCaches(model, "float", None).make())
