"""Answers that call tools: only those that are declared, with arguments that their schemas allow."""

import json

import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import MAX_CALLS, tool_call_constraint
from tests.afm_mlx.guidance.test_constraint import is_whole
from tests.tools.cases import each

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TIME = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/time"}},
    "required": ["at"],
    "$defs": {"time": {"type": "integer"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}},
    {"type": "function", "function": {"name": "alarm", "arguments": TIME}},
    {"name": 'say "it"'},
]  # fmt: skip
WEATHER = {"name": "weather", "arguments": {"city": "Porto"}}
ALARM = {"name": "alarm", "arguments": {"at": 7}}
SAY = {"name": 'say "it"', "arguments": {"any": [1]}}


def calls(*made):
    return f"<executable_start> ```function\n{json.dumps(list(made))}```<executable_end>"


@each(
    "choice, taken, refused",
    [
        ("auto", ["", "Some text.", calls(WEATHER), "First: " + calls(ALARM, WEATHER, SAY)],
         [calls(), calls(WEATHER) + "more", calls(*[SAY] * (MAX_CALLS + 1))]),
        ("none", ["", "Some text."], [calls(WEATHER)]),
        ("required", [calls(SAY), calls(WEATHER, ALARM), calls(*[SAY] * MAX_CALLS)], ["", "Text"]),
        ("one", [calls(SAY), calls(WEATHER)], ["", calls(SAY, SAY)]),
        ("alarm", [calls(ALARM)], ["Text", calls(WEATHER), calls(ALARM, ALARM)]),
    ],
)  # fmt: skip
def test_calls_are_those_of_declared_tools(choice, taken, refused):
    constraint = tool_call_constraint(TOOLS, choice)
    assert [text for text in taken if not is_whole(constraint, text)] == []
    wrong = [
        calls({"name": "wether", "arguments": {"city": "Porto"}}),
        calls({"name": "weather", "arguments": {"town": "Porto"}}),
        calls({"name": "weather", "arguments": {"city": "Porto", "at": 7}}),
        calls({"name": "alarm", "arguments": {"at": "7"}}),
        calls({"name": "alarm", "arguments": {}}),
    ]
    assert [text for text in [*refused, *wrong] if is_whole(constraint, text)] == []


def test_without_tools_there_is_text_only():
    assert is_whole(tool_call_constraint([], "auto"), "Some text.")
    assert not is_whole(tool_call_constraint([], "auto"), calls(WEATHER))


def test_an_answer_without_calls_may_have_a_form_of_its_own():
    form = Constraint.json_schema(TIME)
    either = tool_call_constraint(TOOLS, "auto", form)
    for text in ('{"at": 7}', calls(WEATHER), calls(ALARM, SAY)):
        assert is_whole(either, text)
    wrong = ["", "Text", '{"at": "7"}', 'So: {"at": 7}']
    for text in (*wrong, "So: " + calls(WEATHER), '{"at": 7}' + calls(SAY)):
        assert not is_whole(either, text)
    assert is_whole(tool_call_constraint(TOOLS, "none", form), '{"at": 7}')
    assert not is_whole(tool_call_constraint(TOOLS, "required", form), '{"at": 7}')


@each(
    "tools, choice, words",
    [
        (TOOLS, "wether", ["wether", "weather?", "required"]),
        ([], "required", ["required"]),
        ([{"function": {}}], "auto", ["tools[0]", "definition"]),
        (["weather"], "auto", ["tools[0]"]),
        ([*TOOLS, TOOLS[0]], "auto", ["tools[3]", "another tool"]),
        ([{"name": "a", "parameters": {"type": "objekt"}}], "auto", ["objekt"]),
    ],
)
def test_tools_and_choices_that_can_not_be_honoured(tools, choice, words):
    with pytest.raises(ConstraintError) as refused:
        tool_call_constraint(tools, choice)
    assert all(word in str(refused.value) for word in words), refused.value
