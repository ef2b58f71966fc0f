"""A JSON schema as a grammar of llguidance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.array_rules import array_rule
from afm_mlx.guidance.schema.cases import Arrays, Case, Numbers, Objects, Strings, Words
from afm_mlx.guidance.schema.expansion import Expansion
from afm_mlx.guidance.schema.formulas import Formula
from afm_mlx.guidance.schema.numbers import number_terminals
from afm_mlx.guidance.schema.object_rules import object_rule
from afm_mlx.guidance.schema.references import Document
from afm_mlx.guidance.schema.refusals import Budget, refuse
from afm_mlx.guidance.schema.rules import Printer, Rule, either, fulfilled, terminal, text
from afm_mlx.guidance.schema.strings import string_terminals

MAX_RULES = 30_000
"""Rules of a grammar at most."""
_LIMITS = LLParserLimits(verbose_errors=False)


def schema_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of JSON texts that are valid under a schema, in the form of `json.dumps`.

    Args:
        schema: as `json.loads` gives it.

    Raises:
        ConstraintError: for a keyword that can't be honoured, with its place in the schema.
    """
    grammar = _Grammar(Document(schema))
    lark = LLMatcher.grammar_from_lark(grammar.text())
    refused, messages = LLMatcher.validate_grammar_with_warnings(lark, limits=_LIMITS)
    if refused:
        raise ConstraintError(f"The JSON schema can't be honoured: {' '.join(messages)}")
    return lark


class _Grammar:
    """Rules for the formulas of a document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.expansion = Expansion(document, Budget())
        self._rules: dict[str, Rule] = {}
        self._names: dict[Any, str] = {}
        self._pending: list[Formula] = []
        self._dropped: list[str] = []

    def text(self) -> str:
        """The grammar of the whole document in Lark syntax."""
        start = self.value(self._document.root)[1]
        while self._pending:
            formula = self._pending.pop()
            place = self._document.place(formula)
            cases = self.expansion.cases(formula)
            self._rules[self._names[formula]] = either(*(self.case(case, place) for case in cases))
        rules = fulfilled(self._rules)
        if start not in rules:
            self._refuse_unfulfilled()
        return Printer(rules).grammar(start)

    def value(self, formula: Formula) -> Rule:
        """The rule of a formula, which is made later."""
        if formula not in self._names:
            self._names[formula] = self._fresh(self._document.place(formula))
            self._pending.append(formula)
        return ("rule", self._names[formula])

    def case(self, case: Case, place: str) -> Rule:
        """The rule of one case."""
        try:
            if isinstance(case, Words):
                return either(*map(text, case.words))
            if isinstance(case, Numbers):
                return either(*map(terminal, number_terminals(case)))
            if isinstance(case, Strings):
                return either(*map(terminal, string_terminals(case)))
            key = (case, place)
            if key not in self._names:
                self._names[key] = name = self._fresh(place)
                make = array_rule if isinstance(case, Arrays) else object_rule
                self._rules[name] = make(case, self, place)  # type: ignore[arg-type]
            return ("rule", self._names[key])
        except ValueError as error:
            if isinstance(error, ConstraintError):
                raise
            refuse(place, "a schema", f"{error}. Use simpler patterns.")

    def named(self, rule: Rule) -> Rule:
        """A rule that can be used many times, by its name."""
        if rule[0] in ("rule", "text") or rule in (("or", ()), ("seq", ())):
            return rule
        name = self.reserved()
        self.define(name, rule)
        return name

    def reserved(self) -> Rule:
        """The name of a rule that is defined later."""
        return ("rule", self._fresh("#"))

    def define(self, name: Rule, rule: Rule) -> None:
        """Define a reserved rule."""
        self._rules[name[1]] = rule

    def drop(self, place: str) -> None:
        """Note that something at a place is not allowed, though it would be valid."""
        self._dropped.append(place)

    def _fresh(self, place: str) -> str:
        name = f"r{len(self._rules)}"
        if len(self._rules) >= MAX_RULES:
            refuse(
                place,
                "a schema",
                f"the grammar has {MAX_RULES} rules by then; give a smaller schema.",
            )
        self._rules[name] = ("or", ())
        return name

    def _refuse_unfulfilled(self) -> None:
        dropped = [*self._dropped, *self.expansion.dropped]
        if dropped:
            refuse(
                dropped[0],
                "a keyword",
                "without what can't be expressed there, no document is left. Rewrite it.",
            )
        place = self._blamed(self._document.root)
        refuse(
            place,
            "a schema",
            "no document can be valid. Mend the keywords that exclude each other there.",
        )

    def _blamed(self, formula: Formula) -> str:
        return self._document.place(formula)


__all__ = ["Objects", "schema_grammar"]
