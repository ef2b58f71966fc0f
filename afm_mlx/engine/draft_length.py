"""How many draft tokens to propose: the number that pays, given what steps cost and how many are accepted.

With n draft tokens, each accepted with probability a if the ones before it are, a step gives 1 + a + ... + a^n
tokens. What a step costs is measured while the engine runs, for each number of rows and of tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 7  # draft tokens at most: with a row's last token, 8 tokens, for which there are kernels
# What another token per row adds to a step, in steps of one token, until it is measured.
ESTIMATED_SLOPE = 0.2
_SMOOTHING = 0.2  # share of a new measurement
_FIRST_RATE = 0.7  # assumed rate of acceptance
_WEIGHT = 4.0  # how many draft tokens it counts for
_MEMORY = 64  # draft tokens that an estimate looks back on
_PAUSE = 32  # tokens that a row gets without drafts where they don't pay; twice as many each time


@dataclass
class Acceptance:
    """How many draft tokens were verified and accepted lately, of one row or of all rows."""

    proposed: float = _WEIGHT
    accepted: float = _WEIGHT * _FIRST_RATE

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed

    def count(self, verified: int, accepted: int) -> None:
        """Record how many draft tokens were verified (those after a rejected one were not) and accepted."""
        if self.proposed > _MEMORY:
            self.proposed, self.accepted = self.proposed / 2, self.accepted / 2
        self.proposed += verified
        self.accepted += accepted

    def child(self) -> Acceptance:
        """Return the estimate that a new row begins with."""
        return Acceptance(_WEIGHT, _WEIGHT * self.rate)

    def tokens(self, count: int) -> float:
        """Return the number of tokens that a step with `count` draft tokens is expected to give."""
        return sum(self.rate**n for n in range(count + 1))


class StepCosts:
    """Seconds of a step, measured or estimated, by the number of rows and of tokens that each row is fed."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}  # by rows and tokens per row
        self._seen: set[tuple[int, int]] = set()

    def observe(self, rows: int, tokens: int, seconds: float) -> None:
        """Record the seconds of a step, see `of`. The first of its kind, which may be traced, doesn't count."""
        kind = rows, tokens
        if kind in self._seen:
            known = self._seconds.get(kind, seconds)
            self._seconds[kind] = known + _SMOOTHING * (seconds - known)
        self._seen.add(kind)

    def of(self, rows: int, tokens: int) -> float | None:
        """Return the seconds of a step in which each of `rows` rows is fed `tokens` tokens.

        What was not measured is estimated from the nearest number of tokens that was, for as many rows. None
        until a step of one token per row was measured.
        """
        one = self._seconds.get((rows, 1))
        if one is None or (rows, tokens) in self._seconds:
            return self._seconds.get((rows, tokens), one)
        measured = {t: s for (r, t), s in self._seconds.items() if r == rows and t > 1}
        if not measured:
            return one * (1 + ESTIMATED_SLOPE * (tokens - 1))
        nearest = min(measured, key=lambda t: abs(t - tokens))
        slope = max(0.0, measured[nearest] - one) / (nearest - 1)
        return one + slope * (tokens - 1)


def best_count(
    rows: int, acceptances: Sequence[Acceptance], costs: StepCosts, draft_seconds: float
) -> int:
    """Return the number of draft tokens per row with which a step gives the most tokens per second, or 0.

    `acceptances` has an entry for each row with draft tokens; the others get one token a step. Another draft
    token for all rows takes `draft_seconds`.
    """

    def speed(count: int) -> float:
        seconds = costs.of(rows, 1 + count)
        assert seconds is not None
        others = rows - len(acceptances)
        tokens = others + sum(acceptance.tokens(count) for acceptance in acceptances)
        return tokens / (seconds + count * draft_seconds)

    if costs.of(rows, 1) is None:
        return 0
    return max(range(MOST + 1), key=speed)


@dataclass
class DraftCounts:
    """The draft tokens of one row."""

    acceptance: Acceptance = field(default_factory=Acceptance)  # how many are accepted, lately
    rounds: int = 0  # steps that had draft tokens for the row
    proposed: int = 0  # draft tokens so far
    accepted: int = 0  # draft tokens that became part of the answer
    paused_until: int = 0  # length of the answer before which nothing is drafted
    pauses: int = 0  # how often drafting did not pay

    def __str__(self) -> str:
        if not self.proposed:
            return "none, because they don't pay here" if self.pauses else "none"
        share = f"{self.accepted} of {self.proposed} tokens were accepted"
        return f"{share}; off for a while, because they didn't pay" if self.pauses else share

    def pause(self, length: int) -> None:
        self.paused_until = length + _PAUSE * 2**self.pauses
        self.pauses += 1
