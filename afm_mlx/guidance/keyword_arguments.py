"""Grammars of arguments that are written as keywords: `a="x", b=1` by LFM2, `{a:<|"|>x<|"|>,b:1}` by Gemma 4.

Values under Python's keywords are JSON, and so every schema is honoured. Gemma's strings are not, so there only
schemas without conditions on texts, lists and objects are: others are refused.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from typing import Any

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint, literal, named_grammars

_ANNOTATIONS = (
    "title",
    "description",
    "$schema",
    "$id",
    "$comment",
    "examples",
    "default",
    "x-order",
)
_DEFINITIONS = ("$defs", "definitions")
_SCALARS = ("integer", "number", "boolean", "null")
_DEEPEST = 16  # nesting of schemas


class KeywordArguments:
    """Writes the rules of one tool's arguments.

    Args:
        tool: the tool's name, for errors.
        prefix: begins the names of rules and grammars.
        quote: the Lark of the token around Gemma's strings; pass None for Python's keywords.

    Attributes:
        rules: Lark rules.
        grammars: grammars that the rules use.
    """

    def __init__(self, tool: str, prefix: str, quote: str | None = None) -> None:
        self._tool, self._prefix, self._quote = tool, prefix, quote
        self._definitions: dict[str, Any] = {}
        self.rules: list[str] = []
        self.grammars: list[dict[str, Any]] = []

    def arguments(self, schema: Any) -> str:
        """Return the name of the rule of all arguments.

        Raises:
            ConstraintError: for a schema that can't be honoured.
        """
        given = schema if isinstance(schema, Mapping) else {}
        self._definitions = {key: given[key] for key in _DEFINITIONS if key in given}
        if self._quote is None:
            return self._members(given, "=", ", ", 0)
        return self._object(given, 0)

    def _name(self) -> str:
        return f"{self._prefix}_{len(self.rules)}"

    def _refuse(self, wrong: object) -> ConstraintError:
        return ConstraintError(
            f"The parameters of {shown(self._tool)} have {shown(wrong)}, and this model writes arguments as "
            "keywords: an object with properties is needed, and no other conditions."
        )

    def _members(self, schema: Mapping[str, Any], assign: str, comma: str, depth: int) -> str:
        """Return the name of the rule of an object's properties; optional ones may be left out.

        They come in the schema's order, or sorted for Gemma 4, whose template sorts them.
        """
        properties = schema.get("properties", {})
        known = (
            "type",
            "properties",
            "required",
            "additionalProperties",
            *_ANNOTATIONS,
            *_DEFINITIONS,
        )
        if unknown := [key for key in schema if key not in known]:
            raise self._refuse(unknown[0])
        if schema.get("type", "object") != "object" or not isinstance(properties, Mapping):
            raise self._refuse(schema.get("type"))
        if odd := [n for n in properties if not n.isidentifier() or keyword.iskeyword(n)]:
            raise ConstraintError(
                f"The parameter {shown(odd[0])} of {shown(self._tool)} can't be written as a keyword. "
                "Rename it."
            )
        required = schema.get("required", ())
        if lacking := [name for name in required if name not in properties]:
            raise ConstraintError(
                f"{shown(self._tool)} requires {shown(lacking[0])}, which has no schema. Add it."
            )
        names = list(properties) if self._quote is None else sorted(properties, key=str.lower)
        values = [self._value(properties[each], depth + 1) for each in names]
        name = self._name()
        # After each parameter, the rest begins with a comma if any was written.
        self.rules += [
            f"{name}: first_{name}_0",
            f'first_{name}_{len(values)}: ""',
            f'more_{name}_{len(values)}: ""',
        ]
        for i, (each, value) in enumerate(zip(names, values, strict=True)):
            one = f"{literal(each + assign)} {value} more_{name}_{i + 1}"
            for state, before in (("first", ""), ("more", literal(comma))):
                skipped = "" if each in required else f" | {state}_{name}_{i + 1}"
                self.rules.append(f"{state}_{name}_{i}: {before} {one}{skipped}")
        return name

    def _object(self, schema: Mapping[str, Any], depth: int) -> str:
        members = self._members(schema, ":", ",", depth)
        name = self._name()
        self.rules.append(f'{name}: "{{" {members} "}}"')
        return name

    def _value(self, schema: Any, depth: int) -> str:
        """Return the Lark of a value."""
        if self._quote is None:
            whole = {**schema, **self._definitions} if isinstance(schema, Mapping) else schema
            return self._json(whole)
        if depth > _DEEPEST:
            raise self._refuse("schemas that nest without an end")
        if not isinstance(schema, Mapping):
            raise self._refuse(schema)
        schema = {key: item for key, item in schema.items() if key not in _ANNOTATIONS}
        if not schema:
            schema = {"type": ["string", *_SCALARS]}
        if choices := self._choices(schema):
            name = self._name()
            self.rules.append("")  # the name is taken
            place = len(self.rules) - 1
            self.rules[place] = f"{name}: " + " | ".join(self._value(c, depth + 1) for c in choices)
            return name
        kind, rest = schema.get("type"), [key for key in schema if key != "type"]
        if isinstance(schema.get("const"), str) and set(rest) == {"const"}:
            return f"{self._quote} {literal(schema['const'])} {self._quote}"
        if kind == "string" and not rest:
            return f"{self._quote} ANY_TEXT {self._quote}"
        if kind in _SCALARS or (set(schema) <= {"const", "type"} and "const" in schema):
            return self._json(schema)
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array" and set(rest) <= {"items"}:
            item = self._value(schema.get("items", {}), depth + 1)
            name = self._name()
            self.rules.append(f'{name}: "[" ({item} ("," {item})*)? "]"')
            return name
        raise self._refuse(next(iter(rest), kind))

    def _choices(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the schemas of which a value has one; empty if there is only this one."""
        if "enum" in schema and set(schema) <= {"enum", "type"}:
            return [{"const": each} for each in schema["enum"]]
        if set(schema) == {"anyOf"}:
            return list(schema["anyOf"])
        if set(schema) == {"$ref"}:
            where, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
            if name not in self._definitions.get(where, {}):
                raise self._refuse(schema["$ref"])
            return [self._definitions[where][name]]
        if isinstance(schema.get("type"), list):
            return [{**schema, "type": each} for each in schema["type"]]
        return []

    def _json(self, schema: Any) -> str:
        name = f"json_{self._prefix}_{len(self.grammars)}"
        self.grammars += named_grammars(Constraint.json_schema(schema).grammar, name)
        return f"@{name}"
