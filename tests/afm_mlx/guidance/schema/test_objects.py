"""Objects: the order of their properties, the names that are not listed, and counts."""

import json

import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.compile import schema_grammar
from tests.tools.cases import each

NULL = {"type": "null"}
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
        ({"const": {"a": [1], "b": {}}}, [{"a": [1], "b": {}}], [{"a": [1]}, {}]),
    ],
)  # fmt: skip
def test_objects_keep_their_meaning(checker, schema, valid, invalid):
    checker.check({"type": "object", **schema}, valid, invalid)


def test_properties_come_in_the_order_of_x_order(checker):
    names = ["d", "a", "c", "b"]
    schema = {"type": "object", "properties": dict.fromkeys("abcd", NULL), "required": list("abcd")}
    schema |= {"additionalProperties": False}
    assert list(json.loads(checker.text({**schema, "x-order": names}))) == names
    assert list(json.loads(checker.text(schema))) == list("abcd")


def test_a_listed_name_has_one_spelling_only(checker):
    r"""`"\u0061"` is the name `a`, too: it must not come as one that is not listed."""
    matcher = checker.matcher({"type": "object", "properties": {"a": NULL}})
    assert checker._measurement.try_document('{"a": null}', matcher)
    assert not checker._measurement.try_document('{"\\u0061": 1}', matcher)


def test_two_properties_at_least_need_names_that_can_not_be_equal(checker):
    """Names that are not listed might come twice, and then there is one property less."""
    with pytest.raises(ConstraintError, match="#/minProperties"):
        schema_grammar({"type": "object", "minProperties": 2})
    schema = {"type": "object", "properties": {"a": NULL}, "minProperties": 2}
    checker.check(schema, [{"a": None, "b": 1}], [{"a": None}])


def test_hundreds_of_properties_compile(checker):
    properties = {f"property_{i}": {"type": "integer", "maximum": i} for i in range(900)}
    schema = {"type": "object", "properties": properties}
    checker.check(schema, [{"property_899": 5}, {}], [{"property_0": 1}], 0)
    with pytest.raises(ConstraintError, match="901 properties may be left out"):
        schema_grammar({"properties": {**properties, "one more": {}}})
