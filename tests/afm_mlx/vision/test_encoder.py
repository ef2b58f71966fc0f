"""The encoder next to transformers' ViTDet and torch's bicubic resizing, and what registers do."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from mlx.utils import tree_flatten

from afm_mlx.vision.encoder import Attention, VisionEncoder, Windows, resize_positions
from tests.tools.cases import draw
from tests.tools.compare import assert_close, error
from tests.tools.vision import TINY, random_vision_config


def randomized(module, rng):
    """Biases and norms are drawn too, so that none can be left out unseen."""
    weights = []
    for name, array in tree_flatten(module.parameters()):
        noise = draw(rng, array.shape)
        is_scale = "norm" in name and name.endswith("weight")
        weights.append((name, 1 + 0.3 * noise if is_scale else noise / array.shape[-1] ** 0.5))
    module.load_weights(weights)
    return module.eval()


def vitdet(config, size):
    """transformers' model of our config, with the weights of ours."""
    from transformers import VitDetConfig, VitDetModel

    few = config.global_layers
    return VitDetModel(
        VitDetConfig(
            hidden_size=config.hidden_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            mlp_ratio=config.mlp_dim // config.hidden_dim,
            layer_norm_eps=config.layer_norm_eps,
            image_size=size,
            pretrain_image_size=config.position_size,
            patch_size=config.patch_size,
            qkv_bias=config.qkv_bias,
            window_block_indices=[i for i in range(config.num_layers) if i not in few],
            window_size=config.window_size,
        )
    ).eval()


def loaded(theirs, ours):
    patch, dim = ours.config.patch_size, ours.config.hidden_dim
    state = {}
    for name, array in tree_flatten(ours.parameters()):
        weight = torch.from_numpy(np.array(array))
        name = name.replace("blocks.", "encoder.layer.").replace(".attn.", ".attention.")
        if name == "pos_embed":
            name = "embeddings.position_embeddings"
            weight = torch.cat([torch.full((1, 1, dim), 7.0), weight.reshape(1, -1, dim)], 1)
        elif name.startswith("patch_embed"):
            name = name.replace("patch_embed", "embeddings.projection")
            if weight.ndim == 2:
                weight = weight.reshape(dim, patch, patch, 3).permute(0, 3, 1, 2)
        elif name.startswith("norm."):
            continue  # VitDetModel ends before it
        state[name] = weight
    theirs.load_state_dict(state)
    return theirs


def in_rows(x, encoder, size):
    """States that `hidden` gives window by window, as (T, G, G, C)."""
    norm, encoder.norm = encoder.norm, lambda states: states
    y = encoder(x)
    encoder.norm = norm
    return y


@pytest.mark.parametrize("case", range(8))
def test_without_registers_it_is_vitdet(rng, case):
    """Grids of one window, of several, padded ones, and positions of the same size, smaller and larger."""
    config = random_vision_config(rng, num_registers=0)
    config = dataclasses.replace(config, mlp_dim=config.hidden_dim * int(rng.integers(1, 4)))
    size = config.image_size
    if case == 0:  # 80 pixels with windows of 3: 5 patches, so one row and column of padding
        config = dataclasses.replace(
            config, patch_size=16, window_size=3, image_size=80, rapid_size=48, position_size=80
        )
        size = 80
    elif case == 1:
        size = config.rapid_size
    elif case % 2:  # any number of patches
        size = config.patch_size * int(rng.integers(1, 4 * config.window_size))
    encoder = randomized(VisionEncoder(config), rng)
    theirs = loaded(vitdet(config, size), encoder)
    pixels = rng.standard_normal((2, size, size, 3)).astype(np.float32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(pixels).permute(0, 3, 1, 2)).last_hidden_state
    got = in_rows(mx.array(pixels), encoder, size)
    assert_close(got, wanted.permute(0, 2, 3, 1), 2e-5, what=config)


@pytest.mark.parametrize(("old", "new"), [(28, 14), (28, 42), (28, 28), (5, 8), (7, 1), (1, 6)])
def test_positions_are_resized_as_by_torch(rng, old, new):
    table = draw(rng, (old, old, 3))
    theirs = torch.from_numpy(np.array(table)).permute(2, 0, 1)[None]
    wanted = torch.nn.functional.interpolate(
        theirs, size=(new, new), mode="bicubic", align_corners=False
    )[0].permute(1, 2, 0)
    assert_close(resize_positions(table, new), wanted, 1e-5)


# -- registers


def tokens(rng, tiles, registers, count, size, dim):
    return draw(rng, (tiles, registers + count * size, dim))


@pytest.mark.parametrize("registers", [0, 1, 3])
def test_one_window_is_global_attention(rng, registers):
    attention = randomized(Attention(8, 2, True), rng)
    x = tokens(rng, 2, registers, 1, 9, 8)
    assert_close(attention(x, Windows(registers, 1)), attention(x), 1e-6)


def test_windows_see_copies_of_the_registers_which_become_their_mean(rng):
    """The formula, window by window."""
    attention = randomized(Attention(8, 2, True), rng)
    registers, count, size = 2, 3, 4
    x = tokens(rng, 2, registers, count, size, 8)
    r, parts = x[:, :registers], mx.split(x[:, registers:], count, axis=1)
    each = [attention(mx.concatenate([r, part], axis=1)) for part in parts]
    mean = sum(y[:, :registers] for y in each) / count
    wanted = mx.concatenate([mean, *(y[:, registers:] for y in each)], axis=1)
    assert_close(attention(x, Windows(registers, count)), wanted, 1e-5)


def test_permuted_windows_give_permuted_states(rng):
    """Of equal positions, windows know nothing of their place."""
    config = dataclasses.replace(TINY, num_registers=2)
    encoder = randomized(VisionEncoder(config), rng)
    encoder.pos_embed = mx.broadcast_to(encoder.pos_embed[:1, :1], encoder.pos_embed.shape)
    side, window = config.image_size, config.window_size * config.patch_size
    count = side // window
    order = mx.array(rng.permutation(count * count))

    def permuted(x, cell):
        x = x.reshape(1, count, cell, count, cell, -1).swapaxes(2, 3)
        x = x.reshape(1, count * count, cell, cell, -1)[:, order]
        x = x.reshape(1, count, count, cell, cell, -1).swapaxes(2, 3)
        return x.reshape(1, count * cell, count * cell, -1)

    pixels = draw(rng, (1, side, side, 3))
    got = encoder(permuted(pixels, window))
    assert_close(got, permuted(encoder(pixels), config.window_size), 1e-5)


@pytest.mark.parametrize("registers", [0, 1])
def test_registers_carry_what_a_window_sees_to_the_others_one_layer_later(rng, registers):
    layers = {}
    for count in (1, 2):
        config = dataclasses.replace(
            TINY, num_registers=registers, num_layers=count, global_layers=()
        )
        encoder = randomized(VisionEncoder(config), rng)
        pixels = draw(rng, (1, 84, 84, 3))
        changed = np.array(pixels)
        changed[:, :28, :28] += 1  # the first window
        difference = mx.abs(encoder(pixels) - encoder(mx.array(changed))).max(axis=(0, 3))
        layers[count] = np.array(difference)
    for count, difference in layers.items():
        assert difference[:7, :7].min() > 0
        others = difference[7:].max(), difference[:7, 7:].max()
        assert (min(others) > 1e-5) == (count == 2 and registers > 0)
        assert (max(others) == 0) == (count == 1 or registers == 0)


def test_a_global_layer_needs_no_register(rng):
    config = dataclasses.replace(TINY, num_registers=0, num_layers=1, global_layers=(0,))
    encoder = randomized(VisionEncoder(config), rng)
    pixels = draw(rng, (1, 84, 84, 3))
    changed = np.array(pixels)
    changed[:, :28, :28] += 1
    assert error(encoder(mx.array(changed))[:, 8:], encoder(pixels)[:, 8:]) > 1e-4


def test_tiles_do_not_see_each_other(rng):
    encoder = randomized(VisionEncoder(TINY), rng)
    pixels = draw(rng, (3, 84, 84, 3))
    together = encoder(pixels)
    for index in range(3):
        assert_close(together[index], encoder(pixels[index : index + 1])[0], 1e-5)


# -- training on a part of the patches


def test_kept_patches_keep_their_positions(rng):
    """All of them, in any order, are the whole; a part is what attention over that part gives."""
    config = dataclasses.replace(TINY, num_layers=1, global_layers=())
    encoder = randomized(VisionEncoder(config), rng)
    pixels = draw(rng, (2, 84, 84, 3))
    order = mx.array(np.stack([[rng.permutation(49) for _ in range(9)] for _ in range(2)]))
    whole = encoder.hidden(pixels)
    got = encoder.hidden(pixels, order)
    wanted = mx.take_along_axis(whole.reshape(2, 9, 49, -1), order[..., None], axis=2)
    assert_close(got, wanted.flatten(1, 2), 1e-5)
    part = order[:, :, :10]
    assert encoder.hidden(pixels, part).shape == (2, 90, config.hidden_dim)
    # Without attention's value, states are the patches alone.
    encoder.blocks[0].attn.proj.weight = mx.zeros_like(encoder.blocks[0].attn.proj.weight)
    whole = encoder.hidden(pixels).reshape(2, 9, 49, -1)
    wanted = mx.take_along_axis(whole, part[..., None], axis=2).flatten(1, 2)
    assert_close(encoder.hidden(pixels, part), wanted, 1e-5)


def test_patches_are_not_dropped_from_padded_windows(rng):
    encoder = VisionEncoder(TINY)
    with pytest.raises(ValueError, match="10 x 10 patches has incomplete windows of 7 x 7"):
        encoder.hidden(draw(rng, (1, 40, 40, 3)), mx.zeros((1, 4, 3), mx.int32))


def test_gradients_reach_every_parameter(rng):
    encoder = VisionEncoder(TINY)
    pixels = draw(rng, (1, 84, 84, 3))
    _, gradients = nn.value_and_grad(encoder, lambda m: m(pixels).square().sum())(encoder)
    for name, gradient in tree_flatten(gradients):
        assert mx.abs(gradient).max().item() > 0, name
