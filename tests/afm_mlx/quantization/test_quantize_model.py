"""Models packed by rules: ours and mlx-lm's."""

import dataclasses

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.config import PRESETS
from afm_mlx.converters.convert import convert
from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.measure.random_model import random_packed_model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import (
    dequantize_model,
    quantization_entries,
    quantize_model,
)
from afm_mlx.quantization.rule import PRESET_RULES, QuantizationRule
from afm_mlx.training.qat.qat_layers import prepare_qat
from tests.tools.compare import assert_close, assert_same_tensors
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_config, zoo_model

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
VOCAB = 64


def test_the_commonest_rule_is_the_common_one():
    low, high = QuantizationRule(2), QuantizationRule(4, "affine")
    entries = quantization_entries({"a": high, "b": low, "c": low})
    assert entries == {**low.to_dict(), "a": high.to_dict()}


def test_the_first_generation_has_its_published_formats(rng):
    """Tables of 16 rows in linear layers, an embedding of 8 bits per row; it decodes over float keys."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_dim": 192,
        "num_layers": 2,
        "hidden_dim_scale_factor": 2.5,
    }
    config = dataclasses.replace(PRESETS["afm-2024"], **sizes)
    model = random_packed_model(config, *PRESET_RULES["afm-2024"], seed=int(rng.integers(2**31)))
    assert model.layers[0].mlp.up_proj.packed.table.shape == (config.ffn_dim // 16, 16)
    embedding = model.model.embedding
    assert (embedding.bits, embedding.granularity) == (8, "row")
    tokens = mx.array(rng.integers(0, VOCAB, (1, 9)))
    cache = model.make_cache("int8")
    assert not any(part.int8 for part in cache)
    steps = [model(tokens[:, i : i + 3], cache) for i in (0, 3, 6)]
    assert_close(mx.concatenate(steps, axis=1), dequantize_model(model)(tokens), 2e-3)


@pytest.mark.parametrize("model_type", ["gpt_oss", "longcat_flash"])
def test_layers_of_other_types_are_refused_by_name(tmp_path, zoo_folder, model_type):
    """Experts would stay float, and most of a model with them, whatever its bits per weight are said to be."""
    (model, source), kind = zoo_folder(model_type), "SwitchLinear"
    for pack in (quantize_model, lambda model, config: prepare_qat(model)):
        with pytest.raises(
            ConfigError, match=rf"^model\.layers\.0\..* \({kind}\) and \d+ more.*float: \d\d%"
        ):
            pack(model, zoo_config(model_type, VOCAB))
    with pytest.raises(ConfigError, match=kind):
        convert(source, tmp_path / "packed", quantize=True, q_mode="balanced", q_bits=2)
    assert not (tmp_path / "packed").exists()

    def no_experts(path, module):
        return type(module) in (nn.Linear, nn.Embedding)

    rule = QuantizationRule(4)
    quantize_model(model, zoo_config(model_type, VOCAB), rule, predicate=no_experts)
    names = [type(module).__name__ for module in model.modules()]
    assert kind in names
    assert "PackedLinear" in names


@pytest.fixture
def zoo_folder(rng, tmp_path):
    def make(model_type):
        model = zoo_model(model_type, VOCAB, int(rng.integers(2**31)))
        write_zoo_folder(tmp_path / "float", model_type, model, word_tokenizer_json(VOCAB))
        return model, tmp_path / "float"

    return make


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2"])
def test_models_of_the_zoo(rng, tmp_path, zoo_folder, model_type):
    """Linear layers with a bias (qwen2) too; through a folder, and with a head that is the embedding."""
    model, source = zoo_folder(model_type)
    embedding = QuantizationRule(8, group_size=16)
    _, values = quantize_model(
        model, zoo_config(model_type, VOCAB), QuantizationRule(4, group_size=16), embedding
    )
    assert values["quantization"]["model.embed_tokens"] == embedding.to_dict()
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    options = {"q_mode": "balanced", "q_bits": 4, "q_group_size": 16, "q_embedding_bits": 8}
    folder = convert(source, tmp_path / "packed", quantize=True, **options)
    loaded, tokenizer = afm_mlx.load(folder)
    assert ("bias" in loaded.layers[0].self_attn.q_proj) == (model_type == "qwen2")
    assert_same_tensors(*(dict(tree_flatten(m.parameters())) for m in (loaded, model)))
    assert list(afm_mlx.stream_generate(loaded, tokenizer, [5, 9, 2], max_tokens=3))
    tokens = mx.array(rng.integers(0, VOCAB, (2, 7)))
    assert_close(loaded(tokens), dequantize_model(model)(tokens), 2e-3)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"q_bits": 4, "q_group_size": 32}, PackedLinear),
        ({"q_bits": 6, "q_group_size": 32}, nn.QuantizedLinear),
        ({"q_mode": "mxfp4"}, nn.QuantizedLinear),
    ],
)
def test_folders_that_mlx_lm_quantized(rng, tmp_path, capsys, zoo_folder, options, kind):
    """Its affine layers run in our kernels; what it adds for 6 bits and mxfp4 stays MLX's."""
    _, source = zoo_folder("llama")
    out = convert(source, tmp_path / "out", quantize=True, **options)
    loaded, _ = afm_mlx.load(out)
    assert type(loaded.layers[0].mlp.up_proj) is kind
    tokens = mx.array(rng.integers(0, VOCAB, (2, 7)))
    assert_close(loaded(tokens), mlx_lm.load(str(out))[0](tokens), 2e-3)
    assert capsys.readouterr().out == ""


def test_what_the_predicate_says(rng):
    config = random_config(rng, **SIZES, vocab_size=VOCAB)

    def packed(predicate):
        model = random_model(config, rng)
        _, values = quantize_model(model, {}, predicate=predicate)
        return model, values["quantization"]

    model, _ = packed(None)
    up_proj = model.layers[0].mlp.up_proj
    assert (up_proj.bits, up_proj.training, model.model.embedding.bits) == (2, False, 4)
    model, _ = packed(lambda path, module: path.endswith("up_proj"))
    layers = [path for path, m in model.named_modules() if isinstance(m, PackedLinear)]
    assert {path.split(".")[-1] for path in layers} == {"up_proj"}
    assert isinstance(model.model.embedding, nn.Embedding)
    model, entries = packed(
        lambda path, module: QuantizationRule(8) if path == "model.embedding" else {"bits": 4}
    )
    assert (model.model.embedding.bits, model.layers[0].mlp.up_proj.bits) == (8, 4)
    assert entries["model.embedding"]["bits"] == 8
    for answer, words in (
        (None, "the predicate returned None"),
        ({"bits": 5}, r"model\..*: bits is 5"),
        (False, "No layer was chosen"),
    ):
        with pytest.raises(ConfigError, match=words):
            packed(lambda path, module, answer=answer: answer)


def test_layers_that_cannot_be_packed_are_named(rng):
    model = random_model(random_config(rng, **SIZES, vocab_size=VOCAB), rng)
    with pytest.raises(
        ConfigError, match=r"_proj has \d+ inputs, which groups of 10 do not divide"
    ):
        quantize_model(model, {}, QuantizationRule(8, group_size=10))
    model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\..*mlp.up_proj holds NaN"):
        quantize_model(model, {}, QuantizationRule(8))
