"""The tokens that one row is fed in one step: its last one, and those that may follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from afm_mlx.engine.request import MOST_TOKENS
from afm_mlx.engine.row import Row
from afm_mlx.errors import ConstraintError, RequestError, shown
from afm_mlx.guidance.matcher import Matcher, fill_masks


class Draft:
    """The tokens that one row is fed in one step.

    A token that the row's constraint forces is never guessed: it is appended behind the token that forces it.

    Args:
        row: the row; all of its answer was read back.
        limit: tokens that it may be fed, 1 at least.
        end_tokens: ids that end an answer; nothing is guessed behind them.
        vocab_size: number of the model's tokens.

    Attributes:
        fed: the row's last token, those that are known to follow it, and those that may.
        known: number of tokens behind the first that are part of the answer already.
        masks: for indices into `fed`, the tokens that the row's constraint allows there next.
        proposed: indices into `fed` of the tokens that were guessed.
    """

    def __init__(
        self, row: Row, limit: int, end_tokens: Collection[int], vocab_size: int = MOST_TOKENS
    ):
        self.row, self.limit = row, limit
        self._end_tokens, self._vocab_size = end_tokens, vocab_size
        self.fed = [row.last_token, *row.known][:limit]
        self.known = len(self.fed) - 1
        self.masks: dict[int, np.ndarray] = {}
        self.proposed: set[int] = set()
        self._follows = len(row.known) > self.known  # a known token, behind the last one fed
        self._matcher: Matcher | None = None
        if row.matcher is not None and not self._follows:
            self._matcher = row.matcher.copy()
            self._look()

    @property
    def is_open(self) -> bool:
        """Whether another token can be guessed."""
        return not self._follows and len(self.fed) < self.limit

    @property
    def assumed(self) -> list[int]:
        """The tokens behind the answer so far."""
        return self.fed[1 + self.known :]

    @property
    def mask(self) -> np.ndarray | None:
        """The tokens that may follow the last one; None for all."""
        return self.masks.get(len(self.fed) - 1)

    @property
    def drawn(self) -> list[int]:
        """Indices into `fed` behind which a token is drawn: those that stand there are guessed, if any."""
        guessed = [i - 1 for i in sorted(self.proposed)]
        return guessed if self._follows else [*guessed, len(self.fed) - 1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Guess that these tokens follow, as far as there is room and the row's constraint allows them.

        A guess that is no token of the model's is the row's error.
        """
        for token in tokens:
            if self.is_open and not self._is_token(token):
                self.row.error = self.row.error or RequestError(
                    f"{shown(token)} was guessed; a guess is an integer, and this model's tokens go from 0 to "
                    f"{self._vocab_size - 1}."
                )
                self.limit = len(self.fed)
            if not self._add(token):
                return

    def _is_token(self, token: Any) -> bool:
        is_whole = isinstance(token, Integral) and not isinstance(token, bool)
        return is_whole and 0 <= int(token) < self._vocab_size

    @property
    def is_sound(self) -> bool:
        """True if the row can be fed this, whatever a drafter has done to it."""
        return len(self.fed) <= max(1, self.limit) and all(map(self._is_token, self.fed))

    def _add(self, token: int) -> bool:
        if not self.is_open or not self._allows(token):
            return False
        if self._matcher is not None:
            try:
                self._matcher.accept(token)
            except ConstraintError:  # too complex to be followed, as the row will find out
                self.limit = len(self.fed)
                return False
        self.proposed.add(len(self.fed))
        self.fed.append(int(token))
        if token in self._end_tokens:
            self.limit = len(self.fed)
        elif self._matcher is not None:
            self._look()
        return True

    def _allows(self, token: int) -> bool:
        mask = self.mask
        if mask is None:
            return True
        word = token // 32
        return word < len(mask) and bool(mask[word] >> np.uint32(token % 32) & np.uint32(1))

    def _look(self) -> None:
        """Append what the constraint forces now, and find out what it allows behind that."""
        assert self._matcher is not None
        try:
            forced = self._matcher.forced()
            room = self.limit - len(self.fed)
            for token in forced[:room]:
                self._matcher.accept(token)
            self.fed += forced[:room]
            self._follows = len(forced) > room
        except ConstraintError:
            self.limit = len(self.fed)
        try:
            if self._matcher.is_stopped:
                self.limit = len(self.fed)
            if not self._follows:
                self.masks[len(self.fed) - 1] = fill_masks([self._matcher])[0]
        except Exception as error:
            self.row.error, self.limit = self.row.error or error, len(self.fed)
