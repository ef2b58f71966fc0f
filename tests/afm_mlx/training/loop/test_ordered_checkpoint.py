"""Recomputation: the same numbers, from the arguments alone, and in an order that keeps little."""

from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.training.loop.gradient_checkpointing import recomputed
from tests.tools.compare import assert_close


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
