"""Functions as types of answers: their arguments."""

import functools
from typing import Annotated, Literal

import msgspec
import pydantic
import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.types import answer_type
from tests.tools.answer_types import accepts
from tests.tools.cases import each


def get_weather(
    city: str,
    days: Annotated[int, msgspec.Meta(ge=1, description="how far ahead")] = 1,
    *,
    unit: Literal["C", "F"] = "C",
) -> str:
    """Weather of a city.

    It may be wrong.

    Args:
        city: its name,
            in English
        days: never shown
        unit (str, optional): of temperatures. Defaults to C.

    Returns:
        A sentence.
    """
    return f"{city}{days}{unit}"


class Place(pydantic.BaseModel):
    street: str = pydantic.Field(min_length=2)


class Desk:
    def book(self, place: Place, seats: "int" = 2):
        """Books a table."""
        return place, seats

    def __call__(self, name: str): ...


def test_a_functions_arguments_are_an_object_in_their_order():
    answers = answer_type(get_weather)
    assert answers.name == "get_weather"
    assert answers.description.split() == "Weather of a city. It may be wrong.".split()
    assert answers.schema == {
        "type": "object",
        "title": "get_weather",
        "description": answers.description,
        "properties": {
            "city": {"type": "string", "description": "its name, in English"},
            "days": {"type": "integer", "minimum": 1, "description": "how far ahead"},
            "unit": {"enum": ["C", "F"], "description": "of temperatures. Defaults to C."},
        },
        "required": ["city"],
        "additionalProperties": False,
        "x-order": ["city", "days", "unit"],
    }
    text = '{"city": "Oslo", "unit": "F"}'
    assert accepts(answers.constraint, text)
    assert not accepts(answers.constraint, '{"city": "Oslo", "unit": "K"}')
    assert answers.instance(text) == {"city": "Oslo", "unit": "F"}
    assert get_weather(**answers.instance(text)) == "Oslo1F"
    with pytest.raises(ConstraintError, match=r"is no get_weather: .*city"):
        answers.instance('{"days": 3}')


def test_methods_and_models_of_pydantic_as_parameters():
    desk = Desk()
    answers = answer_type(desk.book)
    assert (answers.name, answers.description) == ("book", "Books a table.")
    assert answers.schema["x-order"] == ["place", "seats"]
    assert desk.book(**answers.instance('{"place": {"street": "Elm"}}')) == (Place(street="Elm"), 2)
    assert not accepts(answers.constraint, '{"place": {"street": "E"}}')
    assert answer_type(desk).schema["required"] == ["name"]
    bound = answer_type(functools.partial(get_weather, days=3))
    assert bound.schema["required"] == ["city"]

    def ping() -> None: ...

    assert answer_type(ping).instance("{}") == {}


def unannotated(city, days: int): ...


def many(*cities: str): ...


def named(**cities: str): ...


def by_position(city: str, /): ...


def unknown(city: "Town"): ...  # noqa: F821


def with_bytes(data: bytes): ...


@each(
    "function, says",
    [
        (
            unannotated,
            "parameter city of unannotated has no annotation; give its type, .*city: str",
        ),
        (many, r"parameter cities of many .* type list"),
        (named, r"parameter cities of named .* type dict"),
        (by_position, r"parameter city of by_position .* remove the /"),
        (unknown, r"annotations of unknown can't be read \(name 'Town'"),
        (with_bytes, "The field data is bytes"),
        (Desk.book, "parameter self of book has no annotation"),
        (lambda x: x, "parameter x of <lambda>"),
        (max, "max can't be read|of max"),
    ],
)
def test_parameters_that_an_object_cannot_give_are_refused(function, says):
    with pytest.raises(ConstraintError, match=says):
        answer_type(function)
