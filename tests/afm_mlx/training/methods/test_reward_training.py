"""Reward models: they learn, resume and are measured again, for AFM models and mlx-lm's."""

import dataclasses
import json

import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import RewardUse, load_adapter
from afm_mlx.adapters.reward_head import RewardHead, load_reward_head, save_reward_head
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.measure.reward_model import RewardModel
from afm_mlx.measure.rewards import Answered
from afm_mlx.training.loop.trainer import Resumed, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import measure_adapter, train_lora
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.compare import assert_same_tensors
from tests.tools.tokenizers import docstrings
from tests.tools.training_runs import Break, Watcher, break_at
from tests.tools.zoo_chats import write_family_folder

OPTIONS = TrainingOptions(iters=12, learning_rate=0.02, steps_per_eval=6, save_every=4, seed=3)
METHOD = RewardTraining(rank=4, scale=2.0)
WORDS = sorted({word for word in docstrings().split() if word.isalpha()})[:20]


def record(rng, i):
    """A preference for the answer with more words of the first half; every second one is graded."""
    good, bad = (str(rng.choice(half)) for half in (WORDS[:10], WORDS[10:]))
    line = {"prompt": f"say {i}", "chosen": f"{good} {good}", "rejected": f"{bad} {bad}"}
    if i % 2:
        line["grades"] = {"chosen": {"verbosity": 2}, "rejected": {"verbosity": 0}}
    return line | ({"strength": "slightly better"} if i % 3 else {})


def write_preferences(folder, rng):
    folder.mkdir()
    for split, count in (("train", 24), ("valid", 8), ("test", 8)):
        lines(folder / f"{split}.jsonl", *(record(rng, i) for i in range(count)))
    return folder


@pytest.fixture
def data(tmp_path, rng):
    return write_preferences(tmp_path / "preferences", rng)


@pytest.fixture
def recipe(packed, data):
    return Recipe(data, OPTIONS, packed, batch_size=8, test=True)


def test_of_a_packed_model(recipe, tmp_path):
    watcher = Watcher()
    result = train_lora(recipe, tmp_path / "adapter", METHOD, **watcher.hooks())
    losses, metrics = (watcher.losses(Validation, name) for name in ("valid_loss", "metrics"))
    assert losses[-1] < losses[0]
    assert metrics[0]["accuracy"] == 0  # all rewards are equal
    assert metrics[-1]["accuracy"] > 0.5
    assert metrics[-1]["grade_loss"] < metrics[0]["grade_loss"]
    assert result.outcome.tokens == 12 * 8
    tensors, config = load_adapter(result.path)
    assert config.reward == RewardUse(("verbosity",))
    assert all(".lora_" in name for name in tensors)
    trained, untrained = result.test.trained, result.test.untrained
    assert trained.loss < untrained.loss
    assert trained.to_dict()["pairs"] == 8
    # The folder is measured again by the kernels that run adapters, and by rewards one by one.
    again = measure_adapter(recipe, result.path, RewardTraining(initial_adapter=result.path))
    assert again.trained.loss == pytest.approx(trained.loss, rel=2e-2)
    assert again.trained.metrics["accuracy"] == trained.metrics["accuracy"]
    model = RewardModel.load(recipe.model, result.path)
    records = [json.loads(line) for line in (recipe.data / "test.jsonl").open()]
    sides = [
        np.array([model(each_one["prompt"], each_one[side], each_one) for each_one in records])
        for side in ("chosen", "rejected")
    ]
    assert np.mean(sides[0] > sides[1]) == trained.metrics["accuracy"]
    assert np.mean(sides[0] - sides[1]) == pytest.approx(trained.metrics["margin"], rel=2e-2)


def head_of(folder):
    return dict(tree_flatten(load_reward_head(folder, load_adapter(folder)[1]).parameters()))


def test_a_resumed_run_ends_as_an_unbroken_one(recipe, tmp_path):
    whole = train_lora(recipe, tmp_path / "whole", METHOD)
    with pytest.raises(Break):
        train_lora(recipe, tmp_path / "broken", METHOD, on_event=break_at(7))
    other = dataclasses.replace(METHOD, grade_weight=0.2)
    with pytest.raises(AFMError, match="grade_weight"):
        train_lora(recipe, tmp_path / "broken", other, resume=True)
    watcher = Watcher()
    broken = train_lora(recipe, tmp_path / "broken", METHOD, resume=True, **watcher.hooks())
    assert [event.step for event in watcher.events if isinstance(event, Resumed)] == [4]
    assert_same_tensors(load_adapter(whole.path)[0], load_adapter(broken.path)[0])
    assert_same_tensors(head_of(whole.path), head_of(broken.path))


def test_training_goes_on_from_a_reward_adapter_and_its_head(recipe, tmp_path):
    plain = dataclasses.replace(
        recipe, test=False, options=dataclasses.replace(OPTIONS, iters=2, learning_rate=1e-9)
    )
    first = train_lora(dataclasses.replace(recipe, test=False), tmp_path / "first", METHOD).path
    later = train_lora(plain, tmp_path / "later", RewardTraining(initial_adapter=first)).path
    for name, array in head_of(first).items():
        np.testing.assert_allclose(head_of(later)[name], array, atol=1e-6)
    # An adapter without a head gets a new one.
    bare = train_lora(
        dataclasses.replace(plain, data=write_chats(tmp_path / "chats")),
        tmp_path / "bare",
        LoRATraining(rank=4),
    ).path
    assert load_adapter(bare)[1].reward is None
    new = train_lora(plain, tmp_path / "new", RewardTraining(initial_adapter=bare)).path
    assert np.abs(head_of(new)["reward"]).max() < 1e-6


def write_chats(folder):
    folder.mkdir()
    lines(folder / "train.jsonl", {"prompt": "say x", "completion": "x"})
    return folder


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "qwen3"), ("llama3", "llama")])
def test_of_models_of_mlx_lm(family, kind, data, tmp_path):
    folder = write_family_folder(tmp_path / "model", family, kind)
    recipe = Recipe(data, OPTIONS, folder, batch_size=8, test=True)
    watcher = Watcher()
    result = train_lora(recipe, tmp_path / "adapter", METHOD, **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    records = [json.loads(line) for line in (data / "test.jsonl").open()]
    model = RewardModel.load(folder, result.path)
    chosen, rejected = (
        np.array(model.of_all([Answered(r["prompt"], r[side]) for r in records]))
        for side in ("chosen", "rejected")
    )
    margin = result.test.trained.metrics["margin"]
    assert np.mean(chosen - rejected) == pytest.approx(margin, rel=2e-2)


@each(
    "change, says",
    [
        ({"teacher": "self"}, "teacher would do nothing"),
        ({"packing": True}, "packing would do nothing"),
        ({"prompt_weight": 0.5}, "prompt_weight would do nothing"),
        ({"features": {"text": "t"}}, "features would do nothing"),
    ],
)
def test_arguments_without_an_effect_are_refused(recipe, tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        train_lora(dataclasses.replace(recipe, **change), tmp_path / "adapter", METHOD)


def test_a_head_of_another_width_is_refused(recipe, tmp_path, rng):
    first = train_lora(dataclasses.replace(recipe, test=False), tmp_path / "first", METHOD).path
    save_reward_head(first, RewardHead(7, RewardUse(("verbosity",))))
    with pytest.raises(CheckpointError, match="width 7"):
        train_lora(recipe, tmp_path / "later", RewardTraining(initial_adapter=first))
    with pytest.raises(CheckpointError, match="width 7"):
        RewardModel.load(recipe.model, first)
