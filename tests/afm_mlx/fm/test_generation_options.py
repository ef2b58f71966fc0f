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


@each(
    "options, message",
    [
        ({"temperature": "hot"}, "'temperature' must be a number"),
        ({"temperature": float("nan")}, "'temperature' must be a number"),
        ({"temperature": 10**400}, "'temperature' must be a number"),
        ({"temperature": True}, "'temperature' must be a number"),
        ({"temperature": -0.1}, "'temperature' must be non-negative"),
        ({"maximum_response_tokens": 1.5}, "'maximum_response_tokens' must be an integer"),
        ({"maximum_response_tokens": 0}, "'maximum_response_tokens' must be positive"),
        ({"sampling": "greedy"}, "'sampling' must be a SamplingMode instance"),
    ],
)
def test_options_of_other_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fm.GenerationOptions(**options)


@each(
    "options, message",
    [
        ({"top": 1, "probability_threshold": 0.5}, "both 'top' and 'probability_threshold'"),
        ({"top": 0}, "'top' must be a positive integer"),
        ({"top": 1.0}, "'top' must be a positive integer"),
        ({"probability_threshold": 1.1}, "'probability_threshold' must be between 0.0 and 1.0"),
        ({"probability_threshold": "1"}, "'probability_threshold' must be between 0.0 and 1.0"),
        ({"probability_threshold": 10**400}, "'probability_threshold' must be between 0.0 and 1.0"),
        ({"seed": 1.5}, "'seed' must be an integer"),
    ],
)
def test_sampling_modes_of_other_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        fm.SamplingMode.random(**options)
    with pytest.raises(ValueError, match=message):
        fm.SamplingMode(fm.SamplingModeType.RANDOM, **options)
