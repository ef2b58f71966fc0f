"""Feedback about answers, as files."""

import json

import pytest

from afm_mlx import fm
from tests.tools.cases import each

Feedback = fm.LanguageModelFeedback


@fm.generable
class Event:
    title: str


async def test_feedback_has_the_conversation_the_answer_and_what_was_wanted(model):
    session = fm.LanguageModelSession("Be brief.", model)
    issue = Feedback.Issue(Feedback.Category.INCORRECT, "It is Monday.")

    await session.respond("Hi")
    await session.respond("Which day is it?")
    first = session.log_feedback_attachment(Feedback.Sentiment.NEGATIVE, [issue], "Monday")
    with pytest.raises(fm.ExceededContextWindowSizeError):
        await session.respond("word " * 2000)
    failed = session.log_feedback_attachment("neutral", desired_output=Event("Lunch"))
    await session.respond("Hi")
    lines = (first + failed + session.log_feedback_attachment()).splitlines()
    first, failed, last = map(json.loads, lines)
    entries = [entry.to_dict() for entry in session.transcript]
    assert first["input"] == entries[:4]
    assert first["output"] == entries[4:5]
    assert first["sentiment"] == "negative"
    assert first["issues"] == [{"category": "incorrect", "explanation": "It is Monday."}]
    assert first["desiredOutput"]["contents"][0]["text"] == "Monday"
    assert failed["input"][:5] == entries[:5]
    assert failed["input"][5]["contents"][0]["text"].startswith("word word")
    assert "ExceededContextWindowSizeError" in failed["error"]
    structure = failed["desiredOutput"]["contents"][0]["structure"]
    assert structure == {"source": "Event", "content": {"title": "Lunch"}}
    assert (last["sentiment"], last["issues"], "error" in last) == (None, [], False)
    assert last["input"] + last["output"] == entries


@each(
    "arguments, error, message",
    [
        ({"sentiment": "angry"}, ValueError, "positive, negative, neutral"),
        ({"issues": ["wrong"]}, TypeError, "Issue"),
        ({"desired_output": 3}, TypeError, "desired_output is 3"),
    ],
)
def test_what_is_no_feedback_is_refused(model, arguments, error, message):
    session = fm.LanguageModelSession(model=model)
    with pytest.raises(error, match=message):
        session.log_feedback_attachment(**arguments)
    with pytest.raises(ValueError, match="tooVerbose"):
        Feedback.Issue("rude")
