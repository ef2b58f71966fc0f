"""One step: accumulation, clipping, skipping, and memory."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import ConfigError
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.step import TrainingStep, averaged
from tests.tools.compare import assert_same_tensors, changed
from tests.tools.training import ToyBatches, ToyModel, joined, toy_loss


def new_step(loss=toy_loss, dropout=0.0, **options):
    model = ToyModel(dropout=dropout, seed=3).train()
    return TrainingStep(model, loss, AdamW(0.01), **options)


def taken(step, *batches):
    result = step(list(batches))
    step.evaluate(result)
    return result


def everything(step):
    trees = {"model": step.model, "optimizer": step.optimizer.state, "average": step.average}
    return {name: np.array(value) for name, value in tree_flatten(trees)}


def assert_near(step, other):
    expected = everything(other)
    for name, value in everything(step).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-2, atol=1e-4, err_msg=name)


def test_micro_batches_equal_one_batch_of_all_their_rows():
    batches = [ToyBatches(5)(i) for i in range(3)]
    apart, together = new_step(max_norm=0.5, ema_decay=0.9), new_step(max_norm=0.5, ema_decay=0.9)
    for _ in range(3):
        a, b = taken(apart, *batches), taken(together, joined(batches))
        np.testing.assert_allclose(a[:4], b[:4], rtol=1e-4)
    assert_near(apart, together)


def test_the_loss_is_the_weighted_mean_and_its_gradient_what_differences_give():
    step, batch = new_step(), ToyBatches(6)(0)
    weight = batch.weights.sum()
    (loss, metrics), gradients = step.gradients(batch, weight)
    assert metrics == {}
    assert loss.item() == pytest.approx((toy_loss(step.model, batch) / weight).item(), rel=1e-5)
    norm, start = step.model.norm, step.model.norm.weight
    for i, slope in enumerate(gradients["norm"]["weight"].tolist()):
        values = []
        for sign in (1, -1):
            norm.weight = start + sign * 1e-2 * (mx.arange(start.size) == i)
            values.append((toy_loss(step.model, batch) / weight).item())
        assert (values[0] - values[1]) / 2e-2 == pytest.approx(slope, abs=2e-3)


@pytest.mark.parametrize("limit", [0.01, 1e6, None])
def test_gradients_are_clipped_by_the_norm_of_all_of_them(limit):
    step, batch = new_step(max_norm=limit), ToyBatches(6)(0)
    gradients = dict(tree_flatten(step.gradients(batch, batch.weights.sum())[1]))
    norm = np.sqrt(sum((np.array(g, np.float64) ** 2).sum() for g in gradients.values()))
    assert taken(step, batch).grad_norm.item() == pytest.approx(norm, rel=1e-4)
    factor = min(1, limit / norm) if limit else 1
    moments = dict(tree_flatten(step.optimizer.state))
    for name, gradient in gradients.items():
        expected = 0.1 * factor * np.array(gradient)  # 1 - beta1 of the clipped gradient
        np.testing.assert_allclose(moments[f"{name}.m"], expected, rtol=1e-3, atol=1e-6 * factor)


def test_a_compiled_step_is_the_uncompiled_one(compiled):
    def loss(model, batch):
        value = toy_loss(model, batch)
        return value, {"doubled": 2 * value}

    steps, results, keys = [], [], []
    for switch in (mx.disable_compile, mx.enable_compile):
        mx.random.seed(7)
        steps.append(new_step(loss, dropout=0.3, max_norm=0.5, ema_decay=0.9))
        switch()  # as on a GPU: on a CPU, a new step switches it off
        found = [taken(steps[-1], ToyBatches(5)(i)) for i in range(3)]
        results.append([[*each[:4], each.metrics["doubled"]] for each in found])
        keys.append(mx.random.state[0].tolist())
    assert keys[0] == keys[1]
    np.testing.assert_allclose(*results, rtol=1e-4)
    assert_near(*steps)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(micro_batches, bad):
    def loss(model, batch):
        value = toy_loss(model, batch)
        is_bad = batch.inputs[0, 0] == -1
        if bad == "loss":
            return mx.where(is_bad, mx.inf, value)
        # The square root of 0 is 0, and its derivative is not finite.
        return value + mx.sqrt(mx.where(is_bad, 0, 1) * mx.square(model.norm.weight[0]))

    step = new_step(loss, max_norm=1.0, ema_decay=0.9)
    *others, last = batches = [ToyBatches(1)(i) for i in range(micro_batches)]
    taken(step, *batches)
    before = everything(step)
    tokens = np.array(last.inputs)
    tokens[0, 0] = -1
    result = taken(step, *others, last._replace(inputs=mx.array(tokens)))
    assert not np.isfinite([result.loss.item(), result.grad_norm.item()]).all()
    assert_same_tensors(everything(step), before)
    taken(step, *batches)
    assert changed(before, everything(step))


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_error_leaves_model_and_generator_as_they_were(micro_batches):
    def loss(model, batch):
        toy_loss(model, batch)
        raise ConfigError("another vocabulary")

    step = new_step(loss, dropout=0.3)
    mx.enable_compile()
    before, key = everything(step)["model.norm.weight"], mx.random.state[0].tolist()
    with pytest.raises(ConfigError):
        step([ToyBatches(1)(i) for i in range(micro_batches)])
    assert mx.random.state[0].tolist() == key
    np.testing.assert_array_equal(step.model.norm.weight, before)


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_memory_stays_flat(micro_batches):
    step = new_step(dropout=0.1, max_norm=1.0, ema_decay=0.9)
    batches = [ToyBatches(1)(i) for i in range(micro_batches)]
    held = []
    for _ in range(20):
        taken(step, *batches)
        held.append(mx.get_active_memory())
    # Less than a step allocates would be left over if each kept something.
    assert max(held[15:]) <= 1.05 * max(held[2:7])


def test_frozen_parameters_stay():
    model = ToyModel(seed=3).train()
    model.freeze()
    model.layers[1].down.unfreeze()
    step = TrainingStep(model, toy_loss, AdamW(0.1), ema_decay=0.5)
    before = dict(tree_flatten(ToyModel(seed=3).parameters()))
    taken(step, ToyBatches(1)(0))
    moved = changed(before, dict(tree_flatten(model.parameters())))
    assert moved == {"layers.1.down.weight", "layers.1.down.bias"}
    assert {name for name, _ in tree_flatten(step.average)} == moved


def test_bfloat16_weights_move_by_less_than_their_precision():
    model = ToyModel(seed=3).train()
    model.set_dtype(mx.bfloat16)
    step = TrainingStep(model, toy_loss, AdamW(1e-6), ema_decay=0.5)
    start = step.optimizer.exact(model.trainable_parameters())["norm"]["weight"]
    for i in range(5):
        assert np.isfinite(taken(step, ToyBatches(1)(i)).loss.item())
    end = step.optimizer.exact(model.trainable_parameters())["norm"]["weight"]
    assert 1e-7 < mx.abs(end - start).max().item() < 1e-5
    assert model.norm.weight.dtype == mx.bfloat16
    assert step.average["norm"]["weight"].dtype == mx.float32


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_average_has_no_bias(rng, decay):
    weights = rng.normal(size=(30, 4))
    average = mx.array(rng.normal(size=4), dtype=mx.float32)  # the start has no part in it
    for t, weight in enumerate(weights, start=1):
        now = mx.array(weight, dtype=mx.float32)
        average = averaged(average, now, decay, mx.array(t, mx.uint64))
        shares = decay ** np.arange(t - 1, -1, -1.0)
        expected = (shares[:, None] * weights[:t]).sum(0) / shares.sum()
        np.testing.assert_allclose(average, expected, atol=1e-5, rtol=0)
