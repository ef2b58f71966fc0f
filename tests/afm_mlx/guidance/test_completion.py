"""The shortest ends of unfinished answers."""

import json

import pytest

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, shortest_completion
from bench.json_schemas import is_valid
from tests.tools.constraints import bytes_of, nano_tokenizer

PERSON = {
    "$ref": "#/$defs/person",
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"enum": [7, 18]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/person"}},
            },
            "required": ["name", "children"],
            "additionalProperties": False,
        }
    },
}


def completed(constraint, begun):
    tokenizer = nano_tokenizer()
    matcher = Matcher(constraint, tokenizer)
    for token in tokenizer.encode("\n" + begun)[len(tokenizer.encode("\n")) :]:
        matcher.accept(token)
    tokens = shortest_completion(matcher)
    assert not matcher.is_complete or tokens == []
    return begun + b"".join(bytes_of(tokenizer, token) for token in tokens).decode()


@pytest.mark.parametrize(
    ("begun", "whole"),
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
    schema = {
        "type": "object",
        "properties": {
            "long": {"type": "string", "minLength": 30},
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{2}$"},
            "list": {"type": "array", "items": {"enum": ["first", "second"]}, "minItems": 4},
            "optional": {"type": "string"},
        },
        "required": ["long", "code", "list"],
        "additionalProperties": False,
    }
    text = completed(Constraint.json_schema(schema), '{"long": "begun')
    assert is_valid(schema, json.loads(text))
    assert "optional" not in text
    assert len(json.loads(text)["long"]) == 30


def test_other_grammars_end_too():
    assert completed(Constraint.choices(["New York", "New Orleans"]), "New O") == "New Orleans"
    assert completed(Constraint.regex("(abc)+[0-9]"), "ab")[:3] == "abc"
    assert completed(Constraint.lark('start: "(" start ")" | "x"'), "((") == "((x))"


def test_what_can_not_be_ended_is_given_up(monkeypatch):
    from afm_mlx.guidance import matcher

    monkeypatch.setattr(matcher, "MAX_COMPLETION_BYTES", 20)
    matcher = Matcher(Constraint.regex("[a-z]{40}"), nano_tokenizer())
    assert shortest_completion(matcher) is None
