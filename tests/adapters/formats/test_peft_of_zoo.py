"""PEFT's adapters of transformers' models, run by mlx-lm's architectures: PyTorch's logits."""

import json

import mlx.core as mx
import pytest
import torch

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.target_modules import zoo_base
from afm_mlx.converters.adapter_conversion import (
    BaseFolder,
    base_of,
    convert_adapter,
    verify_adapter,
)
from afm_mlx.errors import CheckpointError
from afm_mlx.loading.load import load
from tests.adapters.formats.conftest import assert_same_numbers
from tests.tools.cases import each
from tests.tools.compare import assert_close, error
from tests.tools.zoo import word_tokenizer_json, zoo_model

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
LAYERS = {
    "llama": ["q_proj", "v_proj"],  # PEFT's default
    "qwen3": "all-linear",
    "phi3": ["qkv_proj", "gate_up_proj", "down_proj"],
    "gemma3_text": ["k_proj", "o_proj", "up_proj"],
}


@pytest.fixture(scope="module", params=LAYERS)
def trained(request, tmp_path_factory):
    """A kind of model, the folders of a random model and of PEFT's adapter for it, and the adapted model."""
    peft = pytest.importorskip("peft")
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    own = {"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in kind else {}
    config = AutoConfig.for_model(kind, **SIZES, **own, sliding_window_pattern=2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    model.save_pretrained(folder / "model")
    model.name_or_path = str(folder / "model")  # what a model that was loaded has
    (folder / "model/tokenizer.json").write_text(json.dumps(word_tokenizer_json(VOCAB)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(settings))
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=3,
            lora_alpha=9,
            rank_pattern={"down_proj": 5},
            target_modules=LAYERS[kind],
            init_lora_weights=False,
        ),
    )
    adapted.save_pretrained(folder / "peft")
    return kind, folder / "model", folder / "peft", adapted.eval()


def some_tokens(rng):
    return rng.integers(2, VOCAB, (2, 9))


def test_peft_adapters_of_transformers_models(trained, rng, tmp_path):
    """Loaded as they are, switched to, and as folders that stock mlx-lm loads; and back again."""
    import mlx_lm

    kind, folder, adapter, theirs = trained
    tokens = some_tokens(rng)
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits
    given, base = mx.array(tokens), BaseFolder.read(folder)
    assert error(load(folder)[0](given), wanted) > 0.01
    assert_close(load(folder, adapter_path=str(adapter))[0](given), wanted, 1e-2)
    assert_close(attach_adapter(load(folder)[0], adapter)(given), wanted, 1e-2)
    assert base_of(adapter).config.model_type == kind

    convert_adapter(adapter, tmp_path / "mlx", "mlx-lm", base=base)
    stock, _ = mlx_lm.load(str(folder), adapter_path=str(tmp_path / "mlx"))
    assert_close(stock(given), wanted, 1e-4)
    convert_adapter(tmp_path / "mlx", tmp_path / "back", "peft", base=base)
    assert_same_numbers(
        read_adapter(tmp_path / "back", base.config)[0],
        read_adapter(tmp_path / "mlx", base.config)[0],
    )
    for path in (adapter, tmp_path / "mlx", tmp_path / "back"):
        report = verify_adapter(path, base)
        assert not report.problems
        assert not report.notes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A PEFT adapter of a Llama."""
    base = zoo_base(zoo_model("llama", VOCAB, 0))
    path = tmp_path_factory.mktemp("made") / "adapter"
    from afm_mlx.adapters.adapter_folder import AdapterConfig

    name = "model.layers.1.self_attn.o_proj.lora_"
    tensors = {f"{name}a": mx.ones((32, 2)), f"{name}b": mx.ones((2, 32))}
    write_adapter(path, tensors, AdapterConfig(2, 0.5, -1), "peft", model_config=base)
    return path, tensors, AdapterConfig(2, 0.5, -1)


@each(
    ("kind", "words"),
    [
        ("lfm2", "the base, a lfm2, has no linear layer model.layers.1.self_attn.o_proj that an"),
        ("falcon_h1", "falcon_h1 with its multipliers inside the weights"),
        (None, r"no LoRA tensor of an AFM model; .* name the adapter's model \(--model\)"),
    ],
)
def test_adapters_of_another_architecture(made, kind, words):
    base = None if kind is None else zoo_base(zoo_model(kind, VOCAB, 0))
    with pytest.raises(CheckpointError, match=words):
        read_adapter(made[0], base)


def test_what_has_no_form_of_an_adapter(made, tmp_path):
    _, tensors, config = made
    for kind, to, words in (
        ("falcon_h1", "peft", "with its multipliers inside the weights"),
        ("llama", "toolkit", "toolkit is a format of adapters of AFM models"),
        ("llama", "fmadapter", "fmadapter is a format of adapters of AFM models"),
    ):
        base = zoo_base(zoo_model(kind, VOCAB, 0))
        with pytest.raises(CheckpointError, match=words):
            write_adapter(tmp_path / "out", tensors, config, to, model_config=base)
    wrong = {name.replace("o_proj", "x_proj"): tensor for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"the model has no layer for .*x_proj\.lora_a"):
        write_adapter(tmp_path / "out", wrong, config, "mlx-lm", model_config=base)
