"""Rewards of answers: the head on the states of a full forward, for adapters attached and in a pool."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import RewardUse
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.reward_head import RewardHead, save_reward_head
from afm_mlx.errors import CheckpointError, DataError
from afm_mlx.loading.load import load
from afm_mlx.measure.reward_model import RewardModel, answer_tokens
from afm_mlx.measure.rewards import Answered, BatchReward, make_rewards
from afm_mlx.model.pooling import hidden_states
from afm_mlx.training.data.preferences import load_preferences
from tests.tools.cli import lines, write_folder
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import random_adapter
from tests.tools.zoo_chats import write_family_folder

USE = RewardUse(("verbosity",))


def with_reward(folder, rng, dim, use=USE):
    """Make an adapter's folder one of a reward adapter."""
    import json

    head = RewardHead(dim, use, seed=2)
    head.reward = mx.array(rng.normal(size=dim).astype(np.float32))
    save_reward_head(folder, head)
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"reward": {"grades": [*use.grades]}})
    )
    return head


@pytest.fixture
def folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE)


@pytest.fixture
def adapter(folder, tmp_path, rng):
    random_adapter(folder, tmp_path / "adapter", rng)
    return tmp_path / "adapter"


ANSWERS = [Answered("Who?", "The fox. " * n) for n in (1, 12, 3, 7)]


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_a_reward_is_the_heads_of_the_last_state(folder, adapter, rng, batch_size):
    head = with_reward(adapter, rng, TRAINABLE.hidden_dim)
    rewards, seen = RewardModel.load(folder, adapter, batch_size=batch_size), []
    assert isinstance(rewards, BatchReward)
    found = rewards.of_all(ANSWERS, progress=lambda *counts: seen.append(counts))
    assert seen[-1] == (4, 4)
    model, tokenizer = load(folder, adapter_path=str(adapter))
    chats = [
        answer_tokens(tokenizer, [{"role": "user", "content": a.prompt}], a.answer) for a in ANSWERS
    ]
    for tokens, reward in zip(chats, found, strict=True):
        state = hidden_states(model, mx.array([tokens]))[0, -1].astype(mx.float32)
        assert reward == pytest.approx((state @ head.reward).item(), rel=1e-4, abs=1e-4)
    assert len(set(found)) == 4
    assert rewards(ANSWERS[0].prompt, ANSWERS[0].answer, {}) == pytest.approx(found[0], rel=1e-4)
    scores = rewards.scores(chats)
    np.testing.assert_allclose(scores.rewards, found, rtol=1e-4)
    np.testing.assert_allclose(scores.grades["verbosity"].sum(axis=1), 1, rtol=1e-5)
    # By a name, as commands take it.
    named = make_rewards([str(adapter)], [0.5], adapter=lambda path: rewards)
    np.testing.assert_allclose(named.totals(ANSWERS), np.array(found) / 2, rtol=1e-4)


def test_an_adapter_in_a_pool(folder, adapter, rng):
    with_reward(adapter, rng, TRAINABLE.hidden_dim)
    wanted = RewardModel.load(folder, adapter).of_all(ANSWERS)
    model, tokenizer = load(folder)
    bare = RewardModel(model, tokenizer, adapter).of_all(ANSWERS)
    with AdapterPool(model) as pool:
        pool.register("rewards", adapter)
        pooled = RewardModel(model, tokenizer, adapter, adapters=pool, adapter="rewards")
        np.testing.assert_allclose(pooled.of_all(ANSWERS), wanted, rtol=1e-4, atol=1e-4)
    assert not np.allclose(bare, wanted, rtol=1e-3)


def test_messages_of_a_sample_come_before_the_answer(folder, adapter, rng):
    with_reward(adapter, rng, TRAINABLE.hidden_dim)
    rewards = RewardModel.load(folder, adapter)
    user = {"role": "user", "content": "Who?"}
    wanted = rewards("Who?", "The fox.", {})
    chat = [user, {"role": "assistant", "content": "Another answer."}]
    for sample in (
        {"prompt": "Who?"},
        {"messages": [user]},
        {"prompt": [user]},
        {"messages": chat},
    ):
        assert rewards("Who?", "The fox.", sample) == wanted
    system = {"role": "system", "content": "Be brief."}
    assert rewards("Who?", "The fox.", {"messages": [system, user]}) != wanted


@pytest.mark.parametrize("family", ["", "qwen3", "llama3", "mistral", "gemma3", "lfm2"])
def test_an_answer_has_the_tokens_of_training(folder, tmp_path, family):
    if family:
        folder = write_family_folder(tmp_path / "zoo", family)
    tokenizer = load(folder)[1]
    record = {"prompt": "Who?", "chosen": "The fox.", "rejected": "A dog, or so."}
    (pair,) = load_preferences(lines(tmp_path / "t.jsonl", record), "train", tokenizer, 4000)
    for side, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        messages = [{"role": "user", "content": "Who?"}]
        tokens = answer_tokens(tokenizer, messages, record[side])
        assert tokens == [*pair.prompt.tolist(), *answer.tolist()]


def test_what_has_no_reward(folder, adapter, rng):
    with pytest.raises(CheckpointError, match="is no reward adapter"):
        RewardModel.load(folder, adapter)
    with_reward(adapter, rng, TRAINABLE.hidden_dim + 1)
    with pytest.raises(CheckpointError, match="Choose the model that the adapter was trained for"):
        RewardModel.load(folder, adapter)
    with_reward(adapter, rng, TRAINABLE.hidden_dim)
    rewards = RewardModel.load(folder, adapter)
    with pytest.raises(DataError, match=r"^Answer 1: The prompt needs"):
        rewards.of_all([*ANSWERS[:1], Answered("Who?", "The fox. " * 4000)])
    with pytest.raises(DataError, match=r"^f:7: "):
        rewards.of_all([Answered("Who?", "x", {"messages": [3]}, "f:7")])
