"""Models with an image encoder: their parameters, folders, features, and texts that are the same without it."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import parameter_shapes
from afm_mlx.loading.load import load_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.vision.prompt_image import read_image
from afm_mlx.vision_config import MODES, AdaptorConfig
from tests.tools.cases import draw
from tests.tools.compare import assert_close, assert_same, assert_same_tensors
from tests.tools.models import random_config, random_model
from tests.tools.vision import TINY, picture, random_vision_config, with_images


def write_folder(folder: Path, model, values) -> Path:
    folder.mkdir()
    save_weights(folder, dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_parameters_are_the_configs(rng):
    for vision in (
        random_vision_config(rng, num_registers=0),
        random_vision_config(rng, num_registers=2),
        random_vision_config(rng, adaptor=AdaptorConfig("space_to_channel", mlp_dim=7)),
        random_vision_config(
            rng, adaptor=AdaptorConfig(num_heads=1, pool_grid=1, rapid_pool_grid=1, conv_norm=True)
        ),
    ):
        config = random_config(rng, vision_config=vision)
        found = {n: a.shape for n, a in tree_flatten(Model(config).parameters())}
        assert found == parameter_shapes(config)


@pytest.mark.parametrize("bits", [None, 4, 8])
def test_a_folder_float_or_packed(rng, tmp_path, bits):
    config = with_images(random_config(rng, hidden_dim=32, num_heads=2, num_kv_heads=1))
    model, values = random_model(config, rng), config.to_dict()
    if bits is not None:
        rule = QuantizationRule(bits, "balanced", "row")
        model, values = quantize_model(model, values, rule)
    loaded = load_model(write_folder(tmp_path / "model", model, values))
    assert loaded.args == config
    # The scales of packed layers are float32 in memory.
    got, wanted = (dict(tree_flatten(m.parameters())) for m in (loaded, model))
    assert_same_tensors(got, wanted)
    packed = [m for m in loaded.vision.modules() if isinstance(m, PackedLinear)]
    assert bool(packed) == (bits is not None)
    image = read_image(picture(rng, 90, 60), TINY, "balanced")
    assert_close(loaded.vision.features(image), model.vision.features(image), 1e-5)


def test_features_of_every_mode_are_as_many_as_its_tokens(rng):
    config = with_images(random_config(rng))
    model, file = random_model(config, rng), picture(rng, 90, 60)
    for mode in MODES:
        image = read_image(file, config.vision_config, mode)
        features = model.vision.features(image)
        assert features.shape == (image.tokens, config.hidden_dim)
        assert image.tokens == config.vision_config.tokens(mode)
    tiles = model.vision.whiten(mx.array(image.tiles))
    mean, std = (mx.array(getattr(TINY.images, name)) for name in ("mean", "std"))
    assert_close(tiles, (mx.array(image.tiles) / 255 - mean) / std, 1e-6)


@pytest.mark.parametrize("kv", ["int8", "float"])
def test_embeddings_are_as_good_as_ids(rng, kv):
    model = random_model(random_config(rng), rng)
    ids = mx.array(rng.integers(0, model.args.vocab_size, (2, 9)))
    embeddings = model.embed(ids)
    assert_same(model(embeddings), model(ids))
    lengths = mx.array([9, 4])
    assert_same(model.hidden_last(embeddings, lengths), model.hidden_last(ids, lengths))
    got = []
    for inputs in (ids, embeddings):
        cache = model.make_cache(kv)
        model.prefill(inputs[:1], cache)
        got.append((model(inputs[:1, :1], cache), model(inputs[:1, :3], cache)))
        got[-1] += model.greedy(inputs[:1, :1], cache)
    for one, other in zip(*got, strict=True):
        assert_same(one, other)


def test_texts_are_the_same_with_and_without_an_encoder(rng):
    config = random_config(rng)
    model = random_model(config, rng)
    other = Model(with_images(config)).eval()
    other.load_weights(tree_flatten(model.parameters()), strict=False)
    ids = mx.array(rng.integers(0, config.vocab_size, (1, 9)))
    assert_same(other(ids), model(ids))
    assert model.vision is None


def test_half_types_stay_what_they_are(rng):
    """A GPU's type, in which averages and positions must not be rounded twice."""
    config = with_images(random_config(rng))
    vision, pixels = random_model(config, rng).vision, draw(rng, (1, 84, 84, 3))
    wanted = vision(pixels)
    vision.set_dtype(mx.bfloat16)
    got = vision(pixels)
    assert got.dtype == mx.bfloat16
    assert_close(got, wanted, 0.05)


def test_the_mode_rapid_of_one_image_is_one_vector_for_each_token(rng):
    """A vector depends on its image alone, not on the text around it."""
    vision = random_model(with_images(random_config(rng)), rng).vision
    pixels = draw(rng, (3, 28, 28, 3))
    for index, wanted in enumerate(vision(pixels)):
        assert_close(vision(pixels[index : index + 1])[0], wanted, 1e-5)
