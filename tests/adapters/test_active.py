"""Rows of one batch with adapters of their own, against the same rows one by one."""

import gc

import mlx.core as mx
import mlx.nn as nn
import pytest

from afm_mlx.adapters.active import BatchAdapters, active_adapters, bind, unbind
from afm_mlx.adapters.layer_places import place_shapes
from afm_mlx.adapters.lora import add_lora
from afm_mlx.adapters.resident import build_resident
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS
from afm_mlx.model import decode_step
from afm_mlx.model.model import Model
from tests.tools.adapters import KINDS, draw_tensors, ragged_cache, some_tokens, steps
from tests.tools.compare import assert_close, assert_same, error, same


def draw_adapter(model, rng, rank, keys=""):
    """A random resident adapter; on the layers whose path contains `keys` only."""
    tensors = draw_tensors(model, rng, rank, keys)
    return build_resident(tensors, float(rng.uniform(0.3, 1)), place_shapes(model), "drawn")


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


@pytest.fixture
def decode(rng, make_model):
    """A function that decodes with the adapters of rows; it has the `model`, and a list of all `traced`."""
    model, traced = make_model(kv_bits=8), []
    active, tokens = bind(model), some_tokens(rng, rows=2, length=3)
    cache = ragged_cache(model, [rng.integers(0, 64, n) for n in (3, 5)], "int8")

    def counted(*args, **options):
        traced.append(1)
        return Model.forward(model, *args, **options)

    object.__setattr__(model, "forward", counted)

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
        pytest.raises(RequestError, match="are those of 10 rows, and the batch has 2"),
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
