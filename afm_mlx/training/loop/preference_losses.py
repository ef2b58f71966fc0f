"""Losses of preferences, from log-probabilities of whole answers.

With h the sum of an answer's log-probabilities, n its number of tokens, m = h / n, c the chosen answer and r
the rejected one, ref the reference, s the logistic function, e = 1 - the pair's strength, and

    D = (h_c - ref_c) - (h_r - ref_r)      D' = the same of m      lo = m - log(1 - exp(m))

| objective | loss of a pair | source |
| --- | --- | --- |
| dpo | -(1 - e) log s(beta D) - e log s(-beta D) | arXiv 2305.18290; e: 2407.21075, section 4.2 |
| ipo | (D' - 1 / (2 beta))^2 | arXiv 2310.12036; D' as in TRL |
| hinge | max(0, 1 - beta D) | arXiv 2305.10425 |
| dpop | -log s(beta D) + delta max(0, ref_c - h_c) | arXiv 2402.13228, as in mlx-lm-lora |
| orpo | -m_c - beta log s(lo_c - lo_r) | arXiv 2403.07691 |
| simpo | -log s(beta (m_c - m_r) - gamma) | arXiv 2405.14734 |

The loss "kto" (arXiv 2402.01306) is of single answers: w (1 - s(beta (h - ref - z))) of a good one, and
w (1 - s(beta (z - h + ref))) of another, with a weight w for each kind. z is the mean of h - ref over the
batch's prompts with answers to other prompts, or 0 if that is less, without a gradient, as in TRL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import ConfigError
from afm_mlx.training.data.preferences import PreferenceBatch, mismatched_answers
from afm_mlx.training.loop.losses import Metrics, log_probabilities


class Pairs(NamedTuple):
    """Log-probabilities of P pairs, each (P,) float32: h_c, h_r, ref_c, ref_r, n_c, n_r of the formulas."""

    chosen: mx.array
    rejected: mx.array
    reference_chosen: mx.array
    reference_rejected: mx.array
    chosen_lengths: mx.array
    rejected_lengths: mx.array

    @property
    def distances(self) -> mx.array:
        """D, (P,)."""
        return (self.chosen - self.reference_chosen) - (self.rejected - self.reference_rejected)

    @property
    def means(self) -> Pairs:
        """Means over each answer's tokens, in place of sums."""
        n_c, n_r = self.chosen_lengths, self.rejected_lengths
        return Pairs(
            self.chosen / n_c,
            self.rejected / n_r,
            self.reference_chosen / n_c,
            self.reference_rejected / n_r,
            n_c,
            n_r,
        )


def dpo(pairs: Pairs, beta: float, smoothing: mx.array | float = 0.0) -> mx.array:
    """Return the losses of pairs, (P,); `smoothing` is e, (P,) or one number."""
    scaled = beta * pairs.distances
    return -(1 - smoothing) * nn.log_sigmoid(scaled) - smoothing * nn.log_sigmoid(-scaled)


def ipo(pairs: Pairs, beta: float) -> mx.array:
    return mx.square(pairs.means.distances - 1 / (2 * beta))


def hinge(pairs: Pairs, beta: float) -> mx.array:
    return mx.maximum(0, 1 - beta * pairs.distances)


def dpop(pairs: Pairs, beta: float, delta: float) -> mx.array:
    fall = mx.maximum(0, pairs.reference_chosen - pairs.chosen)
    return delta * fall - nn.log_sigmoid(beta * pairs.distances)


def orpo(pairs: Pairs, beta: float) -> mx.array:
    means = pairs.means
    odds = _log_odds(means.chosen) - _log_odds(means.rejected)
    return -means.chosen - beta * nn.log_sigmoid(odds)


def simpo(pairs: Pairs, beta: float, gamma: float) -> mx.array:
    """Return the losses of pairs, (P,); the reference has no effect."""
    means = pairs.means
    return -nn.log_sigmoid(beta * (means.chosen - means.rejected) - gamma)


def kto(
    rewards: mx.array, is_good: mx.array, good_weight: float = 1.0, other_weight: float = 1.0
) -> mx.array:
    """Return the losses of answers, (N,), from rewards beta (h - ref - z), (N,), and labels (N,) bool."""
    weights = mx.where(is_good, good_weight, other_weight)
    return weights * (1 - mx.sigmoid(mx.where(is_good, rewards, -rewards)))


def _log_odds(log_p: mx.array) -> mx.array:
    """Return log(p / (1 - p)) of log p."""
    return log_p - _log_of_rest(log_p)


def _log_of_rest(log_p: mx.array) -> mx.array:
    """Return log(1 - p) of log p; a probability that rounds to 1 counts as 1 - 1e-6."""
    return mx.log(-mx.expm1(mx.minimum(log_p, -1e-6)))


def answer_sums(values: mx.array, answers: mx.array, count: int) -> mx.array:
    """Return the sum of each answer's values, (count,), from values (T,) and the answers' indices (T,).

    Values whose index is `count` or more are in no sum: padding.
    """
    return mx.where(answers == mx.arange(count)[:, None], values, 0).sum(axis=1)


def lower_bound_of_divergence(log_p: mx.array, log_q: mx.array) -> mx.array:
    """Return KL(p || q) of the event "this token", from its log-probabilities (T,) under p and q, in nats.

    By the data-processing inequality it is at most the divergence of the whole distributions. Unlike estimates
    from samples, it is of use where tokens were not drawn from p.
    """
    p = mx.exp(log_p)
    return p * (log_p - log_q) + (1 - p) * (_log_of_rest(log_p) - _log_of_rest(log_q))


# -- the loss of a batch


class Objective(NamedTuple):
    """A loss of pairs, or None for one of labelled answers, and which settings it has."""

    of_pairs: Callable[..., mx.array] | None
    beta: float = 0.1  # by default
    has_reference: bool = True
    of_means: bool = False  # rewards are of means over an answer's tokens
    settings: tuple[str, ...] = ()  # fields of `PreferenceLoss` besides beta


OBJECTIVES = {
    "dpo": Objective(dpo, settings=("label_smoothing",)),
    "ipo": Objective(ipo, of_means=True),
    "hinge": Objective(hinge),
    "dpop": Objective(dpop, settings=("delta",)),
    "orpo": Objective(orpo, has_reference=False, of_means=True),
    "simpo": Objective(simpo, 2.0, has_reference=False, of_means=True, settings=("simpo_gamma",)),
    "kto": Objective(None, settings=("desirable_weight", "undesirable_weight")),
}


@dataclass(frozen=True)
class PreferenceLoss:
    """The sum of a loss over the pairs or answers of a batch, each of which counts the same.

    Metrics are means over pairs, or over labelled answers:

    - `margin`: the chosen answer's reward, less the rejected one's. A reward is beta (h - ref), or beta times
      the difference of means for "ipo", beta m for "orpo" and "simpo", and beta (h - ref - z) for "kto", of
      which good answers count as chosen.
    - `accuracy`: share of pairs whose margin is above 0; of answers, share of rewards of the label's sign.
    - `chosen`, `rejected`: h of the chosen and of the rejected answers.
    - `length`: tokens of an answer.
    - `kl`: distance from the reference in nats a token, see `lower_bound_of_divergence`.
    - `kl_mismatched`: z, of "kto".

    Args:
        objective: a name in `OBJECTIVES`.
        beta: strength; pass None for 0.1, or 2 for "simpo". For "orpo" it is the odds ratio's weight.
        label_smoothing: share of labels that are wrong, for "dpo": e of pairs without a strength.
        delta: weight of the penalty of "dpop".
        simpo_gamma: gamma of "simpo".
        desirable_weight, undesirable_weight: w of good and of other answers, for "kto".

    Raises:
        ConfigError: for an unknown objective, or a setting out of range.
    """

    objective: str = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    delta: float = 50.0
    simpo_gamma: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ConfigError(
                f"The objective is {self.objective!r}; allowed are {', '.join(OBJECTIVES)}."
            )
        if self.beta is not None and not 0 < self.beta < math.inf:
            raise ConfigError(f"beta is {self.beta}; allowed are finite numbers over 0.")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"label_smoothing is {self.label_smoothing}; allowed are 0 and more, under 0.5."
            )
        for name in ("delta", "simpo_gamma", "desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; allowed are finite numbers from 0."
                )

    @property
    def strength(self) -> float:
        """Strength of pairs without one; see `PreferencePair`."""
        return 1 - self.label_smoothing

    @property
    def _beta(self) -> float:
        return OBJECTIVES[self.objective].beta if self.beta is None else self.beta

    def __call__(self, model: nn.Module, batch: PreferenceBatch) -> tuple[mx.array, Metrics]:
        found, count = log_probabilities(model, batch), batch.lengths.size
        h = answer_sums(found, batch.answers, count)
        reference, metrics = mx.zeros(count), {"length": batch.lengths}
        if batch.reference is not None:
            reference = answer_sums(batch.reference, batch.answers, count)
            distance = lower_bound_of_divergence(found, batch.reference)
            metrics["kl"] = answer_sums(distance, batch.answers, count) / batch.lengths
        # Of both answers of a pair, the mean.
        metrics = {k: v.reshape(-1, batch.weights.size).mean(axis=0) for k, v in metrics.items()}
        if OBJECTIVES[self.objective].of_pairs is None:
            losses, own = self._of_answers(model, batch, h, reference)
        else:
            losses, own = self._of_pairs(batch, h, reference)
        figures = {name: mx.sum(batch.weights * each) for name, each in (own | metrics).items()}
        return mx.sum(batch.weights * losses), figures

    def _of_pairs(
        self, batch: PreferenceBatch, h: mx.array, reference: mx.array
    ) -> tuple[mx.array, Metrics]:
        objective, strengths = OBJECTIVES[self.objective], batch.strengths
        assert objective.of_pairs is not None
        assert strengths is not None
        pairs = Pairs(*(part for each in (h, reference, batch.lengths) for part in each.split(2)))
        margins = self._beta * (pairs.means if objective.of_means else pairs).distances
        settings = {
            "label_smoothing": ("smoothing", 1 - strengths),
            "delta": ("delta", self.delta),
            "simpo_gamma": ("gamma", self.simpo_gamma),
        }
        losses = objective.of_pairs(
            pairs, self._beta, **dict(settings[name] for name in objective.settings)
        )
        return losses, {
            "margin": margins,
            "accuracy": (margins > 0).astype(mx.float32),
            "chosen": pairs.chosen,
            "rejected": pairs.rejected,
        }

    def _of_answers(
        self, model: nn.Module, batch: PreferenceBatch, h: mx.array, reference: mx.array
    ) -> tuple[mx.array, Metrics]:
        others = mismatched_answers(batch)
        distances = mx.stop_gradient(log_probabilities(model, others)) - others.reference
        z = mx.maximum(0, answer_sums(distances, others.answers, h.size).mean())
        is_good, share = batch.is_good, batch.good_share
        assert is_good is not None
        assert share is not None
        rewards = self._beta * (h - reference - z)
        losses = kto(rewards, is_good, self.desirable_weight, self.undesirable_weight)
        # Means over all answers, of these, are means over good answers and over others.
        good, other = is_good / share, (1 - is_good) / (1 - share)
        return losses, {
            "margin": rewards * (good - other),
            "accuracy": (mx.where(is_good, rewards, -rewards) > 0).astype(mx.float32),
            "chosen": h * good,
            "rejected": h * other,
            "kl_mismatched": mx.broadcast_to(z, h.shape),
        }
