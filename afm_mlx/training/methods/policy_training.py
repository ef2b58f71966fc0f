"""Training of a LoRA adapter by rewards of answers that the model samples: GRPO, RLOO and MDLOO."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import attach_adapter, serving_copy
from afm_mlx.adapters.adapter_folder import open_folder
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.guidance.call_forms import AFM_CALLS, call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.measure.committee import PROMPT_FORM
from afm_mlx.measure.reward_model import RewardModel
from afm_mlx.measure.rewards import Reward, Rewards, make_rewards
from afm_mlx.progress import Progress
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.data.rollouts import (
    Answerer,
    RolloutBatch,
    Rollouts,
    load_prompts,
)
from afm_mlx.training.loop.policy_losses import (
    LOSS_TYPES,
    OBJECTIVES,
    PolicyLoss,
    answer_logprobs,
)
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import OnEvent
from afm_mlx.training.methods.lora_training import (
    LoRATraining,
    as_reference,
    read_initial,
    reference_fingerprint,
)
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import DataSplits, Recipe, max_sample_length

UPDATES = 4
"""Default updates of a rollout for mdloo, which with one would be rloo."""


@dataclass(frozen=True)
class PolicyTraining(LoRATraining):
    """Train LoRA pairs by the rewards of sampled answers, see `loop.policy_losses`.

    The recipe's `batch_size` is the number of prompts in a batch. Validation and test measure the rewards of
    the most likely answers, `batch_size * group_size` in a batch; the loss there is the negative reward. The
    recipe has no teacher and none of the arguments about the parts of a chat.

    Args:
        objective: "grpo", "rloo" or "mdloo".
        rewards: of an answer; or their names, see `measure.rewards.make_rewards`. To resume, they must depend
            on nothing except their arguments.
        reward_weights: factors of named rewards; pass None for 1 each.
        group_size: answers to a prompt.
        max_completion_tokens: most tokens of an answer.
        temperature: of the answers' sampling.
        constraint: what answers must look like; pass None for any text. Tokens that it forces are not trained
            on.
        reference_adapter: folder of the adapter that the reference runs with; pass None for the model alone.
        beta, gamma, epsilon, epsilon_high, loss_type: see `PolicyLoss`; pass None as `epsilon_high` for
            `epsilon`.
        updates_per_rollout: updates that a batch of answers serves; pass None for 1, or 4 for mdloo.
        mask_truncated_completions: leave answers that were cut off out of the loss.
    """

    objective: str = "grpo"
    rewards: Rewards | tuple[str, ...] = ()
    reward_weights: tuple[float, ...] | None = None
    group_size: int = 8
    max_completion_tokens: int = 256
    temperature: float = 1.0
    constraint: Constraint | None = None
    reference_adapter: str | Path | None = None
    beta: float = 0.04
    gamma: float = 0.1
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "grpo"
    updates_per_rollout: int | None = None
    mask_truncated_completions: bool = False
    kind = "policy"

    def __post_init__(self) -> None:
        super().__post_init__()
        high, updates = self.epsilon_high, self.updates_per_rollout
        for name, holds, allowed in (
            ("objective", self.objective in OBJECTIVES, ", ".join(OBJECTIVES)),
            ("rewards", bool(self.rewards), "one name of a reward at least, or Rewards"),
            ("group_size", self.group_size >= 2, "2 and more: rewards are compared within a group"),
            ("max_completion_tokens", self.max_completion_tokens >= 1, "1 and more"),
            ("temperature", 0 < self.temperature <= 100, "numbers over 0, up to 100"),
            ("beta", 0 <= self.beta < math.inf, "0 and more"),
            ("gamma", 0 <= self.gamma < math.inf, "0 and more"),
            ("epsilon", 0 < self.epsilon < 1, "numbers between 0 and 1"),
            ("epsilon_high", high is None or 0 < high < math.inf, "numbers over 0, and None"),
            ("loss_type", self.loss_type in LOSS_TYPES, ", ".join(LOSS_TYPES)),
            ("updates_per_rollout", updates is None or updates >= 1, "1 and more, and None"),
        ):
            if not holds:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; allowed are {allowed}.")
        if self.objective == "rloo" and self._updates > 1:
            raise ConfigError(
                f"updates_per_rollout is {updates}, and rloo's gradient is right for the policy that sampled "
                "the answers: for one update. Leave it out, or choose grpo or mdloo."
            )
        if self.reference_adapter is not None and not self.beta:
            raise ConfigError(
                "reference_adapter would do nothing with beta 0, the weight of the distance from the "
                "reference. Leave one of them out."
            )
        if self.dropout:
            raise ConfigError(
                f"dropout is {self.dropout}, with which the policy in training would be another one than "
                "the one that answers. Leave it out."
            )

    @property
    def _reward_names(self) -> tuple[str, ...]:
        return self.rewards.names if isinstance(self.rewards, Rewards) else self.rewards

    def _made_rewards(self, source: ModelSource, model: nn.Module | None = None) -> Rewards:
        """Return the rewards; without a model, which reward adapters need, for checks only."""
        if isinstance(self.rewards, Rewards):
            return self.rewards

        def of_adapter(path: Path) -> RewardModel | Reward:
            if model is None:
                open_folder(path)
                return lambda prompt, answer, sample: 0.0
            scoring = serving_copy(model)
            attach_adapter(scoring, path, base_folder=source.folder, force=self.force)
            return RewardModel(scoring, source.tokenizer, path)

        try:
            form = call_form(source.tokenizer)
        except AFMError:  # the model can't call
            form = AFM_CALLS
        return make_rewards(self.rewards, self.reward_weights, form=form, adapter=of_adapter)

    @property
    def _updates(self) -> int:
        default = UPDATES if self.objective == "mdloo" else 1
        return self.updates_per_rollout or default

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        super().check(recipe, source)
        if self.reference_adapter is not None:
            read_initial(self.reference_adapter)
        self._made_rewards(source)
        for name, is_given, reason in (
            ("teacher", recipe.teacher is not None, "rewards take its place"),
            ("packing", recipe.packing is not None, "rows are laid out by prompts"),
            ("prompt_weight", recipe.prompt_weight != 0, "only sampled answers are trained on"),
            ("features", bool(recipe.features), f"a line is {PROMPT_FORM}"),
        ):
            if is_given:
                raise ConfigError(f"{name} would do nothing: {reason}. Leave it out.")

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> Rollouts:
        most = max_sample_length(recipe, source) - self.max_completion_tokens
        if most < 1:
            raise ConfigError(
                f"max_completion_tokens is {self.max_completion_tokens}, and a sample may have "
                f"{most + self.max_completion_tokens} tokens, prompt and answer. Lower it, or raise "
                "max_seq_length as far as the model's context allows."
            )
        is_train = split == "train"
        return Rollouts(
            load_prompts(
                recipe.data,
                split,
                source.tokenizer,
                most,
                self.max_completion_tokens,
                self.constraint,
            ),
            batch_size=recipe.batch_size * (1 if is_train else self.group_size),
            group_size=self.group_size if is_train else None,
            longest_answer=self.max_completion_tokens,
            micro_batches=recipe.options.grad_accumulation_steps if is_train else 1,
            updates=self._updates if is_train else 1,
            mask_truncated_completions=self.mask_truncated_completions,
            one_row=source.is_afm,
            seed=recipe.options.seed,
        )

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> PolicyLoss:
        return self.test_loss()

    def test_loss(self) -> PolicyLoss:
        return PolicyLoss(
            self.objective,
            self._reward_names,
            self.group_size,
            self.beta,
            self.gamma,
            self.epsilon,
            self.epsilon if self.epsilon_high is None else self.epsilon_high,
            self.loss_type,
            self.max_completion_tokens,
            self.temperature,
        )

    def complete_data(
        self,
        model: nn.Module,
        source: ModelSource,
        data: DataSplits,
        run: RunFolder,
        on_event: OnEvent,
    ) -> DataSplits:
        answerer = Answerer(model, source.tokenizer, self.temperature)
        rewards = self._made_rewards(source, model)

        def policy(batch: RolloutBatch) -> mx.array:
            model.train()  # the training graph, whose numbers differ from the kernels'
            return answer_logprobs(model, batch, self.temperature)

        def reference(batch: RolloutBatch) -> mx.array:
            with as_reference(model, source, self.reference_adapter, force=self.force):
                found = policy(batch)
                mx.eval(found)
            return found

        def with_model(split: AnyBatches | None) -> Any:
            if split is None:
                return None
            assert isinstance(split, Rollouts)
            return dataclasses.replace(
                split,
                answerer=answerer,
                rewards=rewards,
                policy=policy,
                reference=reference if self.beta else None,
                folder=run.path / "rollouts",
            )

        return DataSplits(with_model(data.train), with_model(data.valid), with_model(data.test))

    def complete_test(
        self,
        model: nn.Module,
        source: ModelSource,
        batches: AnyBatches,
        progress: Progress | None = None,
    ) -> AnyBatches:
        assert isinstance(batches, Rollouts)
        rewards = self._made_rewards(source, model)
        return dataclasses.replace(
            batches, rewards=rewards, answerer=Answerer(model, source.tokenizer)
        )

    def manifest(self, model: nn.Module) -> dict[str, object]:
        own = {field.name for field in dataclasses.fields(PolicyTraining)}
        own -= {field.name for field in dataclasses.fields(LoRATraining)}
        values = {name: getattr(self, name) for name in sorted(own)}
        values["rewards"] = self._reward_names
        if isinstance(self.rewards, Rewards):
            values["reward_weights"] = self.rewards.weights
        values["reference_adapter"] = reference_fingerprint(self.reference_adapter)
        values["constraint"] = None if self.constraint is None else self.constraint.grammar
        return super().manifest(model) | values
