"""LoRA layers against the formula in NumPy."""

import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import AdapterConfig, load_adapter
from afm_mlx.adapters.formats.pair_order import pair_targets
from afm_mlx.adapters.lora import (
    LoRALinear,
    add_lora,
    lora_config,
    lora_layers,
    lora_tensors,
    start_lora,
)
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, model_fingerprint
from afm_mlx.errors import CheckpointError, RequestError
from afm_mlx.quantization.quantize_model import pack_layer
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import KINDS, drawn_like, some_tokens
from tests.tools.cases import each
from tests.tools.compare import assert_close, assert_same, assert_within, exact, same

# -- one layer


def bases(rng, inputs, outputs):
    linear = nn.Linear(inputs, outputs, bias=bool(rng.integers(2)))
    linear.weight = mx.array(rng.normal(size=(outputs, inputs)).astype(np.float32))
    yield linear
    yield nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4)
    yield pack_layer(linear, QuantizationRule(2), "x").eval()


def test_a_layer_computes_the_formula(rng):
    for base, sections in itertools.product(bases(rng, 64, 72), (None, (40, 56, 72))):
        rank, scale = int(rng.integers(1, 9)), float(rng.uniform(0.1, 2))
        x = rng.normal(size=(2, 3, 64)).astype(np.float32)
        wanted = exact(base(mx.array(x)))
        layer = LoRALinear(base, rank, scale, sections=sections, key=mx.random.key(1)).eval()
        assert_same(exact(layer(mx.array(x))), wanted, "B is zero at the start")
        start = 0
        for a, b in layer.pairs:
            b[...] = drawn_like(b, rng)
            end = start + b.shape[1]
            wanted[..., start:end] += scale * x @ exact(a) @ exact(b)
            start = end
        assert start == 72
        assert_within(layer(mx.array(x)), wanted, 1e-4 * (1 + np.abs(wanted)))


def test_a_is_normal_with_variance_1_over_inputs(rng):
    keys = mx.random.split(mx.random.key(int(rng.integers(2**31))), 2)
    a, other = (LoRALinear(nn.Linear(400, 8), 100, 1.0, key=key).lora_a for key in keys)
    assert not same(a, other)
    # 40,000 numbers: five standard errors of mean and deviation.
    assert abs(mx.mean(a).item()) < 5 * 400**-0.5 / 200
    assert mx.std(a).item() == pytest.approx(400**-0.5, rel=5 / (2 * 40_000) ** 0.5)


def test_dropout_is_for_training_only(rng):
    linear = nn.Linear(64, 8, bias=False)
    layer = LoRALinear(linear, 4, 1.0, dropout=0.5)
    layer.lora_b = drawn_like(layer.lora_b, rng)
    x = mx.ones((200, 64))
    layer.train()
    dropped = (layer(x) - linear(x)).astype(mx.float32)
    assert len({tuple(row) for row in np.array(dropped).round(4).tolist()}) > 100
    layer.eval()
    assert_within(layer(x), mx.repeat(layer(x)[:1], 200, axis=0), 1e-6)


# -- a model


@pytest.mark.parametrize("kind", KINDS)
def test_only_lora_is_trainable_and_named_as_in_files(make_model, kind):
    model, tokens = make_model(kind), mx.array([[1, 2, 3]])
    before, logits = base_model_fingerprint(model), model(tokens)
    assert before == model_fingerprint(model.args, dict(tree_flatten(model.parameters())))
    add_lora(model, 3, 0.5)
    wanted = [place.shapes(3) for place in pair_targets(model.args)]
    tensors = lora_tensors(model)
    assert {n: t.shape for n, t in tensors.items()} == {n: s for p in wanted for n, s in p.items()}
    assert set(dict(tree_flatten(model.trainable_parameters()))) == set(tensors)
    assert base_model_fingerprint(model) == before
    assert_close(model.eval()(tokens), logits, least=1)


def test_layers_can_be_chosen(make_model):
    model = add_lora(make_model("float"), 2, 1.0, keys=["mlp.up_proj", "self_attn.q_proj"])
    reusing = [f"model.kv_reuse_layers.{i}.{name}" for i in range(2)
               for name in ("mlp.up_proj", "self_attn.q_proj")]  # fmt: skip
    writing = ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert sorted(lora_layers(model)) == [*reusing, *writing]
    last = add_lora(make_model("float"), 2, 1.0, num_layers=3)
    assert len(lora_layers(last)) == 3 * 5
    assert not any(name.startswith("model.layers.0.") for name in lora_layers(last))


@each(
    ("settings", "says"),
    [
        ({"rank": 0}, "rank of LoRA is 0; it must be 1 or more"),
        ({"dropout": 1.0}, r"dropout of LoRA is 1\.0"),
        ({"dropout": -0.5}, r"dropout of LoRA is -0\.5"),
        ({"num_layers": 5}, "num_layers of LoRA is 5; it must be 1 to 4, or -1"),
        ({"num_layers": 0}, "num_layers of LoRA is 0"),
        ({"keys": []}, r"the last 4 blocks have none of the keys \[\]"),
        ({"keys": ["self_attn.qkv_proj"], "num_layers": 2}, "the last 2 blocks have none of the keys"),
        ({"keys": ["mlp.gate"]}, r"No block has a linear layer mlp\.gate .*; there are mlp\.down_proj, mlp"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_honoured(make_model, settings, says):
    with pytest.raises(RequestError, match=says):
        add_lora(make_model("float"), **{"rank": 4, "scale": 1.0, **settings})


@pytest.mark.parametrize(("kv_bits", "kind"), [(8, "packed"), (None, "float")])
def test_gradients_reach_every_pair(rng, make_model, kind, kv_bits):
    """Through packed layers and int8 keys, too; the gradients of A wait for a B that is not zero."""
    model = add_lora(make_model(kind, kv_bits), 2, 1.0).train()
    tokens = some_tokens(rng)

    def loss(model):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    first, gradient = step(model)
    gradients = dict(tree_flatten(gradient))
    assert set(gradients) == set(lora_tensors(model))
    assert all((mx.abs(g).max().item() > 0) == (".lora_b" in n) for n, g in gradients.items())
    stepped = {n: p - 0.05 * gradients[n] for n, p in lora_tensors(model).items()}
    model.load_weights(list(stepped.items()), strict=False)
    second, gradient = step(model)
    assert all(mx.abs(g).max().item() > 0 for _, g in tree_flatten(gradient))
    assert second.item() < first.item()


# -- folders


def test_folders_hold_what_layers_start_from(rng, make_model, write_adapter):
    model, bare = make_model(), make_model()
    folder = write_adapter(model, rank=4, scale=0.5, dropout=0.1)
    tensors, config = load_adapter(folder)
    keys = ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")
    keys += ("self_attn.out_proj", "self_attn.q_proj", "self_attn.qkv_proj")
    assert config == AdapterConfig(4, 0.5, 4, keys, 0.1, base_model_fingerprint(bare))
    tokens = some_tokens(rng)
    again = add_lora(make_model(), 4, 0.5)
    start_lora(again, tensors, config, folder)
    assert_same(again.eval()(tokens), model.eval()(tokens))
    for options, words in (
        ({"rank": 4, "scale": 1.0}, r"scale 0\.5, and the LoRA layers have \[1\.0\]"),
        ({"rank": 2, "scale": 0.5}, r"lora_a is \[128, 4\] there and \[128, 2\] here"),
        (
            {"rank": 4, "scale": 0.5, "keys": ["mlp.up_proj"]},
            r"is \[128, 4\] there and none here \(40 tensors differ",
        ),
    ):
        with pytest.raises(CheckpointError, match=words):
            start_lora(add_lora(make_model(), **options), tensors, config, folder)
    with pytest.raises(RequestError, match="has no LoRA layers"):
        lora_config(bare)
