"""Schemas that combine others: allOf, anyOf, oneOf, not, if, dependencies."""

from tests.tools.cases import each

CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
}
DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}},
    "required": ["kind"],
}
BY_KIND = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "x": {"type": "null"}, "y": {"type": "null"}},
    "required": ["kind"],
    "if": {"properties": {"kind": {"const": "a"}}},
    "then": {"required": ["x"]},
    "else": {"properties": {"x": False}},
}
TREE = {"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}}
FLAG = {"type": "object", "properties": {"child": {"$ref": "#/$defs/flag"}}, "required": ["on"]}


@each(
    "schema, valid, invalid",
    [
        # Disjoint by a constant, by type, by required properties.
        ({"oneOf": [CAT, DOG]}, [{"kind": "cat", "lives": 9}, {"kind": "dog"}], [{"kind": "owl"}, {}]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 1], [None, 1.5]),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
        # These overlap: what is of both is of neither.
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, 2.5, "a"][:2], [3, 1.5]),
        ({"oneOf": [{"multipleOf": 2}, {"maximum": 10}]}, [12], [4, 13]),
        ({"oneOf": [{"const": n} for n in ("a", 1, None, 1)]}, ["a", None], [1, "b"]),
        # Formats are annotations: any text is of both.
        ({"oneOf": [{"type": "string", "format": "ipv4"}, {"type": "null"}]}, [None, "127.0.0.1"], [1]),
        ({"not": {"type": ["string", "object", "array"]}}, [1, None, True], ["a", {}, []]),
        ({"type": "string", "not": {"enum": ["a", "b"]}}, ["", "ab", "c"], ["a", "b"]),
        ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6, -1], [3, 4, 5]),
        ({"type": "object", "not": {"required": ["a"]}}, [{}, {"b": 1}], [{"a": 1}]),
        ({"not": {"properties": {"a": {"type": "integer"}}}}, [{"a": "x"}], [{"a": 1}, {}, 5]),
        ({"not": {"not": {"type": "null"}}}, [None], [1]),
        ({"type": "array", "not": {"items": {"type": "null"}}}, [[1], [None, 1]], [[], [None]]),
        ({"type": "object", "not": {"additionalProperties": False, "properties": {"a": {}}}},
         [{"b": 1}], [{}, {"a": 1}]),
        ({"type": "array", "not": {"const": [1]}}, [[], [2], [1, 1]], [[1]]),
        ({"allOf": [{"minimum": 2}, {"maximum": 4}], "type": "integer"}, [2, 4], [1, 5]),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "maxLength": 2}, ["ab", "ba", 3], ["a", "aab"]),
        ({"anyOf": [{"required": ["a"]}, {"maxProperties": 1}], "type": "object"},
         [{"b": 1}, {"a": 1, "b": 1}], [{"b": 1, "c": 1}]),
        (BY_KIND, [{"kind": "a", "x": None}, {"kind": "b"}], [{"kind": "a"}, {"kind": "b", "x": None}]),
        ({"dependentRequired": {"a": ["b"]}, "type": "object"}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"oneOf": [{"const": f"value {i}", "title": f"Value {i}"} for i in range(500)]},
         ["value 0", "value 499"], ["value 500"]),
        # Schemas that each refer to themselves, about one value.
        ({"$defs": {"tree": TREE, "flag": FLAG}, "allOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/flag"}]},
         [{"child": {"on": 1}, "on": 1}, {"on": 2}], [{"child": {}, "on": 1}]),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{}, 5, {"a": 1, "b": 1}], [{"a": 1}]),
    ],
)  # fmt: skip
def test_combinations_keep_their_meaning(checker, schema, valid, invalid):
    checker.check(schema, valid, invalid)
