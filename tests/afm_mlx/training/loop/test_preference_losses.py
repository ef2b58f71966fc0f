"""Losses of preferences against plain torch, values and gradients, and their metrics on a tiny model."""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.data.preferences import LabeledAnswer, PreferenceBatches, PreferencePair
from afm_mlx.training.loop import preference_losses as losses
from afm_mlx.training.loop.losses import log_probabilities
from afm_mlx.training.loop.preference_losses import (
    OBJECTIVES,
    Pairs,
    PreferenceLoss,
    answer_sums,
    lower_bound_of_divergence,
)
from tests.tools.cases import each
from tests.tools.training import VOCABULARY, ToyModel

torch = pytest.importorskip("torch")
from torch.nn.functional import logsigmoid  # noqa: E402

# The formulas as TRL's trainers have them, in plain torch: h of chosen and rejected answers, the reference's,
# and their lengths.


def torch_dpo(c, r, rc, rr, nc, nr, e=0.0):
    logits = 0.3 * ((c - r) - (rc - rr))
    return -logsigmoid(logits) * (1 - e) - logsigmoid(-logits) * e


def torch_ipo(c, r, rc, rr, nc, nr):
    return (((c / nc - r / nr) - (rc / nc - rr / nr)) - 1 / (2 * 0.3)) ** 2


def torch_hinge(c, r, rc, rr, nc, nr):
    return torch.relu(1 - 0.3 * ((c - r) - (rc - rr)))


def torch_dpop(c, r, rc, rr, nc, nr):
    penalty = torch.maximum(torch.zeros_like(c), rc - c)
    return -(logsigmoid(0.3 * ((c - r) - (rc - rr))) - 50 * penalty)


def torch_orpo(c, r, rc, rr, nc, nr):
    c, r = c / nc, r / nr
    log_odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))
    return -c - 0.3 * logsigmoid(log_odds)


def torch_simpo(c, r, rc, rr, nc, nr):
    return -logsigmoid(0.3 * (c / nc - r / nr) - 0.7)


def pair_arrays(rng, count=9):
    """h, references and lengths of random answers; the log-probability of a token is about -1."""
    lengths = rng.integers(1, 40, (2, count)).astype(np.float32)
    h, reference = -lengths * rng.uniform(0.05, 2, (2, 2, count)).astype(np.float32)
    return [*h, *reference, *lengths]


@each(
    "name, settings, expected",
    [
        ("dpo", {}, torch_dpo),
        ("dpo", {"smoothing": 0.15}, lambda *arrays: torch_dpo(*arrays, e=0.15)),
        ("ipo", {}, torch_ipo),
        ("hinge", {}, torch_hinge),
        ("dpop", {"delta": 50.0}, torch_dpop),
        ("orpo", {}, torch_orpo),
        ("simpo", {"gamma": 0.7}, torch_simpo),
    ],
)
def test_losses_and_gradients_equal_torch(rng, name, settings, expected):
    arrays = pair_arrays(rng)

    def loss(c, r):
        pairs = Pairs(c, r, *map(mx.array, arrays[2:]))
        return getattr(losses, name)(pairs, beta=0.3, **settings)

    found, gradients = mx.vjp(loss, [mx.array(a) for a in arrays[:2]], [mx.ones(9)])
    given = [torch.tensor(a, dtype=torch.float64) for a in arrays]
    for each_given in given[:2]:
        each_given.requires_grad_()
    wanted = expected(*given)
    wanted.sum().backward()
    np.testing.assert_allclose(found[0], wanted.detach(), rtol=1e-5, atol=1e-5)
    for gradient, each_given in zip(gradients, given, strict=False):
        np.testing.assert_allclose(gradient, each_given.grad, rtol=1e-5, atol=1e-5)


def test_kto_equals_torch(rng):
    rewards, is_good = rng.normal(0, 2, 20).astype(np.float32), rng.integers(0, 2, 20) == 1

    def loss(rewards):
        return losses.kto(rewards, mx.array(is_good), 1.5, 0.5)

    (found,), (gradient,) = mx.vjp(loss, [mx.array(rewards)], [mx.ones(20)])
    given = torch.tensor(rewards, dtype=torch.float64, requires_grad=True)
    good, other = 1.5 * (1 - torch.sigmoid(given)), 0.5 * (1 - torch.sigmoid(-given))
    wanted = torch.where(torch.tensor(is_good), good, other)
    wanted.sum().backward()
    np.testing.assert_allclose(found, wanted.detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, given.grad, rtol=1e-5, atol=1e-5)


def test_an_answer_that_is_certain_has_finite_odds():
    pairs = Pairs(*(mx.array([x]) for x in (0.0, -1e-9, 0.0, 0.0, 1.0, 1.0)))

    def loss_of(chosen):
        return losses.orpo(pairs._replace(chosen=chosen), 0.1)

    loss, gradients = mx.vjp(loss_of, [pairs.chosen], [mx.ones(1)])
    assert math.isfinite(loss[0].item())
    assert math.isfinite(gradients[0].item())


def test_the_divergence_of_an_event_is_a_lower_bound(rng):
    p, q = (
        mx.softmax(mx.array(rng.normal(0, 2, (50, 7)).astype(np.float32)), axis=-1) for _ in "pq"
    )
    whole = (p * mx.log(p / q)).sum(axis=-1)
    for token in range(7):
        bound = lower_bound_of_divergence(mx.log(p[:, token]), mx.log(q[:, token]))
        assert mx.all(bound >= 0)
        assert mx.all(bound <= whole + 1e-6)
    same = mx.array([0.0, -1e-8, -3.0, -80.0])
    assert lower_bound_of_divergence(same, same).tolist() == [0, 0, 0, 0]
    far = lower_bound_of_divergence(mx.array([0.0, -80.0]), mx.array([-80.0, 0.0]))
    assert mx.all(mx.isfinite(far))


def test_sums_of_answers_leave_padding_out():
    values = mx.array([1.0, 2.0, 3.0, mx.inf])
    assert answer_sums(values, mx.array([1, 0, 1, 3]), 3).tolist() == [2, 4, 0]


# -- on a model


def random_answers(rng, count):
    def drawn(least):
        return rng.integers(1, VOCABULARY, int(rng.integers(least, 9))).astype(np.int32)

    return [(drawn(1), drawn(1), drawn(2)) for _ in range(count)]


def batch_of(rng, samples, reference=True):
    batches = PreferenceBatches(
        samples, batch_size=len(samples), max_seq_length=32, packed=False, shuffle=False
    )
    if reference:
        batches = batches.with_reference(-rng.uniform(0.1, 3, batches.n_scored))
    return batches(0)


def torch_sums(model, rows):
    """h of each answer, from logits and plain indexing."""
    logits = torch.tensor(np.array(model(rows.inputs))).double().log_softmax(-1)
    flat = logits.reshape(-1, VOCABULARY)
    sums = torch.zeros(rows.lengths.size, dtype=torch.float64)
    for position, label, answer in zip(
        rows.positions.tolist(), rows.labels.tolist(), rows.answers.tolist(), strict=True
    ):
        if answer < len(sums):
            sums[answer] += flat[position, label]
    return sums


def reference_sums(rows):
    reference = np.zeros(rows.lengths.size)
    for value, answer in zip(rows.reference.tolist(), rows.answers.tolist(), strict=True):
        if answer < len(reference):
            reference[answer] += value
    return torch.tensor(reference)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "kto"])
def test_a_loss_and_its_metrics_on_a_model(rng, objective):
    strengths = [None, 0.65, 1.0]
    samples = [
        PreferencePair(prompt, chosen, rejected, "", strengths[i % 3])
        for i, (prompt, chosen, rejected) in enumerate(random_answers(rng, 6))
    ]
    batch, model = batch_of(rng, samples), ToyModel(seed=2)
    loss = PreferenceLoss(objective, beta=0.3, simpo_gamma=0.7)
    value, metrics = loss(model, batch)
    c, r = torch_sums(model, batch).split(6)
    rc, rr = reference_sums(batch).split(6)
    nc, nr = torch.tensor(np.array(batch.lengths)).double().split(6)
    # Strengths are in the order of the batch, which is sorted by length.
    e = {"e": 1 - torch.tensor(np.array(batch.strengths))} if objective == "dpo" else {}
    assert sorted(batch.strengths.tolist()) == pytest.approx([0.65, 0.65, 1, 1, 1, 1])
    expected = globals()[f"torch_{objective}"](c, r, rc, rr, nc, nr, **e).sum()
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    n_c, n_r = (nc, nr) if OBJECTIVES[objective].of_means else (1, 1)
    margins = 0.3 * ((c - rc) / n_c - (r - rr) / n_r)
    wanted = {
        "margin": margins.sum(),
        "accuracy": (margins > 0).sum(),
        "chosen": c.sum(),
        "rejected": r.sum(),
        "length": (nc + nr).sum() / 2,
    }
    for name, each_wanted in wanted.items():
        assert metrics[name].item() == pytest.approx(each_wanted.item(), rel=1e-4)
    assert metrics["kl"].item() > 0


def test_kto_and_its_metrics_on_a_model(rng):
    samples = [
        LabeledAnswer(prompt, answer, bool(i % 3), "")
        for i, (prompt, answer, _) in enumerate(random_answers(rng, 7))
    ]
    batch, model = batch_of(rng, samples), ToyModel(seed=2)
    value, metrics = PreferenceLoss("kto", 0.3, desirable_weight=2.0)(model, batch)
    h, ref = torch_sums(model, batch), reference_sums(batch)
    others = losses.mismatched_answers(batch)
    z = (torch_sums(model, others) - reference_sums(others)).mean().clamp(min=0)
    rewards = 0.3 * (h - ref - z)
    is_good = torch.tensor(np.array(batch.is_good))
    assert is_good.sum() == 4
    good, other = 2 * (1 - torch.sigmoid(rewards)), 1 - torch.sigmoid(-rewards)
    assert value.item() == pytest.approx(torch.where(is_good, good, other).sum().item(), rel=1e-5)
    # Divided by the number of answers, sums are means over good answers and over others.
    for name, wanted in (
        ("margin", rewards[is_good].mean() - rewards[~is_good].mean()),
        ("chosen", h[is_good].mean()),
        ("rejected", h[~is_good].mean()),
        ("kl_mismatched", z),
        ("accuracy", ((rewards > 0) == is_good).double().mean()),
    ):
        assert metrics[name].item() / 7 == pytest.approx(wanted.item(), rel=1e-4)


def test_kto_has_no_gradient_through_mismatched_answers(rng):
    samples = [LabeledAnswer(p, a, True, "") for p, a, _ in random_answers(rng, 5)]
    batch = batch_of(rng, samples)
    others = losses.mismatched_answers(batch)
    # A reference that is far less likely makes z more than 0.
    others = others._replace(reference=others.reference - 5)
    arrays = {k: v for k, v in others._asdict().items() if v is not None and k != "weights"}
    batch = batch._replace(mismatched=arrays)
    model, loss = ToyModel(seed=2), PreferenceLoss("kto", 0.3)
    z = loss(model, batch)[1]["kl_mismatched"].item() / 5
    assert z > 0

    def expected(model):
        h = answer_sums(log_probabilities(model, batch), batch.answers, 5)
        ref = answer_sums(batch.reference, batch.answers, 5)
        return losses.kto(0.3 * (h - ref - z), batch.is_good).sum()

    found, wanted = (
        nn.value_and_grad(model, each_loss)(model)[1]
        for each_loss in (lambda model: loss(model, batch)[0], expected)
    )
    np.testing.assert_allclose(
        found["norm"]["weight"], wanted["norm"]["weight"], rtol=1e-4, atol=1e-6
    )


def test_equal_policy_and_reference(rng):
    samples = [PreferencePair(*each_sample, "") for each_sample in random_answers(rng, 6)]
    model = ToyModel(seed=2)
    batch = batch_of(rng, samples)
    batch = batch._replace(reference=log_probabilities(model, batch))
    starts = {"dpo": math.log(2), "hinge": 1.0, "ipo": 25.0, "dpop": math.log(2)}
    for objective, start in starts.items():
        loss, metrics = PreferenceLoss(objective)(model, batch)
        assert loss.item() / 6 == pytest.approx(start, rel=1e-6)
        assert [metrics[name].item() for name in ("margin", "accuracy", "kl")] == [0, 0, 0]


def test_a_batch_without_a_reference(rng):
    samples = [PreferencePair(*each_sample, "") for each_sample in random_answers(rng, 4)]
    _, metrics = PreferenceLoss("orpo")(ToyModel(), batch_of(rng, samples, reference=False))
    assert set(metrics) == {"margin", "accuracy", "chosen", "rejected", "length"}


@each(
    "arguments, fault",
    [
        ({"objective": "ppo"}, "'ppo'; allowed are dpo, ipo"),
        ({"beta": 0.0}, "beta is 0.0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ({"delta": -1.0}, "delta is -1.0"),
        ({"simpo_gamma": math.inf}, "simpo_gamma is inf"),
    ],
)
def test_settings_out_of_range(arguments, fault):
    with pytest.raises(ConfigError, match=fault):
        PreferenceLoss(**arguments)
