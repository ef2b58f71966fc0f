"""Tools, written as classes or made of functions."""

import asyncio
import dataclasses
import functools
import threading
from typing import Annotated, Any, Literal

import jsonschema
import msgspec
import pydantic
import pytest

from afm_mlx import fm
from tests.afm_mlx.fm.conftest import freed
from tests.tools.cases import each


@fm.generable("Of a weather report")
class Arguments:
    city: str = fm.guide("Where")


class Weather(fm.Tool):
    name = "get_weather"
    description = "Weather of a city"

    @property
    def arguments_schema(self):
        return Arguments.generation_schema()

    async def call(self, args):
        return f"Rain in {args.value(str, for_property='city')}"


def call(tool, **arguments):
    return asyncio.run(tool.call(fm.GeneratedContent(arguments)))


def test_a_tool_is_called_and_defined():
    tool, schema = Weather(), Arguments.generation_schema().to_dict()
    assert call(tool, city="Oslo") == "Rain in Oslo"
    named = {"name": "get_weather", "description": "Weather of a city"}
    assert tool.tool_definition == {"type": "function", "function": {**named, "parameters": schema}}


@fm.generable
class NoGuide:
    city: str = fm.guide(minimum=3)


@fm.generable
class NoType:
    city: set


async def _call(self, args):
    return ""


@each(
    "attributes, error",
    [
        ({"name": None}, TypeError),
        ({"name": ""}, ValueError),
        ({"name": "<turn_end>"}, ValueError),
        ({"description": ["a"]}, TypeError),
        ({"arguments_schema": {}}, TypeError),
        ({"call": lambda self, args: ""}, TypeError),
        ({"arguments_schema": NoGuide.generation_schema()}, fm.UnsupportedGuideError),
        ({"arguments_schema": NoType.generation_schema()}, fm.InvalidGenerationSchemaError),
    ],
)
def test_a_tool_with_something_wrong_is_not_made(attributes, error):
    with pytest.raises(error):
        type("Wrong", (Weather,), attributes)()


def test_a_tool_with_something_missing_is_not_made():
    schema = Weather.arguments_schema
    whole = {"name": "a", "description": "b", "arguments_schema": schema, "call": _call}
    assert type("Whole", (fm.Tool,), whole)().name == "a"
    for missing in whole:
        rest = {name: value for name, value in whole.items() if name != missing}
        error = AssertionError if missing in ("name", "description") else TypeError
        with pytest.raises(error, match=missing):
            type("Lacking", (fm.Tool,), rest)()


def test_a_tool_is_freed_when_dropped():
    assert freed([Weather(), fm.Tool.from_function(search)])


@dataclasses.dataclass
class Period:
    days: int
    hours: int = 0


def search(
    text: str,
    period: Period,
    limit: int = 3,
    order: Literal["new", "old"] = "new",
    author: str | None = None,
    least: Annotated[float, msgspec.Meta(ge=0)] = 0.5,
) -> Any:
    """Search the
    archive.

    Slowly.

    Args:
        text: the words,
            all of them.
        limit (int): how many.
    """
    return {"text": text, "days": period.days, "limit": limit, "order": order, "by": author}


def test_a_function_becomes_a_tool():
    definition = fm.Tool.from_function(search).tool_definition["function"]
    assert definition["name"] == "search"
    assert definition["description"] == "Search the archive."
    assert definition["parameters"] == {
        "title": "search",
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "the words, all of them."},
            "period": {"$ref": "#/$defs/Period"},
            "limit": {"type": "integer", "description": "how many."},
            "order": {"enum": ["new", "old"]},
            "author": {"type": "string"},
            "least": {"type": "number", "minimum": 0},
        },
        "required": ["text", "period"],
        "additionalProperties": False,
        "x-order": ["text", "period", "limit", "order", "author", "least"],
        "$defs": {
            "Period": {
                "title": "Period",
                "type": "object",
                "properties": {"days": {"type": "integer"}, "hours": {"type": "integer", "default": 0}},
                "required": ["days"],
                "additionalProperties": False,
                "x-order": ["days", "hours"],
            }
        },
    }  # fmt: skip
    jsonschema.Draft202012Validator.check_schema(definition["parameters"])


def test_a_function_is_called_with_its_own_types():
    tool = fm.Tool.from_function(search)
    found = call(tool, text="ä", period={"days": 2}, limit=1)
    assert found == '{"text": "ä", "days": 2, "limit": 1, "order": "new", "by": null}'
    with pytest.raises(ValueError, match=r"'period'.*`int`.*days"):
        call(tool, text="a", period={"days": "two"})
    with pytest.raises(TypeError, match="missing a required argument: 'text'"):
        call(tool, period={"days": 2})
    with pytest.raises(TypeError, match="unexpected keyword argument 'more'"):
        call(tool, text="a", period={"days": 2}, more=1)


@fm.generable("A place to sit")
class Seat:
    row: int = fm.guide("Which row", range=(1, 20))
    neighbours: "list[Seat]"
    note: str | None


def test_a_function_may_take_generable_classes():
    def book(seats: list[Seat], other: Seat | None = None) -> str:
        """Book seats."""
        return f"{seats} {other}"

    tool = fm.Tool.from_function(book)
    parameters = tool.tool_definition["function"]["parameters"]
    ref = {"$ref": "#/$defs/Seat"}
    assert parameters["properties"] == {"seats": {"type": "array", "items": ref}, "other": ref}
    seat = Seat.generation_schema().to_dict()
    seat["properties"]["neighbours"]["items"]["$ref"] = "#/$defs/Seat"
    assert parameters["$defs"] == {"Seat": seat}
    one = Seat(3, [], None)
    assert call(tool, seats=[one.generated_content.value()]) == f"{[one]} None"


class Guest(pydantic.BaseModel):
    """Who comes."""

    name: str = pydantic.Field(min_length=2)
    age: int = pydantic.Field(3, ge=0)


def test_a_function_may_take_models_of_pydantic_and_generable_classes():
    def invite(
        guests: list[Guest],
        seat: Annotated[Seat | None, pydantic.Field(description="By the window")] = None,
        host: Guest | None = None,
    ) -> str:
        """Invite guests.

        Args:
            guests: all of them
            seat: not shown
        """
        return f"{guests} {seat} {host}"

    tool = fm.Tool.from_function(invite)
    parameters = tool.tool_definition["function"]["parameters"]
    guest = {"$ref": "#/$defs/Guest"}
    assert parameters["properties"] == {
        "guests": {"type": "array", "items": guest, "description": "all of them"},
        "seat": {"$ref": "#/$defs/Seat", "description": "By the window"},
        "host": guest,
    }
    assert parameters["required"] == ["guests"]
    assert parameters["$defs"].keys() == {"Guest", "Seat"}
    name = parameters["$defs"]["Guest"]["properties"]["name"]
    assert name == {"type": "string", "minLength": 2}
    guest = {"name": "Ada", "age": 4}
    seat = Seat(1, [], None)
    found = call(tool, guests=[guest], seat=seat.generated_content.value(), host=None)
    assert found == f"{[Guest(**guest)]} {seat} None"
    with pytest.raises(ValueError, match=r"guests\.0\.name: .* at least 2"):
        call(tool, guests=[{"name": "A"}])


def test_functions_run_where_they_may_block():
    def where() -> str:
        """Name the thread."""
        return threading.current_thread().name

    async def where_async() -> str:
        """Name the thread."""
        return where()

    @functools.wraps(where_async)
    def wrapped() -> str:
        return where_async()

    def ends() -> str:
        """Raise StopIteration, which no future can."""
        return next(iter(()))

    here = threading.current_thread().name
    assert call(fm.Tool.from_function(wrapped)) == here
    with pytest.raises(RuntimeError, match="ends raised StopIteration"):
        call(fm.Tool.from_function(ends))
    assert call(fm.Tool.from_function(where)) != here
    assert call(fm.Tool.from_function(where_async)) == here


def test_results_are_text():
    def give(kind: str):
        """Give something."""
        return {"text": "a", "list": [1], "none": None, "object": Weather}[kind]

    tool = fm.Tool.from_function(give)
    assert [call(tool, kind=kind) for kind in ("text", "list", "none")] == ["a", "[1]", "null"]
    assert call(tool, kind="object") == str(Weather)


def test_functions_that_say_too_little_are_refused():
    def silent(a: int):
        return a

    def untyped(a):
        """Say."""

    def several(*rest: int):
        """Say."""

    def strange(a: threading.Thread):
        """Say."""

    @dataclasses.dataclass
    class Booking:
        seat: Seat

    def around(booking: Booking):
        """Say."""

    def yields(a: int):
        """Say."""
        yield a

    cases = {
        3: "made of a function",
        yields: "Return a list",
        silent: "no docstring",
        untyped: "no annotation",
        several: "use a parameter of type list",
        around: "classes around it have to be generable",
        strange: "field a is .*Thread.* use a dataclass",
    }
    for function, message in cases.items():
        with pytest.raises(TypeError, match=message):
            fm.Tool.from_function(function)
