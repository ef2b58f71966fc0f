"""Forced tokens and the shortest completions of unfinished answers."""

import json

from llguidance import LLMatcher

from afm_mlx.guidance import matcher
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.deep_stack import LIMITS
from afm_mlx.guidance.matcher import MAX_FORCED_BYTES, Matcher, shortest_completion, without_forcing
from afm_mlx.guidance.token_bytes import ll_tokenizer
from afm_mlx.guidance.tool_calls import tool_call_constraint
from bench.json_schemas import is_valid
from tests.tools.cases import each
from tests.tools.constraints import bytes_of, closed, nano_tokenizer, random_token

_WHO = {"enum": ["Ann", "Andrew", "Zoë"]}
_OBJECT = closed({"title": {"type": "string"}, "who": _WHO, "日本": {"type": "null"}})
_TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": _OBJECT}}]
CONSTRAINTS = [
    lambda: Constraint.json_schema(_OBJECT),
    lambda: Constraint.regex(r"Order [A-Z]\d{3} is (done|dropped)\."),
    lambda: Constraint.regex("a{200}b"),
    lambda: Constraint.choices(["émile", "ème", "été 1", "😀", "😁"]),
    lambda: Constraint.choices(["money", "money is here and there, and everywhere else, too"]),
    lambda: tool_call_constraint(_TOOLS, "required"),
    lambda: tool_call_constraint(_TOOLS, "auto"),
    lambda: Constraint.regex("[0-9]+, then more").behind("At 1"),
]


@each("make", CONSTRAINTS)
def test_forced_tokens_are_those_of_llguidance(rng, make):
    tokenizer, constraint = nano_tokenizer(), make()
    for _ in range(4):
        ours = Matcher(constraint, tokenizer)
        theirs = LLMatcher(ll_tokenizer(tokenizer), constraint.grammar, log_level=0, limits=LIMITS)
        for _ in range(40):
            forced = ours.forced()
            assert forced == theirs.compute_ff_tokens()
            for token in forced:
                ours.accept(token)
            assert theirs.consume_tokens(forced)
            if ours.is_stopped:
                break
            token = random_token(rng, ours)
            ours.accept(token)
            assert theirs.consume_token(token)
            if token in tokenizer.eos_token_ids:
                break


@each("make", [lambda: Constraint.regex("a{5000}"), lambda: Constraint.lark('start: "a" start')])
def test_forced_text_comes_in_bounded_pieces(rng, make):
    matcher = Matcher(make(), nano_tokenizer())
    length = 0
    while length < 5000:
        tokens = matcher.forced()
        piece = len(matcher.tokenizer.decode_bytes(tokens))
        assert min(MAX_FORCED_BYTES - 20, 5000 - length) <= piece <= MAX_FORCED_BYTES
        for token in tokens:
            matcher.accept(token)
        length += piece
        if length < 5000:
            token = random_token(rng, matcher)
            matcher.accept(token)
            length += len(matcher.tokenizer.decode_bytes([token]))


@each("grammar", ['start: "a"', json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})])
def test_the_search_of_llguidance_is_off(grammar):
    tokenizer = ll_tokenizer(nano_tokenizer())
    assert LLMatcher(tokenizer, grammar).compute_ff_tokens()
    assert not LLMatcher(tokenizer, without_forcing(grammar)).compute_ff_tokens()


CHILDREN = {"type": "array", "items": {"$ref": "#/$defs/person"}}
FIELDS = {"name": {"type": "string"}, "age": {"enum": [7, 18]}, "children": CHILDREN}
PERSON = {"$ref": "#/$defs/person", "$defs": {"person": closed(FIELDS, ["age"])}}


def completed(constraint, begun):
    tokenizer = nano_tokenizer()
    matcher = Matcher(constraint, tokenizer)
    for token in tokenizer.encode("\n" + begun)[len(tokenizer.encode("\n")) :]:
        matcher.accept(token)
    tokens = shortest_completion(matcher)
    assert not matcher.is_complete or tokens == []
    return begun + b"".join(bytes_of(tokenizer, token) for token in tokens).decode()


@each(
    "begun, whole",
    [
        ("", '{"name": "", "children": []}'),
        ('{"name": "Jo', '{"name": "Jo", "children": []}'),
        ('{"name": "Jo", "a', '{"name": "Jo", "age": 7, "children": []}'),
        ('{"name": "", "children": [{"name": "b', '{"name": "", "children": [{"name": "b", "children": []}]}'),
        ('{"name": "", "children": []}', '{"name": "", "children": []}'),
    ],
)  # fmt: skip
def test_objects_are_closed(begun, whole):
    text = completed(Constraint.json_schema(PERSON), begun)
    assert is_valid(PERSON, json.loads(text))
    assert len(text) == len(whole)


def test_what_is_nested_deeply_is_closed():
    begun = '{"name": "a", "children": [' * 60 + '{"name": "b'
    text = completed(Constraint.json_schema(PERSON), begun)
    assert is_valid(PERSON, json.loads(text))
    assert text.endswith('"children": []}' + "]}" * 60)


def test_texts_have_their_least_length_and_patterns_are_met():
    fields = {
        "long": {"type": "string", "minLength": 30},
        "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
        "list": {"type": "array", "items": {"enum": ["first", "second"]}, "minItems": 4},
        "optional": {"type": "string"},
    }
    schema = closed(fields, ["optional"])
    text = completed(Constraint.json_schema(schema), '{"long": "begun')
    assert is_valid(schema, json.loads(text))
    assert "optional" not in text
    assert len(json.loads(text)["long"]) == 30


def test_other_grammars_end_too():
    assert completed(Constraint.choices(["New York", "New Orleans"]), "New O") == "New Orleans"
    assert completed(Constraint.regex("(abc)+[0-9]"), "ab")[:3] == "abc"
    assert completed(Constraint.lark('start: "(" start ")" | "x"'), "((") == "((x))"


def test_what_can_not_be_ended_is_given_up(monkeypatch):
    monkeypatch.setattr(matcher, "MAX_COMPLETION_BYTES", 20)
    assert shortest_completion(Matcher(Constraint.regex("[a-z]{40}"), nano_tokenizer())) is None
