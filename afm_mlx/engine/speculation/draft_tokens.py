"""Draft tokens of one row in one step, who proposes them, and the drafter that looks them up in the prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from afm_mlx.engine.request import MOST_TOKENS
from afm_mlx.engine.row import Row
from afm_mlx.errors import ConstraintError, RequestError, shown

if TYPE_CHECKING:
    from afm_mlx.guidance.matcher import Matcher


class Draft:
    """The tokens that one row is fed in one step: its last one, pending tokens, and draft tokens.

    A token that the row's constraint forces is not drafted: it is appended after the token that forces it.
    Drafters are callers' code, so they read a draft and change it by `extend` and `close` alone.
    """

    def __init__(
        self, row: Row, limit: int, end_tokens: Collection[int], vocab_size: int = MOST_TOKENS
    ):
        self._row = row
        self._limit, self._end_tokens, self._vocab_size = limit, end_tokens, vocab_size
        self._fed = [row.last_token, *row.pending][:limit]
        self._n_pending = len(self._fed) - 1
        self._masks: dict[int, np.ndarray] = {}
        self._proposed: list[int] = []
        # True if a known token follows the last one fed.
        self._is_followed = len(row.pending) > self._n_pending
        self._matcher: Matcher | None = None
        if row.matcher is not None and not self._is_followed:
            self._matcher = row.matcher.copy()
            self._follow_constraint()

    @property
    def row(self) -> Row:
        return self._row

    @property
    def n_pending(self) -> int:
        """Number of pending tokens in `fed`: forced by the constraint, and not in the cache yet."""
        return self._n_pending

    @property
    def fed(self) -> tuple[int, ...]:
        """The row's last token, `n_pending` pending tokens, and the tokens that are assumed to follow."""
        return tuple(self._fed)

    @property
    def masks(self) -> Mapping[int, np.ndarray]:
        """The tokens that the row's constraint allows next, by the index into `fed` that they follow."""
        return MappingProxyType(self._masks)

    @property
    def proposed(self) -> tuple[int, ...]:
        """Indices into `fed` of the draft tokens, in order."""
        return tuple(self._proposed)

    @property
    def is_open(self) -> bool:
        """True if another draft token can be appended."""
        return not self._is_followed and len(self._fed) < self._limit

    @property
    def assumed(self) -> list[int]:
        """The tokens that are assumed to follow the answer so far."""
        return self._fed[1 + self.n_pending :]

    @property
    def mask(self) -> np.ndarray | None:
        """The tokens that may follow the last one; None for all."""
        return self._masks.get(len(self._fed) - 1)

    @property
    def drawn(self) -> list[int]:
        """Indices into `fed` of the tokens after which the model draws one of its own.

        These are the token before each draft token, and the last of `fed`, unless a known token follows it.
        """
        before = [i - 1 for i in self._proposed]
        return before if self._is_followed else [*before, len(self._fed) - 1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append draft tokens, up to the draft's limit and as far as the row's constraint allows them.

        If one is not a token of the model, nothing is raised: `Row.error` is set, which ends the row.
        """
        for token in tokens:
            is_whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if self.is_open and not (is_whole and 0 <= token < self._vocab_size):
                self.row.error = self.row.error or RequestError(
                    f"A drafter proposed {shown(token)}; a draft token is an integer, and this model's tokens "
                    f"go from 0 to {self._vocab_size - 1}."
                )
                self.close()
            if not self._add(token):
                return

    def close(self) -> None:
        """Refuse further draft tokens: `is_open` is False from now on."""
        self._limit = len(self._fed)

    def _add(self, token: int) -> bool:
        """Append a draft token, or return False if the draft is closed or the constraint doesn't take it."""
        mask = self.mask
        if not self.is_open or not (mask is None or _allows(mask, token)):
            return False
        if self._matcher is not None:
            try:
                self._matcher.accept(token)
            except ConstraintError:  # too complex to be followed, as the row will find out
                self.close()
                return False
        self._proposed.append(len(self._fed))
        self._fed.append(int(token))
        if token in self._end_tokens:
            self.close()
        elif self._matcher is not None:
            self._follow_constraint()
        return True

    def _follow_constraint(self) -> None:
        """Append what the constraint forces now, and find out what it allows after that."""
        from afm_mlx.guidance.matcher import fill_masks

        assert self._matcher is not None
        try:
            forced = self._matcher.forced()
            left = self._limit - len(self._fed)
            for token in forced[:left]:
                self._matcher.accept(token)
            self._fed += forced[:left]
            self._is_followed = len(forced) > left
        except ConstraintError:
            self.close()
        try:
            if self._matcher.is_stopped:
                self.close()
            if not self._is_followed:
                self._masks[len(self._fed) - 1] = fill_masks([self._matcher])[0]
        except Exception as error:
            self.row.error = self.row.error or error
            self.close()


def _allows(mask: np.ndarray, token: int) -> bool:
    word = token // 32
    return word < len(mask) and bool(mask[word] >> np.uint32(token % 32) & np.uint32(1))


@runtime_checkable
class Drafter(Protocol):
    """Proposes draft tokens for rows.

    If `propose` raises, the rows of its drafts end with the error in their last responses. If `forget` raises,
    one warning is issued, because no answer depends on it.
    """

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        """Append up to `count` draft tokens to each draft, by `Draft.extend`."""

    def forget(self, rows: Iterable[int]) -> None:
        """Drop what is kept for the rows of these ids."""


LENGTHS = (4, 3, 2)  # numbers of last tokens that `PromptLookup` looks for, the longest first


class PromptLookup:
    """Proposes what followed the last few tokens where they occurred before in prompt and answer.

    Answers that copy from their prompt (extraction, edits, code) are predicted well, and at no cost.

    Source: Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self) -> None:
        # By row: its tokens, and the index after the last occurrence of every few tokens.
        self._known: dict[int, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        for draft in drafts:
            draft.extend(self._following(draft.row, draft.assumed, count))

    def forget(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._known.pop(row, None)

    def _following(self, row: Row, assumed: Sequence[int], count: int) -> list[int]:
        """Return up to `count` tokens that followed the row's last and assumed tokens before."""
        tokens, after = self._known.setdefault(row.id, ([], {}))
        prompt, done = row.request.prompt, len(tokens)
        new = row.tokens[max(0, done - len(prompt)) :]
        for token in [*prompt[done:], *new]:
            # What ends here is found only once something follows it.
            for length in LENGTHS:
                if len(tokens) >= length:
                    after[tuple(tokens[-length:])] = len(tokens)
            tokens.append(token)
        last = [*tokens[-max(LENGTHS) :], *assumed]
        for length in LENGTHS:
            at = after.get(tuple(last[-length:])) if len(last) >= length else None
            if at is not None:
                return tokens[at : at + count]
        return []
