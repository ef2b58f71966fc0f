"""Agents: a framework over OpenAI's chats and responses, and conversations as coding agents hold them."""

import asyncio
import re

import pytest
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.tools import server_stories as stories
from tests.tools.scripted_server import MODEL, scripted_server
from tests.tools.server import running_server


@pytest.fixture(scope="module")
def provider():
    with running_server(kv="float") as server:
        yield OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_an_agent_calls_a_tool_and_gives_a_typed_answer(provider, kind):
    model = kind("afm-nano", provider=provider)
    orders = []

    def track_order(order: str) -> dict:
        """Find an order"""
        orders.append(order)
        return {"city": "Hitton", "arrives": "March 14"}

    tracking = Agent(model, tools=[track_order], model_settings={"tool_choice": "auto"})
    # Typed answers by a schema, and as the arguments of a tool that has to be called
    typed = Agent(model, output_type=NativeOutput(stories.Event))
    called = Agent(model, output_type=stories.Event)

    async def talk():
        run = await tracking.run("Track order L5526.")
        assert run.output == "Order L5526 is in Hitton and arrives on March 14."
        async with tracking.run_stream("Track order L5526.") as stream:
            texts = [text async for text in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(texts) == run.output
        assert len(texts) > 5
        assert orders == ["L5526", "L5526"]
        more = await tracking.run("Thank you!", message_history=run.all_messages())
        assert more.output
        assert len(more.all_messages()) == 6

        event = stories.Event(**stories.EVENT_ANSWER)
        assert (await typed.run(stories.EVENT)).output == event
        assert isinstance((await called.run(stories.EVENT)).output, stories.Event)
        async with typed.run_stream(stories.EVENT) as stream:
            *partial, final = [each async for each in stream.stream_output(debounce_by=None)]
        assert final == event
        assert partial[0].title != ""
        assert partial[0].place != event.place

    asyncio.run(talk())


# -- bodies with the fields that coding agents send; `clients/` drives the programs themselves

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
STEPS = (
    [("read", {"path": "a.txt"}), ("read", {"path": "b.txt"})],
    [("read", {"path": "c.txt"})],
    "All is read.",
)
CACHE = {"type": "ephemeral", "ttl": "1h"}


@pytest.fixture(params=[None, "qwen3"], ids=["afm", "qwen3"])
def agent(request):
    with scripted_server(*STEPS, family=request.param) as (server, script), server.http() as http:

        def post(path, body):
            answered = http.post(path, json={"model": MODEL, **body})
            assert answered.status_code == 200, answered.text
            assert set(script.tools[-1]) == {"read"}  # the other tools are never offered
            return answered.json(), set(answered.headers["x-afm-ignored"].split(", "))

        yield post, script


def results(script):
    """The tool results and user texts that the model was shown after "Go.", in order."""
    shown = script.prompts[-1].partition("Go.")[2]
    if "<|im_start|>" in shown:
        results = r"<tool_response>\n(.*?)\n</tool_response>"
        return re.findall(rf"{results}|<\|im_start\|>user\n(Reminder\.)", shown, re.S)
    return re.findall(r"<turn_start> (?:tool|user)\s(.*?)<turn_end>", shown, re.S)


def test_an_agent_of_messages(agent):
    post, script = agent
    body = {
        "max_tokens": 32000, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": "somebody"}, "service_tier": "auto", "temperature": 1,
        "system": [{"type": "text", "text": "You read files.", "cache_control": CACHE}],
        "tools": [
            {"name": "read", "input_schema": SCHEMA, "cache_control": CACHE, "defer_loading": True},
            {"type": "web_search_20260318", "name": "web_search", "max_uses": 5},
            {"type": "computer_20251124", "name": "computer", "display_width_px": 9},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Go.", "cache_control": CACHE}]},
            {"role": "system", "content": "Agents are claude and friends."},
        ],
    }  # fmt: skip
    thought = {"type": "thinking", "thinking": "Which file?", "signature": "x"}
    reminder = {"type": "text", "text": "Reminder."}
    for count in (2, 1):
        answer, _ = post("/v1/messages", body)
        calls = answer["content"]
        assert [call["type"] for call in calls] == ["tool_use"] * count
        read = [
            {
                "type": "tool_result", "tool_use_id": call["id"], "is_error": False,
                "content": [{"type": "text", "text": call["input"]["path"]}], "cache_control": CACHE,
            }
            for call in reversed(calls)
        ]  # fmt: skip
        body["messages"] += [
            {"role": "assistant", "content": [thought, *calls]},
            {"role": "user", "content": [reminder, *read]},  # the text before the results
        ]
    answer, ignored = post("/v1/messages", body)
    assert answer["content"][0]["text"].strip() == "All is read."
    shown = ["".join(each) for each in results(script)]
    assert shown == ["a.txt", "b.txt", "Reminder.", "c.txt", "Reminder."]
    assert "Go.\n\nAgents are claude and friends.<" in script.prompts[-1]
    thinking = {"thinking", "output_config.effort", "messages[].content[thinking]"}
    assert ignored - thinking == {
        "context_management", "metadata", "system[].cache_control",
        "messages[].content[].cache_control", "tools[].cache_control",
        "tools[].defer_loading", "tools[web_search_20260318]", "tools[computer_20251124]",
    }  # fmt: skip
    # The Qwen3-shaped model thinks, and takes them.
    assert ignored & thinking == (set() if "<|im_start|>" in script.prompts[-1] else thinking)


def test_other_providers_tools_are_never_offered(agent):
    post, _ = agent
    tool = {"type": "function", "name": "read", "parameters": SCHEMA}
    nested = {"type": "namespace", "name": "agents", "tools": [{**tool, "name": "spawn"}]}
    others = [{"type": "custom", "name": "patch"}, {"type": "web_search"}, nested]
    go = {"role": "user", "content": "Go."}
    chat_tools = [{"type": "function", "function": tool}, others[0]]
    answer, ignored = post("/v1/chat/completions", {"messages": [go], "tools": chat_tools})
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2
    assert ignored == {"tools[custom]"}
    answer, ignored = post("/v1/responses", {"input": [go], "tools": [tool, *others]})
    assert [item["type"] for item in answer["output"]] == ["function_call"] * 2
    assert ignored == {"tools[custom]", "tools[web_search]", "tools[namespace]"}
