"""Conversations as coding agents hold them: the fields that they send with each request, and answers sent back.

The programs themselves are driven in `clients/`; here are bodies of the same fields, in a second or two.
"""

import re

import pytest

from tests.tools.scripted_server import MODEL, scripted_server

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
STEPS = (
    [("read", {"path": "a.txt"}), ("read", {"path": "b.txt"})],
    [("read", {"path": "c.txt"})],
    "All is read.",
)
CACHE = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture
def agent():
    with scripted_server(*STEPS) as (server, script), server.http() as http:

        def post(path, body):
            answered = http.post(path, json={"model": MODEL, **body})
            assert answered.status_code == 200, answered.text
            assert set(script.tools[-1]) == {"read"}  # the other tools are never offered
            return answered.json(), set(answered.headers["x-afm-ignored"].split(", "))

        yield post, script


def results(script):
    """What the model was shown of its calls' results, in their order, and what the user says behind each."""
    return re.findall(
        r"<turn_start> (?:tool|user)\s(.*?)<turn_end>", script.prompts[-1].partition("Go.")[2], re.S
    )


def test_an_agent_of_messages(agent):
    post, script = agent
    body = {
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You read files.", "cache_control": CACHE}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "somebody"},
        "service_tier": "auto",
        "temperature": 1,
        "tools": [{"name": "read", "input_schema": SCHEMA, "cache_control": CACHE, "defer_loading": True},
         {"type": "web_search_20260318", "name": "web_search", "max_uses": 5}, {"type": "computer_20251124",
         "name": "computer", "display_width_px": 9}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": CACHE}]},
         {"role": "system", "content": "Agents are claude and friends."}],
    }  # fmt: skip
    thought = {"type": "thinking", "thinking": "Which file?", "signature": "x"}
    for count in (2, 1):
        answer, ignored = post("/v1/messages", body)
        calls = answer["content"]
        assert [call["type"] for call in calls] == ["tool_use"] * count
        body["messages"] += [
            {"role": "assistant", "content": [thought, *calls]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Reminder."},  # before the results
                    *(
                        {
                            "type": "tool_result",
                            "tool_use_id": call["id"],
                            "content": [{"type": "text", "text": call["input"]["path"]}],
                            "is_error": False,
                            "cache_control": CACHE,
                        }
                        for call in reversed(calls)
                    ),
                ],
            },
        ]
    answer, ignored = post("/v1/messages", body)
    assert answer["content"][0]["text"].strip() == "All is read."
    assert results(script) == ["a.txt", "b.txt", "Reminder.", "c.txt", "Reminder."]
    assert "Go.\n\nAgents are claude and friends.<turn_end>" in script.prompts[-1]
    assert ignored == {
        "thinking",
        "context_management",
        "output_config.effort",
        "metadata",
        "system[].cache_control",
        "messages[].content[].cache_control",
        "messages[].content[thinking]",
        "tools[].cache_control",
        "tools[].defer_loading",
        "tools[web_search_20260318]",
        "tools[computer_20251124]",
    }


def test_an_agent_of_responses(agent):
    post, script = agent
    body = {
        "instructions": "You read files.",
        "client_metadata": {"session": "1"},
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "text": {"verbosity": "low"},
        "store": False,
        "prompt_cache_key": "1",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "truncation": "auto",
        "tools": [{"type": "function", "name": "read", "strict": False, "parameters": SCHEMA},
         {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
         {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}, {"type": "local_shell"},
         {"type": "web_search", "external_web_access": False}],
        "input": [{"type": "message", "role": "developer", "content": [{"type": "input_text",
         "text": "Dev."}]}, {"type": "message", "role": "user", "content": [{"type": "input_text",
         "text": "Go."}]}],
    }  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    for count in (2, 1):
        answer, ignored = post("/v1/responses", body)
        calls = answer["output"]
        assert [call["type"] for call in calls] == ["function_call"] * count
        outputs = [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": call["arguments"],
            }
            for call in reversed(calls)
        ]
        late = {"type": "message", "role": "developer", "content": "Be quick."}
        body["input"] += [thought, *calls, *outputs, late]
    answer, ignored = post("/v1/responses", body)
    assert answer["output"][0]["content"][0]["text"].strip() == "All is read."
    paths = [f'{{"path": "{name}.txt"}}' for name in "abc"]
    assert results(script) == [*paths[:2], "Be quick.", paths[2], "Be quick."]
    assert ignored == {
        "client_metadata",
        "reasoning.effort",
        "reasoning.summary",
        "text.verbosity",
        "truncation",
        "input[reasoning]",
        "tools[namespace]",
        "tools[custom]",
        "tools[local_shell]",
        "tools[web_search]",
    }


def test_an_agent_of_chats(agent):
    post, script = agent
    body = {
        "reasoning_effort": "medium",
        "verbosity": "low",
        "service_tier": "priority",
        "store": True,
        "metadata": {"run": "1"},
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_retention": "24h",
        "max_completion_tokens": -1,
        "top_k": -1,
        "stop": None,
        "tools": [{"type": "function", "function": {"name": "read", "parameters": SCHEMA}},
         {"type": "custom", "custom": {"name": "apply_patch"}}],
        "messages": [{"role": "system", "content": "You read files."}, {"role": "user", "name": "ann",
         "content": [{"type": "text", "text": "Go.", "cache_control": CACHE}]}],
    }  # fmt: skip
    for count in (2, 1):
        answer, ignored = post("/v1/chat/completions", body)
        message = answer["choices"][0]["message"]
        calls = message["tool_calls"]
        assert len(calls) == count
        for index, call in enumerate(calls):
            call["index"] = index
        # As litellm and others give back what they were sent
        message |= {
            "provider_specific_fields": {"refusal": None},
            "reasoning_content": "Which file?",
            "function_call": None,
            "annotations": [],
            "audio": None,
        }
        body["messages"].append(message)
        body["messages"] += [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "read",
                "content": call["function"]["arguments"],
            }
            for call in reversed(calls)
        ]
        body["messages"].append({"role": "system", "content": "Be quick."})
    answer, ignored = post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"].strip() == "All is read."
    paths = [f'{{"path": "{name}.txt"}}' for name in "abc"]
    assert results(script) == [*paths[:2], "Be quick.", paths[2], "Be quick."]
    assert ignored == {
        "reasoning_effort",
        "verbosity",
        "service_tier",
        "store",
        "metadata",
        "prediction",
        "prompt_cache_retention",
        "messages[].name",
        "messages[].content[].cache_control",
        "tools[custom]",
    }
