"""The tokens that one row is fed in one step: its last one, and those that may follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any

import numpy as np

from afm_mlx.engine.request import MOST_TOKENS
from afm_mlx.engine.row import Row
from afm_mlx.errors import ConstraintError, RequestError, shown
from afm_mlx.guidance.matcher import Matcher, fill_masks


class Draft:
    """The tokens that one row is fed in one step.

    A token that the row's constraint forces is never guessed: it is appended behind the token that forces it.
    Drafters are anybody's, so they read a draft and change it by `extend` and `close` alone.

    Args:
        row: the row; all of its answer was read back.
        limit: tokens that it may be fed, 1 at least.
        end_tokens: ids that end an answer; nothing is guessed behind them.
        vocab_size: number of the model's tokens.
    """

    def __init__(
        self, row: Row, limit: int, end_tokens: Collection[int], vocab_size: int = MOST_TOKENS
    ):
        self._row, self._limit = row, limit
        self._end_tokens, self._vocab_size = end_tokens, vocab_size
        self._fed = [row.last_token, *row.known][:limit]
        self._known = len(self._fed) - 1
        self._masks: dict[int, np.ndarray] = {}
        self._proposed: list[int] = []
        self._follows = len(row.known) > self._known  # a known token, behind the last one fed
        self._matcher: Matcher | None = None
        if row.matcher is not None and not self._follows:
            self._matcher = row.matcher.copy()
            self._look()

    @property
    def row(self) -> Row:
        """The row."""
        return self._row

    @property
    def fed(self) -> tuple[int, ...]:
        """The row's last token, those that are known to follow it, and those that may."""
        return tuple(self._fed)

    @property
    def known(self) -> int:
        """Number of tokens behind the first that are part of the answer already."""
        return self._known

    @property
    def masks(self) -> Mapping[int, np.ndarray]:
        """For indices into `fed`, the tokens that the row's constraint allows there next."""
        return MappingProxyType(self._masks)

    @property
    def proposed(self) -> tuple[int, ...]:
        """Indices into `fed` of the tokens that were guessed; they rise."""
        return tuple(self._proposed)

    @property
    def is_open(self) -> bool:
        """True if another token can be guessed."""
        return not self._follows and len(self._fed) < self._limit

    @property
    def assumed(self) -> list[int]:
        """The tokens behind the answer so far."""
        return self._fed[1 + self._known :]

    @property
    def mask(self) -> np.ndarray | None:
        """The tokens that may follow the last one; None for all."""
        return self._masks.get(len(self._fed) - 1)

    @property
    def drawn(self) -> list[int]:
        """Indices into `fed` behind which a token is drawn: those that stand there are guessed, if any."""
        guessed = [i - 1 for i in self._proposed]
        return guessed if self._follows else [*guessed, len(self._fed) - 1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append draft tokens, up to the draft's limit and as far as the row's constraint allows them.

        A guess that is no token of the model's is the row's error.
        """
        for token in tokens:
            if self.is_open and not self._is_token(token):
                self.row.error = self.row.error or RequestError(
                    f"{shown(token)} was guessed; a guess is an integer, and this model's tokens go from 0 to "
                    f"{self._vocab_size - 1}."
                )
                self.close()
            if not self._add(token):
                return

    def _is_token(self, token: Any) -> bool:
        is_whole = isinstance(token, Integral) and not isinstance(token, bool)
        return is_whole and 0 <= int(token) < self._vocab_size

    def close(self) -> None:
        """Let no more tokens follow."""
        self._limit = len(self._fed)

    def _add(self, token: int) -> bool:
        if not self.is_open or not self._allows(token):
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
            room = self._limit - len(self._fed)
            for token in forced[:room]:
                self._matcher.accept(token)
            self._fed += forced[:room]
            self._follows = len(forced) > room
        except ConstraintError:
            self.close()
        try:
            if self._matcher.is_stopped:
                self.close()
            if not self._follows:
                self._masks[len(self._fed) - 1] = fill_masks([self._matcher])[0]
        except Exception as error:
            self.row.error = self.row.error or error
            self.close()
