"""Calls of tools by models of mlx-lm's zoo: random weights, with calls in the forms of their families."""

import json

import anthropic
import openai
import pytest

from tests.tools.server import running_server
from tests.tools.zoo_chats import write_family_folder

FAMILIES = ["qwen3", "llama3", "mistral", "mistral args", "harmony", "lfm2", "lfm2 first", "gemma4"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Porto", "São Tomé"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
STOP = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "stop", "parameters": STOP}},
]  # fmt: skip
NAMED = {"type": "function", "function": {"name": "weather"}}
NO_THOUGHTS = {"enable_thinking": False}  # random weights would hardly end one
QUESTION = {"role": "user", "content": "How is it in Porto?"}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("zoo") / "model"
    write_family_folder(folder, request.param, max_position_embeddings=4096)
    with running_server(source=folder, kv="float") as running:
        running.family = request.param
        yield running


def ask(server, *messages, **fields):
    fields = {"max_tokens": 300, "tools": TOOLS, "temperature": 1.2, "seed": 3, **fields}
    fields.setdefault("extra_body", NO_THOUGHTS)
    return server.openai().chat.completions.create(
        model="model", messages=[QUESTION, *messages], **fields
    )


def fits(call):
    arguments = json.loads(call.arguments)
    if call.name == "stop":
        return arguments == {}
    return (
        arguments["city"] in WEATHER["properties"]["city"]["enum"] and 0 <= arguments["days"] <= 9
    )


def test_required_calls_whole_and_streamed(server):
    for choice in ("required", NAMED):
        said = ask(server, tool_choice=choice, max_tokens=2000).choices[0]
        assert said.finish_reason == "tool_calls"
        assert said.message.content is None
        calls = said.message.tool_calls
        assert all(fits(call.function) for call in calls)
        if choice == NAMED:
            assert [call.function.name for call in calls] == ["weather"]
        pieces = {}
        for chunk in ask(server, tool_choice=choice, stream=True, max_tokens=2000):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert not chunk.choices[0].delta.content
                name, arguments = pieces.get(part.index, ("", ""))
                name += part.function.name or ""
                pieces[part.index] = name, arguments + (part.function.arguments or "")
        assert list(pieces.values()) == [(c.function.name, c.function.arguments) for c in calls]


def test_a_result_goes_back_through_the_template(server):
    message = ask(server, tool_choice=NAMED).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain at 7"}
    answer = ask(server, message, result, tool_choice="none", max_tokens=5)
    assert answer.choices[0].message.tool_calls is None
    with server.http() as http:
        messages = [QUESTION, message.model_dump(exclude_none=True), result]
        tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "rain at 7" in text
    assert json.loads(call.function.arguments)["city"] in text
    # A text with the name of a control token, as a result and as a question, adds no control token.
    controls = set(server.served.tokenizer.control_names.values())

    def written(content):
        with server.http() as http:
            messages[2] = {**result, "content": content}
            made = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        return [token for token in made if token in controls]

    end = server.served.tokenizer.eos_token
    assert written(f"{end} rain {end}") == written("rain")


def test_a_model_may_call_or_answer(server):
    """A bias towards the mark makes even random weights begin a call."""
    tokenizer = server.served.tokenizer
    free = ask(server, max_tokens=20)
    assert free.choices[0].finish_reason in ("length", "stop")
    marks = {"qwen3": "<tool_call>", "lfm2": "<|tool_call_start|>", "gemma4": "<|tool_call>"}
    mark = marks.get(
        server.family.split()[0], "[TOOL_CALLS]" if "mistral" in server.family else None
    )
    if mark is None:
        return
    bias = {str(tokenizer.convert_tokens_to_ids(mark)): 100}
    said = ask(server, parallel_tool_calls=False, logit_bias=bias).choices[0]
    assert said.finish_reason == "tool_calls"
    assert [fits(call.function) for call in said.message.tool_calls] == [True]
    logprobs = (
        ask(server, parallel_tool_calls=False, logit_bias=bias, logprobs=True).choices[0].logprobs
    )
    assert not logprobs or not logprobs.content


def test_responses_and_messages(server):
    defined = [{"type": "function", **tool["function"]} for tool in TOOLS]
    client = server.openai()
    asked = [{"role": "user", "content": "How is it?"}]
    choice = {"type": "function", "name": "weather"}
    made = client.responses.create(
        model="model",
        input=asked,
        tools=defined,
        tool_choice=choice,
        max_output_tokens=300,
        extra_body=NO_THOUGHTS,
    )
    (call,) = made.output
    assert fits(call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    rest = client.responses.create(
        model="model",
        input=[*asked, call, result],
        tools=defined,
        tool_choice="none",
        max_output_tokens=4,
        extra_body=NO_THOUGHTS,
    )
    assert rest.output[0].type == "message"

    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools = [
        {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
    ]
    with other.messages.stream(
        model="model",
        messages=asked,
        tools=tools,
        tool_choice={"type": "tool", "name": "weather"},
        thinking={"type": "disabled"},
        max_tokens=300,
    ) as stream:
        message = stream.get_final_message()
    (block,) = message.content
    assert (message.stop_reason, block.name) == ("tool_use", "weather")
    assert block.input["city"] in WEATHER["properties"]["city"]["enum"]
    back = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}],
    }
    counted = other.messages.count_tokens(
        model="model", messages=[*asked, {"role": "assistant", "content": message.content}, back]
    )
    assert counted.input_tokens > 10


@pytest.mark.parametrize(
    ("family", "choice", "words"),
    [
        ("gemma3", "auto", "chat template of model knows no tools"),
        ("phi3", "none", "chat template of model knows no tools"),
        ("phi4 mini", "required", "none of the known forms"),
        ("qwen3 coder", "required", "qwen3_coder.* can't be enforced"),
    ],
)
def test_models_that_can_not_call_say_so(tmp_path, family, choice, words):
    folder = write_family_folder(tmp_path / "model", family, max_position_embeddings=4096)
    with running_server(source=folder) as server:
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            ask(server, tool_choice=choice)
        assert refused.value.param == "tools"
        assert str(tmp_path) not in str(refused.value)
        if family == "qwen3 coder":  # calls are read, though not enforced
            bias = {str(server.served.tokenizer.convert_tokens_to_ids("<tool_call>")): 100}
            said = ask(server, logit_bias=bias, max_tokens=3).choices[0]
            assert (said.message.tool_calls, said.finish_reason) == (None, "length")
            assert said.message.content == "<tool_call>" * 3
