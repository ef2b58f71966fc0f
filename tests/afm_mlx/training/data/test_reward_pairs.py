"""Batches for a reward model: whole texts, each with the right certainty and grades."""

import dataclasses

import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import GRADED_AXES
from afm_mlx.adapters.reward_head import NO_GRADE
from afm_mlx.errors import DataError
from afm_mlx.training.data.preferences import PreferencePair
from afm_mlx.training.data.reward_pairs import RewardBatches, grades_of
from tests.tools.cases import each


def some_pairs(rng, count):
    """Pairs of different tokens, so that a row says which pair it is of."""
    pairs = []
    for i in range(count):
        sizes = rng.integers(1, 70, 3)
        first = 10 * i + 1
        prompt, chosen, rejected = (
            np.full(size, first + k, np.int32) for k, size in enumerate(sizes)
        )
        grades = (
            {"chosen": {"verbosity": i % 3}, "rejected": {"truthfulness": 2}} if i % 2 else None
        )
        strength = None if i % 4 == 0 else 0.65
        pairs.append(PreferencePair(prompt, chosen, rejected, f"f:{i}", strength, grades))
    return pairs


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_every_pair_is_in_an_epoch_once_and_whole(rng, batch_size):
    pairs = some_pairs(rng, 10)
    batches = RewardBatches(pairs, batch_size=batch_size, seed=4)
    assert (len(batches), batches.per_epoch) == (10, -(-10 // batch_size))
    assert batches.axes == ("verbosity", "truthfulness")
    for epoch in range(2):
        seen = []
        for step in range(batches.per_epoch):
            batch = batches(epoch * batches.per_epoch + step)
            count = batch.weights.size
            inputs, lengths, grades = map(np.array, (batch.inputs, batch.lengths, batch.grades))
            assert batch.inputs.shape[0] == len(lengths) == len(grades) == 2 * count
            for i in range(count):
                number = (inputs[i, 0] - 1) // 10
                pair = pairs[number]
                seen.append(number)
                for row, answer in ((i, pair.chosen), (count + i, pair.rejected)):
                    text = [*pair.prompt, *answer]
                    assert inputs[row, : lengths[row]].tolist() == text
                    assert not inputs[row, lengths[row] :].any() or lengths[row] < len(inputs[row])
                given = batch.certainty[i].item()
                assert given == pytest.approx(1 if number % 4 == 0 else 0.65)
                chosen, rejected = np.full((2, 4), NO_GRADE)
                if number % 2:
                    chosen[GRADED_AXES.index("verbosity")] = number % 3
                    rejected[GRADED_AXES.index("truthfulness")] = 2
                np.testing.assert_array_equal(grades[i], chosen)
                np.testing.assert_array_equal(grades[count + i], rejected)
        assert sorted(seen) == list(range(10))
    rows, length, targets = batches.shape
    assert (rows, targets) == (2 * batches(0).weights.size, 0)
    assert length == batches(0).inputs.shape[1]


def test_figures(rng):
    pairs = some_pairs(rng, 6)
    batches = RewardBatches(pairs, batch_size=2)
    tokens = sum(2 * len(p.prompt) + len(p.chosen) + len(p.rejected) for p in pairs)
    assert batches.n_tokens == tokens
    assert batches.summary == f"6 pairs, {tokens:,} tokens, 6 graded answers"
    assert batches.layout.startswith("2 pairs, ")
    again = RewardBatches(pairs, batch_size=2)
    assert batches.fingerprint == again.fingerprint
    other = dataclasses.replace(pairs[0], grades={"chosen": {"verbosity": 0}})
    changed = RewardBatches([other, *pairs[1:]], batch_size=2)
    assert batches.fingerprint != changed.fingerprint
    assert RewardBatches([dataclasses.replace(pairs[0], grades=None)], batch_size=2).axes == ()


@each(
    "grades",
    [
        3,
        [],
        {"better": {}},
        {"chosen": 3},
        {"chosen": {"beauty": 1}},
        {"chosen": {"verbosity": 3}},
        {"chosen": {"verbosity": -1}},
        {"chosen": {"verbosity": 1.0}},
        {"chosen": {"verbosity": True}},
        {"rejected": {"verbosity": "good"}},
    ],
)
def test_other_grades_are_refused(grades):
    with pytest.raises(DataError, match=r"f:1: 'grades' is .*with the axes instruction_following"):
        grades_of(grades, "f:1")


def test_grades_may_be_missing():
    assert grades_of(None, "f") == grades_of({}, "f") == [[NO_GRADE] * 4] * 2
