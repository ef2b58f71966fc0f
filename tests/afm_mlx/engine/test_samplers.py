"""`make_sampler` against mlx-lm's: the same tokens left with the same probabilities, and the same draws."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils as theirs

from afm_mlx import make_sampler
from afm_mlx.errors import RequestError
from tests.tools.cases import each


def draw_logprobs(rng, vocab_size, rows=1):
    logits = rng.normal(0, rng.choice([0.3, 2, 6]), (rows, vocab_size)).astype(np.float32)
    return mx.array(logits) - mx.logsumexp(mx.array(logits), axis=-1, keepdims=True)


def draw_arguments(rng, vocab_size):
    """Those of a sampler, each at work in half of the cases."""
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
        np.testing.assert_allclose(found, wanted, atol=2e-5, err_msg=str(arguments))


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
    """Where float32 or the vocabulary ends."""
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
