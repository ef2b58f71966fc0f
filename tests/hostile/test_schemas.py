"""JSON schemas that are huge, deep, multiply, never end, or are none."""

import copy
import json
import threading
from contextlib import suppress

import pytest

from afm_mlx.errors import AFMError, ConstraintError
from afm_mlx.guidance.schema import references
from afm_mlx.guidance.schema.compile import schema_grammar
from tests.hostile.harness import Case, run_cases
from tests.tools.random_schemas import random_document, random_schema

TEXT = {"type": "string"}
NAMES = [f"p{i}" for i in range(40)]
KEYWORDS = "allOf anyOf oneOf not items properties if contains $defs dependentSchemas".split()


def nested(keyword, depth, rng):
    schema = random_schema(rng, 1)
    for _ in range(depth):
        if keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
            schema = {keyword: [schema]}
        elif keyword in ("properties", "patternProperties", "dependentSchemas", "$defs"):
            schema = {keyword: {"a": schema}}
        else:
            schema = {keyword: schema}
    return schema


def product(size, rng):
    keyword = str(rng.choice(["anyOf", "oneOf"]))
    options = [[{"required": [str(rng.choice(NAMES))]} for _ in range(5)] for _ in range(size)]
    return {"type": "object", "allOf": [{keyword: one} for one in options]}


def overlapping(size, rng):
    return {"oneOf": [random_schema(rng, 2) for _ in range(size)]}


def dependent(size, rng):
    kind = str(rng.choice(["dependentRequired", "dependencies", "if"]))
    if kind != "if":
        return {"type": "object", kind: {name: [str(rng.choice(NAMES))] for name in NAMES[:size]}}
    conditions = [{"if": {"required": [n]}, "then": {"required": [n + "x"]}} for n in NAMES[:size]]
    return {"allOf": conditions}


def referring(size, rng):
    """Definitions that refer to each other in every way."""

    def reference():
        return {"$ref": f"#/$defs/d{rng.integers(size)}"}

    def definition():
        kind = int(rng.integers(5))
        if kind == 0:
            return {"allOf": [reference(), reference()]}
        if kind == 1:
            return {"anyOf": [reference(), {"type": "null"}], "not": reference()}
        if kind == 2:
            return {"type": "array", "items": reference(), "minItems": int(rng.integers(3))}
        joined = {"x": {"allOf": [reference(), reference()]}, "y": reference()}
        return {"type": "object", "properties": joined, "required": ["x"][: rng.integers(2)]}

    return {"$defs": {f"d{i}": definition() for i in range(size)}, "$ref": "#/$defs/d0"}


def chained(size, rng):
    key = str(rng.choice(["in place", "properties", "items"]))
    wrap = {
        "properties": lambda r: {"properties": {"a": r}, "required": ["a"]},
        "items": lambda r: {"items": r},
    }
    next_one = [wrap.get(key, dict)({"$ref": f"#/$defs/d{i + 1}"}) for i in range(size)]
    return {
        "$defs": {f"d{i}": one for i, one in enumerate(next_one)} | {f"d{size}": {}},
        "$ref": "#/$defs/d0",
    }


def counted(size, rng):
    keys = "minItems maxItems minLength maxLength minProperties maxProperties minContains".split()
    keys += "maxContains minimum maximum exclusiveMinimum multipleOf".split()
    values = [size, 10**9, 2**63, 10**30, 10**400, 1e308, 1e-308, -1, 0.1, "1", None, True, []]
    values.append(float("nan"))
    schema = {str(key): values[rng.integers(len(values))] for key in rng.choice(keys, 3)}
    properties = dict.fromkeys(NAMES, True)
    return schema | {"contains": TEXT, "uniqueItems": True, "properties": properties}


def patterned(size, rng):
    patterns = r"^(a+)+$ (x+x+)+y ^(?:a|b)*a(?:a|b){60}$ ((a{1,99}){1,99}){1,99} a{99999}".split()
    patterns += r"^(?:(?!b).)*$ \p{L} (?<n>a)\k<n>".split()
    patterns += ["(?!a)" * 50, "(" * 500, "[" + "a-z" * 900, ".*" * 60, "a|" * 2000]
    chosen = rng.choice(patterns, 3)
    names = {f"{pattern}{i}": {"minLength": i} for i, pattern in enumerate(chosen)}
    return {
        "pattern": str(chosen[0]),
        "not": {"pattern": str(chosen[1])},
        "maxLength": size,
        "patternProperties": names,
    }


def wide(size, rng):
    kind = int(rng.integers(4))
    if kind == 0:
        return {"enum": [f"value {i}" for i in range(100 * size)]}
    if kind == 1:
        return {
            "properties": {f"a{i}": {"type": "integer", "minimum": i} for i in range(20 * size)}
        }
    if kind == 2:
        return {"enum": [{"a": i, "b": [i]} for i in range(size)], "description": "x" * 10**6}
    constants = [{"const": i} for i in range(10 * size)]
    return {"oneOf": constants, "uniqueItems": True, "required": NAMES}


KINDS = [product, overlapping, dependent, referring, chained, counted, patterned, wide]


def damaged(schema, rng):
    schema = copy.deepcopy(schema)
    holders, pending = [], [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict | list) and value:
            holders.append(value)
            pending += value.values() if isinstance(value, dict) else value
    if not holders:
        return schema
    holder = holders[rng.integers(len(holders))]
    keys = list(holder) if isinstance(holder, dict) else range(len(holder))
    wrong = [
        None,
        5,
        -1,
        "",
        "\ud800",
        [],
        {},
        [[]],
        {"$ref": "#"},
        True,
        float("inf"),
        (1,),
        {1: 2},
    ]
    wrong.append({"$id": 5})
    holder[keys[rng.integers(len(keys))]] = wrong[rng.integers(len(wrong))]
    return schema


def draw_case(rng) -> Case:
    kind = int(rng.integers(4))
    if kind == 0:
        schema = nested(str(rng.choice(KEYWORDS)), int(rng.choice([5, 40, 90, 500, 10_000])), rng)
    elif kind == 1:
        schema = damaged(random_schema(rng), rng)
    elif kind == 2:
        schema = KINDS[rng.integers(len(KINDS))](int(rng.choice([3, 12, 40, 150])), rng)
    else:
        schema = damaged(KINDS[rng.integers(len(KINDS))](3, rng), rng)
    return Case(shown(schema), lambda: schema_grammar(schema))


def shown(schema) -> str:
    try:
        return json.dumps(schema)
    except (RecursionError, TypeError, ValueError):
        return f"a {type(schema).__name__} that is no JSON, or too deep"


def test_hostile_schemas(rng):
    run_cases(draw_case, rng, 0.05)


def test_schemas_compile_in_a_thread_with_little_stack_left(rng):
    """A server's threads have called each other some hundred deep when they come to a schema."""
    schemas = [
        nested(key, n, rng) for key, n in {"allOf": 45, "properties": 90, "items": 190}.items()
    ]
    schemas += [chained(300, rng), chained(49, rng), referring(30, rng)]
    schemas.append({"const": random_document(rng, 6)})
    ended = []

    def compile_at(depth, schema):
        if depth:
            return compile_at(depth - 1, schema)
        with suppress(AFMError):
            schema_grammar(schema)
        return ended.append(schema)

    for schema in schemas:
        thread = threading.Thread(target=compile_at, args=(300, schema))
        thread.start()
        thread.join()
    assert len(ended) == len(schemas)


def test_a_schema_that_takes_too_long_is_refused(monkeypatch, rng):
    monkeypatch.setattr(references, "MAX_SECONDS", 0.0)
    with pytest.raises(ConstraintError, match="compiling takes longer than 0 s"):
        schema_grammar(product(12, rng))
