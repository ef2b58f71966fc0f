"""Folders of mlx-lm's zoo: they run, or are refused with a sentence."""

import mlx.core as mx
import pytest

import afm_mlx
from afm_mlx.engine.generation import generate
from afm_mlx.errors import AFMError
from tests.tools.engines import naive_greedy
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


@pytest.fixture
def model():
    return zoo_model("llama", 48, 3)


@pytest.fixture
def folder(model, tmp_path):
    write_zoo_folder(tmp_path / "zoo", "llama", model, word_tokenizer_json(48))
    return tmp_path / "zoo"


def test_a_folder_of_the_zoo_runs(model, folder):
    loaded, tokenizer = afm_mlx.load(str(folder))
    text = generate(loaded, tokenizer, "w5 w9 w2", max_tokens=5)
    tokens = naive_greedy(model, [5, 9, 2], 5)
    (end,) = tokenizer.eos_token_ids
    shown = tokens[: tokens.index(end)] if end in tokens else tokens
    assert text.split() == [f"w{token}" for token in shown]


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": "four"}, {"hidden_size": None}, {"model_type": "a.b"}],
)
def test_configs_that_mlx_lm_can_not_take(folder, change):
    with pytest.raises(AFMError, match="mlx-lm can't load"):
        afm_mlx.load(folder, model_config=change)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(AFMError, match=r"config\.json is missing"):
        afm_mlx.load(tmp_path)


def test_numbers_that_are_none(model, folder, tmp_path):
    norm = model.model.norm.weight
    norm[3] = float("nan")
    for name, array, words in (
        ("a.lora_a", mx.array([[1]]), r"a\.lora_a is int32; an adapter's tensors are float16"),
        ("a.lora_b", norm, r"adapters\.safetensors: a\.lora_b holds NaN"),
    ):
        mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {name: array})
        with pytest.raises(AFMError, match=words):
            afm_mlx.load(folder, adapter_path=str(tmp_path))
    model.save_weights(str(folder / "model.safetensors"))
    with pytest.raises(AFMError, match=r"zoo: model\.norm\.weight holds NaN or infinity"):
        afm_mlx.load(folder)
