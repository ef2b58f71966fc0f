"""Which groups are kept, and shares for a size or a speed."""

import numpy as np
import pytest

from afm_mlx.adapters.task_mask import apply_mask, feed_forwards
from afm_mlx.errors import ConfigError
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.pruning.kept_groups import (
    first_groups,
    group_scores,
    kept_counts,
    kept_groups,
    share_for_bytes,
    share_for_speed,
    step_bytes,
)


@pytest.fixture(params=["model", "packed"])
def source(request):
    return ModelSource.open(request.getfixturevalue(request.param))


def test_groups_sum_their_channels(rng):
    scores = rng.random((3, 12))
    assert np.allclose(group_scores(scores, 4)[1], [scores[1, i : i + 4].sum() for i in (0, 4, 8)])
    assert np.array_equal(group_scores(scores, 1), scores)


@pytest.mark.parametrize(
    ("share", "count"), [(1, 6), (0.5, 3), (0.25, 2), (0.24, 1), (0.01, 1), (0.75, 5)]
)
def test_equal_shares_are_rounded_and_never_nothing(rng, share, count):
    scores = rng.random((4, 6))
    assert kept_counts(scores, share).tolist() == [count] * 4
    kept = kept_groups(scores, kept_counts(scores, share))
    for row, found in zip(scores, kept, strict=True):
        assert found.sum() == count
        assert row[found].min() >= row[~found].max(initial=0)


def test_of_equal_scores_the_first_are_kept():
    assert kept_groups(np.ones((1, 4)), np.array([2])).tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75, 1])
def test_sensitive_blocks_keep_more_of_the_same_total(rng, share):
    scores = rng.random((5, 16)) * np.array([[1], [5], [0.1], [2], [1]])
    counts, equal = kept_counts(scores, share, "sensitivity"), round(share * 16)
    assert counts.sum() == 5 * equal
    least = max(1, equal // 2)
    assert least <= counts.min() <= counts.max() <= 16
    # Every group beyond a block's least is among the highest of those that are not: a plain search finds them.
    chosen = {(b, g) for b in range(5) for g in np.argsort(-scores[b])[:least]}
    for _, block, place in sorted(
        ((scores[b, g], b, g) for b in range(5) for g in range(16)), reverse=True
    ):
        if len(chosen) < 5 * equal:
            chosen.add((block, place))
    assert counts.tolist() == [sum(b == block for b, _ in chosen) for block in range(5)]
    if share == 0.5:
        assert counts[1] > counts[2]


def test_the_share_for_bytes_is_the_largest_that_fits(source):
    inside, rest = step_bytes(source.load())
    for target in (rest + inside // 2, rest + inside // 6, rest + inside - 1):
        groups = round(share_for_bytes(source.load(), target, 16) * 6)
        for kept in (groups, groups + 1):
            model = source.load()
            apply_mask(model, first_groups(feed_forwards(model), 6, kept, 16))
            assert (sum(step_bytes(model)) <= target) == (kept == groups)


@pytest.mark.parametrize(("target", "fault"), [(10, "out of reach"), (10**9, "needs no mask")])
def test_bytes_out_of_reach(source, target, fault):
    with pytest.raises(ConfigError, match=f"target_bytes is .*{fault}.*allowed are"):
        share_for_bytes(source.load(), target, 16)


def measured(model) -> float:
    """Tokens per second of a machine that takes 10 ms, and 5 ms for each sixth of the channels."""
    width = feed_forwards(model)[0].width
    return 1 / (0.010 + 0.005 * width / 16)


@pytest.mark.parametrize(
    ("seconds", "groups"), [(0.0251, 3), (0.0351, 5), (0.0151, 1), (0.0399, 5)]
)
def test_the_share_for_a_speed(source, seconds, groups):
    assert share_for_speed(source.load(), 1 / seconds, 16, measured) == groups / 6


@pytest.mark.parametrize(("speed", "fault"), [(20, "needs no mask"), (90, "out of reach")])
def test_a_speed_out_of_reach(source, speed, fault):
    with pytest.raises(
        ConfigError, match=f"tokens_per_second is {speed}, .*{fault}.*gives 25.0, .*66.7"
    ):
        share_for_speed(source.load(), speed, 16, measured)
