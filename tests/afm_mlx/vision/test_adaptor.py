"""The adaptor next to tamm's pooler and torch's transformer layer."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import torch

from afm_mlx.vision.adaptor import VisionAdaptor, space_to_channel
from afm_mlx.vision.encoder import Block
from afm_mlx.vision_config import AdaptorConfig
from tests.afm_mlx.vision.test_encoder import randomized
from tests.tools.cases import draw, each
from tests.tools.compare import assert_close, assert_same
from tests.tools.vision import TINY


def adaptor_of(rng, text_dim=6, **fields):
    return randomized(
        VisionAdaptor(
            dataclasses.replace(TINY, adaptor=AdaptorConfig(num_heads=2, **fields)), text_dim
        ),
        rng,
    )


@pytest.mark.parametrize("conv_norm", [False, True])
@each(
    "grid, size, kernel, padding",
    [(42, 12, 3, 1), (14, 3, 3, 1), (14, 3, 3, 0), (9, 9, 1, 0), (7, 3, 5, 4), (5, 1, 2, 1)],
)
def test_pooling_is_tamms(rng, conv_norm, grid, size, kernel, padding):
    from tamm.layers.pooler import AdaptiveConvPooler

    own = {"pool_grid": 1, "rapid_pool_grid": 1}
    adaptor = adaptor_of(rng, conv_norm=conv_norm, conv_kernel=kernel, conv_padding=padding, **own)
    theirs = AdaptiveConvPooler.create_basic_builder(
        input_dim=6,
        kernel_size=kernel,
        padding=padding,
        norm="rms_norm" if conv_norm else None,
        activation="relu" if conv_norm else None,
        pooler_output_shape=(size, size),
    ).build()
    weight = np.array(adaptor.conv.weight).reshape(6, kernel, kernel, 6).transpose(0, 3, 1, 2)
    state = {"convolution.weight": torch.from_numpy(weight)}
    if conv_norm:
        state["norm.weight"] = torch.from_numpy(np.array(adaptor.norm.weight))
    theirs.load_state_dict(state)
    x = rng.standard_normal((2, grid, grid, 6)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(x))
    assert_close(adaptor.pool(mx.array(x), size), wanted, 1e-6)


def test_its_layer_is_torchs(rng):
    """`nn.TransformerEncoderLayer` with the norm first and the exact GELU."""
    block = randomized(Block(12, 3, 20, 1e-5), rng)
    theirs = torch.nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0, activation="gelu", batch_first=True, norm_first=True
    ).eval()
    layers = {
        "self_attn.in_proj_": block.attn.qkv,
        "self_attn.out_proj.": block.attn.proj,
        "linear1.": block.mlp.fc1,
        "linear2.": block.mlp.fc2,
        "norm1.": block.norm1,
        "norm2.": block.norm2,
    }
    theirs.load_state_dict(
        {
            f"{name}{part}": torch.from_numpy(np.array(layer[part]))
            for name, layer in layers.items()
            for part in ("weight", "bias")
        }
    )
    x = rng.standard_normal((2, 9, 12)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(x))
    assert_close(block(mx.array(x)), wanted, 1e-5)


def test_a_tile_of_any_size_has_the_modes_tokens(rng):
    adaptor = adaptor_of(rng, pool_grid=4, rapid_pool_grid=2)
    for grid, tokens in ((21, 16), (7, 4), (14, 16)):
        assert adaptor(draw(rng, (2, grid, grid, 32))).shape == (2, tokens, 6)


def test_neighbours_become_channels(rng):
    x = draw(rng, (2, 7, 7, 3))
    got = space_to_channel(x, 3)
    padded = np.zeros((2, 9, 9, 3), np.float32)
    padded[:, :7, :7] = np.array(x)
    for row in range(3):
        for column in range(3):
            block = padded[:, 3 * row : 3 * row + 3, 3 * column : 3 * column + 3]
            assert_same(got[:, 3 * row + column], mx.array(block.reshape(2, -1)))


def test_the_second_kind_of_adaptor(rng):
    adaptor = adaptor_of(rng, kind="space_to_channel", mlp_dim=10, block_size=3)
    x = draw(rng, (1, 7, 7, 32))
    assert adaptor(x).shape == (1, 9, 6)
    assert adaptor.config.tokens("rapid") == 9
    assert adaptor.config.tokens("high") == 5 * 49
