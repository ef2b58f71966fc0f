"""Snapshots of unfinished answers."""

import dataclasses
import datetime
import enum
import itertools
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, NewType, TypedDict

import msgspec
import pydantic
import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.types import answer_type
from tests.afm_mlx.guidance.test_types import Call, Meeting
from tests.tools.answer_types import random_type
from tests.tools.cases import each


class Color(enum.Enum):
    RED = "red"
    REDDISH = "reddish"


@dataclass
class Place:
    street: Annotated[str, msgspec.Meta(min_length=3)]
    number: int = 1


@dataclass
class Person:
    name: str | None
    age: float
    color: Color
    born: datetime.date
    homes: list[Place]
    friend: "Person | None" = None


def snapshots(kind, text):
    """The different snapshots of a text that grows by single characters."""
    answers = answer_type(kind)
    seen = []
    for end in range(len(text) + 1):
        now = answers.partial(text[:end])
        if not seen or now != seen[-1]:
            seen.append(now)
    return seen


def shown(snapshot):
    """A snapshot as dicts and lists, without what is missing."""
    if dataclasses.is_dataclass(snapshot):
        snapshot = {k: v for k, v in vars(snapshot).items() if v is not None}
    if isinstance(snapshot, dict):
        return {key: shown(value) for key, value in snapshot.items()}
    return [shown(item) for item in snapshot] if isinstance(snapshot, list) else snapshot


def test_what_is_complete_is_converted_and_strings_grow():
    homes = [{"street": "Elm", "number": 12}, {"street": "Ash", "number": 3}]
    person = {"name": "Zo\n", "age": -12.5, "color": "red", "born": "2024-01-12", "homes": homes}
    named = {"name": "Zo\n", "age": -12.5}
    colored = {**named, "color": Color.RED}
    born = {**colored, "born": datetime.date(2024, 1, 12)}
    at_home = [
        *([], [{}], *([{"street": "Elm"[:n]}] for n in range(4)), homes[:1]),
        *([homes[0], {}], *([homes[0], {"street": "Ash"[:n]}] for n in range(4)), homes),
    ]
    assert [shown(snapshot) for snapshot in snapshots(Person, json.dumps(person))] == [
        *(None, {}, *({"name": "Zo\n"[:n]} for n in range(4))),
        *(named, colored, born, *({**born, "homes": some} for some in at_home)),
    ]


def test_a_snapshot_is_an_instance_of_one_class_with_the_same_fields():
    answers = answer_type(Person)
    first, second = answers.partial("{"), answers.partial('{"name": "a", "friend": {"name": "b"}}')
    assert type(first) is type(second) is type(second.friend)
    assert repr(first).startswith("PartialPerson(name=None, age=None, color=None, ")
    assert second.friend.name == "b"
    assert second.friend.homes is None


def test_nothing_that_was_complete_changes_in_random_answers(rng):
    def grows(before, after):
        if isinstance(before, dict):
            return all(key in after and grows(value, after[key]) for key, value in before.items())
        if isinstance(before, list):
            return len(before) <= len(after) and all(map(grows, before, after))
        return after.startswith(before) if isinstance(before, str) else before == after

    for _ in range(30):
        kind, draw = random_type(rng)
        text = json.dumps(
            json.loads(msgspec.json.encode(draw())), ensure_ascii=bool(rng.integers(2))
        )
        seen = [shown(snapshot) for snapshot in snapshots(kind, text)]
        for before, after in itertools.pairwise(seen):
            assert before is None or grows(before, after), (before, after)


class Event(TypedDict):
    title: str
    day: Literal["Monday", "Sunday"]


class Pair(NamedTuple):
    x: int
    y: str


class Shape(msgspec.Struct, tag=True, rename="camel"):
    side_length: float


class Circle(msgspec.Struct, tag=True):
    radius: float


class Model(pydantic.BaseModel):
    title: str = pydantic.Field(alias="called")
    guests: Annotated[int, pydantic.Field(ge=2)] = 2
    places: "dict[str, Model]" = {}


class Words(pydantic.RootModel[list[str]]):
    pass


Name = NewType("Name", str)


def greet(name: Name, times: int = 1, *, loud: bool = False): ...


@each(
    "kind, text, snapshot",
    [
        (Event, '{"title": "a", "day": "Sun', {"title": "a"}),
        (Event, '{"title": "a", "day": "Sunday"', {"title": "a", "day": "Sunday"}),
        (greet, '{"name": "Al', {"name": "Al"}),
        (greet, '{"name": "Al", "times": 1', {"name": "Al"}),
        (greet, '{"name": "Al", "times": 12,', {"name": "Al", "times": 12}),
        (dict[str, Place], '{"k": {"street": "a', "{'k': PartialPlace(street='a', number=None)}"),
        (Pair, "[3, ", "PartialPair(x=3, y=None)"),
        (list[Pair], '[[3, "a', "[PartialPair(x=3, y='a')]"),
        (tuple[int, Color, Color], '[3, "red", "red', "[3, <Color.RED: 'red'>]"),
        (set[str], '["a", "b', ["a", "b"]),
        (Shape | Circle, '{"type": "Circ', "PartialShape(side_length=None)"),
        (Shape | Circle, '{"type": "Circle", "radius": 2}', "PartialCircle(radius=2.0)"),
        (list[Shape], '[{"type": "Shape", "sideLength": 2.5}', "[PartialShape(side_length=2.5)]"),
        (Model, '{"called": "a', "PartialModel(title='a', guests=None, places=None)"),
        (Model, '{"called": "", "places": {"b": {"guests": 3,',
         "PartialModel(title='', guests=None, places={'b': PartialModel(title=None, guests=3, places=None)})"),
        (Words, '["a", "b', ["a", "b"]),
        (list[Call | Meeting], '[{"kind": "meeting"', "[PartialMeeting(kind='meeting', room=None)]"),
        (int, "12", None),
        (int | None, "null", None),
        (str, '"ab', "ab"),
        (Literal["a", "ab"], '"a', None),
        (Any, '{"a": ["b', {"a": ["b"]}),
        (dict, '{"a": [1, 2', {"a": [1]}),
        (list[str], '["\\u00e', [""]),
        (list[str], '["\\u12', [""]),
        (list[str], '["a 12', ["a 12"]),
        (list[int], "[1, 25e", [1]),
    ],
)  # fmt: skip
def test_each_kind_of_type(kind, text, snapshot):
    got = answer_type(kind).partial(text)
    is_repr = isinstance(snapshot, str) and kind is not str
    assert (repr(got) if is_repr else got) == snapshot


@each(
    "kind, text, says",
    [
        (Person, "{name", "begins no Person: key must be a string"),
        (list[int], "[1, x", "begins no Response"),
        (Person, '{"age": "old",', "Expected `float`, got `str`"),
        (list[int], "[" * 100_000, "recursion limit"),
        (list[float], "[NaN, ", "begins no Response"),
    ],
)
def test_what_begins_no_answer_is_refused(kind, text, says):
    with pytest.raises(ConstraintError, match=says):
        answer_type(kind).partial(text)
