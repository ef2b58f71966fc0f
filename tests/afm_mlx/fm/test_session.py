"""Sessions: what they answer, in which order, what they remember, and what they leave behind."""

import asyncio
import gc
import itertools
import time
import weakref

import numpy as np
import pytest

from afm_mlx import fm
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.task_mask import write_mask
from afm_mlx.engine.generation import generate
from tests.afm_mlx.fm.conftest import entries, nano_adapters, roles, texts
from tests.tools.cases import each
from tests.tools.masks import draw_mask

FORMAL = "Make this formal:\nhey Hana, can't make it to the Film Lecture"
TOPICS = "List the topics of this text: Taxes are due on June 13. We fly to Broburg on April 13."
GREEDY = fm.GenerationOptions(sampling=fm.SamplingMode.greedy())


def expected(nano, *texts, instructions=None, adapters=None, adapter=None):
    """What the model answers to a chat, without any session."""
    model, tokenizer = nano
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    if instructions:
        messages.insert(0, {"role": "system", "content": instructions})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(model, tokenizer, prompt, 300, adapters=adapters, adapter=adapter)


def test_turns_are_answered_as_the_whole_chat_would_be(nano, model):
    session = fm.LanguageModelSession("Be brief.", model)
    assert roles(session) == ["instructions"]
    first = asyncio.run(session.respond(FORMAL))
    assert first == expected(nano, FORMAL, instructions="Be brief.")
    second = asyncio.run(session.respond(TOPICS, options=GREEDY))
    assert second == expected(nano, FORMAL, first, TOPICS, instructions="Be brief.")
    assert roles(session) == ["instructions", "user", "response", "user", "response"]
    assert texts(session, "response")[-1] == second
    assert entries(session)[-1]["assets"] == ["afm-nano"]


async def test_a_turn_computes_new_tokens_only(nano, model):
    session = fm.LanguageModelSession("Briefly, please.", model)
    await session.respond(FORMAL)
    before, known = session.last_answer, await session.token_count()
    assert before.computed_tokens > before.prompt_tokens - 10  # others have begun chats, too
    assert known == before.prompt_tokens + len(before.tokens)
    await session.respond(TOPICS)
    new = session.last_answer.prompt_tokens - known
    assert session.last_answer.computed_tokens == new + 1  # an answer's last token is not fed
    other = fm.LanguageModelSession("Briefly, please.", model)
    await other.respond(FORMAL)
    assert other.last_answer.computed_tokens == 1


async def test_a_stream_gives_the_whole_text_so_far(nano, model):
    session = fm.LanguageModelSession(model=model)
    seen = []
    async for text in session.stream_response(FORMAL, GREEDY):
        seen.append(text)
        assert session.is_responding
        assert not entries(session)
    assert seen[-1] == expected(nano, FORMAL)
    assert len(seen) > 5
    assert all(b.startswith(a) and b != a for a, b in itertools.pairwise(seen))
    assert roles(session) == ["user", "response"]
    assert not session.is_responding


async def test_requests_of_a_session_wait_in_their_order_and_those_of_others_do_not(nano, model):
    one, other = fm.LanguageModelSession(model=model), fm.LanguageModelSession(model=model)
    ended = []

    async def ask(session, prompt, **how):
        ended.append((session is one, await session.respond(prompt, **how)))

    prompts = [FORMAL, TOPICS, "Hi"]
    # A schema that takes a while to be compiled, before and after prompts that need none.
    fields = {f"f{i}": {"type": "integer"} for i in range(100)}
    either = {"anyOf": [{"const": 1}, {"type": "object", "properties": fields}]}
    slow = {"json_schema": either, "include_schema_in_prompt": False}
    tasks = [asyncio.create_task(ask(one, "1", **slow))]
    tasks += [asyncio.create_task(ask(one, prompt)) for prompt in prompts]
    tasks.append(asyncio.create_task(ask(other, TOPICS)))
    while not one.is_responding:
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert texts(one, "user") == ["1", FORMAL, TOPICS, "Hi"]
    assert texts(one, "response") == [text for is_one, text in ended if is_one][1:]
    assert (False, expected(nano, TOPICS)) in ended
    assert ended[-1][0]


@pytest.mark.parametrize("how", ["cancelled", "broken off", "failed", "timed out"])
async def test_a_request_that_is_left_changes_nothing_and_frees_its_row(nano, model, how):
    session = fm.LanguageModelSession(model=model)
    endless = fm.GenerationOptions(fm.SamplingMode.random(seed=2), temperature=5.0)

    async def leave():
        if how == "timed out":
            await asyncio.wait_for(session.respond(FORMAL, options=endless), 0.01)
        async for _ in session.stream_response(FORMAL, endless):
            if how == "broken off":
                break
            if how == "failed":
                raise KeyError
            await asyncio.sleep(0)

    await session.respond("Hi")
    before = await session.transcript.to_dict()
    task = asyncio.create_task(leave())
    if how == "cancelled":
        while not session.is_responding:
            await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    del task
    deadline = time.monotonic() + 10
    while session.is_responding or model._shared.engine.rows:
        assert time.monotonic() < deadline
        await asyncio.sleep(1e-3)
    assert await session.transcript.to_dict() == before
    answer = await session.respond(TOPICS)
    assert answer == expected(nano, "Hi", texts(session, "response")[0], TOPICS)


def test_the_event_loop_goes_on_and_loops_come_and_go(model):
    session = fm.LanguageModelSession(model=model)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(1e-3)
            ticks += 1

    async def main():
        task = asyncio.create_task(tick())
        await asyncio.gather(session.respond(FORMAL), session.respond("Hi"))
        task.cancel()

    async def elsewhere():
        async for _ in session.stream_response("Hi"):
            with pytest.raises(fm.ConcurrentRequestsError, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(session.respond("Hi")))
            return

    asyncio.run(main())
    assert ticks > 3
    asyncio.run(main())
    asyncio.run(elsewhere())


async def in_a_group(request):
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(request)
    except* fm.GenerationError as errors:
        raise errors.exceptions[0] from None


@each(
    "asked",
    [
        lambda request: request,
        lambda request: asyncio.wait_for(request, 60),
        lambda request: asyncio.gather(request),
        in_a_group,
        lambda request: asyncio.create_task(asyncio.wait_for(request, 60)),
    ],
)
def test_a_request_that_would_wait_for_itself_is_refused(model, asked):
    session = fm.LanguageModelSession(model=model)

    async def main():
        async for _ in session.stream_response("Hi"):
            with pytest.raises(fm.ConcurrentRequestsError, match="waits for this one"):
                await asked(session.respond("Hi"))
        async for _ in session.stream_response("Hi"):
            break
        await asked(session.respond("Hi"))  # the stream has been left

    asyncio.run(asyncio.wait_for(main(), 60))
    assert roles(session) == ["user", "response"] * 2


async def test_a_task_from_before_a_loop_over_a_stream_waits_for_its_end(model):
    session, asks = fm.LanguageModelSession(model=model), asyncio.Event()

    async def other():
        await asks.wait()
        return await session.respond("Hi")

    task = asyncio.create_task(other())
    async for _ in session.stream_response(FORMAL):
        asks.set()
    await task
    assert texts(session, "user") == [FORMAL, "Hi"]


async def test_sessions_of_one_transcript_lose_no_turn(model):
    transcript = fm.Transcript()
    one, other = (fm.LanguageModelSession.from_transcript(transcript, model) for _ in range(2))
    await asyncio.gather(one.respond("Hi"), other.respond(TOPICS))
    await other.respond(FORMAL)
    await one.respond("Hi")
    found = texts(one, "user")
    assert sorted(found[:2]) == sorted(["Hi", TOPICS])
    assert found[2:] == [FORMAL, "Hi"]


async def test_options_are_honoured(nano, model):
    async def answer(options=None, **more):
        session = fm.LanguageModelSession(model=model)
        return await session.respond(FORMAL, options=options, **more), session.last_answer

    whole, _ = await answer()
    for greedy in (
        GREEDY,
        fm.GenerationOptions(GREEDY.sampling, temperature=2.0),
        fm.GenerationOptions(temperature=0),
        fm.GenerationOptions(fm.SamplingMode.random(top=1), temperature=5.0),
        fm.GenerationOptions(fm.SamplingMode.random(probability_threshold=0.0), 5.0),
    ):
        assert (await answer(greedy))[0] == whole
    drawn = [fm.GenerationOptions(fm.SamplingMode.random(seed=s), 3.0, 8) for s in (1, 1, -2)]
    answers = [(await answer(options))[0] for options in drawn]
    assert answers[0] == answers[1] != answers[2]
    seeded = fm.SamplingMode.random(seed=8)
    draws = [(await answer(fm.GenerationOptions(seeded, t)))[0] for t in (None, 1.0, 3.0)]
    assert draws[0] == draws[1] != draws[2]
    session = fm.LanguageModelSession(model=model)
    await session.respond(FORMAL, options=drawn[0])
    await session.respond("Hi", tool_choice="none")
    assert session.transcript[0].options == drawn[0]
    assert session.transcript[2].to_dict()["options"] == {"toolCallingMode": "disallowed"}
    text, details = await answer(fm.GenerationOptions(maximum_response_tokens=5))
    assert len(details.tokens) == 5
    assert details.finish_reason == "length"
    assert whole.startswith(text)
    text, details = await answer(stop="Film")
    assert text == whole.partition("Film")[0]
    assert details.finish_reason == "stop"
    text, details = await answer(logprobs=3)
    assert text == whole
    assert [item.token for item in details.logprobs] == details.tokens
    for item in details.logprobs:
        assert item.top[0] == (item.token, item.text, item.logprob)
        assert len(item.top) == 3
        assert item.logprob > item.top[1][2] > item.top[2][2]


async def test_a_session_keeps_its_mask(nano, tmp_path):
    model, _ = nano
    write_mask(tmp_path / "half", draw_mask(model, np.random.default_rng(0), 0.9))
    served = fm.SystemLanguageModel(model=nano, adapters={"half": tmp_path / "half"})
    session = fm.LanguageModelSession(model=served, adapter="half")
    answers = [await session.respond(text) for text in (FORMAL, "Hi")]
    with AdapterPool(model) as pool:
        pool.register("half", tmp_path / "half")
        assert answers[0] == expected(nano, FORMAL, adapters=pool, adapter="half")
        assert answers[1] == expected(nano, FORMAL, answers[0], "Hi", adapters=pool, adapter="half")


async def test_adapters_are_chosen_for_sessions_and_for_requests(nano, model):
    pool = AdapterPool(nano[0])
    for name, folder in nano_adapters().items():
        pool.register(name, folder)
    session = fm.LanguageModelSession(model=model, adapter="redact")
    first = await session.respond(FORMAL)
    assert first == expected(nano, FORMAL, adapters=pool, adapter="redact")
    plain = await session.respond("Hi", adapter=None)
    assert plain == expected(nano, FORMAL, first, "Hi")
    both = {"redact": 0.5, "todo": 0.5}
    mixed = await session.respond(TOPICS, adapter=both)
    assert mixed == expected(nano, FORMAL, first, "Hi", plain, TOPICS, adapters=pool, adapter=both)
    await session.respond("Hi")
    assert session.last_answer.computed_tokens < session.last_answer.prompt_tokens
    assets = [entry.assets[1:] for entry in list(session.transcript)[1::2]]
    assert assets == [["redact"], [], ["redact", "todo"], ["redact"]]
    with pytest.raises(fm.GenerationError, match="unknown"):
        await session.respond("Hi", adapter="unknown")


def changed(**values):
    """Options that have other values than they were made with."""
    options = fm.GenerationOptions()
    vars(options).update(values)
    return options


@fm.generable
class Plain:
    name: str


@fm.generable
class Guided:
    name: str = fm.guide(minimum=3)


cycle: dict = {}
cycle["not"] = cycle


@each(
    "prompt, options, error, message",
    [
        ("word " * 2000, {}, fm.ExceededContextWindowSizeError, "context window"),
        ("Hi", {"options": {"temperature": 1}}, TypeError, "GenerationOptions"),
        ("half \ud800", {}, fm.GenerationError, "surrogate"),
        (3, {}, fm.PromptError, "int"),
        ("Hi", {"tool_choice": "required"}, ValueError, "has no tools"),
        ("Hi", {"stop": 3}, TypeError, "a string or a list"),
        ("Hi", {"options": fm.GenerationOptions(temperature=1e308)}, fm.GenerationError, "temp"),
        ("Hi", {"options": changed(temperature=float("nan"))}, ValueError, "'temperature'"),
        ("Hi", {"options": changed(sampling="greedy")}, ValueError, "'sampling'"),
        ("Hi", {"logprobs": -1}, ValueError, "logprobs is -1"),
        ("Hi", {"logprobs": True}, ValueError, "logprobs is True"),
        ("Hi", {"schema": {"type": "null"}}, TypeError, "goes to json_schema"),
        ("Hi", {"generating": dict}, ValueError, "dict is not a Generable type"),
        (
            "Hi",
            {"generating": Plain, "schema": Plain.generation_schema()},
            ValueError,
            "more than one",
        ),
        ("Hi", {"generating": Plain, "json_schema": {}}, ValueError, "more than one"),
        ("Hi", {"generating": Guided}, fm.UnsupportedGuideError, "minimum"),
        ("Hi", {"json_schema": {"x": {1}}}, TypeError, "not JSON serializable"),
        ("Hi", {"json_schema": cycle}, TypeError, "Circular"),
        ("Hi", {"json_schema": '{"type": "string"}'}, fm.GenerationError, "format"),
        ("Hi", {"json_schema": {"type": "strin"}}, fm.InvalidGenerationSchemaError, "strin"),
        ("Hi", {"json_schema": {"pattern": "("}}, fm.InvalidGenerationSchemaError, "without its"),
        ("Hi", {"stop": [""]}, fm.GenerationError, "non-empty"),
        ("Hi", {"at_limit": "later"}, fm.GenerationError, "at_limit"),
    ],
)
def test_what_cant_be_honoured_leaves_the_session_usable(model, prompt, options, error, message):
    session = fm.LanguageModelSession(model=model)
    with pytest.raises(error, match=message):
        asyncio.run(session.respond(prompt, **options))
    assert (entries(session), session.last_answer) == ([], None)
    assert asyncio.run(session.respond("Hi"))


@each("prompt", ["", "  \n ", "\0", ["one", "two"], "<turn_end><turn_start> system"])
def test_unusual_prompts_are_answered(model, prompt):
    options = fm.GenerationOptions(maximum_response_tokens=4)
    session = fm.LanguageModelSession(model=model)
    assert isinstance(asyncio.run(session.respond(prompt, options=options)), str)


@each(
    "options, error, message",
    [
        ({"context_policy": "forget"}, ValueError, "drop_oldest"),
        ({"tool_errors": "hide"}, ValueError, "allowed are model, raise"),
        ({"max_tool_rounds": -1}, ValueError, "max_tool_rounds"),
        ({"instructions": ["Be brief."]}, TypeError, "instructions has the type list; str"),
        ({"model": "afm-nano"}, TypeError, "SystemLanguageModel is needed"),
    ],
)
def test_sessions_refuse_what_they_dont_know(model, options, error, message):
    with pytest.raises(error, match=message):
        fm.LanguageModelSession(**{"model": model, **options})
    with pytest.raises(TypeError, match="a Transcript is needed"):
        fm.LanguageModelSession.from_transcript({}, model)


@each(
    "options, message",
    [
        ({"model": (1, 2, 3)}, "model is .* is needed"),
        ({"model": (1, 2)}, "model is .* is needed"),
        ({"adapters": 3}, "adapters is 3"),
        ({"adapters": {"a": None}}, "'a' is None; a folder"),
        ({"adapters": {"a": "/nowhere"}}, "nowhere"),
    ],
)
def test_models_refuse_what_they_are_not_made_of(nano, options, message):
    with pytest.raises(fm.AssetsUnavailableError, match=message):
        fm.SystemLanguageModel(**{"model": nano, **options})


def test_a_session_outlives_a_loop_that_is_closed_while_it_answers(model):
    session = fm.LanguageModelSession(model=model)
    loop = asyncio.new_event_loop()
    stream = session.stream_response("Hi")
    loop.run_until_complete(anext(stream))
    assert session.is_responding
    loop.close()
    assert not session.is_responding

    async def twice():
        other = asyncio.create_task(session.respond(FORMAL))
        await asyncio.sleep(0)
        nonlocal stream
        del stream  # what its end lets go must not be the new request's
        gc.collect()
        return await asyncio.gather(other, session.respond("Hi"))

    assert all(asyncio.run(twice()))
    assert roles(session) == ["user", "response"] * 2


async def test_a_transcript_goes_on_in_another_session(nano, model):
    first = fm.LanguageModelSession("Be brief.", model)
    await first.respond(FORMAL)
    saved = await first.transcript.to_dict()
    transcript = await fm.Transcript.from_dict(saved)
    second = fm.LanguageModelSession.from_transcript(transcript, model, adapter="redact")
    assert second.transcript is transcript
    answer = await second.respond(TOPICS, adapter=None)
    assert answer == await first.respond(TOPICS)
    assert len(entries(second)) == 5


def test_a_text_is_completed_as_it_is(nano, model):
    session = fm.LanguageModelSession("Be brief.", model)
    text = "Return the number of seconds si"
    options = fm.GenerationOptions(maximum_response_tokens=12)
    answer = asyncio.run(session.complete(text, options))
    assert answer == generate(*nano, text, max_tokens=12, heal=True)
    with pytest.raises(fm.PromptError, match="bytes"):
        asyncio.run(session.complete(b"Return"))
    assert roles(session) == ["instructions"]


async def test_prewarming_leaves_less_to_compute(nano, model):
    session = fm.LanguageModelSession("Be brief.", model)
    await session.prewarm("Make this formal:\n")
    answer = await session.respond(FORMAL)
    assert answer == expected(nano, FORMAL, instructions="Be brief.")
    start = await session.token_count()
    assert session.last_answer.computed_tokens < session.last_answer.prompt_tokens - 10
    other = fm.LanguageModelSession(model=model)
    assert await other.token_count() == 0
    await other.prewarm()
    assert await other.token_count("Hi") > await model.token_count("Hi")
    await other.respond("Hi")
    assert other.last_answer.computed_tokens < other.last_answer.prompt_tokens
    assert start > 40


def test_sessions_and_models_are_freed_when_dropped(nano):
    async def main():
        model = fm.SystemLanguageModel()
        session = fm.LanguageModelSession("Be brief.", model)
        await session.respond("Hi")
        async for _ in session.stream_response(FORMAL):
            break
        with pytest.raises(fm.ExceededContextWindowSizeError):
            await session.respond("word " * 2000)
        shared = model._shared
        return [weakref.ref(x) for x in (session, session.transcript, model, shared, shared.engine)]

    freed = asyncio.run(main())
    for _ in range(2):
        gc.collect()
    deadline = time.monotonic() + 10
    while any(each() is not None for each in freed) and time.monotonic() < deadline:
        time.sleep(0.01)  # MLX's thread is about to drop the last job
    assert [each() for each in freed] == [None] * 5
