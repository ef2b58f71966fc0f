"""`convert --target-bpw`: folders meet their target; sensitivities and the choice of bits are right."""

import copy
import dataclasses
import json
import math
import re

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as stock_load_model

from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.convert import convert
from afm_mlx.converters.mixed_bits import (
    LayerSensitivity,
    calibration_file,
    choose_bits,
    measure_sensitivity,
    plan_layers,
    stored_size,
)
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, DataError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_stored_weights
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.converters.conftest import SMALL
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.compare import assert_close
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

SHAPE = SMALL | {"hidden_dim_scale_factor": 3.0, "num_layers": 3, "num_kv_reuse_layers": 1}


@pytest.fixture
def text(tmp_path):
    texts = ["The quick brown fox jumps over the lazy dog.", "It was a dark and stormy night."]
    return lines(tmp_path / "text.jsonl", *({"text": text} for text in texts))


def report_of(folder):
    return json.loads((folder / "sensitivity.json").read_text())


MODES = [
    ({"q_mode": "palette", "q_embedding_bits": 8, "q_embedding_mode": "balanced"}, 4.2),
    ({"q_mode": "balanced", "q_embedding_granularity": "tensor", "dtype": "bfloat16"}, 3.4),
    ({"q_mode": "affine", "q_group_size": 32, "dtype": "float16"}, 4.2),
    ({"q_granularity": "tensor", "quant_predicate": "mixed_4_8"}, 6.5),
]


@pytest.mark.parametrize(("options", "target"), MODES, ids=lambda o: str(o)[:24])
def test_a_mix_meets_its_target(make_checkpoint, text, rng, tmp_path, options, target):
    checkpoint = make_checkpoint(shape=SHAPE, kv_quant=False)
    source = convert(checkpoint.folder, tmp_path / "float")
    options = {"quantize": True, "target_bpw": target, "data": text, **options}
    seen = []
    packed = convert(source, tmp_path / "a", **options, measuring=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1]
    report = report_of(packed)
    assert (report["target_bpw"], report["data"]) == (target, "text.jsonl")
    layers = report["layers"]
    bits = {layer["path"]: layer["bits"] for layer in layers}
    low, high = (4, 8) if "quant_predicate" in options else (2, 4)
    assert set(bits.values()) == {low, high}
    # The average is under the target, and with any suffering low layer high it would not be.
    facts = describe_stored_weights(packed)
    assert facts["bits_per_weight"] <= target
    for layer in layers:
        if layer["bits"] == low and layer["rise"] > 0:
            more = facts["bytes"] + layer["high"]["bytes"] - layer["low"]["bytes"]
            assert 8 * more / facts["parameters"] > target
    # The model is what the report says.
    model = load_model(packed)
    modules = dict(model.named_modules())
    assert {path: modules[path].bits for path in bits} == bits
    card = (packed / "README.md").read_text()
    assert f"{facts['bits_per_weight']:.3f} bits on average" in card
    whole = load_model(convert(packed, tmp_path / "whole", dequantize=True, dtype="float32"))
    tokens = mx.array(rng.integers(1, SHAPE["vocab_size"], (2, 9)))
    with dispatch.force("reference"):
        assert_close(model(tokens), whole(tokens), 1e-2 if "dtype" in options else 1e-4)
    # The checkpoint that the folder was made of gives the same folder.
    assert report_of(convert(checkpoint.folder, tmp_path / "b", **options)) == report
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_text_is_what_is_given_or_the_folders_own(text, tmp_path):
    folder, data = tmp_path / "model", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    with pytest.raises(DataError, match=r"has no heldout\.jsonl. Give --data"):
        calibration_file(ConversionOptions(), folder / "base-model.pt")
    (folder / "heldout.jsonl").touch()
    for source in (folder, folder / "base-model.pt"):
        assert calibration_file(ConversionOptions(), source) == folder / "heldout.jsonl"
    for name in ("test.jsonl", "valid.jsonl", "train.jsonl"):  # a later one is taken before
        (data / name).touch()
        wanted = data if name == "test.jsonl" else data / name
        assert calibration_file(ConversionOptions(data=data), folder) == wanted
    assert calibration_file(ConversionOptions(data=str(text)), folder) == text


def test_affine_mixes_load_in_stock_mlx_lm(make_checkpoint, text, tmp_path):
    folder = make_checkpoint(shape=SHAPE).folder
    options = {"quantize": True, "target_bpw": 5.0, "data": text, "to": "mlx-lm"}
    out = convert(folder, tmp_path / "out", q_mode="affine", q_group_size=32, **options)
    model, _ = stock_load_model(out)
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, SHAPE["vocab_size"])


def test_models_of_the_zoo(rng, tmp_path):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(64))
    text = lines(tmp_path / "text.jsonl", {"text": "w3 w4 w5 w6 w7 w8 w9"})
    options = {"quantize": True, "q_mode": "palette", "data": text}
    out = convert(tmp_path / "float", tmp_path / "out", target_bpw=4.0, **options)
    assert describe_stored_weights(out)["bits_per_weight"] <= 4.0
    layers = report_of(out)["layers"]
    assert {layer["bits"] for layer in layers} == {2, 4}
    modules = dict(load(out)[0].named_modules())
    assert all(modules[layer["path"]].bits == layer["bits"] for layer in layers)


REFUSED = [
    ({"target_bpw": 9.5}, r"9\.5 bits per weight; \d\.\d{3} to \d\.\d{3} can be met"),
    ({"target_bpw": 1.0}, r"1\.0 bits per weight; \d\.\d{3} to"),
    ({"data": "nowhere.jsonl"}, "no file or folder nowhere"),
    ({"to": "mlx-lm"}, "Choose --q-mode affine"),
    ({"q_mode": "affine", "q_embedding_mode": "balanced", "to": "mlx-lm"}, "the embedding too"),
]


def test_experts_are_measured_and_routers_are_not():
    """Routers have the bits that the architecture gives them in mlx-lm."""
    rules, free = plan_layers(zoo_model("qwen3_moe", 64, 1), QuantizationRule(4))
    assert rules["model.layers.0.mlp.gate"] == QuantizationRule(8)
    assert "model.layers.0.mlp.gate" not in free
    assert {path.split(".")[-1] for path in free if "switch" in path} == {
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_what_cannot_be_met_is_refused(make_checkpoint, text, tmp_path):
    source = convert(make_checkpoint(shape=SHAPE, kv_quant=False).folder, tmp_path / "float")
    packed = convert(source, tmp_path / "packed", quantize=True)
    given = {"quantize": True, "data": text, "target_bpw": 3.5}
    cases = [(source, *case) for case in REFUSED]
    for folder, options, words in [*cases, (packed, {}, "quantized already")]:
        with pytest.raises(AFMError, match=words):
            convert(folder, tmp_path / "out", **given | options)
        assert not (tmp_path / "out").exists()


# -- models for measurements

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
VOCAB = 64
LOW, HIGH, EMBEDDING = QuantizationRule(2), QuantizationRule(4), QuantizationRule(8)


def tiny_model(rng):
    depth = {"num_layers": 3, "num_kv_reuse_layers": 1}
    return random_model(random_config(rng, **SIZES, **depth, vocab_size=VOCAB, kv_bits=None), rng)


def random_pieces(rng, lengths):
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def float64_log_probabilities(model, piece):
    logits = np.array(model(mx.array([piece])).astype(mx.float32), np.float64)[0]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def divergence(model, packed, pieces):
    total = 0.0
    for piece in pieces:
        p, q = (float64_log_probabilities(m, piece) for m in (model, packed))
        total += (np.exp(p) * (p - q)).sum()
    return total / sum(map(len, pieces))


# -- measurement


def test_a_rise_is_that_of_one_layer_alone(rng, monkeypatch):
    # Several batches, padded.
    monkeypatch.setattr("afm_mlx.converters.mixed_bits.TOKENS_PER_BATCH", 16)
    model, pieces = tiny_model(rng), random_pieces(rng, [9, 3, 7, 1, 20])
    mode = str(rng.choice(["balanced", "affine", "palette"]))
    low, high = QuantizationRule(2, mode), QuantizationRule(4, mode)
    linear = {p: m for p, m in model.named_modules() if type(m) is nn.Linear}
    seen = []
    with dispatch.force("reference"):
        found = measure_sensitivity(
            model, pieces, low, high, lambda *done: seen.append(done), embedding_rule=EMBEDDING
        )

        def packed_divergence(path=None):
            packed = copy.deepcopy(model)
            quantize_model(packed, {}, high, EMBEDDING, lambda p, m: low if p == path else True)
            return divergence(model, packed, pieces)

        before = packed_divergence()
        for layer in rng.choice(np.array(found, object), 3, replace=False):
            wanted = packed_divergence(layer.path) - before
            assert layer.rise == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert {layer.path: layer.weights for layer in found} == {
        path: module.weight.size for path, module in linear.items()
    }
    assert {(layer.low, layer.high) for layer in found} == {(low, high)}


def test_the_model_is_left_as_it_was(rng):
    model = tiny_model(rng)
    before = {path: id(module) for path, module in model.named_modules()}
    measure_sensitivity(model, random_pieces(rng, [5]), LOW, HIGH)
    assert {path: id(module) for path, module in model.named_modules()} == before

    def stop(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, random_pieces(rng, [5]), LOW, HIGH, stop)
    assert {path: id(module) for path, module in model.named_modules()} == before


def test_what_the_predicate_decides_is_not_measured(rng):
    model = tiny_model(rng)
    eight = QuantizationRule(8)

    def predicate(path, module):
        return eight if path.endswith("down_proj") else not path.endswith("out_proj")

    found = measure_sensitivity(
        model, random_pieces(rng, [6]), LOW, HIGH, predicate=predicate, embedding_rule=HIGH
    )
    kinds = {layer.path.rpartition(".")[2] for layer in found}
    assert kinds == {"qkv_proj", "q_proj", "gate_proj", "up_proj"}


@each(
    ("changes", "error", "words"),
    [
        ({"low_rule": HIGH}, ConfigError, "low rule has 4 bits and the high one 4"),
        ({"pieces": []}, DataError, "has no tokens"),
        ({"pieces": [[]]}, DataError, "has no tokens"),
        ({"predicate": lambda p, m: "embed" in p}, ConfigError, "No linear layer is left"),
        ({"scale": float("nan")}, CheckpointError, "are not finite"),
    ],
)
def test_what_cannot_be_measured(rng, changes, error, words):
    model = tiny_model(rng)
    model.model.output_norm.weight *= changes.pop("scale", 1.0)
    arguments = {"pieces": random_pieces(rng, [4]), "low_rule": LOW, "high_rule": HIGH}
    with pytest.raises(error, match=words):
        measure_sensitivity(model, **arguments | changes)


def test_the_size_is_that_of_the_packed_model(rng):
    model = tiny_model(rng)
    rules = {p: LOW for p, m in model.named_modules() if type(m) is nn.Linear}
    rules["model.embedding"] = QuantizationRule(4, "palette")
    weights, nbytes = stored_size(model, rules)
    assert weights == model.args.num_parameters
    quantize_model(model, {}, predicate=lambda path, module: rules[path])
    assert nbytes == sum(array.nbytes for _, array in tree_flatten(model.parameters()))


# -- choice


def random_sensitivities(rng, count):
    return [
        LayerSensitivity(
            f"layers.{i}",
            weights := int(rng.integers(1, 50)) * 512,
            float(rng.normal(0.02, 0.02)),
            LOW,
            HIGH,
            weights // 4 + 64,
            weights // 2 + 64,
        )
        for i in range(count)
    ]


def bytes_of(layers, chosen):
    return sum(s.low_bytes if chosen[s.path] == s.low else s.high_bytes for s in layers)


def test_the_average_meets_the_target_within_a_layer(rng):
    for _ in range(100):
        layers = random_sensitivities(rng, int(rng.integers(1, 30)))
        weights = sum(s.weights for s in layers)
        rest = (int(rng.integers(0, 10000)), int(rng.integers(0, 10000)))
        most = rest[1] + sum(s.high_bytes for s in layers)
        least = rest[1] + sum(s.low_bytes for s in layers)
        size = (rest[0] + weights, most)
        target = 8 * float(rng.uniform(least, most)) / size[0]
        chosen = choose_bits(layers, target, size)
        got = rest[1] + bytes_of(layers, chosen)
        budget = target * size[0] / 8
        assert got <= budget
        low = [s for s in layers if chosen[s.path] == LOW]
        assert all(got + s.saved_bytes > budget for s in low if s.rise > 0)
        # No worse than what goes low until it fits, without giving anything back.
        naive, left = 0.0, most - budget
        for s in sorted(layers, key=lambda s: s.rise / s.saved_bytes):
            if left > 0:
                naive, left = naive + s.rise, left - s.saved_bytes
        assert sum(s.rise for s in low) <= naive + 1e-9
        shuffled = [layers[i] for i in rng.permutation(len(layers))]
        assert choose_bits(shuffled, target, size) == chosen


def test_the_ends_of_the_range(rng):
    layers = random_sensitivities(rng, 9)
    weights = sum(s.weights for s in layers)
    low, high = (
        8 * sum(getattr(s, f"{k}_bytes") for s in layers) / weights for k in ("low", "high")
    )
    assert set(choose_bits(layers, low).values()) == {LOW}
    assert set(choose_bits(layers, high).values()) == {HIGH}
    for target in (low - 1e-3, high + 1e-3, math.nan):
        with pytest.raises(ConfigError, match=r"\d\.\d{3} to \d\.\d{3} can be met") as caught:
            choose_bits(layers, target)
    # The figures that are shown are allowed themselves.
    for shown in re.search(r"([\d.]+) to ([\d.]+) can", str(caught.value)).groups():
        choose_bits(layers, float(shown))


def test_a_layer_that_saves_nothing_stays_high(rng):
    layers = random_sensitivities(rng, 4)
    layers[2] = dataclasses.replace(layers[2], rise=-9.0, low_bytes=layers[2].high_bytes + 8)
    weights = sum(s.weights for s in layers)
    least = sum(min(s.low_bytes, s.high_bytes) for s in layers)
    chosen = choose_bits(layers, 8 * least / weights)
    assert chosen.pop(layers[2].path) == HIGH
    assert set(chosen.values()) == {LOW}
