"""Compiles a JSON schema to a grammar of llguidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from llguidance import LLMatcher

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.cases import Arrays, Case, Numbers, Objects, Strings, Words
from afm_mlx.guidance.schema.containers import array_rule, object_rule
from afm_mlx.guidance.schema.expansion import Expansion
from afm_mlx.guidance.schema.numbers import number_terminals
from afm_mlx.guidance.schema.patterns import is_like
from afm_mlx.guidance.schema.references import (
    TRUE,
    CompileBudget,
    Document,
    Formula,
    refuse,
    refuse_at,
)
from afm_mlx.guidance.schema.regular import compile_error, values_of
from afm_mlx.guidance.schema.rules import (
    NOTHING,
    Either,
    LarkTerminal,
    Named,
    Printer,
    Rule,
    Seq,
    Text,
    depth,
    either,
    fulfilled,
)
from afm_mlx.guidance.schema.strings import string_terminals

MAX_RULES = 15_000
"""Most rules of a grammar."""
MAX_TEXT = 1_500_000
"""Most characters of a grammar."""
MAX_DEPTH = 500
"""Deepest nesting of rules: 3 MB of a thread's stack."""


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Compile a schema to the grammar of its valid documents, written as `json.dumps` writes them.

    Args:
        schema: a JSON value.

    Raises:
        ConstraintError: for a keyword that can't be honoured, with its place in the schema.
    """
    grammar = _Grammar(Document(schema))
    lark = LLMatcher.grammar_from_lark(grammar.text())
    if error := compile_error(lark):
        refuse_at(
            "#",
            f"llguidance can't compile its grammar ({error}). Give a smaller or simpler schema.",
        )
    return lark


class _Grammar:
    """The rules of a document's formulas; a `Builder`."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.expansion = Expansion(document, CompileBudget())
        self._rules: dict[str, Rule] = {}
        self._names: dict[Any, str] = {}
        self._pending: list[Formula] = []
        self._dropped: list[str] = []
        self._asked: list[tuple[Formula, int, str]] = []

    def text(self) -> str:
        """The grammar of the whole document in Lark syntax."""
        start = self.value(self._document.root).name
        while self._pending:
            formula = self._pending.pop()
            place = self._document.place(formula)
            self.expansion.check_time(place)
            cases = self.expansion.cases(formula)
            self._rules[self._names[formula]] = either(*(self.case(case, place) for case in cases))
        rules = fulfilled(self._rules)
        if start not in rules:
            self._refuse_unfulfilled(rules)
        if (deep := depth(rules, start)) > MAX_DEPTH:
            refuse_at(
                "#",
                f"schemas refer to each other {deep} deep, and {MAX_DEPTH} at most. Use shorter chains.",
            )
        self._check_counts(rules)
        written = Printer(rules).grammar(start)
        if len(written) > MAX_TEXT:
            refuse_at(
                "#",
                f"its grammar has {len(written)} characters, and {MAX_TEXT} at most. Give a smaller schema.",
            )
        return written

    def value(self, formula: Formula) -> Named:
        """The rule of a formula, which is defined later."""
        if formula not in self._names:
            self._names[formula] = self._fresh(self._document.place(formula))
            self._pending.append(formula)
        return Named(self._names[formula])

    def case(self, case: Case, place: str) -> Rule:
        """The rule of one case."""
        try:
            if isinstance(case, Words):
                return either(*map(Text, case.words))
            if isinstance(case, Numbers):
                # `unique_items` compares items by their text.
                is_unique = self._document.has_unique
                return either(*map(LarkTerminal, number_terminals(case, is_canonical=is_unique)))
            if isinstance(case, Strings):
                return either(*map(LarkTerminal, string_terminals(case)))
            key = (case, place)
            if key not in self._names:
                self._names[key] = name = self._fresh(place)
                make = array_rule if isinstance(case, Arrays) else object_rule
                self._rules[name] = make(case, self, place)  # type: ignore[arg-type]
            return Named(self._names[key])
        except ValueError as error:
            if isinstance(error, ConstraintError):
                raise
            refuse_at(place, f"{error}. Use simpler patterns.")

    def named(self, rule: Rule) -> Rule:
        """Define a rule under a new name, so that it can be used many times."""
        if isinstance(rule, Named | Text) or (isinstance(rule, Seq | Either) and not rule.parts):
            return rule
        name = self.reserved()
        self.define(name, rule)
        return name

    def reserved(self) -> Named:
        """A new name, whose rule is defined later."""
        return Named(self._fresh("#"))

    def define(self, name: Named, rule: Rule) -> None:
        """Define the rule of a reserved name."""
        self._rules[name.name] = rule

    def ask_for(self, formula: Formula, count: int, place: str) -> None:
        """Refuse the schema in the end if a formula has fewer values than `count`."""
        self._asked.append((formula, count, place))

    def _check_counts(self, rules: dict[str, Rule]) -> None:
        for formula, count, place in self._asked:
            name = self._names[formula]
            found = values_of(Printer(rules).grammar(name), count) if name in rules else None
            if found is not None and len(found) < count:
                refuse(
                    place,
                    True,
                    f"only {len(found)} items can differ, but {count} are required. Require fewer.",
                )

    def drop(self, place: str) -> None:
        """Record a place where some valid values are left out."""
        self._dropped.append(place)

    def _fresh(self, place: str) -> str:
        name = f"r{len(self._rules)}"
        if len(self._rules) >= MAX_RULES:
            refuse_at(place, f"the grammar has {MAX_RULES} rules already. Give a smaller schema.")
        self._rules[name] = NOTHING
        return name

    def _refuse_unfulfilled(self, fulfilled_rules: dict[str, Rule]) -> NoReturn:
        dropped = [*self._dropped, *self.expansion.dropped]
        if dropped:
            refuse_at(
                dropped[0],
                "without the parts that a grammar can't express no document is left. Rewrite them.",
            )
        formula, visited = self._document.root, set[Formula]()
        while (
            inner := self._unfulfilled(formula, fulfilled_rules)
        ) is not None and inner not in visited:
            visited.add(inner)
            formula = inner
        refuse_at(
            self._document.place(formula),
            "no document can be valid: keywords exclude or require each other without an end. Fix them.",
        )

    def _unfulfilled(self, formula: Formula, fulfilled_rules: dict[str, Rule]) -> Formula | None:
        """The schema of a required property or item that has no document; None without one."""
        for case in self.expansion.raw_cases(formula):
            parts: list[Formula] = []
            if isinstance(case, Objects):
                parts = [case.value(name, is_like) for name in case.required]
            elif isinstance(case, Arrays):
                parts = [case.item(i) for i in range(min(case.least, len(case.prefix) + 1))]
            for part in parts:
                if part != TRUE and self._names.get(part, "") not in fulfilled_rules:
                    return part
        return None
