"""Requests that are refused, and text that may be the start of a stop string."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.engine.request import PromptLogprobs, Request
from afm_mlx.engine.row import StopStrings
from afm_mlx.errors import RequestError
from afm_mlx.guidance.constraint import Constraint
from tests.tools.cases import each


@each(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [5, 64]}, "ids from 5 to 64"),
        ({"prompt": [-1]}, "ids from -1"),
        ({"max_tokens": 0, "constraint": Constraint.text()}, "max_tokens is 0, and a constraint"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"prompt_logprobs": PromptLogprobs(0)}, "starts at 0; the prompt has 1 tokens"),
        ({"prompt_logprobs": PromptLogprobs(2)}, "starts at 2"),
        ({"prompt_logprobs": PromptLogprobs(1.0)}, "starts at 1.0"),
        ({"prompt_logprobs": PromptLogprobs(1, -1)}, "has top -1"),
        ({"prompt_logprobs": PromptLogprobs(1, 1001)}, "has top 1001"),
        (
            {"prompt_logprobs": PromptLogprobs(1, 0, (3, 64))},
            "has 64 among the other tokens; .* 0 to 63",
        ),
        ({"prompt_logprobs": PromptLogprobs(1, 0, ("a",))}, "has 'a' among the other tokens"),
        ({"prompt_logprobs": PromptLogprobs(), "heal": True}, "heal removes"),
        ({"max_tokens": float("nan")}, "max_tokens is nan"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"stop": "word"}, "stop is 'word'"),
        ({"stop": [""]}, "stop is"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"client": None}, "client is None"),
        ({"prompt": "text"}, "prompt is 'text'"),
        ({"prompt": b"text"}, "prompt is b'text'"),
        ({"prompt": None}, "prompt is None"),
        ({"prompt": [[1, 2]]}, r"prompt has \[1, 2\]"),
        ({"prompt": [1, 2.0]}, "prompt has 2.0"),
        ({"prompt": [1, None]}, "prompt has None"),
        ({"prompt": [1, True]}, "prompt has True"),
        ({"prompt": [1, "2"]}, "prompt has '2'"),
        ({"prompt": np.ones((1, 3), np.int32)}, r"array of int32 and shape \(1, 3\)"),
        ({"prompt": mx.ones((3,))}, r"array of mlx.core.float32 and shape \(3,\)"),
        ({"prompt": np.array([True])}, "array of bool"),
        ({"prompt": mx.array(3)}, r"shape \(\)"),
        ({"max_tokens": "3"}, "max_tokens is '3'"),
        ({"seed": "3"}, "seed is '3'"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": [5]}, r"stop is \[5\]"),
        ({"sampler": 5}, "sampler is 5"),
        ({"logits_processors": [5]}, r"logits_processors is \[5\]"),
        ({"logits_processors": 5}, "logits_processors is 5"),
        ({"on_prefill": "print"}, "on_prefill is 'print'"),
        ({"logprobs": np.ones(3)}, "logprobs is array"),
        ({"draft": []}, r"draft is \[\]"),
        ({"constraint": "[a-z]"}, "Constraint.json_schema"),
        ({"at_limit": "stop"}, "at_limit is 'stop'; allowed are error, complete"),
    ],
)
def test_what_no_model_could_do_is_refused(fields, message):
    Request([63], seed=2**64 - 1).checked(vocab_size=64)
    Request([63], 0, prompt_logprobs=PromptLogprobs(1, 1000)).checked(vocab_size=64)
    with pytest.raises(RequestError, match=message):
        Request(**{"prompt": [1], **fields}).checked(vocab_size=64)


def test_stop_strings_hold_back_only_what_may_become_one(rng):
    for _ in range(300):
        text, *stops = ("".join(rng.choice(["a", "b"], size)) for size in rng.integers(1, 13, 3))
        machine, shown, stopped = StopStrings([stop[:3] for stop in stops]), "", False
        for letter in text:
            if not stopped:
                part, stopped = machine.feed(letter)
                shown += part
        ends = [text.find(stop[:3]) + len(stop[:3]) for stop in stops if stop[:3] in text]
        assert stopped == bool(ends)
        if stopped:
            # The first one to be completed ends the text.
            assert any(shown + stop[:3] == text[: min(ends)] for stop in stops)
        else:
            assert shown + machine.flush() == text


def test_integers_of_numpy_and_mlx_are_the_integers_that_they_stand_for():
    for ids in (
        [3, 60],
        (3, 60),
        np.array([3, 60], np.uint16),
        mx.array([3, 60]),
        [*np.array([3, 60])],
    ):
        request = Request(ids, np.int64(5), seed=np.uint64(7)).checked(64)
        values = [*request.prompt, request.max_tokens, request.seed]
        assert values == [3, 60, 5, 7]
        assert {type(value) for value in values} == {int}


def test_long_stop_strings_cost_a_look_at_each_character(rng):
    """As a text that begins like them again and again: a search of each from the start takes minutes."""
    stops = ["a" * 20_000 + "b", "a" * 30_000 + "c"]
    machine = StopStrings(stops)
    assert machine.feed("a" * 50_000)[0] == "a" * 20_000
    shown, stopped = "", False
    for letter in "a" * 2_000 + "b":
        part, stopped = machine.feed(letter)
        shown += part
    assert stopped
    assert len(shown) == 12_000
