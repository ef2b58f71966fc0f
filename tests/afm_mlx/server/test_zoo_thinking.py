"""Thoughts before answers, by models of mlx-lm's zoo: random weights, whose answers follow a script."""

import json
from collections import Counter

import anthropic
import ollama
import openai
import pytest

from afm_mlx.server import answer_events
from afm_mlx.server.thinking import Thinking
from tests.tools.cases import each
from tests.tools.model_scripts import FollowsText
from tests.tools.server import running_server
from tests.tools.zoo_chats import write_family_folder

QUESTION = {"role": "user", "content": "How is it in Porto?"}
MARKS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3 thinking": ("", "\n</think>\n\n"),  # the prompt begins the thought
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
}
END = {
    "qwen3": "</think>",
    "qwen3 thinking": "</think>",
    "harmony": "<|end|>",
    "gemma4": "<channel|>",
}
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Porto", "Faro"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}


@pytest.fixture(scope="module", params=MARKS)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo") / "model"
    write_family_folder(folder, request.param, max_position_embeddings=4096)
    with running_server(source=folder, kv="float") as running:
        running.family = request.param
        running.begin, running.end = MARKS[request.param]
        yield running


@pytest.fixture
def follow(monkeypatch):
    """Make the answers of a server follow a text, in which names of control tokens are these."""
    original = answer_events.logits_processors

    def follow(server, text):
        tokenizer = server.served.tokenizer
        end = tokenizer.convert_tokens_to_ids(END[server.family])

        def processors(served, request, prompt):
            script = FollowsText(tokenizer, text, len(prompt), end)
            return [script, *original(served, request, prompt)]

        monkeypatch.setattr(answer_events, "logits_processors", processors)
        return tokenizer.encode(text, add_special_tokens=False)

    return follow


def ask(server, **fields):
    fields = {"max_tokens": 200, "messages": [QUESTION], **fields}
    return server.openai().chat.completions.create(model="model", **fields)


def prompt_of(server, messages):
    with server.http() as http:
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_thoughts_are_apart_from_answers_in_chats(server, follow):
    ids = follow(server, f"{server.begin}Hm.\n\nIt <b>is.{server.end}It is Ü.")
    whole = ask(server)
    message = whole.choices[0].message
    assert message.content == "It is Ü."
    assert message.reasoning_content == "Hm.\n\nIt <b>is."
    assert whole.choices[0].finish_reason == "stop"
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    tokenizer = server.served.tokenizer
    end = ids.index(tokenizer.convert_tokens_to_ids(END[server.family]))
    start = 0
    if server.family == "harmony":
        start = ids.index(tokenizer.convert_tokens_to_ids("<|message|>"))
    assert counted == end + 1 - start
    thought, text, order = "", "", []
    for chunk in ask(server, stream=True, logprobs=True):
        delta = chunk.choices[0].delta
        piece = getattr(delta, "reasoning_content", None) or ""
        thought, text = thought + piece, text + (delta.content or "")
        order += ["thought"] * bool(piece) + ["text"] * bool(delta.content)
        if piece:
            assert (delta.content, chunk.choices[0].logprobs) == (None, None)
    assert (thought, text) == (message.reasoning_content, message.content)
    assert order == sorted(order, reverse=True)
    assert Counter(order)["thought"] > 1
    listed = ask(server, logprobs=True).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in listed).decode() == message.content
    hidden = ask(server, extra_body={"reasoning": {"exclude": True}}).choices[0].message
    assert "reasoning_content" not in hidden.model_fields_set


def test_thoughts_are_items_of_responses(server, follow):
    follow(server, f"{server.begin}Hm.{server.end}Fine.")
    client = server.openai()
    made = client.responses.create(model="model", input="How?", max_output_tokens=200)
    thought, _ = made.output
    assert (thought.type, thought.content[0].text, thought.summary) == ("reasoning", "Hm.", [])
    assert made.output_text == "Fine."
    assert made.usage.output_tokens_details.reasoning_tokens > 0
    with client.responses.stream(model="model", input="How?", max_output_tokens=200) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == "Hm."
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    items = [{"role": "user", "content": "How?"}, *(i.model_dump() for i in made.output)]
    more = {"role": "user", "content": "And now?"}
    again = client.responses.input_tokens.count(model="model", input=[*items, more])
    reference = {"type": "item_reference", "id": thought.id}
    kept = client.responses.input_tokens.count(
        model="model", input=[items[0], reference, items[2], more]
    )
    assert again.input_tokens == kept.input_tokens
    rest = client.responses.create(
        model="model", previous_response_id=made.id, input="And now?", max_output_tokens=200
    )
    assert rest.output_text == "Fine."


def test_thoughts_are_blocks_of_messages(server, follow):
    follow(server, f"{server.begin}Hm.{server.end}Fine.")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    fields = {"model": "model", "messages": [QUESTION], "max_tokens": 200}
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    message = client.messages.create(**fields)
    for each_message in (message, streamed):
        thought, text = each_message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "Hm.", "Fine.")
        assert thought.signature
        assert each_message.stop_reason == "end_turn"
    back = {"role": "assistant", "content": [b.model_dump() for b in message.content]}
    client.messages.create(**{**fields, "messages": [QUESTION, back, QUESTION]})
    hidden = client.messages.create(
        **fields, extra_body={"thinking": {"type": "adaptive", "display": "omitted"}}
    )
    assert [block.type for block in hidden.content] == ["text"]


def test_thoughts_are_apart_in_ollamas_api(server, follow):
    follow(server, f"{server.begin}Hm.\n\nIt is.{server.end}Fine.")
    client = ollama.Client(server.url)
    capabilities = client.show("model").capabilities
    assert capabilities == ["completion", "tools", "thinking"]
    options = {"num_predict": 200}
    chat = client.chat("model", [QUESTION], options=options)
    assert (chat.message.thinking, chat.message.content) == ("Hm.\n\nIt is.", "Fine.")
    made = client.generate("model", QUESTION["content"], options=options, think=True)
    assert (made.thinking, made.response, made.done_reason) == ("Hm.\n\nIt is.", "Fine.", "stop")
    parts = list(client.chat("model", [QUESTION], stream=True, options=options, think="low"))
    order = ["thought" if part.message.thinking else "text" for part in parts]
    assert order == sorted(order, reverse=True)
    for name, whole in (("thinking", chat.message.thinking), ("content", chat.message.content)):
        assert "".join(getattr(part.message, name) or "" for part in parts) == whole
    again = client.chat("model", [QUESTION, chat.message, QUESTION], options=options)
    assert again.message.content == "Fine."
    held = client.chat("model", [QUESTION], options=options, format={"const": 1})
    assert (held.message.thinking, held.message.content) == ("Hm.\n\nIt is.", "1")
    raw = client.generate("model", "Hm", raw=True, options={"num_predict": 5})
    assert raw.thinking is None
    off = client.chat("model", [QUESTION], think=False, options=options, format={"const": 1})
    assert (off.message.thinking, off.message.content) == (None, "1")


def test_calls_come_after_thoughts_in_ollamas_api(server, follow):
    if server.family != "qwen3":
        return
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Faro"}}\n</tool_call>'
    follow(server, f"{server.begin}Hm.{server.end}{call}")
    client = ollama.Client(server.url)
    for streams in (False, True):
        made = client.chat("model", [QUESTION], tools=[TOOL], stream=streams)
        parts = list(made) if streams else [made]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [call.function.model_dump() for call in calls] == [
            {"name": "weather", "arguments": {"city": "Faro"}}
        ]
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert parts[-1].done_reason == "stop"
    said = {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}
    result = {"role": "tool", "tool_name": "weather", "content": "rain"}
    follow(server, f"{server.begin}Oh.{server.end}It rains.")
    answer = client.chat("model", [QUESTION, said, result], tools=[TOOL])
    assert (answer.message.thinking, answer.message.content) == ("Oh.", "It rains.")


@each(
    "constraint, said",
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
            "additionalProperties": False}}}}, '{"a": 1}'),
        ({"extra_body": {"guided_choice": ["Fine.", "Bad."]}}, "Fine."),
    ],
)  # fmt: skip
def test_constraints_hold_for_the_answer_only(server, follow, constraint, said):
    follow(server, f"{server.begin}Hm <b>.{server.end}Fine.")
    message = ask(server, **constraint).choices[0].message
    assert message.reasoning_content == "Hm <b>."
    if said[0] == "{":
        assert json.loads(message.content)["a"] == 1
    else:
        assert message.content == said


@each("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
@each("formatted", [False, True])
def test_calls_come_after_thoughts(server, follow, choice, formatted):
    marks = {
        "harmony": "<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Faro"}<|call|>',
        "gemma4": '<channel|><|tool_call>call:weather{city:<|"|>Faro<|"|>}<tool_call|>',
    }
    call = marks.get(
        server.family,
        '\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Faro"}}\n</tool_call>',
    )
    follow(server, f"{server.begin}Hm.{call}")
    schema = {"type": "object", "properties": {}}
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    if formatted:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema},
        }
    said = ask(server, **fields).choices[0]
    assert said.message.reasoning_content == "Hm."
    assert [c.function.name for c in said.message.tool_calls] == ["weather"]
    assert json.loads(said.message.tool_calls[0].function.arguments) == {"city": "Faro"}
    assert said.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "rain"}
    history = [QUESTION, said.message.model_dump(exclude_none=True), result]
    shown = prompt_of(server, history)
    assert "rain" in shown
    assert "Hm." in shown


@each("budget", [0, 1, 7])
def test_a_budget_closes_the_thought(server, follow, budget):
    follow(server, server.begin + "Hm é 日本 – " * 20 + server.end + "Fine.")
    made = ask(server, extra_body={"thinking_budget": budget, "enable_thinking": True})
    message, usage = made.choices[0].message, made.usage
    assert message.content == "Fine."
    free = ask(server).choices[0].message.reasoning_content
    thought = getattr(message, "reasoning_content", "")
    assert len(thought) < 30 < len(free)
    around = 0 if budget else 20
    assert usage.completion_tokens_details.reasoning_tokens <= budget + 30 + around
    # Under a grammar, the thought is closed between characters.
    fields = {"guided_choice": ["Fine.", "Bad."]}
    held = ask(
        server,
        extra_body={"thinking": {"type": "enabled", "budget_tokens": budget}, **fields},
    ).choices[0]
    assert held.message.content == "Fine."
    assert "\ufffd" not in getattr(held.message, "reasoning_content", "")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    thinking = {"type": "enabled", "budget_tokens": budget}
    said = client.messages.create(
        model="model", messages=[QUESTION], max_tokens=200, thinking=thinking
    )
    assert said.content[-1].text == "Fine."


OFF = [
    {"reasoning_effort": "none"},
    {"enable_thinking": False},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"thinking": {"type": "disabled"}},
    {"thinking_budget": 0},
    {"reasoning": {"enabled": False}},
]


@each("switch", OFF)
def test_thinking_is_switched_off(server, follow, switch):
    follow(server, f"{server.begin}Hm.{server.end}Fine.")
    if server.family == "qwen3 thinking":
        follow(server, "\n\nFine.")  # its template begins a thought, and the server ends it
    message = ask(server, extra_body=switch).choices[0].message
    assert "Hm." not in getattr(message, "reasoning_content", "")
    assert "Hm." not in message.content or server.family in ("qwen3", "gemma4")
    assert not any(mark in message.content for mark in ("<think>", "</think>", "<|channel"))
    held = ask(server, extra_body={**switch, "guided_choice": ["Fine.", "Bad."]}).choices[0].message
    assert held.content in ("Fine.", "Bad.")
    assert "reasoning_content" not in held.model_fields_set


def test_templates_are_told(server):
    served = server.served
    with server.http() as http:

        def prompt(**fields):
            body = {"model": "model", "input": "How?", **fields}
            return http.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]

        plain = prompt()
        off = prompt(reasoning={"effort": "none"})
        if server.family == "qwen3":  # an empty thought
            assert off > plain
        elif server.family == "qwen3 thinking":  # the end of the thought
            assert off == plain + 1
        elif server.family == "gemma4":  # no switch in the instructions, and an empty thought
            said = served.encode_chat([QUESTION], thinking=Thinking(is_on=False))
            assert served.tokenizer.decode(said).endswith("<|channel>thought\n<channel|>")
            assert "<|think|>" not in served.tokenizer.decode(said)
        else:
            said = served.encode_chat([QUESTION], thinking=Thinking(effort="high"))
            assert "Reasoning: high" in served.tokenizer.decode(said)
            low = prompt(reasoning={"effort": "minimal"})
            assert low == prompt(chat_template_kwargs={"reasoning_effort": "low"}) != off


def test_stop_strings_are_of_the_answer(server, follow):
    follow(server, f"{server.begin}Hm. Fine{server.end}So. Fine. No.")
    made = ask(server, stop=["ine", "xyz"]).choices[0]
    assert (made.message.content, made.message.reasoning_content) == ("So. F", "Hm. Fine")
    assert made.finish_reason == "stop"
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said = client.messages.create(
        model="model", messages=[QUESTION], max_tokens=200, stop_sequences=["e. N", "No"]
    )
    assert (said.content[1].text, said.stop_reason) == ("So. Fin", "stop_sequence")
    assert said.stop_sequence == "e. N"
    whole = ask(server, stop=["Hm", "No. x"]).choices[0]
    assert whole.message.content == "So. Fine. No."


def test_an_answer_that_is_cut_off_within_its_thought(server, follow):
    follow(server, f"{server.begin}Hm. Hm. Hm. Hm. Hm. Hm. Hm. Hm. Hm. Hm.{server.end}Fine.")
    made = ask(server, max_tokens=18)
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].message.content == ""
    assert made.choices[0].message.reasoning_content.startswith("Hm. Hm.")
    said = server.openai().responses.create(model="model", input="How?", max_output_tokens=18)
    assert said.status == "incomplete"
    assert [item.type for item in said.output] == ["reasoning"]


def test_answers_without_thoughts(server, follow):
    opening = "<|channel|>final<|message|>" if server.family == "harmony" else ""
    if server.family == "qwen3 thinking":
        return
    follow(server, f"{opening}Fine.")
    made = ask(server)
    assert made.choices[0].message.content == "Fine."
    assert "reasoning_content" not in made.choices[0].message.model_fields_set
    if server.family != "harmony":
        assert made.usage.completion_tokens_details is None
    spelled = "<think>" if server.family == "harmony" else "<|channel|>analysis<|message|>"
    follow(server, f"{opening}{spelled}Fine.")
    assert ask(server).choices[0].message.content == f"{spelled}Fine."


def test_requests_that_contradict_themselves(server):
    for wrong, param in (
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, "enable_thinking"),
        ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_budget"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"reasoning_effort": "hard"}, "reasoning_effort"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(server, extra_body=wrong)
        assert refused.value.param == param
