"""LoRA layers against the formula in NumPy, and attached adapters against LoRA layers."""

import copy
import dataclasses
import functools
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.attach import (
    adapter_arrays,
    adapter_fingerprint,
    attach_adapter,
    detach_adapter,
)
from afm_mlx.adapters.files import load_adapter, save_adapter
from afm_mlx.adapters.lora import (
    LoRALinear,
    add_lora,
    load_lora,
    lora_config,
    lora_layers,
    lora_tensors,
    places,
    save_lora,
)
from afm_mlx.config import PRESETS
from afm_mlx.converters import convert
from afm_mlx.errors import CacheFileError, CheckpointError, RequestError
from afm_mlx.fingerprint import base_model_fingerprint, model_fingerprint
from afm_mlx.kernels import dispatch
from afm_mlx.loading import load
from afm_mlx.model import Model
from afm_mlx.packed import PackedLinear
from afm_mlx.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.quantization import QuantizationRule, pack_layer, quantize_model
from tests.tools.models import random_config, random_model
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

SIZES = {
    "vocab_size": 64,
    "hidden_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 4,
    "num_kv_reuse_layers": 2,
    "hidden_dim_scale_factor": 2.0,
}
KINDS = ["float", "packed"]


@pytest.fixture
def make_model(rng):
    """A function that makes the same model again, float or packed.

    Without int8 keys and values, unless asked for: on a rounding boundary, two right sums may fall to either
    side.
    """
    config, seed = random_config(rng, **SIZES), int(rng.integers(2**31))

    @functools.cache
    def original(kind, kv_bits):
        model = random_model(
            dataclasses.replace(config, kv_bits=kv_bits), np.random.default_rng(seed)
        )
        if kind == "packed":
            quantize_model(model, {}, QuantizationRule(2), QuantizationRule(4))
        return model.eval()

    def make(kind="packed", kv_bits=None):
        return copy.deepcopy(original(kind, kv_bits))

    return make


@pytest.fixture
def write_adapter(rng, tmp_path):
    """A function that writes a folder for a model, whose every B is random."""

    def write(model, name="adapter", rank=4, scale=None, **options):
        scale = float(rng.uniform(0.2, 0.8)) if scale is None else scale
        add_lora(model, rank, scale, seed=int(rng.integers(2**31)), **options)
        randomize_b(model, rng)
        save_lora(model, tmp_path / name)
        return tmp_path / name

    return write


def randomize_b(model, rng):
    tensors = lora_tensors(model)
    drawn = {n: drawn_like(t, rng) for n, t in tensors.items() if ".lora_b" in n}
    model.load_weights(list(drawn.items()), strict=False)


def drawn_like(array, rng):
    return mx.array(rng.normal(0, 0.5 * array.shape[0] ** -0.5, array.shape).astype(np.float32))


def some_tokens(rng, rows=2, length=9):
    return mx.array(rng.integers(0, SIZES["vocab_size"], (rows, length)))


def close(a, b, tolerance=2e-4):
    return float(mx.abs(a - b).max()) <= tolerance * max(1.0, float(mx.abs(b).max()))


# -- one layer


def bases(rng, inputs, outputs):
    linear = nn.Linear(inputs, outputs, bias=bool(rng.integers(2)))
    linear.weight = mx.array(rng.normal(size=(outputs, inputs)).astype(np.float32))
    yield linear
    yield nn.QuantizedLinear.from_linear(linear, group_size=32, bits=4)
    yield pack_layer(linear, QuantizationRule(2), "x").eval()


@pytest.mark.parametrize("sections", [None, (40, 56, 72)])
def test_a_layer_computes_the_formula(rng, sections):
    rank, scale = int(rng.integers(1, 9)), float(rng.uniform(0.1, 2))
    for base in bases(rng, 64, 72):
        x = rng.normal(size=(2, 3, 64)).astype(np.float32)
        wanted = np.array(base(mx.array(x)), np.float64)
        layer = LoRALinear(base, rank, scale, sections=sections, key=mx.random.key(1)).eval()
        assert np.array_equal(np.array(layer(mx.array(x))), wanted), "B is zero at the start"
        start = 0
        for a, b in layer.pairs:
            b[...] = drawn_like(b, rng)
            end = start + b.shape[1]
            wanted[..., start:end] += scale * x @ np.array(a, np.float64) @ np.array(b, np.float64)
            start = end
        assert start == 72
        assert np.allclose(np.array(layer(mx.array(x))), wanted, rtol=1e-4, atol=1e-4)


def test_a_is_normal_with_variance_1_over_inputs(rng):
    layer = LoRALinear(nn.Linear(400, 8), 100, 1.0, key=mx.random.key(int(rng.integers(2**31))))
    a = np.array(layer.lora_a)
    # 40,000 numbers: five standard errors of mean and deviation.
    assert abs(a.mean()) < 5 * 400**-0.5 / 200
    assert a.std() == pytest.approx(400**-0.5, rel=5 / (2 * 40_000) ** 0.5)
    again = LoRALinear(nn.Linear(400, 8), 100, 1.0, key=mx.random.key(int(rng.integers(2**31))))
    assert not mx.array_equal(again.lora_a, layer.lora_a)


def test_dropout_is_for_training_only(rng):
    linear = nn.Linear(64, 8, bias=False)
    layer = LoRALinear(linear, 4, 1.0, dropout=0.5)
    layer.lora_b = drawn_like(layer.lora_b, rng)
    x = mx.ones((200, 64))
    layer.train()
    dropped = (layer(x) - linear(x)).astype(mx.float32)
    assert len({tuple(row) for row in np.array(dropped).round(4).tolist()}) > 100
    layer.eval()
    assert mx.allclose(layer(x), layer(x)[:1], atol=1e-6)


# -- a model


@pytest.mark.parametrize("kind", KINDS)
def test_only_lora_is_trainable_and_named_as_in_files(make_model, kind):
    model = make_model(kind)
    before = base_model_fingerprint(model)
    assert before == model_fingerprint(model.args, dict(tree_flatten(model.parameters())))
    tokens = mx.array([[1, 2, 3]])
    logits = model(tokens)
    add_lora(model, 3, 0.5)
    trainable = dict(tree_flatten(model.trainable_parameters()))
    tensors = lora_tensors(model)
    assert set(trainable) == set(tensors)
    expected = {
        f"{stack}.{index}.{layer}.lora_{side}{part}"
        for stack, own in (("layers", "qkv"), ("kv_reuse_layers", "q"))
        for index in range(2)
        for layer in (f"self_attn.{own}_proj", "self_attn.out_proj", "mlp.gate_proj", "mlp.up_proj",
                      "mlp.down_proj")
        for side in "ab"
        for part in ((".0", ".1", ".2") if "qkv" in layer else ("",))
    }  # fmt: skip
    assert set(tensors) == {f"model.{name}" for name in expected}
    widths = [tensors[f"model.layers.0.self_attn.qkv_proj.lora_b.{i}"].shape[1] for i in range(3)]
    assert widths == [64, 32, 32]
    assert base_model_fingerprint(model) == before
    assert close(model.eval()(tokens), logits)


def test_the_3b_has_tamm_s_number_of_adapter_parameters():
    shapes = [shape for p in places(Model(PRESETS["afm-3b"])) for shape in p.shapes.values()]
    assert len(shapes) == 350
    assert sum(32 * (inputs + outputs) for inputs, outputs in shapes) == 66_633_728


def test_layers_can_be_chosen(make_model):
    model = add_lora(make_model("float"), 2, 1.0, keys=["mlp.up_proj", "self_attn.q_proj"])
    assert sorted(lora_layers(model)) == [
        "model.kv_reuse_layers.0.mlp.up_proj", "model.kv_reuse_layers.0.self_attn.q_proj",
        "model.kv_reuse_layers.1.mlp.up_proj", "model.kv_reuse_layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj",
    ]  # fmt: skip
    last = add_lora(make_model("float"), 2, 1.0, num_layers=3)
    assert len(lora_layers(last)) == 3 * 5
    assert {name.split(".self_attn")[0].split(".mlp")[0] for name in lora_layers(last)} == {
        "model.layers.1",
        "model.kv_reuse_layers.0",
        "model.kv_reuse_layers.1",
    }


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 0}, "rank of LoRA is 0; it must be 1 or more"),
        ({"dropout": 1.0}, r"dropout of LoRA is 1\.0"),
        ({"num_layers": 9}, "num_layers of LoRA is 9; it must be 1 to 4, or -1"),
        ({"keys": []}, r"the last 4 blocks have none of the keys \[\]"),
        ({"keys": ["self_attn.qkv_proj"], "num_layers": 2}, "the last 2 blocks have none of the keys"),
        ({"keys": ["mlp.gate"]}, r"no layer mlp\.gate in a block; linear layers are mlp\.down_proj, mlp"),
    ],
)  # fmt: skip
def test_settings_that_can_not_be_honoured(make_model, settings, says):
    with pytest.raises(RequestError, match=says):
        add_lora(make_model("float"), **{"rank": 4, "scale": 1.0, **settings})


def test_one_adapter_at_a_time(make_model, write_adapter):
    folder = write_adapter(make_model())
    for model in (add_lora(make_model(), 4, 1.0), attach_adapter(make_model(), folder)):
        with pytest.raises(RequestError, match="has an adapter already"):
            add_lora(model, 4, 1.0)
    with pytest.raises(RequestError, match="has no LoRA layers"):
        lora_config(make_model())


@pytest.mark.parametrize("kv_bits", [8, None])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_reach_every_pair(rng, make_model, kind, kv_bits):
    """Through packed layers and int8 keys, too; those of A wait for a B that is not zero."""
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


def test_folders_hold_what_mlx_lm_and_this_package_need(make_model, write_adapter):
    model = make_model()
    folder = write_adapter(model, rank=5, scale=0.5, dropout=0.1)
    tensors, config = load_adapter(folder)
    assert {n: t.shape for n, t in tensors.items()} == {
        n: t.shape for n, t in lora_tensors(model).items()
    }
    assert dataclasses.asdict(config) == {
        "rank": 5,
        "scale": 0.5,
        "num_layers": 4,
        "keys": (
            "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj",
            "self_attn.out_proj", "self_attn.q_proj", "self_attn.qkv_proj",
        ),
        "dropout": 0.1,
        "base_model_fingerprint": base_model_fingerprint(make_model()),
    }  # fmt: skip


def test_layers_can_start_from_a_folder(rng, make_model, write_adapter):
    model = make_model()
    folder = write_adapter(model, rank=4, scale=0.5)
    again = add_lora(make_model(), 4, 0.5)
    load_lora(again, folder)
    tokens = some_tokens(rng)
    assert mx.array_equal(again.eval()(tokens), model.eval()(tokens))
    with pytest.raises(CheckpointError, match=r"scale 0\.5, and the LoRA layers have \[1\.0\]"):
        load_lora(add_lora(make_model(), 4, 1.0), folder)
    with pytest.raises(CheckpointError, match=r"lora_a is \[128, 4\] there and \[128, 2\] here"):
        load_lora(add_lora(make_model(), 2, 0.5), folder)
    with pytest.raises(CheckpointError, match=r"is \[128, 4\] there and none here"):
        load_lora(add_lora(make_model(), 4, 0.5, keys=["mlp.up_proj"]), folder)


def test_detaching_leaves_parameters_as_trainable_as_they_were(make_model, write_adapter):
    folder, model = write_adapter(make_model("float")), make_model("float")
    model.layers[0].mlp.freeze()
    before = dict(tree_flatten(model.trainable_parameters())).keys()
    detach_adapter(attach_adapter(model, folder))
    assert dict(tree_flatten(model.trainable_parameters())).keys() == before


def test_attaching_draws_no_random_numbers(make_model, write_adapter):
    folder, model = write_adapter(make_model("float")), make_model("float")
    before = mx.random.state[0].tolist()
    attach_adapter(model, folder)
    assert mx.random.state[0].tolist() == before


def test_an_adapter_of_another_model_is_refused(make_model, write_adapter):
    folder = write_adapter(make_model("packed"))
    prints = [base_model_fingerprint(make_model(kind)) for kind in ("packed", "float")]
    with pytest.raises(
        CheckpointError, match=f"fingerprint {prints[0]}, and this one has {prints[1]}"
    ):
        attach_adapter(make_model("float"), folder)
    forced = attach_adapter(make_model("float"), folder, force=True)
    assert adapter_arrays(forced)
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    del values["base_model_fingerprint"]  # as mlx-lm writes it
    path.write_text(json.dumps(values))
    assert adapter_arrays(attach_adapter(make_model("float"), folder))


def test_tensors_that_do_not_fit(rng, make_model, write_adapter, tmp_path):
    tensors, config = load_adapter(write_adapter(make_model(), rank=2))
    config = dataclasses.replace(config, base_model_fingerprint=None)
    layer = "model.layers.1.mlp.up_proj"
    elsewhere = {n.replace("layers.1", "layers.7"): t for n, t in tensors.items()}
    save_adapter(tmp_path / "a", elsewhere, config)
    with pytest.raises(CheckpointError, match=r"no layer for model\.\S*layers\.7\.\S+ \(\d+ such"):
        attach_adapter(make_model(), tmp_path / "a")
    save_adapter(tmp_path / "b", tensors | {f"{layer}.lora_a": mx.zeros((60, 2))}, config)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj is \[60, rank\].*needs \[64, rank\]"):
        attach_adapter(make_model(), tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"does not fit a matrix \[128, 64\]"):
        up = make_model().layers[0].mlp.up_proj
        up.attach(mx.zeros((1, 2, 9)), mx.zeros((1, 128, 2)), (128,))


# -- attached adapters


def steps(model, cache, tokens):
    return mx.concatenate([model(token[:, None], cache) for token in tokens.T], axis=1)


def ragged_cache(model, prompts, kv):
    caches = []
    for prompt in prompts:
        caches.append(model.make_cache(kv))
        model.prefill(mx.array(prompt[None]), caches[-1])
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_attached_adapters_compute_what_lora_layers_compute(
    rng, make_model, write_adapter, kind, kv
):
    """A prompt, and decode steps of rows of unequal length."""
    kv_bits, tolerance = (8, 0.05) if kv == "int8" else (None, 2e-4)
    layers, bare = make_model(kind, kv_bits), make_model(kind, kv_bits)
    attached = attach_adapter(make_model(kind, kv_bits), write_adapter(layers))
    layers.eval()
    tokens = some_tokens(rng, rows=3)
    plain = bare(tokens)
    assert close(attached(tokens), layers(tokens), tolerance)
    assert not close(attached(tokens), plain, 0.15)
    prompts = [rng.integers(0, 64, n) for n in (3, 11, 6)]
    answers = [steps(m, ragged_cache(m, prompts, kv), tokens) for m in (attached, layers)]
    assert close(*answers, tolerance)
    assert close(detach_adapter(attached)(tokens), plain, 0)
    if kind == "packed":
        assert not lora_layers(attached)


def test_a_layer_or_a_section_may_be_left_out(rng, make_model, write_adapter, tmp_path):
    layers = make_model()
    tensors, config = load_adapter(write_adapter(layers))
    gone = ("model.layers.0.self_attn.qkv_proj.lora_{}.1", "model.layers.1.mlp.up_proj.lora_{}")
    cleared = {
        n: t * 0 if n in {name.format("b") for name in gone} else t
        for n, t in lora_tensors(layers).items()
    }
    layers.load_weights(list(cleared.items()), strict=False)
    kept = {n: t for n, t in tensors.items() if n not in {g.format(s) for g in gone for s in "ab"}}
    assert len(tensors) - len(kept) == 4
    save_adapter(tmp_path / "less", kept, config)
    attached = attach_adapter(make_model(), tmp_path / "less")
    # Gate has an adapter and up has none, so one kernel for both can't take them.
    assert attached.model.layers[1].mlp.gate_proj.low_rank(1) is not None
    assert attached.model.layers[1].mlp.up_proj.low_rank(1) is None
    tokens = some_tokens(rng)
    assert close(attached(tokens), layers.eval()(tokens))


def test_swapping_needs_no_new_trace_and_leaves_nothing_behind(rng, make_model, write_adapter):
    folders = [write_adapter(make_model(kv_bits=8), name) for name in ("a", "b")]
    partly = write_adapter(make_model(kv_bits=8), "c", keys=["mlp.up_proj"])
    model, traced = make_model(kv_bits=8), []

    def counted(*args, **options):
        traced.append(1)
        return Model.forward(model, *args, **options)

    tokens = some_tokens(rng, rows=1, length=3)
    cache = ragged_cache(model, [rng.integers(0, 64, 5)], "int8")
    object.__setattr__(model, "forward", counted)

    def answer(model):
        return steps(model, [layer.copy() for layer in cache], tokens)

    plain = answer(model)
    assert len(traced) == 1
    answers = [answer(attach_adapter(model, folder)) for folder in folders]
    assert len(traced) == 2, "the second adapter ran in the first one's trace"
    answers.append(answer(attach_adapter(model, partly)))
    assert len(traced) == 3
    assert mx.array_equal(answer(detach_adapter(model)), plain)
    assert len(traced) == 3
    wanted = [
        answer(attach_adapter(make_model(kv_bits=8), folder)) for folder in (*folders, partly)
    ]
    for got, expected in zip(answers, wanted, strict=True):
        assert mx.array_equal(got, expected)
    assert not any(close(a, b, 0.01) for a, b in zip(answers, [*answers[1:], plain], strict=True))


def test_training_after_running_takes_no_old_trace(rng, make_model):
    """LoRA layers are not traced on a CPU, where that would need a compiler."""
    model = make_model(kv_bits=8)
    cache = ragged_cache(model, [rng.integers(0, 64, 5)], "int8")
    twin = [layer.copy() for layer in cache]
    token = mx.array([[3]])
    before = model(token, cache)
    assert model._step.applies(model, cache[:2])
    add_lora(model, 2, 1.0)
    randomize_b(model, rng)
    model.eval()
    assert model._step.applies(model, twin[:2]) == (dispatch.device() == "gpu")
    assert not close(model(token, twin), before, 0.01)


def test_caches_of_another_adapter_are_refused(make_model, write_adapter, tmp_path):
    folders = [write_adapter(make_model(), name) for name in ("a", "b")]
    model = make_model()
    assert adapter_fingerprint(model) is None
    prints = set()
    for index, folder in enumerate([*folders, None]):
        attach_adapter(model, folder) if folder else detach_adapter(model)
        prints.add(adapter_fingerprint(model))
        cache = model.make_cache()
        model.prefill(mx.array([[1, 2, 3]]), cache)
        save_prompt_cache(tmp_path / f"{index}.safetensors", cache, model)
    assert len(prints) == 3
    attach_adapter(model, folders[1])
    load_prompt_cache(tmp_path / "1.safetensors", model)
    for index in (0, 2):
        with pytest.raises(CacheFileError, match="made with another adapter: its fingerprint is"):
            load_prompt_cache(tmp_path / f"{index}.safetensors", model)


def test_prompt_caches_know_lora_layers_from_their_base(make_model, tmp_path):
    model, path = make_model(), tmp_path / "c.safetensors"
    cache = model.make_cache()
    model.prefill(mx.array([[1, 2, 3]]), cache)
    save_prompt_cache(path, cache, model)
    with pytest.raises(CacheFileError, match="another adapter"):
        load_prompt_cache(path, add_lora(model, 2, 1.0))


# -- models of mlx-lm's zoo


@pytest.mark.parametrize("kind", ["float", "quantized", "packed"])
def test_models_of_the_zoo(rng, tmp_path, kind):
    seed = int(rng.integers(2**31))

    def make():
        model = zoo_model("llama", 64, seed)
        if kind == "quantized":
            nn.quantize(model, group_size=32, bits=4)
        elif kind == "packed":
            quantize_model(model, {}, QuantizationRule(2), QuantizationRule(4))
        return model.eval()

    model, tokens = make(), some_tokens(rng)
    plain = model(tokens)
    add_lora(model, 3, 0.7)
    assert len(lora_layers(model)) == 2 * 7
    assert close(model.eval()(tokens), plain)
    randomize_b(model, rng)
    save_lora(model, tmp_path)
    assert load_adapter(tmp_path)[1].base_model_fingerprint is None
    attached = attach_adapter(make(), tmp_path)
    assert close(attached(tokens), model(tokens))
    assert not close(attached(tokens), plain, 0.01)
    assert isinstance(attached.layers[0].mlp.up_proj, PackedLinear) == (kind == "packed")
    if kind != "packed":
        from mlx_lm.tuner.utils import load_adapters

        assert close(load_adapters(make(), str(tmp_path)).eval()(tokens), model(tokens))


def test_folders_of_the_zoo_in_our_formats_load_with_an_adapter(rng, tmp_path):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(64))
    packed = convert(tmp_path / "float", tmp_path / "packed", quantize=True, q_mode="balanced")
    layers, tokens = load(packed)[0], some_tokens(rng)
    plain = layers(tokens)
    add_lora(layers, 3, 0.7)
    randomize_b(layers, rng)
    save_lora(layers, tmp_path / "adapter")
    attached, _ = load(packed, adapter_path=str(tmp_path / "adapter"))
    assert close(attached(tokens), layers.eval()(tokens))
    assert not close(attached(tokens), plain, 0.01)
