"""Messages of every accepted form become one form; what is not accepted is named."""

import copy
import json

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_messages import checked_messages, checked_tools, parse_tool_calls
from tests.tools.cases import each
from tests.tools.chats import CALL, USER

TEXT = {"type": "text", "text": "H"}


def calling(**message):
    return {"role": "assistant", "tool_calls": [CALL], **message}


def called(arguments):
    call = {"function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@each(
    ("message", "expected"),
    [
        (calling(content=""), called({"at": [1, "x"]})),
        (calling(content=None, refusal=None), called({"at": [1, "x"]})),
        # mlx-lm's data sets have calls without the enclosing "function".
        (calling(tool_calls=[{"name": "look", "arguments": {"a": 1}}]), called({"a": 1})),
        (called(None), called({})),
        (called('{"city": '), called('{"city": ')),
        (calling(content="x", tool_calls=[]), {"role": "assistant", "content": "x"}),
        ({**USER, "content": [TEXT, TEXT]}, {**USER, "content": "HH"}),
        ({**USER, "content": []}, {**USER, "content": ""}),
        ({"role": "tool", "content": []}, {"role": "tool", "content": []}),
        ({"role": "tool", "content": [TEXT]}, {"role": "tool", "content": "H"}),
        ({**USER, "response_format": {"type": "text"}}, USER),
    ],
)
def test_forms_that_mean_the_same(message, expected):
    given = copy.deepcopy(message)
    assert checked_messages([message]) == [expected]
    assert message == given


@each(
    ("messages", "words"),
    [
        ([], "empty"),
        ("Hi", "must be a list .* got str"),
        (USER, "must be a list .* got dict"),
        (["Hi"], r"messages\[0\] must be a dict .* got str"),
        ([USER, {"content": "x"}], r"messages\[1\] has the role None; allowed are system, user"),
        ([{**USER, "role": "human"}], r"messages\[0\] has the role 'human'; allowed"),
        ([USER, {**USER, "role": "system"}], r"messages\[1\] has the role 'system'"),
        ([USER, {"role": "user"}], r"messages\[1\] \(user\) has nothing .* allowed is a str"),
        ([calling(tool_calls=None)], r"messages\[0\].*null together with tool_calls"),
        ([{**USER, "content": 3}], r"messages\[0\] \(user\) has int as 'content'"),
        ([{**USER, "content": {"a": 1}}], r"messages\[0\] \(user\) has dict"),
        ([{**USER, "content": [TEXT, {"type": "image_url"}]}], r"\[1\] has the type 'image_url'; "),
        ([{**USER, "content": ["a"]}], r"\['content'\]\[0\] has the type str"),
        ([{"role": "tool", "content": ["a"]}], r"\['content'\]\[0\] must be a tool definition"),
        ([calling(tool_calls="f")], r"\['tool_calls'\] must be a list"),
        ([calling(tool_calls=[{"function": {}}])], r"tool_calls'\]\[0\] must be"),
        ([{**USER, "response_format": {"type": "xml"}}], r"\['response_format'\] must be .* got"),
        ([{**USER, "response_format": {"type": "json_schema"}}], r"\['response_format'\] must be"),
    ],
)
def test_bad_messages(messages, words):
    with pytest.raises(TokenizerError, match=words):
        checked_messages(messages)


@pytest.mark.parametrize(
    ("tools", "words"),
    [(["f"], r"tools\[0\] must be a tool definition"), ({"a": 1}, "tools must be a list")],
)
def test_bad_tools(tools, words):
    with pytest.raises(TokenizerError, match=words):
        checked_tools(tools)


def test_parse_tool_calls():
    calls = [{"name": "a", "arguments": {"x": "```\n"}}, {"name": "b", "arguments": {}}]
    assert parse_tool_calls(f" ```function\n{json.dumps(calls)}```", tools=[]) == calls
    assert parse_tool_calls('{"name": "b"}') == calls[1:]
    for broken in ("```function\n[{", "[3]", '[{"arguments": {}}]', "[" * 100000):
        with pytest.raises(TokenizerError, match="tool call"):
            parse_tool_calls(broken)
