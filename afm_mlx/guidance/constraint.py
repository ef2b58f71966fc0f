"""Constraints: grammars that answers must match, checked before anything is generated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.deep_stack import LIMITS, with_deep_stack

MAX_TEXT = 1 << 20  # most characters of a pattern or list of choices
MAX_GRAMMAR = 1 << 17  # most characters of a grammar; it may nest a rule for every dozen of them
MAX_KEPT = 1 << 16  # most characters of a schema whose grammar is cached


@dataclass(frozen=True)
class Constraint:
    """A grammar that an answer must match. Made and checked by one of the class methods.

    Args:
        grammar: llguidance's Lark, or its JSON of several grammars.
        what: the kind of constraint, for error messages.
        thought_end: the control token that ends a thought before the constrained text; -1 if there is none.
    """

    grammar: str
    what: str
    thought_end: int = -1

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Constraint:
        """Allow JSON that is valid under a schema (draft 2020-12), written as `json.dumps` writes it.

        Properties come in the order of `x-order`, or else as the schema lists them.

        Raises:
            ConstraintError: for a keyword that can't be honoured, with its place in the schema.
        """
        return cls(_kept_grammar(schema), "JSON schema")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Allow text that a regular expression matches as a whole (syntax of Rust's `regex`, no look-around).

        Raises:
            ConstraintError: for an invalid pattern.
        """
        _check_text(pattern, "regular expression")
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            raise ConstraintError(
                f"The regular expression {shown(pattern)} ends with a backslash that escapes nothing."
            )
        return cls(LLMatcher.grammar_from_regex(pattern), "regular expression").checked()

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Constraint:
        """Allow one of several texts.

        Raises:
            ConstraintError: unless all are non-empty strings, at least one.
        """
        texts = [] if isinstance(choices, str) else list(choices)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConstraintError(
                f"choices is {shown(choices)}; a list of non-empty strings is needed, with at least one."
            )
        _check_text("".join(texts), "list of choices")
        alternatives = " | ".join(map(literal, texts))
        lark = f"start: CHOICE\nCHOICE: {alternatives}"
        return cls(LLMatcher.grammar_from_lark(lark), "list of choices").checked()

    @classmethod
    def lark(cls, grammar: str) -> Constraint:
        """Allow text that the rule `start` of a grammar in llguidance's Lark syntax matches.

        Raises:
            ConstraintError: for an invalid grammar.
        """
        _check_text(grammar, "grammar", MAX_GRAMMAR)
        return cls(LLMatcher.grammar_from_lark(grammar), "grammar").checked()

    @classmethod
    def gbnf(cls, grammar: str) -> Constraint:
        """Allow text that the rule `root` of a grammar in llama.cpp's GBNF syntax matches.

        Raises:
            ConstraintError: for an invalid grammar.
        """
        _check_text(grammar, "grammar", MAX_GRAMMAR)
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # the converter has no error type
            raise ConstraintError(f"The GBNF grammar can't be read ({error}).") from None
        return cls.lark(lark)

    @classmethod
    def text(cls) -> Constraint:
        """Allow any text, and no control token except the end."""
        return cls(LLMatcher.grammar_from_lark("start: /(.|\\n)*/"), "text")

    def behind(self, text: str) -> Constraint:
        """Require a text before the text that this constraint allows."""
        opening = f"start: {literal(text)} @rest"
        grammars = [{"lark_grammar": opening}, *named_grammars(self.grammar, "rest")]
        return Constraint(json.dumps({"grammars": grammars}), self.what)

    def checked(self) -> Constraint:
        """Check the grammar with llguidance, and return the constraint.

        Raises:
            ConstraintError: if llguidance refuses its grammar.
        """
        refused, messages = with_deep_stack(
            LLMatcher.validate_grammar_with_warnings, self.grammar, limits=LIMITS
        )
        if refused:
            raise ConstraintError(f"The {self.what} can't be honoured: {' '.join(messages)}")
        return self


def literal(text: str) -> str:
    """Write a Lark pattern that matches one text; Lark's strings have no escape for some characters."""
    plain = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)
    return f"/{''.join(plain)}/"


def named_grammars(grammar: str, name: str) -> list[dict[str, Any]]:
    """Return the parts of a grammar, the first named so that other grammars can embed it."""
    parts = json.loads(grammar)["grammars"] if grammar[:1] == "{" else [{"lark_grammar": grammar}]
    first, *rest = parts
    return [{**first, "name": name}, *rest]


def _kept_grammar(schema: Mapping[str, Any] | bool) -> str:
    """Compile a schema; grammars of recent ones of up to `MAX_KEPT` characters are cached."""
    from afm_mlx.guidance.schema.compile import schema_grammar  # it imports `referencing`: 30 ms

    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):  # compiling says what is wrong
        return schema_grammar(schema)
    return _grammar_of(text) if len(text) <= MAX_KEPT else schema_grammar(schema)


@lru_cache(maxsize=64)
def _grammar_of(text: str) -> str:
    from afm_mlx.guidance.schema.compile import schema_grammar

    return schema_grammar(json.loads(text))


def _check_text(text: object, what: str, most: int = MAX_TEXT) -> None:
    if not isinstance(text, str) or not text:
        raise ConstraintError(f"The {what} is {shown(text)}; a text is needed that is not empty.")
    if len(text) > most:
        raise ConstraintError(f"The {what} has {len(text)} characters; at most {most} are taken.")
