"""Options of a request: what is allowed, and the JSON that they make."""

import pytest

from afm_mlx import fm
from tests.tools.cases import each


def test_options_become_json_with_numbers():
    sampling = fm.SamplingMode.random(top=5, seed=3)
    options = fm.GenerationOptions(sampling, 0.5, 7)
    assert options.to_dict() == {
        "sampling": {"mode": "random", "top_k": 5, "seed": 3},
        "temperature": 0.5,
        "maximum_response_tokens": 7,
    }
    assert fm.SamplingMode.random(top=1).top == 1
    threshold = fm.SamplingMode.random(probability_threshold=1)
    assert fm.GenerationOptions(threshold).to_dict() == {"sampling": {"mode": "random", "top_p": 1}}
    assert fm.SamplingMode("greedy") == fm.SamplingMode.greedy()
    assert fm.GenerationOptions().to_dict() == {}
    assert fm.SamplingMode.greedy().mode_type == "greedy"


RANDOM = fm.SamplingMode.random


@each(
    "make, options, message",
    [
        (fm.GenerationOptions, {"temperature": "hot"}, "'temperature' must be a number"),
        (fm.GenerationOptions, {"temperature": float("nan")}, "'temperature' must be a number"),
        (fm.GenerationOptions, {"temperature": 10**400}, "'temperature' must be a number"),
        (fm.GenerationOptions, {"temperature": True}, "'temperature' must be a number"),
        (fm.GenerationOptions, {"temperature": -0.1}, "'temperature' must be non-negative"),
        (fm.GenerationOptions, {"maximum_response_tokens": 1.5}, "_tokens' must be an integer"),
        (fm.GenerationOptions, {"maximum_response_tokens": 0}, "_tokens' must be positive"),
        (fm.GenerationOptions, {"sampling": "greedy"}, "'sampling' must be a SamplingMode instance"),
        (RANDOM, {"top": 1, "probability_threshold": 0.5}, "both 'top' and 'probability_threshold'"),
        (RANDOM, {"top": 0}, "'top' must be a positive integer"),
        (RANDOM, {"top": 1.0}, "'top' must be a positive integer"),
        (RANDOM, {"probability_threshold": 1.1}, "'probability_threshold' must be between 0.0 and 1.0"),
        (RANDOM, {"probability_threshold": "1"}, "'probability_threshold' must be between 0.0 and 1.0"),
        (RANDOM, {"probability_threshold": 10**400}, "must be between 0.0 and 1.0"),
        (RANDOM, {"seed": 1.5}, "'seed' must be an integer"),
    ],
)  # fmt: skip
def test_other_values_are_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
