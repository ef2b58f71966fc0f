"""Official clients and an agent with images: streams, schemas, tools, and turns that encode nothing again."""

import asyncio
import json
from typing import Literal

import anthropic
import ollama
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.tools.vision import TINY
from tests.tools.vision_server import MODEL, data_uri, in_base64, seeing_server, square

RED, BLUE = square((220, 20, 20), 60), square((20, 20, 220), 60)
ASKED = "Which colour?"
TOOL = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
FUNCTION = {"name": "paint", "parameters": TOOL}


class Colour(BaseModel, extra="forbid"):
    colour: Literal["red", "blue"]


@pytest.fixture(scope="module")
def seeing():
    with seeing_server(max_tokens=20) as running:
        yield running


@pytest.fixture(scope="module")
def client(seeing):
    return seeing.server.openai()


def passes(seeing):
    """Number of encoder passes so far."""
    return seeing.server.served.engine.engine.image_features.passes


def asked(content, said=ASKED):
    image = {"type": "image_url", "image_url": {"url": data_uri(content)}}
    return [{"role": "user", "content": [image, {"type": "text", "text": said}]}]


def first_logprobs(client, content):
    """Log-probabilities of an answer's first token, which depend on all that the model has read."""
    answer = client.chat.completions.create(
        model=MODEL, messages=asked(content), logprobs=True, top_logprobs=20, max_tokens=1
    )
    return [each.logprob for each in answer.choices[0].logprobs.content[0].top_logprobs]


def test_answers_depend_on_the_image(client):
    red, blue = first_logprobs(client, RED), first_logprobs(client, BLUE)
    assert first_logprobs(client, RED) == pytest.approx(red, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(red, blue, strict=True)) > 1e-3


def test_chats_of_openais_client(seeing, client):
    whole = client.chat.completions.create(model=MODEL, messages=asked(RED))
    with client.chat.completions.stream(model=MODEL, messages=asked(RED)) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(texts) == whole.choices[0].message.content
    assert whole.usage.prompt_tokens == len(seeing.prompt)
    assert whole.usage.prompt_tokens > TINY.tokens("balanced")

    parsed = client.chat.completions.parse(model=MODEL, messages=asked(RED), response_format=Colour)
    assert parsed.choices[0].message.parsed.colour in ("red", "blue")
    tools = [{"type": "function", "function": FUNCTION}]
    choice = {"type": "function", "function": {"name": "paint"}}
    called = client.chat.completions.create(
        model=MODEL, messages=asked(RED), tools=tools, tool_choice=choice, max_tokens=60
    )
    (call,) = called.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"colour"}
    messages = [
        *asked(RED),
        called.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": asked(BLUE)[0]["content"]},
    ]
    before = passes(seeing)
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, n=2)
    assert len(answer.choices) == 2
    assert len(seeing.images) == 2
    assert passes(seeing) - before <= 1  # of the new image alone, once for both answers


def test_responses_of_openais_client(seeing, client):
    content = [
        {"type": "input_image", "image_url": data_uri(RED), "detail": "low"},
        {"type": "input_text", "text": ASKED},
    ]
    asked = [{"role": "user", "content": content}]
    counted = client.responses.input_tokens.count(model=MODEL, input=asked)
    whole = client.responses.create(model=MODEL, input=asked)
    assert counted.input_tokens == whole.usage.input_tokens == len(seeing.prompt)
    assert seeing.images[0].mode == "rapid"
    with client.responses.stream(model=MODEL, input=asked, text_format=Colour) as stream:
        assert stream.get_final_response().output_parsed.colour in ("red", "blue")
    tool = {"type": "function", **FUNCTION}
    choice = {"type": "function", "name": "paint"}
    called = client.responses.create(
        model=MODEL, input=asked, tools=[tool], tool_choice=choice, max_output_tokens=60
    )
    call = next(item for item in called.output if item.type == "function_call")
    image = {"type": "input_image", "image_url": data_uri(BLUE), "detail": "auto"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": [image]}
    client.responses.create(
        model=MODEL, input=[result], previous_response_id=called.id, tools=[tool]
    )
    assert [each.mode for each in seeing.images] == ["rapid", "balanced"]


def test_messages_of_anthropics_client(seeing):
    claude = anthropic.Anthropic(base_url=seeing.server.url, api_key="none", max_retries=0)

    def block(content):
        source = {"type": "base64", "media_type": "image/png", "data": in_base64(content)}
        return {"type": "image", "source": source}

    messages = [{"role": "user", "content": [block(RED), {"type": "text", "text": ASKED}]}]
    with claude.messages.stream(model=MODEL, messages=messages, max_tokens=9) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    usage = final.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    format = {"type": "json_schema", "schema": TOOL}
    answer = claude.messages.create(
        model=MODEL, messages=messages, max_tokens=40, output_config={"format": format}
    )
    assert json.loads(answer.content[0].text)["colour"] in ("red", "blue")
    tool, choice = {"name": "paint", "input_schema": TOOL}, {"type": "tool", "name": "paint"}
    called = claude.messages.create(
        model=MODEL, messages=messages, max_tokens=60, tools=[tool], tool_choice=choice
    )
    use = next(block for block in called.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [block(BLUE)]}
    messages += [
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    claude.messages.create(model=MODEL, messages=messages, max_tokens=3, tools=[tool])
    assert len(seeing.images) == 2


def test_ollamas_client(seeing, tmp_path):
    local = ollama.Client(seeing.server.url)
    file = tmp_path / "red.png"
    file.write_bytes(RED)
    message = {"role": "user", "content": ASKED, "images": [str(file)]}  # the client reads the file
    whole = local.chat(MODEL, [message])
    text = "".join(part.message.content for part in local.chat(MODEL, [message], stream=True))
    assert text == whole.message.content
    prompt = seeing.prompt
    generated = local.generate(MODEL, ASKED, images=[RED])
    assert generated.response == whole.message.content
    assert seeing.prompt == prompt
    shaped = local.chat(MODEL, [message], format=Colour.model_json_schema())
    assert Colour.model_validate_json(shaped.message.content)
    messages = [message, whole.message, {"role": "user", "content": "And?"}]
    local.chat(MODEL, messages)
    assert len(seeing.images) == 1


@pytest.mark.parametrize(
    ("kind", "prompt_cache_bytes"), [(OpenAIChatModel, 10**8), (OpenAIResponsesModel, 0)]
)
def test_a_second_turn_encodes_no_image_again(kind, prompt_cache_bytes):
    """An agent with its defaults repeats the image; its features are known, with and without a prefix cache."""
    with seeing_server(max_tokens=5, prompt_cache_bytes=prompt_cache_bytes) as seeing:
        provider = OpenAIProvider(base_url=f"{seeing.server.url}/v1", api_key="none")
        agent = Agent(kind(MODEL, provider=provider))
        image = BinaryContent(data=square((9, 200, 9), 100), media_type="image/png")

        async def talk():
            first = await agent.run([ASKED, image])
            assert passes(seeing) == 5  # four tiles and the overview
            second = await agent.run("Are you sure?", message_history=first.all_messages())
            assert len(seeing.images) == 1
            async with agent.run_stream(
                ["And this?", image], message_history=second.all_messages()
            ) as run:
                await run.get_output()
            assert len(seeing.images) == 2

        asyncio.run(talk())
        assert passes(seeing) == 5
