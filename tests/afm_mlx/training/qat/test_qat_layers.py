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
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.qat.qat_layers import (
    QATEmbedding,
    QATLinear,
    lsq_gradient_scale,
    pack_qat,
    prepare_qat,
)
from tests.tools.cases import draw
from tests.tools.compare import assert_close, changed
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_config, zoo_model

VOCAB = 64


def tiny_model(rng, **fixed):
    sizes = {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 2.0}
    sizes |= {"vocab_size": VOCAB, "num_layers": 2, "num_kv_reuse_layers": 1}
    return random_model(random_config(rng, **(sizes | fixed)), rng)


@pytest.fixture
def tokens(rng):
    return mx.array(rng.integers(0, VOCAB, (2, 12)))


def flat(model):
    return dict(tree_flatten(model.parameters()))


def trained_logits(model, tokens):
    """Logits after three steps that move every parameter, clip factors too."""
    before = flat(model.train())
    optimizer = optim.AdamW(2e-3, weight_decay=0)

    def loss(model):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    step = nn.value_and_grad(model, loss)
    for _ in range(3):
        _, gradients = step(model)
        optimizer.update(model, gradients)
        mx.eval(model.state, optimizer.state)
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert changed(before, flat(model)) == trainable
    return model.eval()(tokens)


def test_the_packed_model_gives_the_trained_ones_logits(rng, rule, tokens):
    model = tiny_model(rng, kv_bits=None)
    prepare_qat(model, rule)
    trained = trained_logits(model, tokens)
    packed, config = pack_qat(model, model.args.to_dict())
    assert not packed.training
    with dispatch.force("reference"):
        assert_close(packed(tokens), trained, 1e-4)
    assert_close(packed(tokens), trained, 2e-3)  # kernels may round activations to 16 bits
    wanted = quantize_model(tiny_model(rng, kv_bits=None), model.args.to_dict(), rule)[1]
    assert config["quantization"] == wanted["quantization"] == config["quantization_config"]
    linear = [m for m in packed.modules() if isinstance(m, PackedLinear)]
    assert {m.scales.dtype for m in linear} == {mx.float32}


def test_int8_keys_and_values_survive_packing(rng, tokens):
    """A key or value on a rounding boundary may fall to either side, so not every logit agrees."""
    model = tiny_model(rng)
    prepare_qat(model, QuantizationRule(2))
    trained = trained_logits(model, tokens)
    model(tokens[:1, :1], model.make_cache())  # leaves a trace of the layers that are there
    packed, _ = pack_qat(model, model.args.to_dict())
    with dispatch.force("reference"):
        for got, wanted in (
            (packed(tokens), trained),
            (packed(tokens[:1, :1], packed.make_cache()), trained[:1, :1]),
        ):
            errors = np.abs(np.array(got - wanted)) / np.array(trained).std()
            assert np.median(errors) <= 1e-4
            assert errors.max() <= 0.1


def test_a_model_of_the_zoo_trains_and_loads_in_stock_mlx_lm(rng, tmp_path, tokens):
    from mlx_lm import utils

    model, folder = zoo_model("qwen2", VOCAB, int(rng.integers(2**31))), tmp_path / "zoo"
    write_zoo_folder(folder, "qwen2", model, word_tokenizer_json(VOCAB))
    rules = (QuantizationRule(bits, "affine", "group", 32) for bits in (4, 8))
    prepare_qat(model, *rules)
    assert "bias" in model.layers[0].self_attn.q_proj
    trained = trained_logits(model, tokens)
    packed, config = pack_qat(model, zoo_config("qwen2", VOCAB))
    assert_close(packed(tokens), trained, 2e-3)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), flat(packed), {"format": "mlx"})
    stock, _ = utils.load_model(folder)
    assert type(stock.layers[0].mlp.up_proj) is nn.QuantizedLinear
    assert_close(stock(tokens), trained, 1e-3)
    assert_close(afm_mlx.load(folder)[0](tokens), trained, 2e-3)


def test_each_layer_its_own_rule(rng, tokens):
    """Mixed bits by a predicate; what is left out stays float."""
    own = QuantizationRule(8, "affine", "row")

    def predicate(path, module):
        if path.endswith("down_proj"):
            return own
        if "layers.0." in path:
            return {"bits": 4, "mode": "balanced", "group_size": 16}
        return "layers.1.self_attn" not in path

    model = tiny_model(rng, num_layers=3, kv_bits=None)
    prepare_qat(model, QuantizationRule(2), predicate=predicate)
    left = [p for p, m in model.named_modules() if type(m) is nn.Linear]
    assert left
    assert all("layers.1.self_attn" in path for path in left)
    trained = trained_logits(model, tokens)
    packed, values = pack_qat(model, model.args.to_dict())
    assert_close(packed(tokens), trained, 2e-3)
    downs = {p: m for p, m in packed.named_modules() if p.endswith("down_proj")}
    for path, module in downs.items():
        assert (module.bits, module.mode, module.granularity) == (8, "affine", "row")
        assert values["quantization"][path] == own.to_dict()


@pytest.mark.parametrize(("kv_bits", "most"), [(8, 0.1), (None, 1e-4)])
def test_training_and_evaluating_forwards_agree(rng, tokens, kv_bits, most):
    model = tiny_model(rng, kv_bits=kv_bits)
    prepare_qat(model, QuantizationRule(2, "balanced", "tensor"))
    with dispatch.force("reference"):
        wanted = np.array(model(tokens))
    errors = np.abs(np.array(model.train()(tokens)) - wanted) / wanted.std()
    assert np.median(errors) <= 1e-4
    assert errors.max() <= most


def test_the_head_and_the_lookup_see_one_matrix(rng):
    embedding = nn.Embedding(VOCAB, 32)
    layer, x = QATEmbedding(embedding, QuantizationRule(4)), draw(rng, (3, 32))
    matrix = layer.fake_quantized()
    assert mx.array_equal(layer(mx.arange(VOCAB)), matrix)
    assert_close(layer.as_linear(x), x @ matrix.T, 1e-5)
    assert not mx.array_equal(matrix, embedding.weight)


def test_gradients_of_the_factors_are_scaled_unless_told_otherwise():
    layer, rule = nn.Linear(32, 8), QuantizationRule(4)
    assert QATLinear(layer, rule).gradient_scale == lsq_gradient_scale((8, 32), rule)
    assert QATLinear(layer, rule, gradient_scaling=False).gradient_scale == 1


@pytest.mark.parametrize("learned", [True, False])
def test_int8_scales_train_when_asked(rng, learned, tokens):
    model = tiny_model(rng, num_layers=3)
    prepare_qat(model, QuantizationRule(4), learn_kv_scales=learned)
    scales = {name for name in flat(model) if "quant_" in name}
    assert len(scales) == 4
    trainable = {name for name, _ in tree_flatten(model.trainable_parameters())}
    assert trainable == set(flat(model)) - (set() if learned else scales)
    assert "model.layers.0.mlp.up_proj.clip" in trainable
    trained_logits(model, tokens)


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
