"""Samplers and logits processors against mlx-lm's."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils as theirs

import afm_mlx
from afm_mlx import make_logits_processors, make_sampler
from afm_mlx.errors import RequestError
from tests.tools.cases import each


def draw_logprobs(rng, vocab_size, rows=1):
    logits = rng.normal(0, rng.choice([0.3, 2, 6]), (rows, vocab_size)).astype(np.float32)
    return mx.array(logits) - mx.logsumexp(mx.array(logits), axis=-1, keepdims=True)


def draw_arguments(rng, vocab_size):
    """Arguments of a sampler, each in effect in half of the cases."""
    return {
        "temp": float(rng.uniform(0.1, 3)),
        "top_p": float(rng.choice([0, 1, rng.uniform(0.05, 0.99)])),
        "min_p": float(rng.choice([0, rng.uniform(0.001, 0.5)])),
        "min_tokens_to_keep": int(rng.integers(1, vocab_size)),
        "top_k": int(rng.choice([0, rng.integers(1, vocab_size)])),
        "xtc_probability": float(rng.choice([0, 1])),
        "xtc_threshold": float(rng.choice([0.5, 0.1, 0.5 / vocab_size])),
        "xtc_special_tokens": rng.choice(vocab_size, 2, replace=False).tolist(),
    }


def probabilities(sampler, logprobs):
    logits, tokens = sampler.candidates(logprobs)
    found = mx.softmax(logits, axis=-1)
    if tokens is not None:
        found = mx.put_along_axis(mx.zeros_like(logprobs), tokens, found, axis=-1)
    return np.array(found)


@pytest.mark.parametrize("vocab_size", [2, 7, 500, 9000])
def test_the_distribution_is_mlx_lms(rng, monkeypatch, vocab_size):
    monkeypatch.setattr(theirs, "categorical_sampling", lambda x, temp: mx.softmax(x / temp, -1))
    for child in rng.spawn(15):
        logprobs = draw_logprobs(child, vocab_size, rows=2)
        arguments = draw_arguments(child, vocab_size)
        found = probabilities(make_sampler(**arguments), logprobs)
        wanted = np.array(theirs.make_sampler(**arguments)(logprobs))
        # Of tokens that are equally likely, either may be the last of the k.
        np.testing.assert_allclose(
            np.sort(found), np.sort(wanted), atol=2e-5, err_msg=str(arguments)
        )
        both = (found > 0) & (wanted > 0)
        np.testing.assert_allclose(found[both], wanted[both], atol=2e-5, err_msg=str(arguments))


def test_draws_are_mlx_lms_where_no_token_is_left_out_of_the_draw(rng):
    """The same stream gives the same tokens, so that a seed of theirs means the same here."""
    for child in rng.spawn(20):
        arguments = draw_arguments(child, 500) | {"top_k": 0, "xtc_probability": 0.5}
        x, seed = draw_logprobs(child, 500, rows=3), int(child.integers(2**32))
        drawn = []
        for make in (make_sampler, theirs.make_sampler):
            mx.random.seed(seed)
            drawn.append(make(**arguments)(x).tolist())
        assert drawn[0] == drawn[1], arguments


def test_top_k_draws_its_tokens_as_often_as_their_probabilities_say(rng):
    x = mx.broadcast_to(draw_logprobs(rng, 50), (20000, 50))
    sampler = make_sampler(temp=1.3, top_k=4, top_p=0.95)
    counts = np.bincount(np.array(sampler(x)), minlength=50) / 20000
    np.testing.assert_allclose(counts, probabilities(sampler, x[:1])[0], atol=0.02)


def test_temperature_0_is_the_most_likely_token(rng):
    x = draw_logprobs(rng, 500, rows=3)
    wanted = mx.argmax(x, axis=-1).tolist()
    assert make_sampler(top_k=3, min_p=0.5)(x).tolist() == wanted
    assert make_sampler(temp=1e-300)(x).tolist() == wanted


def test_extremes_keep_their_meaning(rng):
    x = draw_logprobs(rng, 30)
    best = mx.argmax(x).item()
    for arguments in ({"top_p": 1e-300}, {"top_k": 1}, {"min_p": 1.0}):
        assert make_sampler(temp=1e30, **arguments)(x).item() == best
    everything = make_sampler(1.0, min_p=1e-300, min_tokens_to_keep=10**30, top_k=10**30)
    np.testing.assert_allclose(
        probabilities(everything, x), np.array(mx.softmax(x, axis=-1)), atol=1e-6
    )
    one = mx.array([[-mx.inf, 0.0, -mx.inf]])
    assert make_sampler(1e30, 0.9, 0.1, 3, 2)(one).item() == 1


@each(
    ("name", "value"),
    [
        ("temp", -1),
        ("temp", float("nan")),
        ("temp", float("inf")),
        ("temp", 10**400),
        ("temp", "1"),
        ("top_p", 1.5),
        ("min_p", -0.1),
        ("min_tokens_to_keep", 0),
        ("top_k", -1),
        ("top_k", 2.0),
        ("xtc_probability", 2),
        ("xtc_threshold", 0.6),
        ("xtc_special_tokens", [-1]),
        ("xtc_special_tokens", ["a" * 5000]),
    ],
)
def test_arguments_that_are_refused(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        make_sampler(**{"temp": 1.0, name: value})
    assert len(str(caught.value)) < 400


def test_a_special_token_beyond_the_vocabulary():
    """MLX would write beyond its array."""
    sampler = make_sampler(1.0, xtc_probability=1.0, xtc_special_tokens=[3, 30])
    with pytest.raises(RequestError, match="from 0 to 29"):
        sampler(mx.zeros((1, 30)))


def test_a_seed_draws_the_same_when_products_are_rounded_otherwise(rng):
    """The last bits of a log-probability change the order of the most likely tokens, and not what is drawn."""
    logits = np.repeat(rng.standard_normal((1, 64)), 4, axis=1)  # four of each
    noise = 1e-6 * rng.standard_normal(logits.shape)
    sampler = make_sampler(
        temp=1.0, top_k=16
    )  # four times four, as long as the noise is smaller than steps
    for seed in range(50):
        drawn = []
        for values in (logits, logits + noise):
            mx.random.seed(seed)
            drawn.append(sampler(mx.array(values.astype(np.float32))).item())
        assert drawn[0] == drawn[1]


# -- logits processors


def test_logits_are_mlx_lms(rng):
    for child in rng.spawn(25):
        vocab_size = int(child.choice([5, 100, 9000]))
        logits = child.normal(0, 3, (1, vocab_size)).astype(np.float32)
        tokens = mx.array(child.integers(0, min(vocab_size, 30), int(child.integers(1, 60))))
        biased = child.choice(vocab_size, 3, replace=False).tolist()
        arguments = {"logit_bias": dict(zip(biased, [2.5, -100, -float("inf")], strict=True))}
        for name, lowest in (("repetition", 0.5), ("presence", -2), ("frequency", -2)):
            arguments[f"{name}_penalty"] = float(child.uniform(lowest, 2))
            arguments[f"{name}_context_size"] = int(child.integers(0, 70))
        found, wanted = mx.array(logits), mx.array(logits)
        chains = (library.make_logits_processors(**arguments) for library in (afm_mlx, theirs))
        for one, other in zip(*chains, strict=True):
            before = np.array(found)
            changed = one(tokens, found)
            assert np.array_equal(np.array(found), before)  # what was given stays
            found, wanted = changed, other(tokens, wanted)
            np.testing.assert_allclose(np.array(found), np.array(wanted), rtol=1e-6)


def test_what_asks_for_nothing():
    assert make_logits_processors() == []
    assert make_logits_processors({}, 0, 20, 0, 20, 0.0) == []
    (processor,) = make_logits_processors(presence_penalty=1.0)
    assert processor(mx.array([], dtype=mx.int32), mx.ones((1, 3))).tolist() == [[1, 1, 1]]


@each("name", ["repetition", "presence", "frequency"])
def test_a_context_size_of_none_is_all_tokens(name):
    arguments = {f"{name}_penalty": 2.0, f"{name}_context_size": None}
    (processor,) = make_logits_processors(**arguments)
    weakened = processor(mx.array([0, *[1] * 50]), mx.ones((1, 3))).tolist()[0]
    assert weakened[0] < 1 == weakened[2]


@each(
    "arguments",
    [
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: float("inf")}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: 10**400}},
        {"repetition_penalty": -0.5},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 10**400},
        {"presence_penalty": "1"},
        {"frequency_penalty": 1.0, "frequency_context_size": -1},
        {"repetition_penalty": 1.0, "repetition_context_size": 2.5},
    ],
)
def test_penalties_that_are_refused(arguments):
    with pytest.raises(RequestError, match=list(arguments)[-1]) as caught:
        make_logits_processors(**arguments)
    assert len(str(caught.value)) < 600


def test_a_biased_token_beyond_the_vocabulary():
    """MLX would write beyond its array."""
    (processor,) = make_logits_processors({3: 1.0, 30: 1.0})
    with pytest.raises(RequestError, match="from 0 to 29"):
        processor(mx.array([1]), mx.zeros((1, 30)))
