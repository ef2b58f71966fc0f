"""Random JSON schemas and documents, small ones, in which every keyword meets every other."""

from __future__ import annotations

from typing import Any

import numpy as np

NAMES = ["a", "b", "ab", "x-1"]
PATTERNS = ["^a", "b$", "^x-", "^[ab]{1,2}$", "1", "^(?!a)"]
TEXTS = ["", "a", "b", "ab", "aab", "x-1", "é", "long text"]
NUMBERS = [0, 1, -1, 2, 3, 1.5, -0.5, 10]
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def random_document(rng: np.random.Generator, depth: int = 2) -> Any:
    """A JSON value of random type."""
    kind = int(rng.integers(7 if depth else 5))
    if kind < 5:
        plain = [None, bool(rng.integers(2)), *rng.choice(NUMBERS, 2).tolist()]
        value = [*plain, str(rng.choice(TEXTS))][kind]
        return int(value) if isinstance(value, float) and value.is_integer() else value
    if kind == 5:
        return [random_document(rng, depth - 1) for _ in range(rng.integers(4))]
    names = sorted(rng.choice(NAMES, int(rng.integers(4)), replace=False).tolist(), key=NAMES.index)
    return {name: random_document(rng, depth - 1) for name in names}


def random_schema(rng: np.random.Generator, depth: int = 3) -> Any:
    """A schema of draft 2020-12 with up to four keywords, mostly of one type."""
    if depth == 0 or rng.random() < 0.08:
        return [True, {}, {"type": str(rng.choice(TYPES))}, {"const": random_document(rng, 1)}][
            int(rng.integers(4))
        ]
    schema: dict[str, Any] = {}
    if rng.random() < 0.7:
        schema["type"] = str(rng.choice(TYPES))
    keywords = list(_KEYWORDS)
    for key in rng.choice(keywords, int(rng.integers(1, 5)), replace=False):
        schema[str(key)] = _KEYWORDS[str(key)](rng, depth - 1)
    return schema


def _some(rng: np.random.Generator, values: list[Any], low: int = 1, high: int = 3) -> list[Any]:
    return rng.choice(values, int(rng.integers(low, high)), replace=False).tolist()


def _schemas(rng: np.random.Generator, depth: int) -> list[Any]:
    return [random_schema(rng, depth) for _ in range(rng.integers(1, 4))]


def _properties(rng: np.random.Generator, depth: int, names: list[str] = NAMES) -> dict[str, Any]:
    return {name: random_schema(rng, depth) for name in _some(rng, names, 1, 4)}


_KEYWORDS = {
    "minimum": lambda rng, depth: int(rng.integers(-2, 3)),
    "exclusiveMaximum": lambda rng, depth: int(rng.integers(-1, 5)),
    "multipleOf": lambda rng, depth: int(rng.integers(1, 4)),
    "minLength": lambda rng, depth: int(rng.integers(3)),
    "maxLength": lambda rng, depth: int(rng.integers(4)),
    "pattern": lambda rng, depth: str(rng.choice(PATTERNS)),
    "enum": lambda rng, depth: [random_document(rng, 1) for _ in range(rng.integers(1, 5))],
    "prefixItems": _schemas,
    "items": random_schema,
    "minItems": lambda rng, depth: int(rng.integers(3)),
    "maxItems": lambda rng, depth: int(rng.integers(4)),
    "uniqueItems": lambda rng, depth: True,
    "contains": random_schema,
    "maxContains": lambda rng, depth: int(rng.integers(1, 3)),
    "minContains": lambda rng, depth: int(rng.integers(3)),
    "unevaluatedItems": random_schema,
    "properties": _properties,
    "patternProperties": lambda rng, depth: _properties(rng, depth, PATTERNS),
    "additionalProperties": lambda rng, depth: bool(rng.integers(2)) and random_schema(rng, depth),
    "unevaluatedProperties": lambda rng, depth: bool(rng.integers(2)) and random_schema(rng, depth),
    "required": lambda rng, depth: _some(rng, NAMES),
    "minProperties": lambda rng, depth: int(rng.integers(3)),
    "maxProperties": lambda rng, depth: int(rng.integers(1, 4)),
    "propertyNames": lambda rng, depth: {"pattern": str(rng.choice(PATTERNS))},
    "dependentRequired": lambda rng, depth: {str(rng.choice(NAMES)): _some(rng, NAMES)},
    "dependentSchemas": lambda rng, depth: _properties(rng, depth),
    "allOf": _schemas,
    "anyOf": _schemas,
    "oneOf": _schemas,
    "not": random_schema,
    "if": random_schema,
    "then": random_schema,
    "else": random_schema,
}


def in_draft(schema: Any, draft: int) -> Any:
    """A schema of draft 2020-12 in the spelling of an older one; what that draft lacks stays as it is."""
    if isinstance(schema, list):
        return [in_draft(one, draft) for one in schema]
    if not isinstance(schema, dict):
        is_spelled = draft == 4 and isinstance(schema, bool)
        return schema if not is_spelled else {} if schema else {"not": {}}
    values = ("enum", "const", "required", "dependentRequired")
    schema = {
        key: value if key in values else in_draft(value, draft)
        for key, value in schema.items()
        if not (draft <= 7 and key.startswith("unevaluated"))
    }
    if draft < 2020 and "prefixItems" in schema:
        schema["additionalItems"] = schema.get("items", {})
        schema["items"] = schema.pop("prefixItems")
    if draft <= 7:
        dependencies = schema.pop("dependentRequired", {}) | schema.pop("dependentSchemas", {})
        schema |= {"dependencies": dependencies} if dependencies else {}
    if draft == 4 and "exclusiveMaximum" in schema:
        schema |= {"maximum": schema["exclusiveMaximum"], "exclusiveMaximum": True}
    return schema
