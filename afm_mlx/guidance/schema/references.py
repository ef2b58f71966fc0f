"""The schemas of a document: their places, their drafts, and what their references stand for.

`referencing` finds identifiers, anchors and dynamic scopes by the rules of each draft, and
`jsonschema_specifications` holds the metaschemas: jsonschema's own parts, so that a reference means the same
where answers are checked. Nothing is ever fetched.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

from afm_mlx.guidance.schema.drafts import LATEST, dialect
from afm_mlx.guidance.schema.formulas import TRUE, Formula, first_node
from afm_mlx.guidance.schema.refusals import pointer, refuse

MAX_DEPTH = 200
"""Levels of lists and objects in a schema at most."""
MAX_VALUES = 400_000
"""Values in a schema at most."""
MAX_BITS = 4_000
"""Bits of an integer in a schema at most."""
MAX_NODES = 6_000
"""Schemas that are looked at in one document at most."""
_SPECIFICATIONS: dict[int, Specification[Any]] = {
    4: DRAFT4,
    6: DRAFT6,
    7: DRAFT7,
    2019: DRAFT201909,
    2020: DRAFT202012,
}


@dataclass(frozen=True, eq=False)
class Node:
    """A schema at its place.

    Attributes:
        value: the schema.
        place: where it is, as a JSON pointer.
        resolver: resolves its references.
        draft: what it is written in.
    """

    value: Any
    place: str
    resolver: Any
    draft: int


class Document:
    """A schema with all that it refers to.

    Args:
        schema: a JSON value.

    Attributes:
        root: the formula of the whole schema.
        has_unevaluated: whether `unevaluatedProperties` or `unevaluatedItems` is anywhere in it.
        has_unique: whether `uniqueItems` is.

    Raises:
        ConstraintError: when it is no schema, too large, or too deep.
    """

    def __init__(self, schema: Any) -> None:
        schema = dict(schema) if isinstance(schema, Mapping) else schema
        if not isinstance(schema, dict | bool):
            refuse("#", schema, "a schema is an object, true or false.")
        keys = _keys(schema)
        self.has_unevaluated = not keys.isdisjoint({"unevaluatedProperties", "unevaluatedItems"})
        self.has_unique = "uniqueItems" in keys
        self._is_dynamic = not keys.isdisjoint(
            {"$dynamicRef", "$recursiveRef"}
        ) or _is_metaschema_used(schema)
        self._made: dict[Any, Any] = {}
        self.nodes: list[Node] = []
        self._numbers: dict[Any, int] = {}
        self._referred: dict[tuple[int, str], Formula] = {}
        draft = dialect(schema)
        _check_identifier(schema, draft, "#")
        resource = _SPECIFICATIONS[draft].create_resource(schema)
        self._resolver = REGISTRY.resolver_with_root(resource)
        self.root = self.node(schema, "#", self._resolver, draft, is_root=True)

    def node(
        self, value: Any, place: str, resolver: Any, draft: int, is_root: bool = False
    ) -> Formula:
        """The formula of a schema.

        Raises:
            ConstraintError: when the value is no schema.
        """
        if value is True:
            return TRUE
        if value is not False and not isinstance(value, dict):
            refuse(place, value, "a schema is an object, true or false.")
        if isinstance(value, dict) and not is_root:
            if _check_identifier(value, draft, place):
                resolver = resolver.in_subresource(_SPECIFICATIONS[draft].create_resource(value))
            if "$schema" in value:
                draft = dialect(value)
        key_ = (id(value) if value is not False else place, self._scope(resolver))
        number = self._numbers.get(key_)
        if number is None:
            if len(self.nodes) >= MAX_NODES:
                refuse(
                    place,
                    value,
                    f"it is the schema after {MAX_NODES} others; no more are looked at.",
                )
            number = self._numbers[key_] = len(self.nodes)
            self.nodes.append(Node(value, place, resolver, draft))
        return ("node", number, True)

    def below(self, node: Node, *keys: str | int) -> Formula:
        """The formula of a schema inside another one."""
        value = node.value
        for key in keys:
            value = value[key]
        return self.node(value, pointer(node.place, *keys), node.resolver, node.draft)

    def made(self, node: Node, schema: Any, *keys: str | int) -> Formula:
        """The formula of a schema that says the same as keywords of another one, at their place.

        Args:
            node: the other schema.
            schema: what is said; of the same node and keys it is always the same.
            keys: of the keywords.
        """
        kept = self._made.setdefault((id(node), keys), schema)
        return self.node(kept, pointer(node.place, *keys[:2]), node.resolver, node.draft)

    def own(self, schema: dict[str, Any]) -> Formula:
        """The formula of a schema that is not of the document."""
        key = json.dumps(schema)
        kept = self._made.setdefault(key, schema)
        return self.node(kept, "#", self._resolver, LATEST)

    def referred(self, node: Node, keyword: str) -> Formula:
        """The formula of what a node refers to.

        Raises:
            ConstraintError: when there is no such schema.
        """
        reference, place = node.value[keyword], pointer(node.place, keyword)
        if not isinstance(reference, str):
            refuse(place, reference, "a reference is a text.")
        try:
            if keyword == "$recursiveRef":
                found = lookup_recursive_ref(node.resolver)
            else:
                found = node.resolver.lookup(reference)
        except (
            Unresolvable,
            CannotDetermineSpecification,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ):
            refuse(
                place,
                reference,
                "no such schema is in the document. Put it below $defs; nothing is fetched.",
            )
        return self.node(found.contents, reference, found.resolver, node.draft, is_root=True)

    def place(self, formula: Formula) -> str:
        """Where a formula comes from."""
        number = first_node(formula)
        return "#" if number is None else self.nodes[number].place

    def _scope(self, resolver: Any) -> tuple[str, ...]:
        if not self._is_dynamic:
            return ()
        return tuple(dict.fromkeys(reversed([uri for uri, _ in resolver.dynamic_scope()])))


def _keys(schema: Any) -> set[str]:
    """All keys in a schema, which is bounded by the way."""
    keys: set[str] = set()
    level, count = [schema], 0
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


def _check_plain(value: Any) -> None:
    """Raise for what no JSON text can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            refuse("#", value, "it has half of a surrogate pair, which is no text.")
    elif isinstance(value, float) and not math.isfinite(value):
        refuse("#", value, "JSON has no such number.")
    elif isinstance(value, int) and value.bit_length() > MAX_BITS:
        refuse("#", value, f"integers have {MAX_BITS} bits at most.")
    elif value is not None and not isinstance(value, bool | int | float):
        refuse(
            "#",
            value,
            "a schema consists of what JSON has: objects with texts as keys, lists, texts, numbers.",
        )


def _check_identifier(schema: Any, draft: int, place: str) -> bool:
    """True if a schema has an identifier of its own."""
    key = "id" if draft == 4 else "$id"
    if not isinstance(schema, dict) or key not in schema or (draft <= 7 and "$ref" in schema):
        return False
    if not isinstance(schema[key], str):
        refuse(pointer(place, key), schema[key], "an identifier is a text.")
    return True


def _is_metaschema_used(schema: Any) -> bool:
    """True if a reference goes to a metaschema, which has dynamic references."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "json-schema.org/draft/20" in str(value.get("$ref", "")):
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False
