"""A JSON schema's document: its drafts, what its references stand for, and formulas over its schemas.

`referencing` resolves identifiers, anchors and dynamic scopes by the rules of each draft, and
`jsonschema_specifications` has the metaschemas. `jsonschema` uses both, so a reference means the same where
answers are checked. Nothing is fetched.

A node is one schema of the document; its place is the JSON pointer to it. A formula joins nodes by and, or,
not: what has to hold at one place of an answer. It is a tuple: `TRUE`, `FALSE`, `("node", number, is_positive)`
for a node or its complement, `("and", parts)` or `("or", parts)`. Only nodes are negated. The order of parts
becomes the order of properties.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from jsonschema_specifications import REGISTRY
from referencing import Specification
from referencing.exceptions import CannotDetermineSpecification, Unresolvable
from referencing.jsonschema import (
    DRAFT4,
    DRAFT6,
    DRAFT7,
    DRAFT201909,
    DRAFT202012,
    lookup_recursive_ref,
)

from afm_mlx.errors import ConstraintError, shown

_UNRESOLVED = (
    *(Unresolvable, CannotDetermineSpecification),
    *(ValueError, TypeError, KeyError, AttributeError),
)
MAX_STEPS = 30_000  # most intersections of two cases for one schema: a few seconds
MAX_SECONDS = 8.0  # most seconds of work on one schema
MAX_CASES = 600  # most alternatives of one schema
MAX_DEPTH = 200  # deepest nesting of lists and objects in a schema
MAX_VALUES = 400_000  # most values in a schema
MAX_BITS = 4_000  # most bits of an integer in a schema
MAX_NODES = 6_000  # most schemas in one document

# -- refusals


def refuse(place: str, got: object, reason: str) -> NoReturn:
    """Raise `ConstraintError` for the value at a place; the reason says what is allowed, and what to do."""
    raise ConstraintError(f"The JSON schema can't be honoured: {place} is {shown(got)}; {reason}")


def refuse_at(place: str, reason: str) -> NoReturn:
    """Raise `ConstraintError` for a fault at a place that no single value shows."""
    raise ConstraintError(f"The JSON schema can't be honoured: at {place}, {reason}")


def pointer(place: str, *keys: str | int) -> str:
    """Append keys to a JSON pointer."""
    tokens = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join([place, *tokens])


class CompileBudget:
    """The steps and seconds left for compiling one schema, so that a hostile one ends in a refusal."""

    def __init__(self) -> None:
        self._left = MAX_STEPS
        self._start = time.monotonic()

    def spend(self, place: str, steps: int = 1) -> None:
        """Subtract steps; raise `ConstraintError` if steps or time are used up."""
        if time.monotonic() - self._start > MAX_SECONDS:
            refuse_at(
                place,
                f"compiling takes longer than {MAX_SECONDS:g} s. Give a smaller schema, or simpler patterns.",
            )
        self._left -= steps
        if self._left < 0:
            refuse_at(
                place,
                f"alternatives multiply beyond {MAX_STEPS} steps. Use fewer nested anyOf, oneOf, not, if and "
                "dependencies.",
            )


def check_count(place: str, cases: int) -> None:
    """Raise `ConstraintError` if the schema at `place` has more than `MAX_CASES` alternatives, `cases`."""
    if cases > MAX_CASES:
        refuse_at(
            place,
            f"there are {cases} alternatives, and at most {MAX_CASES} are followed. Use fewer anyOf, oneOf, "
            "not, if and dependencies.",
        )


# -- formulas

Schema = dict[str, Any]
Formula = tuple[Any, ...]
TRUE: Formula = ("true",)
FALSE: Formula = ("false",)


def _joined(kind: str, parts: tuple[Formula, ...], neutral: Formula, absorbing: Formula) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        flat |= dict.fromkeys(part[1] if part[0] == kind else [part])
    flat.pop(neutral, None)
    is_contradictory = kind == "and" and any(
        one[0] == "node" and negation(one) in flat for one in flat
    )
    if absorbing in flat or is_contradictory:
        return absorbing
    return neutral if not flat else next(iter(flat)) if len(flat) == 1 else (kind, tuple(flat))


def conjunction(*parts: Formula) -> Formula:
    """Join formulas by and."""
    return _joined("and", parts, TRUE, FALSE)


def disjunction(*parts: Formula) -> Formula:
    """Join formulas by or."""
    return _joined("or", parts, FALSE, TRUE)


def negation(part: Formula) -> Formula:
    if part in (TRUE, FALSE):
        return FALSE if part == TRUE else TRUE
    if part[0] == "node":
        return ("node", part[1], not part[2])
    inner = [negation(one) for one in part[1]]
    return disjunction(*inner) if part[0] == "and" else conjunction(*inner)


# -- drafts

LATEST = 2020
_NEWEST = 9999
_DIALECT = re.compile(
    r"https?://json-schema\.org/(?:draft-0([3467])|draft/(2019-09|2020-12))/schema#?"
)
_SPECIFICATIONS: dict[int, Specification[Any]] = {
    4: DRAFT4,
    6: DRAFT6,
    7: DRAFT7,
    2019: DRAFT201909,
    2020: DRAFT202012,
}
# First and last draft that has a keyword which is not in all of them.
_SPANS = {
    **dict.fromkeys(["const", "contains", "propertyNames"], (6, _NEWEST)),
    **dict.fromkeys(["if", "then", "else"], (7, _NEWEST)),
    **dict.fromkeys(["dependentRequired", "dependentSchemas"], (2019, _NEWEST)),
    **dict.fromkeys(["minContains", "maxContains"], (2019, _NEWEST)),
    **dict.fromkeys(["unevaluatedItems", "unevaluatedProperties"], (2019, _NEWEST)),
    **dict.fromkeys(["prefixItems", "$dynamicRef"], (2020, _NEWEST)),
    "dependencies": (4, 7),
    "$recursiveRef": (2019, 2019),
    "additionalItems": (4, 2019),
}
# Honoured in drafts that don't know them, too: they only rule documents out.
_HONOURED_ANYWHERE = {
    *("const", "contains", "propertyNames", "if"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
}


def draft_of(schema: object) -> int:
    """Return the draft that a whole schema is written in: 4, 6, 7, 2019 or 2020.

    `$schema` decides. Without it the draft is 2020, unless a form of older drafts is used: a list of `items`
    (7), or a Boolean `exclusiveMinimum` (4).

    Raises:
        ConstraintError: for draft 3.
    """
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is not None:
        found = _DIALECT.fullmatch(named) if isinstance(named, str) else None
        draft = int(found[1] or found[2][:4]) if found else LATEST
        if draft == 3:
            reason = "drafts 4, 6, 7, 2019-09 and 2020-12 are read. Rewrite it in one of them."
            refuse("#/$schema", named, reason)
        return draft
    draft, pending = LATEST, [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            others = ("enum", "const", "default", "examples")
            pending += [inner for key, inner in value.items() if key not in others]
            bounds = (value.get("exclusiveMinimum"), value.get("exclusiveMaximum"))
            if any(isinstance(bound, bool) for bound in bounds):
                return 4
            if isinstance(value.get("items"), list):
                draft = 7
    return draft


def honoured_keywords(schema: Schema, draft: int, *, strictly: bool) -> Schema:
    """Return the keywords of a schema that are honoured, with their values.

    Strictly: the draft's keywords; else also newer and older ones that only rule documents out.
    """
    if draft <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}  # these drafts ignore its neighbours
    found = {}
    for key, value in schema.items():
        first, last = _SPANS.get(key, (4, _NEWEST))
        is_else = key in ("then", "else") and "if" in schema
        if first <= draft <= last or (not strictly and (key in _HONOURED_ANYWHERE or is_else)):
            found[key] = value
    return found


# -- the document


@dataclass(frozen=True, eq=False)
class Node:
    """A schema of a document (`value`), with its JSON pointer and what resolves its references."""

    value: Any
    place: str
    resolver: Any
    draft: int


class Document:
    """A schema with all that it refers to.

    Attributes:
        root: the formula of the whole schema.
        nodes: the schemas that formulas name by number.
        has_unevaluated: True if `unevaluatedProperties` or `unevaluatedItems` is anywhere in it.
        has_unique: True if `uniqueItems` is.

    Raises:
        ConstraintError: if it is not a schema, too large, or too deep.
    """

    def __init__(self, schema: object) -> None:
        schema = dict(schema) if isinstance(schema, Mapping) else schema
        if not isinstance(schema, dict | bool):
            refuse("#", schema, "a schema is an object, true or false.")
        keys = _keys(schema)
        self.has_unevaluated = not keys.isdisjoint({"unevaluatedProperties", "unevaluatedItems"})
        self.has_unique = "uniqueItems" in keys
        dynamic = {"$dynamicRef", "$recursiveRef"}  # metaschemas have them, too
        metaschema = '"$ref": "https://json-schema.org/draft/20'
        self._is_dynamic = not keys.isdisjoint(dynamic) or metaschema in json.dumps(schema)
        self._made: dict[tuple[int, tuple[str | int, ...]], Schema] = {}
        self.nodes: list[Node] = []
        self._numbers: dict[tuple[int | str, tuple[str, ...]], int] = {}
        draft = draft_of(schema)
        _check_identifier(schema, draft, "#")
        resolver = REGISTRY.resolver_with_root(_SPECIFICATIONS[draft].create_resource(schema))
        self.root = self.node(schema, "#", resolver, draft, is_root=True)

    def node(
        self, value: Any, place: str, resolver: Any, draft: int, is_root: bool = False
    ) -> Formula:
        """Add a schema, and return its formula; raise `ConstraintError` if it is not a schema.

        `resolver` and `draft` are the enclosing schema's, unless the schema has its own.
        """
        if value is True:
            return TRUE
        if value is not False and not isinstance(value, dict):
            refuse(place, value, "a schema is an object, true or false.")
        if isinstance(value, dict) and not is_root:
            if _check_identifier(value, draft, place):
                resolver = resolver.in_subresource(_SPECIFICATIONS[draft].create_resource(value))
            if "$schema" in value:
                draft = draft_of(value)
        scope: tuple[str, ...] = ()
        if self._is_dynamic:
            scope = tuple(dict.fromkeys(reversed([uri for uri, _ in resolver.dynamic_scope()])))
        key = (id(value) if value is not False else place, scope)
        number = self._numbers.get(key)
        if number is None:
            if len(self.nodes) >= MAX_NODES:
                reason = f"the document has more than {MAX_NODES} schemas. Give a smaller one."
                refuse(place, value, reason)
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(Node(value, place, resolver, draft))
        return ("node", number, True)

    def below(self, node: Node, *keys: str | int) -> Formula:
        """Return the formula of a schema inside another one."""
        value = node.value
        for key in keys:
            value = value[key]
        return self.node(value, pointer(node.place, *keys), node.resolver, node.draft)

    def made(self, node: Node, schema: Schema, *keys: str | int) -> Formula:
        """Return the formula of a schema that says the same as a keyword; `keys` tell such schemas apart."""
        kept = self._made.setdefault((id(node), keys), schema)
        return self.node(kept, pointer(node.place, *keys[:2]), node.resolver, node.draft)

    def referred(self, node: Node, keyword: str) -> Formula:
        """Return the formula of the schema that a keyword of a node refers to; refuse one that is not there."""
        reference, place = node.value[keyword], pointer(node.place, keyword)
        if not isinstance(reference, str):
            refuse(place, reference, "a reference is a text.")
        try:
            is_recursive = keyword == "$recursiveRef"
            resolver = node.resolver
            found = lookup_recursive_ref(resolver) if is_recursive else resolver.lookup(reference)
        except _UNRESOLVED:
            reason = "no such schema is in the document. Put it below $defs; nothing is fetched."
            refuse(place, reference, reason)
        return self.node(found.contents, reference, found.resolver, node.draft, is_root=True)

    def place(self, formula: Formula) -> str:
        """Return the place of a formula's first node; of a constant formula, the root's."""
        pending = [formula]
        while pending:
            part = pending.pop()
            if part[0] == "node":
                return self.nodes[part[1]].place
            pending += reversed(part[1] if part[1:] else ())
        return "#"


def _keys(schema: object) -> set[str]:
    """Collect all keys in a schema; raise `ConstraintError` if it is too large, too deep, or no JSON."""
    keys: set[str] = set()
    level: list[Any] = [schema]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _check_plain(key if isinstance(key, str) else (key,))
                keys.update(value)
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            else:
                _check_plain(value)
        count += len(inner)
        if count > MAX_VALUES:
            refuse("#", schema, f"it has more than {MAX_VALUES} values. Give a smaller schema.")
        if not inner:
            return keys
        level = inner
    refuse("#", schema, f"it is nested more than {MAX_DEPTH} levels deep. Give a flatter schema.")


def _check_plain(value: object) -> None:
    """Raise `ConstraintError` for a value that no JSON text can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            refuse("#", value, "it has half of a surrogate pair, which JSON can't hold.")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse("#", value, "JSON has no such number.")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        refuse("#", value, f"integers have {MAX_BITS} bits at most.")
    elif value is not None and not isinstance(value, bool | int | float):
        reason = (
            "a schema consists of what JSON has: objects with texts as keys, lists, texts, numbers."
        )
        refuse("#", value, reason)


def _check_identifier(schema: object, draft: int, place: str) -> bool:
    """True if a schema has an identifier by its draft's rules; raise `ConstraintError` if that is no text."""
    key = "id" if draft == 4 else "$id"
    if not isinstance(schema, dict) or key not in schema or (draft <= 7 and "$ref" in schema):
        return False
    if not isinstance(schema[key], str):
        refuse(pointer(place, key), schema[key], "an identifier is a text.")
    return True
