"""`/v1/messages` on the real server, by the official client."""

import json
from typing import Literal

import anthropic
import pytest
from pydantic import BaseModel

from tests.tools import server_stories as stories
from tests.tools.server import fail_after, running_server

MODEL = "afm-nano"


class Event(BaseModel):
    title: str
    day: Literal["Monday", "Tuesday"]


def tools(definitions):
    return [
        {
            "name": name,
            "description": description,
            "input_schema": stories.parameters(argument),
            "cache_control": {"type": "ephemeral"},
        }
        for name, (description, argument) in definitions.items()
    ]


@pytest.fixture(scope="module")
def server():
    with running_server(api_keys=("ann",), max_body=1 << 18, kv="float") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return anthropic.Anthropic(base_url=server.url, api_key="ann", max_retries=0)


@pytest.fixture(scope="module")
def http(server):
    with server.http(headers={"x-api-key": "ann"}) as plain:
        yield plain


@pytest.fixture
def create(client):
    def made(content, **fields):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return client.messages.create(
            **{"model": MODEL, "max_tokens": 200, **fields}, messages=messages
        )

    return made


def plain(message):
    """A message without its ids and times."""
    left = message.to_dict()
    left.pop("stop_details", None)
    for block in left["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return {**left, "id": None, "usage": None}


def events_of(response):
    """The names and the data of a stream's events."""
    found = []
    for event in response.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_text_streamed_and_whole(client, create, http):
    whole = create(stories.FORMAL, metadata={"user_id": "me"})
    assert [block.text for block in whole.content] == [stories.FORMAL_ANSWER]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    asked = {"model": MODEL, "messages": [{"role": "user", "content": stories.FORMAL}]}
    with client.messages.stream(**asked, max_tokens=200) as stream:
        assert "".join(stream.text_stream) == stories.FORMAL_ANSWER
        final = stream.get_final_message()
    assert plain(final) == plain(whole)
    usage = final.usage
    count = client.messages.count_tokens(**asked).input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == count
    assert usage.output_tokens == whole.usage.output_tokens
    # Clients of the API's older version, with its header for keys, and whatever betas they know
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    body = {**asked, "max_tokens": 200, "stream": True}
    response = http.post("/v1/messages?beta=true", json=body, headers=headers)
    assert response.headers["request-id"].startswith("req_")
    events = events_of(response)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert list(dict.fromkeys(names)) == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == count


def test_a_tool_is_called_and_its_result_read(client, create):
    defined = tools(stories.STOP_TOOLS)
    asked = [{"role": "user", "content": [{"type": "text", "text": stories.STOP}]}]
    first = create(asked, tools=defined, tool_choice={"type": "any"})
    (call,) = first.content
    assert (call.name, call.input) == ("stop_report", {"report": "Safety Dinner"})
    assert first.stop_reason == "tool_use"
    assert call.id.startswith("toolu_")
    with client.messages.stream(
        model=MODEL, max_tokens=200, messages=asked, tools=defined, tool_choice={"type": "any"}
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        assert plain(stream.get_final_message()) == plain(first)
    assert json.loads("".join(parts)) == call.input
    assert len(parts) > 1

    def answered(**result):
        block = {"type": "tool_result", "tool_use_id": call.id, **result}
        turns = [
            *asked,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [block]},
        ]
        (text,) = create(turns, tools=defined).content
        return text.text, client.messages.count_tokens(model=MODEL, messages=turns).input_tokens

    text, count = answered(content=stories.STOP_RESULT)
    assert text == stories.STOP_ANSWER
    blocks = [{"type": "text", "text": stories.STOP_RESULT}]
    assert answered(content=blocks) == (text, count)
    assert answered(content=stories.STOP_RESULT, is_error=True)[1] > count
    assert answered()[1] < count


def test_which_tools_are_called(create):
    defined = tools(stories.ALARM_TOOLS)

    def names(**choice):
        message = create(stories.ALARM, tools=defined, tool_choice=choice)
        return [block.name for block in message.content if block.type == "tool_use"]

    assert names(type="auto") == ["set_alarm"]
    assert names(type="auto", disable_parallel_tool_use=True) == ["set_alarm"]
    assert names(type="none") == []
    assert names(type="tool", name="play_music") == ["play_music"]
    assert len(names(type="any", disable_parallel_tool_use=True)) == 1


def test_answers_under_a_schema(client, create):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": stories.EVENT}]}
    parsed = client.messages.parse(**asked, max_tokens=200, output_format=Event)
    assert isinstance(parsed.parsed_output, Event)
    with client.messages.stream(**asked, max_tokens=200, output_format=Event) as stream:
        assert stream.get_final_message().parsed_output == parsed.parsed_output
    schema = {
        "title": "Event",
        "description": "An event",
        "type": "object",
        "properties": {name: {"type": "string"} for name in stories.EVENT_FIELDS},
        "required": list(stories.EVENT_FIELDS),
    }
    message = create(
        stories.EVENT, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert set(json.loads(message.content[0].text)) == set(stories.EVENT_FIELDS)


def test_stop_sequences_and_limits(create):
    message = create(stories.FORMAL, stop_sequences=["never", " to att"])
    assert message.content[0].text == stories.FORMAL_ANSWER.partition(" to att")[0]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " to att")
    message = create(stories.FORMAL, max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    # A call that is cut has no input yet.
    call = {"tools": tools(stories.ALARM_TOOLS), "tool_choice": {"type": "any"}}
    message = create(stories.ALARM, max_tokens=20, **call)
    assert message.stop_reason == "max_tokens"
    assert [block.input for block in message.content] == [{}]
    # The API's newer version has no sampling, but this server does.
    call["tool_choice"] = {"type": "tool", "name": "play_music"}

    def songs(**fields):
        messages = [create("Any", **call, extra_body=fields) for _ in range(5)]
        # A song without an end is cut off.
        return {message.content[0].input.get("song") for message in messages}

    assert len(songs(temperature=1.0, top_k=50)) > 1
    assert len(songs(temperature=1.0, top_p=0)) == 1


def test_system_prompts_blocks_and_begun_answers(client):
    def count(content="Hi", **fields):
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return client.messages.count_tokens(model=MODEL, messages=messages, **fields).input_tokens

    marked = {
        "type": "text",
        "text": "Be kind",
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
    }
    plain_block = {"type": "text", "text": "Be brief"}
    assert count(system=[plain_block, marked]) == count(system="Be brief\n\nBe kind")
    front = {"role": "system", "content": [marked]}
    user = {"role": "user", "content": "Hi"}
    assert count([front, user], system="Be brief") == count(system="Be brief\n\nBe kind")
    assert count([{"role": "user", "content": [plain_block, marked]}]) == count(
        "Be brief\n\nBe kind"
    )
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    thoughts = [user, {"role": "assistant", "content": [thought]}]
    assert count(thoughts) == count([user])
    begun = [
        {"role": "user", "content": stories.FORMAL},
        {"role": "assistant", "content": "Dear Hana, I am"},
    ]
    message = client.messages.create(model=MODEL, max_tokens=50, messages=begun)
    assert message.content[0].text.endswith("the Film Lecture.")
    assert not message.content[0].text.startswith("Dear")


def user(*blocks):
    return {"messages": [{"role": "user", "content": list(blocks)}]}


USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": ""}
CALLED = [USER, {"role": "assistant", "content": [CALL]}]
REFUSED = [
    ("messages", {"messages": []}),
    ("messages", {"messages": CALLED}),
    ("messages[0].role", {"messages": [{"role": "tool", "content": "Hi"}]}),
    ("messages[0].content[0].type", user({"type": "image", "source": {}})),
    ("messages[0].content[0].type", user({"type": "document", "source": {}})),
    ("messages[0].content[0].type", user(CALL)),
    ("messages[0].content[0].tool_use_id", user(RESULT)),
    ("messages[2].content[0].content[0].type", {"messages": [*CALLED, {"role": "user",
     "content": [{**RESULT, "content": [{"type": "image"}]}]}]}),
    ("messages[1]", {"messages": [USER, {"role": "assistant", "content": [CALL, {"type": "text",
     "text": "So"}]}]}),
    ("system[0].type", {"system": [{"type": "image"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "look"}]}),
    ("tools[0].allowed_callers", {"tools": [{**TOOL, "allowed_callers": ["code"]}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "see"}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema",
     "schema": {"type": "nothing"}}}}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": None}),
    ("temperature", {"temperature": 2}),
    ("stop_sequences", {"stop_sequences": [""]}),
    ("seed", {"seed": 1}),
]  # fmt: skip


def test_refused_fields_are_named(http):
    for param, fields in REFUSED:
        body = {"model": MODEL, "max_tokens": 5, "messages": [USER], **fields}
        response = http.post("/v1/messages", json=body)
        assert response.status_code == 400, (param, fields, response.text)
        reported = response.json()
        assert (reported["type"], reported["error"]["type"]) == ("error", "invalid_request_error")
        assert param in reported["error"]["message"], (param, reported)
        assert reported["request_id"] == response.headers["request-id"]
    neutral = {
        "thinking": {"type": "disabled"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "tools": [
            {**TOOL, "name": "see", "type": None},
            {**TOOL, "type": "custom", "eager_input_streaming": True, "strict": True},
        ],
    }
    body = {"model": MODEL, "max_tokens": 1, "messages": [USER], **neutral}
    assert http.post("/v1/messages", json=body).status_code == 200
    response = http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-01-01"})
    assert "anthropic-version" in response.json()["error"]["message"]


def test_errors_are_the_clients_exceptions(server, client, create, http, monkeypatch):
    with pytest.raises(anthropic.NotFoundError) as missing:
        create("Hi", model="claude-9")
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]
    other = anthropic.Anthropic(base_url=server.url, api_key="nobody", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        other.messages.create(model=MODEL, max_tokens=5, messages=[USER])
    assert unknown.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        create("word " * 20_000)
    response = http.post("/v1/messages", content=b"x" * (1 << 19))
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")

    fail_after(monkeypatch, server, 4)
    with pytest.raises(anthropic.InternalServerError, match="its log says why"):
        create(stories.FORMAL)
    events = []
    with pytest.raises(anthropic.APIStatusError, match="its log says why"):
        events.extend(create(stories.FORMAL, stream=True))
    body = {"model": MODEL, "max_tokens": 50, "stream": True, "messages": [USER]}
    name, data = events_of(http.post("/v1/messages", json=body))[-1]
    assert (name, data["error"]["type"]) == ("error", "api_error")
