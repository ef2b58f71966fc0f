"""References, drafts, and what is refused."""

import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.compile import schema_grammar
from tests.tools.cases import each

DRAFT = "http://json-schema.org/draft-0{}/schema#"
NULL, ARRAY = {"type": "null"}, {"type": "array"}
UNIQUE = {**ARRAY, "uniqueItems": True}
TEXT = {"type": "string", "maxLength": 4}


@each(
    "schema, valid, invalid",
    [
        ({"$defs": {"a~b/c": NULL}, "$ref": "#/$defs/a~0b~1c"}, [None], [1]),
        ({"$defs": {"x": {"$anchor": "here", **NULL}}, "$ref": "#here"}, [None], [1]),
        ({"$id": "http://a/b", "$defs": {"x": {"$id": "c", "$defs": {"y": NULL}, "$ref": "#/$defs/y"}},
         "$ref": "c"}, [None], [1]),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}, "minimum": 3}, [3], [2, "a"]),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False},
         [{"n": {"n": {}}}], [{"n": 1}]),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, [True, {"type": "null"}], [1, {"type": 1}]),
        ({"$id": "http://a/tree", "$dynamicAnchor": "node", "type": "array", "items": {"$dynamicRef": "#node"}},
         [[], [[]]], [[1]]),
        ({"$schema": DRAFT.format(7), "$ref": "#/definitions/x", "minimum": 5, "definitions": {"x": NULL}},
         [None], ["a"]),
        ({"$schema": DRAFT.format(7), "items": [NULL], "additionalItems": False},
         [[], [None], 5], [[1], [None, 1]]),
        ({"$schema": DRAFT.format(7), "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
         [{}, {"a": 1, "b": 1}], [{"a": 1}, {"c": 1}]),
        ({"$schema": DRAFT.format(4), "minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
        ({"$schema": DRAFT.format(4), "id": "http://a/b", "definitions": {"x": NULL},
         "items": {"$ref": "b#/definitions/x"}}, [[None]], [[1]]),
        # Without $schema, by forms that only older drafts have.
        ({"minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
        ({"type": "array", "items": [NULL], "additionalItems": False}, [[None]], [[1]]),
        # Draft 4 has no const: honoured, as that rules documents out, but it is no reason to be invalid.
        ({"$schema": DRAFT.format(4), "type": "integer", "const": 3}, [3], []),
    ],
)  # fmt: skip
def test_references_and_drafts_keep_their_meaning(checker, schema, valid, invalid):
    checker.check(schema, valid, invalid)


@each(
    "schema, reason",
    [
        ({"$ref": "#"}, "at #, a schema refers to itself without an end"),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$ref": "#/$defs/a"},
         "at #/\\$defs/a, a schema refers"),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "without an end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "without an end"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "#/properties/a/\\$ref is '#/\\$defs/x'"),
        ({"$ref": "http://example.com/schema"}, "nothing is fetched"),
        ({"$schema": DRAFT.format(3), "type": "string"}, "#/\\$schema"),
        (False, "at #, no document can be valid"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "at #/properties/a, no document"),
        ({"properties": {"a": {"enum": []}}}, r"#/properties/a/enum is \[\]"),
        ({"properties": {"a/b": {"type": "text"}}}, "#/properties/a~1b/type is 'text'"),
        ({"type": "object", "x-order": "a"}, "#/x-order is 'a'"),
        ({"required": "a"}, "#/required is 'a'"),
        ({"anyOf": []}, "#/anyOf is"),
        ({"items": 5}, "#/items is 5"),
        # Strings and numbers.
        ({"type": "number", "multipleOf": 1e-12}, "#/multipleOf is 1e-12"),
        ({"type": "integer", "minimum": 10**400}, "310 digits at most"),
        ({"type": "string", "format": "date", "pattern": "^x"}, "no document can be valid"),
        ({"type": "string", "minLength": 10**9}, "#/minLength is 1000000000"),
        ({"type": "string", "pattern": "(a"}, r"#/pattern is '\(a'"),
        ({"type": "string", "pattern": r"(a)\1"}, "back-reference"),
        ({"type": "string", "pattern": r"\bword"}, "word border"),
        ({"type": "string", "pattern": "(?<=a)b"}, "look-behind"),
        ({"type": "string", "pattern": "^a$", "minLength": 2}, "no document can be valid"),
        # Arrays and objects.
        ({**UNIQUE, "items": {"enum": [[1], [1.0]]}, "minItems": 2}, "only 1 items can differ"),
        ({**UNIQUE, "items": {"pattern": "^[ab]$", "type": "string"}, "minItems": 3}, "only 2 items"),
        ({**UNIQUE, "prefixItems": [{"const": 1}, {"const": 1.0}], "minItems": 2}, "only 1 items"),
        ({**ARRAY, "items": TEXT, "minItems": 10**9}, "#/minItems is 1000000000"),
        ({**ARRAY, "contains": TEXT, "minContains": 200, "maxItems": 400}, "#/contains"),
        # Names that are not listed might come twice, and then there is one property less.
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
    ],
)  # fmt: skip
def test_what_can_not_be_honoured_is_refused(schema, reason):
    with pytest.raises(ConstraintError, match=reason):
        schema_grammar(schema)


def test_options_of_llguidance_in_a_schema_do_nothing():
    schema = {"type": "array", "items": NULL}
    options = {"x-guidance": {"lenient": True, "item_separator": ";"}}
    assert schema_grammar({**schema, **options}) == schema_grammar(schema)
