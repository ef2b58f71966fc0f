"""Rows of one batch with adapters of their own, against the same rows one by one."""

import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.active import (
    BatchAdapters,
    active_adapters,
    adapter_arrays,
    adapter_fingerprint,
    attach_adapter,
    bind,
    detach_adapter,
    hand_over,
    serving_copy,
    unbind,
)
from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.lora import add_lora, lora_layers, lora_tensors, save_lora
from afm_mlx.adapters.resident import build_resident
from afm_mlx.adapters.target_modules import target_shapes
from afm_mlx.checkpoint.fingerprint import base_parameters
from afm_mlx.converters.convert import convert
from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.errors import CacheFileError, RequestError
from afm_mlx.kernels import MAX_ADAPTERS
from afm_mlx.loading.load import load
from afm_mlx.model import decode_step
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import (
    KINDS,
    draw_tensors,
    ragged_cache,
    randomize_lora,
    some_tokens,
    steps,
)
from tests.tools.compare import assert_close, assert_same, error, same
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def draw_adapter(model, rng, rank, keys=""):
    """A random resident adapter; on the layers whose path contains `keys` only."""
    tensors = draw_tensors(model, rng, rank, keys)
    return build_resident(tensors, float(rng.uniform(0.3, 1)), target_shapes(model), "drawn")


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_is_its_rows_one_by_one(rng, make_model, kind, kv):
    """A prompt, and decode steps of rows of unequal length; no adapter, four ranks, and one of them twice."""
    # A value on the boundary of two int8 codes may fall to either side.
    kv_bits, tolerance = (8, 0.05) if kv == "int8" else (None, 1e-3)
    model = make_model(kind, kv_bits)
    rows, active = [None, *(draw_adapter(model, rng, rank) for rank in (8, 16, 3))], bind(model)
    rows += [draw_adapter(model, rng, 5, keys="up_proj"), rows[1]]
    rng.shuffle(rows)
    prompts = [rng.integers(0, 64, n) for n in rng.integers(2, 12, len(rows))]
    tokens = some_tokens(rng, rows=len(rows))
    single, caches = [], []
    for i, resident in enumerate(rows):
        with active.using(BatchAdapters.of([resident])):
            cache = ragged_cache(model, prompts[i : i + 1], kv)
            caches.append([layer.copy() for layer in cache])
            single.append((model(tokens[i : i + 1]), steps(model, cache, tokens[i : i + 1])))
    with active.using(BatchAdapters.of(rows)):
        merged = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
        whole = model(tokens), steps(model, merged, tokens)
    for mixed, alone in zip(whole, zip(*single, strict=True), strict=True):
        assert_close(mixed, mx.concatenate(alone), tolerance, least=1)
    plain = model(tokens)
    # One on a single kind of layer may change little: 0.13 was the least of 600.
    differs = [error(whole[0][i], plain[i]) > 0.02 for i in range(len(rows))]
    assert differs == [resident is not None for resident in rows]


def count_traces(model):
    traced = []

    def counted(*args, **options):
        traced.append(1)
        return Model.forward(model, *args, **options)

    object.__setattr__(model, "forward", counted)
    return traced


@pytest.fixture
def decode(rng, make_model):
    """A function that decodes with the adapters of rows; it has the `model`, and a list of all `traced`."""
    model = make_model(kv_bits=8)
    active, tokens, traced = bind(model), some_tokens(rng, rows=2, length=3), count_traces(model)
    cache = ragged_cache(model, [rng.integers(0, 64, n) for n in (3, 5)], "int8")

    def decode(rows):
        with active.using(BatchAdapters.of(rows)):
            return steps(model, [layer.copy() for layer in cache], tokens)

    decode.model, decode.traced = model, traced
    return decode


def test_equal_layouts_share_a_trace(rng, decode):
    first, second, wide = (draw_adapter(decode.model, rng, rank) for rank in (4, 4, 6))
    answers = {}
    for count, rows in (
        (1, [first, second]),
        (1, [second, first]),
        (2, [first, None]),
        (2, [None, second]),
        (3, [first, wide]),
        (3, [wide, second]),
        (4, [None, None]),
    ):
        answers[tuple(map(id, rows))] = decode(rows)
        assert len(decode.traced) == count
    for rows in ([first, second], [first, wide], [None, None]):
        assert_same(decode(rows), answers[tuple(map(id, rows))])
    assert len(decode.traced) == 4


def test_traces_of_many_layouts_make_room_for_new_ones(rng, decode, monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_TRACES", 3)
    residents = [draw_adapter(decode.model, rng, rank) for rank in (2, 3, 4, 5)]
    answers = {}
    for count, i in ((1, 0), (2, 1), (3, 2), (3, 0), (4, 3), (4, 3), (5, 0), (6, 1), (6, 0)):
        answer = decode([residents[i], None])
        assert len(decode.traced) == count
        assert same(answer, answers.setdefault(i, answer))


@pytest.mark.usefixtures("exact_memory")
def test_nothing_is_held_of_an_adapter_that_was_active(rng, decode):
    def taken():
        mx.eval(decode([draw_adapter(decode.model, rng, 4), None]))
        gc.collect()
        return mx.get_active_memory()

    before = taken()
    assert all(taken() <= before for _ in range(3))


def test_adapters_before_are_back_afterwards(rng, make_model):
    model = make_model()
    active, tokens = bind(model), some_tokens(rng)
    first, second = (draw_adapter(model, rng, 4) for _ in range(2))
    active.set(BatchAdapters.everywhere(first))
    wanted = model(tokens)
    with pytest.raises(ZeroDivisionError), active.using(BatchAdapters.of([second, None])):
        assert error(model(tokens), wanted) > 0.01
        raise ZeroDivisionError
    assert_same(model(tokens), wanted)
    assert bind(model) is active is active_adapters(model)
    unbind(model)
    assert active_adapters(model) is None
    assert error(model(tokens), wanted) > 0.01


def test_too_many_adapters_and_too_few_rows(rng, make_model):
    model = make_model()
    residents = [draw_adapter(model, rng, 1, "q_proj") for _ in range(MAX_ADAPTERS + 1)]
    with pytest.raises(RequestError, match="9 different adapters; at most 8 run side by side"):
        BatchAdapters.of(residents)
    everyone = BatchAdapters.of([*residents[:MAX_ADAPTERS], None, residents[0]])
    assert len(everyone.residents) == MAX_ADAPTERS
    with (
        pytest.raises(RequestError, match="given for 10 rows, and the batch has 2"),
        bind(model).using(everyone),
    ):
        model(some_tokens(rng, rows=2))


def test_a_model_without_linear_layers():
    class Bare(nn.Module):
        layers = ()

    with pytest.raises(RequestError, match="No block of this model"):
        bind(Bare())


def test_lora_layers_and_linked_layers_exclude_each_other(make_model):
    """Else the ones around would hide the adapters of the ones inside."""
    model = make_model()
    bind(model)
    with pytest.raises(RequestError, match="an adapter or a pool already"):
        add_lora(model, 2, 1.0)
    unbind(model)
    add_lora(model, 2, 1.0)
    with pytest.raises(RequestError, match="an adapter or a pool already"):
        add_lora(model, 2, 1.0)
    with pytest.raises(RequestError, match="has LoRA layers"):
        bind(model)


# -- Attached adapters against LoRA layers


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


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_attached_adapters_compute_what_lora_layers_compute(
    rng, make_model, write_adapter, kind, kv
):
    kv_bits, tolerance = (8, 0.05) if kv == "int8" else (None, 1e-3)
    attached, tokens = make_model(kind, kv_bits), some_tokens(rng, rows=3)
    plain = attached(tokens)
    prompts = [rng.integers(0, 64, n) for n in (3, 11, 6)]
    for keys in (None, ["mlp.up_proj", "self_attn.out_proj"]):
        layers = make_model(kind, kv_bits)
        attach_adapter(attached, write_adapter(layers, keys=keys))
        layers.eval()
        assert_close(attached(tokens), layers(tokens), tolerance, least=1)
        assert error(attached(tokens), plain) > 0.02
        answers = [steps(m, ragged_cache(m, prompts, kv), tokens) for m in (attached, layers)]
        assert_close(*answers, tolerance, least=1)
    assert_same(detach_adapter(attached)(tokens), plain)
    assert not lora_layers(attached)


def test_a_layer_or_a_section_may_be_left_out(rng, make_model, write_adapter, tmp_path):
    layers = make_model()
    tensors, config = load_adapter(write_adapter(layers))
    gone = ("model.layers.0.self_attn.qkv_proj.lora_{}.1", "model.layers.1.mlp.up_proj.lora_{}")
    zeros = {name.format("b"): 0 * tensors[name.format("b")] for name in gone}
    layers.load_weights(list((lora_tensors(layers) | zeros).items()), strict=False)
    kept = {n: t for n, t in tensors.items() if n not in {g.format(s) for g in gone for s in "ab"}}
    assert len(tensors) - len(kept) == 4
    save_adapter(tmp_path / "less", kept, config)
    attached = attach_adapter(make_model(), tmp_path / "less")
    # Gate has an adapter and up has none, and one kernel does both.
    assert attached.model.layers[1].mlp.gate_proj.operands(1)[1] is not None
    assert attached.model.layers[1].mlp.up_proj.operands(1)[1] is None
    tokens = some_tokens(rng)
    assert_close(attached(tokens), layers.eval()(tokens), least=1)


def test_training_after_running_takes_no_old_trace(rng, make_model):
    model = make_model(kv_bits=8)
    cache = ragged_cache(model, [rng.integers(0, 64, 5)], "int8")
    traced, token = count_traces(model), mx.array([[3]])
    before, again = (model(token, [layer.copy() for layer in cache]) for _ in range(2))
    assert_same(again, before)
    assert len(traced) == 1
    add_lora(model, 2, 1.0)
    randomize_lora(model, rng)
    model.eval()
    assert error(model(token, cache), before) > 0.01
    assert len(traced) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_serving_copy_runs_the_adapter_in_training(rng, make_model, kind):
    model = add_lora(make_model(kind), 3, 0.5)
    randomize_lora(model, rng)
    served, tokens = serving_copy(model), some_tokens(rng)
    assert not lora_layers(served)
    for _ in range(2):
        hand_over(model, served)
        assert_close(served(tokens), model(tokens), 1e-3)
        model.load_weights([(n, 2 * t) for n, t in lora_tensors(model).items()], strict=False)
        assert error(served(tokens), model(tokens)) > 1e-2


def test_caches_of_another_adapter_are_refused(make_model, write_adapter, tmp_path):
    model, prints = make_model(), []
    first, second = (write_adapter(make_model(), name) for name in ("first", "second"))
    for change in (
        lambda: model,
        lambda: attach_adapter(model, first),
        lambda: attach_adapter(model, second),
        lambda: add_lora(detach_adapter(model), 2, 1.0),
    ):
        prints.append(adapter_fingerprint(change()))
        assert bool(adapter_arrays(model)) == (prints[-1] is not None)
        cache, path = model.make_cache(), tmp_path / f"{len(prints)}.safetensors"
        model.prefill(mx.array([[1, 2, 3]]), cache)
        save_prompt_cache(path, cache, model)
        load_prompt_cache(path, model)
        for other in range(1, len(prints)):
            with pytest.raises(CacheFileError, match="made with another adapter"):
                load_prompt_cache(tmp_path / f"{other}.safetensors", model)
    assert len(set(prints)) == 4


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
    assert_same(detach_adapter(attached)(tokens), plain)
    if kind != "packed":
        from mlx_lm.tuner.utils import load_adapters

        theirs = load_adapters(make(), str(tmp_path)).eval()
        assert_close(theirs(tokens), model(tokens), least=1)


def test_folders_of_the_zoo_in_our_formats_load_with_an_adapter(rng, tmp_path):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "float", "llama", model, word_tokenizer_json(64))
    packed = convert(tmp_path / "float", tmp_path / "packed", quantize=True, q_mode="balanced")
    layers, tokens = add_lora(load(packed)[0], 3, 0.7), some_tokens(rng)
    randomize_lora(layers, rng)
    save_lora(layers, tmp_path / "adapter")
    attached, _ = load(packed, adapter_path=str(tmp_path / "adapter"))
    assert_close(attached(tokens), layers.eval()(tokens), least=1)
    assert error(attached(tokens), load(packed)[0](tokens)) > 0.01
