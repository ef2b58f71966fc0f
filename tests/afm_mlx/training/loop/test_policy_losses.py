"""Policy losses against plain torch, and what their gradients are in expectation."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.training.data.rollouts import AnswerBatch
from afm_mlx.training.loop.policy_losses import PolicyLoss, leave_one_out, standardized

torch = pytest.importorskip("torch")

GROUPS, SIZE, TOKENS = 3, 4, 5
ANSWERS = GROUPS * SIZE


@pytest.fixture
def drawn(rng):
    """Log-probabilities h, old and reference (A, M), rewards (A,) with a group of equal ones, and the mask."""
    h, old, reference = -rng.exponential(1, (3, ANSWERS, TOKENS)).astype(np.float32)
    old = h + rng.normal(0, 0.3, h.shape).astype(np.float32)  # some ratios are clipped
    reward = rng.normal(0, 1, ANSWERS).astype(np.float32)
    reward[:SIZE] = 0.5
    lengths = rng.integers(1, TOKENS + 1, ANSWERS)
    counted = (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)
    counted[-1] = 0  # an answer that is left out
    return h, old, reference, reward, counted


def by_torch(objective, h, old, reference, reward, counted, beta, gamma, clip, high, kind, longest):
    """TRL's formulas, answer by answer."""
    groups, losses = reward.view(GROUPS, SIZE), []
    sums = (counted * (old - reference)).sum(1)
    shaped = (reward - beta * sums).view(GROUPS, SIZE)
    for i in range(len(h)):
        group, place = divmod(i, SIZE)
        mask = counted[i] == 1
        new, before, ref = h[i][mask], old[i][mask], reference[i][mask]
        if objective == "grpo":
            a = (reward[i] - groups[group].mean()) / (groups[group].std() + 1e-4)
            rho = torch.exp(new - before)
            surrogate = torch.min(rho * a, torch.clamp(rho, 1 - clip, 1 + high) * a)
            k3 = torch.exp(ref - new) - (ref - new) - 1
            total = (-surrogate + beta * k3).sum()
            n = {"grpo": mask.sum(), "bnpo": counted.sum() / len(h), "dr_grpo": longest}[kind]
            losses.append(total / max(n, 1))
            continue
        others = [shaped[group][j] for j in range(SIZE) if j != place]
        a = (shaped[group][place] - sum(others) / (SIZE - 1)).detach()
        change = (new - before).sum()
        if objective == "rloo":
            losses.append(-a * new.sum())
        else:
            rho = torch.exp(change)
            losses.append(-rho * a + gamma * (rho * change - rho + 1))
    return torch.stack(losses)


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("objective", "kind"),
    [("grpo", "grpo"), ("grpo", "bnpo"), ("grpo", "dr_grpo"), ("rloo", "grpo"), ("mdloo", "grpo")],
)
def test_values_and_gradients_are_torchs(drawn, objective, kind, beta):
    h, *others, counted = drawn
    loss = PolicyLoss(objective, ("exact",), SIZE, beta, 0.7, 0.2, 0.3, kind, 9)

    def total(h):
        arrays = [*map(mx.array, others), mx.array(counted)]
        if not beta:
            arrays[1] = None  # no reference
        return loss.of_answers(h, *arrays)[0].sum()

    value, gradient = mx.value_and_grad(total)(mx.array(h))
    theirs = torch.tensor(h, requires_grad=True)
    constants = [torch.tensor(each) for each in (*others, counted)]
    wanted = by_torch(objective, theirs, *constants, beta, 0.7, 0.2, 0.3, kind, 9).sum()
    wanted.backward()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(np.array(gradient), theirs.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_advantages_within_groups():
    rewards = mx.array([1.0, 0, 0, 0, 2, 2, 2, 2])
    assert leave_one_out(rewards, 4).tolist() == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3, *[0] * 4]
    )
    found = standardized(rewards, 4).tolist()
    assert found == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3, *[0] * 4], rel=1e-6)


def test_metrics(drawn):
    h, old, reference, reward, counted = map(mx.array, drawn)
    loss = PolicyLoss("grpo", ("exact",), SIZE, 0.1)
    _, metrics = loss.of_answers(h, old, reference, reward, counted)
    found = {name: value.item() for name, value in metrics.items()}
    assert found["no_advantage"] == pytest.approx(1 / GROUPS)
    groups = drawn[3].reshape(GROUPS, SIZE)
    assert found["reward_std"] == pytest.approx(groups.std(axis=1, ddof=1).mean(), rel=1e-5)
    d = drawn[2] - drawn[0]
    tokens = np.maximum(drawn[4].sum(1), 1)
    k3 = ((np.exp(d) - d - 1) * drawn[4]).sum(1) / tokens
    assert found["kl"] == pytest.approx(k3.mean(), rel=1e-5)
    rho, a = np.exp(drawn[0] - drawn[1]), np.array(standardized(reward, SIZE))[:, None]
    clipped = ((a > 0) & (rho > 1.2)) | ((a < 0) & (rho < 0.8))
    assert found["clipped"] == pytest.approx(
        ((clipped * drawn[4]).sum(1) / tokens).mean(), rel=1e-5
    )
    assert 0 < found["clipped"] < 1


def test_the_first_update_has_the_policy_gradient(drawn):
    """With h as its own old log-probabilities, all three have the gradient -a, of grpo over n."""
    h, _, _, reward, counted = map(mx.array, drawn)
    tokens = np.maximum(drawn[4].sum(1, keepdims=True), 1)
    for objective, a, n in (
        ("grpo", standardized(reward, SIZE), tokens),
        ("rloo", leave_one_out(reward, SIZE), 1),
        ("mdloo", leave_one_out(reward, SIZE), 1),
    ):
        loss = PolicyLoss(objective, ("exact",), SIZE, gamma=0.5)

        def total(h, loss=loss):
            return loss.of_answers(h, mx.stop_gradient(h), None, reward, counted)[0].sum()

        wanted = -np.array(a)[:, None] * drawn[4] / n
        np.testing.assert_allclose(np.array(mx.grad(total)(h)), wanted, atol=1e-5)


def test_mdloos_term_is_the_divergence_from_the_policy_that_answered(rng):
    """Its expectation over that policy's answers, for answers of one token."""
    logits = rng.normal(0, 1, (2, 6))
    new, old = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    loss = PolicyLoss("mdloo", ("exact",), 2, gamma=1.0)
    each = [mx.array(x.astype(np.float32))[:, None] for x in (new, old)]
    values, _ = loss.of_answers(*each, None, mx.zeros(6), mx.ones((6, 1)))
    divergence = (np.exp(new) * (new - old)).sum()
    assert (np.exp(old) * np.array(values)).sum() == pytest.approx(divergence, rel=1e-5)
    assert (np.array(values) >= 0).all()


def test_a_validation_is_the_negative_reward():
    table = mx.array([[1.0, 0.5], [0, 0.25]])
    batch = AnswerBatch(
        table, mx.array([2.0, 0.5]), mx.array([3.0, 5]), mx.array([0.0, 1]), mx.ones(2)
    )
    value, metrics = PolicyLoss("grpo", ("exact", "length:9"), 4)(None, batch)
    found = {name: each.item() for name, each in metrics.items()}
    assert value.item() == -2.5
    assert found == {
        "reward": 2.5,
        "reward_exact": 1.0,
        "reward_length:9": 0.75,
        "length": 8.0,
        "cut_off": 1.0,
    }


@pytest.mark.parametrize("share", [0.2, 0.7])
def test_leaving_one_out_lowers_the_variance(rng, share):
    """Answers of one token, drawn from softmax: REINFORCE without a baseline has more noise, and no bias."""
    size, repeats = 8, 4000
    p = rng.dirichlet(np.ones(5))
    rewards = 1.0 + (np.arange(5) == p.argmax()) * share  # the same constant for every answer
    answers = rng.choice(5, (repeats, size), p=p)
    reward = rewards[answers]
    own = np.eye(5)[answers] - p  # gradients of log p
    loo = np.array(leave_one_out(mx.array(reward.astype(np.float32).reshape(-1)), size))
    plain = (reward[..., None] * own).mean(1)
    better = (loo.reshape(reward.shape)[..., None] * own).mean(1)
    exact = ((p * rewards)[:, None] * (np.eye(5) - p)).sum(0)
    error = 5 * math.sqrt(plain.var(axis=0).sum() / repeats)
    assert np.abs(better.mean(0) - exact).max() < error
    assert better.var(axis=0).sum() < plain.var(axis=0).sum() / 2
