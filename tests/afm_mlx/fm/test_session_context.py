"""A full context: an error, or a history without its oldest turns, or with a summary in their place."""

import asyncio

import pytest

from afm_mlx import fm
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.turn import SUMMARY_PROMPT, made_to_fit

PROMPT = "Write a line about the Film Lecture on Monday, the Yoga Class in Hall Prom and the Tram. "
SHORT = fm.GenerationOptions(maximum_response_tokens=20)


async def talk(session, turns):
    """What the transcript holds after each turn; the last answer's counts."""
    sizes = []
    for i in range(turns):
        await session.respond(f"{i}: " + PROMPT * 5, options=SHORT)
        sizes.append(len((await session.transcript.to_dict())["transcript"]["entries"]))
    return sizes


def prompts(session):
    entries = session.transcript._entries
    return [e["contents"][0]["text"] for e in entries if e["role"] == "user"]


def test_by_default_a_full_context_is_an_error(model):
    session = fm.LanguageModelSession("Be brief.", model)
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        asyncio.run(talk(session, 20))
    before = len(session.transcript._entries)
    assert 4 < before < 30


def test_an_answer_that_fills_the_context_is_completed(model):
    schema = {"type": "array", "items": {"const": "yes"}, "minItems": 100}

    def answered(**how):
        session = fm.LanguageModelSession(model=model)
        request = session.respond(PROMPT * 30, **{"json_schema": schema, **how})
        return asyncio.run(request).value(), session

    answer, session = answered()
    assert len(answer) >= 100
    assert set(answer) == {"yes"}
    assert session.last_answer.finish_reason == "length"
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        answered(at_limit="error")
    # What is too far from any end is an error.
    with pytest.raises(fm.ExceededContextWindowSizeError, match="context window"):
        answered(json_schema=schema | {"minItems": 5000})


def test_a_prompt_leaves_room_for_a_token_at_least(model, monkeypatch):
    async def answer():
        session = fm.LanguageModelSession(model=model)
        await session.respond(PROMPT, options=fm.GenerationOptions(maximum_response_tokens=1))
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
    assert sizes[-1] < 21
    drops = [i for i in range(1, 10) if sizes[i] <= sizes[i - 1]]
    assert drops
    assert len(drops) < 4  # half of the context is made free each time
    assert session.transcript._entries[0]["role"] == "instructions"
    numbers = [int(text.partition(":")[0]) for text in prompts(session)]
    assert numbers == list(range(numbers[0], 10))
    assert session.last_answer.prompt_tokens + 20 <= model.context_size
    with pytest.raises(fm.ExceededContextWindowSizeError):
        asyncio.run(session.respond(PROMPT * 100))
    assert len(session.transcript._entries) == sizes[-1]


def test_a_summary_takes_the_place_of_the_oldest_turns(model):
    session = fm.LanguageModelSession("Be brief.", model, context_policy="summarize")
    sizes = asyncio.run(talk(session, 10))
    assert max(sizes) < 21
    assert session.transcript._entries[0]["role"] == "instructions"
    assert prompts(session)[0] == SUMMARY_PROMPT
    assert SUMMARY_PROMPT not in prompts(session)[1:]
    numbers = [int(text.partition(":")[0]) for text in prompts(session)[1:]]
    assert numbers == list(range(numbers[0], 10))
    assert session.transcript._entries[2]["contents"][0]["text"]
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
    """Of random histories: as many of the newest turns as half of the context holds, and always the last."""
    for _ in range(50):
        words = rng.integers(1, 40, int(rng.integers(1, 12))).tolist()
        limit = int(rng.integers(-1, 40)) or 1
        asked = []

        async def summarize(transcript, room, asked=asked):
            asked.append((transcript, room))
            return "s " * room

        draft = history(*words)
        fit = asyncio.run(made_to_fit(draft, count, 100, limit, summarize if summarizes else None))
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
