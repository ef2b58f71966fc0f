"""Models packed by rules: ours and mlx-lm's."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.checkpoint.weights import load_weights, stored_tensors
from afm_mlx.config import PRESETS
from afm_mlx.converters.convert import convert
from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.kernels import dispatch
from afm_mlx.measure.describe import describe_stored_weights
from afm_mlx.measure.random_model import random_packed_model
from afm_mlx.quantization.packed_layers import PARTS, PackedEmbedding, PackedExperts, PackedLinear
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


def test_layers_of_other_types_are_refused_by_name(tmp_path, zoo_folder):
    """They would stay float, and with them a share of the model that grows as the others are packed."""
    (model, source), kind = zoo_folder("longcat_flash"), "MultiLinear"
    refused = rf"^model\.layers\.0\..* \({kind}\) and \d+ more.*float: \d+%"
    with pytest.raises(ConfigError, match=refused):
        quantize_model(model, zoo_config("longcat_flash", VOCAB))
    with pytest.raises(ConfigError, match=r"\(SwitchLinear\) and \d+ more.*float: \d\d%"):
        prepare_qat(zoo_folder("gpt_oss")[0])
    with pytest.raises(ConfigError, match=kind):
        convert(source, tmp_path / "packed", quantize=True, q_mode="balanced", q_bits=2)
    assert not (tmp_path / "packed").exists()

    def no_others(path, module):
        return type(module).__name__ != kind

    rule = QuantizationRule(4)
    quantize_model(model, zoo_config("longcat_flash", VOCAB), rule, predicate=no_others)
    names = [type(module).__name__ for module in model.modules()]
    assert {kind, "PackedLinear", "PackedExperts"} <= set(names)


# Each format, and two that differ by layer: experts alone, and all but experts.
MIXTURES = [
    ("qwen3_moe", {"q_bits": 2}, 2.7),
    ("qwen3_moe", {"q_bits": 4, "q_group_size": 32}, 5.0),
    ("gpt_oss", {"q_bits": 2, "q_granularity": "tensor"}, 2.01),
    ("gpt_oss", {"q_bits": 4}, 5.0),
    ("gpt_oss", {"q_bits": 4, "quant_predicate": lambda path, _: "experts" in path}, 5.0),
    ("qwen3_moe", {"q_bits": 4, "quant_predicate": lambda path, _: "switch" not in path}, 32),
]


@pytest.mark.parametrize(("model_type", "options", "most"), MIXTURES)
def test_mixtures_of_experts(rng, tmp_path, zoo_folder, model_type, options, most):
    """Through a folder: its layers and bits, and the tokens of stock mlx-lm with the same numbers as floats."""
    model, source = zoo_folder(model_type)
    own = next(m for _, m in model.named_modules() if type(m).__name__ == "SwitchLinear")
    packed = convert(source, tmp_path / "packed", quantize=True, q_mode="balanced", **options)
    floats = convert(packed, tmp_path / "floats", dequantize=True)
    loaded, tokenizer = afm_mlx.load(packed)
    kinds = {path: type(module).__name__ for path, module in loaded.named_modules()}
    experts = [path for path, kind in kinds.items() if kind in ("SwitchLinear", "PackedExperts")]
    assert len(experts) == 6
    assert {kinds[path] for path in experts} == {"PackedExperts" if most < 32 else "SwitchLinear"}
    tensors, config = stored_tensors(packed), json.loads((packed / "config.json").read_text())
    nbytes = sum(
        tensors[f"{path}.{part}"].nbytes
        for path in experts
        for part in PARTS
        if f"{path}.{part}" in tensors
    )
    assert 8 * nbytes <= most * len(experts) * own.weight.size
    router = "model.layers.1.mlp." + ("router" if model_type == "gpt_oss" else "gate")
    if "quant_predicate" not in options:
        assert config["quantization"][router]["bits"] == loaded.layers[1].mlp[router[19:]].bits == 8
    facts = describe_stored_weights(packed)
    assert facts["parameters"] == sum(a.size for _, a in tree_flatten(model.parameters()))
    if "quant_predicate" not in options:
        assert (
            facts["bits_per_weight"] < options["q_bits"] + 2
        )  # small rows: scales, biases and norms weigh more
    stock, wrapper = mlx_lm.load(str(floats))
    for length in (3, 70):  # fewer pairs of token and expert than mlx-lm sorts by expert, and more
        prompt = rng.integers(0, VOCAB, length).tolist()
        with dispatch.force("reference"):
            assert_close(loaded(mx.array([prompt])), stock(mx.array([prompt])), 1e-4)
        assert_close(loaded(mx.array([prompt])), stock(mx.array([prompt])), 2e-3)
        ours = afm_mlx.stream_generate(loaded, tokenizer, prompt, max_tokens=8)
        theirs = mlx_lm.stream_generate(stock, wrapper, prompt, max_tokens=8)
        assert [r.token for r in ours] == [r.token for r in theirs]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_in_stock_mlx_lm(rng, tmp_path, zoo_folder, model_type):
    """The same codes in MLX's format; and these, as any folder that mlx-lm has packed, run in our layers."""
    _, source = zoo_folder(model_type)
    packed = convert(source, tmp_path / "packed", quantize=True, q_mode="balanced", q_bits=4)
    stock = convert(packed, tmp_path / "stock", to="mlx-lm")
    tensors, theirs = load_weights(packed), load_weights(stock)
    codes = [name for name, array in tensors.items() if array.dtype == mx.uint32]
    assert_same_tensors({n: theirs[n] for n in codes}, {n: tensors[n] for n in codes})
    tokens = mx.array(rng.integers(0, VOCAB, (2, 7)))
    ours, _ = afm_mlx.load(packed)
    wanted, _ = mlx_lm.load(str(stock))
    again, _ = afm_mlx.load(stock)
    for model in (ours, again):
        kinds = {type(module) for module in model.modules()}
        assert PackedExperts in kinds
        assert_close(model(tokens), wanted(tokens), 2e-3)


def test_experts_that_only_mlx_has_a_format_for(rng, tmp_path, zoo_folder):
    """GPT-OSS is published with experts in mxfp4."""
    _, source = zoo_folder("gpt_oss")
    options = {"q_mode": "mxfp4", "quant_predicate": lambda path, _: "experts" in path}
    out = convert(source, tmp_path / "out", quantize=True, **options)
    loaded, _ = afm_mlx.load(out)
    assert type(loaded.layers[0].mlp.experts.up_proj).__name__ == "QuantizedSwitchLinear"
    tokens = mx.array(rng.integers(0, VOCAB, (2, 7)))
    assert_close(loaded(tokens), mlx_lm.load(str(out))[0](tokens), 2e-3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"q_mode": "palette"}, "holds experts, for which there are no products with palettes"),
        ({"q_bits": 4, "q_group_size": 16}, "no products with scales that 16 inputs share"),
    ],
)
def test_formats_without_products_of_experts(tmp_path, zoo_folder, options, words):
    _, source = zoo_folder("qwen3_moe")
    with pytest.raises(ConfigError, match=rf"^model\.layers\.1\.mlp\.switch_mlp\..*{words}"):
        convert(source, tmp_path / "packed", quantize=True, **{"q_mode": "balanced", **options})


@pytest.fixture
def zoo_folder(rng, tmp_path):
    def make(model_type):
        model = zoo_model(model_type, VOCAB, int(rng.integers(2**31)))
        folder = tmp_path / model_type
        write_zoo_folder(folder, model_type, model, word_tokenizer_json(VOCAB))
        return model, folder

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
