"""The published counts of the default encoder, JSON, and values that are refused."""

import dataclasses
import json
import math

import mlx.core as mx
import pytest

from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.errors import ConfigError
from afm_mlx.vision_config import MODES, AdaptorConfig, ImageConfig, VisionConfig
from tests.tools.cases import each
from tests.tools.vision import TINY

DEFAULT = VisionConfig(image_token_id=7)


def test_what_is_published_of_the_default():
    assert [DEFAULT.tokens(mode) for mode in MODES] == [720, 144, 9]
    assert [DEFAULT.num_tiles(mode) for mode in MODES] == [5, 1, 1]
    assert [DEFAULT.tile_size(mode) for mode in MODES] == [672, 672, 224]
    shapes = DEFAULT.parameter_shapes(2048)
    encoder = {name: shape for name, shape in shapes.items() if ".encoder." in name}
    assert sum(map(math.prod, encoder.values())) == 303_902_720
    assert len(DEFAULT.global_layers) == 3


def test_operations_are_the_products_and_the_attention():
    """By the formula of the reference, without a register and the embedding of patches."""
    plain = dataclasses.replace(DEFAULT, num_registers=0)
    for mode, tflops in (("high", 5.7), ("balanced", 1.13), ("rapid", 0.12)):
        assert DEFAULT.encoder_flops(mode) / 1e12 == pytest.approx(tflops, abs=0.02)
        patches = plain.grid(mode) ** 2
        linear = 24 * 2 * patches * 12 * 1024**2 + 2 * patches * 768 * 1024
        attention = 21 * 4 * patches * 196 * 1024 + 3 * 4 * patches**2 * 1024
        assert plain.encoder_flops(mode) == plain.num_tiles(mode) * (linear + attention)


def test_counts_need_no_arrays(monkeypatch):
    for name in ("uniform", "normal"):  # of every weight of a new model
        monkeypatch.setattr(mx.random, name, lambda *_, **__: pytest.fail("a model is made"))
    assert PRESETS["afm-3b-vision"].num_parameters == 3_111_368_064 + DEFAULT.num_parameters(2048)


def test_json_and_back():
    for config in (
        DEFAULT,
        TINY,
        dataclasses.replace(TINY, adaptor=AdaptorConfig("space_to_channel")),
    ):
        assert VisionConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    text, images = PRESETS["afm-3b"], PRESETS["afm-3b-vision"]
    assert "vision_config" not in text.to_dict()
    for config in (text, images):
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ModelConfig.from_dict(text.to_dict() | {"vision_config": None}) == text


@each(
    "changes, words",
    [
        ({"image_size": 670}, "image_size is 670; allowed is a multiple of patch_size, 16"),
        ({"image_size": 1.5}, "image_size is 1.5; allowed is of type int"),
        ({"image_size": True}, "image_size is True"),
        ({"image_size": 1 << 20}, "image_size is 1048576; allowed is 1 to 16,384"),
        ({"rapid_size": 672}, "rapid_size is 672; allowed is below image_size, 672"),
        ({"num_heads": 7}, "num_heads is 7; allowed is a divisor of hidden_dim, 1024"),
        (
            {"num_layers": 12},
            r"global_layers is \(7, 15, 23\); allowed is different numbers of 0 to 11",
        ),
        ({"global_layers": [1, 1]}, "different numbers"),
        ({"global_layers": 3}, "a list of numbers"),
        ({"global_layers": ["a"]}, "of type int"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"num_registers": -1}, "num_registers is -1; allowed is 0 to"),
        ({"image_token_id": -1}, "image_token_id is -1"),
        (
            {"adaptor": {"kind": "linear"}},
            "vision_config.adaptor: kind is 'linear'; allowed is conv or space",
        ),
        ({"adaptor": {"num_heads": 5}}, "adaptor.num_heads is 5; allowed is a divisor"),
        (
            {"adaptor": {"pool_grid": 43}},
            "adaptor.pool_grid is 43; allowed is 1 to 42, which the convolution",
        ),
        (
            {"adaptor": {"conv_padding": 0, "rapid_pool_grid": 13}},
            "rapid_pool_grid is 13; allowed is 1 to 12",
        ),
        ({"adaptor": {"conv_padding": 3}}, "conv_padding is 3; allowed is below conv_kernel, 3"),
        ({"adaptor": 3}, "vision_config.adaptor is 3; an object is needed"),
        ({"images": {"fit": "crop"}}, "fit is 'crop'; allowed is letterbox, stretch, cover"),
        ({"images": {"tile_order": "spiral"}}, "tile_order is 'spiral'"),
        (
            {"images": {"mean": [0.5, 0.5]}},
            r"mean is \(0.5, 0.5\); allowed is three numbers of 0 to 1",
        ),
        ({"images": {"std": [0, 1, 1]}}, "three numbers of 0.001 to 1"),
        ({"patch": 3}, "unknown keys patch. Known are adaptor, "),
        ({"images": {"crop": 3}}, "vision_config.images: unknown keys crop"),
    ],
)
def test_values_that_no_encoder_has(changes, words):
    with pytest.raises(ConfigError, match=words):
        VisionConfig.from_dict({"image_token_id": 7} | changes)


def test_the_token_of_images_has_an_id_of_the_vocabulary():
    values = PRESETS["afm-nano"].to_dict()
    with pytest.raises(ConfigError, match=r"model\.json: vision_config: image_token_id is missing"):
        ModelConfig.from_dict(values | {"vision_config": {}}, "model.json")
    with pytest.raises(ConfigError, match="image_token_id is 4096; allowed is below vocab_size"):
        ModelConfig.from_dict(values | {"vision_config": {"image_token_id": 4096}})
    with pytest.raises(ConfigError, match="vision_config is 'yes'; an object is needed"):
        ModelConfig.from_dict(values | {"vision_config": "yes"})


def test_modes_and_orders_have_no_other_names():
    with pytest.raises(ValueError, match="mode is 'auto'; allowed are high, balanced, rapid"):
        DEFAULT.tokens("auto")
    assert ImageConfig() == DEFAULT.images
