"""AdamW and Muon against float64 and other implementations, and the parameters that are matrices."""

import math
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.model.parallel_tracks import Model as TrackModel
from afm_mlx.quantization.rule import AFM_RULE
from afm_mlx.track_config import TrackConfig
from afm_mlx.training.loop.optimizers import (
    AdamW,
    Muon,
    hidden_matrices,
    optimizer_of,
    orthogonalized,
)
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.qat.qat_layers import prepare_qat
from tests.tools.models import random_config, random_model
from tests.tools.tracks import SMALL
from tests.tools.training import ToyModel


def float64_adamw(weight, gradients, rate, decay, betas=(0.9, 0.999), eps=1e-8):
    m = v = np.zeros_like(weight)
    b1, b2 = betas
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        weight = weight * (1 - rate * decay) - rate * step
    return weight


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "settings", [(1e-4, 0.0), (1e-4, 0.1), (1e-2, 0.01, (0.7, 0.9), 0.1)], ids=str
)
def test_adamw_is_exact_for_weights_of_any_type(rng, dtype, settings):
    """Steps of 1e-4 are far below bfloat16's 8 bits; the master copy keeps them."""
    start = mx.array(rng.normal(size=(5, 3)), dtype=dtype)
    parameters = {"layers": [{}, {"weight": start}]}
    optimizer = AdamW(*settings)
    optimizer.init(parameters)
    gradients = rng.normal(size=(40, 5, 3)).astype(np.float32)
    for gradient in gradients:
        tree = {"layers": [{}, {"weight": mx.array(gradient)}]}
        parameters = optimizer.apply_gradients(tree, parameters)
    start = np.array(start.astype(mx.float32), np.float64)
    expected = float64_adamw(start, gradients.astype(np.float64), *settings)
    exact = optimizer.exact(parameters)["layers"][1]["weight"]
    assert exact.dtype == mx.float32
    np.testing.assert_allclose(np.array(exact) - start, expected - start, rtol=2e-2, atol=1e-5)
    weight = parameters["layers"][1]["weight"]
    assert weight.dtype == dtype
    assert mx.array_equal(weight, exact.astype(dtype))


# -- Muon

SHAPES = [(5, 3), (16, 16), (8, 40)]


def moved(optimizer, start, gradients):
    """Apply gradients, a list of trees, to a tree of weights."""
    optimizer.init(start)
    for gradient in gradients:
        start = optimizer.apply_gradients(gradient, start)
    return start


@pytest.mark.parametrize("shape", SHAPES)
def test_muon_moves_a_matrix_as_mlx_does(rng, shape):
    """MLX's rate for a matrix is another one, by the factor that gives AdamW's size."""
    start = {"weight": mx.array(rng.normal(size=shape), mx.float32)}
    gradients = [{"weight": mx.array(rng.normal(size=shape), mx.float32)} for _ in range(5)]
    rows, columns = shape
    factor = 0.2 * math.sqrt(max(shape)) / max(1, rows / columns) ** 0.5
    ours = moved(Muon(1e-2, matrices={"weight"}, momentum=0.9), start, gradients)
    theirs = moved(optim.Muon(1e-2 * factor, momentum=0.9, weight_decay=0), start, gradients)
    change = np.array(theirs["weight"] - start["weight"])
    np.testing.assert_allclose(ours["weight"] - start["weight"], change, rtol=1e-3, atol=1e-5)
    size = np.sqrt((change**2).mean()) / 5e-2  # of a step, over the rate
    assert 0.03 < size < 0.3  # AdamW's is 0.2


def test_muon_takes_each_matrix_of_a_stack_alone(rng):
    start = mx.array(rng.normal(size=(2, 3, 8, 5)), mx.float32)
    gradients = [mx.array(rng.normal(size=start.shape), mx.float32) for _ in range(3)]
    settings = {"weight_decay": 0.1, "matrices": {"w"}}
    stack = moved(Muon(1e-2, **settings), {"w": start}, [{"w": g} for g in gradients])["w"]
    for place in np.ndindex(2, 3):
        alone = [{"w": g[place]} for g in gradients]
        one = moved(Muon(1e-2, **settings), {"w": start[place]}, alone)["w"]
        np.testing.assert_allclose(stack[place], one, atol=1e-6)


def test_other_parameters_take_adamw_s_steps(rng):
    start = {"embed": mx.array(rng.normal(size=(6, 4)), mx.float32), "w": mx.ones((4, 4))}
    gradients = [{n: mx.array(rng.normal(size=p.shape), mx.float32) for n, p in start.items()}]
    ours = moved(Muon(1e-2, 0.1, matrices={"w"}), start, gradients)
    adamw = moved(AdamW(1e-2, 0.1), start, gradients)
    assert mx.array_equal(ours["embed"], adamw["embed"])
    assert not mx.allclose(ours["w"], adamw["w"])


def test_muon_keeps_a_float32_copy_of_16_bit_matrices(rng):
    start = {"w": mx.array(rng.normal(size=(8, 4)), mx.bfloat16)}
    optimizer = Muon(1e-6, matrices={"w"})
    gradient = {"w": mx.array(rng.normal(size=(8, 4)), mx.bfloat16)}
    end = moved(optimizer, start, [gradient] * 3)
    assert optimizer.state["w"].keys() == {"momentum", "master"}
    assert optimizer.state["w"]["momentum"].dtype == mx.float32
    change = mx.abs(optimizer.exact(end)["w"] - start["w"].astype(mx.float32))
    assert 1e-8 < change.max().item() < 1e-5
    assert end["w"].dtype == mx.bfloat16


def test_singular_values_become_one(rng):
    for shape in SHAPES:
        u, _, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
        matrix = u @ np.diag(rng.uniform(0.3, 1, min(shape))) @ v
        found = np.array(orthogonalized(mx.array(matrix, mx.float32)), np.float64)
        values = np.linalg.svd(found, compute_uv=False)
        assert 0.6 < values.min() <= values.max() < 1.25
        assert (u.T @ found @ v.T).diagonal().min() > 0.6  # along the same vectors
    assert not mx.any(orthogonalized(mx.zeros((3, 4)))).item()


class Mixed(nn.Module):
    """A module of each kind that Muon leaves alone, and one that it takes."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.conv, self.norm = nn.Conv1d(4, 4, 3), nn.RMSNorm(4)
        self.args, self.embed_out = SimpleNamespace(vocab_size=8), nn.Linear(4, 8)
        self.proj, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.freeze()


def test_matrices_that_map_hidden_states(rng):
    assert hidden_matrices(Mixed()) == {"proj.weight"}

    config = random_config(rng, hidden_dim=64, num_heads=4, num_kv_heads=2)
    model = random_model(config, rng)
    names = hidden_matrices(model)
    left = {n for n, p in tree_flatten(model.trainable_parameters()) if n not in names}
    assert all("norm" in name or "embed" in name or "scale" in name for name in left)

    of_grid = hidden_matrices(prepare_qat(random_model(config, rng), AFM_RULE))
    assert {name.rpartition(".")[0] for name in of_grid} >= {n.rpartition(".")[0] for n in names}
    assert all(name.endswith(".weight") for name in of_grid)

    model.freeze()
    add_lora(model, rank=4, scale=1.0)
    pairs = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert len(pairs) > len(names)
    assert hidden_matrices(model) == pairs


def test_matrices_of_tracks_and_experts_are_stacks():
    model = TrackModel(TrackConfig(**SMALL))
    names = hidden_matrices(model)
    for name, parameter in tree_flatten(model.trainable_parameters()):
        is_other = "norm" in name or "embed" in name
        assert (name in names) != is_other
        assert is_other or parameter.ndim >= 3


def test_options_name_the_optimizer():
    model = ToyModel()
    options = TrainingOptions(3, 1e-3, optimizer="muon", momentum=0.8, betas=(0.5, 0.6))
    found = optimizer_of(options, model)
    assert isinstance(found, Muon)
    assert (found.momentum, found.betas) == (0.8, [0.5, 0.6])
    assert found.matrices == hidden_matrices(model)
    assert type(optimizer_of(TrainingOptions(3, 1e-3), model)) is AdamW
