"""Compiles a JSON schema to a grammar of llguidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from llguidance import LLMatcher

from afm_mlx.guidance.schema.cases import Arrays, Objects
from afm_mlx.guidance.schema.containers import Builder
from afm_mlx.guidance.schema.references import TRUE, Document, Formula, refuse, refuse_at
from afm_mlx.guidance.schema.regular import compile_error, values_of
from afm_mlx.guidance.schema.rules import Rule, depth, either, fulfilled, lark_grammar

MAX_TEXT = 1_500_000  # most characters of a grammar
MAX_DEPTH = 500  # deepest nesting of rules: 3 MB of a thread's stack


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Compile a schema to the grammar of its valid documents, written as `json.dumps` writes them.

    Raises:
        ConstraintError: for a keyword that can't be honoured, with its place in the schema.
    """
    document = Document(schema)
    builder = Builder(document)
    start = builder.value(document.root).name
    while builder.pending:
        formula = builder.pending.pop()
        place = document.place(formula)
        builder.expansion.budget.spend(place, 0)
        cases = builder.expansion.cases(formula)
        name = builder.value(formula).name
        builder.rules[name] = either(*(builder.case(case, place) for case in cases))
    rules = fulfilled(builder.rules)
    if start not in rules:
        _refuse_unfulfilled(builder, rules)
    if (deep := depth(rules, start)) > MAX_DEPTH:
        refuse_at(
            "#",
            f"schemas refer to each other {deep} deep, and {MAX_DEPTH} at most. Use shorter chains.",
        )
    for formula, count, place in builder.counted:
        name = builder.value(formula).name
        found = values_of(lark_grammar(rules, name), count) if name in rules else None
        if found is not None and len(found) < count:
            reason = f"only {len(found)} items can differ, but {count} are required. Require fewer."
            refuse(place, True, reason)
    text = lark_grammar(rules, start)
    if len(text) > MAX_TEXT:
        refuse_at(
            "#",
            f"its grammar has {len(text)} characters, and {MAX_TEXT} at most. Give a smaller schema.",
        )
    lark = LLMatcher.grammar_from_lark(text)
    if error := compile_error(lark):
        reason = (
            f"llguidance can't compile its grammar ({error}). Give a smaller or simpler schema."
        )
        refuse_at("#", reason)
    return lark


def _refuse_unfulfilled(builder: Builder, rules: dict[str, Rule]) -> NoReturn:
    """Raise `ConstraintError` at the innermost required schema that has no document."""
    if dropped := [*builder.dropped, *builder.expansion.dropped]:
        refuse_at(
            dropped[0],
            "without the parts that a grammar can't express no document is left. Rewrite them.",
        )

    def unfulfilled(formula: Formula) -> Formula | None:
        for case in builder.expansion.raw_cases(formula):
            for part in case.needed() if isinstance(case, Arrays | Objects) else ():
                name = builder.names.get(part)
                if part != TRUE and (name is None or name.name not in rules):
                    return part
        return None

    formula, visited = builder.document.root, set[Formula]()
    while (inner := unfulfilled(formula)) is not None and inner not in visited:
        visited.add(inner)
        formula = inner
    refuse_at(
        builder.document.place(formula),
        "no document can be valid: keywords exclude or require each other without an end. Fix them.",
    )
