"""One request to a session: tool calls, concurrent and as many as allowed, and a context that is full."""

import asyncio
import json
import time
from typing import Literal

import pytest

from afm_mlx import fm
from afm_mlx.engine.generation import generate
from afm_mlx.engine.request import Request
from afm_mlx.fm import turn
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.turn import SUMMARY_PROMPT, fit_to_context
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.loading.load import load
from tests.afm_mlx.fm.conftest import entries, roles, texts
from tests.tools.cases import each
from tests.tools.model_scripts import FollowsText
from tests.tools.zoo_chats import write_family_folder

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
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def set_alarm(time: str) -> str:
    """Set an alarm"""
    raise AssertionError(time)


async def test_the_model_calls_a_tool_and_answers_with_its_result(nano, model):
    tool = TrackOrder()
    session = fm.LanguageModelSession("Be brief.", model, [tool, set_alarm])
    *_, last = [text async for text in session.stream_response(PROMPT)]
    assert tool.calls == ["V6036"]
    assert roles(session) == ["instructions", "user", "response", "tool", "response"]
    instructions, _, calls, result, _ = entries(session)
    definitions, (call,) = instructions["tools"], calls["toolCalls"]
    assert [d["function"]["name"] for d in definitions] == ["track_order", "set_alarm"]
    assert (call["name"], json.loads(call["arguments"])) == ("track_order", {"order": "V6036"})
    assert (result["toolCallID"], result["toolName"]) == (call["id"], "track_order")

    def answer(messages):
        ids = nano[1].apply_chat_template(messages, definitions, add_generation_prompt=True)
        return generate(*nano, ids, 200, constraint=tool_call_constraint(definitions))

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    function = {"name": "track_order", "arguments": {"order": "V6036"}}
    assert json.dumps([function]) in answer(messages)
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
    messages.append({"role": "tool", "content": tool.result})
    assert last == answer(messages)
    assert "blocked" in last
    assert session.last_answer.computed_tokens < 30  # the output and its markers


async def test_calls_of_one_answer_run_concurrently(model):
    """The temperature is high, so that the calls are random. Functions that aren't async run in threads."""
    running, most = [], 0

    def begin(name):
        nonlocal most
        running.append(name)
        most = max(most, len(running))

    async def one() -> str:
        """One"""
        begin("one")
        await asyncio.sleep(0.25)
        running.remove("one")
        return "1"

    def two() -> int:
        """Two"""
        begin("two")
        time.sleep(0.25)
        running.remove("two")
        return 2

    for seed in range(20):
        most = 0
        options = fm.GenerationOptions(fm.SamplingMode.random(seed=seed), 4.0, 120)
        session = fm.LanguageModelSession(model=model, tools=[one, two], max_tool_rounds=1)
        try:
            await session.respond("Hi", options=options, tool_choice="required")
        except fm.DecodingFailureError:  # too many calls
            continue
        said = entries(session)
        calls = said[2]["toolCalls"]
        results = [(e["toolCallID"], e["contents"][0]["text"]) for e in said[3:-1]]
        numbers = {"one": "1", "two": "2"}
        assert results == [(call["id"], numbers[call["name"]]) for call in calls]
        assert most == len(calls)
        if len({call["name"] for call in calls}) == 2:
            return
    raise AssertionError("no answer called both functions")


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
    assert roles(strict) == ["instructions"]
    tool.result = '{"state": "blocked"}'
    assert "blocked" in asyncio.run(strict.respond(PROMPT))


@each(
    "result, text",
    [
        (None, "None"),
        ("half \ud800", "half ?"),
        ({"state": "blocked"}, '{"state": "blocked"}'),
        (fm.GeneratedContent({"state": "blocked"}), '{"state": "blocked"}'),
        ({"of": {"set"}}, "{'of': {'set'}}"),
        (ValueError("\udc80"), "Tool error: ?"),
        # Something that the tool waited for was cancelled.
        (asyncio.CancelledError(), "Tool error: cancelled"),
    ],
)
def test_results_become_texts(model, result, text):
    session = fm.LanguageModelSession(model=model, tools=[TrackOrder(result)])
    answer = asyncio.run(session.respond(PROMPT))
    assert texts(session, "tool") == [text]
    assert "blocked" in answer or "blocked" not in text


@each("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_tool_may_end_the_program_and_leaves_the_session_usable(model, error):
    session = fm.LanguageModelSession(model=model, tools=[TrackOrder(error)])
    with pytest.raises(type(error)):
        asyncio.run(session.respond(PROMPT))
    assert roles(session) == ["instructions"]
    assert asyncio.run(session.respond("Hi", tool_choice="none"))


async def test_calls_are_made_as_often_as_they_may_be(model):
    async def calls(prompt, rounds=8, **how):
        tool = TrackOrder()
        session = fm.LanguageModelSession(model=model, tools=[tool], max_tool_rounds=rounds)
        answer = await session.respond(prompt, options=HOT, **how)
        assert "<executable_start>" not in answer
        return len(tool.calls)

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


async def test_answers_under_a_schema_may_come_after_calls(model):
    @fm.generable
    class State:
        state: str = fm.guide(anyOf=["open", "blocked"])

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
    assert roles(session)[-2:] == ["user", "response"]


def test_a_tool_that_uses_its_own_session_gets_an_error(model):
    class Asks(TrackOrder):
        async def call(self, args):
            return await asks.respond("Hi")

    asks = fm.LanguageModelSession(model=model, tools=[Asks()], tool_errors="raise")
    with pytest.raises(fm.ToolCallError) as caught:
        asyncio.run(asks.respond(PROMPT))
    assert isinstance(caught.value.underlying_error, fm.ConcurrentRequestsError)


async def test_a_request_that_is_cancelled_while_a_tool_runs_ends_the_tool(model):
    class Slow(TrackOrder):
        state = None

        async def call(self, args):
            try:
                self.state = "began"
                await asyncio.Event().wait()
            finally:
                self.state = "ended"

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


def test_a_model_without_markers_for_calls_says_so(model, nano, monkeypatch):
    monkeypatch.setattr(nano[1], "has_tool_calling", False)
    session = fm.LanguageModelSession(model=model, tools=[TrackOrder()])
    with pytest.raises(fm.GenerationError, match="Leave out tools"):
        asyncio.run(session.respond(PROMPT))
    assert asyncio.run(session.respond(PROMPT, tool_choice="none"))


# The context window

LONG_PROMPT = (
    "Write a line about the Film Lecture on Monday, the Yoga Class in Hall Prom and the Tram. "
)
SHORT = fm.GenerationOptions(maximum_response_tokens=20)


async def talk(session, turns):
    sizes = []
    for i in range(turns):
        await session.respond(f"{i}: " + LONG_PROMPT * 5, options=SHORT)
        sizes.append(len(entries(session)))
    return sizes


def test_by_default_a_full_context_is_an_error(model):
    session = fm.LanguageModelSession("Be brief.", model)
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        asyncio.run(talk(session, 20))
    assert 4 < len(entries(session)) < 30


def test_an_answer_that_fills_the_context_is_completed(model):
    schema = {"type": "array", "items": {"const": "yes"}, "minItems": 100}

    def answered(**how):
        session = fm.LanguageModelSession(model=model)
        request = session.respond(LONG_PROMPT * 30, **{"json_schema": schema, **how})
        return asyncio.run(request).value(), session

    answer, session = answered()
    assert len(answer) >= 100
    assert set(answer) == {"yes"}
    assert session.last_answer.finish_reason == "length"
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        answered(at_limit="error")
    # The shortest completion is longer than the context.
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        answered(json_schema=schema | {"minItems": 5000})


def test_a_prompt_leaves_room_for_a_token_at_least(model, monkeypatch):
    async def answer():
        session = fm.LanguageModelSession(model=model)
        await session.respond(LONG_PROMPT, options=fm.GenerationOptions(maximum_response_tokens=1))
        return session.last_answer.prompt_tokens

    tokens = asyncio.run(answer())
    monkeypatch.setattr(model._shared, "_context", tokens + 1)
    assert asyncio.run(answer()) == tokens
    monkeypatch.setattr(model._shared, "_context", tokens)
    with pytest.raises(
        fm.ExceededContextWindowSizeError, match=f"takes {tokens} tokens of {tokens}"
    ):
        asyncio.run(answer())


def test_the_oldest_turns_are_dropped(model):
    session = fm.LanguageModelSession("Be brief.", model, context_policy="drop_oldest")
    sizes = asyncio.run(talk(session, 10))
    assert max(sizes) < 21
    drops = [i for i in range(1, 10) if sizes[i] <= sizes[i - 1]]
    assert 0 < len(drops) < 4  # half of the context is freed each time
    assert roles(session)[0] == "instructions"
    numbers = [int(text.partition(":")[0]) for text in texts(session, "user")]
    assert numbers == list(range(numbers[0], 10))
    assert session.last_answer.prompt_tokens + 20 <= model.context_size
    with pytest.raises(fm.ExceededContextWindowSizeError):
        asyncio.run(session.respond(LONG_PROMPT * 100))
    assert len(entries(session)) == sizes[-1]


def test_a_summary_takes_the_place_of_the_oldest_turns(model):
    session = fm.LanguageModelSession("Be brief.", model, context_policy="summarize")
    sizes = asyncio.run(talk(session, 10))
    assert max(sizes) < 21
    first, *prompts = texts(session, "user")
    assert first == SUMMARY_PROMPT
    numbers = [int(text.partition(":")[0]) for text in prompts]
    assert numbers == list(range(numbers[0], 10))
    assert texts(session, "response")[0]
    messages, _ = session.transcript.messages()
    assert [m["role"] for m in messages[:4]] == ["system", "user", "assistant", "user"]


def history(*words):
    """A history with a turn for each number of words, the last of which has no answer yet."""
    made = Transcript()
    made.add_instructions("Be brief.")
    for i, count in enumerate(words):
        made.add_prompt("w " * count)
        if i < len(words) - 1:
            made.add_response("a")
    return made


def count(transcript):
    return sum(len(m["content"].split()) for m in transcript.messages()[0])


@pytest.mark.parametrize("summarizes", [False, True])
def test_what_is_kept_fits(rng, summarizes):
    for _ in range(50):
        words = rng.integers(1, 40, int(rng.integers(1, 12))).tolist()
        limit = int(rng.integers(-1, 40)) or 1
        asked = []

        async def summarize(transcript, room, asked=asked):
            asked.append((transcript, room))
            return "s " * room

        draft = history(*words)
        fit = asyncio.run(
            fit_to_context(draft, count, 100, limit, summarize if summarizes else None)
        )
        room = 25 if limit < 0 else min(limit, 25)
        if count(draft) + room <= 100:
            assert fit is draft
            continue
        before, turns = fit.turns()
        assert before == draft.turns()[0]
        assert turns[-1] == draft.turns()[1][-1]
        kept = turns[1:] if summarizes and len(asked) else turns
        assert kept == draft.turns()[1][-len(kept) :]
        assert count(fit) <= 50 + len(SUMMARY_PROMPT.split()) or len(kept) == 1
        assert not asked or count(fit) < 100
        if asked:
            ((asking, tokens),) = asked
            assert count(asking) + tokens <= 100
            assert asking.messages()[0][-1]["content"] == SUMMARY_PROMPT


# -- models of mlx-lm's zoo


@pytest.mark.parametrize(
    "family", ["qwen3", "llama3", "mistral", "mistral args", "harmony", "lfm2", "gemma4"]
)
async def test_zoo_models_call_tools_in_their_own_form(tmp_path, family):
    folder = write_family_folder(tmp_path / "model", family, max_position_embeddings=4096)
    model = fm.SystemLanguageModel(model=load(folder))
    seen = []

    def weather(city: Literal["Porto", "Lima"], soon: bool) -> str:
        """Tell the weather"""
        seen.append((city, soon))
        return f"rain, <|im_end|>{city}"

    session = fm.LanguageModelSession("Be brief.", model, [weather])
    options = fm.GenerationOptions(maximum_response_tokens=60)
    await session.respond("How is it?", options=options, tool_choice="one")
    ((city, _),) = seen
    assert roles(session) == ["instructions", "user", "response", "tool", "response"]
    assert texts(session, "tool") == [f"rain, <|im_end|>{city}"]
    # A cut-off call is an error, and is not made.
    short = fm.GenerationOptions(maximum_response_tokens=4)
    with pytest.raises(fm.DecodingFailureError, match="maximum_response_tokens"):
        await session.respond("And now?", options=short, tool_choice="one")
    assert len(seen) == 1


async def test_zoo_models_that_know_no_tools_say_so(tmp_path):
    folder = write_family_folder(tmp_path / "model", "gemma3", max_position_embeddings=4096)
    session = fm.LanguageModelSession(
        model=fm.SystemLanguageModel(model=load(folder)), tools=[set_alarm]
    )
    with pytest.raises(fm.GenerationError, match="knows no tools"):
        await session.respond("How is it?")


THINKING = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3 thinking": ("", "\n</think>\n\n"),  # the prompt begins the thought
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}


@pytest.mark.parametrize("family", THINKING)
async def test_thoughts_are_no_part_of_answers(tmp_path, monkeypatch, family):
    folder = write_family_folder(tmp_path / "model", family, max_position_embeddings=4096)
    loaded = load(folder)
    begin, end = THINKING[family]
    answer = {"text": f"{begin}Hm. So.{end}It is fine."}

    def request(prompt, **fields):
        script = FollowsText(loaded[1], answer["text"], len(prompt))
        return Request(prompt, logits_processors=[script], **fields)

    monkeypatch.setattr(turn, "Request", request)
    session = fm.LanguageModelSession(model=fm.SystemLanguageModel(model=loaded))
    snapshots = [text async for text in session.stream_response("How is it?")]
    assert snapshots[-1] == "It is fine."
    assert all("It is fine.".startswith(text) for text in snapshots)
    assert texts(session, "response") == ["It is fine."]
    # Under a schema, a thought that the template has begun ends, also where the answer is cut off.
    options = fm.GenerationOptions(maximum_response_tokens=20)
    answer["text"] = "Hm. " * 40
    made = await session.respond("Which order?", generating=Order, options=options)
    assert isinstance(made.order, str)
    assert "Hm" in made.order or family == "qwen3 thinking"
