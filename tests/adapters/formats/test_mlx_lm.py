"""Folders as mlx-lm's own training writes them, those included that mlx-lm can't load again."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import pair_places
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.adapters.formats.conftest import assert_same_numbers, delta
from tests.tools.cases import draw
from tests.tools.compare import assert_same, exact
from tests.tools.models import mlx_lm_twin, random_config, random_model


@pytest.fixture
def model_config(rng):
    # A factor whose width is whole: mlx-lm rounds others down.
    return random_config(rng, hidden_dim_scale_factor=3.0)


@pytest.fixture
def trained(model_config, rng, tmp_path):
    """A folder of mlx-lm's, as its trainer saves one of all layers, and the model in memory."""
    parameters = {"rank": 5, "scale": 3.0, "dropout": 0.0}
    values = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters, "iters": 9}
    stock = mlx_lm_twin(random_model(model_config, rng))
    stock.freeze()
    linear_to_lora_layers(stock, len(stock.layers), parameters)
    drawn = [(n, draw(rng, t.shape)) for n, t in tree_flatten(stock.trainable_parameters())]
    stock.load_weights(drawn, strict=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(values))
    mx.save_safetensors(str(tmp_path / "a/adapters.safetensors"), dict(drawn))
    return tmp_path / "a", dict(stock.named_modules())


def test_what_mlx_lm_trains_is_read(trained, model_config, tmp_path):
    folder, modules = trained
    tensors, adapter_config = read_adapter(folder, model_config)
    places = pair_places(model_config)
    assert len(tensors) == 2 * len(places)
    for place in places:
        layer = modules[place.layer]
        pair = layer.lora_a, layer.lora_b
        if place.part:
            pair = tuple(side[int(place.part[1])] for side in pair)
        wanted = layer.scale * exact(pair[0]) @ exact(pair[1])
        assert_same(delta(tensors, adapter_config, place), wanted, place)
    for kind, name in (("peft", "p"), ("toolkit", "t.pt")):
        write_adapter(tmp_path / name, tensors, adapter_config, kind, model_config=model_config)
        found, found_config = read_adapter(tmp_path / name)
        assert_same_numbers(found, tensors)
        assert (found_config.rank, found_config.scale) == (5, 3.0)


def test_mlx_lm_itself_can_not(trained, model_config, rng):
    """When this fails, mlx-lm has mended its loader, and the docs should say so."""
    folder, _ = trained
    with pytest.raises(ValueError, match="not an adapter parameter"):
        load_adapters(mlx_lm_twin(random_model(model_config, rng)), str(folder))


def test_dora_is_refused_by_name(trained):
    folder, _ = trained
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora"', '"dora"'))
    with pytest.raises(ConfigError, match="fine_tune_type is 'dora'"):
        read_adapter(folder)


def test_what_is_no_adapter(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path, words in (
        (tmp_path / "nothing", "There is no"),
        (tmp_path / "empty", "it holds nothing"),
        (tmp_path / "notes.txt", "files are the toolkit's .pt"),
        (folder / "adapters.safetensors", "one file of an adapter; give its folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_adapter(path)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="which are two adapters"):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AFMError, match="The format is 'gguf'; allowed are mlx-lm, peft"):
        write_adapter(tmp_path / "x", *read_adapter(folder), "gguf")
    with pytest.raises(AFMError, match="exists already"):
        write_adapter(folder, *read_adapter(folder), "peft")
    with pytest.raises(CheckpointError, match="no LoRA tensors"):
        write_adapter(tmp_path / "x", {}, read_adapter(folder)[1], "peft")
    assert not (tmp_path / "x").exists()
