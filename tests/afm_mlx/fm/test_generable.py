"""Classes that a model generates instances of: what the decorator makes of them, and what it refuses."""

from __future__ import annotations

import dataclasses
import enum
from typing import Optional

import pytest

from afm_mlx import fm
from afm_mlx.fm.generable import _apply_generable_decorator
from tests.afm_mlx.fm.conftest import freed
from tests.tools.cases import each


@fm.generable("How old somebody is")
class Age:
    years: int = fm.guide("Full years", range=(0, 120))
    months: int


@fm.generable("A member of a family")
class Member:
    name: str
    age: Optional[Age]  # noqa: UP045  both ways of writing an option
    children: list[Member] = fm.guide("Children", max_items=3)
    nicknames: list[str] | None = None


FAMILY = {
    "name": "Hana",
    "age": {"years": 41, "months": 2},
    "children": [{"name": "Ida", "children": [], "nicknames": ["I"]}],
}
HANA = Member("Hana", Age(41, 2), [Member("Ida", None, [], ["I"])], None)


def test_content_becomes_instances_and_instances_become_content():
    content = fm.GeneratedContent(FAMILY)
    member = Member._from_generated_content(content)
    assert member == HANA
    assert member.generated_content.value() == FAMILY
    assert content.value(Member) == HANA


def test_classes_and_instances_are_generable_and_nothing_else_is():
    assert all(isinstance(one, fm.Generable) for one in (Member, HANA, Age))
    assert not any(isinstance(one, fm.Generable) for one in (3, str, object(), [HANA], None))
    assert (Age._generable, Age._generable_description) == (True, "How old somebody is")


def test_generable_is_not_for_subclassing():
    with pytest.raises(TypeError, match=r"not allowed.*Use the @fm.generable\(\) decorator"):

        class Own(fm.Generable):
            name: str


@pytest.mark.parametrize("order", ["dataclass first", "dataclass after", "none", "slots"])
def test_a_dataclass_before_or_after_the_decorator_keeps_guides(order):
    class Point:
        x: int = fm.guide("across", minimum=0)
        y: int = 1

    made = {
        "dataclass first": lambda: fm.generable(dataclasses.dataclass(Point)),
        "dataclass after": lambda: dataclasses.dataclass(fm.generable()(Point)),
        "none": lambda: fm.generable(Point),
        "slots": lambda: dataclasses.dataclass(slots=True)(fm.generable("a point")(Point)),
    }[order]()
    assert made(2) == made(2, 1)
    assert made.generation_schema().to_dict()["properties"] == {
        "x": {"type": "integer", "minimum": 0, "description": "across"},
        "y": {"type": "integer"},
    }


def test_a_subclass_has_the_fields_of_both():
    @fm.generable
    class Base:
        first: str

    @fm.generable
    class Further(Base):
        second: int

    assert Further.generation_schema().to_dict()["x-order"] == ["first", "second"]
    assert (
        Further._from_generated_content(fm.GeneratedContent({"first": "a", "second": 2})).second
        == 2
    )


def test_classes_of_a_function_know_each_other():
    @fm.generable
    class Leaf:
        size: int

    @fm.generable
    class Branch:
        leaves: list[Leaf]
        next: Branch | None = None

    schema = Branch.generation_schema().to_dict()
    assert schema["properties"]["leaves"]["items"] == {"$ref": "#/$defs/Leaf"}
    assert schema["properties"]["next"] == {"$ref": "#"}
    assert list(schema["$defs"]) == ["Leaf"]


def test_what_is_no_generable_class_is_refused():
    with pytest.raises(fm.InvalidGenerationSchemaError, match="only be applied to classes"):

        @fm.generable
        def function():
            pass

    with pytest.raises(fm.InvalidGenerationSchemaError, match="only be applied to classes"):
        _apply_generable_decorator(len, None)  # as Apple's own tests do
    with pytest.raises(fm.InvalidGenerationSchemaError) as no_fields:

        @fm.generable
        class Empty:
            name = "x"

    assert "type-annotated fields" in str(no_fields.value)
    assert "class Empty:" in str(no_fields.value)
    with pytest.raises(fm.InvalidGenerationSchemaError, match=r"Tags.*default_factory"):

        @fm.generable("d")
        class Tags:
            tags: list[str] = []  # noqa: RUF012  the fault

    with pytest.raises(fm.InvalidGenerationSchemaError, match="needs no decorator"):

        @fm.generable
        class Size(enum.Enum):
            SMALL = "small"

    with pytest.raises(fm.InvalidGenerationSchemaError, match=r"type hints of Odd.*Nowhere"):

        @fm.generable
        class Odd:
            place: Nowhere  # noqa: F821  the fault


def test_partially_generated_takes_what_is_there():
    partial = fm.GeneratedContent.of({"name": "Ha", "children": [{"name": "I"}]}, is_complete=False)
    seen = Member.PartiallyGenerated._from_generated_content(partial)
    assert not partial.is_complete
    assert seen.id == partial.id
    assert (seen.name, seen.age, seen.nicknames) == ("Ha", None, None)
    assert isinstance(seen.children[0], Member.PartiallyGenerated)
    assert (seen.children[0].name, seen.children[0].children) == ("I", None)
    names = [field.name for field in dataclasses.fields(Member.PartiallyGenerated)]
    assert names == ["name", "age", "children", "nicknames", "id"]


def test_a_field_named_id_stays_the_classes_own():
    @fm.generable
    class Row:
        id: int

    assert Row.PartiallyGenerated._from_generated_content(fm.GeneratedContent({"id": 7})).id == 7


@each(
    "type_class, name, expected",
    [
        (str, "name", "Hana"),
        (float, "one", 1),
        (None, "one", 1),
        (int, "missing", None),
        (Age, "missing", None),
        (list[Member], "missing", []),
        (list[Member] | None, "missing", None),
        (list, "missing", None),
        (Age, "age", Age(41, 2)),
        (Age | None, "age", Age(41, 2)),
        (list[Age], "ages", [Age(1, 2)]),
        (dict, "age", {"years": 41, "months": 2}),
    ],
)
def test_values_are_json_or_instances(type_class, name, expected):
    content = fm.GeneratedContent({**FAMILY, "one": 1, "ages": [{"years": 1, "months": 2}]})
    found = content.value(type_class, for_property=name)
    assert (found, type(found)) == (expected, type(expected))


def test_values_of_another_form_are_refused():
    with pytest.raises(TypeError, match="'name' must be a list"):
        fm.GeneratedContent(FAMILY).value(list[str], for_property="name")
    with pytest.raises(TypeError, match="not an object"):
        fm.GeneratedContent.from_json("[1]").value(int, for_property="x")
    with pytest.raises(ValueError, match="No Member can be made"):
        Member._from_generated_content(fm.GeneratedContent({"name": "a", "children": "none"}))
    for text in ("{", "NaN", "[" * 100_000):
        with pytest.raises(ValueError):
            fm.GeneratedContent.from_json(text)
    for value in ({"at": object()}, {"size": float("nan")}, {"bytes": b""}):
        with pytest.raises(TypeError, match="not serializable"):
            fm.GeneratedContent(value)


def test_content_is_json_and_has_an_identity():
    content = fm.GeneratedContent.from_json('{"a": [1, "ä"]}')
    assert content.to_json() == '{"a": [1, "ä"]}'
    assert content.is_complete
    assert fm.GeneratedContent().to_json() == fm.GeneratedContent({}).to_json() == "{}"
    assert len({content.id, fm.GeneratedContent().id, content.id}) == 2
    assert fm.GeneratedContent({}, content.id).id == content.id
    assert str(content.id).count("-") == 4


def test_content_is_freed_when_dropped():
    content = fm.GeneratedContent(FAMILY)
    kept = [content, content.value(Member)]
    del content
    assert freed(kept)
