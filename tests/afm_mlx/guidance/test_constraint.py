"""Constraints of every kind: what they accept, and what is refused before anything is generated."""

import json
import re
import threading
import time

import pytest
from llguidance import LLParserLimits

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance import constraint, deep_stack, matcher
from afm_mlx.guidance.constraint import MAX_TEXT, Constraint
from afm_mlx.guidance.matcher import Matcher
from afm_mlx.guidance.schema import compile
from tests.tools.cases import each
from tests.tools.constraints import CONSTRAINTS, nano_tokenizer, random_answer


def is_whole(constraint, text):
    """True if a constraint allows a text as a whole."""
    matcher, tokenizer = Matcher(constraint, nano_tokenizer()), nano_tokenizer()
    ids = tokenizer.encode("\n" + text)[len(tokenizer.encode("\n")) :]
    try:
        for token in ids:
            matcher.accept(token)
    except ConstraintError:
        return False
    return matcher.is_complete


@each(
    "constraint, taken, refused",
    [
        (lambda: Constraint.regex(r"\d{2}-[a-z]+"), ["12-ab"], ["1-ab", "12-", "12-a1"]),
        (lambda: Constraint.choices(["New", "New York", '"a"\\', "日▁本<n>"]),
         ["New", "New York", '"a"\\'], ["", "Ne", "York", "日 本\n"]),
        (lambda: Constraint.lark('start: "a" start "b" | "c"'), ["c", "aacbb"], ["aacb", ""]),
        (lambda: Constraint.gbnf('root ::= "x" item*\nitem ::= [0-9] "," '), ["x", "x1,2,"], ["x1", "1,"]),
        (lambda: Constraint.text(), ["", "any text\n"], []),
        (lambda: Constraint.text().behind('so "'), ['so "', 'so "far'], ["so", "far"]),
        (lambda: Constraint.json_schema({"type": "integer"}).behind("is "), ["is 12"], ["12", "is a"]),
        (lambda: Constraint.regex("[ab]").behind("\n"), ["\na"], ["a"]),
        (lambda: Constraint.json_schema({"type": "object"}), ["{}", '{"a": [1, 2]}'], ['{"a":1}', "[]", "{ }"]),
    ],
)  # fmt: skip
def test_texts_are_taken_or_not(constraint, taken, refused):
    made = constraint()
    assert [text for text in taken if not is_whole(made, text)] == []
    assert [text for text in refused if is_whole(made, text)] == []


def test_random_answers_meet_their_constraint(rng):
    patterns = {"regex": r"[a-f]{2,9}(-[0-9]+){0,2}", "choices": "New York|New Orleans|Newark|日本"}
    for name, pattern in patterns.items():
        for _ in range(20):
            answer = random_answer(rng, CONSTRAINTS[name]())
            assert answer is None or re.fullmatch(pattern, answer)


@each(
    "make, words",
    [
        (lambda: Constraint.regex("("), ["regular expression", "unclosed group"]),
        (lambda: Constraint.regex("(?=a)b"), ["regular expression", "look-around"]),
        (lambda: Constraint.regex(r"(a)\1"), ["regular expression"]),
        (lambda: Constraint.regex("a\\"), ["escapes nothing"]),
        (lambda: Constraint.regex(""), ["not empty"]),
        (lambda: Constraint.regex(7), ["7"]),
        (lambda: Constraint.regex("a" * (MAX_TEXT + 1)), [str(MAX_TEXT)]),
        (lambda: Constraint.choices("ab"), ["list"]),
        (lambda: Constraint.choices([]), ["at least one"]),
        (lambda: Constraint.choices(["a", ""]), ["non-empty"]),
        (lambda: Constraint.choices(["a", 1]), ["strings"]),
        (lambda: Constraint.lark("start: b"), ["unknown name"]),
        (lambda: Constraint.lark("begin: b"), ["grammar"]),
        (lambda: Constraint.gbnf("root = x"), ["GBNF"]),
        (lambda: Constraint.gbnf(""), ["not empty"]),
        (lambda: Constraint.gbnf("start ::= x"), ["grammar"]),
    ],
)
def test_what_is_no_constraint_is_refused(make, words):
    with pytest.raises(ConstraintError) as refused:
        make()
    assert all(word in str(refused.value) for word in words), refused.value


def test_grammars_of_schemas_are_kept_but_for_large_ones(monkeypatch):
    compiled = []
    compile_schema = compile.schema_grammar
    monkeypatch.setattr(
        compile, "schema_grammar", lambda s: (compiled.append(s), compile_schema(s))[1]
    )
    small, large = {"const": "kept once"}, {"const": "a" * constraint.MAX_KEPT}
    for schema, count in ((small, 1), (large, 2)):
        compiled.clear()
        assert Constraint.json_schema(schema) == Constraint.json_schema(schema)
        assert len(compiled) == count
    with pytest.raises(ConstraintError):
        Constraint.json_schema({"const": object()})


PASSWORD = r"^(?=.*[A-Z])(?=.*[a-z])(?=.*\d)(?=.*[^A-Za-z0-9]).{8,32}$"


def test_the_rule_of_a_password_generates_one(rng):
    constraint = Constraint.json_schema({"type": "string", "pattern": PASSWORD})
    for _ in range(5):
        text = json.loads(random_answer(rng, constraint))
        assert re.search(PASSWORD, text), text


def test_a_pattern_with_too_many_states_is_refused_before_an_answer_begins(monkeypatch):
    monkeypatch.setattr(matcher, "LIMITS", LLParserLimits(step_lexer_fuel=100_000))
    rule = {"type": "string", "pattern": PASSWORD.replace("32", "33")}
    constraint = Constraint.json_schema({"properties": {"key": rule}, "required": ["key"]})
    with pytest.raises(ConstraintError, match="more states than are followed"):
        Matcher(constraint, nano_tokenizer())


def test_patterns_that_multiply_are_refused_in_time():
    """llguidance would take hours over the first."""
    patterns = [f"a.{{{i}}}b" for i in range(60)]
    start = time.monotonic()
    with pytest.raises(ConstraintError, match="9 are followed at most"):
        Constraint.json_schema({"type": "string", "allOf": [{"pattern": p} for p in patterns]})
    assert time.monotonic() - start < 10


def test_a_compiler_without_an_end_is_waited_for_no_longer(monkeypatch):
    monkeypatch.setattr(deep_stack, "SECONDS", 0.05)
    done = threading.Event()
    with pytest.raises(ConstraintError, match="longer than"):
        deep_stack.with_deep_stack(done.wait)
    with pytest.raises(ConstraintError, match="longer than"):
        deep_stack.with_deep_stack(done.wait)
    with pytest.raises(ConstraintError, match="Try again later"):
        deep_stack.with_deep_stack(int)
    done.set()
    monkeypatch.setattr(deep_stack, "SECONDS", 5)
    while any(not one.done() for one in deep_stack._left):
        time.sleep(0.01)
    assert deep_stack.with_deep_stack(int) == 0
