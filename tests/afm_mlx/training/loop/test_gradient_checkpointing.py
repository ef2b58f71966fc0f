"""Gradient checkpointing: the same gradients, from blocks that are computed twice."""

from contextlib import nullcontext
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.model.fused_layers import silu_product
from afm_mlx.training.loop.gradient_checkpointing import (
    recomputed,
    recomputed_blocks,
)
from afm_mlx.training.loop.optimizers import AdamW
from afm_mlx.training.loop.step import TrainingStep
from tests.tools.compare import assert_close
from tests.tools.models import random_config, random_model
from tests.tools.training import ToyBatches, ToyModel, toy_loss
from tests.tools.zoo import zoo_model


def gradients(model, loss):
    value, tree = nn.value_and_grad(model, loss)()
    mx.eval(value, tree)
    return value, dict(tree_flatten(tree))


def assert_same_gradients(model, loss):
    value, expected = gradients(model, loss)
    kinds = [type(module) for module in model.modules()]
    with recomputed_blocks(model):
        got_value, got = gradients(model, loss)
    assert [type(module) for module in model.modules()] == kinds
    np.testing.assert_allclose(got_value, value, rtol=1e-5)
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(got[name], gradient, 1e-4, name)


@pytest.mark.parametrize("kv_bits", [None, 8])
def test_of_writing_and_reusing_blocks(rng, kv_bits):
    config = random_config(rng, num_layers=4, num_kv_reuse_layers=2, kv_bits=kv_bits)
    model = random_model(config, rng).train()
    tokens = mx.array(rng.integers(0, config.vocab_size, (2, 7)))
    positions = mx.array(rng.permutation(14)[:9])
    segments = mx.array([[1, 1, 1, 2, 2, 2, 0]] * 2)

    def loss():
        return mx.square(model.head(model.hidden_at(tokens, positions, segments))).mean()

    assert_same_gradients(model, loss)


def test_of_a_model_of_mlx_lm(rng):
    model = zoo_model("llama", 20, 1).train()
    tokens = mx.array(rng.integers(0, 20, (2, 5)))
    assert_same_gradients(model, lambda: mx.square(model(tokens)).mean())


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.parametrize("is_compiled", [False, True])
def test_silu_product_keeps_its_inputs_only(request, rng, is_compiled):
    if is_compiled:
        request.getfixturevalue("compiled")
    size, count = 1 << 16, 12

    def peak(product):
        def chain(x):
            for _ in range(count):
                x = product(mx.tanh(x), mx.sin(x))
            return x.sum()

        gradient, x = mx.grad(chain), mx.array(rng.normal(size=size).astype(np.float32))
        mx.eval(x)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval((mx.compile(gradient) if is_compiled else gradient)(x))
        return (mx.get_peak_memory() - held) / (4 * size * count)

    plain = peak(lambda gate, up: gate * mx.sigmoid(gate) * up)
    assert peak(silu_product) < plain - 1.2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_gradients_of_silu_product(rng, dtype):
    gate, up, weights = (
        mx.array(rng.normal(0, 4, (3, 50)).astype(np.float32)).astype(dtype) for _ in range(3)
    )
    got, wanted = (
        mx.grad(lambda g, u, f=f: (weights * f(g, u)).sum(), argnums=(0, 1))(gate, up)
        for f in (silu_product, lambda g, u: nn.silu(g) * u)
    )
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, 1e-5 if dtype == mx.float32 else 3e-2, least=1e-2)


def test_dropout_draws_the_same_mask_both_times():
    """With y = mask * w * x summed, dy/dw = y / w element by element, if the mask is the same."""
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = mx.full((400,), 2.0)
            self.dropout = nn.Dropout(0.5)

        def __call__(self, x):
            calls.append(self)
            return self.dropout(self.dropout(self.weight * x))

    model = nn.Sequential(Block(), Block()).train()
    x = mx.arange(1.0, 401.0)
    with recomputed_blocks(model):
        value, got = gradients(model, lambda: model(x).sum())
    assert len(calls) == 4
    # Both blocks' weights are 2, and the sum is bilinear in them.
    np.testing.assert_allclose(got["layers.0.weight"], got["layers.1.weight"])
    assert (got["layers.0.weight"] * 2).sum().item() == pytest.approx(value.item(), rel=1e-5)
    assert 0 < (got["layers.0.weight"] == 0).sum().item() < 400
    assert model.layers[0].dropout(mx.ones(100)).min().item() == 0  # dropout is as it was before


@pytest.mark.slow
def test_a_compiled_step_recomputes(compiled):
    weights = []
    for context in (recomputed_blocks, nullcontext):
        step = TrainingStep(ToyModel(seed=3).train(), toy_loss, AdamW(0.01))
        for i in range(2):
            with context(step.model):
                step.evaluate(step([ToyBatches(1)(i)]))
        weights.append(dict(tree_flatten(step.model.parameters())))
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][name], atol=1e-4, err_msg=name)


# -- Recomputation: the same numbers, from the arguments alone, and in an order that keeps little


class Pair(NamedTuple):
    first: mx.array
    second: mx.array | None = None


def random_arrays(rng, *shapes):
    return [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in shapes]


def test_gradients_and_trees_are_those_of_the_function(rng):
    """Dictionaries, named tuples with None, integers and other leaves, by position and by name."""
    w, x, other = random_arrays(rng, (5, 4), (3, 5), (3, 4))
    rows = mx.array(rng.permutation(3).astype(np.int32))

    def function(parameters, pair, rows, *, power, added):
        y = mx.tanh(pair.first @ parameters["w"])[rows] ** power + added
        return {"y": Pair(y), "rows": rows, "name": "n"}, pair.first * 2

    def gradients(function):
        def loss(w, x, other):
            result, doubled = function({"w": w}, Pair(x), rows, power=2, added=other)
            assert (result["y"].second, result["name"]) == (None, "n")
            assert result["rows"] is rows
            return (result["y"].first ** 3).sum() + doubled.sum()

        value, found = mx.value_and_grad(loss, argnums=(0, 1, 2))(w, x, other)
        return [value, *found]

    for got, wanted in zip(gradients(recomputed(function)), gradients(function), strict=True):
        assert_close(got, wanted, 1e-5)


@pytest.mark.usefixtures("exact_memory")
def test_a_chain_of_blocks_keeps_their_inputs_only(rng):
    """The peak grows with the depth by the inputs and the gradients; by all of a block's arrays without."""
    width, rows, inner = 64, 512, 8

    def block(w, x):
        for _ in range(inner):
            x = mx.tanh(x @ w)
        return x

    def peak(make, depth):
        weights = random_arrays(rng, *[(width, width)] * depth)
        (x,) = random_arrays(rng, (rows, width))
        mx.eval(weights, x)

        def loss(weights, x):
            for w in weights:
                x = make(block)(w, x)
            return x.sum()

        before = mx.get_active_memory()
        mx.reset_peak_memory()
        value, gradients = mx.value_and_grad(loss)(weights, x)
        # A norm of all gradients, as the clipping of a training step has it.
        norm = sum((g**2).sum() for _, g in tree_flatten(gradients))
        mx.eval(value, norm, gradients)
        mx.synchronize()
        return mx.get_peak_memory() - before

    state, weight = rows * width * 4, width * width * 4
    mine = (peak(recomputed, 12) - peak(recomputed, 4)) / 8
    plain = (peak(lambda f: f, 12) - peak(lambda f: f, 4)) / 8
    assert mine < 1.5 * (state + weight)
    assert plain > inner * state * 0.9
