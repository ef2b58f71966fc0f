"""The layer where the first NaN came from."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.training.loop.diagnosis import find_non_finite
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.optimizer import AdamW
from afm_mlx.training.loop.step import TrainingStep
from tests.tools.models import random_config, random_model
from tests.tools.training import ToyBatches, ToyModel, toy_loss


def found(model, loss=toy_loss, batches=None):
    step = TrainingStep(model.train(), loss, AdamW(0.1))
    kinds = [type(module) for module in model.modules()]
    text = find_non_finite(
        model, loss, batches or [ToyBatches()(0), ToyBatches()(1)], step.gradients
    )
    assert [type(module) for module in model.modules()] == kinds
    return text


def test_a_parameter():
    model = ToyModel()
    weight = np.array(model.layers[1].up.weight)
    weight[0, :2] = np.nan, np.inf
    model.layers[1].up.weight = mx.array(weight)
    expected = "the parameter layers.1.up.weight is not finite (1 NaN and 1 infinite of 72 numbers)"
    assert found(model) == expected


@pytest.mark.parametrize("recomputed", [False, True])
def test_an_activation(recomputed):
    model = ToyModel()
    model.layers[0].up.weight = mx.full((12, 6), 3e38)  # finite, and sums of it are not
    model.layers[0].up.bias = mx.full((12,), 3e38)
    if not recomputed:
        text = found(model)
    else:
        with recomputed_blocks(model):
            text = found(model)
    assert text.startswith("the output of layers.0.up is not finite (")
    assert "the largest number that came in is" in text


def test_an_activation_of_a_block_that_reuses_keys(rng):
    config = random_config(rng, num_layers=3, num_kv_reuse_layers=2, vocab_size=20)
    model = random_model(config, rng)
    down = model.model.kv_reuse_layers[1].mlp.down_proj
    down.weight = mx.full(down.weight.shape, 3e38)
    text = found(model, CrossEntropy())
    assert "the output of model.kv_reuse_layers.1.mlp" in text


def test_a_loss():
    text = found(ToyModel(), lambda model, batch: toy_loss(model, batch) * mx.inf)
    assert text.startswith("the loss is not finite")


def test_a_gradient():
    class Root(nn.Module):
        def __call__(self, x):
            return mx.sqrt(mx.abs(x) * 0) + x

    model = ToyModel()
    model.layers[0].dropout = Root()
    text = found(model)
    assert text.startswith("the gradient of layers.0.up.")
    assert "and those of" in text


def test_a_gradient_of_parameters_in_lists():
    """Gradients of all layers are bad; the one nearest to the loss is named, whatever holds its numbers."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [mx.ones(1), mx.ones(1)]

        def __call__(self, x):
            return x * self.parts[0] * self.parts[1]

    model = ToyModel()
    for layer in model.layers:
        layer.dropout = Listed()

    def loss(model, batch):
        # The square root of 0 is 0, and its derivative is not finite.
        return toy_loss(model, batch) + mx.sqrt(
            0 * sum(mx.square(layer.dropout(mx.ones(1))).sum() for layer in model.layers)
        )

    assert found(model, loss).startswith("the gradient of layers.1.dropout.parts.")


def test_gradients_have_the_dropout_of_the_step():
    model = ToyModel(dropout=0.5).train()
    step = TrainingStep(model, toy_loss, AdamW(0.1))
    batches = [ToyBatches()(i) for i in range(2)]
    keys = []

    def gradients(batch, weight):
        keys.append(mx.random.state[0].tolist())
        return step.gradients(batch, weight)

    mx.random.seed(5)
    for batch in batches:
        mx.eval(gradients(batch, mx.array(1.0)))
    mx.random.seed(5)
    find_non_finite(model, toy_loss, batches, gradients)
    assert keys[2:] == keys[:2]


def test_a_norm():
    # Its gradient is finite, and the square of it is not.
    def loss(model, batch):
        return toy_loss(model, batch) + 1e25 * batch.weights.sum() * model.layers[1].down.bias[0]

    text = found(ToyModel(), loss)
    assert "the norm of the gradient overflows" in text
    assert "layers.1.down.bias" in text


def test_nothing_to_learn():
    batch = ToyBatches()(0)
    assert "weight" in found(ToyModel(), batches=[batch._replace(weights=0 * batch.weights)])


def test_nothing_wrong():
    assert "did not come back" in found(ToyModel())
