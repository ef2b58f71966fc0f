"""Scores of channels against their formulas, computed block by block without the code that is tested."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.model.attention import row_positions
from afm_mlx.model.fused_layers import Normed
from afm_mlx.model.model import WritingBlock
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.data.samples import Sample
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.pruning.channel_scores import activation_scores, gradient_scores
from tests.tools.cli import CONFIG
from tests.tools.models import random_model


@pytest.fixture(params=["model", "packed"])
def source(request):
    """Float weights, and the same in 2 bits."""
    return ModelSource.open(request.getfixturevalue(request.param))


@pytest.fixture
def samples(rng):
    """Five samples of different lengths, whose last tokens are an answer."""
    made = []
    for length in (9, 14, 5, 23, 12):
        weights = np.zeros(length, np.float32)
        weights[length // 2 :] = 1
        made.append(Sample(rng.integers(1, 900, length), weights, "test"))
    return made


def batches(samples, packed=False, size=2):
    return Batches(samples, batch_size=size, length=64, packed=packed, shuffle=False)


def weight(layer) -> np.ndarray:
    found = layer.dequantize() if isinstance(layer, PackedLinear) else layer.weight
    return np.array(found, np.float64)


def channels(model, tokens):
    """Yield each block's channels (L, N) and outputs (L, D) in float64, for the inputs of one sample."""
    h, positions, kv = model.model.embedding(tokens), row_positions(tokens), None
    for block in model.layers:
        writes = isinstance(block, WritingBlock)
        place = (positions, None) if writes else (positions, kv)
        result = block.self_attn(Normed(h, block.input_layernorm), *place, residual=h)
        x, kv = result if writes else (result, kv)
        x = np.array(x[0], np.float64)
        norm = block.post_attention_layernorm
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * np.array(norm.weight)
        gate, up = (normed @ weight(layer).T for layer in (block.mlp.gate_proj, block.mlp.up_proj))
        inner = gate / (1 + np.exp(-gate)) * up
        y = x + inner @ weight(block.mlp.down_proj).T
        h = mx.array(y[None].astype(np.float32))
        yield inner, y


def test_activations_are_averaged_over_all_tokens_but_padding(source, samples):
    model = source.load()
    sums = [np.zeros(96) for _ in model.layers]
    lengths = np.zeros(len(model.layers))
    for sample in samples:
        tokens = mx.array(sample.tokens[None, :-1])
        for block, (inner, y) in enumerate(channels(model, tokens)):
            sums[block] += np.abs(inner).sum(0)
            lengths[block] += np.linalg.norm(y, axis=-1).sum()
    norms = [np.linalg.norm(weight(block.mlp.down_proj), axis=0) for block in model.layers]
    expected = np.stack([s * n / total for s, n, total in zip(sums, norms, lengths, strict=True)])
    for packed in (False, True):
        found = activation_scores(model, batches(samples, packed))
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-6)
    done = []
    part = activation_scores(model, batches(samples), 1, lambda *now: done.append(now))
    assert done == [(1, 1)]
    assert not np.allclose(part, expected)
    assert type(model.layers[0].mlp).__name__ == "MLP"


def test_gradients_are_those_of_the_weights_times_the_weights(model, samples):
    source = ModelSource.open(model)
    whole = source.load()
    layers = [block.mlp.down_proj for block in whole.layers]
    whole.freeze()
    for layer in layers:
        layer.unfreeze()
    whole.train()
    expected = np.zeros((len(layers), 96))
    by_weight = nn.value_and_grad(whole, lambda batch: CrossEntropy()(whole, batch))
    for sample in samples:
        gradients = by_weight(batches([sample], size=1)(0))[1]["model"]
        blocks = [*gradients["layers"], *gradients["kv_reuse_layers"]]
        for block, (layer, found) in enumerate(zip(layers, blocks, strict=True)):
            product = np.array(layer.weight * found["mlp"]["down_proj"]["weight"], np.float64)
            expected[block] += np.abs(product.sum(0)) / len(samples)
    # Rows of samples, the last batch not full.
    scored = source.load()
    found = gradient_scores(scored, batches(samples))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)
    assert not scored.training
    assert type(scored.layers[0]).__name__ == "WritingBlock"


def test_gradients_of_a_packed_model_are_finite_and_of_its_own_channels(packed, samples):
    model = ModelSource.open(packed).load()
    found = gradient_scores(model, batches(samples))
    assert found.shape == (3, 96)
    assert np.isfinite(found).all()
    assert (found.max(axis=1) > 0).all()


@pytest.mark.parametrize("find", [activation_scores, gradient_scores])
def test_one_block_s_channels_are_in_memory_at_a_time(rng, find):
    tokens = rng.integers(1, 900, 257)
    sample = Sample(tokens, np.minimum(np.arange(257), 1), "test")
    peaks = []
    for blocks in (2, 8):
        wide = dataclasses.replace(CONFIG, num_layers=blocks, hidden_dim_scale_factor=128.0)
        model = random_model(wide, rng)
        rows = Batches([sample], batch_size=1, length=256, packed=False)
        weights = mx.get_active_memory()
        mx.reset_peak_memory()
        find(model, rows)
        peaks.append(mx.get_peak_memory() - weights)
        del model
    block = 256 * 4096 * 4  # bytes of a block's channels
    assert peaks[1] - peaks[0] < block
