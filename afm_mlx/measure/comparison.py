"""Differences between models that answered the same questions, and how certain they are.

    difference = mean(b - a)        margin = 1.96 * std(b - a) / sqrt(n)

Scores are paired by question: what is hard for both models cancels out, so the interval is narrower than the
two models' own standard errors suggest (Miller, "Adding Error Bars to Evals", 2024, section 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """A model's score in a task.

    Args:
        value: the score.
        questions: the score of each question; None if `value` is not their mean.
    """

    value: float
    questions: Sequence[float] | None = None


Scores = Mapping[tuple[str, str], Score]
"""A model's scores by task and metric."""


@dataclass(frozen=True)
class Difference:
    """What a score differs from another's by; `margin` is half of its 95 % interval, None if unknown."""

    value: float
    margin: float | None


def difference(first: Score, other: Score) -> Difference:
    """Return the difference of `other` from `first`, which have the same questions in the same order."""
    if first.questions is None or other.questions is None:
        return Difference(other.value - first.value, None)
    each = np.subtract(other.questions, first.questions, dtype=np.float64)
    if len(each) < 2:
        return Difference(other.value - first.value, None)
    return Difference(float(each.mean()), 1.96 * float(each.std(ddof=1)) / math.sqrt(len(each)))


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share of `count` trials, which stays within 0 and 1."""
    z = 1.96
    middle = share + z * z / (2 * count)
    margin = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (middle - margin) / (1 + z * z / count), (middle + margin) / (1 + z * z / count)
