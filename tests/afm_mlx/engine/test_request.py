"""What is asked for, and text that may turn out to be the start of a stop string."""

import pytest

from afm_mlx.engine.request import Request
from afm_mlx.engine.row import StopStrings
from afm_mlx.errors import RequestError
from tests.tools.cases import each


@each(
    ("fields", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"prompt": [5, 64]}, "ids from 5 to 64"),
        ({"prompt": [-1]}, "ids from -1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": float("nan")}, "max_tokens is nan"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": -2}, "max_tokens is -2"),
        ({"stop": "word"}, "stop is 'word'"),
        ({"stop": [""]}, "stop is"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"client": None}, "client is None"),
    ],
)
def test_what_no_model_could_do_is_refused(fields, message):
    Request([63], seed=2**64 - 1).validate(vocab_size=64)
    with pytest.raises(RequestError, match=message):
        Request(**{"prompt": [1], **fields}).validate(vocab_size=64)


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
