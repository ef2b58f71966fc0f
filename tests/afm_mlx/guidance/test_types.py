"""Python types as answers: schema, constraint, instance."""

import collections
import datetime
import decimal
import enum
import ipaddress
import json
import re
import subprocess
import sys
import uuid
import zoneinfo
from dataclasses import dataclass, field
from typing import Annotated, Literal

import annotated_types
import jsonschema
import msgspec
import pydantic
import pydantic.dataclasses
import pydantic.types as pydantic_types
import pytest

from afm_mlx import fm
from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.types import answer_type
from tests.tools.answer_types import accepts, random_text, random_type
from tests.tools.cases import each


def as_json(value):
    """An instance's JSON text, in the form in which answers are generated."""
    return json.dumps(json.loads(msgspec.json.encode(value)), ensure_ascii=False)


def test_instances_of_random_types_come_back_from_their_json(rng):
    for _ in range(60):
        kind, draw = random_type(rng)
        answers = answer_type(kind)
        for _ in range(3):
            instance = draw()
            text = as_json(instance)
            assert accepts(answers.constraint, text), text
            assert answers.instance(text) == instance
            if not isinstance(decoded := json.loads(text), str):  # a text is read as JSON
                assert answers.instance(decoded) == instance


def test_what_a_constraint_allows_is_an_instance(rng):
    for _ in range(40):
        answers = answer_type(random_type(rng)[0])
        instance = answers.instance(random_text(rng, answers.constraint))
        assert answers.instance(as_json(instance)) == instance


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Place:
    """Where something is.

    Args:
        street: its name, without
            the number
        number: of the house
        floor: which no place has
    """

    street: str
    number: Annotated[int, msgspec.Meta(ge=1, description="its number")] = 1


@dataclass
class Person:
    name: str
    color: Color
    homes: list[Place] = field(default_factory=list)
    friend: "Person | None" = None


def test_the_schema_is_in_the_form_that_afm_was_shown():
    place = {
        "type": "object",
        "title": "Place",
        "description": "Where something is.",
        "properties": {
            "street": {"type": "string", "description": "its name, without the number"},
            "number": {"type": "integer", "description": "its number", "minimum": 1, "default": 1},
        },
        "required": ["street"],
        "additionalProperties": False,
        "x-order": ["street", "number"],
    }
    answers = answer_type(Place)
    assert json.dumps(answers.schema) == json.dumps(place)
    json_schema = {"name": "Place", "description": "Where something is.", "schema": place}
    assert answers.response_format == {"type": "json_schema", "json_schema": json_schema}
    person = answer_type(Person)
    assert person.schema["properties"] == {
        "name": {"type": "string"},
        "color": {"$ref": "#/$defs/Color"},
        "homes": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "friend": {"anyOf": [{"$ref": "#"}, {"type": "null"}], "default": None},
    }
    color = {"title": "Color", "enum": ["blue", "red"]}
    assert person.schema["$defs"] == {"Color": color, "Place": place}
    assert (person.name, person.description) == ("Person", None)
    jsonschema.Draft202012Validator.check_schema(person.schema)


@pydantic.dataclasses.dataclass
class Spot:
    x: int = pydantic.Field(ge=0)


class Event(pydantic.BaseModel):
    """An event."""

    title: str = pydantic.Field(alias="called", description="what it is called")
    guests: Annotated[int, pydantic.Field(ge=2)] = 2
    where: Spot | None = None
    follows: list["Event"] = []


class Meeting(pydantic.BaseModel):
    kind: Literal["meeting"]
    room: str


class Call(pydantic.BaseModel):
    kind: Literal["call"]
    number: str


def test_models_of_pydantic():
    answers = answer_type(Event)
    assert list(answers.schema["properties"]) == answers.schema["x-order"]
    called = {"type": "string", "description": "what it is called"}
    assert answers.schema["properties"]["called"] == called
    assert answers.schema["properties"]["follows"]["items"] == {"$ref": "#"}
    assert answers.schema["$defs"]["Spot"]["additionalProperties"] is False
    inner = Event(called="b", where=Spot(4))
    event = Event(called='a "b" é', guests=5, follows=[inner])
    text = json.dumps(event.model_dump(by_alias=True), ensure_ascii=False)
    assert accepts(answers.constraint, text)
    assert answers.instance(text) == event
    assert not accepts(answers.constraint, '{"called": "a", "guests": 1}')
    with pytest.raises(ConstraintError, match=r"is no Event: guests: .*greater than or equal to 2"):
        answers.instance('{"called": "a", "guests": 1}')
    union = answer_type(pydantic.TypeAdapter(list[Meeting | Call]))
    assert union.name == "Response"
    calls = [Call(kind="call", number="1"), Meeting(kind="meeting", room="2")]
    text = json.dumps([call.model_dump() for call in calls])
    assert accepts(union.constraint, text)
    assert union.instance(text) == calls
    assert answer_type(Spot).schema["properties"] == {"x": {"type": "integer", "minimum": 0}}
    at_least = answer_type(Annotated[int, annotated_types.Ge(3)])
    assert at_least.schema == {"type": "integer", "minimum": 3}
    assert at_least.instance("3") == 3


def test_pydantic_is_imported_for_its_own_types_only():
    program = (
        "import sys, dataclasses; from afm_mlx.guidance.types import answer_type\n"
        "answer_type(dataclasses.make_dataclass('A', [('a', int)])).instance('{\"a\": 1}')\n"
        "assert not {'pydantic', 'docstring_parser'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_list_of_fields_has_no_more_than_those():
    answers = answer_type(msgspec.defstruct("Pair", [("x", int), ("y", int, 0)], array_like=True))
    for text, is_one in {"[1, 2]": True, "[1]": True, "[]": False, "[1, 2, 3]": False}.items():
        assert accepts(answers.constraint, text) is is_one


@dataclass
class WithBytes:
    files: list[Place]
    inner: dict[str, bytes]


class Shape(msgspec.Struct, tag=True):
    size: int


@fm.generable
class Guided:
    size: int = fm.guide(range=(1, 3))


@each(
    "kind, says",
    [
        (bytes, r"The type is bytes, .* use str"),
        (WithBytes, r"The field inner is bytes"),
        (dict[int, str], r"use dict\[str, \.\.\.\]"),
        (list[datetime.datetime], r"datetime without a time zone, .*tz=True"),
        (datetime.timedelta, "a number of seconds"),
        (decimal.Decimal, "use float or str"),
        (complex, "'complex'.* use a dataclass"),
        (Person | Place, "may not contain more than one dataclass.* Allowed are .*tag=True"),
        ("Person", "'Person' can't be a type of answers: .* Allowed are dataclasses"),
        (7, "7 can't be a type of answers"),
        (list[Guided], "has a generable class, whose guides a session knows"),
        (list[Shape | Event], "parts of msgspec .* and of pydantic"),
        (Annotated[Event, msgspec.Meta(description="x")], "use one of them"),
    ],
)
def test_a_type_that_a_schema_does_not_describe_is_refused(kind, says):
    with pytest.raises(ConstraintError, match=says):
        answer_type(kind)


@each(
    "kind, text, says",
    [
        (Person, '{"name": "a", "color": "green"}', r"is no Person: Invalid enum .*\$\.color"),
        (Person, b'{"name": 5, "color": "red"}', r"Expected `str`, got `int` - at `\$\.name`"),
        (Person, {"name": "a"}, "missing required field `color`"),
        (Person, '{"name": "a", "col', "truncated"),
        (Event, '{"called": "a", "follows": [{}]}', r"follows\.0\.called: Field required"),
        (list[int], "[" * 100_000, "is no Response: "),
        (int, object(), "is no Response: "),
    ],
)
def test_what_is_no_instance_names_the_field(kind, text, says):
    with pytest.raises(ConstraintError, match=says):
        answer_type(kind).instance(text)


def test_what_a_types_code_raises_is_the_cause_of_a_refusal():
    @dataclass
    class Faulty:
        key: str

        def __post_init__(self):
            raise KeyError(self.key)

    with pytest.raises(ConstraintError, match="is no Faulty: KeyError: 'a'") as refused:
        answer_type(Faulty).instance('{"key": "a"}')
    assert isinstance(refused.value.__cause__, KeyError)
    with pytest.raises(ConstraintError, match="None begins no Faulty"):
        answer_type(Faulty).partial(None)


@each(
    "kind",
    [
        decimal.Decimal, pydantic.condecimal(gt=0, max_digits=5, decimal_places=2), bytes,
        pydantic.conbytes(max_length=5), dict[int, str], dict[uuid.UUID, int], dict[datetime.date, int],
        dict[Color, int], pydantic.NaiveDatetime, pydantic.AwareDatetime, datetime.datetime, datetime.time,
        datetime.timedelta, pydantic.HttpUrl, pydantic.AnyUrl, pydantic.PostgresDsn,
        set[Literal["a", "b"]], frozenset[Color], pydantic.conset(int, min_length=2), pydantic.UUID1,
        pydantic.UUID4, ipaddress.IPv4Network, ipaddress.IPv6Interface, pydantic.IPvAnyAddress, re.Pattern,
        pydantic.Base64Str, pydantic.Base64UrlBytes, pydantic.SecretStr, pydantic.FiniteFloat,
        pydantic.confloat(multiple_of=0.5), collections.deque[int], datetime.date | datetime.datetime,
    ],
)  # fmt: skip
def test_what_is_generated_is_what_pydantic_asks_for(rng, kind):
    answers = answer_type(pydantic.create_model("Answer", x=(kind, ...)))
    for _ in range(3):
        answers.instance(random_text(rng, answers.constraint, soft_limit=20))


@each(
    "kind, reason",
    [
        (pydantic.PastDate, "date with limits"),
        (pydantic.Json, "has Json"),
        (pydantic.FilePath, "file-path"),
        (complex, "has complex"),
        (pydantic.ByteSize, "has ByteSize"),
        (list[pydantic.ImportString], "has ImportString"),
        (pydantic.ImportString[int], "has ImportString"),
        (pydantic_types.PaymentCardNumber, "has PaymentCardNumber"),
        (zoneinfo.ZoneInfo, "zoneinfo"),
        (type[int], "has a class"),
        (dict[float, int], "keys of type float"),
        (dict[pydantic.PositiveInt, int], "keys of type int"),
    ],
)
def test_what_no_schema_describes_of_pydantic_is_refused(kind, reason):
    with pytest.raises(ConstraintError, match=reason):
        answer_type(pydantic.create_model("Answer", x=(kind, ...)))


def test_a_set_is_a_list_that_ends_where_its_values_do():
    answers = answer_type(set[str])
    assert answers.schema == {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    assert answers.instance('["a", "b", "a"]') == {"a", "b"}
    assert accepts(answer_type(set[Literal["a", "b"]]).constraint, '["b", "a"]')
    with pytest.raises(ConstraintError, match="only 2 items can differ"):
        _ = answer_type(Annotated[set[Literal["a", "b"]], msgspec.Meta(min_length=3)]).constraint
