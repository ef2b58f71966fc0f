"""Sensitivities against float64, and choices against what they promise."""

import dataclasses
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.errors import CheckpointError, ConfigError, DataError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.measure.perplexity import cut, load_documents
from afm_mlx.quantization.quantize_model import dequantize_model, quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.quantization.sensitivity import (
    LayerSensitivity,
    choose_bits,
    measure_sensitivity,
    stored_size,
)
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
VOCAB = 64
LOW, HIGH, EMBEDDING = QuantizationRule(2), QuantizationRule(4), QuantizationRule(8)


def tiny_model(rng):
    depth = {"num_layers": 3, "num_kv_reuse_layers": 1}
    return random_model(random_config(rng, **SIZES, **depth, vocab_size=VOCAB, kv_bits=None), rng)


def copy_of(model):
    """A model of its own arrays' names and layers, for changes that the first must not see."""
    twin = type(model)(model.args)
    twin.load_weights(tree_flatten(model.parameters()))
    return twin.eval()


def random_pieces(rng, lengths):
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def float64_log_probabilities(model, piece):
    logits = np.array(model(mx.array([piece])).astype(mx.float32), np.float64)[0]
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def divergence(model, packed, pieces):
    """Mean KL over the tokens of pieces, each read by itself."""
    total = 0.0
    for piece in pieces:
        p, q = (float64_log_probabilities(m, piece) for m in (model, packed))
        total += (np.exp(p) * (p - q)).sum()
    return total / sum(map(len, pieces))


# -- measurement


@pytest.mark.parametrize("mode", ["balanced", "affine", "palette"])
def test_a_rise_is_that_of_one_layer_alone(rng, mode, monkeypatch):
    monkeypatch.setattr(
        "afm_mlx.quantization.sensitivity.TOKENS_PER_BATCH", 16
    )  # several batches, padded
    model = tiny_model(rng)
    pieces = random_pieces(rng, [9, 3, 7, 1, 20])
    low, high = QuantizationRule(2, mode), QuantizationRule(4, mode)
    seen = []
    with dispatch.force("reference"):
        found = measure_sensitivity(
            model, pieces, low, high, lambda *done: seen.append(done), embedding_rule=EMBEDDING
        )
        base = copy_of(model)
        quantize_model(base, {}, high, EMBEDDING)
        before = divergence(model, base, pieces)
        for layer in rng.choice(np.array(found, object), 3, replace=False):
            packed = copy_of(model)
            quantize_model(
                packed, {}, high, EMBEDDING, lambda p, m, own=layer.path: low if p == own else True
            )
            wanted = divergence(model, packed, pieces) - before
            assert layer.rise == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert seen[-1][0] == seen[-1][1] == len(seen)
    linear = [p for p, m in model.named_modules() if type(m) is nn.Linear]
    assert sorted(layer.path for layer in found) == sorted(linear)
    for layer in found:
        rows, inputs = dict(model.named_modules())[layer.path].weight.shape
        assert layer.weights == rows * inputs
        assert (layer.low, layer.high) == (low, high)


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


def test_models_of_the_zoo(rng):
    model = zoo_model("qwen2", VOCAB, int(rng.integers(2**31)))
    found = measure_sensitivity(model, random_pieces(rng, [6, 6]), LOW, HIGH)
    assert len(found) == 2 * 7
    assert sum(layer.rise for layer in found) > 0


def test_the_layer_that_matters_keeps_its_bits(rng):
    """All but one block add next to nothing to the residual stream."""
    model = tiny_model(rng)
    loud = int(
        rng.integers(2)
    )  # a reuse block would make the layer loud whose keys and values it reads
    for index, block in enumerate(model.layers):
        for layer in (block.self_attn.out_proj, block.mlp.down_proj):
            layer.weight = layer.weight * (2.0 if index == loud else 1e-3)
    found = measure_sensitivity(model, random_pieces(rng, [16, 16]), LOW, HIGH)
    ours = [layer for layer in found if layer.path.startswith(f"model.layers.{loud}.")]
    assert len(ours) == 5
    worst = max(ours, key=lambda layer: layer.rise_per_byte)
    assert worst.rise > max(layer.rise for layer in found if layer not in ours)
    weights = sum(layer.weights for layer in found)
    least = sum(layer.low_bytes for layer in found)
    chosen = choose_bits(found, 8 * (least + worst.saved_bytes) / weights + 1e-9)
    assert chosen[worst.path] == HIGH
    quiet = [chosen[layer.path].bits for layer in found if layer not in ours]
    assert quiet == [2] * len(quiet)


def test_what_cannot_be_measured(rng):
    model = tiny_model(rng)
    pieces = random_pieces(rng, [4])
    with pytest.raises(ConfigError, match="low rule has 4 bits and the high one 4"):
        measure_sensitivity(model, pieces, HIGH, HIGH)
    for empty in ([], [[]]):
        with pytest.raises(DataError, match="has no tokens"):
            measure_sensitivity(model, empty, LOW, HIGH)
    with pytest.raises(ConfigError, match="No linear layer is left"):
        measure_sensitivity(
            model, pieces, LOW, HIGH, predicate=lambda p, m: isinstance(m, nn.Embedding)
        )
    model.model.output_norm.weight = model.model.output_norm.weight * float("nan")
    with pytest.raises(CheckpointError, match="are not finite"):
        measure_sensitivity(model, pieces, LOW, HIGH)


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
    shown = [
        float(word) for word in str(caught.value).split() if word.replace(".", "", 1).isdigit()
    ]
    for target in shown:
        choose_bits(layers, target)
    assert len(shown) == 2


def test_a_layer_that_saves_nothing_stays_high(rng):
    layers = random_sensitivities(rng, 4)
    layers[2] = dataclasses.replace(layers[2], rise=-9.0, low_bytes=layers[2].high_bytes + 8)
    weights = sum(s.weights for s in layers)
    least = sum(min(s.low_bytes, s.high_bytes) for s in layers)
    chosen = choose_bits(layers, 8 * least / weights)
    assert chosen.pop(layers[2].path) == HIGH
    assert set(chosen.values()) == {LOW}


# -- what it is for


def test_the_chosen_mix_beats_its_reverse_on_the_embedded_model(rng):
    model, tokenizer = load()
    dequantize_model(model)
    # Its weights lie on a 2-bit grid, on which a palette loses nothing.
    for _, module in model.named_modules():
        if type(module) is nn.Linear:
            weight = np.array(module.weight)
            noise = rng.normal(0, 0.1 * weight.std(), weight.shape)
            module.weight = mx.array((weight + noise).astype(np.float32))
    documents = load_documents(resolve_model(EMBEDDED_MODEL) / "heldout.jsonl", tokenizer)
    pieces = [piece for piece in cut(documents, 64) if len(piece) > 30]
    measured, judged = pieces[:3], pieces[3:6]
    low, high = QuantizationRule(2, "palette"), QuantizationRule(4, "palette")

    # Attention and down projections only, for time; the others and the embedding stay float.
    def some(path, module):
        return path.endswith(("qkv_proj", "q_proj", "out_proj", "down_proj"))

    layers = measure_sensitivity(model, measured, low, high, predicate=some)
    weights = sum(s.weights for s in layers)
    mixes = {}
    for name, sign in (("chosen", 1), ("reverse", -1)):
        ranked = [dataclasses.replace(s, rise=sign * s.rise) for s in layers]
        rules = choose_bits(ranked, 3.0)
        assert 2.8 < 8 * bytes_of(layers, rules) / weights <= 3
        packed = copy_of(model)
        quantize_model(packed, {}, high, predicate=lambda p, m, r=rules: r.get(p, False))
        mixes[name] = divergence(model, packed, judged)
    assert mixes["chosen"] < 0.6 * mixes["reverse"]
