"""Every format is detected, and returns what was written, bit for bit, through every other."""

import json
import shutil
import struct

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from afm_mlx.adapters.formats import FORMATS, detect_format, read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import num_layers_of, pair_targets
from afm_mlx.config import PRESETS
from afm_mlx.errors import AFMError, CheckpointError
from tests.adapters.formats.conftest import assert_same_numbers, delta
from tests.tools.cases import draw
from tests.tools.compare import assert_same, exact
from tests.tools.models import mlx_lm_twin, random_config, random_model

ENDS = {"toolkit": ".pt", "fmadapter": ".fmadapter"}


def path_for(folder, name, kind):
    return folder / f"{name}{ENDS.get(kind, '')}"


@pytest.mark.parametrize("one", FORMATS)
def test_every_pair(one, draw_adapter, model_config, rng, tmp_path):
    rank = int(rng.choice([1, 3, 8, 16, 32]))
    # Apple's fixed scale of 0.5 rounds others than these; 0.25 does, for numbers near float16's smallest.
    tensors, config = draw_adapter(model_config, rank, float(rng.choice([0.5, 1.0, 2.0])))
    first = path_for(tmp_path, "first", one)
    write_adapter(first, tensors, config, one, model_config=model_config)
    assert detect_format(first) == one
    for i, other in enumerate(FORMATS):
        second = path_for(tmp_path, f"second{i}", other)
        write_adapter(second, *read_adapter(first, model_config), other, model_config=model_config)
        assert detect_format(second) == other
        found, found_config = read_adapter(second, model_config)
        assert_same_numbers(found, tensors)
        assert found_config == config


@pytest.mark.parametrize("kind", [k for k in FORMATS if k != "fmadapter"])
def test_any_scale_and_type(kind, draw_adapter, model_config, rng, tmp_path):
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        tensors, config = draw_adapter(model_config, 5, float(rng.uniform(0.01, 20)), dtype)
        path = path_for(tmp_path, str(dtype), kind)
        write_adapter(path, tensors, config, kind, model_config=model_config)
        found, found_config = read_adapter(path)
        assert_same_numbers(found, tensors)
        assert found_config.scale == pytest.approx(config.scale, rel=1e-15)
        wanted = mx.float32 if kind == "toolkit" else dtype
        assert {tensor.dtype for tensor in found.values()} == {wanted}


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_left_out(kind, draw_adapter, model_config, tmp_path):
    """Formats with a place for every layer get zeros there, which are left out again."""
    tensors, config = draw_adapter(
        model_config, keep=lambda p: p.part in (".0", ".2") or p.layer.endswith("down_proj")
    )
    path = path_for(tmp_path, "a", kind)
    write_adapter(path, tensors, config, kind, model_config=model_config)
    found, found_config = read_adapter(path, model_config)
    for place in pair_targets(model_config):
        if place.a in tensors:
            wanted = delta(tensors, config, place)
            assert (delta(found, found_config, place) == wanted).all()
        else:  # a fused layer has all three
            assert place.a not in found or place.part == ".1"
            assert place.a not in found or not mx.any(found[place.b]).item()
    assert found_config.keys == config.keys
    assert found_config.num_layers in (config.num_layers, -1)


def test_a_type_of_choice(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, dtype=mx.float32)
    write_adapter(tmp_path / "a", tensors, config, "mlx-lm", dtype=mx.float16)
    found, _ = read_adapter(tmp_path / "a")
    assert {tensor.dtype for tensor in found.values()} == {mx.float16}
    assert_same_numbers(found, {n: t.astype(mx.float16) for n, t in tensors.items()})


def test_what_is_no_adapter(draw_adapter, model_config, tmp_path):
    adapter, folder = draw_adapter(model_config), tmp_path / "a"
    write_adapter(folder, *adapter, "mlx-lm")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    shutil.make_archive(str(tmp_path / "b.fmadapter"), "zip", folder)
    shutil.copy(tmp_path / "b.fmadapter.zip", tmp_path / "b.fmadapter")
    for path, words in (
        (tmp_path / "nothing", "There is no"),
        (tmp_path / "empty", "it holds nothing"),
        (tmp_path / "notes.txt", "files are the toolkit's .pt"),
        (tmp_path / "b.fmadapter", "Unpack it first"),
        (tmp_path / "b.fmadapter.zip", "Unpack it first"),
        (folder / "adapters.safetensors", "one file of an adapter; give its folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_adapter(path)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="which are two adapters"):
        read_adapter(folder)
    for path, tensors, to, words in (
        (tmp_path / "x", adapter[0], "gguf", "The format is 'gguf'; allowed are mlx-lm, peft"),
        (folder, adapter[0], "peft", "exists already"),
        (tmp_path / "x", {}, "peft", "no LoRA tensors"),
    ):
        with pytest.raises(AFMError, match=words):
            write_adapter(path, tensors, adapter[1], to)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["adapter.pt", "adapter"])
def test_an_archive_over_several_disks_is_refused(name, tmp_path):
    """Python's own test for archives raises there."""
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 2)
    (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(30) + locator + b"PK\x05\x06" + bytes(18))
    with pytest.raises(CheckpointError, match=r"is cut off or damaged: .*multiple disks"):
        read_adapter(tmp_path / name)


# -- Folders as mlx-lm's own training writes them, those included that mlx-lm can't load again


def test_what_mlx_lm_trains_is_read(rng, tmp_path):
    """As its trainer saves an adapter of all layers; mlx-lm itself can't load one of fused layers."""
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
    places, modules = pair_targets(model_config), dict(stock.named_modules())
    assert len(tensors) == 2 * len(places)
    for place in places:
        layer = modules[place.layer]
        pair = layer.lora_a, layer.lora_b
        if place.part:
            pair = tuple(side[int(place.part[1])] for side in pair)
        wanted = layer.scale * exact(pair[0]) @ exact(pair[1])
        assert_same(delta(tensors, adapter_config, place), wanted, place)

    # When this fails, mlx-lm has fixed its loader, and the docs should say so.
    with pytest.raises(ValueError, match="not an adapter parameter"):
        load_adapters(mlx_lm_twin(random_model(model_config, rng)), str(tmp_path))


# -- Which blocks of a model an adapter's names mean


def test_blocks_are_counted_from_the_first_that_is_adapted():
    config = PRESETS["afm-3b"]  # 35 blocks that write keys and values, and 21 that reuse them
    writing, reusing = (
        "model.layers.30.mlp.up_proj.lora_a",
        "model.kv_reuse_layers.1.mlp.up_proj.lora_a",
    )
    assert num_layers_of([reusing], config) == 56 - 36
    assert num_layers_of([reusing, writing], config) == 56 - 30
    assert num_layers_of([writing], None) == -1
