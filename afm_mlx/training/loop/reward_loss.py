"""The loss of a reward model: the order of two answers with soft labels, and grades of each answer.

    L_rank = -p log s(r_c - r_r) - (1 - p) log s(r_r - r_c)             s = sigmoid
    L_regu = sum over axes of CE(u(y_c), z_c) + CE(u(y_r), z_r)
    L      = L_rank + lambda L_regu

where r are the rewards of the chosen and the rejected answer, u the logits of the grades, and p how sure it is
that the chosen answer is better. A pair of equal quality has p = 1/2, and a certain one p = 1: then L_rank is
the likelihood of Bradley and Terry's model.

Source: AFM report (arXiv 2407.21075, section 4.3 and appendix); lambda is unpublished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import GRADED_AXES
from afm_mlx.adapters.reward_head import NO_GRADE, RewardHead
from afm_mlx.errors import ConfigError, TrainingError
from afm_mlx.model.pooling import pooled_states
from afm_mlx.training.data.reward_pairs import RewardBatch
from afm_mlx.training.loop.losses import Metrics

GRADE_WEIGHT = 0.1
"""Default lambda: with eight grades, L_regu begins at 8 log 3, and so at about the size of L_rank."""


@dataclass(frozen=True)
class RewardLoss:
    """The sum of the losses of a batch's pairs, and metrics; see the module's formula.

    Args:
        grade_weight: lambda, 0 or more.
        head: the reward head of a model that has none as its `reward_head`.

    Raises:
        ConfigError: for another weight.
    """

    grade_weight: float = GRADE_WEIGHT
    head: RewardHead | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.grade_weight < math.inf:
            raise ConfigError(f"The grades' weight is {self.grade_weight}; allowed are 0 and more.")

    def __call__(self, model: nn.Module, batch: RewardBatch) -> tuple[mx.array, Metrics]:
        states = pooled_states(model, batch.inputs, batch.lengths, "last")
        head = model.reward_head if "reward_head" in model else self.head
        if head is None:
            raise TrainingError(
                "There is no reward head to measure. Name a reward adapter (--adapter-path)."
            )
        rewards, logits = head(states)
        count = batch.weights.size
        chosen, rejected = rewards[:count], rewards[count:]
        margins = chosen - rejected
        losses = ranking_losses(margins, batch.certainty)
        figures = {
            "accuracy": (margins > 0).astype(mx.float32),
            "margin": margins,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        if logits:
            graded = grade_losses(logits, batch.grades)
            graded = graded[:count] + graded[count:]
            figures["grade_loss"] = graded
            losses = losses + self.grade_weight * graded
        sums = {name: mx.sum(batch.weights * figure) for name, figure in figures.items()}
        return mx.sum(batch.weights * losses), sums


def ranking_losses(margins: mx.array, certainty: mx.array) -> mx.array:
    """Return L_rank (B,) of differences of rewards (B,), and of p (B,) in [0, 1]."""
    zero = mx.zeros_like(margins)
    losses: mx.array = certainty * mx.logaddexp(zero, -margins)
    return losses + (1 - certainty) * mx.logaddexp(zero, margins)


def grade_losses(logits: dict[str, mx.array], grades: mx.array) -> mx.array:
    """Return the sum over axes of the cross-entropies of N answers' grades, (N,).

    Args:
        logits: (N, 3) of each axis that the head has.
        grades: (N, 4) integers in the order of `GRADED_AXES`: 0 to 2, or `NO_GRADE`, which adds nothing.
    """
    total = mx.zeros(grades.shape[0])
    for axis, each in logits.items():
        given = grades[:, GRADED_AXES.index(axis)]
        is_graded = given != NO_GRADE
        losses = nn.losses.cross_entropy(each, mx.where(is_graded, given, 0), reduction="none")
        total = total + mx.where(is_graded, losses, 0)
    return total
