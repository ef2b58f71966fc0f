"""Attached adapters against LoRA layers."""

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.attach import (
    adapter_arrays,
    adapter_fingerprint,
    attach_adapter,
    detach_adapter,
)
from afm_mlx.adapters.lora import add_lora, lora_layers, lora_tensors, save_lora
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, base_parameters
from afm_mlx.converters.convert import convert
from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.errors import CacheFileError, CheckpointError
from afm_mlx.kernels import dispatch
from afm_mlx.loading.load import load
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import KINDS, ragged_cache, randomize_lora, some_tokens, steps
from tests.tools.compare import assert_close, assert_same, error
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def test_attaching_and_detaching_leave_parameters_as_they_were(make_model, write_adapter):
    folder, model = write_adapter(make_model("float")), make_model("float")
    model.layers[0].mlp.freeze()
    before = dict(tree_flatten(model.trainable_parameters())).keys()
    parameters = dict(tree_flatten(model.parameters()))
    attach_adapter(model, folder)
    in_folder = base_parameters(model)
    detach_adapter(model)
    assert dict(tree_flatten(model.trainable_parameters())).keys() == before
    for found in (in_folder, dict(tree_flatten(model.parameters()))):
        assert {n: id(a) for n, a in found.items()} == {n: id(a) for n, a in parameters.items()}


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


# -- attached adapters


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_attached_adapters_compute_what_lora_layers_compute(
    rng, make_model, write_adapter, kind, kv
):
    """A prompt, and decode steps of rows of unequal length."""
    kv_bits, tolerance = (8, 0.05) if kv == "int8" else (None, 1e-3)
    layers, bare = make_model(kind, kv_bits), make_model(kind, kv_bits)
    attached = attach_adapter(make_model(kind, kv_bits), write_adapter(layers))
    layers.eval()
    tokens = some_tokens(rng, rows=3)
    plain = bare(tokens)
    assert_close(attached(tokens), layers(tokens), tolerance, least=1)
    assert error(attached(tokens), plain) > 0.15
    prompts = [rng.integers(0, 64, n) for n in (3, 11, 6)]
    answers = [steps(m, ragged_cache(m, prompts, kv), tokens) for m in (attached, layers)]
    assert_close(*answers, tolerance, least=1)
    assert_same(detach_adapter(attached)(tokens), plain)
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
    # Gate has an adapter and up has none, and one kernel does both.
    assert attached.model.layers[1].mlp.gate_proj.low_rank(1) is not None
    assert attached.model.layers[1].mlp.up_proj.low_rank(1) is None
    tokens = some_tokens(rng)
    assert_close(attached(tokens), layers.eval()(tokens), least=1)


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
    assert_same(answer(detach_adapter(model)), plain)
    assert len(traced) == 3
    wanted = [
        answer(attach_adapter(make_model(kv_bits=8), folder)) for folder in (*folders, partly)
    ]
    for got, expected in zip(answers, wanted, strict=True):
        assert_same(got, expected)
    assert all(error(a, b) > 1e-3 for a, b in zip(answers, [*answers[1:], plain], strict=True))


def test_training_after_running_takes_no_old_trace(rng, make_model):
    """LoRA layers are not traced on a CPU, where that would need a compiler."""
    model = make_model(kv_bits=8)
    cache = ragged_cache(model, [rng.integers(0, 64, 5)], "int8")
    twin = [layer.copy() for layer in cache]
    token = mx.array([[3]])
    before = model(token, cache)
    assert model._step.applies(model, cache[:2])
    add_lora(model, 2, 1.0)
    randomize_lora(model, rng)
    model.eval()
    assert model._step.applies(model, twin[:2]) == (dispatch.device() == "gpu")
    assert error(model(token, twin), before) > 0.01


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
    assert_close(model.eval()(tokens), plain, least=1)
    randomize_lora(model, rng)
    save_lora(model, tmp_path)
    assert load_adapter(tmp_path)[1].base_model_fingerprint is None
    attached = attach_adapter(make(), tmp_path)
    assert_close(attached(tokens), model(tokens), least=1)
    assert error(attached(tokens), plain) > 0.01
    assert isinstance(attached.layers[0].mlp.up_proj, PackedLinear) == (kind == "packed")
    if kind != "packed":
        from mlx_lm.tuner.utils import load_adapters

        theirs = load_adapters(make(), str(tmp_path)).eval()
        assert_close(theirs(tokens), model(tokens), least=1)


def test_folders_of_the_zoo_in_our_formats_load_with_an_adapter(rng, tmp_path):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(64))
    packed = convert(tmp_path / "float", tmp_path / "packed", quantize=True, q_mode="balanced")
    layers, tokens = load(packed)[0], some_tokens(rng)
    plain = layers(tokens)
    add_lora(layers, 3, 0.7)
    randomize_lora(layers, rng)
    save_lora(layers, tmp_path / "adapter")
    attached, _ = load(packed, adapter_path=str(tmp_path / "adapter"))
    assert_close(attached(tokens), layers.eval()(tokens), least=1)
    assert error(attached(tokens), plain) > 0.01
