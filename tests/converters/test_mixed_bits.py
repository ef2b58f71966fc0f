"""`convert --target-bpw`: what the folder weighs, what it holds, and what is refused."""

import json

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model as stock_load_model

from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.convert import convert
from afm_mlx.converters.mixed_bits import calibration_file
from afm_mlx.errors import AFMError, DataError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_stored_weights
from tests.converters.conftest import SMALL
from tests.tools.cli import lines
from tests.tools.compare import assert_close
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


def test_what_cannot_be_met_is_refused(make_checkpoint, text, tmp_path):
    source = convert(make_checkpoint(shape=SHAPE, kv_quant=False).folder, tmp_path / "float")
    packed = convert(source, tmp_path / "packed", quantize=True)
    given = {"quantize": True, "data": text, "target_bpw": 3.5}
    cases = [(source, *case) for case in REFUSED]
    for folder, options, words in [*cases, (packed, {}, "quantized already")]:
        with pytest.raises(AFMError, match=words):
            convert(folder, tmp_path / "out", **given | options)
        assert not (tmp_path / "out").exists()
