"""Drafts of JSON Schema: which one a schema is written in, and which keywords that has.

`$schema` decides. Without it the draft is 2020-12, unless the schema uses a form that only older drafts allow:
an array of `items`, or a Boolean `exclusiveMinimum`.
"""

from __future__ import annotations

import re
from typing import Any

from afm_mlx.guidance.schema.refusals import refuse

LATEST = 2020
_NEWEST = 9999
_DIALECT = re.compile(
    r"https?://json-schema\.org/(?:draft-0([3467])|draft/(2019-09|2020-12))/schema#?"
)

# First and last draft that has a keyword which is not in all of them.
_SPANS = {
    "const": (6, _NEWEST),
    "contains": (6, _NEWEST),
    "propertyNames": (6, _NEWEST),
    "if": (7, _NEWEST),
    "then": (7, _NEWEST),
    "else": (7, _NEWEST),
    "dependencies": (4, 7),
    "dependentRequired": (2019, _NEWEST),
    "dependentSchemas": (2019, _NEWEST),
    "minContains": (2019, _NEWEST),
    "maxContains": (2019, _NEWEST),
    "unevaluatedItems": (2019, _NEWEST),
    "unevaluatedProperties": (2019, _NEWEST),
    "$recursiveRef": (2019, 2019),
    "prefixItems": (2020, _NEWEST),
    "$dynamicRef": (2020, _NEWEST),
    "additionalItems": (4, 2019),
}
# What these say does no harm in a draft that does not know them: fewer documents are valid.
_HONOURED_ANYWHERE = {"const", "contains", "propertyNames", "if", "dependencies"} | {
    "dependentRequired",
    "dependentSchemas",
}


def dialect(schema: Any) -> int:
    """The draft of a whole schema: 4, 6, 7, 2019 or 2020.

    Raises:
        ConstraintError: for draft 3.
    """
    named = schema.get("$schema") if isinstance(schema, dict) else None
    found = _DIALECT.fullmatch(named) if isinstance(named, str) else None
    if found is None:
        return _guessed(schema) if named is None else LATEST
    draft = int(found[1] or found[2][:4])
    if draft == 3:
        refuse(
            "#/$schema",
            named,
            "drafts 4, 6, 7, 2019-09 and 2020-12 are read. Rewrite it in one of them.",
        )
    return draft


def has_keyword(draft: int, keyword: str) -> bool:
    """True if a draft gives a keyword a meaning."""
    first, last = _SPANS.get(keyword, (4, _NEWEST))
    return first <= draft <= last


def known(schema: dict[str, Any], draft: int, *, strictly: bool) -> dict[str, Any]:
    """The keywords of a schema that are to be honoured.

    Args:
        schema: as it is written. draft: what it is written in. strictly: only those that the draft knows. Else
        also newer and older ones, which then only rule documents
            out that the draft would allow.
    """
    if draft <= 7 and "$ref" in schema:
        return {"$ref": schema["$ref"]}  # its neighbours are not looked at
    return {
        key: value
        for key, value in schema.items()
        if has_keyword(draft, key)
        or (not strictly and key in _HONOURED_ANYWHERE)
        or (not strictly and key in ("then", "else") and "if" in schema)
    }


def _guessed(schema: Any) -> int:
    guess, pending = LATEST, [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += [
                inner
                for key, inner in value.items()
                if key not in ("enum", "const", "default", "examples")
            ]
            if any(
                isinstance(value.get(key), bool) for key in ("exclusiveMinimum", "exclusiveMaximum")
            ):
                return 4
            if isinstance(value.get("items"), list):
                guess = 7
    return guess
