"""Rewards of answers by a reward adapter (`afm-mlx lora --objective reward`), in batches on the engine.

rewards = RewardModel.load("afm-nano", "my-rewards")
rewards.of_all([Answered("Write a poem.", "Roses are red."), ...])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import open_folder
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.reward_head import head_dim, load_reward_head
from afm_mlx.engine.embedding import prompt_vectors
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Embedding
from afm_mlx.errors import AFMError, CheckpointError, DataError
from afm_mlx.loading.load import load
from afm_mlx.measure.rewards import Answered, messages_of
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.protocol import Tokenizer


class RewardScores(NamedTuple):
    """Rewards (n,) float32 of n answers, and by graded axis the probabilities (n, 3) of each grade."""

    rewards: np.ndarray
    grades: dict[str, np.ndarray]


class RewardModel:
    """A model with a reward adapter, which scores answers to prompts; one of `rewards.BatchReward`.

    Args:
        model, tokenizer: what `load` returns; the adapter is attached, or in the pool.
        folder: folder of the reward adapter.
        adapters: a pool that has the adapter as `adapter`; pass None if it is attached.
        adapter: name of the adapter in the pool.
        batch_size: most answers that are computed at the same time.

    Raises:
        AFMError: for an adapter without a reward head, or one for states of another width.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        folder: str | Path,
        *,
        adapters: AdapterPool | None = None,
        adapter: str | None = None,
        batch_size: int = 32,
    ):
        self.head = load_reward_head(folder, open_folder(folder)[1])
        self._engine = Engine(model, tokenizer, max_batch=batch_size, adapters=adapters, kv="float")
        self._adapter = adapter
        if head_dim(self.head) != self._engine.embedding_dim:
            raise CheckpointError(
                f"{folder} has a reward head for states of width {head_dim(self.head)}, and the model's have "
                f"{self._engine.embedding_dim}. Choose the model that the adapter was trained for."
            )

    @classmethod
    def load(
        cls, model: str | Path, folder: str | Path, *, batch_size: int = 32, **options: Any
    ) -> RewardModel:
        """Load a model with a reward adapter; `options` are `load`'s."""
        open_folder(folder)  # raises before a model is loaded
        loaded, tokenizer = load(model, adapter_path=str(folder), **options)
        return cls(loaded, tokenizer, folder, batch_size=batch_size)

    @classmethod
    def in_pool(
        cls, model: nn.Module, tokenizer: Tokenizer, adapters: AdapterPool, folder: Path
    ) -> RewardModel:
        """Register a reward adapter in a pool of the model, where it takes turns with other adapters."""
        name = f"reward {folder}"
        adapters.register(name, folder)
        return cls(model, tokenizer, folder, adapters=adapters, adapter=name)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def scores(
        self,
        chats: Sequence[Sequence[int]],
        wheres: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> RewardScores:
        """Score n chats, given as the token ids of a prompt and an answer with the token that ends its turn.

        Args:
            chats: see `answer_tokens`.
            wheres: what errors call each chat; pass None for its number.
            progress: called with (chats done, n).

        Raises:
            DataError: names a chat that has no score, such as one with more tokens than the context holds.
        """
        wheres = [f"Answer {i}" for i in range(len(chats))] if wheres is None else wheres
        states = prompt_vectors(
            self._engine,
            chats,
            Embedding(normalized=False),
            wheres,
            adapter=self._adapter,
            progress=progress,
        )
        rewards, logits = self.head(mx.array(states))
        grades = {axis: mx.softmax(each, axis=-1) for axis, each in logits.items()}
        mx.eval(rewards, grades)
        return RewardScores(
            np.array(rewards), {axis: np.array(each) for axis, each in grades.items()}
        )

    def of_all(
        self, answers: Sequence[Answered], progress: Progress | None = None
    ) -> Sequence[float]:
        """Return the reward of each answer; raise as `scores` does."""
        chats, wheres = [], []
        for number, each in enumerate(answers):
            where = each.where or f"Answer {number}"
            try:
                messages = _messages(each)
                tools = each.sample.get("tools")
                chats.append(answer_tokens(self.tokenizer, messages, each.answer, tools))
            except AFMError as error:
                raise DataError(f"{where}: {error}") from None
            wheres.append(where)
        rewards: list[float] = self.scores(chats, wheres, progress).rewards.tolist()
        return rewards

    def __call__(self, prompt: str, answer: str, sample: Mapping[str, Any]) -> float:
        """Return the reward of one answer."""
        return self.of_all([Answered(prompt, answer, sample)])[0]


def answer_tokens(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    answer: str,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Return the token ids of a chat that ends with an answer, up to the token that ends the answer's turn."""
    chat = [*messages, {"role": "assistant", "content": answer}]
    tokens: list[int] = tokenizer.apply_chat_template(chat, tools=tools)
    ends = [i for i, token in enumerate(tokens) if token in tokenizer.eos_token_ids]
    return tokens[: ends[-1] + 1] if ends else tokens


def _messages(each: Answered) -> list[Mapping[str, Any]]:
    """Return the messages before an answer: the sample's, without an answer of its own, or the prompt."""
    messages = messages_of(each.sample) or [{"role": "user", "content": each.prompt}]
    is_answered = isinstance(messages[-1], Mapping) and messages[-1].get("role") == "assistant"
    return messages[:-1] if is_answered else messages
