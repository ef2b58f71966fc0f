"""Arrays: their items, counts, and items that must not be equal."""

import json

import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema import schema_grammar
from tests.tools.cases import each

NULL, TEXT = {"type": "null"}, {"type": "string", "maxLength": 4}


@each(
    "schema, valid, invalid",
    [
        ({"items": NULL, "minItems": 1, "maxItems": 2}, [[None], [None, None]], [[], [None] * 3, [1]]),
        ({"prefixItems": [NULL, {"type": "integer"}], "items": False},
         [[], [None], [None, 1]], [[1], [None, 1, 1]]),
        ({"prefixItems": [NULL, False]}, [[], [None]], [[None, 1]]),
        ({"prefixItems": [NULL], "minItems": 2, "items": {"type": "boolean"}}, [[None, True]], [[None]]),
        ({"contains": NULL}, [[1, None], [None]], [[], [1]]),
        ({"contains": NULL, "minContains": 2, "maxContains": 3}, [[None, 1, None]], [[None], [None] * 4]),
        ({"contains": NULL, "minContains": 0}, [[], [1]], []),
        ({"contains": NULL, "items": {"type": ["null", "boolean"]}, "maxItems": 3},
         [[True, None]], [[True], [None] * 4]),
        ({"allOf": [{"contains": NULL}, {"contains": {"const": 1}}]}, [[1, None], [None, 2, 1]], [[1], [None]]),
        ({"items": {"enum": ["a", "ab", 1, 1.0, None]}, "uniqueItems": True},
         [["ab", "a", 1, None], []], [["a", "a"]]),
        ({"items": {"type": "boolean"}, "uniqueItems": True, "minItems": 2},
         [[True, False], [False, True]], [[True, True]]),
        ({"items": TEXT, "uniqueItems": True}, [["b", "a"], ["ab", "", "1"]], [["a", "a"]]),
        ({"items": {"type": "number"}, "uniqueItems": True},
         [[1, 2, -1], [0.5, 12, 0.0][:2]], [[1, 1], [1, 1.0]]),
        ({"prefixItems": [NULL], "unevaluatedItems": False}, [[], [None]], [[None, 1]]),
        ({"contains": NULL, "unevaluatedItems": {"type": "integer"}}, [[None, 1]], [[None, "a"]]),
        ({"const": [1, {"a": [True]}]}, [[1, {"a": [True]}]], [[1], [1, {"a": [False]}], []]),
    ],
)  # fmt: skip
def test_arrays_keep_their_meaning(checker, schema, valid, invalid):
    checker.check({"type": "array", **schema}, valid, invalid)


def test_unique_objects_differ_in_a_property(checker):
    item = {"type": "object", "properties": {"n": NULL, "name": TEXT}, "required": ["name"]}
    item |= {"additionalProperties": False}
    schema = {"type": "array", "items": item, "uniqueItems": True, "minItems": 2}
    checker.check(
        schema, [[{"name": "a"}, {"n": None, "name": "b"}]], [[{"name": "a"}, {"name": "a"}]]
    )


@each(
    "schema, reason",
    [
        (
            {"items": {"type": "array"}, "uniqueItems": True, "minItems": 2},
            "only 1 can be told apart",
        ),
        (
            {"items": {"type": "object"}, "uniqueItems": True, "minItems": 2},
            "only 1 can be told apart",
        ),
        ({"items": TEXT, "uniqueItems": True, "minItems": 100}, "only 37 can be told apart"),
        ({"items": TEXT, "minItems": 10**9}, "#/minItems is 1000000000"),
        ({"contains": TEXT, "minContains": 200, "maxItems": 400}, "#/contains"),
    ],
)
def test_what_can_not_be_counted_is_refused(schema, reason):
    with pytest.raises(ConstraintError, match=reason):
        schema_grammar({"type": "array", **schema})


def test_unique_texts_are_told_apart_by_their_first_letter(checker):
    """The language is narrower than the schema: this is the price of a grammar."""
    matcher = checker.matcher({"type": "array", "items": TEXT, "uniqueItems": True})
    assert not checker.has(matcher, ["ab", "ac"])
    assert not checker.has(matcher, ["ab", "Ac"])
    assert json.loads(checker.text({"const": [1]})) == [1]
