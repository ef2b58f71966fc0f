"""The predictor of masks: its scores and masks, its files, and what is refused."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.mask_predictor import (
    CONFIG_NAME,
    HEAD_NAME,
    MaskPredictor,
    PredictorConfig,
    has_predictor,
    read_head,
    small_model,
    write_head,
)
from afm_mlx.config import PRESETS
from afm_mlx.errors import AFMError, ConfigError, RequestError
from afm_mlx.model.model import Model

MODEL = dataclasses.replace(
    PRESETS["afm-nano"], vocab_size=40, hidden_dim=16, num_layers=3, num_kv_reuse_layers=1
)
CONFIG = PredictorConfig(blocks=3, ffn_dim=52, kept=16, group=4, rank=5)


@pytest.fixture
def predictor() -> MaskPredictor:
    mx.random.seed(1)
    made = MaskPredictor(Model(small_model(MODEL)), CONFIG, seed=2)
    made.w2 = made.w2 * 50
    return made.eval()


def test_scores_are_the_head_of_the_last_tokens_state(predictor, rng):
    prompts = rng.integers(0, 40, (2, 7))
    scores = predictor(mx.array(prompts), mx.array([7, 4]))
    assert scores.shape == (2, 3, 13)
    for row, length in enumerate((7, 4)):
        state = predictor.body.final_norm(predictor.body.hidden(mx.array(prompts[row : row + 1])))
        h = np.array(state[0, length - 1], np.float64)
        expected = np.array(predictor.w2, np.float64) @ (np.array(predictor.w1, np.float64) @ h)
        np.testing.assert_allclose(np.array(scores[row]).ravel(), expected, atol=1e-5)


def test_masks_of_training_and_inference(predictor, rng):
    scores = mx.array(rng.normal(0, 1, (2, 3, 13)).astype(np.float32))
    soft, hard = predictor.training_masks(scores), predictor.masks(scores)
    assert (hard.sum(-1) == CONFIG.kept_groups).all().item()
    assert ((soft > 0) == hard).all().item()
    assert soft.max().item() < 1
    np.testing.assert_allclose(np.array(predictor.soft(scores).sum(-1)), 4, atol=1e-5)


def test_binary_masks_are_ones_and_zeros_with_the_soft_gradient(predictor, rng):
    scores = mx.array(rng.normal(0, 1, (2, 3, 13)).astype(np.float32))
    weights = mx.array(rng.normal(0, 1, (2, 3, 13)).astype(np.float32))
    soft = mx.grad(lambda s: (predictor.training_masks(s) * weights).sum())(scores)
    predictor.config = dataclasses.replace(CONFIG, binary=True)
    masks = predictor.training_masks(scores)
    assert set(np.array(masks).ravel().tolist()) == {0.0, 1.0}
    binary = mx.grad(lambda s: (predictor.training_masks(s) * weights).sum())(scores)
    np.testing.assert_array_equal(np.array(binary), np.array(soft))


def test_a_tasks_mask_has_the_highest_mean_scores(predictor, rng):
    prompts = [rng.integers(0, 40, n).tolist() for n in (3, 9)]
    scores = [predictor(mx.array([p]), mx.array([len(p)]))[0] for p in prompts]
    mask = predictor.task_mask(prompts, "a task", "abc")
    expected = np.array(predictor.masks(scores[0] + scores[1]))
    assert (mask.kept == expected).all()
    assert (mask.group, mask.task, mask.criterion) == (4, "a task", "predictor")
    assert mask.base_model_fingerprint == "abc"
    assert mask.share == pytest.approx(16 / 52)
    assert (predictor.task_mask(prompts[:1]).kept == np.array(predictor.masks(scores[0]))).all()
    for nothing in ([], [[]], [[1], []]):
        with pytest.raises(RequestError, match="without tokens"):
            predictor.task_mask(nothing)


def test_files(predictor, tmp_path):
    folder = tmp_path / "predictor"
    assert not has_predictor(tmp_path)
    folder.mkdir()
    write_head(folder, predictor)
    assert has_predictor(tmp_path)
    again = read_head(folder, predictor.body, MODEL)
    assert again.config == CONFIG
    for name in ("w1", "w2"):
        assert (again[name] == predictor[name]).all().item()


def test_damaged_files_and_other_models_are_refused(predictor, tmp_path):
    write_head(tmp_path, predictor)
    config, head = tmp_path / CONFIG_NAME, tmp_path / HEAD_NAME
    for name, value in (("num_layers", 4), ("vocab_size", 41), ("hidden_dim_scale_factor", 4.0)):
        other = dataclasses.replace(MODEL, **{name: value})
        with pytest.raises(ConfigError, match="it is for another model"):
            read_head(tmp_path, predictor.body, other)
    text, values = config.read_text(), json.loads(config.read_text())
    for changes, fault in (
        ({"rank": 6}, r"w1.*\[6, 8\]"),
        ({"kept": 15}, "multiples of the group"),
        ({"kept": 56}, "multiples of the group"),
        ({"group": 5}, "multiples of the group"),
        ({"blocks": 0}, "blocks is 0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"binary": 1}, "binary is 1"),
        ({"more": 1}, "more is missing or unknown"),
    ):
        config.write_text(json.dumps(values | changes))
        with pytest.raises(AFMError, match=fault):
            read_head(tmp_path, predictor.body, MODEL)
    config.write_text(text)
    whole = head.read_bytes()
    head.write_bytes(whole[:-8])
    with pytest.raises(AFMError, match=HEAD_NAME):
        read_head(tmp_path, predictor.body, MODEL)
    predictor.w1 = predictor.w1 * float("nan")
    write_head(tmp_path, predictor)
    with pytest.raises(AFMError, match="w1"):
        read_head(tmp_path, predictor.body, MODEL)


@pytest.mark.parametrize(
    ("width", "heads", "expected"), [(16, 4, 8), (256, 4, 128), (24, 4, 8), (8, 4, 8)]
)
def test_a_new_body_is_half_as_wide(width, heads, expected):
    config = small_model(dataclasses.replace(MODEL, hidden_dim=width, num_heads=heads))
    assert (config.hidden_dim, config.num_layers, config.vocab_size) == (expected, 2, 40)
