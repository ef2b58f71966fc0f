"""Schemas joined by and, or and not: what has to hold at one place of a document.

A formula is a tuple: `TRUE`, `FALSE`, `("node", number, is_positive)` for a schema of the document or its
complement, `("and", parts)` or `("or", parts)`. Complements stand at nodes only. Parts keep their order, which
is that of properties later.
"""

from __future__ import annotations

from typing import Any

Formula = tuple[Any, ...]
TRUE: Formula = ("true",)
FALSE: Formula = ("false",)


def conjunction(*parts: Formula) -> Formula:
    """What holds where all parts hold."""
    flat: dict[Formula, None] = {}
    for part in parts:
        for one in part[1] if part[0] == "and" else [part]:
            flat[one] = None
    flat.pop(TRUE, None)
    if FALSE in flat or any(one[0] == "node" and negation(one) in flat for one in flat):
        return FALSE
    return TRUE if not flat else next(iter(flat)) if len(flat) == 1 else ("and", tuple(flat))


def disjunction(*parts: Formula) -> Formula:
    """What holds where one part or more hold."""
    flat: dict[Formula, None] = {}
    for part in parts:
        for one in part[1] if part[0] == "or" else [part]:
            flat[one] = None
    flat.pop(FALSE, None)
    if TRUE in flat:
        return TRUE
    return FALSE if not flat else next(iter(flat)) if len(flat) == 1 else ("or", tuple(flat))


def negation(part: Formula) -> Formula:
    """What holds where a part does not."""
    if part in (TRUE, FALSE):
        return FALSE if part == TRUE else TRUE
    if part[0] == "node":
        return ("node", part[1], not part[2])
    inner = [negation(one) for one in part[1]]
    return disjunction(*inner) if part[0] == "and" else conjunction(*inner)


def first_node(part: Formula) -> int | None:
    """The number of the first node in a formula, which names the place of all of it."""
    if part[0] == "node":
        return int(part[1])
    return (
        next((n for one in part[1] if (n := first_node(one)) is not None), None)
        if part[1:]
        else None
    )
