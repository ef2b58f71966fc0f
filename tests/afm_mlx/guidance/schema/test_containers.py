"""Arrays and objects: items, properties and their order, counts, and items that must differ."""

import json
from contextlib import suppress

import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.compile import schema_grammar
from tests.tools.cases import each
from tests.tools.constraints import closed
from tests.tools.random_schemas import random_schema

PAIR = closed({"a": {"enum": [1, 2, 3]}, "b": {"type": "boolean"}})
NULL, TEXT = {"type": "null"}, {"type": "string", "maxLength": 4}
NAMED = closed({"n": NULL, "name": TEXT}, ["n"])
BEGUN_ALIKE = ["ab", "ac", "Ac", "", "a"]


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
        ({"items": {"type": "string"}, "uniqueItems": True},
         [BEGUN_ALIKE, BEGUN_ALIKE[::-1]], [["ab", "ac", "ab"]]),
        ({"items": False, "uniqueItems": True}, [[]], [[1]]),
        ({"items": NAMED, "uniqueItems": True, "minItems": 2}, [[{"name": "a"}, {"n": None, "name": "b"}]],
         [[{"name": "a"}, {"name": "a"}]]),
        ({"const": [1, {"a": [True]}]}, [[1, {"a": [True]}]], [[1], [1, {"a": [False]}], []]),
    ],
)  # fmt: skip
def test_arrays_keep_their_meaning(checker, schema, valid, invalid):
    checker.check({"type": "array", **schema}, valid, invalid)


@each(
    "schema",
    [
        {"items": {"enum": ["a", "ab", "b", 1, None]}, "minItems": 5},
        {"items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 10},
        {"items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 5},
        {"items": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 2}, "minItems": 5},
        {"items": {"type": "string", "pattern": "^[a-c]?$"}, "minItems": 4},
        {"items": {"type": "string", "format": "date"}, "minItems": 3},
        {"items": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True}, "minItems": 5},
        {"items": {"type": ["integer", "string", "null"]}, "minItems": 4},
        {"items": PAIR, "minItems": 6},
        {"items": closed({"n": {"type": "number", "minimum": 0, "maximum": 1}, "b": {"enum": ["x", "y"]}}),
         "minItems": 4, "maxItems": 6},
        {"prefixItems": [{"enum": ["a", "b"]}, {"enum": ["a", "b"]}, {"type": "string"}], "minItems": 3},
        {"contains": {"const": "a"}, "items": {"enum": ["a", "b", "c"]}, "minItems": 3},
        {"contains": {"enum": ["a", "b"]}, "minContains": 2, "items": {"type": "string"}, "maxItems": 3},
        {"minItems": 2},
        {"items": {"enum": [{"a": 1, "b": 2}, {"b": 2, "a": 1}]}},
        {"items": {"anyOf": [{"const": {"a": 1, "b": 2}}, {"const": {"b": 2, "a": 1}}, {"const": 3}]},
         "minItems": 2},
        {"prefixItems": [{"enum": [{"a": 1, "b": 2}]}, {"enum": [{"b": 2, "a": 1}, 5]}], "minItems": 2},
        {"items": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 0.03}, "minItems": 4},
    ],
)  # fmt: skip
def test_items_that_must_differ_do_and_never_run_out(checker, schema):
    checker.check({"type": "array", "uniqueItems": True, **schema}, generated=6)


def test_items_of_random_schemas_differ_and_never_run_out(checker, rng):
    for _ in range(12):
        items = {"items": random_schema(rng, 2)}
        if rng.integers(2):
            items["prefixItems"] = [random_schema(rng, 1), random_schema(rng, 1)]
        schema = {"type": "array", "uniqueItems": True, "minItems": int(rng.integers(4)), **items}
        with suppress(ConstraintError):
            checker.check(schema, generated=3)


ABC = {"properties": {"a": NULL, "b": NULL, "c": NULL}, "additionalProperties": False}


@each(
    "schema, valid, invalid",
    [
        (ABC, [{}, {"b": None}, {"a": None, "c": None}], [{"d": None}, {"a": 1}]),
        ({**ABC, "required": ["b"]},
         [{"b": None}, {"a": None, "b": None, "c": None}], [{"a": None, "c": None}]),
        ({**ABC, "minProperties": 2}, [{"a": None, "c": None}], [{"b": None}, {}]),
        ({**ABC, "minProperties": 1, "maxProperties": 2},
         [{"c": None}, {"b": None, "c": None}], [{}, dict.fromkeys("abc")]),
        ({"properties": {"a": NULL}, "maxProperties": 2},
         [{"a": None, "x": 1}, {"x": 1}], [{"a": None, "x": 1, "y": 2}]),
        ({"minProperties": 1}, [{"x": 1}], [{}]),
        ({"required": ["x", "y"]}, [{"x": 1, "y": 2}], [{"x": 1}]),
        ({"properties": {"a": NULL}, "additionalProperties": {"type": "integer"}},
         [{"a": None, "x": 1}], [{"x": None}, {"a": 1}]),
        ({"properties": {"a": False}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"properties": {'"é\n': NULL}}, [{'"é\n': None}], [{'"é\n': 1}]),
        ({"patternProperties": {"^a": NULL}}, [{"ab": None, "b": 1}], [{"ab": 1}]),
        ({"patternProperties": {"^a": {"minimum": 2}, "b$": {"maximum": 4}}},
         [{"ab": 3, "a": 9, "b": 0}], [{"ab": 1}, {"ab": 9}]),
        ({"properties": {"ab": {"minimum": 2}}, "patternProperties": {"^a": {"type": "integer"}}},
         [{"ab": 3}], [{"ab": 2.5}]),
        ({"patternProperties": {"^a": NULL}, "additionalProperties": False}, [{}, {"ab": None}], [{"b": None}]),
        ({"propertyNames": {"maxLength": 2}}, [{"ab": 1}], [{"abc": 1}]),
        ({"propertyNames": {"enum": ["a", "b"]}, "minProperties": 2}, [{"a": 1, "b": 2}], [{"a": 1}, {"c": 1}]),
        ({"properties": {"abc": NULL}, "propertyNames": {"maxLength": 2}}, [{}], [{"abc": None}]),
        ({"allOf": [{"properties": {"a": NULL}}], "unevaluatedProperties": False},
         [{}, {"a": None}], [{"b": 1}]),
        ({"anyOf": [{"properties": {"a": NULL},
         "required": ["a"]}, {"properties": {"b": NULL}}], "unevaluatedProperties": False},
         [{"a": None, "b": None}, {"b": None}, {"a": None}], [{"c": 1}, {"a": 1}]),
        ({"properties": {"a": NULL}, "minProperties": 2}, [{"a": None, "b": 1}], [{"a": None}]),
        ({"const": {"a": [1], "b": {}}}, [{"a": [1], "b": {}}], [{"a": [1]}, {}]),
    ],
)  # fmt: skip
def test_objects_keep_their_meaning(checker, schema, valid, invalid):
    checker.check({"type": "object", **schema}, valid, invalid)


def test_properties_come_in_the_order_of_x_order(checker):
    names = ["d", "a", "c", "b"]
    schema = closed(dict.fromkeys("abcd", NULL))
    assert list(json.loads(checker.text({**schema, "x-order": names}))) == names
    assert list(json.loads(checker.text(schema))) == list("abcd")


def test_a_listed_name_has_one_spelling_only(checker):
    r"""`"\u0061"` is the name `a`, too: it must not come as one that is not listed."""
    matcher = checker.matcher({"type": "object", "properties": {"a": NULL}})
    assert checker._measurement.try_document('{"a": null}', matcher)
    assert not checker._measurement.try_document('{"\\u0061": 1}', matcher)


def test_hundreds_of_properties_compile(checker):
    properties = {f"property_{i}": {"type": "integer", "maximum": i} for i in range(900)}
    schema = {"type": "object", "properties": properties}
    checker.check(schema, [{"property_899": 5}, {}], [{"property_0": 1}], 0)
    with pytest.raises(ConstraintError, match="901 properties may be left out"):
        schema_grammar({"properties": {**properties, "one more": {}}})
