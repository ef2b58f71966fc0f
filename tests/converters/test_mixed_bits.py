"""`convert --target-bpw`: what the folder weighs, what it holds, and what is refused."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as stock_load_model

from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_packed_layers, describe_stored_weights
from afm_mlx.quantization.rule import QuantizationRule
from tests.converters.conftest import SMALL
from tests.tools.compare import assert_close
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

SHAPE = SMALL | {"hidden_dim_scale_factor": 3.0, "num_layers": 3, "num_kv_reuse_layers": 1}


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.jsonl"
    lines = ["The quick brown fox jumps over the lazy dog.", "It was a dark and stormy night."]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


@pytest.fixture
def float_folder(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(shape=SHAPE, kv_quant=False)
    return convert(checkpoint.folder, tmp_path / "float"), checkpoint


MODES = [
    ({"q_mode": "palette", "q_embedding_bits": 8, "q_embedding_mode": "balanced"}, 4.2),
    ({"q_mode": "balanced", "q_embedding_granularity": "tensor", "dtype": "bfloat16"}, 3.4),
    ({"q_mode": "affine", "q_group_size": 32, "dtype": "float16"}, 4.2),
    ({"q_granularity": "tensor", "quant_predicate": "mixed_4_8"}, 6.5),
]


@pytest.mark.parametrize(("options", "target"), MODES, ids=lambda o: str(o)[:24])
def test_a_mix_meets_its_target(float_folder, text, rng, tmp_path, options, target):
    source, checkpoint = float_folder
    wishes = {"quantize": True, "target_bpw": target, "data": text, **options}
    seen = []
    packed = convert(source, tmp_path / "a", **wishes, measuring=lambda *done: seen.append(done))
    assert seen[-1][0] == seen[-1][1]
    report = json.loads((packed / "sensitivity.json").read_text())
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
    direct = convert(checkpoint.folder, tmp_path / "b", **wishes)
    assert json.loads((direct / "sensitivity.json").read_text()) == report
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_embedding_has_a_rule_of_its_own(float_folder, tmp_path):
    source, _ = float_folder
    embedding = {
        "q_embedding_bits": 8,
        "q_embedding_mode": "affine",
        "q_embedding_granularity": "row",
    }
    out = convert(source, tmp_path / "out", quantize=True, q_mode="palette", **embedding)
    entry = json.loads((out / "config.json").read_text())["quantization"]
    assert entry["model.embedding"] == QuantizationRule(8, "affine", "row").to_dict()
    formats = describe_packed_layers(stored_tensors(out), entry, out)
    assert set(formats) == {"4-bit palette per 16 rows", "8-bit affine per row"}


def test_the_folders_own_text_is_the_default(float_folder, text, tmp_path):
    source, _ = float_folder
    wishes = {"quantize": True, "target_bpw": 3.5}
    with pytest.raises(AFMError, match=r"has no heldout\.jsonl. Give --data"):
        convert(source, tmp_path / "out", **wishes)
    text.rename(source / "heldout.jsonl")
    out = convert(source, tmp_path / "out", **wishes)
    assert json.loads((out / "sensitivity.json").read_text())["data"] == "heldout.jsonl"


def test_a_data_folder_gives_its_training_text(float_folder, text, tmp_path):
    source, _ = float_folder
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_bytes(text.read_bytes())
    (data / "test.jsonl").write_text("this is no JSON")
    convert(source, tmp_path / "out", quantize=True, target_bpw=3.5, data=data)


def test_affine_mixes_load_in_stock_mlx_lm(make_checkpoint, text, tmp_path):
    folder = make_checkpoint(shape=SHAPE).folder
    wishes = {"quantize": True, "target_bpw": 5.0, "data": text, "to": "mlx-lm"}
    out = convert(folder, tmp_path / "out", q_mode="affine", q_group_size=32, **wishes)
    model, _ = stock_load_model(out)
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, SHAPE["vocab_size"])
    with pytest.raises(AFMError, match="Choose --q-mode affine"):
        convert(folder, tmp_path / "other", **wishes)


def test_models_of_the_zoo(rng, text, tmp_path):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(64))
    text.write_text(json.dumps({"text": "w3 w4 w5 w6 w7 w8 w9"}))
    wishes = {"quantize": True, "q_mode": "palette", "data": text}
    out = convert(tmp_path / "float", tmp_path / "out", target_bpw=4.0, **wishes)
    assert describe_stored_weights(out)["bits_per_weight"] <= 4.0
    layers = json.loads((out / "sensitivity.json").read_text())["layers"]
    assert {layer["bits"] for layer in layers} == {2, 4}
    loaded, _ = load(out)
    modules = dict(loaded.named_modules())
    assert all(modules[layer["path"]].bits == layer["bits"] for layer in layers)


WISHES = [
    ({"target_bpw": 9.5}, r"9\.5 bits per weight; \d\.\d{3} to \d\.\d{3} can be met"),
    ({"target_bpw": 1.0}, r"1\.0 bits per weight; \d\.\d{3} to"),
    ({"target_bpw": 3.5, "q_bits": 4}, "--q-bits and --target-bpw both"),
    ({"target_bpw": 3.5, "quant_predicate": "mixed_3_6"}, "'mixed_3_6' does not go with"),
    ({"target_bpw": 3.5, "quantize": False, "data": None}, "--target-bpw without -q"),
    ({"target_bpw": None}, "--data without --target-bpw"),
    ({"target_bpw": 3.5, "data": "nowhere.jsonl"}, "no file or folder nowhere"),
    ({"target_bpw": 3.5, "q_embedding_mode": "mxfp4"}, "mode is 'mxfp4'"),
    (
        {"target_bpw": 3.5, "q_mode": "affine", "q_embedding_mode": "balanced", "to": "mlx-lm"},
        "the embedding too",
    ),
]


def test_wishes_that_cannot_be_met(float_folder, text, tmp_path):
    source, _ = float_folder
    for options, words in WISHES:
        with pytest.raises(AFMError, match=words):
            convert(source, tmp_path / "out", **{"quantize": True, "data": text} | options)
        assert not (tmp_path / "out").exists()


def test_a_quantized_folder_is_refused_before_it_is_measured(float_folder, text, tmp_path):
    source, _ = float_folder
    packed = convert(source, tmp_path / "packed", quantize=True)
    with pytest.raises(AFMError, match="quantized already"):
        convert(packed, tmp_path / "out", quantize=True, target_bpw=3.5, data=text)
    assert ModelConfig.from_file(packed / "config.json").num_layers == SHAPE["num_layers"]
