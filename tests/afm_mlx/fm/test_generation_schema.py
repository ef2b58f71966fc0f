"""Schemas of generable classes, in the JSON dialect of Apple's framework."""

import enum
import gc
import typing
import weakref
from typing import Literal

import jsonschema
import pytest

from afm_mlx import fm
from afm_mlx.fm.generation_schema import Property
from tests.tools.cases import each

Guide = fm.GenerationGuide


@fm.generable("One paw")
class Paw:
    is_left: bool = fm.guide("Which side", minimum=3)
    claws: int = fm.guide(minimum=0.5, maximum=5.5)


@fm.generable("A cat of the shelter")
class Cat:
    name: str = fm.guide("Its name", regex=r"\w+")
    weight: float = fm.guide("In kg", range=(0.5, 12))
    paws: list[Paw] = fm.guide("All of them", count=4)
    food: str = fm.guide(anyOf=["fish", "mice"])
    kind: str = fm.guide(constant="cat")
    moods: list[str] = fm.guide(anyOf=["calm", "wild"], min_items=1, max_items=2)
    marks: list[float] = fm.guide(element=Guide.range((1, 1)))
    rows: list[list[int]] = fm.guide(element=Guide.count(2))
    kittens: list["Cat"] | None
    best: Paw | None = fm.guide("The favourite")


def described(text, **schema):
    return {**schema, "description": text}


PAW = {
    "title": "Paw",
    "description": "One paw",
    "type": "object",
    "properties": {
        "is_left": described("Which side", type="boolean"),
        "claws": {"type": "integer", "minimum": 1, "maximum": 5},
    },
    "required": ["is_left", "claws"],
    "additionalProperties": False,
    "x-order": ["is_left", "claws"],
}
CAT = {
    "title": "Cat",
    "description": "A cat of the shelter",
    "type": "object",
    "properties": {
        "name": described("Its name", type="string", pattern=r"\w+"),
        "weight": described("In kg", type="number", minimum=0.5, maximum=12),
        "paws": described(
            "All of them", type="array", items={"$ref": "#/$defs/Paw"}, minItems=4, maxItems=4
        ),
        "food": {"type": "string", "enum": ["fish", "mice"]},
        "kind": {"type": "string", "enum": ["cat"]},
        "moods": {
            "type": "array",
            "items": {"type": "string", "enum": ["calm", "wild"]},
            "minItems": 1,
            "maxItems": 2,
        },
        "marks": {"type": "array", "items": {"type": "number", "minimum": 1, "maximum": 1}},
        "rows": {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        },
        "kittens": {"type": "array", "items": {"$ref": "#"}},
        "best": described("The favourite", **{"$ref": "#/$defs/Paw"}),
    },
    "required": ["name", "weight", "paws", "food", "kind", "moods", "marks", "rows"],
    "additionalProperties": False,
    "x-order": [
        *("name", "weight", "paws", "food", "kind", "moods", "marks", "rows", "kittens", "best")
    ],
    "$defs": {"Paw": PAW},
}


def test_a_class_gives_its_schema():
    schema = Cat.generation_schema()
    assert schema.to_dict() == CAT
    assert schema.name == "Cat"
    assert [nested.name for nested in schema.dynamic_nested_types] == ["Paw"]
    assert list(schema.to_dict()["properties"]) == CAT["x-order"]
    assert Cat.generation_schema("Another").to_dict()["description"] == "Another"
    jsonschema.Draft202012Validator.check_schema(CAT)


def test_the_response_format_names_the_schema():
    schema = Paw.generation_schema()
    assert schema.response_format() == {
        "type": "json_schema",
        "json_schema": {"name": "Paw", "description": "One paw", "schema": PAW},
    }
    schema.description = None
    assert list(schema.response_format()["json_schema"]) == ["name", "schema"]


def test_a_schema_can_be_made_by_hand():
    paw = fm.GenerationSchema(Paw, None, [Property("claws", int)])
    schema = fm.GenerationSchema(
        Cat, "By hand", [Property("paw", Paw | None, "One", [])], dynamic_nested_types=[paw]
    )
    made = schema.to_dict()
    assert made["description"] == "By hand"
    assert made["required"] == []
    assert made["$defs"]["Paw"]["required"] == ["claws"]


STRINGS = {"anyOf": ["a"], "constant": "a", "regex": "a"}
NUMBERS = {"minimum": 1, "maximum": 2, "range": (1, 2)}
LISTS = {"count": 1, "min_items": 1, "max_items": 1}


def field_of(type_class, **guides):
    """The schema of a field with guides."""
    guides = fm.guide(**guides).metadata["guides"]
    return fm.GenerationSchema(Cat, None, [Property("x", type_class, None, guides)]).to_dict()


@each(
    "type_class, allowed",
    [
        (str, STRINGS),
        (int, NUMBERS),
        (float, NUMBERS),
        (bool, STRINGS | NUMBERS | LISTS),
        (list[str], LISTS | {"anyOf": ["a"], "constant": "a"}),
        (list[int], LISTS),
        (list[float] | None, LISTS),
        (list[bool], LISTS),
        (list[list[str]], LISTS),
        (list[Cat], LISTS),
        (Cat, {}),
    ],
)
def test_a_guide_applies_to_the_types_that_it_is_for(type_class, allowed):
    for name, value in (STRINGS | NUMBERS | LISTS).items():
        if name in allowed:
            assert field_of(type_class, **{name: value})
        else:
            with pytest.raises(fm.UnsupportedGuideError, match=r"Cat.*'x'.*guide"):
                field_of(type_class, **{name: value})


@each(
    "type_class, guide",
    [
        (str, Guide.element(Guide.constant("a"))),
        (list[str], Guide.element(Guide.minimum(1))),
        (list[str], Guide.element(Guide.min_items(1))),
        (list[int], Guide.element(Guide.regex("a"))),
        (list[Cat], Guide.element(Guide.regex("a"))),
    ],
)
def test_a_guide_of_elements_applies_to_their_type(type_class, guide):
    with pytest.raises(fm.UnsupportedGuideError):
        field_of(type_class, element=guide)


@each(
    "type_class, guides",
    [
        (int, {"minimum": 3, "maximum": 2}),
        (int, {"range": (0.2, 0.8)}),
        (float, {"range": (0, 1), "minimum": 2}),
        (list[int], {"count": 3, "max_items": 2}),
        (str, {"anyOf": ["a"], "constant": "b"}),
        (set, {}),
        (dict[str, int], {}),
        (int | str, {}),
        (Paw, {}),
        (list[object], {}),
    ],
)
def test_fields_that_no_value_fits_are_refused(type_class, guides):
    with pytest.raises(fm.InvalidGenerationSchemaError, match="Invalid generation schema 'Cat'"):
        field_of(type_class, **guides)


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


class Bits(enum.Flag):
    A = 1
    B = 2


@each(
    "type_class, expected",
    [
        (Size, {"type": "string", "enum": ["small", "large"]}),
        (
            enum.IntEnum("Level", {"LOW": 1, "HIGH": 2, "TOP": 2}),
            {"type": "integer", "enum": [1, 2]},
        ),
        (enum.StrEnum("Word", ["YES", "NO"]), {"type": "string", "enum": ["yes", "no"]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[3, -1] | None, {"type": "integer", "enum": [3, -1]}),
        (Literal["a", None], {"type": "string", "enum": ["a"]}),
        (list[Size], {"type": "array", "items": {"type": "string", "enum": ["small", "large"]}}),
    ],
)
def test_enums_and_literals_have_schemas(type_class, expected):
    one = Property("x", type_class, "What it is")
    schema = fm.GenerationSchema(Paw, properties=[one]).to_dict()
    assert schema["properties"]["x"] == {**expected, "description": "What it is"}
    assert schema["required"] == ([] if one.is_optional else ["x"])
    assert one.is_optional == (type_class in (Literal[3, -1] | None, Literal["a", None]))


@each(
    "type_class",
    [
        Literal["a", 1], Literal[True], Literal[b"a"], Literal[Size.SMALL], Bits,
        enum.Enum("Empty", []), enum.Enum("Pairs", {"A": (1, 2)}), enum.Enum("Floats", {"A": 1.5}),
    ],
)  # fmt: skip
def test_enums_and_literals_that_json_can_not_choose_are_refused(type_class):
    with pytest.raises(fm.InvalidGenerationSchemaError, match="strings only or integers only"):
        fm.GenerationSchema(Paw, properties=[Property("x", type_class)]).to_dict()
    with pytest.raises(fm.UnsupportedGuideError, match="anyOf; allowed: none"):
        guides = [fm.GenerationGuide.anyOf(["a"])]
        fm.GenerationSchema(Paw, properties=[Property("x", Size, guides=guides)]).to_dict()


def test_a_list_says_what_its_elements_are():
    for type_class in (list, list | None, list[list], typing.List):  # noqa: UP006
        with pytest.raises(TypeError, match=r"'x'.*list\[str\]"):
            fm.GenerationSchema(Cat, None, [Property("x", type_class)])


def test_decorating_keeps_nothing_of_a_function_alive():
    class Something:
        pass

    kept = Something()
    seen = weakref.ref(kept)

    @fm.generable("Made in a function")
    class Local:
        size: int

    del kept
    gc.collect()
    assert seen() is None
    assert Local(1).size == 1


def test_two_classes_of_one_name_are_refused():
    @fm.generable
    class Box:
        size: int

    inner = Box

    @fm.generable
    class Shelf:
        box: inner

    @fm.generable
    class Box:
        shelf: Shelf

    Box.__qualname__ = "another.Box"
    with pytest.raises(fm.InvalidGenerationSchemaError, match=r"Two of its classes .* name Box"):
        Box.generation_schema().to_dict()


@each(
    "name, values",
    [
        ("anyOf", ["red", [], [1], ("a",)]),
        ("description", [3, b"red"]),
        ("constant", [1, ["a"]]),
        ("regex", [1]),
        ("count", [0, -1, 1.0, True, "2"]),
        ("min_items", [-1, 1.5]),
        ("max_items", [-1, "3"]),
        ("minimum", ["a", float("nan"), True]),
        ("maximum", ["a", float("inf")]),
        ("range", [3, [1, 2], (1,), (1, 2, 3), ("a", "b"), (2, 1)]),
        ("element", [3, "a"]),
    ],
)
def test_guides_refuse_values_that_they_cannot_have(name, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{name} must be"):
            fm.guide(**{name: value})
    with pytest.raises(ValueError, match="guide_type must be"):
        fm.GenerationGuide("enum", ["red"])
    assert fm.guide(minimum=10**400).metadata["guides"][0].value == 10**400
