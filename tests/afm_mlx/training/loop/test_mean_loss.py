"""The layer where the first NaN came from."""

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.mean_loss import find_non_finite
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.step import TrainingStep
from tests.tools.cases import each
from tests.tools.training import ToyBatches, ToyModel, toy_loss


def found(model, loss=toy_loss, batches=None):
    step = TrainingStep(model.train(), loss, AdamW(0.1))
    kinds = [type(module) for module in model.modules()]
    batches = batches or [ToyBatches()(0), ToyBatches()(1)]
    text = find_non_finite(model, loss, batches, step.gradients)
    assert [type(module) for module in model.modules()] == kinds
    return text


def test_a_parameter():
    model = ToyModel()
    model.layers[1].up.weight[0, :2] = mx.array([np.nan, np.inf])
    expected = "the parameter layers.1.up.weight is not finite (1 NaN and 1 infinite of 72 numbers)"
    assert found(model) == expected


@pytest.mark.parametrize("context", [nullcontext, recomputed_blocks])
def test_an_activation(context):
    model = ToyModel()
    model.layers[0].up.weight = mx.full((12, 6), 3e38)  # finite, and sums of it are not
    model.layers[0].up.bias = mx.full((12,), 3e38)
    with context(model):
        text = found(model)
    assert text.startswith("the output of layers.0.up is not finite (")
    assert "the largest number that came in is" in text


def test_a_gradient():
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

    text = found(model, loss)
    assert text.startswith("the gradient of layers.1.dropout.parts.")
    assert "and so are the gradients of" in text


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


def infinite(model, batch):
    return toy_loss(model, batch) * mx.inf


def steep(model, batch):
    """Its gradient is finite, and the square of it is not."""
    return toy_loss(model, batch) + 1e25 * batch.weights.sum() * model.layers[1].down.bias[0]


@each(
    ("loss", "weight", "part"),
    [
        (infinite, 1, "the loss is not finite"),
        (steep, 1, "the norm of the gradient overflows; its largest number is "),
        (steep, 1, ", in layers.1.down.bias"),
        (toy_loss, 0, "no target of the batch has a weight"),
        (toy_loss, 1, "did not come back"),
    ],
)
def test_what_no_layer_is_the_cause_of(loss, weight, part):
    batch = ToyBatches()(0)
    assert part in found(ToyModel(), loss, [batch._replace(weights=weight * batch.weights)])
