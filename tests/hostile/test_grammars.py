"""Grammars and patterns that would take forever, or all memory: refused, or followed within bounds."""

import json
import time

import pytest

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from tests.tools.cases import each
from tests.tools.constraints import nano_tokenizer, random_answer, wide_model

_DOUBLED = "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(60))
_SQUARED = "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(40))
_ANY_RULE = " | ".join(f"r{i}" for i in range(3000))
_CHAIN = "\n".join(f'r{i}:"a"|"b"r{i + 1}' for i in range(6000)) + '\nr6000: "x"'
_DEFINED = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)} | {
    "a3000": {"type": "null"}
}
_REFERENCES = json.dumps({"$ref": "#/$defs/a0", "$defs": _DEFINED})
_RULES = "\n".join(f'r{i}: "x{i}"' for i in range(3000))
SECONDS = 10  # for compiling and 40 tokens; the slowest takes one


@each(
    "make, refused",
    [
        (lambda: Constraint.lark("start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
        (lambda: Constraint.regex("(" * 20_000 + "a" + ")" * 20_000), "regular expression"),
        (lambda: Constraint.gbnf("root ::= " + "(" * 9_000 + '"a"' + ")" * 9_000), "recursion"),
        (lambda: Constraint.lark(f'start: r0\n{_DOUBLED}\nr60: "a"'), None),
        (lambda: Constraint.lark(f'start: R0\n{_SQUARED}\nR40: "a"'), "too big"),
        (lambda: Constraint.lark(f"start: {_ANY_RULE}\n{_RULES}"), "max is 2000"),
        (lambda: Constraint.lark('start: start start | "a" | start start start'), None),
        (lambda: Constraint.lark(f"start: r0\n{_CHAIN}"), None),
        (lambda: Constraint.lark(f"start: R0\n{_CHAIN.replace('r', 'R')}"), None),
        (lambda: Constraint.lark(f"start: %json {_REFERENCES}"), None),
        (lambda: Constraint.lark("start: " + '"a"? ' * 40_000), "characters"),
        (lambda: Constraint.lark('start: item*\nitem: "b"?'), None),
        (lambda: Constraint.lark('start: "a" start'), None),
        (lambda: Constraint.lark("start: start"), "can.t be honoured"),
        (lambda: Constraint.lark('start: "a"{1,1000000000}'), None),
        (lambda: Constraint.lark('start: x{1,1000000}\nx: "a" | "b" x'), None),
        (lambda: Constraint.regex("[ab]*a[ab]{500}c"), None),
        (lambda: Constraint.regex("(a*)*b(x+x+)+y"), None),
        (lambda: Constraint.regex(r"(\p{L}|\p{N}|\p{S}){1,3000}x"), None),
        (lambda: Constraint.choices([f"choice number {i}" for i in range(5000)]), None),
        (lambda: Constraint.regex("a" * 10_000_000), "characters"),
        (lambda: Constraint.regex("a{5000}"), None),
        (lambda: Constraint.regex("[ab]{3}(ab){1000}{1000}{1000}"), None),
        (lambda: Constraint.lark("start: X{1000000}\nX: /a{100000}/"), None),
        (lambda: Constraint.json_schema({"type": "string", "pattern": "^a{1000}{1000}$"}), None),
    ],
)  # fmt: skip
def test_grammars_are_refused_or_followed_in_time(rng, make, refused):
    start = time.monotonic()
    if refused is None:
        random_answer(rng, make(), 40)
    else:
        with pytest.raises(ConstraintError, match=refused):
            random_answer(rng, make(), 40)
    assert time.monotonic() - start < SECONDS


def test_grammars_without_an_end_are_errors_at_once(rng):
    engine = Engine(wide_model(rng), nano_tokenizer())
    with pytest.raises(ConstraintError):
        engine.submit(Request([5], constraint=Constraint.lark("start: start")))
    assert not engine.busy
    engine.submit(Request([5], constraint=Constraint.lark('start: "a" start')))
    assert isinstance(engine.step()[-1].error, ConstraintError)
    assert not engine.busy


def test_a_grammar_that_becomes_too_complex_ends_its_row_only(rng):
    engine = Engine(wide_model(rng, extra=0), nano_tokenizer())
    engine.submit(
        Request(
            [5], 30, constraint=Constraint.lark(f"start: /[xy]/ any\nany: {_ANY_RULE}\n{_RULES}")
        )
    )
    engine.submit(Request([6], 5, constraint=Constraint.regex("[a-z]{90}"), at_limit="complete"))
    last = {response.row: response for response in engine.run()}
    assert "max is 2000" in str(last[0].error)
    assert last[1].error is None
