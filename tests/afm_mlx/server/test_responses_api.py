"""`/v1/responses` on the real server, by the official client."""

import json

import openai
import pytest

from afm_mlx.server.images import ImageMemory, RequestImages
from afm_mlx.server.request_fields.openai_responses import MessageItem
from afm_mlx.server.responses_api import KeptResponse, KeptResponses
from afm_mlx.server.server_options import ServerOptions
from tests.tools import server_stories as stories
from tests.tools.server import fail_after, running_server

MODEL = "afm-nano"
EVENT_FORMAT = {
    "type": "json_schema",
    "name": "Event",
    "description": "An event",
    "schema": {"type": "object", "properties": {name: {"type": "string"} for name in stories.EVENT_FIELDS},
     "required": list(stories.EVENT_FIELDS)},
}  # fmt: skip


def tools(definitions):
    return [
        {
            "type": "function",
            "name": name,
            "description": description,
            "parameters": stories.parameters(argument),
            "strict": False,
        }
        for name, (description, argument) in definitions.items()
    ]


@pytest.fixture(scope="module")
def server():
    with running_server(api_keys=("ann", "ben"), kv="float") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return server.openai("ann")


@pytest.fixture
def create(client):
    def made(input, **fields):
        return client.responses.create(model=MODEL, input=input, **fields)

    return made


def plain(response):
    """A response without its ids and times."""
    left = response.to_dict()
    for name in ("id", "created_at", "completed_at", "usage"):
        left.pop(name)
    for item in left["output"]:
        item.pop("id")
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content", ()):
            part.pop("parsed", None)
    return left


def test_text_streamed_and_whole(client, create):
    whole = create(stories.FORMAL, metadata={"for": "Hana"}, user="me", prompt_cache_key="key")
    assert whole.output_text == stories.FORMAL_ANSWER
    assert (whole.status, whole.metadata, whole.user) == ("completed", {"for": "Hana"}, "me")
    usage = whole.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    same = {"metadata": {"for": "Hana"}, "user": "me", "prompt_cache_key": "key"}
    with client.responses.stream(model=MODEL, input=stories.FORMAL, **same) as stream:
        events = list(stream)
    final = stream.get_final_response()
    assert plain(final) == plain(whole)
    assert final.usage.input_tokens == usage.input_tokens
    assert final.usage.output_tokens == usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert [event.type for event in events if event not in deltas] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    messages = [
        {"role": "developer", "content": "You are brief."},
        {"role": "user", "content": [{"type": "input_text", "text": stories.FORMAL}]},
    ]
    assert create(messages, instructions="And kind.").status == "completed"
    count = client.responses.input_tokens.count(model=MODEL, input=stories.FORMAL)
    assert count.input_tokens == usage.input_tokens


def test_a_tool_is_called_and_its_result_read(client, create):
    defined = tools(stories.STOP_TOOLS)
    asked = [{"role": "user", "content": stories.STOP}]
    first = create(asked, tools=defined, tool_choice="required")
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "stop_report", "completed")
    assert json.loads(call.arguments) == {"report": "Safety Dinner"}
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": stories.STOP_RESULT,
    }
    second = create([*asked, *first.output, result], tools=defined)
    assert second.output_text == stories.STOP_ANSWER
    # The same by continuing the first response.
    third = create([result], tools=defined, previous_response_id=first.id)
    assert third.output_text == stories.STOP_ANSWER
    assert third.usage.input_tokens == second.usage.input_tokens
    with client.responses.stream(
        model=MODEL, input=asked, tools=defined, tool_choice="required"
    ) as stream:
        events = list(stream)
    assert plain(stream.get_final_response()) == plain(first)
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]


def test_which_tools_are_called(create):
    defined = tools(stories.ALARM_TOOLS)

    def names(**fields):
        response = create(stories.ALARM, tools=defined, max_output_tokens=200, **fields)
        return [item.name for item in response.output if item.type == "function_call"]

    assert names() == names(parallel_tool_calls=False) == ["set_alarm"]
    assert names(tool_choice="none") == []
    assert names(tool_choice={"type": "function", "name": "play_music"}) == ["play_music"]
    music = {"type": "allowed_tools", "tools": [{"type": "function", "name": "play_music"}]}
    assert set(names(tool_choice={**music, "mode": "required"})) == {"play_music"}
    assert set(names(tool_choice={**music, "mode": "auto"})) <= {"play_music"}
    one = names(tool_choice="required", parallel_tool_calls=False)
    assert len(one) == 1


def test_answers_under_a_schema(client, create):
    response = create(stories.EVENT, text={"format": EVENT_FORMAT})
    assert json.loads(response.output_text) == stories.EVENT_ANSWER
    parsed = client.responses.parse(model=MODEL, input=stories.EVENT, text_format=stories.Event)
    assert isinstance(parsed.output_parsed, stories.Event)
    with client.responses.stream(
        model=MODEL, input=stories.EVENT, text_format=stories.Event
    ) as stream:
        stream.until_done()
    assert stream.get_final_response().output_parsed == parsed.output_parsed
    anything = create("Say it", text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert anything.status == "incomplete" or isinstance(json.loads(anything.output_text), dict)
    # Calls or an answer under the schema, in one request
    both = create(stories.EVENT, text={"format": EVENT_FORMAT}, tools=tools(stories.ALARM_TOOLS))
    (item,) = both.output
    assert item.type == "function_call" or set(json.loads(both.output_text)) == set(
        stories.EVENT_FIELDS
    )


def test_a_cut_answer_is_incomplete(client, create):
    for fields in ({}, {"text": {"format": EVENT_FORMAT}}):
        response = create(stories.FORMAL, max_output_tokens=3, **fields)
        assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage.output_tokens == 3
        events = list(create(stories.FORMAL, max_output_tokens=3, stream=True, **fields))
        assert events[-1].type == "response.incomplete"
        assert plain(events[-1].response) == plain(response)
    # Such a response can be continued, too.
    assert create("And?", previous_response_id=response.id, max_output_tokens=5).output


def test_log_probabilities(create):
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    response = create(stories.FORMAL, include=include, top_logprobs=2)
    (part,) = response.output[0].content
    assert "".join(each.token for each in part.logprobs) == part.text
    for each in part.logprobs:
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)  # it is greedy
        assert len(each.top_logprobs) == 2
        assert bytes(each.bytes).decode() == each.token
    events = list(create(stories.FORMAL, include=include, top_logprobs=2, stream=True))
    streamed = [
        each.token
        for event in events
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert streamed == [each.token for each in part.logprobs]
    assert not create(stories.FORMAL).output[0].content[0].logprobs
    held = create(stories.FORMAL, include=include, top_logprobs=20, text={"format": EVENT_FORMAT})
    likely = [
        top.logprob for each in held.output[0].content[0].logprobs for top in each.top_logprobs
    ]
    assert min(likely) == -9999  # tokens that the format forbids: JSON has no -infinity


def test_responses_are_kept_for_their_client(server, client, create):
    response = create(stories.FORMAL)
    assert response.store
    assert client.responses.retrieve(response.id) == response
    other = server.openai("ben")
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        other.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        other.responses.create(model=MODEL, input="And?", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"
    client.responses.delete(response.id)
    for id in (response.id, create(stories.FORMAL, store=False).id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(id)


def test_items_of_kept_responses_can_be_referenced(server, client, create):
    defined = tools(stories.STOP_TOOLS)
    asked = [{"role": "user", "content": stories.STOP}]
    first = create(asked, tools=defined, tool_choice="required")
    (call,) = first.output
    reference = {"type": "item_reference", "id": call.id}
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": stories.STOP_RESULT,
    }
    second = create([*asked, reference, result], tools=defined)
    assert second.output_text == stories.STOP_ANSWER
    whole = [*asked, call, result, second.output[0], {"role": "user", "content": "Thanks"}]
    short = [*asked, reference, result, {"type": "item_reference", "id": second.output[0].id}]
    short.append(whole[-1])
    counts = [
        client.responses.input_tokens.count(model=MODEL, input=each, tools=defined).input_tokens
        for each in (whole, short)
    ]
    assert counts[0] == counts[1]
    with pytest.raises(openai.BadRequestError, match="no item of a kept response") as caught:
        server.openai("ben").responses.create(model=MODEL, input=[*asked, reference, result])
    assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")


def item(**fields):
    return {"input": [fields]}


USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
REFUSED = [
    ("input", {}),
    ("input", {"input": []}),
    ("input[0].id", item(type="item_reference", id="msg_1")),
    ("input[0].type", item(type="compaction", encrypted_content="x")),
    ("input", item(type="reasoning", id="rs_1", summary=[])),
    ("input[0].role", item(role="tool", content="Hi")),
    ("input[0].content[0].type", item(role="user", content=[{"type": "input_image"}])),
    ("input[0].content[0]", item(role="user", content=["Hi"])),
    ("input[0].content", item(role="user")),
    ("input[0].call_id", item(type="function_call_output", call_id="x", output="")),
    ("input", {"input": [USER, CALL]}),
    ("input[2]", {"input": [USER, CALL, USER]}),
    ("input[1].arguments", {"input": [USER, {**CALL, "arguments": "{"}]}),
    ("tool_choice", {"tools": [{"type": "web_search"}], "tool_choice": "required"}),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools", {"tools": [{**TOOL, "parameters": {"type": "nothing"}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "see"}}),
    ("tool_choice.type", {"tools": [TOOL], "tool_choice": {"type": "file_search"}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": "any"}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.schema", {"text": {"format": {**EVENT_FORMAT, "schema": {"type": "nothing"}}}}),
    ("input", {"input": [USER, {"role": "assistant", "content": "{"}],
     "text": {"format": {"type": "json_object"}}}),
    ("background", {"background": True}),
    ("include", {"include": ["everything"]}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("temperature", {"temperature": -1}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("seed", {"seed": 1}),
]  # fmt: skip


def test_refused_fields_are_named(server):
    with server.http(headers={"Authorization": "Bearer ann"}) as http:
        for param, fields in REFUSED:
            body = {"model": MODEL, "input": "Hi", **fields} if fields else {"model": MODEL}
            response = http.post("/v1/responses", json=body)
            assert response.status_code == 400, (param, fields, response.text)
            error = response.json()["error"]
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
            assert response.headers["x-request-id"].startswith("req_")
        for neutral in (
            {"background": False, "truncation": "disabled", "service_tier": "auto"},
            {"reasoning": {"effort": None}, "context_management": [], "tools": []},
        ):
            body = {"model": MODEL, "input": "Hi", "max_output_tokens": 1, **neutral}
            assert http.post("/v1/responses", json=body).status_code == 200, neutral


def test_errors_are_the_clients_exceptions(server, client, create, monkeypatch):
    with pytest.raises(openai.NotFoundError) as missing:
        client.responses.create(model="gpt-9", input="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        server.openai("nobody").responses.create(model=MODEL, input="Hi")
    with pytest.raises(openai.BadRequestError) as long:
        create("word " * 20_000)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "input")

    fail_after(monkeypatch, server, 4)
    with pytest.raises(openai.InternalServerError, match="its log says why"):
        create(stories.FORMAL)
    events = list(create(stories.FORMAL, stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.code == "server_error"
    assert "its log says why" in events[-1].response.error.message
    assert events[-1].sequence_number == len(events) - 1


def kept_response(text):
    item = MessageItem(role="assistant", content=text)
    images = RequestImages(None, 0, ServerOptions(), ImageMemory())
    messages = [{"role": "user", "content": text}]
    return KeptResponse(text.encode(), messages, images, {f"msg {text}": item})


def test_each_client_keeps_its_recent_responses():
    kept = KeptResponses(2, 1 << 20)
    for client in ("ann", "ben"):
        for number in range(3):
            kept.keep(client, f"{client}-{number}", kept_response(f"{client} {number}"))
            kept.get(client, f"{client}-0")  # recently used, so another one is dropped
    assert [kept.get("ann", f"ann-{n}") is not None for n in range(3)] == [True, False, True]
    assert kept.get("ben", "ben-2").body == b"ben 2"
    assert kept.find_item("ben", "msg ben 2").content == "ben 2"
    assert kept.find_item("ben", "msg ann 2") is kept.find_item("ann", "msg ann 1") is None
    assert kept.get("ben", "ann-2") is None
    assert not kept.remove("ben", "ann-2")
    assert kept.find_item("ann", "msg ann 2") is not None
    assert kept.remove("ann", "ann-2")
    assert kept.find_item("ann", "msg ann 2") is None
    assert not kept.remove("ann", "ann-2")


def test_kept_responses_have_limited_bytes():
    kept = KeptResponses(1000, 10_000)
    for number in range(100):
        kept.keep("", str(number), kept_response("x" * 1000))
    assert 2 <= sum(kept.get("", str(number)) is not None for number in range(100)) <= 4
    assert kept.get("", "99") is not None
    kept.keep("", "huge", kept_response("x" * 20_000))
    assert kept.get("", "huge") is None
    assert not KeptResponses(0, 1000).is_on
