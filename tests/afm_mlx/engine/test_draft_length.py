"""How many tokens are drafted: by measured costs and by how many draft tokens are accepted."""

import pytest

from afm_mlx.engine.draft_length import MOST, Acceptance, DraftCounts, StepCosts, best_count


def costs_of(rows, slope, one=10.0):
    costs = StepCosts()
    for tokens in range(1, MOST + 2):
        for _ in range(2):  # the first does not count
            costs.observe(rows, tokens, one * (1 + slope * (tokens - 1)))
    return costs


def test_a_first_measurement_does_not_count():
    costs = StepCosts()
    costs.observe(1, 1, 99.0)
    assert costs.of(1, 1) is None
    assert best_count(1, [Acceptance()], costs, 0.0) == 0
    costs.observe(1, 1, 10.0)
    assert costs.of(1, 1) == 10.0
    assert 10.0 < costs.of(1, 3) < 20.0  # estimated
    costs.observe(1, 5, 500.0)
    costs.observe(1, 5, 20.0)
    assert costs.of(1, 5) == 20.0
    assert costs.of(1, 3) == pytest.approx(15.0)  # between the two that were measured
    costs.observe(1, 5, 30.0)
    assert 20.0 < costs.of(1, 5) < 30.0
    assert costs.of(2, 1) is None


def test_the_best_number_of_draft_tokens_follows_acceptance_and_costs():
    good, poor = Acceptance(100, 95), Acceptance(100, 5)
    cheap, dear = costs_of(1, 0.05), costs_of(1, 1.0)
    assert best_count(1, [good], cheap, 0.0) == MOST
    assert best_count(1, [poor], dear, 0.0) == 0
    assert best_count(1, [good], dear, 0.0) == 0  # a step of n tokens costs n steps
    assert 0 < best_count(1, [good], cheap, 4.0) < MOST  # draft tokens cost something, too
    assert best_count(1, [Acceptance(100, 50)], cheap, 0.0) < MOST
    # One row with good drafts does not pay for eight with bad ones if tokens are expensive.
    assert best_count(8, [good], costs_of(8, 0.5), 0.0) == 0


def test_acceptance_looks_back_a_while_and_new_rows_begin_with_the_others():
    acceptance = Acceptance()
    for _ in range(200):
        acceptance.count(1, 1)
    assert acceptance.rate > 0.97
    assert acceptance.child().rate == pytest.approx(acceptance.rate)
    for _ in range(200):
        acceptance.count(1, 0)
    assert acceptance.rate < 0.05
    assert acceptance.tokens(3) == pytest.approx(sum(acceptance.rate**n for n in range(4)))


def test_pauses_grow():
    counts = DraftCounts()
    counts.pause(10)
    first = counts.paused_until - 10
    counts.pause(100)
    assert counts.paused_until - 100 == 2 * first
    assert counts.pauses == 2
