"""The reward head's file: a round trip, and what is refused."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import (
    GRADED_AXES,
    AdapterConfig,
    RewardUse,
    load_adapter,
    save_adapter,
)
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.reward_head import (
    HEAD_NAME,
    RewardHead,
    head_dim,
    load_reward_head,
    save_reward_head,
)
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.converters.adapter_conversion import (
    convert_adapter,
    describe_adapter,
    verify_adapter,
)
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.tools.cases import draw, each
from tests.tools.compare import assert_same_tensors

UP = "model.layers.0.mlp.up_proj"
USE = RewardUse(("verbosity", "truthfulness"))


def made(rng, use=USE, dim=8):
    head = RewardHead(dim, use, seed=3)
    head.reward = draw(rng, (dim,))
    return head


@pytest.fixture
def folder(rng, tmp_path):
    tensors = {f"{UP}.lora_a": draw(rng, (8, 6)), f"{UP}.lora_b": draw(rng, (6, 20))}
    config = AdapterConfig(6, 0.5, 1, ("mlp.up_proj",), reward=USE)
    save_adapter(tmp_path / "a", tensors, config)
    save_reward_head(tmp_path / "a", made(rng))
    return tmp_path / "a"


def parameters(head):
    return dict(tree_flatten(head.parameters()))


def test_a_new_head_gives_all_answers_one_reward_and_grades_by_its_seed(rng):
    head, states = RewardHead(8, USE, seed=1), draw(rng, (3, 8))
    rewards, grades = head(states)
    np.testing.assert_array_equal(rewards, [0, 0, 0])
    assert {axis: each_axis.shape for axis, each_axis in grades.items()} == {
        "verbosity": (3, 3),
        "truthfulness": (3, 3),
    }
    again, other = RewardHead(8, USE, seed=1), RewardHead(8, USE, seed=2)
    assert_same_tensors(parameters(head), parameters(again))
    assert not mx.array_equal(grades["verbosity"], other(states)[1]["verbosity"])


@pytest.mark.parametrize("use", [USE, RewardUse()])
def test_round_trip(rng, tmp_path, use):
    head = made(rng, use)
    save_reward_head(tmp_path, head)
    found = load_reward_head(tmp_path, AdapterConfig(6, 0.5, 1, reward=use))
    assert head_dim(found) == 8
    assert_same_tensors(parameters(found), parameters(head))
    states = draw(rng, (2, 8)).astype(mx.float16)
    np.testing.assert_array_equal(found(states)[0], head(states)[0])


def test_the_config_says_what_is_graded(folder):
    assert load_adapter(folder)[1].reward == USE
    text = json.loads((folder / "adapter_config.json").read_text())
    assert text["reward"] == {"grades": ["verbosity", "truthfulness"]}
    assert RewardUse.of({*GRADED_AXES}) == RewardUse(GRADED_AXES)


@each("value", [3, {}, {"grades": "verbosity"}, {"grades": ["beauty"]}, {"grades": [3]}])
def test_other_uses_are_refused(folder, value):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"reward": value}))
    with pytest.raises(ConfigError, match=r"reward is .*, and must have grades"):
        load_adapter(folder)


def test_damaged_heads_are_refused(rng, folder):
    config = load_adapter(folder)[1]
    whole = parameters(made(rng))
    for change, says in [
        ({"reward": None}, r"reward is missing, and"),
        ({"more": mx.zeros((3,))}, r"more is .*, and nothing is needed"),
        ({"reward": draw(rng, (2, 4))}, "doesn't fit the config's reward"),
        ({"reward": whole["reward"].astype(mx.float16)}, "reward is .*float16"),
        ({"reward": mx.full((8,), mx.nan)}, "reward"),
    ]:
        tensors = {k: v for k, v in (whole | change).items() if v is not None}
        save_file(folder / HEAD_NAME, tensors)
        with pytest.raises(CheckpointError, match=says):
            load_reward_head(folder, config)
        assert len(verify_adapter(folder).problems) == 1
    (folder / HEAD_NAME).write_bytes(b"no header")
    with pytest.raises(CheckpointError):
        load_reward_head(folder, config)
    (folder / HEAD_NAME).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_reward_head(folder, config)
    with pytest.raises(CheckpointError, match="is no reward adapter"):
        load_reward_head(folder, replace(config, reward=None))


def test_tools_for_adapters_know_the_head(folder, tmp_path):
    assert verify_adapter(folder).problems == []
    assert describe_adapter(folder)["reward"] == {"grades": ["verbosity", "truthfulness"]}
    convert_adapter(folder, tmp_path / "copy", "mlx-lm", dtype=mx.float16)
    assert (tmp_path / "copy" / HEAD_NAME).read_bytes() == (folder / HEAD_NAME).read_bytes()
    config = load_adapter(tmp_path / "copy")[1]
    assert config.reward == USE
    for kind in ("peft", "toolkit", "fmadapter"):
        with pytest.raises(AFMError, match=f"{kind} has no place for its reward head"):
            convert_adapter(folder, tmp_path / f"b.{kind}", kind)
        assert not (tmp_path / f"b.{kind}").exists()


def test_a_head_that_cannot_be_written_leaves_no_adapter(rng, folder, tmp_path, monkeypatch):
    def full(path, tensors, metadata=None):
        raise OSError("No space left on device")

    tensors, config = read_adapter(folder)
    monkeypatch.setattr("afm_mlx.adapters.reward_head.save_file", full)
    with pytest.raises(AFMError, match=r"reward head .* can't be written: No space left"):
        write_adapter(tmp_path / "b", tensors, config, "mlx-lm", head=made(rng))
    assert not (tmp_path / "b").exists()
