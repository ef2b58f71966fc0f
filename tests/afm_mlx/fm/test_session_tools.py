"""Tools in sessions: called as the model was trained to, side by side, and as often as they may be."""

import asyncio
import json
import time

import pytest

from afm_mlx import fm
from afm_mlx.engine.generation import generate
from afm_mlx.guidance.tool_calls import tool_call_constraint
from tests.tools.cases import each

PROMPT = "Where is my order V6036?"
HOT = fm.GenerationOptions(fm.SamplingMode.random(seed=3), temperature=2.0)


@fm.generable
class Order:
    order: str


class TrackOrder(fm.Tool):
    name = "track_order"
    description = "Find an order"

    def __init__(self, result='{"state": "blocked"}'):
        super().__init__()
        self.result, self.calls = result, []

    @property
    def arguments_schema(self):
        return Order.generation_schema()

    async def call(self, args):
        self.calls.append(args.value(str, for_property="order"))
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def set_alarm(time: str) -> str:
    """Set an alarm"""
    raise AssertionError(time)


def entries(session):
    return asyncio.run(session.transcript.to_dict())["transcript"]["entries"]


def texts(session, role):
    return [
        e["contents"][0]["text"] for e in entries(session) if e["role"] == role and "contents" in e
    ]


def test_the_model_calls_a_tool_and_answers_with_its_result(nano, model):
    """As in a chat with the trained format, at each step."""
    tool = TrackOrder()
    session = fm.LanguageModelSession("Be brief.", model, [tool, set_alarm])

    async def main():
        seen = [text async for text in session.stream_response(PROMPT)]
        return seen, session.last_answer

    seen, last = asyncio.run(main())
    assert tool.calls == ["V6036"]
    assert [e["role"] for e in entries(session)] == [
        "instructions",
        "user",
        "response",
        "tool",
        "response",
    ]
    definitions = entries(session)[0]["tools"]
    assert [d["function"]["name"] for d in definitions] == ["track_order", "set_alarm"]
    call, result = entries(session)[2]["toolCalls"][0], entries(session)[3]
    assert (call["name"], json.loads(call["arguments"])) == ("track_order", {"order": "V6036"})
    assert (result["toolCallID"], result["toolName"]) == (call["id"], "track_order")

    def answer(messages, choice):
        given, tokenizer = nano
        ids = tokenizer.apply_chat_template(messages, definitions, add_generation_prompt=True)
        return generate(given, tokenizer, ids, 200, constraint=tool_call_constraint(definitions))

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    called = answer(messages, "auto")
    assert '[{"name": "track_order", "arguments": {"order": "V6036"}}]' in called
    function = {"name": "track_order", "arguments": {"order": "V6036"}}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
    messages.append({"role": "tool", "content": tool.result})
    assert seen[-1] == answer(messages, "auto")
    assert "blocked" in seen[-1]
    assert last.computed_tokens < 30  # the result, and what is around it


def test_calls_of_one_answer_are_made_side_by_side(model):
    """At a temperature at which calls are drawn; functions that are not async run in threads."""
    running, most = [], 0

    def begin(name):
        nonlocal most
        running.append(name)
        most = max(most, len(running))

    async def one() -> str:
        """One"""
        begin("one")
        await asyncio.sleep(0.05)
        running.remove("one")
        return "1"

    def two() -> int:
        """Two"""
        begin("two")
        time.sleep(0.05)
        running.remove("two")
        return 2

    async def main():
        nonlocal most
        for seed in range(20):
            most = 0
            options = fm.GenerationOptions(fm.SamplingMode.random(seed=seed), 4.0, 120)
            session = fm.LanguageModelSession(model=model, tools=[one, two], max_tool_rounds=1)
            try:
                await session.respond("Hi", options=options, tool_choice="required")
            except fm.DecodingFailureError:  # too many calls
                continue
            said = (await session.transcript.to_dict())["transcript"]["entries"]
            calls = said[2]["toolCalls"]
            results = [(e["toolCallID"], e["contents"][0]["text"]) for e in said[3:-1]]
            numbers = {"one": "1", "two": "2"}
            assert results == [(call["id"], numbers[call["name"]]) for call in calls]
            assert most == len(calls)
            if len({call["name"] for call in calls}) == 2:
                return True
        return False

    assert asyncio.run(main())


def test_the_model_reads_what_a_tool_raises_or_the_caller_gets_it(model):
    tool = TrackOrder(ValueError("no such order"))
    session = fm.LanguageModelSession(model=model, tools=[tool])
    assert asyncio.run(session.respond(PROMPT))
    assert texts(session, "tool") == ["Tool error: no such order"]

    strict = fm.LanguageModelSession(model=model, tools=[tool], tool_errors="raise")
    with pytest.raises(fm.ToolCallError, match="no such order") as caught:
        asyncio.run(strict.respond(PROMPT))
    assert caught.value.tool_name == "track_order"
    assert caught.value.underlying_error is tool.result
    assert [e["role"] for e in entries(strict)] == ["instructions"]
    tool.result = '{"state": "blocked"}'
    assert "blocked" in asyncio.run(strict.respond(PROMPT))


@each(
    "result, text",
    [
        (None, "None"),
        ("half \ud800", "half ?"),
        ({"of": {"set"}}, "{'of': {'set'}}"),
        (ValueError("\udc80"), "Tool error: ?"),
        (
            asyncio.CancelledError(),
            "Tool error: cancelled",
        ),  # of something that the tool waited for
    ],
)
def test_odd_results_are_texts(model, result, text):
    class Odd(TrackOrder):
        async def call(self, args):
            if isinstance(result, BaseException):
                raise result
            return result

    session = fm.LanguageModelSession(model=model, tools=[Odd()])
    assert asyncio.run(session.respond(PROMPT))
    assert texts(session, "tool") == [text]


@each("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_tool_may_end_the_program_and_leaves_the_session_usable(model, error):
    class Ends(TrackOrder):
        async def call(self, args):
            raise error

    session = fm.LanguageModelSession(model=model, tools=[Ends()])
    with pytest.raises(type(error)):
        asyncio.run(session.respond(PROMPT))
    assert [e["role"] for e in entries(session)] == ["instructions"]
    assert asyncio.run(session.respond("Hi", tool_choice="none"))


@pytest.mark.parametrize(
    "result", [{"state": "blocked"}, fm.GeneratedContent({"state": "blocked"})]
)
def test_results_that_are_no_text_are_read_as_json(model, result):
    session = fm.LanguageModelSession(model=model, tools=[TrackOrder(result)])
    assert "blocked" in asyncio.run(session.respond(PROMPT))
    assert texts(session, "tool") == ['{"state": "blocked"}']


def test_calls_are_made_as_often_as_they_may_be(model):
    async def calls(prompt, rounds=8, **how):
        tool = TrackOrder()
        session = fm.LanguageModelSession(model=model, tools=[tool], max_tool_rounds=rounds)
        answer = await session.respond(prompt, options=HOT, **how)
        assert "<executable_start>" not in answer
        return len(tool.calls)

    async def main():
        assert await calls(PROMPT, tool_choice="none") == 0
        assert await calls(PROMPT, 0) == 0
        assert await calls("Hi", tool_choice="one", rounds=1) == 1
        assert await calls("Hi", tool_choice="track_order", rounds=1) == 1
        assert await calls("Hi", tool_choice="required", rounds=1) >= 1
        session = fm.LanguageModelSession(model=model, tools=[TrackOrder()])
        with pytest.raises(ValueError, match="one, track_order"):
            await session.respond("Hi", tool_choice="other")
        tools = [TrackOrder(), TrackOrder("never")]
        session = fm.LanguageModelSession(model=model, tools=tools)
        await session.respond(PROMPT)
        assert [tool.calls for tool in tools] == [["V6036"], []]
        tools[1].description = "Another"
        tools[1].__dict__.pop("tool_definition")
        with pytest.raises(ValueError, match="different tools have the name 'track_order'"):
            fm.LanguageModelSession(model=model, tools=tools)

    asyncio.run(main())


@pytest.mark.parametrize("limit", [12, 18, 24])
def test_a_call_that_is_cut_off_is_an_error_and_not_made(model, limit):
    """Completing would give it arguments that the model has not chosen."""
    tool = TrackOrder()
    session = fm.LanguageModelSession(model=model, tools=[tool])
    options = fm.GenerationOptions(maximum_response_tokens=limit)
    for schema in (None, {"enum": ["done"]}):
        request = session.respond(PROMPT, json_schema=schema, options=options, tool_choice="one")
        with pytest.raises(fm.DecodingFailureError, match="maximum_response_tokens"):
            asyncio.run(request)
    assert tool.calls == []
    assert asyncio.run(session.respond(PROMPT))


def test_answers_under_a_schema_may_come_after_calls(model):
    @fm.generable
    class State:
        state: str = fm.guide(anyOf=["open", "blocked"])

    async def main():
        for choice, count in (("one", 1), ("none", 0)):
            tool = TrackOrder()
            session = fm.LanguageModelSession(model=model, tools=[tool])
            state = await session.respond(PROMPT, State, tool_choice=choice)
            assert state.state in ("open", "blocked")
            assert len(tool.calls) == count
        text = "Pull out the event.\nThe Dance Planning takes place at Hall Prom on Sunday."
        session = fm.LanguageModelSession(model=model, tools=[TrackOrder()])
        seen = [s async for s in session.stream_response(text, generating=State)]
        assert seen[-1].state
        roles = [e["role"] for e in (await session.transcript.to_dict())["transcript"]["entries"]]
        assert roles[-2:] == ["user", "response"]

    asyncio.run(main())


def test_a_tool_that_asks_its_own_session_is_told(model):
    class Asks(TrackOrder):
        async def call(self, args):
            return await asks.respond("Hi")

    asks = fm.LanguageModelSession(model=model, tools=[Asks()], tool_errors="raise")
    with pytest.raises(fm.ToolCallError) as caught:
        asyncio.run(asks.respond(PROMPT))
    assert isinstance(caught.value.underlying_error, fm.ConcurrentRequestsError)


def test_a_request_that_is_cancelled_while_a_tool_runs_ends_the_tool(model):
    class Slow(TrackOrder):
        state = None

        async def call(self, args):
            try:
                self.state = "began"
                await asyncio.Event().wait()
            finally:
                self.state = "ended"

    async def main():
        tool = Slow()
        session = fm.LanguageModelSession(model=model, tools=[tool])
        task = asyncio.create_task(session.respond("Hi", tool_choice="one"))
        while tool.state is None:
            await asyncio.sleep(1e-3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert tool.state == "ended"
        assert not session.is_responding
        assert await session.respond("Hi", tool_choice="none")

    asyncio.run(main())


def test_a_model_without_markers_for_calls_says_so(model, nano, monkeypatch):
    monkeypatch.setattr(type(nano[1]), "has_tool_calling", False)
    session = fm.LanguageModelSession(model=model, tools=[TrackOrder()])
    with pytest.raises(fm.GenerationError, match="without tools"):
        asyncio.run(session.respond(PROMPT))
    assert asyncio.run(session.respond(PROMPT, tool_choice="none"))
