"""Models that train on grids, and what they are packed to."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.errors import ConfigError
from afm_mlx.kernels import dispatch
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.qat.qat_layers import QATEmbedding, QATLinear, pack_qat, prepare_qat
from tests.tools.cases import all_pairs
from tests.tools.compare import assert_close, error
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_config, zoo_model

SIZES = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
VOCAB = 64
RULES = [
    QuantizationRule(bits, mode, per, 32 if per == "group" else None)
    for bits, mode, per in all_pairs((2, 4, 8), ("balanced", "affine"), ("tensor", "row", "group"))
]


def tiny_model(rng, **fixed):
    config = random_config(
        rng, **({"vocab_size": VOCAB, "num_layers": 2, "num_kv_reuse_layers": 1} | SIZES | fixed)
    )
    return random_model(config, rng)


def random_tokens(rng, shape=(2, 7)):
    return mx.array(rng.integers(0, VOCAB, shape))


def train_a_little(rng, model, steps=3):
    """Move every parameter, clip factors too."""
    model.train()
    optimizer = optim.AdamW(2e-3, weight_decay=0)

    def loss(model, tokens):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)
    for _ in range(steps):
        _, gradients = step(model, random_tokens(rng, (2, 12)))
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: f"{r.bits}-{r.mode}-{r.granularity}")
def test_the_packed_model_gives_the_trained_ones_logits(rng, rule):
    model = tiny_model(rng, kv_bits=None)
    prepare_qat(model, rule)
    before = dict(tree_flatten(model.parameters()))
    train_a_little(rng, model)
    for name, array in tree_flatten(model.trainable_parameters()):
        assert mx.abs(array - before[name]).max() > 0, name
    tokens = random_tokens(rng)
    trained = model.eval()(tokens)
    packed, config = pack_qat(model, model.args.to_dict())
    assert not packed.training
    with dispatch.force("reference"):
        assert_close(packed(tokens), trained, 1e-4)
    assert_close(packed(tokens), trained, 2e-3)  # kernels may round activations to 16 bits
    wanted = quantize_model(tiny_model(rng, kv_bits=None), model.args.to_dict(), rule)[1]
    assert config["quantization"] == wanted["quantization"] == config["quantization_config"]
    assert all(
        m.scales.dtype == mx.float32 for m in packed.modules() if isinstance(m, PackedLinear)
    )


def test_int8_keys_and_values_survive_packing(rng):
    """A key or value on a rounding boundary may fall to either side, so not every logit agrees."""
    model = tiny_model(rng)
    prepare_qat(model, QuantizationRule(2))
    train_a_little(rng, model)
    tokens = random_tokens(rng)
    trained = np.array(model(tokens))
    packed, _ = pack_qat(model, model.args.to_dict())
    with dispatch.force("reference"):
        errors = np.abs(np.array(packed(tokens)) - trained) / trained.std()
    assert np.median(errors) <= 1e-4
    assert errors.max() <= 0.1


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_models_of_the_zoo_train_and_load_in_stock_mlx_lm(rng, tmp_path, model_type):
    from mlx_lm import utils

    model = zoo_model(model_type, VOCAB, int(rng.integers(2**31)))
    config = zoo_config(model_type, VOCAB)
    write_zoo_folder(tmp_path / "float", model_type, model, word_tokenizer_json(VOCAB))
    rule = QuantizationRule(4, "affine", "group", 32)
    prepare_qat(model, rule, QuantizationRule(8, "affine", "group", 32))
    if model_type == "qwen2":
        assert "bias" in model.layers[0].self_attn.q_proj
    train_a_little(rng, model)
    tokens = random_tokens(rng)
    trained = model.eval()(tokens)
    packed, config = pack_qat(model, config)
    assert_close(packed(tokens), trained, 2e-3)
    folder = tmp_path / "float"
    (folder / "config.json").write_text(json.dumps(config))
    arrays = dict(tree_flatten(packed.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    stock, _ = utils.load_model(folder)
    assert type(stock.layers[0].mlp.up_proj) is nn.QuantizedLinear
    assert_close(stock(tokens), trained, 1e-3)
    ours, _ = afm_mlx.load(folder)
    assert_close(ours(tokens), trained, 2e-3)


@pytest.mark.parametrize("model_type", ["llama", None])
def test_each_layer_its_own_rule(rng, model_type):
    """Mixed bits by a predicate, in a model of the zoo and in ours; what is left out stays float."""
    own = QuantizationRule(8, "affine", "row")

    def predicate(path, module):
        if path.endswith("down_proj"):
            return own
        if "layers.0." in path:
            return {"bits": 4, "mode": "balanced", "group_size": 16}
        return "layers.1.self_attn" not in path

    if model_type:
        model, config = zoo_model(model_type, VOCAB, 1), zoo_config(model_type, VOCAB)
    else:
        model = tiny_model(rng, num_layers=3, kv_bits=None)
        config = model.args.to_dict()
    prepare_qat(model, QuantizationRule(2), predicate=predicate)
    kinds = {path: type(module) for path, module in model.named_modules()}
    left = [p for p, kind in kinds.items() if kind is nn.Linear]
    assert left
    assert all("layers.1.self_attn" in path for path in left)
    train_a_little(rng, model)
    tokens = random_tokens(rng)
    trained = model.eval()(tokens)
    packed, values = pack_qat(model, config)
    assert_close(packed(tokens), trained, 2e-3)
    downs = [m for path, m in packed.named_modules() if path.endswith("down_proj")]
    assert all((m.bits, m.mode, m.granularity) == (8, "affine", "row") for m in downs)
    rules = {k: v for k, v in values["quantization"].items() if isinstance(v, dict)}
    assert own.to_dict() in [
        *rules.values(),
        {k: values["quantization"].get(k) for k in own.to_dict()},
    ]


def test_eight_bits_are_near_the_float_model(rng):
    model = tiny_model(rng, kv_bits=None)
    tokens = random_tokens(rng)
    wanted = model(tokens)
    prepare_qat(model, QuantizationRule(8))
    assert_close(model(tokens), wanted, 0.1)
    assert error(model(tokens), wanted) > 1e-6  # it is on the grid


@pytest.mark.parametrize("kv_bits", [8, None])
def test_training_and_evaluating_forwards_agree(rng, kv_bits):
    model = tiny_model(rng, kv_bits=kv_bits)
    prepare_qat(model, QuantizationRule(2, "balanced", "tensor"))
    tokens = random_tokens(rng)
    with dispatch.force("reference"):
        wanted = np.array(model(tokens))
    errors = np.abs(np.array(model.train()(tokens)) - wanted) / wanted.std()
    assert np.median(errors) <= 1e-4
    assert errors.max() <= (0.1 if kv_bits else 1e-4)


def test_the_head_and_the_lookup_see_one_matrix(rng):
    embedding = nn.Embedding(VOCAB, 32)
    layer = QATEmbedding(embedding, QuantizationRule(4))
    matrix = np.array(layer.fake_quantized())
    assert np.array_equal(np.array(layer(mx.arange(VOCAB))), matrix)
    x = rng.normal(0, 1, (3, 32)).astype(np.float32)
    assert np.allclose(np.array(layer.as_linear(mx.array(x))), x @ matrix.T, atol=1e-4)
    assert not np.array_equal(matrix, np.array(embedding.weight))


def test_layers_repeat_a_bias(rng):
    linear = nn.Linear(32, 8)
    layer = QATLinear(linear, QuantizationRule(8, "affine", "row"))
    x = mx.array(rng.normal(0, 1, (3, 32)).astype(np.float32))
    assert_close(layer(x), linear(x), 0.05)
    assert_close(layer.to_packed()(x), layer(x), 1e-4)


@pytest.mark.parametrize("learned", [True, False])
def test_int8_scales_train_when_asked(rng, learned):
    model = tiny_model(rng, num_layers=3)
    prepare_qat(model, QuantizationRule(4), learn_kv_scales=learned)
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    scales = {name for name, _ in tree_flatten(model.parameters()) if "quant_" in name}
    assert len(scales) == 4
    assert scales & trainable == (scales if learned else set())
    norms = {name for name, _ in tree_flatten(model.parameters()) if "norm" in name}
    assert norms <= trainable
    assert "model.layers.0.mlp.up_proj.clip" in trainable
    before = {name: array for name, array in tree_flatten(model.parameters()) if name in scales}
    train_a_little(rng, model, steps=2)
    after = dict(tree_flatten(model.parameters()))
    assert all((after[name].item() != before[name].item()) == learned for name in scales)


def test_training_lowers_a_two_bit_models_loss(rng):
    """Distillation into the float model's own two-bit twin, from fixed tokens."""
    model = tiny_model(rng, num_kv_reuse_layers=0, kv_bits=None)
    tokens = random_tokens(rng, (4, 16))
    wanted = mx.softmax(model(tokens), axis=-1)
    prepare_qat(model, QuantizationRule(2, "balanced", "tensor"))
    model.train()
    optimizer = optim.AdamW(1e-3, weight_decay=0)

    def loss(model):
        return nn.losses.cross_entropy(model(tokens), wanted).mean()

    step = nn.value_and_grad(model, loss)
    losses = []
    for _ in range(20):
        value, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
        losses.append(value.item())
    entropy = -(wanted * mx.log(wanted)).sum(axis=-1).mean().item()
    assert losses[-1] - entropy < 0.7 * (losses[0] - entropy)


def test_a_packed_model_decodes_after_the_trained_one_did(rng):
    """Traces of decode steps are of the layers that were there."""
    model = tiny_model(rng)
    prepare_qat(model, QuantizationRule(4))
    token = random_tokens(rng, (1, 1))

    def decoded():
        cache = model.eval().make_cache()
        for _ in range(3):
            logits = model(token, cache)
        return logits

    trained = decoded()
    pack_qat(model, model.args.to_dict())
    assert isinstance(model.model.embedding, PackedEmbedding)
    with dispatch.force("reference"):
        assert_close(decoded(), trained, 0.1)


def test_what_cannot_be_prepared_or_packed(rng):
    model = tiny_model(rng)
    with pytest.raises(ConfigError, match="mode is 'palette'"):
        prepare_qat(model, QuantizationRule(4, "palette"))
    assert type(model.model.embedding) is nn.Embedding  # nothing was replaced
    with pytest.raises(ConfigError, match="prepare_qat comes before pack_qat"):
        pack_qat(model, model.args.to_dict())
    with pytest.raises(ConfigError, match="No layer was chosen"):
        prepare_qat(model, predicate=lambda path, module: False)
    quantize_model(model, model.args.to_dict())
    with pytest.raises(ConfigError, match="dequantize_model"):
        prepare_qat(model)
