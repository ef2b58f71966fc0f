"""Folders of mlx-lm's afm7: in, out, and what stock mlx-lm can't hold."""

import dataclasses
import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import afm7
from mlx_lm.utils import load_model as stock_load_model
from mlx_lm.utils import save_model as stock_save_model
from tokenizers import Tokenizer, models

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.loading.load import load_model
from tests.converters.conftest import DRAFT, SMALL, assert_same_weights, config_of, edit_config
from tests.tools.compare import assert_parity, assert_same


@pytest.fixture
def stock(tmp_path, rng, tokenizer_bytes):
    values = {"model_type": "afm7", "rope_theta": 500000.0, **SMALL}
    mx.random.seed(int(rng.integers(2**32)))
    model = afm7.Model(afm7.ModelArgs.from_dict(values))
    for layer in model.model.layers:
        layer.self_attn.quant_key_scale = mx.array(0.03)
        layer.self_attn.quant_value_scale = mx.array(0.02)
    folder = tmp_path / "stock"
    stock_save_model(folder, model)
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "tokenizer.model").write_bytes(tokenizer_bytes)
    return folder, model


def test_in(stock, rng, tmp_path):
    folder, model = stock
    out = convert(folder, tmp_path / "out")
    assert_same_weights(folder, out)
    config = ModelConfig.from_file(out / "config.json")
    assert (config.kv_bits, config.context_length) == (8, 4096)
    prompts = [mx.array(tokens) for tokens in rng.integers(1, SMALL["vocab_size"], (8, 1, 7))]
    assert_parity(load_model(out), model, prompts, ties=0.05)


def test_there_and_back(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    ours = convert(checkpoint.folder, tmp_path / "ours")
    theirs = convert(ours, tmp_path / "theirs", to="mlx-lm")
    again = convert(theirs, tmp_path / "again")
    direct = convert(checkpoint.folder, tmp_path / "direct", to="mlx-lm")
    for folder in (theirs, again, direct):
        assert_same_weights(ours, folder)
        assert not (folder / "adapters").exists()
    assert config_of(ours) == config_of(again)
    for folder in (theirs, direct):
        # The architecture, and what mlx-lm reads for every model.
        assert set(config_of(folder)) <= {*afm7.ModelArgs.__annotations__, "eos_token_id"}
        stock_load_model(folder)


def test_adapters_follow_their_base(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}, "b": {"rank": 2}})
    ours = convert(checkpoint.folder, tmp_path / "ours")
    foreign = ours / "adapters" / "b"
    tensors, plan = load_adapter(foreign)
    mx.eval(tensors)
    save_adapter(foreign, tensors, dataclasses.replace(plan, base_model_fingerprint="0" * 64))
    out = convert(ours, tmp_path / "out", dtype="bfloat16")
    tensors, plan = load_adapter(out / "adapters" / "a")
    config = ModelConfig.from_file(out / "config.json")
    assert plan.base_model_fingerprint == folder_fingerprint(config, out)
    assert plan.base_model_fingerprint != folder_fingerprint(config, ours)
    assert {tensor.dtype for tensor in tensors.values()} == {mx.bfloat16}
    assert load_adapter(out / "adapters" / "b")[1].base_model_fingerprint == "0" * 64


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_dtype(stock, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("afm_mlx.converters.folder_writer._CHUNK_BYTES", 4096)
    folder, _ = stock
    source = load_weights(folder)
    found = load_weights(convert(folder, tmp_path / "out", dtype=dtype))
    for name, array in found.items():
        target = mx.float32 if name.endswith("_scale") else getattr(mx, dtype)
        assert_same(array, source[name].astype(target), name)


def test_a_number_too_large_for_float16(stock, tmp_path):
    folder, _ = stock
    weights = load_weights(folder)
    mx.eval(weights)
    weights["model.output_norm.weight"] = mx.full((SMALL["hidden_dim"],), 1e6)
    save_weights(folder, weights)
    with pytest.raises(CheckpointError, match=r"output_norm.* that .*float16 can't hold"):
        convert(folder, tmp_path / "out", dtype="float16")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": None}, r"rope_theta is missing.*50000.*500000"),
        ({"num_layers": 6}, r"missing: model\.layers\.3"),
        ({"sliding_window": 7}, "sliding_window"),
    ],
)
def test_a_config_that_lacks_or_contradicts_something(stock, tmp_path, changes, words):
    folder, _ = stock
    edit_config(folder, **changes)
    with pytest.raises(AFMError, match=words):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_fit(stock, tmp_path):
    folder, _ = stock
    words = {f"w{i}": i for i in range(SMALL["vocab_size"] + 1)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="513 tokens"):
        convert(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        convert(folder, tmp_path / "out")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        convert(folder, tmp_path / "out")


def test_quantized_folders_pass_through(stock, tmp_path):
    """Older versions of mlx-lm wrote them; 0.32 can't write them, and loads those that name the fused layer."""
    folder, model = stock
    common, own = {"bits": 4, "group_size": 64}, {"bits": 8, "group_size": 32}
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        group = own if name.endswith("embedding.weight") else common
        if array.ndim == 2 and array.shape[1] % group["group_size"] == 0:
            path = name.removesuffix("weight")
            names = (f"{path}weight", f"{path}scales", f"{path}biases")
            weights |= dict(zip(names, mx.quantize(array, **group), strict=True))
        else:
            weights[name] = array
    save_weights(folder, weights)
    quantization = {**common, "mode": "affine", "model.embedding": own}
    edit_config(folder, quantization=quantization, quantization_config=quantization)
    out = convert(folder, tmp_path / "out")
    assert_same_weights(folder, out)
    assert config_of(out)["quantization"] == quantization
    theirs = convert(folder, tmp_path / "theirs", to="mlx-lm")
    stock_load_model(theirs)
    assert_same_weights(folder, theirs)


def test_layers_that_only_mlx_holds_become_floats(stock, tmp_path):
    folder, model = stock
    path, weights = "model.layers.0.self_attn.out_proj", dict(tree_flatten(model.parameters()))
    settings = {"bits": 3, "group_size": 32, "mode": "affine"}
    parts = mx.quantize(weights[f"{path}.weight"], **settings)
    names = [f"{path}.{part}" for part in ("weight", "scales", "biases")]
    save_weights(folder, weights | dict(zip(names, parts, strict=True)))
    edit_config(folder, quantization={**settings, "granularity": "group"})
    out = load_weights(convert(folder, tmp_path / "out", dequantize=True))
    assert_same(out[f"{path}.weight"], mx.dequantize(*parts, **settings))


@pytest.mark.parametrize(
    ("shape", "kv_quant", "changes", "words"),
    [
        (DRAFT, False, {}, "always rounds keys and values to 8 bits"),
        (SMALL | {"hidden_dim_scale_factor": 3.26}, True, {}, "rounded up to 209"),
        (SMALL, True, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
    ],
)
def test_what_stock_mlx_lm_would_compute_wrongly(
    make_checkpoint, tmp_path, shape, kv_quant, changes, words
):
    checkpoint = make_checkpoint(shape=shape, kv_quant=kv_quant)
    ours = convert(checkpoint.folder, tmp_path / "ours")
    edit_config(ours, **changes)
    for source in [ours] if changes else [ours, checkpoint.folder]:
        with pytest.raises(AFMError, match=words):
            convert(source, tmp_path / "out", to="mlx-lm")
    assert not (tmp_path / "out").exists()
