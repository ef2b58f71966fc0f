"""The loss with masks: it equals the sliced model's, and its gradient reaches the predictor."""

from __future__ import annotations

import copy
import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx.adapters.mask_predictor import MaskPredictor, PredictorConfig, small_model
from afm_mlx.adapters.task_mask import apply_mask
from afm_mlx.config import PRESETS
from afm_mlx.model.model import Model
from afm_mlx.training.data.mask_batches import MaskBatch
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.masked_loss import PREDICTOR, MaskedLoss, add_masks

MODEL = dataclasses.replace(
    PRESETS["afm-nano"],
    vocab_size=40,
    hidden_dim=16,
    num_layers=3,
    num_kv_reuse_layers=1,
    hidden_dim_scale_factor=3.0,
    kv_bits=None,
)
CONFIG = PredictorConfig(blocks=3, ffn_dim=48, kept=16, group=4, rank=5)


def model_with_predictor(config=CONFIG):
    mx.random.seed(1)
    model = Model(MODEL)
    predictor = MaskPredictor(Model(small_model(MODEL)), config, seed=2)
    predictor.w2 = predictor.w2 * 50
    plain = copy.deepcopy(model)
    add_masks(model)
    model[PREDICTOR] = predictor
    mx.eval(model.parameters())
    return model, plain


def draw_batch(rng, rows=2, length=12):
    inputs = rng.integers(0, 40, (rows, length)).astype(np.int32)
    labels = np.roll(inputs, -1, axis=1)[:, 4:-1]
    positions = (np.arange(rows)[:, None] * length + np.arange(4, length - 1)).astype(np.int32)
    lengths = np.array([5, 3, 1], np.int32)
    prompts = np.zeros((3, 5), np.int32)
    prompts[:2] = inputs[:, :5]
    arrays = (inputs, positions.ravel(), labels.ravel(), np.ones(labels.size, np.float32))
    mask_of = np.repeat(np.arange(rows), length).reshape(rows, length).astype(np.int32)
    inputs, positions, labels, weights = map(mx.array, arrays)
    others = map(mx.array, (prompts, lengths, np.array([True, True, False]), mask_of))
    return MaskBatch(inputs, None, positions, labels, weights, *others)


def test_in_eval_mode_it_is_the_sliced_models_loss(rng):
    model, plain = model_with_predictor()
    model.eval()
    batch = draw_batch(rng)
    loss, metrics = MaskedLoss(CrossEntropy())(model, batch)
    expected = 0.0
    masks = []
    for row, length in ((0, 5), (1, 3)):
        masks.append(model[PREDICTOR].task_mask([np.array(batch.prompts)[row, :length]]))
        sliced = apply_mask(copy.deepcopy(plain).eval(), masks[-1])
        alone = batch.batch._replace(
            inputs=batch.inputs[row : row + 1],
            positions=batch.positions[:7],
            labels=batch.labels[7 * row : 7 * row + 7],
            weights=batch.weights[:7],
        )
        expected += CrossEntropy()(sliced, alone).item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    common = (masks[0].kept & masks[1].kept).sum(1) / CONFIG.kept_groups
    assert metrics["overlap"].item() / 14 == pytest.approx(common.mean(), abs=1e-6)
    assert 0.3 < metrics["soft_share"].item() / 14 < 1
    # The model is whole again outside the loss.
    difference = mx.abs(model(batch.inputs) - plain.eval()(batch.inputs)).max()
    assert difference.item() < 1e-5


def test_overlap_of_one_prompt_is_1(rng):
    model, _ = model_with_predictor()
    batch = draw_batch(rng)._replace(is_prompt=mx.array([True, False, False]))
    _, metrics = MaskedLoss(CrossEntropy())(model, batch)
    assert metrics["overlap"].item() == batch.weights.sum().item()


def gradients(model, batch):
    def loss(parameters):
        model.update(parameters)
        return MaskedLoss(CrossEntropy())(model, batch)[0]

    before = model.trainable_parameters()
    value, found = mx.value_and_grad(loss)(before)
    model.update(before)
    mx.eval(value, found)
    return value.item(), dict(tree_flatten(found))


def test_gradients_equal_finite_differences(rng):
    model, _ = model_with_predictor()
    model.train()
    batch = draw_batch(rng)
    _, found = gradients(model, batch)
    parameters = dict(tree_flatten(model.trainable_parameters()))
    for name in (
        f"{PREDICTOR}.w1",
        f"{PREDICTOR}.w2",
        f"{PREDICTOR}.body.model.embedding.weight",
        "model.layers.0.mlp.down_proj.linear.weight",
        "model.kv_reuse_layers.0.mlp.gate_proj.weight",
    ):
        gradient = np.array(found[name], np.float64)
        assert np.abs(gradient).max() > 0
        step = 1e-3 / np.abs(gradient).max() * gradient
        values = []
        for sign in (1, -1):
            moved = parameters[name] + mx.array((sign * step).astype(np.float32))
            model.update(tree_unflatten([(name, moved)]))
            values.append(MaskedLoss(CrossEntropy())(model, batch)[0].item())
        model.update(tree_unflatten([(name, parameters[name])]))
        expected = 2 * (gradient * step).sum()
        assert values[0] - values[1] == pytest.approx(expected, rel=0.05, abs=2e-5), name


@pytest.mark.parametrize("binary", [False, True])
def test_recomputed_blocks_have_the_same_gradients(rng, binary):
    model, _ = model_with_predictor(dataclasses.replace(CONFIG, binary=binary))
    model.train()
    batch = draw_batch(rng)
    value, expected = gradients(model, batch)
    with recomputed_blocks(model):
        again, found = gradients(model, batch)
    assert again == value
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient == expected[name]).all().item(), name
    # No mask is left in the model.
    names = [key for module in model.modules() for key in module]
    assert "_per_call" not in names
