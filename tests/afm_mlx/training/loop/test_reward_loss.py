"""The loss of a reward model against plain torch, values and gradients, and what it is least for."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import GRADED_AXES, RewardUse
from afm_mlx.adapters.reward_head import NO_GRADE, RewardHead
from afm_mlx.errors import ConfigError, TrainingError
from afm_mlx.training.data.reward_pairs import RewardBatch
from afm_mlx.training.loop.reward_loss import RewardLoss, grade_losses, ranking_losses
from tests.tools.cases import each

torch = pytest.importorskip("torch")
AXES = ("verbosity", "harmlessness")
PAIRS, DIM = 5, 24


def of_torch(states, weights, certainty, grades, head, grade_weight):
    """The formula, line by line: rewards and grades of 2 P states (2 P, D), the chosen answers first."""
    functional = torch.nn.functional
    rewards = states @ head["reward"]
    better, worse = rewards[:PAIRS], rewards[PAIRS:]
    total = torch.zeros(())
    for i in range(PAIRS):
        p = certainty[i]
        rank = -p * functional.logsigmoid(better[i] - worse[i])
        rank = rank - (1 - p) * functional.logsigmoid(worse[i] - better[i])
        graded = torch.zeros(())
        for axis in AXES:
            for row in (i, PAIRS + i):
                grade = grades[row][GRADED_AXES.index(axis)]
                if grade == NO_GRADE:
                    continue
                layers = [
                    head[f"grades.{axis}.layers.{n}.{part}"]
                    for n in (0, 2)
                    for part in ("weight", "bias")
                ]
                inner = functional.silu(states[row] @ layers[0].T + layers[1])
                logits = inner @ layers[2].T + layers[3]
                graded = graded - functional.log_softmax(logits, 0)[grade]
        total = total + weights[i] * (rank + grade_weight * graded)
    return total


class Stateless(nn.Module):
    """A model whose states are given, and its head."""

    def __init__(self, head):
        super().__init__()
        self.reward_head = head


def drawn(rng):
    """A batch of random states, which stand for tokens, and a head of random numbers."""
    states = rng.normal(size=(2 * PAIRS, DIM)).astype(np.float32)
    grades = rng.integers(-1, 3, (2 * PAIRS, 4)).astype(np.int32)
    certainty = np.array([0.95, 0.85, 0.75, 0.65, 1.0], np.float32)
    weights = rng.uniform(0.5, 2, PAIRS).astype(np.float32)
    head = RewardHead(DIM, RewardUse(AXES), seed=int(rng.integers(1 << 20)))
    head.reward = mx.array(rng.normal(0, 0.3, DIM).astype(np.float32))
    batch = RewardBatch(states, np.ones(2 * PAIRS), certainty, grades, weights)
    return RewardBatch(*map(mx.array, batch)), head


@pytest.fixture(autouse=True)
def given_states(monkeypatch):
    """The states of a batch are its inputs."""
    name = "afm_mlx.training.loop.reward_loss.pooled_states"
    monkeypatch.setattr(name, lambda model, inputs, lengths, pooling: inputs)


@each("grade_weight", [0.0, 0.1, 2.0])
def test_values_and_gradients_are_torchs(rng, grade_weight):
    batch, head = drawn(rng)
    model, loss = Stateless(head), RewardLoss(grade_weight)
    value, gradients = nn.value_and_grad(model, lambda batch: loss(model, batch)[0])(batch)
    tensors = {
        name: torch.tensor(np.array(array), requires_grad=True)
        for name, array in nn.utils.tree_flatten(head.parameters())
    }
    given = [torch.tensor(np.array(each_array)) for each_array in batch]
    wanted = of_torch(given[0], given[4], given[2], np.array(batch.grades), tensors, grade_weight)
    wanted.backward()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, found in nn.utils.tree_flatten(gradients["reward_head"]):
        of_it = tensors[name].grad
        np.testing.assert_allclose(found, 0 if of_it is None else of_it, atol=1e-5, rtol=1e-5)


def test_metrics_are_weighted_sums(rng):
    batch, head = drawn(rng)
    _, metrics = RewardLoss()(Stateless(head), batch)
    rewards = np.array(batch.inputs @ head.reward)
    weights, margins = np.array(batch.weights), rewards[:PAIRS] - rewards[PAIRS:]
    assert metrics["accuracy"].item() == pytest.approx(weights[margins > 0].sum(), rel=1e-5)
    assert metrics["margin"].item() == pytest.approx((weights * margins).sum(), rel=1e-4)
    assert metrics["chosen_reward"].item() == pytest.approx(
        (weights * rewards[:PAIRS]).sum(), rel=1e-4
    )
    assert "grade_loss" in metrics
    plain = RewardHead(DIM, RewardUse())
    _, metrics = RewardLoss()(Stateless(plain), batch)
    assert "grade_loss" not in metrics
    # All rewards begin equal, and an equal pair is no success.
    assert metrics["accuracy"].item() == 0


@each("certainty, margin", [(0.95, 2.944439), (0.65, 0.619039), (0.5, 0.0)])
def test_the_least_loss_is_at_the_margin_of_the_labels_probability(certainty, margin):
    p = mx.array([certainty])
    slope = mx.grad(lambda m: ranking_losses(m, p).sum())
    assert slope(mx.array([margin])).item() == pytest.approx(0, abs=1e-6)
    assert slope(mx.array([margin - 0.1])).item() < 0 < slope(mx.array([margin + 0.1])).item()


def test_a_certain_pair_has_bradley_and_terrys_likelihood():
    losses = ranking_losses(mx.array([0.0, 3.0, -200.0]), mx.ones(3))
    np.testing.assert_allclose(losses, [np.log(2), np.log1p(np.exp(-3)), 200], rtol=1e-6)


def test_a_missing_grade_adds_nothing(rng):
    logits = {axis: mx.array(rng.normal(size=(2, 3)).astype(np.float32)) for axis in AXES}
    grades = np.full((2, 4), NO_GRADE, np.int32)
    np.testing.assert_array_equal(grade_losses(logits, mx.array(grades)), [0, 0])
    grades[0, GRADED_AXES.index("verbosity")] = 1
    grades[0, GRADED_AXES.index("truthfulness")] = 2  # no head has it
    found = grade_losses(logits, mx.array(grades))
    wanted = mx.logsumexp(logits["verbosity"][0]) - logits["verbosity"][0, 1]
    np.testing.assert_allclose(found, [wanted.item(), 0], rtol=1e-5)


def test_a_head_is_needed(rng):
    batch, head = drawn(rng)
    with pytest.raises(TrainingError, match="no reward head to measure"):
        RewardLoss()(nn.Module(), batch)
    value, _ = RewardLoss(head=head)(nn.Module(), batch)
    assert value.item() == RewardLoss()(Stateless(head), batch)[0].item()


@each("weight", [-0.1, float("nan"), float("inf")])
def test_other_weights_are_refused(weight):
    with pytest.raises(ConfigError, match="The grades' weight is"):
        RewardLoss(weight)
