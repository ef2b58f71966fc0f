"""Answers under a schema: instances, content, and snapshots of both; what is refused before generation."""

import asyncio
import enum
import itertools
import json
import re
from typing import Literal, Optional

import pytest

from afm_mlx import fm
from afm_mlx.engine.generation import generate
from afm_mlx.guidance.constraint import Constraint
from tests.afm_mlx.fm.conftest import entries
from tests.tools.cases import each

PROMPT = "Pull out the event.\nThe Dance Planning takes place at Hall Prom on Sunday."


@fm.generable("An event")
class Event:
    title: str
    day: str
    place: str


@fm.generable
class Count:
    name: str = fm.guide(regex="[a-z]{1,5}")
    number: int = fm.guide(range=(1, 3))
    sizes: list[int] = fm.guide(count=2)
    comment: Optional[str] = None  # noqa: UP045


async def test_a_class_gives_an_instance_and_a_schema_gives_content(nano, model, chats):
    (chat,) = [c for c in chats["extract_event"] if c["messages"][1]["content"] == PROMPT]
    json_schema = chat["messages"][1]["response_format"]["json_schema"]
    plain = {"title": "Event", "description": "An event", **json_schema["schema"]}

    def new():
        return fm.LanguageModelSession(model=model)

    wanted = {"title": "Dance Planning", "day": "Sunday", "place": "Hall Prom"}
    session = new()
    event = await session.respond(PROMPT, Event)
    assert event == Event(**wanted)
    schema = Event.generation_schema()
    by_schema = await new().respond(PROMPT, schema=schema)
    by_json = await new().respond(PROMPT, json_schema=plain)
    assert by_schema.value() == by_json.value() == wanted
    assert by_schema.is_complete
    prompt, response = entries(session)
    assert prompt["responseFormat"]["jsonSchema"]["schema"] == schema.to_dict()
    assert response["contents"][0]["structure"] == {"source": "Event", "content": wanted}
    # The model reads the schema, unless it is not to.
    model_, tokenizer = nano
    for include in (True, False):
        message = {"role": "user", "content": PROMPT}
        if include:
            message["response_format"] = schema.response_format()
        ids = tokenizer.apply_chat_template([message], add_generation_prompt=True)
        constraint = Constraint.json_schema(schema.to_dict())
        text = generate(model_, tokenizer, ids, 200, constraint=constraint)
        options = {"schema": schema, "include_schema_in_prompt": include}
        assert (await new().respond(PROMPT, **options)).value() == json.loads(text)


async def test_options_and_guides_are_honoured_together(model):
    made = []
    for seed in (4, 4, 5):
        session = fm.LanguageModelSession(model=model)
        options = fm.GenerationOptions(fm.SamplingMode.random(seed=seed), 3.0)
        made.append(await session.respond("Count", generating=Count, options=options))
        assert 1 <= made[-1].number <= 3
        assert len(made[-1].sizes) == 2
        assert re.fullmatch("[a-z]{1,5}", made[-1].name)
    assert made[0] == made[1] != made[2]


async def test_snapshots_grow_to_the_answer(model):
    async def snapshots(**how):
        session = fm.LanguageModelSession(model=model)
        return [s async for s in session.stream_response(PROMPT, **how)], session

    whole = await fm.LanguageModelSession(model=model).respond(PROMPT, Event)
    seen, session = await snapshots(generating=Event)
    assert {type(s) for s in seen} == {Event.PartiallyGenerated}
    assert len({s.id for s in seen}) == 1
    last = seen[-1]
    assert (last.title, last.day, last.place) == (whole.title, whole.day, whole.place)
    assert seen[0].day is None
    for one, other in itertools.pairwise(seen):
        assert (other.title or "").startswith(one.title or "")
    assert len(entries(session)) == 2
    seen, _ = await snapshots(schema=Event.generation_schema())
    assert [s.is_complete for s in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].value() == {"title": last.title, "day": last.day, "place": last.place}
    numbers = {"type": "object", "properties": {"n": {"const": 1234}}, "required": ["n"]}
    seen, _ = await snapshots(json_schema=numbers)
    assert [s.value().get("n") for s in seen if s.value()] == [1234] * 2  # never some of its digits
    seen, _ = await snapshots(json_schema={"const": 12})
    assert [s.value() for s in seen] == [12]


class Size(enum.Enum):
    SMALL = "small"
    SMALLER = "smaller"


class Number(enum.IntEnum):
    ONE = 1
    TWELVE = 12


@fm.generable
class Time:
    day: Literal["Mon", "Monday"]
    hour: Literal[7, 17]


@fm.generable
class Chosen:
    size: Size
    sizes: list[Size] = fm.guide(count=2)
    number: Number
    time: Time
    other: Optional[Size] = None  # noqa: UP045


async def test_enums_and_literals_are_fields(model):
    days, hours = set(), set()
    for seed in range(4):
        session = fm.LanguageModelSession(model=model)
        options = fm.GenerationOptions(fm.SamplingMode.random(seed=seed), 3.0)
        stream = session.stream_response("Choose", options, generating=Chosen)
        seen = [snapshot async for snapshot in stream]
        last = seen[-1]
        time = Time(last.time.day, last.time.hour)
        made = Chosen(last.size, last.sizes, last.number, time, last.other)
        assert [type(size) for size in (made.size, *made.sizes)] == [Size] * 3
        assert isinstance(made.number, Number)
        assert Chosen._from_generated_content(made.generated_content) == made
        # A word that may go on is not there yet.
        assert {s.size for s in seen} == {None, last.size}
        assert {s.time.day for s in seen if s.time} <= {None, last.time.day}
        days.add(last.time.day)
        hours.add(last.time.hour)
    assert days == {"Mon", "Monday"}
    assert hours == {7, 17}


@each(
    "schema, seen",
    [
        ({"const": True}, [True]),
        ({"type": "null"}, [None]),
        ({"const": -12}, [-12]),
        ({"enum": ["north"]}, ["north"]),
        ({"const": [-1, None, False]}, [[-1, None, False]]),
        ({"const": {"a": -1, "b": None, "c": True}}, [{"a": -1, "b": None, "c": True}]),
    ],
)
def test_streams_end_in_the_value_that_respond_gives(model, schema, seen):
    async def main():
        stream = fm.LanguageModelSession(model=model).stream_response("Hi", json_schema=schema)
        snapshots = [(s.value(), s.is_complete) async for s in stream]
        assert [value for value, is_complete in snapshots if is_complete] == seen
        session = fm.LanguageModelSession(model=model)
        assert (await session.respond("Hi", json_schema=schema)).value() == seen[-1]
        response = entries(session)[1]
        assert response["contents"][0]["structure"]["content"] == seen[-1]

    asyncio.run(main())


async def test_an_answer_that_is_cut_off_is_an_error_or_completed(model):
    short = fm.GenerationOptions(maximum_response_tokens=8)
    session = fm.LanguageModelSession(model=model)
    error = {"options": short, "at_limit": "error"}
    with pytest.raises(fm.DecodingFailureError, match="so far") as caught:
        await session.respond(PROMPT, Event, **error)
    assert caught.value.__cause__.text.startswith('{"title": ')
    with pytest.raises(fm.DecodingFailureError):
        await session.respond(PROMPT, Event, stop="Planning")
    assert not entries(session)
    event = await session.respond(PROMPT, Event, options=short)
    assert event.title.startswith("Dance")
    assert event.place == ""
    assert session.last_answer.finish_reason == "length"
