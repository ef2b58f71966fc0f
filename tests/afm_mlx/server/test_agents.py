"""A framework of agents, which speaks to the server through OpenAI's chats and responses."""

import asyncio

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.tools import server_stories as stories
from tests.tools.server import running_server


class Event(BaseModel):
    """An event"""

    title: str
    person: str
    day: str
    time: str
    place: str


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
    typed = Agent(model, output_type=NativeOutput(Event))
    called = Agent(model, output_type=Event)

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

        event = Event(**stories.EVENT_ANSWER)
        assert (await typed.run(stories.EVENT)).output == event
        assert isinstance((await called.run(stories.EVENT)).output, Event)
        async with typed.run_stream(stories.EVENT) as stream:
            *partial, final = [each async for each in stream.stream_output(debounce_by=None)]
        assert final == event
        assert partial[0].title != ""
        assert partial[0].place != event.place

    asyncio.run(talk())
