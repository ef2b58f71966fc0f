"""Traced decode steps against the same steps run operation by operation."""

import copy
import pickle
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import dispatch, replay
from afm_mlx.kernels.cpu import extension
from afm_mlx.model import decode_step
from afm_mlx.model.kv_cache import STEP, TAIL
from afm_mlx.quantization.packed_layers import set_activation_bits
from tests.tools.adapters import ragged_cache
from tests.tools.engines import tiny


@pytest.fixture
def model(rng):
    return tiny(rng, "2-bit", kv_bits=8)


@pytest.fixture
def untraced():
    """Runs a function operation by operation."""

    def run(function):
        with mock.patch.object(replay, "is_available", return_value=False):
            result = function()
        mx.eval(result)
        return result

    return run


def prefilled(model, rng, *lengths):
    return ragged_cache(model, [rng.integers(0, 64, length) for length in lengths], "int8")


def steps(model, cache, count, token=5):
    rows = len(cache[0].lengths)
    return [model(mx.full((rows, 1), token + i, dtype=mx.int32), cache) for i in range(count)]


@pytest.mark.parametrize("lengths", [[STEP - 2], [STEP - 2] * 3, [3, STEP - 2, 1]])
def test_steps_equal_those_without_a_trace(rng, model, untraced, lengths):
    cache = prefilled(model, rng, *lengths)
    twin = [layer.copy() for layer in cache]
    wanted = untraced(lambda: steps(model, twin, 5))
    got = steps(model, cache, 5)
    assert model._step.replays, "the step was traced"
    for a, b in zip(got, wanted, strict=True):
        assert mx.array_equal(a, b)
    assert cache[0].lengths == twin[0].lengths == [length + 5 for length in lengths]
    assert mx.array_equal(cache[0].in_use(), twin[0].in_use())


def test_too_many_traces_make_room_for_a_new_one(rng, model, monkeypatch):
    monkeypatch.setattr(decode_step, "MAX_TRACES", 2)
    for rows, kept in ((1, 1), (2, 2), (1, 2), (3, 1), (1, 2)):
        steps(model, prefilled(model, rng, *[3] * rows), 1)
        assert len(model._step.keys) == kept, rows


def test_greedy_takes_the_largest_logit(rng, model):
    cache = prefilled(model, rng, 6, 6)
    twin = [layer.copy() for layer in cache]
    token = mx.array([[3], [3]])
    logits = model(token, twin)[:, -1]
    assert model.greedy(token, cache)[0].tolist() == mx.argmax(logits, axis=-1).tolist()


def test_a_copy_of_a_cache_is_not_written_to(rng, model):
    cache = prefilled(model, rng, 6)
    kept = [layer.copy() for layer in cache]
    before = np.array(kept[0].in_use())
    mx.eval(steps(model, cache, 3))
    assert np.array_equal(np.array(kept[0].in_use()), before)


def test_new_weights_are_seen(rng, model):
    cache = prefilled(model, rng, 4)
    twin = [layer.copy() for layer in cache]
    (before,) = steps(model, cache, 1)
    model.model.output_norm.weight = 2 * model.model.output_norm.weight
    (after,) = steps(model, twin, 1)
    assert mx.allclose(after, 2 * before, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(extension.module() is None, reason="only native kernels have two precisions")
def test_other_kernels_and_other_precisions_are_seen(rng, model):
    cache = prefilled(model, rng, 4)
    twins = [[layer.copy() for layer in cache] for _ in range(2)]
    (native,) = steps(model, cache, 1)
    with dispatch.force("reference"):
        (reference,) = steps(model, twins[0], 1)
    set_activation_bits(model, 8)
    (coarse,) = steps(model, twins[1], 1)
    errors = [float(mx.abs(x - reference).max()) for x in (native, coarse)]
    assert 0 < errors[0] < errors[1]


def test_copied_and_pickled_models_run(rng, model):
    cache = prefilled(model, rng, 4)
    twins = [[layer.copy() for layer in cache] for _ in range(2)]
    (wanted,) = steps(model, cache, 1)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for again, twin in zip(copies, twins, strict=True):
        assert mx.array_equal(steps(again, twin, 1)[0], wanted)


def test_float_models_are_traced_too(rng, untraced):
    model = tiny(rng, kv_bits=8)
    cache = prefilled(model, rng, 3)
    twin = [layer.copy() for layer in cache]
    got = steps(model, cache, 3)
    assert model._step.replays
    for a, b in zip(got, untraced(lambda: steps(model, twin, 3)), strict=True):
        assert mx.array_equal(a, b)


def test_several_tokens_of_ragged_rows_equal_one_after_the_other(rng):
    """What speculation checks: the logits behind each token, and rows that keep different numbers of them.

    A number on the boundary of two int8 codes may be rounded either way: that moves a row's logits by 0.03.
    """
    for kind, kv_bits in (("2-bit", 8), ("float", 8), ("float", None)):
        model, storage = tiny(rng, kind, kv_bits), "int8" if kv_bits else "float"
        allowed, errors = 0.15 if kv_bits else 2e-2, []
        fed = [rng.integers(0, 64, length) for length in (3, TAIL - 3, 1)]
        cache = ragged_cache(model, fed, storage)
        for count in (1, 3, 8, 2, 8, 5, 8, 8):  # past the end of a tail
            inputs, kept = rng.integers(0, 64, (3, count)), rng.integers(1, count + 1, 3)
            twin = ragged_cache(model, fed, storage)
            heads = [layer.copy() for layer in cache]
            logits = model.verify(mx.array(inputs), cache)
            for at in range(count):
                wanted = model(mx.array(inputs[:, at : at + 1]), twin)[:, 0]
                errors.append(np.abs(np.array(logits[:, at]) - np.array(wanted)).max(axis=-1))
                assert errors[-1].max() < allowed, (kind, kv_bits, count, at)
            tokens, max_logits = model.verify_greedy(mx.array(inputs), heads)
            np.testing.assert_allclose(max_logits, mx.max(logits, -1), rtol=1e-3, atol=1e-3)
            chosen = mx.take_along_axis(logits, tokens[..., None].astype(mx.int32), -1)[..., 0]
            np.testing.assert_allclose(chosen, max_logits, rtol=1e-3, atol=1e-3)
            for layer in cache:
                layer.trim_rows((count - kept).tolist())
            pairs = zip(fed, inputs, kept, strict=True)
            fed = [np.concatenate([tokens, row[:n]]) for tokens, row, n in pairs]
            assert cache[0].lengths == list(map(len, fed))
        assert np.median(errors) < 1e-3, "a row in two has no such key or value"
