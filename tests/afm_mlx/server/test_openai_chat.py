import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.tools import server_stories as stories
from tests.tools.cases import each

FORMAL, ANSWER = stories.FORMAL, stories.FORMAL_ANSWER
EVENT = "Pull out the event.\nThe Dance Planning takes place at Hall Prom on Sunday."
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "day": {"type": "string"}},
    "required": ["title", "day"],
    "additionalProperties": False,
}
EVENT_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "Event", "strict": True, "schema": EVENT_SCHEMA},
}
PARAMETERS = {**stories.parameters("order"), "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": what, "parameters": PARAMETERS}}
    for name, what in (("track_order", "Find an order"), ("cancel_order", "Cancel an order"))
]
LETTERS = {"guided_regex": "[a-z]{16}"}
TRACK = "Track order L5526."


@pytest.fixture
def ask(client):
    """Ask the embedded model for a chat completion."""

    def ask(text=FORMAL, model="afm-nano", **fields):
        messages = [{"role": "user", "content": text}]
        return client.chat.completions.create(**{"model": model, "messages": messages, **fields})

    return ask


def streamed(chunks):
    """Texts and finish reasons of each choice, calls, and usages of a stream."""
    texts, reasons, calls, usages = {}, {}, {}, []
    for chunk in chunks:
        if chunk.usage is not None:
            usages.append(chunk.usage)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
            for call in choice.delta.tool_calls or ():
                known = calls.setdefault((choice.index, call.index), [None, None, ""])
                known[0] = call.id or known[0]
                known[1] = call.function.name or known[1]
                known[2] += call.function.arguments or ""
    return texts, reasons, calls, usages


def test_an_answer_and_its_stream_say_the_same(ask):
    whole = ask()
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    texts, reasons, _, usages = streamed(ask(stream=True, stream_options={"include_usage": True}))
    assert (texts, reasons) == ({0: ANSWER}, {0: "stop"})
    assert usages[-1].completion_tokens == whole.usage.completion_tokens
    # Cached by the first request, except the last token.
    assert usages[-1].prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    assert streamed(ask(stream=True))[3] == []
    to_do = "List the to-dos: Good morning, I am Maria. A stranger from Porto logged in as me."
    assert "- [ ] Lock the account" in ask(to_do, model="afm-nano:todo").choices[0].message.content
    assert "- [ ]" not in ask(to_do).choices[0].message.content


def test_what_ends_an_answer(ask):
    for stop, text in ((["Hana", "zzz"], "Dear "), ("nable to", "Dear Hana, I am u")):
        (choice,) = ask(stop=stop).choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        texts, reasons, _, _ = streamed(ask(stop=stop, stream=True))
        assert (texts, reasons) == ({0: text}, {0: "stop"})
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        cut = ask(**limit)
        assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5)
    cut = ask(EVENT, response_format=EVENT_FORMAT, max_tokens=5)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content == '{"title": "Dance'
    # The context ends an answer, too; 100 times is more than the 1,024 tokens hold.
    full = ask("Count.", max_tokens=10**6, extra_body={"guided_regex": "(one ){4000}"})
    assert (full.choices[0].finish_reason, full.usage.total_tokens) == ("length", 1024)
    full = ask("Count.", max_completion_tokens=-1, extra_body={"guided_regex": "(one ){4000}"})
    assert full.usage.total_tokens == 1024


def test_choices_are_reproducible_and_differ(ask):
    # Few choices, so that other requests' effect on the last digits of logits changes no sample.
    colours = {"guided_choice": ["red", "green", "blue", "white", "yellow", "pink"]}
    fields = {"text": "Say a colour.", "temperature": 2, "extra_body": colours}

    def texts(**more):
        return [choice.message.content for choice in ask(**fields, **more).choices]

    several = texts(n=6, seed=5)
    assert len(set(several)) > 2
    assert several == texts(n=6, seed=5)
    assert several[:1] == texts(seed=5)
    assert several != texts(n=6, seed=6)
    reported, reasons, _, _ = streamed(ask(**fields, n=6, seed=5, stream=True))
    assert [reported[i] for i in range(6)] == several
    assert set(reasons) == set(range(6))


def test_other_requests_change_no_answer(ask):
    texts = [FORMAL, EVENT, TRACK, f"{FORMAL} {EVENT}", "Hello.", "Sum up: " + "a b " * 60]
    alone = [ask(text, max_tokens=30).choices[0].message.content for text in texts]
    with ThreadPoolExecutor(12) as pool:
        together = pool.map(lambda text: ask(text, max_tokens=30), texts * 2)
        assert [each.choices[0].message.content for each in together] == alone * 2


def test_biases_and_penalties_change_answers(ask, http):
    dear = http.post("/tokenize", json={"prompt": "Dear", "add_special_tokens": False})
    banned = {str(token): -100 for token in dear.json()["tokens"]}
    assert not ask(logit_bias=banned).choices[0].message.content.startswith("Dear")

    def letters(**fields):
        said = ask("Write a word.", extra_body={**LETTERS, **fields}).choices[0]
        return said.message.content

    plain = letters()
    for name, value in (("frequency", 2), ("presence", 2), ("repetition", 5)):
        assert letters(**{f"{name}_penalty": value}) != plain, name


def test_log_probabilities_of_answers_and_streams(ask):
    whole = ask(logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in whole).decode() == ANSWER
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].token == t.token for t in whole)
    assert all(t.top_logprobs[0].logprob >= t.top_logprobs[1].logprob for t in whole)
    parts = [
        token
        for chunk in ask(logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        if choice.logprobs
        for token in choice.logprobs.content
    ]
    assert [t.token for t in parts] == [t.token for t in whole]
    assert [t.logprob for t in parts] == pytest.approx([t.logprob for t in whole], abs=1e-3)
    assert ask(logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert ask().choices[0].logprobs is None


def test_answers_keep_to_their_format(ask):
    said = ask(EVENT, response_format=EVENT_FORMAT).choices[0]
    assert json.loads(said.message.content) == {"title": "Dance Planning", "day": "Sunday"}
    assert said.finish_reason == "stop"
    texts, _, _, _ = streamed(ask(EVENT, response_format=EVENT_FORMAT, stream=True))
    assert texts[0] == said.message.content
    json_object = ask(EVENT, response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert json_object.finish_reason == "length" or json.loads(json_object.message.content) != []
    for asked, allowed in (
        ({"guided_choice": ["alpha", "beta"]}, ("alpha", "beta")),
        ({"structured_outputs": {"choice": ["alpha", "beta"]}}, ("alpha", "beta")),
        ({"structured_outputs": {"regex": "a{3}b"}}, ("aaab",)),
        ({"guided_grammar": 'start: "yes" | "no"'}, ("yes", "no")),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, ("yes", "no")),
        ({"guided_json": {"const": 7}}, ("7",)),
        ({"structured_outputs": {"json": '{"const": 7}'}}, ("7",)),
    ):
        assert ask("Say it.", extra_body=asked).choices[0].message.content in allowed, asked


def test_tool_calls_whole_and_streamed(ask, client):
    track = {"type": "function", "function": {"name": "track_order"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [track]}}
    for choice in (None, "auto", "required", track, allowed):
        fields = {"tools": TOOLS} if choice is None else {"tools": TOOLS, "tool_choice": choice}
        said = ask(TRACK, **fields).choices[0]
        assert said.finish_reason == "tool_calls"
        (call,) = said.message.tool_calls
        assert call.function.name == "track_order"
        assert json.loads(call.function.arguments) == {"order": "L5526"}
        chunks = list(ask(TRACK, stream=True, **fields))
        _, reasons, calls, _ = streamed(chunks)
        assert (reasons, list(calls)) == ({0: "tool_calls"}, [(0, 0)])
        assert calls[0, 0][1:] == ["track_order", call.function.arguments]
        pieces = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert len(pieces) > 4  # as they are generated
    named = {"type": "function", "function": {"name": "cancel_order"}}
    said = ask(TRACK, tools=TOOLS, tool_choice=named, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in said.message.tool_calls] == ["cancel_order"]
    said = ask(TRACK, tools=TOOLS, tool_choice="none").choices[0]
    assert (said.message.tool_calls, said.finish_reason) == (None, "stop")
    both = ask(TRACK, tools=TOOLS, response_format=EVENT_FORMAT).choices[0].message
    assert both.tool_calls or set(json.loads(both.content)) == {"title", "day"}
    only = ask(TRACK, tools=TOOLS, tool_choice="required", response_format=EVENT_FORMAT)
    assert only.choices[0].message.tool_calls
    # The whole round, with the message as the client has it.
    call = ask(TRACK, tools=TOOLS).choices[0].message
    result = json.dumps({"city": "Hitton", "arrives": "March 14"})
    answered = client.chat.completions.create(
        model="afm-nano",
        tools=TOOLS,
        messages=[
            {"role": "user", "content": TRACK},
            call,
            {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": result},
        ],
    )
    assert answered.choices[0].message.content.strip() == (
        "Order L5526 is in Hitton and arrives on March 14."
    )


def test_instructions_and_beginnings_of_answers(client):
    def said(*messages):
        given = [{"role": role, "content": content} for role, content in messages]
        answer = client.chat.completions.create(model="afm-nano", messages=given)
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    parts = [{"type": "text", "text": FORMAL[:9]}, {"type": "text", "text": FORMAL[9:]}]
    assert said(("user", parts)) == said(("user", FORMAL))
    assert said(("system", "Be kind.\n\nBe brief."), ("user", FORMAL)) == said(
        ("system", "Be kind."), ("developer", "Be brief."), ("user", FORMAL)
    )
    text, _ = said(("user", FORMAL), ("assistant", "Dear Hana,"))
    assert text == ANSWER.removeprefix("Dear Hana,")


USER = {"role": "user", "content": "hi"}


def call(id, arguments="{}"):
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def calls(*made):
    return {"role": "assistant", "content": None, "tool_calls": list(made)}


def result(id, content="seen"):
    return {"role": "tool", "tool_call_id": id, "content": content}


def test_results_of_parallel_calls_belong_to_their_calls(http):
    def tokens(*messages):
        reported = http.post("/tokenize", json={"messages": [USER, *messages]})
        assert reported.status_code == 200, reported.text
        return reported.json()["tokens"]

    asked = calls(call("a"), call("b"), call("c"))
    a, b, c = (result(each, each * 5) for each in "abc")
    in_order = tokens(asked, a, b, c)
    assert in_order == tokens(asked, c, a, b)
    swapped = [result("a", "bbbbb"), result("b", "aaaaa"), c]
    assert in_order != tokens(asked, *swapped)
    # The user's text among them follows them, and late instructions are a part of it.
    text = {"role": "user", "content": "Hurry"}
    brief = {"role": "system", "content": "Be brief"}
    assert tokens(asked, a, text, brief, c, b) == tokens(
        asked, a, b, c, {"role": "user", "content": "Hurry\n\nBe brief"}
    )
    assert tokens(calls(call("a", "")), result("a", None)) == tokens(
        calls(call("a")), result("a", "")
    )


@each(
    "fields, param",
    [
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [USER, result("a")]}, "messages[1].tool_call_id"),
        ({"messages": [USER, calls(call("a")), result("b")]}, "messages[2].tool_call_id"),
        ({"messages": [USER, calls(call("a")), result("a"), result("a")]}, "messages[3].tool_call_id"),
        ({"messages": [USER, calls(call("a"))]}, "messages"),
        ({"messages": [USER, calls(call("a"), call("b")), result("a"), USER]}, "messages[3]"),
        ({"messages": [USER, calls(call("a"), call("a"))]}, "messages[1].tool_calls[1].id"),
        ({"messages": [USER, calls(call("a", '{"city": "Ro')), result("a")]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": [USER, calls(call("a", "Rome")), result("a")]},
         "messages[1].tool_calls[0].function.arguments"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0].type"),
        ({"model": None}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": 7}, "stop"),
        ({"stop": ["a", 7]}, "stop[1]"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"4096": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"instructions": "Be brief"}, "instructions"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "custom"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [7]}, "tools[0]"),
        ({"tools": [{**TOOLS[0], "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x",
         "schema": {"type": "nothing"}}}}, "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "guided_regex.regex"),
        ({"structured_outputs": {"regex": None}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)  # fmt: skip
def test_refused_fields_are_named(http, fields, param):
    body = {"model": "afm-nano", "messages": [USER], **fields}
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    streamed = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]) == (400, error)


def test_unknown_models_and_non_finite_numbers(ask, http):
    for model in ("gpt-4o", "afm-nano:nothing", "afm-nano:", "", "afm-nano:todo "):
        with pytest.raises(openai.NotFoundError) as refused:
            ask(model=model)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    for text, param in (
        ('{"model": "afm-nano", "temperature": NaN, "messages": []}', "temperature"),
        ('{"model": "afm-nano", "logit_bias": {"1": Infinity}, "messages": []}', "logit_bias.1"),
        ('{"model": "afm-nano", "temperature": 1e999, "messages": []}', "temperature"),
    ):
        refused = http.post("/v1/chat/completions", content=text)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    with pytest.raises(openai.BadRequestError) as refused:
        ask("word " * 2000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")


def test_routes_without_a_version(server, client):
    """Programs that are set up for mlx-lm's or llama.cpp's server have no /v1 in their addresses."""
    with server.openai() as plain:
        plain.base_url = server.url
        assert plain.models.list().data == client.models.list().data
        chat = {"model": "afm-nano", "messages": [{"role": "user", "content": FORMAL}]}
        (said,) = plain.chat.completions.create(**chat, temperature=0).choices
        assert said.message.content == ANSWER
        texts = {"model": "afm-nano", "input": "a film"}
        assert plain.embeddings.create(**texts).data == client.embeddings.create(**texts).data
