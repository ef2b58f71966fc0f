"""Models of mlx-lm's zoo: loaded with their own layers or packed ones, and with adapters, as mlx-lm does it."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten

from afm_mlx import threads
from afm_mlx.converters.convert import convert
from afm_mlx.engine.generation import generate
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.kernels import dispatch
from afm_mlx.loading import mlx_lm_models
from afm_mlx.loading.load import load
from afm_mlx.quantization.packed_layers import PackedLinear, activation_dtype
from tests.tools.cases import each
from tests.tools.compare import assert_close, error
from tests.tools.engines import naive_greedy
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB = 64
TOKENS = mx.array([[1, 7, 3, 5]])


@pytest.fixture
def folder(tmp_path, rng):
    model = zoo_model("llama", VOCAB, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "zoo", "llama", model, word_tokenizer_json(VOCAB))
    return tmp_path / "zoo"


@pytest.fixture
def adapter(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    options = {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": options}
    (path / "adapter_config.json").write_text(json.dumps(config))
    shapes = {"lora_a": (32, 4), "lora_b": (4, 32)}
    layer = "model.layers.1.self_attn.q_proj"
    tensors = {f"{layer}.{part}": 0.3 * mx.random.normal(shape) for part, shape in shapes.items()}
    mx.save_safetensors(str(path / "adapters.safetensors"), tensors)
    return path


@pytest.mark.parametrize(
    "packed", [{}, {"q_mode": "affine", "q_group_size": 32}, {"q_mode": "palette"}]
)
def test_adapters_do_what_mlx_lm_does_with_them(folder, adapter, tmp_path, packed):
    twin = folder
    if packed:
        folder = convert(folder, tmp_path / "packed", quantize=True, **packed)
        twin = convert(folder, tmp_path / "floats", dequantize=True)
    plain, _, config = load(folder, return_config=True)
    assert config["model_type"] == "llama"
    assert isinstance(plain.layers[0].mlp.up_proj, PackedLinear) == bool(packed)
    adapted, _ = load(folder, adapter_path=str(adapter))
    with dispatch.force("reference"):
        for ours, path in ((plain, None), (adapted, str(adapter))):
            assert_close(ours(TOKENS), mlx_lm.load(str(twin), adapter_path=path)[0](TOKENS), 1e-3)
        assert error(adapted(TOKENS), plain(TOKENS)) > 0.01


def test_a_folder_of_the_zoo_runs_in_our_loop(folder):
    model, tokenizer = load(folder)
    text = generate(model, tokenizer, "w5 w9 w2", max_tokens=5)
    tokens = naive_greedy(model, [5, 9, 2], 5)
    (end,) = tokenizer.eos_token_ids
    shown = tokens[: tokens.index(end)] if end in tokens else tokens
    assert text.split() == [f"w{token}" for token in shown]


@each(
    "packed", [{}, {"q_mode": "affine", "q_group_size": 32}, {"q_mode": "palette"}, {"q_bits": 3}]
)
def test_half_types_are_computed_with_in_the_activations_type(folder, tmp_path, packed):
    name = "-".join(map(str, packed.values()))
    options = packed | {"quantize": bool(packed), "dtype": "bfloat16"}
    half = convert(folder, tmp_path / f"half-{name}", **options)
    stored = mx.load(str(half / "model.safetensors"))
    assert stored["model.norm.weight"].dtype == mx.bfloat16
    model, _ = load(half)
    assert model(TOKENS).dtype == activation_dtype()
    assert model.model.embed_tokens(TOKENS).dtype == activation_dtype()


def test_kernels_are_checked_first_and_weights_get_huge_pages(folder, monkeypatch):
    done = []
    monkeypatch.setattr(mlx_lm_models, "ensure_checked", lambda: done.append("checked"))
    monkeypatch.setattr(
        mlx_lm_models, "prefer_huge_pages", lambda arrays: done.append(len([*arrays]))
    )
    model, _ = load(folder, lazy=True)
    assert done == ["checked"]
    load(folder)
    assert done[1:] == ["checked", len(tree_flatten(model.parameters()))]


def test_what_mlx_lm_cannot_load_is_named(folder):
    for change in ({"num_attention_heads": "four"}, {"hidden_size": None}, {"model_type": "a.b"}):
        with pytest.raises(CheckpointError, match=f"mlx-lm can't load {folder}: "):
            load(folder, model_config=change)
    with pytest.raises(AFMError, match="quantization is 5; an object is needed"):
        load(folder, model_config={"quantization": 5})


def test_another_thread_runs_what_the_main_one_has_loaded(tmp_path):
    """Falcon-H1 has an array that is no parameter, and was left to the first thread that computes with it."""
    model = zoo_model("falcon_h1", VOCAB, 1)
    write_zoo_folder(tmp_path / "zoo", "falcon_h1", model, word_tokenizer_json(VOCAB))
    loaded, _ = load(tmp_path / "zoo")
    logits = threads.submit(lambda: loaded(TOKENS).tolist()).result()
    assert_close(mx.array(logits), model(TOKENS), 1e-3)


def test_damaged_numbers_are_refused(folder, adapter):
    path = adapter / "adapters.safetensors"
    for array, words in (([[1]], "a.lora_a is int32"), ([[mx.nan]], "a.lora_a holds NaN")):
        mx.save_safetensors(str(path), {"a.lora_a": mx.array(array)})
        with pytest.raises(AFMError, match=words):
            load(folder, adapter_path=str(adapter))
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), mx.load(str(path)) | {"model.norm.weight": mx.full(32, mx.nan)})
    with pytest.raises(CheckpointError, match=r"zoo: model.norm.weight holds NaN or infinity"):
        load(folder)
    load(folder, lazy=True)
