"""Balance and z losses are tamm's, padding has no part in them, and training by them is measured and drawn."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from tamm.layers.mixture_of_experts.loss import LoadBalanceLoss, RouterZLoss

from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.tokenizer_export import save_tokenizer
from afm_mlx.track_config import TrackConfig
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.routing_loss import (
    RoutingLoss,
    balance_loss,
    expert_shares,
    observed_routing,
    z_loss,
)
from afm_mlx.training.loop.run_folder import plot_metrics
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.method import FullTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.train import train_by
from tests.tools.compare import assert_close
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.training_data import write_data

CONFIG = TrackConfig(**SMALL | {"num_layers_per_track": 4})


@pytest.fixture
def model():
    return random_tracks(CONFIG, 1)


def test_losses_are_tamms(rng):
    logits = mx.array(rng.normal(0, 2, (3, 2, 7, 5)).astype(np.float32))
    experts = mx.argsort(-logits, axis=-1)[..., :2]
    theirs = torch.from_numpy(np.array(logits))
    chosen, is_token = torch.from_numpy(np.array(experts).astype(np.int64)), mx.ones((2, 7))
    wanted = LoadBalanceLoss()(chosen, theirs.softmax(-1))
    assert_close(balance_loss(logits, experts, is_token), wanted, 1e-5)
    assert_close(z_loss(logits, is_token), RouterZLoss()(theirs), 1e-5)


def test_padding_has_no_part(rng):
    logits = mx.array(rng.normal(0, 2, (3, 1, 9, 5)).astype(np.float32))
    experts, is_token = mx.argsort(-logits, axis=-1)[..., :2], mx.arange(9)[None] < 6
    for loss in (
        lambda n: balance_loss(logits[:, :, :n], experts[:, :, :n], is_token[:, :n]),
        lambda n: z_loss(logits[:, :, :n], is_token[:, :n]),
        lambda n: expert_shares(experts[:, :, :n], 5, is_token[:, :n])[0],
    ):
        assert_close(loss(9), loss(6), 1e-6)
    assert balance_loss(logits, experts, mx.zeros((1, 9))).item() == 0
    twice = [mx.concatenate([each, each], axis=1) for each in (logits, experts)]
    with_a_row_of_padding = mx.concatenate([is_token, mx.zeros((1, 9), mx.bool_)])
    assert_close(
        balance_loss(*twice, with_a_row_of_padding), balance_loss(logits, experts, is_token), 1e-6
    )


def batch_of(rng):
    inputs = mx.array(rng.integers(1, 97, (2, 8)).astype(np.int32))
    positions = mx.arange(16)
    return Batch(inputs, None, positions, mx.roll(inputs, -1).flatten(), mx.full(16, 0.5))


def test_the_losses_are_added_in_training_alone(model, rng):
    batch, loss = batch_of(rng), RoutingLoss(CrossEntropy(), balance=0.5, z=0.25)
    plain = CrossEntropy()(model, batch)
    value, metrics = loss(model, batch)
    assert_close(value, plain, 1e-6)
    assert set(metrics) == {"balance", "router_z", "load_entropy", "load_max"}
    model.train()
    trained, _ = loss(model, batch)
    added = 0.5 * metrics["balance"] + 0.25 * metrics["router_z"]  # sums of the batch's weights
    assert_close(trained - plain, added, 1e-4)
    with observed_routing(model) as layers:
        model(batch.inputs)
    assert len(layers) == 2
    assert not any(layer.mlp.observer for layer in model.layers if hasattr(layer.mlp, "observer"))


def test_the_balance_loss_spreads_the_load(model, rng):
    """From a router that prefers two experts, by the balance loss alone."""
    batch, loss = (
        batch_of(rng),
        RoutingLoss(lambda model, batch: mx.sum(0 * model(batch.inputs)), 1, 0),
    )
    router = model.layers[1].mlp.router
    router.weight = router.weight.at[:, :2].add(0.5 * mx.sign(model.model.norm.weight))
    model.freeze()
    router.unfreeze()
    model.train()
    before = loss(model, batch)[1]
    for _ in range(12):
        _, gradients = nn.value_and_grad(model, lambda m: loss(m, batch)[0])(model)
        router.weight = (
            router.weight - 0.2 * gradients["model"]["layers"][1]["mlp"]["router"]["weight"]
        )
    after = loss(model, batch)[1]
    assert after["balance"] < before["balance"]


def test_a_run_has_the_figures_and_draws_them(tmp_path, spm_bpe, rng):
    folder = tmp_path / "model"
    save_tokenizer(spm_bpe, folder)
    pieces = len(load_tokenizer(folder).get_vocab())
    config = dataclasses.replace(CONFIG, vocab_size=pieces, max_position_embeddings=256)
    write_tracks_folder(folder, random_tracks(config, 1))
    options = TrainingOptions(
        iters=3, learning_rate=1e-3, steps_per_eval=2, save_every=3, steps_per_report=1
    )
    data = write_data(tmp_path / "data", rng)
    recipe = Recipe(data, options, folder, batch_size=2, max_seq_length=64, packing=False)
    train_by(FullTraining(), recipe, tmp_path / "out")
    model, _ = load(tmp_path / "out")
    assert model.args == config
    path = tmp_path / "out-run" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for name in ("balance", "router_z", "load_entropy", "load_max"):
        assert any(name in record for record in records)
        assert any(f"valid_{name}" in record for record in records)
    plot_metrics(path, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000
    checkpointed = dataclasses.replace(
        recipe, options=dataclasses.replace(options, grad_checkpoint=True)
    )
    with pytest.raises(ConfigError, match="Leave --grad-checkpoint out"):
        train_by(FullTraining(), checkpointed, tmp_path / "other")
