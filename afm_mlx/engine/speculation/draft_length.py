"""How many tokens to guess: as many as pay, by what steps cost here and how often guesses are right.

With n guesses, each right with probability a if those before it are, a step gives 1 + a + ... + a^n tokens.
What it costs is measured while the engine runs, for each number of rows and of tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 7
"""Guesses at most: with a row's last token, 8 tokens, for which there are kernels."""

GUESSED_SLOPE = 0.2
"""What another token per row adds to a step, in steps of one, until it is measured."""

_SMOOTHING = 0.2  # share of a new measurement
_FIRST_GUESS, _WEIGHT = 0.7, 4.0  # of guesses that are right, and how many guesses that stands for
_MEMORY = 64  # guesses that an estimate looks back on
_PAUSE = 32  # tokens that a row gets without guesses where they don't pay; twice as many each time


@dataclass
class Acceptance:
    """How often the guesses for a row, or for all of them, were right.

    Args:
        proposed: number of guesses that were checked: those behind a wrong one were not.
        accepted: number of them that were right.
    """

    proposed: float = _WEIGHT
    accepted: float = _WEIGHT * _FIRST_GUESS

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed

    def count(self, proposed: int, accepted: int) -> None:
        """Take note of guesses that were checked, and how many were right."""
        if self.proposed > _MEMORY:
            self.proposed, self.accepted = self.proposed / 2, self.accepted / 2
        self.proposed += proposed
        self.accepted += accepted

    def child(self) -> Acceptance:
        """The estimate that a new row begins with."""
        return Acceptance(_WEIGHT, _WEIGHT * self.rate)

    def tokens(self, guesses: int) -> float:
        """Tokens that a step with so many guesses is expected to give."""
        return sum(self.rate**n for n in range(guesses + 1))


class StepCosts:
    """Seconds of steps that feed every row so many tokens, measured or estimated."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}  # by rows and tokens per row
        self._seen: set[tuple[int, int]] = set()

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Take note of what a step took. The first of its kind, which may have been traced, does not count."""
        kind = rows, tokens
        if kind in self._seen:
            known = self._seconds.get(kind, seconds)
            self._seconds[kind] = known + _SMOOTHING * (seconds - known)
        self._seen.add(kind)

    def of(self, rows: int, tokens: int) -> float | None:
        """Seconds of a step; None while not even one of a token per row was measured."""
        one = self._seconds.get((rows, 1))
        if one is None or (rows, tokens) in self._seconds:
            return self._seconds.get((rows, tokens), one)
        measured = {t: s for (r, t), s in self._seconds.items() if r == rows and t > 1}
        if not measured:
            return one * (1 + GUESSED_SLOPE * (tokens - 1))
        nearest = min(measured, key=lambda t: abs(t - tokens))
        slope = max(0.0, measured[nearest] - one) / (nearest - 1)
        return one + slope * (tokens - 1)


def best_count(
    rows: int,
    acceptances: Sequence[Acceptance],
    costs: StepCosts,
    guess_seconds: float,
) -> int:
    """Number of guesses per row with which a step gives the most tokens per second; 0 for none.

    Args:
        rows: rows of the batch.
        acceptances: of those rows that guess; the others get one token a step.
        costs: of the model's steps.
        guess_seconds: seconds that another guess for all rows takes.
    """

    def speed(count: int) -> float:
        seconds = costs.of(rows, 1 + count)
        assert seconds is not None
        others = rows - len(acceptances)
        tokens = others + sum(acceptance.tokens(count) for acceptance in acceptances)
        return tokens / (seconds + count * guess_seconds)

    if costs.of(rows, 1) is None:
        return 0
    return max(range(MOST + 1), key=speed)


@dataclass
class RowGuesses:
    """The guesses for one row.

    Args:
        acceptance: how often they are right, lately.
        rounds: steps that had guesses for the row.
        proposed: guesses so far.
        accepted: those that became part of the answer.
        paused_until: length of the answer up to which nothing is guessed.
        pauses: how often guessing did not pay.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    paused_until: int = 0
    pauses: int = 0

    def __str__(self) -> str:
        if not self.proposed:
            return "none, because they don't pay here" if self.pauses else "none"
        share = f"{self.accepted} of {self.proposed} tokens were right"
        return f"{share}; off for a while, because they didn't pay" if self.pauses else share

    def pause(self, length: int) -> None:
        """Guess nothing for a while; `length` is that of the answer so far."""
        self.paused_until = length + _PAUSE * 2**self.pauses
        self.pauses += 1
