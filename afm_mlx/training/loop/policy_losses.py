"""Losses of policies: the gradient of the expected reward of sampled answers, held near a reference.

For A answers, K to each prompt, h (A, M) are log-probabilities of their tokens under the model in training,
h_k the ones when the answers were sampled, ref the reference's, R the rewards; sums are over an answer's n
tokens, and sg stops the gradient:

    grpo   sum_t -min(rho_t a, clip(rho_t, 1 - e, 1 + e_high) a) + beta * k3_t,   rho_t = exp(h_t - h_k_t),
           a = (R - mean of the group) / (std of the group + 1e-4),   k3 = exp(ref - h) - (ref - h) - 1
    rloo   -a sum_t h_t,   R' = R - beta * sum_t (h_k_t - ref_t),   a = R' - mean R' of the others of the group
    mdloo  -rho a + gamma * (rho log rho - rho + 1),   rho = exp(sum_t h_t - h_k_t),   a as in rloo

GRPO is DeepSeekMath's (arXiv 2402.03300) as TRL computes it, with the group's std of K - 1 degrees of freedom.
Its sum over tokens is divided by n; by the mean n of the batch ("bnpo", TRL's name); or by the most tokens that
an answer may have ("dr_grpo", arXiv 2503.20783). RLOO is arXiv 2402.14740. MDLOO is mirror descent, as in
Apple's report of 2024 (arXiv 2407.21075): its term keeps the policy near the one that answered. The term's
expectation over these answers is KL(pi || pi_k); h - h_k alone would have a gradient away from pi_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.training.data.rollouts import AnswerBatch, RolloutBatch
from afm_mlx.training.loop.losses import Metrics, log_probabilities

OBJECTIVES = ("grpo", "rloo", "mdloo")
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo")


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of a `RolloutBatch`; of an `AnswerBatch`, the negative reward. Both have metrics.

    Args:
        objective: "grpo", "rloo" or "mdloo".
        rewards: names of the rewards.
        group_size: K.
        beta: weight of the distance from the reference.
        gamma: weight of mdloo's distance from the policy that sampled the answers.
        epsilon, epsilon_high: e and e_high of grpo.
        loss_type: what grpo divides an answer's sum over tokens by: "grpo", "bnpo" or "dr_grpo".
        longest_answer: most tokens of an answer.
        temperature: with which the answers were sampled.
    """

    objective: str
    rewards: tuple[str, ...]
    group_size: int
    beta: float = 0.0
    gamma: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    loss_type: str = "grpo"
    longest_answer: int = 1
    temperature: float = 1.0

    def __call__(
        self, model: nn.Module, batch: RolloutBatch | AnswerBatch
    ) -> tuple[mx.array, Metrics]:
        """Return the sum of the answers' losses, and sums of metrics."""
        metrics = {"reward": batch.reward.sum()}
        if len(self.rewards) > 1:
            sums = batch.rewards.sum(axis=0)
            metrics |= {f"reward_{name}": sums[i] for i, name in enumerate(self.rewards)}
        metrics |= {"length": batch.lengths.sum(), "cut_off": batch.cut_off.sum()}
        if isinstance(batch, AnswerBatch):
            return -batch.reward.sum(), metrics
        h = answer_logprobs(model, batch, self.temperature)
        old = mx.stop_gradient(h) if batch.old is None else batch.old
        losses, found = self.of_answers(h, old, batch.reference, batch.reward, batch.counted)
        gap = mx.abs(old - batch.sampled) * batch.counted
        found["sampler_gap"] = gap.sum() / mx.maximum(batch.counted.sum(), 1)
        count = batch.weights.sum()
        metrics |= {name: value * count for name, value in found.items()}
        return losses.sum(), metrics

    def of_answers(
        self,
        h: mx.array,
        old: mx.array,
        reference: mx.array | None,
        reward: mx.array,
        counted: mx.array,
    ) -> tuple[mx.array, Metrics]:
        """Return the losses (A,) of answers, and means of metrics.

        `h`, `old`, `reference` (None with beta 0) and `counted` are (A, M), as in `RolloutBatch`; `reward` is
        (A,).
        """
        tokens = mx.maximum(counted.sum(axis=1), 1)
        groups = reward.reshape(-1, self.group_size)
        metrics = {
            "reward_std": mx.std(groups, axis=1, ddof=1).mean(),
            "no_advantage": (groups.max(axis=1) == groups.min(axis=1)).mean(),
        }
        k3 = mx.zeros_like(h)
        if reference is not None:
            d = reference - h
            k3 = mx.exp(d) - d - 1
            metrics["kl"] = (mx.stop_gradient(k3 * counted).sum(axis=1) / tokens).mean()
        if self.objective == "grpo":
            a = standardized(reward, self.group_size)[:, None]
            rho = mx.exp(h - old)
            clipped = mx.clip(rho, 1 - self.epsilon, 1 + self.epsilon_high)
            is_clipped = (clipped * a < rho * a) * counted
            metrics["clipped"] = (is_clipped.sum(axis=1) / tokens).mean()
            per_token = -mx.minimum(rho * a, clipped * a) + self.beta * k3
            sums = (per_token * counted).sum(axis=1)
            if self.loss_type == "grpo":
                return sums / tokens, metrics
            if self.loss_type == "bnpo":
                return sums / mx.maximum(counted.sum(axis=1).mean(), 1), metrics
            return sums / self.longest_answer, metrics
        whole = reward
        if reference is not None:
            whole = reward - self.beta * ((old - reference) * counted).sum(axis=1)
        a = leave_one_out(mx.stop_gradient(whole), self.group_size)
        if self.objective == "rloo":
            return -a * (h * counted).sum(axis=1), metrics
        change = ((h - old) * counted).sum(axis=1)
        rho = mx.exp(change)
        return -rho * a + self.gamma * (rho * change - rho + 1), metrics


def answer_logprobs(model: nn.Module, batch: RolloutBatch, temperature: float = 1.0) -> mx.array:
    """Return the log-probabilities of the answers' tokens, (A, M) float32; padding has no meaning."""
    return log_probabilities(model, batch, temperature)[batch.grid]


def standardized(rewards: mx.array, group_size: int) -> mx.array:
    """Return (R - mean) / (std + 1e-4) within groups of consecutive rewards (A,)."""
    groups = rewards.reshape(-1, group_size)
    centered = groups - groups.mean(axis=1, keepdims=True)
    return (centered / (mx.std(groups, axis=1, keepdims=True, ddof=1) + 1e-4)).reshape(-1)


def leave_one_out(rewards: mx.array, group_size: int) -> mx.array:
    """Return R minus the mean of the other rewards of its group, of consecutive rewards (A,)."""
    groups = rewards.reshape(-1, group_size)
    others = (groups.sum(axis=1, keepdims=True) - groups) / (group_size - 1)
    return (groups - others).reshape(-1)
