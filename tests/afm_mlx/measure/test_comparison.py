"""Answers against expected ones: as text, JSON and calls."""

import json

from afm_mlx.measure.evaluation import can_be_compared, is_right, natural_comparison
from tests.tools.cases import each


def calls(*calls, before="", after=""):
    return f"{before}<executable_start> ```function\n{json.dumps(calls)}```<executable_end>{after}"


CALL = {"name": "f", "arguments": {"a": 1, "b": [True, "x"]}}
TURNED = {"arguments": {"b": [True, "x"], "a": 1.0}, "name": "f"}


@each(
    "comparison, answer, expected, right",
    [
        ("text", " the fox\n", "the fox", True),
        ("text", "the  fox", "the fox", False),
        ("text", '{"a":1}', '{"a": 1}', False),
        ("json", ' {"b": [1, 2.0], "a": null}', '{"a":null,"b":[1.0,2]}', True),
        ("json", '{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", "[0, 1]", "[false, true]", False),
        ("json", '{"a": 1, "b": null}', '{"a": 1}', False),
        ("json", '{"a": "x"}', '{"a": "x "}', False),
        ("json", '{"a": 1}', "[1]", False),
        ("json", "[1]", '{"a": 1}', False),
        ("json", '{"a": 1', '{"a": 1}', False),
        ("json", "[" * 100_000, "[]", False),
        ("calls", calls(TURNED), calls(CALL), True),
        ("calls", calls(CALL, CALL), calls(CALL), False),
        ("calls", calls(CALL, {"name": "g"}), calls({"name": "g"}, CALL), False),
        ("calls", calls(CALL, before="Sure. "), calls(CALL), False),
        ("calls", calls(CALL, before="Sure. \n"), calls(CALL, before="Sure."), True),
        ("calls", calls(CALL, after="x"), calls(CALL), False),
        ("calls", calls({"name": "g", "arguments": CALL["arguments"]}), calls(CALL), False),
        ("calls", "Sure.", calls(CALL), False),
        ("calls", calls(CALL)[:-20], calls(CALL), False),
    ],
)
def test_answers_are_compared_as_what_they_are(comparison, answer, expected, right):
    assert is_right(answer, expected, comparison) is right
    assert is_right(expected, expected, comparison)


@each(
    "expected, has_format, comparison",
    [
        ('{"a": 1}', True, "json"),
        ('{"a": 1}', False, "text"),
        ("a: 1", True, "text"),
        (calls(CALL), False, "calls"),
        (calls(CALL), True, "calls"),
        ("<executable_start> f()<executable_end>", False, "text"),
    ],
)
def test_the_comparison_follows_from_the_expected_answer(expected, has_format, comparison):
    assert natural_comparison(expected, has_format) == comparison
    assert can_be_compared(expected, comparison)
    assert not can_be_compared("a: 1", "json")
    assert not can_be_compared("a: 1", "calls")
