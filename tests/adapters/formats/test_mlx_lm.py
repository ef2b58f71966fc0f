"""Folders as mlx-lm's own training writes them, those included that mlx-lm can't load again."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from afm_mlx.adapters.formats import read_adapter
from afm_mlx.adapters.formats.pair_order import pair_places
from tests.adapters.formats.conftest import delta
from tests.tools.cases import draw
from tests.tools.compare import assert_same, exact
from tests.tools.models import mlx_lm_twin, random_config, random_model


def test_what_mlx_lm_trains_is_read(rng, tmp_path):
    """As its trainer saves an adapter of all layers; mlx-lm itself can't load those of fused layers."""
    # A factor whose width is whole: mlx-lm rounds others down.
    model_config = random_config(rng, hidden_dim_scale_factor=3.0)
    parameters = {"rank": 5, "scale": 3.0, "dropout": 0.0}
    values = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, "iters": 9}
    stock = mlx_lm_twin(random_model(model_config, rng))
    stock.freeze()
    linear_to_lora_layers(stock, len(stock.layers), parameters)
    drawn = [(n, draw(rng, t.shape)) for n, t in tree_flatten(stock.trainable_parameters())]
    stock.load_weights(drawn, strict=False)
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), dict(drawn))

    tensors, adapter_config = read_adapter(tmp_path, model_config)
    places, modules = pair_places(model_config), dict(stock.named_modules())
    assert len(tensors) == 2 * len(places)
    for place in places:
        layer = modules[place.layer]
        pair = layer.lora_a, layer.lora_b
        if place.part:
            pair = tuple(side[int(place.part[1])] for side in pair)
        wanted = layer.scale * exact(pair[0]) @ exact(pair[1])
        assert_same(delta(tensors, adapter_config, place), wanted, place)

    # When this fails, mlx-lm has mended its loader, and the docs should say so.
    with pytest.raises(ValueError, match="not an adapter parameter"):
        load_adapters(mlx_lm_twin(random_model(model_config, rng)), str(tmp_path))
