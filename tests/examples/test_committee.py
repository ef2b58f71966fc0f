"""The committee of `examples/preferences`: its prompts and its reward."""

import json
from itertools import islice

import pytest

from tests.tools.cli import ROOT


@pytest.fixture
def event_task(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples/preferences")
    import event_task as module

    return module


def test_the_reward_of_right_and_wrong_answers(event_task):
    for way in event_task.WAYS:
        for example in islice(event_task.prompts(way, "test", 0), 100):
            text, right = example["messages"][-1]["content"], json.loads(example["answer"])

            def reward(text=text, right=right, **changes):
                return event_task.grounded(text, json.dumps(right | changes), {})

            assert reward() == 1
            assert reward(place="Room Nowhere") == pytest.approx(0.8)
            assert reward(person=right["title"]) <= 0.6
            assert reward(time=right["day"], day=right["time"]) == pytest.approx(0.6)
            assert event_task.grounded(text, example["answer"][:-1], {}) == 0
            assert event_task.grounded(text, "{}", {}) == 0


def test_values_of_the_splits_differ(event_task):
    drawn = {
        split: {
            json.loads(each["answer"])["title"]
            for each in islice(event_task.prompts("chat", split, 0), 99)
        }
        for split in ("train", "test")
    }
    assert not drawn["train"] & drawn["test"]
