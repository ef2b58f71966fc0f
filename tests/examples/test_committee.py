"""The committee of `examples/preferences`: its prompts and its reward."""

import json
from itertools import islice

import pytest

from tests.tools.cli import ROOT


@pytest.fixture
def events(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/preferences")
    import events

    return events


def test_the_reward_of_right_and_wrong_answers(events):
    for way in events.WAYS:
        for example in islice(events.prompts(way, "test", 0), 100):
            text, right = example["messages"][-1]["content"], json.loads(example["answer"])

            def reward(text=text, right=right, **changes):
                return events.grounded(text, json.dumps(right | changes), {})

            assert reward() == 1
            assert reward(place="Room Nowhere") == pytest.approx(0.8)
            assert reward(person=right["title"]) <= 0.6
            assert reward(time=right["day"], day=right["time"]) == pytest.approx(0.6)
            assert events.grounded(text, example["answer"][:-1], {}) == 0
            assert events.grounded(text, "{}", {}) == 0


def test_values_of_the_splits_differ(events):
    drawn = {
        split: {
            json.loads(each["answer"])["title"]
            for each in islice(events.prompts("chat", split, 0), 99)
        }
        for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]
