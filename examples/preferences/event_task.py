"""Events in wordings that the embedded model has never seen, as a seeded generator; and a reward for answers.

    python event_task.py 3    # print prompts of each way to write, a line of JSON each

The model is asked for five fields of an event as JSON. The reward needs no right answer: it looks whether the
values occur in the sentence and have the form of their fields. It can't tell two names apart that stand in
each other's field, so it is a judge who errs now and then.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))

from values import DAYS, MONTHS, Values

WAYS = {
    "chat": (
        "{person} says we do the {title} {day} {time}, {place}.",
        "{title}?? {day} {time}, {place}, ask {person}.",
        "ok so {place} {day} then, {time} sharp, {person} brings the {title}.",
    ),
    "notice": (
        "Location {place}; hour {time}; date {day}; host {person}; subject {title}.",
        "{place}, {time}, {day}: {title}. Speaker: {person}.",
        "{day}. {time}. {person} ({place}) - {title}.",
    ),
    "story": (
        "You will find {person} in {place} when the {title} begins, {day} {time}.",
        "The {title} was moved: {place} is where {person} waits, {day}, not before {time}.",
        "By {time} on {day} everyone had left {place}, where {person} held the {title}.",
    ),
}
_KINDS = {"title": "event", "person": "name", "time": "time", "place": "venue"}
FIELDS = ("title", "person", "day", "time", "place")
_ASK = "Extract title, person, day, time, place as JSON."
_SYSTEM = "A conversation between a user and a helpful assistant."


def prompts(way: str, split: str, seed: int) -> Iterator[dict[str, Any]]:
    """Yield prompts with their right answers; values of the split "test" occur in no other."""
    rng = random.Random(f"{way} {split} {seed}")
    values = Values(rng, split)
    while True:
        slots = {field: values.draw(kind) for field, kind in _KINDS.items()}
        slots["day"] = rng.choice(DAYS) if rng.random() < 0.5 else values.draw("date")
        text = rng.choice(WAYS[way]).format(**slots)
        user = {"role": "user", "content": f"{_ASK}\n{text}"}
        messages = [{"role": "system", "content": _SYSTEM}, user]
        answer = json.dumps({field: slots[field] for field in FIELDS})
        yield {"task": way, "messages": messages, "answer": answer}


def grounded(prompt: str, answer: str, sample: Mapping[str, Any]) -> float:
    """Return the share of fields whose value is in the prompt, in the field's form, and in no other field."""
    try:
        event = json.loads(answer)
        values = {field: str(event[field]) for field in FIELDS}
    except (ValueError, KeyError, TypeError):
        return 0.0
    text = prompt.partition("\n")[2]
    return sum(_fits(field, values, text) for field in FIELDS) / len(FIELDS)


def _fits(field: str, values: Mapping[str, str], text: str) -> bool:
    value = values[field]
    others = [other for name, other in values.items() if name != field]
    if not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) or any(value in o for o in others):
        return False
    is_time = re.fullmatch(r"\d{1,2}(:\d\d)?( [ap]m)?", value) is not None
    is_day = value in DAYS or not {*MONTHS}.isdisjoint(value.split())
    return is_time if field == "time" else is_day if field == "day" else not (is_time or is_day)


if __name__ == "__main__":
    for way in WAYS:
        drawn = prompts(way, "train", 0)
        for _ in range(int(sys.argv[1])):
            print(json.dumps(next(drawn)))
