"""Models of mlx-lm's zoo that this package packs, as folders of stock mlx-lm."""

import json

import mlx.core as mx
import pytest
from mlx_lm import load as stock_load

from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load
from tests.converters.conftest import assert_same_weights, config_of
from tests.tools.compare import assert_close, assert_same, exact
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB = 64
BALANCED = {"quantize": True, "q_mode": "balanced"}


@pytest.fixture
def float_folder(rng, tmp_path):
    model = zoo_model("llama", VOCAB, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(VOCAB))
    return tmp_path / "float"


def affine_embedding(path, module):
    if path.endswith("embed_tokens"):
        return {"bits": 8, "mode": "affine", "group_size": 32}
    return True


def logits(loaded, tokens):
    # The fast kernels round activations.
    with dispatch.force("reference"):
        return exact(loaded[0](tokens))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"q_bits": 4, "q_granularity": "tensor"},
        {"q_bits": 8, "q_group_size": 32},
        {"quant_predicate": affine_embedding},
        {"quant_predicate": lambda path, module: {"bits": 4} if "mlp" in path else "q_" in path},
    ],
    ids=["row", "tensor", "group", "affine head", "some layers"],
)
def test_balanced_folders_become_mlxs_own(float_folder, rng, tmp_path, options):
    packed = convert(float_folder, tmp_path / "packed", **BALANCED, **options)
    stock = convert(packed, tmp_path / "stock", to="mlx-lm")
    at_once = convert(float_folder, tmp_path / "at-once", to="mlx-lm", **BALANCED, **options)
    tokens = mx.array(rng.integers(2, VOCAB, (2, 9)))
    wanted = logits(load(packed), tokens)
    for folder in (stock, at_once):
        got = logits(stock_load(str(folder)), tokens)
        assert_close(got, wanted, 1e-4)
        quantization = config_of(folder)["quantization"]
        assert quantization["mode"] == "affine"
        assert "granularity" not in json.dumps(quantization)
        assert_close(logits(load(folder), tokens), got, 1e-4, least=1)
    codes = load_weights(packed)["model.layers.0.mlp.up_proj.weight"]
    assert_same(load_weights(stock)["model.layers.0.mlp.up_proj.weight"], codes)


def test_what_stock_mlx_lm_has_no_format_for(float_folder, tmp_path):
    palette = convert(float_folder, tmp_path / "palette", quantize=True, q_mode="palette")
    for wrong, options, words in (
        (palette, {}, "whose layers have no palettes"),
        (float_folder, {"quantize": True, "q_mode": "palette"}, "whose layers have no palettes"),
        (float_folder, {**BALANCED, "q_group_size": 16}, "scales that 16 inputs share"),
        (palette, {"dtype": "float16"}, "no other dtype"),
        (palette, BALANCED, "quantized already"),
        (float_folder, {**BALANCED, "quant_predicate": "mixed_4_6"}, "is affine in mlx-lm"),
    ):
        with pytest.raises(AFMError, match=words):
            convert(wrong, tmp_path / "out", to="mlx-lm", **options)
        assert not (tmp_path / "out").exists()


def test_a_packed_folder_is_copied_as_it_is(float_folder, tmp_path):
    packed = convert(float_folder, tmp_path / "packed", quantize=True, q_mode="palette")
    copy = convert(packed, tmp_path / "copy")
    assert config_of(copy)["quantization"]["mode"] == "palette"
    assert_same_weights(packed, copy)


def test_what_mlx_lm_has_it_writes_itself(float_folder, tmp_path, capsys):
    out = convert(float_folder, tmp_path / "out", dtype="bfloat16")
    assert capsys.readouterr().out == ""
    assert load_weights(out)["model.norm.weight"].dtype == mx.bfloat16
    assert not (out / "converted").exists()
    affine = {"quantize": True, "q_group_size": 32}
    packed = convert(float_folder, tmp_path / "packed", **affine, q_bits=8)
    quantization = config_of(packed)["quantization"]
    assert quantization == {"bits": 8, "group_size": 32, "mode": "affine"}
    mixed = convert(float_folder, tmp_path / "mixed", **affine, quant_predicate="mixed_4_6")
    entry = config_of(mixed)["quantization"]["model.layers.1.mlp.down_proj"]
    assert (entry["bits"], entry["group_size"]) == (6, 32)
    with pytest.raises(AFMError, match="'mixed_2_4' is for AFM models; others take mixed_2_6"):
        convert(float_folder, tmp_path / "no", quantize=True, quant_predicate="mixed_2_4")
