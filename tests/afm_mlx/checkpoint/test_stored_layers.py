"""Folders whose layers are packed: what loads, and what is wrong with those that don't."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import folder_fingerprint, model_fingerprint
from afm_mlx.checkpoint.stored_layers import stored_rule, stored_settings
from afm_mlx.checkpoint.weights import load_weights, save_weights, stored_tensors
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from afm_mlx.measure.describe import describe_packed_layers, describe_weights
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import AFM_RULE, QuantizationRule
from tests.tools.compare import assert_same_tensors
from tests.tools.models import random_config, random_model

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(rng, tmp_path):
    """A function that packs a random model into a folder, lets a function change it, and returns both."""

    def make(rule=AFM_RULE, change=lambda weights, values: None):
        config = random_config(rng, **SIZES, vocab_size=96)
        model = random_model(config, rng)
        _, values = quantize_model(model, config.to_dict(), rule)
        weights = dict(tree_flatten(model.parameters()))
        quantization = values["quantization"] = json.loads(json.dumps(values["quantization"]))
        change(weights, quantization)
        values["quantization_config"] = quantization
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        save_weights(path, weights)
        (path / "config.json").write_text(json.dumps(values))
        return path, model

    return make


@pytest.mark.parametrize("per", ["tensor", "row", "group"])
@pytest.mark.parametrize("mode", ["balanced", "affine", "palette"])
def test_a_folder_gives_the_model_back(rng, folder, mode, per):
    path, model = folder(QuantizationRule(2, mode, per))
    loaded = load_model(path)
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (loaded, model))
    assert_same_tensors(ours, theirs)
    tokens = mx.array(rng.integers(0, 96, (1, 5)))
    assert mx.array_equal(loaded(tokens), model(tokens))
    lazy = load_model(path, lazy=True)
    assert mx.array_equal(lazy(tokens), model(tokens))
    # The same fingerprint from the file and from memory; another with one other code.
    fingerprint = folder_fingerprint(model.args, path)
    parameters = dict(tree_flatten(loaded.parameters()))
    assert model_fingerprint(model.args, parameters) == fingerprint
    words = parameters["model.embedding.weight"]
    words = parameters["model.embedding.weight"] = mx.array(words)
    words[0, 0] = words[0, 0] ^ 1
    assert model_fingerprint(model.args, parameters) != fingerprint


def test_mlxs_own_layers_become_packed_ones(rng, tmp_path):
    """The affine formats of mlx-lm; 6 bits and mxfp4 stay MLX's, and every layer may have its own."""
    import mlx.nn as nn

    config = random_config(rng, **SIZES, vocab_size=96)
    model = random_model(config, rng)
    common = {"bits": 4, "group_size": 32, "mode": "affine"}
    own = {
        "model.embedding": {"bits": 8, "group_size": 64},
        "model.layers.0.self_attn.out_proj": {"bits": 6, "group_size": 32, "mode": "affine"},
        "model.layers.0.mlp.down_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        LAYER: False,
    }
    nn.quantize(
        model,
        class_predicate=lambda p, m: (
            hasattr(m, "to_quantized") and own.get(p, True) and {**common, **own.get(p, {})}
        ),
    )
    weights = dict(tree_flatten(model.parameters()))
    save_weights(tmp_path, weights)
    quantization = {**common, **own}
    (tmp_path / "config.json").write_text(
        json.dumps({**config.to_dict(), "quantization": quantization})
    )
    loaded = load_model(tmp_path)
    first = loaded.model.layers[0]
    assert type(first.self_attn.qkv_proj) is PackedLinear
    assert type(first.self_attn.out_proj) is nn.QuantizedLinear
    assert type(first.mlp.down_proj) is nn.QuantizedLinear
    assert type(first.mlp.up_proj) is nn.Linear
    embedding = loaded.model.embedding
    assert type(embedding) is PackedEmbedding
    assert (embedding.bits, embedding.group_size) == (8, 64)
    tokens = mx.array(rng.integers(0, 96, (1, 5)))
    got, wanted = np.array(loaded(tokens)), np.array(model(tokens))
    assert (
        np.abs(got - wanted).max() < 0.05 * np.abs(wanted).max()
    )  # int8 keys may round either way
    packed = describe_packed_layers(stored_tensors(tmp_path), quantization, tmp_path)
    assert packed["8-bit affine per 64"] == {
        "layers": 1,
        "weights": 96 * 64,
        "bytes": 96 * 64 + 96 * 8,
        "bits_per_weight": 9.0,
    }
    assert packed["6-bit affine per 32"]["weights"] == 64 * 64


def test_figures_of_a_packed_folder(folder):
    path, model = folder()
    tensors = stored_tensors(path)
    values = json.loads((path / "config.json").read_text())
    packed = describe_packed_layers(tensors, values["quantization"], path)
    body = packed["2-bit balanced per row"]
    rows = [m.packed.out_dims for m in model.modules() if isinstance(m, PackedLinear)]
    assert body["layers"] == len(rows)
    assert body["bits_per_weight"] == pytest.approx(2 + 32 * sum(rows) / body["weights"], rel=1e-6)
    assert packed["4-bit balanced per row"]["weights"] == 96 * 64
    facts = describe_weights(tensors, model.args.num_parameters)
    assert facts["bytes"] == sum(array.nbytes for array in load_weights(path).values())


def drop(name):
    return lambda weights, quantization: weights.pop(name)


def replace(name, array):
    return lambda weights, quantization: weights.update({name: array})


def say(**entries):
    return lambda weights, quantization: quantization.update(entries)


def forget(weights, quantization):
    quantization.clear()


def test_folders_whose_config_and_tensors_disagree(folder):
    for change, words in [
        (drop(f"{LAYER}.scales"), f"{LAYER} .* scales is missing"),
        (drop(f"{LAYER}.weight"), f"{LAYER} .* weight is missing"),
        (
            replace(f"{LAYER}.scales", mx.ones(64)),
            r"scales is float32 \[64\] and must be float \[128\]",
        ),
        (replace(f"{LAYER}.scales", mx.ones((128, 2))), r"must be float \[128\]"),
        (replace(f"{LAYER}.scales", mx.ones(128, mx.uint8)), "scales is uint8"),
        (
            replace(f"{LAYER}.weight", mx.ones((128, 4), mx.int32)),
            r"weight is int32 .* must be uint32",
        ),
        (
            replace(f"{LAYER}.weight", mx.ones((128, 8), mx.uint32)),
            r"weight is uint32 \[128, 8\] and must be",
        ),
        (replace(f"{LAYER}.biases", mx.ones(128)), "biases does not belong to mode balanced"),
        (say(bits=4), r"weight is uint32 \[\d+, \d+\] and must be uint32 \[\d+, \d+\]"),
        (say(mode="affine", granularity="group"), "can't be used: group_size is None"),
        (say(mode="affine"), "biases is missing"),
        (say(mode="palette", granularity="tensor"), "table is missing"),
        (say(mode="wavelet"), "mode is 'wavelet'; allowed are balanced, affine, palette"),
        (say(bits=3), "bits is 3; allowed are 2, 4, 8"),
        (say(bits="2"), "bits is '2'"),
        (say(**{LAYER: {"bits": 8}}), f"{LAYER} is .*, which its tensors do not fit"),
        (say(**{LAYER: False}), f"{LAYER} is stored packed, and its quantization says False"),
        (say(granularity="group", group_size=48), "which groups of 48 do not divide"),
        (forget, "is stored packed, and its quantization says nothing"),
        (
            lambda weights, quantization: (
                weights.pop(f"{LAYER}.scales"),
                weights.update({f"{LAYER}.weight": mx.ones((128, 64))}),
                quantization.update({LAYER: {"bits": 2}}),
            ),
            f"the quantization says that {LAYER} is .* stores it as float32",
        ),
        (replace(f"{LAYER}.zeros", mx.ones(4)), "tensors unexpected"),
    ]:
        path, _ = folder(change=change)
        with pytest.raises(AFMError, match=words) as caught:
            load_model(path)
        text = str(caught.value)
        assert str(path) in text
        assert re.search(r"model\.", text)


def test_config_that_is_no_object(folder):
    path, _ = folder()
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"quantization": "2-bit"}))
    with pytest.raises(AFMError, match="quantization is '2-bit'; an object is needed"):
        load_model(path)


def test_a_layers_own_settings():
    common = {"bits": 2, "mode": "balanced", "granularity": "row", "group_size": None}
    quantization = {
        **common,
        "a": {"bits": 4},
        "b": {"bits": 4, "mode": "affine", "group_size": 32},
        "c": {"group_size": 32},
        "d": {"granularity": "tensor"},
    }
    assert stored_settings(quantization, "x") == common
    rules = {path: stored_rule(quantization, path, "config.json") for path in "abcd"}
    assert rules == {
        "a": QuantizationRule(4),
        "b": QuantizationRule(4, "affine", "group", 32),
        "c": QuantizationRule(2, "balanced", "group", 32),
        "d": QuantizationRule(2, "balanced", "tensor"),
    }
