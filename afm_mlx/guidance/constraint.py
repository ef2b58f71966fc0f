"""What an answer must look like: a grammar of llguidance, checked before anything is generated."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.deep_stack import with_deep_stack
from afm_mlx.guidance.schema import schema_grammar
from afm_mlx.guidance.schema.regular import LIMITS

MAX_TEXT = 1 << 20
"""Characters of a pattern or list of choices at most."""
MAX_GRAMMAR = 1 << 17
"""Characters of a grammar at most; it may have a rule for every dozen of them, one inside the other."""
MAX_KEPT = 1 << 16
"""Characters of a schema whose grammar is kept, at most."""


@dataclass(frozen=True)
class Constraint:
    """What an answer must look like. Made by one of the class methods, each of which checks what it is given.

    Args:
        grammar: what llguidance takes.
        what: the kind of constraint, for messages.
    """

    grammar: str
    what: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool) -> Constraint:
        """A JSON text, as `json.dumps` writes it, that is valid under a JSON schema (draft 2020-12).

        Properties come in the order of `x-order`, or else as the schema lists them.

        Raises:
            ConstraintError: for a keyword that can't be honoured, with its place in the schema.
        """
        return cls(_kept_grammar(schema), "JSON schema")

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """A text that a regular expression matches as a whole (syntax of Rust's `regex`, no look-around).

        Raises:
            ConstraintError: for a pattern that is none.
        """
        _check_text(pattern, "regular expression")
        if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
            raise ConstraintError(
                f"The regular expression {shown(pattern)} ends with a backslash that escapes nothing."
            )
        return cls(LLMatcher.grammar_from_regex(pattern), "regular expression").checked()

    @classmethod
    def choices(cls, choices: Sequence[str]) -> Constraint:
        """One of several texts.

        Raises:
            ConstraintError: for anything but non-empty strings, at least one.
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
        """A text of a grammar in llguidance's Lark syntax, whose rule `start` is the whole text.

        Raises:
            ConstraintError: for a grammar that is none.
        """
        _check_text(grammar, "grammar", MAX_GRAMMAR)
        return cls(LLMatcher.grammar_from_lark(grammar), "grammar").checked()

    @classmethod
    def gbnf(cls, grammar: str) -> Constraint:
        """A text of a grammar in llama.cpp's GBNF syntax, whose rule `root` is the whole text.

        Raises:
            ConstraintError: for a grammar that is none.
        """
        _check_text(grammar, "grammar", MAX_GRAMMAR)
        try:
            lark = gbnf_to_lark(grammar)
        except Exception as error:  # whatever the converter meets
            raise ConstraintError(f"The GBNF grammar can't be read ({error}).") from None
        return cls.lark(lark)

    @classmethod
    def text(cls) -> Constraint:
        """Any text, and no control token but the end."""
        return cls(LLMatcher.grammar_from_lark("start: /(.|\\n)*/"), "text")

    def behind(self, text: str) -> Constraint:
        """The same behind a text: what is generated repeats the text, and goes on as the constraint says."""
        opening = f"start: {literal(text)} @rest"
        grammars = [{"lark_grammar": opening}, *named_grammars(self.grammar, "rest")]
        return Constraint(json.dumps({"grammars": grammars}), self.what)

    def checked(self) -> Constraint:
        """The constraint itself.

        Raises:
            ConstraintError: when llguidance refuses its grammar.
        """
        refused, messages = with_deep_stack(
            LLMatcher.validate_grammar_with_warnings, self.grammar, limits=LIMITS
        )
        if refused:
            raise ConstraintError(f"The {self.what} can't be honoured: {' '.join(messages)}")
        return self


def literal(text: str) -> str:
    """A text in a Lark grammar; Lark's own strings have no escape for some characters."""
    plain = (c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)
    return f"/{''.join(plain)}/"


def named_grammars(grammar: str, name: str) -> list[dict[str, Any]]:
    """The parts of a grammar, whose first one has a name by which other grammars embed it."""
    parts = json.loads(grammar)["grammars"] if grammar[:1] == "{" else [{"lark_grammar": grammar}]
    first, *rest = parts
    return [{**first, "name": name}, *rest]


def _kept_grammar(schema: Any) -> str:
    """The grammar of a schema; those of the last schemas that are not large are kept."""
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError):  # what is wrong is said where it is compiled
        return schema_grammar(schema)
    return _grammar_of(text) if len(text) <= MAX_KEPT else schema_grammar(schema)


@lru_cache(maxsize=64)
def _grammar_of(text: str) -> str:
    return schema_grammar(json.loads(text))


def _check_text(text: Any, what: str, most: int = MAX_TEXT) -> None:
    if not isinstance(text, str) or not text:
        raise ConstraintError(f"The {what} is {shown(text)}; a text is needed that is not empty.")
    if len(text) > most:
        raise ConstraintError(f"The {what} has {len(text)} characters; at most {most} are taken.")
