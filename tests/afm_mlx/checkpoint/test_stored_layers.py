"""Folders whose layers are packed: what loads, and what is wrong with those that don't."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint import stored_layers
from afm_mlx.checkpoint.fingerprint import folder_fingerprint, model_fingerprint
from afm_mlx.checkpoint.stored_layers import (
    quantization_of,
    settle_floats,
    settle_scales,
    stored_rule,
    stored_rules,
    stored_settings,
)
from afm_mlx.checkpoint.weights import save_weights, stored_tensors
from afm_mlx.errors import AFMError
from afm_mlx.kernels import dequantize
from afm_mlx.loading.load import load_model
from afm_mlx.measure.describe import describe_packed_layers
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import AFM_RULE, QuantizationRule
from tests.tools.cases import each
from tests.tools.compare import assert_close, assert_same, assert_same_tensors
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

SIZES = {"vocab_size": 96, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2}
SIZES |= {"hidden_dim_scale_factor": 2.0}
LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def folder(rng, tmp_path):
    def make(rule=AFM_RULE, change=lambda weights, values: None):
        config = random_config(rng, **SIZES)
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
    parameters = dict(tree_flatten(loaded.parameters()))
    assert_same_tensors(parameters, dict(tree_flatten(model.parameters())))
    tokens = mx.array(rng.integers(0, 96, (1, 5)))
    assert_same(loaded(tokens), model(tokens))
    assert_same(load_model(path, lazy=True)(tokens), model(tokens))
    assert model_fingerprint(model.args, parameters) == folder_fingerprint(model.args, path)


def test_mlxs_own_layers_become_packed_ones(rng, tmp_path):
    """The affine formats of mlx-lm; 6 bits and mxfp4 stay MLX's, and every layer may have its own."""
    model = random_model(random_config(rng, **SIZES), rng)
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
    quantization = {**common, **own}
    save_weights(tmp_path, dict(tree_flatten(model.parameters())))
    config = {**model.args.to_dict(), "quantization": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path)
    first, embedding = loaded.model.layers[0], loaded.model.embedding
    assert type(first.self_attn.qkv_proj) is PackedLinear
    assert type(first.self_attn.out_proj) is nn.QuantizedLinear
    assert type(first.mlp.down_proj) is nn.QuantizedLinear
    assert type(first.mlp.up_proj) is nn.Linear
    assert type(embedding) is PackedEmbedding
    assert (embedding.bits, embedding.group_size) == (8, 64)
    tokens = mx.array(rng.integers(0, 96, (1, 5)))
    assert_close(loaded(tokens), model(tokens), 0.05)  # int8 keys may round either way
    packed = describe_packed_layers(stored_tensors(tmp_path), quantization, tmp_path)
    size = {"weights": 96 * 64, "bytes": 96 * 64 + 96 * 8, "bits_per_weight": 9.0}
    assert packed["8-bit affine per 64"] == {"layers": 1, **size}
    assert packed["6-bit affine per 32"]["weights"] == 64 * 64


def drop(part):
    return lambda weights, quantization: weights.pop(f"{LAYER}.{part}")


def put(part, *array):
    return lambda weights, quantization: weights.update({f"{LAYER}.{part}": mx.ones(*array)})


def say(**entries):
    return lambda weights, quantization: quantization.update(entries)


def integer_norm(weights, quantization):
    weights["model.output_norm.weight"] = mx.ones(64, mx.int32)


def float_with_an_entry(weights, quantization):
    del weights[f"{LAYER}.scales"]
    weights[f"{LAYER}.weight"] = mx.ones((128, 64))
    quantization[LAYER] = {"bits": 2}


@each(
    ("change", "words"),
    [
        (drop("scales"), f"{LAYER} .* scales is missing"),
        (drop("weight"), f"{LAYER} .* weight is missing"),
        (put("scales", 64), r"scales is float32 \[64\] and must be float \[128\]"),
        (put("scales", (128, 2)), r"must be float \[128\]"),
        (put("scales", 128, mx.uint8), "scales is uint8"),
        (put("weight", (128, 4), mx.int32), r"weight is int32 .* must be uint32"),
        (put("weight", (128, 8), mx.uint32), r"weight is uint32 \[128, 8\] and must be"),
        (put("biases", 128), "biases does not belong to mode balanced"),
        (put("zeros", 4), "tensors unexpected"),
        (integer_norm, r"model\.output_norm\.weight is int32 and must be float"),
        (say(bits=4), r"weight is uint32 \[\d+, \d+\] and must be uint32 \[\d+, \d+\]"),
        (say(bits=3), "bits is 3; allowed are 2, 4, 8"),
        (say(bits="2"), "bits is '2'"),
        (say(mode="affine", granularity="group"), "can't be used: group_size is None"),
        (say(mode="affine"), "biases is missing"),
        (say(mode="palette", granularity="tensor"), "table is missing"),
        (say(mode="wavelet"), "mode is 'wavelet'; allowed are balanced, affine, palette"),
        (say(granularity="group", group_size=48), "which groups of 48 do not divide"),
        (say(**{LAYER: {"bits": 8}}), f"{LAYER} is .*, which its tensors do not fit"),
        (say(**{LAYER: False}), f"{LAYER} is stored packed, and its quantization says False"),
        (lambda weights, quantization: quantization.clear(), "quantization says nothing"),
        (float_with_an_entry, f"the quantization says that {LAYER} is .* stores it as float32"),
    ],
)
def test_a_config_and_tensors_that_disagree_are_refused(folder, change, words):
    path, _ = folder(change=change)
    with pytest.raises(AFMError, match=words) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert "model." in str(caught.value)


def test_parts_of_experts_are_compared_with_their_stack():
    rule = QuantizationRule(4, group_size=32)
    shapes = {"experts.weight": (4, 24, 64)}
    found = {"weight": mx.zeros((4, 24, 8), mx.uint32), "scales": mx.zeros((4, 24, 2))}

    def rules(**changes):
        tensors = {f"experts.{part}": array for part, array in (found | changes).items()}
        return stored_rules(shapes, rule.to_dict(), tensors, "config.json")

    assert rules() == {"experts": rule}
    for changes, words in (
        (
            {"scales": mx.zeros((24, 4, 2))},
            r"scales is float32 \[24, 4, 2\] and must be float \[4, 24, 2\]",
        ),
        ({"scales": mx.zeros((96, 2))}, r"scales is float32 \[96, 2\]"),
        ({"weight": mx.zeros((96, 8), mx.uint32)}, r"weight is uint32 \[96, 8\] .* \[4, 24, 8\]"),
        ({"biases": mx.zeros((4, 24, 2))}, "biases does not belong to mode balanced"),
    ):
        with pytest.raises(AFMError, match=rf"config\.json: experts is \[4, 24, 64\] .*{words}"):
            rules(**changes)


def test_a_quantization_that_is_no_object_is_refused():
    with pytest.raises(AFMError, match="here: quantization is '2-bit'; an object is needed"):
        quantization_of({"quantization": "2-bit"}, "here")


@each(
    ("mode", "device", "kernels", "dtype"),
    [
        ("balanced", mx.cpu, True, mx.float32),
        ("balanced", mx.gpu, True, mx.float32),
        ("palette", mx.cpu, True, mx.float32),
        ("palette", mx.gpu, True, mx.float32),
        ("affine", mx.cpu, True, mx.float16),
        ("affine", mx.cpu, False, mx.float32),
        ("affine", mx.gpu, True, mx.float16),
        ("affine", mx.gpu, False, mx.float16),
    ],
)
def test_scales_are_float32_but_for_affine_ones_of_kernels(
    rng, monkeypatch, mode, device, kernels, dtype
):
    model = random_model(random_config(rng, **SIZES), rng)
    quantize_model(model, {}, QuantizationRule(2, mode))
    model.set_dtype(mx.float16)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(stored_layers.extension, "module", lambda: object() if kernels else None)
    settle_scales(model)
    settle_floats(model)
    layer = model.model.layers[0].mlp.up_proj
    parts = {layer[part].dtype for part in ("scales", "biases", "table") if part in layer}
    assert parts == {dtype}
    floats = mx.float32 if device == mx.cpu else mx.float16
    assert model.model.output_norm.weight.dtype == floats
    if device == mx.cpu:
        assert model.model.embedding.dtype == mx.float32


@each(
    ("rule", "device", "kernels", "mode", "dtype"),
    [
        (QuantizationRule(4), mx.gpu, True, "balanced", mx.float32),
        (QuantizationRule(4, group_size=32), mx.cpu, True, "balanced", mx.float32),
        (QuantizationRule(4, group_size=32), mx.cpu, False, "affine", mx.float32),
        (QuantizationRule(4, group_size=32), mx.gpu, True, "affine", mx.float16),
        (QuantizationRule(4, "affine", "row"), mx.gpu, True, "affine", mx.float16),
        (QuantizationRule(4, "affine", group_size=32), mx.gpu, True, "affine", mx.float16),
    ],
)
def test_experts_have_the_scales_that_their_product_takes(
    monkeypatch, rule, device, kernels, mode, dtype
):
    model = zoo_model("gpt_oss", 64, 1)
    model.set_dtype(mx.float16)
    quantize_model(model, {}, rule)
    before = dequantize(model.layers[0].mlp.experts.up_proj.packed)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(device))
    monkeypatch.setattr(stored_layers.extension, "module", lambda: object() if kernels else None)
    settle_scales(model)
    layer = model.layers[0].mlp.experts.up_proj
    assert (layer.mode, layer.scales.dtype) == (mode, dtype)
    assert layer.trainable_parameters() == {}
    per_row = mode == "balanced" and rule.granularity == "row"
    groups = 64 // (rule.group_size or 64)
    assert layer.scales.shape == ((4, 64) if per_row else (4, 64, groups))
    monkeypatch.undo()
    rounding = 2.0**-9 if dtype == mx.float16 else 1e-6  # of scales, and of biases
    assert_close(dequantize(layer.packed), before, rounding)


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
