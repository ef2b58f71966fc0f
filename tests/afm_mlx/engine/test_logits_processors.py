"""`make_logits_processors` against mlx-lm's: the same logits."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils as theirs

import afm_mlx
from afm_mlx import make_logits_processors
from afm_mlx.errors import RequestError
from tests.tools.cases import each


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
def test_arguments_that_are_refused(arguments):
    with pytest.raises(RequestError, match=list(arguments)[-1]) as caught:
        make_logits_processors(**arguments)
    assert len(str(caught.value)) < 600


def test_a_biased_token_beyond_the_vocabulary():
    """MLX would write beyond its array."""
    (processor,) = make_logits_processors({3: 1.0, 30: 1.0})
    with pytest.raises(RequestError, match="from 0 to 29"):
        processor(mx.array([1]), mx.zeros((1, 30)))
