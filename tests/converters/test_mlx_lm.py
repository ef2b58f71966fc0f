"""Folders of mlx-lm's afm7: in, out, and what stock mlx-lm can't hold."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import afm7
from mlx_lm.utils import load_model as stock_load_model
from mlx_lm.utils import save_model as stock_save_model

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_model
from tests.converters.conftest import DRAFT, SMALL, assert_same_weights
from tests.tools.compare import assert_parity, assert_same


@pytest.fixture
def stock_folder(tmp_path, rng, tokenizer_bytes):
    """A function that makes a folder as mlx-lm writes one."""

    def make(**changes):
        values = {"model_type": "afm7", "rope_theta": 500000.0, **SMALL, **changes}
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

    return make


def edit_config(folder, change):
    values = json.loads((folder / "config.json").read_text())
    change(values)
    (folder / "config.json").write_text(json.dumps(values))


def test_in(stock_folder, rng, tmp_path):
    folder, stock = stock_folder()
    out = convert(folder, tmp_path / "out")
    assert_same_weights(folder, out)
    config = ModelConfig.from_file(out / "config.json")
    assert (config.kv_bits, config.context_length) == (8, 4096)
    prompts = [mx.array(tokens) for tokens in rng.integers(1, SMALL["vocab_size"], (8, 1, 7))]
    assert_parity(load_model(out), stock, prompts, ties=0.05)


def test_there_and_back(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}})
    ours = convert(checkpoint.folder, tmp_path / "ours")
    theirs = convert(ours, tmp_path / "theirs", to="mlx-lm")
    again = convert(theirs, tmp_path / "again")
    direct = convert(checkpoint.folder, tmp_path / "direct", to="mlx-lm")
    for folder in (theirs, again, direct):
        assert_same_weights(ours, folder)
        assert not (folder / "adapters").exists()
    assert ModelConfig.from_file(ours / "config.json") == ModelConfig.from_file(
        again / "config.json"
    )
    for folder in (theirs, direct):
        values = json.loads((folder / "config.json").read_text())
        # The architecture, and what mlx-lm reads for every model.
        assert set(values) <= {*afm7.ModelArgs.__annotations__, "eos_token_id"}
        stock_load_model(folder)


def test_adapters_follow_their_base(make_checkpoint, tmp_path):
    checkpoint = make_checkpoint(adapters={"a": {"rank": 4}, "b": {"rank": 2}})
    ours = convert(checkpoint.folder, tmp_path / "ours")
    foreign = tmp_path / "ours" / "adapters" / "b"
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
def test_dtype(stock_folder, tmp_path, dtype):
    folder, _ = stock_folder()
    out = convert(folder, tmp_path / "out", dtype=dtype)
    source, found = load_weights(folder), load_weights(out)
    for name, array in found.items():
        target = mx.float32 if name.endswith("_scale") else getattr(mx, dtype)
        assert array.dtype == target
        assert_same(array, source[name].astype(target), name)


def test_a_number_too_large_for_float16(stock_folder, tmp_path):
    folder, _ = stock_folder()
    weights = load_weights(folder)
    mx.eval(weights)
    weights["model.output_norm.weight"] = mx.full((SMALL["hidden_dim"],), 1e6)
    save_weights(folder, weights)
    with pytest.raises(CheckpointError, match="output_norm"):
        convert(folder, tmp_path / "out", dtype="float16")


def test_rope_theta_must_be_there(stock_folder, tmp_path):
    folder, _ = stock_folder()
    edit_config(folder, lambda values: values.pop("rope_theta"))
    with pytest.raises(ConfigError, match=r"rope_theta is missing.*50000.*500000"):
        convert(folder, tmp_path / "out")


def test_a_folder_that_contradicts_its_config(stock_folder, tmp_path):
    folder, _ = stock_folder()
    edit_config(folder, lambda values: values.update(num_layers=6))
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.3"):
        convert(folder, tmp_path / "out")
    edit_config(folder, lambda values: values.update(num_layers=5, sliding_window=7))
    with pytest.raises(ConfigError, match="sliding_window"):
        convert(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_fit(stock_folder, tmp_path):
    from tokenizers import Tokenizer, models

    folder, _ = stock_folder()
    words = {f"w{i}": i for i in range(SMALL["vocab_size"] + 1)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="513 tokens"):
        convert(folder, tmp_path / "out")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        convert(folder, tmp_path / "out")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        convert(folder, tmp_path / "out")


def test_quantized_folders_pass_through(stock_folder, tmp_path):
    """Older versions of mlx-lm wrote them; 0.32 can't write them, and loads those that name the fused layer."""
    folder, model = stock_folder()
    weights = {}
    for name, array in tree_flatten(model.parameters()):
        if name.endswith("embedding.weight"):
            group = {"bits": 8, "group_size": 32}
        else:
            group = {"bits": 4, "group_size": 64}
        if array.ndim == 2 and array.shape[1] % group["group_size"] == 0:
            parts = mx.quantize(array, **group)
            module = name.removesuffix("weight")
            weights |= dict(
                zip((f"{module}weight", f"{module}scales", f"{module}biases"), parts, strict=True)
            )
        else:
            weights[name] = array
    save_weights(folder, weights)
    quantization = {
        "bits": 4,
        "group_size": 64,
        "mode": "affine",
        "model.embedding": {"bits": 8, "group_size": 32},
    }
    edit_config(
        folder,
        lambda v: v.update(quantization=quantization, quantization_config=quantization),
    )
    out = convert(folder, tmp_path / "out")
    assert_same_weights(folder, out)
    assert json.loads((out / "config.json").read_text())["quantization"] == quantization
    with pytest.raises(AFMError, match="quantized"):
        convert(folder, tmp_path / "two", dtype="float16")
    with pytest.raises(TypeError, match="to_quantized"):
        stock_load_model(out)
    stock_load_model(convert(folder, tmp_path / "theirs", to="mlx-lm"))
    assert_same_weights(folder, tmp_path / "theirs")
    edit_config(folder, lambda v: v["quantization"].update(bits=8))
    with pytest.raises(CheckpointError, match=r"proj is \[.*weight is uint32 .* must be uint32"):
        convert(folder, tmp_path / "two")
    edit_config(folder, lambda v: v["quantization"].pop("bits"))
    with pytest.raises(ConfigError, match="proj can't be used: bits is None"):
        convert(folder, tmp_path / "two")


@pytest.mark.parametrize(
    ("shape", "kv_quant", "words"),
    [
        (DRAFT, False, "always rounds keys and values to 8 bits"),
        (SMALL | {"hidden_dim_scale_factor": 3.26}, True, "rounded up to 209"),
    ],
)
def test_what_stock_mlx_lm_would_compute_wrongly(make_checkpoint, tmp_path, shape, kv_quant, words):
    checkpoint = make_checkpoint(shape=shape, kv_quant=kv_quant)
    with pytest.raises(AFMError, match=words):
        convert(checkpoint.folder, tmp_path / "out", to="mlx-lm")
    ours = convert(checkpoint.folder, tmp_path / "ours")
    with pytest.raises(AFMError, match=words):
        convert(ours, tmp_path / "out", to="mlx-lm")
    assert not (tmp_path / "out").exists()


def test_another_epsilon(make_checkpoint, tmp_path):
    ours = convert(make_checkpoint().folder, tmp_path / "ours")
    edit_config(ours, lambda values: values.update(rms_norm_eps=1e-6))
    with pytest.raises(AFMError, match="rms_norm_eps is 1e-06"):
        convert(ours, tmp_path / "out", to="mlx-lm")


def test_other_architectures_are_mlx_lms_work(tmp_path, capsys):
    from mlx_lm.models import llama
    from tokenizers import Tokenizer, models

    values = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 8,
        "tie_word_embeddings": False,
    }
    source = tmp_path / "llama"
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(values))
    stock_save_model(source, model)
    (source / "config.json").write_text(json.dumps(values))
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(
        str(source / "tokenizer.json")
    )
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    out = convert(source, tmp_path / "out", dtype="bfloat16")
    assert capsys.readouterr().out == ""
    assert load_weights(out)["model.norm.weight"].dtype == mx.bfloat16
    assert not (out / "converted").exists()
