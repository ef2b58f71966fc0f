"""Complements: what makes a value invalid under each keyword of a schema.

A value is invalid when one keyword says so; so the complement of a schema is a union. Some complements can't be
expressed (an array with two equal items, a number that is no multiple). They are left out, which allows less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from afm_mlx.guidance.schema.cases import (
    Arrays,
    Case,
    Contains,
    Layer,
    Numbers,
    Objects,
    Some,
    Strings,
    Words,
    every_case,
)
from afm_mlx.guidance.schema.formats import LOOSE
from afm_mlx.guidance.schema.formats import PATTERNS as FORMATS
from afm_mlx.guidance.schema.formulas import FALSE, TRUE, negation
from afm_mlx.guidance.schema.keywords import arrays, numbers, objects, pattern, strings, types
from afm_mlx.guidance.schema.numbers import exact
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.references import Document, Node
from afm_mlx.guidance.schema.refusals import pointer
from afm_mlx.guidance.schema.regular import complement


def complement_parts(
    node: Node, value: dict[str, Any], document: Document, is_wide: bool
) -> tuple[list[Case], list[str]]:
    """The complements of the keywords that list no values and are no schemas about the same value.

    Args:
        node: the schema.
        value: its keywords that are honoured.
        document: what it is in.
        is_wide: whether the complement may hold too much, instead of too little.

    Returns:
        cases: one or more of each keyword.
        dropped: places of keywords whose complement is left out.
    """
    named = types(value, node.place)
    cases = _other_types(named)
    dropped: list[str] = []
    if any(name in ("integer", "number") for name in named):
        cases += _numbers(
            numbers({k: v for k, v in value.items() if k != "multipleOf"}, node.place, False)
        )
        if "multipleOf" in value:
            dropped.append(pointer(node.place, "multipleOf"))
            cases += [Numbers()] if is_wide else []
    if "string" in named:
        cases += _strings(value, node, is_wide)
    if "array" in named:
        cases += _arrays(arrays(value, node, document))
        if value.get("uniqueItems") is True:
            dropped.append(pointer(node.place, "uniqueItems"))
            cases += [Arrays(least=2)] if is_wide else []
    if "object" in named:
        cases += _objects(objects(value, node, document))
    for key in ("unevaluatedItems", "unevaluatedProperties"):
        if key in value:
            dropped.append(pointer(node.place, key))
            cases += every_case() if is_wide else []
    return cases, dropped


def _other_types(named: tuple[str, ...]) -> list[Case]:
    """Values of all other types."""
    kept: list[Case] = []
    for case in every_case():
        if isinstance(case, Numbers):
            if "number" not in named:
                kept.append(Numbers(is_integer=False) if "integer" in named else case)
        elif isinstance(case, Words):
            if ("null" if case.words == ("null",) else "boolean") not in named:
                kept.append(case)
        elif {Strings: "string", Arrays: "array", Objects: "object"}[type(case)] not in named:
            kept.append(case)
    return kept


def _numbers(case: Numbers) -> list[Case]:
    below = Numbers(high=case.low, below=not case.above) if case.low is not None else None
    above = Numbers(low=case.high, above=not case.below) if case.high is not None else None
    return [one for one in (below, above) if one]


def _strings(value: dict[str, Any], node: Node, is_wide: bool) -> list[Case]:
    case = strings(
        {k: v for k, v in value.items() if k not in ("pattern", "format")}, node.place, True
    )
    cases: list[Case] = [Strings(longest=case.shortest - 1)] if case.shortest else []
    if case.longest is not None:
        cases.append(Strings(shortest=case.longest + 1))
    if "pattern" in value:
        found = pattern(value["pattern"], pointer(node.place, "pattern"), wide=not is_wide)
        cases.append(Strings(parts=(complement(found),)))
    if (name := value.get("format")) in FORMATS:
        found = searched((FORMATS if is_wide else LOOSE)[name], wide=not is_wide)
        cases.append(Strings(parts=(complement(found),)))
    return cases


def _arrays(case: Arrays) -> list[Case]:
    cases: list[Case] = [Arrays(most=case.least - 1)] if case.least else []
    if case.most is not None:
        cases.append(Arrays(least=case.most + 1))
    for i, schema in enumerate(case.prefix):
        if schema != TRUE:
            cases.append(Arrays(prefix=(*(TRUE,) * i, negation(schema)), least=i + 1))
    if case.items != TRUE:
        start = len(case.prefix)
        if case.items == FALSE:
            cases.append(Arrays(least=start + 1))
        else:
            wrong = Contains(start, negation(case.items), 1, None)
            cases.append(Arrays(contains=(wrong,), least=start + 1))
    for one in case.contains:
        if one.least:
            cases.append(Arrays(contains=(replace(one, least=0, most=one.least - 1),)))
        if one.most is not None:
            cases.append(Arrays(contains=(replace(one, least=one.most + 1, most=None),)))
    return cases


def _objects(case: Objects) -> list[Case]:
    cases: list[Case] = [
        Objects(layers=(Layer(properties=((name, FALSE),)),)) for name in case.required
    ]
    if case.least:
        cases.append(Objects(most=case.least - 1))
    if case.most is not None:
        cases.append(Objects(least=case.most + 1))
    for layer in case.layers:
        for name, schema in layer.properties:
            if schema != TRUE:
                wrong = Layer(properties=((name, negation(schema)),))
                cases.append(Objects(layers=(wrong,), required=(name,)))
        for text, schema in layer.patterns:
            if schema != TRUE:
                cases.append(Objects(some=(Some(negation(schema), like=text),)))
        if layer.rest != TRUE:
            names = tuple(name for name, _ in layer.properties)
            patterns = tuple(text for text, _ in layer.patterns)
            cases.append(
                Objects(some=(Some(negation(layer.rest), besides=names, unlike=patterns),))
            )
    cases += [Objects(some=(Some(TRUE, name=negation(schema)),)) for schema in case.names]
    return cases


def plain_complement(cases: list[Case]) -> list[Case]:
    """Nulls, Booleans, numbers and strings that are not listed."""
    words = {word for case in cases if isinstance(case, Words) for word in case.words}
    numbers = [v for case in cases if isinstance(case, Numbers) for v in case.values or ()]
    texts = [v for case in cases if isinstance(case, Strings) for v in case.values or ()]
    kept = tuple(word for word in ("null", "true", "false") if word not in words)
    other: list[Case] = [
        Numbers(excluded=frozenset(map(exact, numbers))),
        Strings(excluded=frozenset(texts)),
    ]
    return [Words(kept), *other] if kept else other
