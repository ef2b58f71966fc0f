"""Differences of paired scores, and intervals that hold as often as they say."""

import numpy as np
import pytest

from afm_mlx.measure.comparison import Difference, Score, difference


def test_by_hand():
    first, other = Score(0.5, [1, 0, 1, 0]), Score(0.75, [1, 1, 1, 0])
    # 0, 1, 0, 0: variance 3/4 * 1/3
    assert difference(first, other) == Difference(0.25, pytest.approx(1.96 * (0.25 / 4) ** 0.5))
    assert difference(other, first).value == -0.25
    assert difference(first, first) == Difference(0, 0)


def test_without_questions_there_is_no_interval():
    assert difference(Score(2.0), Score(3.0)) == Difference(1.0, None)
    assert difference(Score(2.0, [1, 3]), Score(3.0)) == Difference(1.0, None)
    assert difference(Score(0.0, [0]), Score(1.0, [1])) == Difference(1.0, None)
    assert difference(Score(0.5, [0, 1]), Score(1.0, [1, 1])).margin is not None


def test_the_interval_holds_in_95_of_100_cases(rng):
    """Questions differ in how hard they are, for both models alike."""
    held = 0
    for _ in range(400):
        easy = rng.random(200)
        first = (rng.random(200) < easy).astype(float)
        other = np.where(rng.random(200) < 0.8, first, rng.random(200) < easy)
        found = difference(Score(first.mean(), first), Score(other.mean(), other))
        held += abs(found.value) <= found.margin
    assert 360 <= held <= 396
