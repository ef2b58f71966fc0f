"""Feedback about an answer, as a line of JSON with the conversation and what is wrong with the answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from afm_mlx.errors import shown
from afm_mlx.fm.generable import Generable, GeneratedContent
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.transcript_entries import Entry, Response

_Member = TypeVar("_Member", bound=Enum)


class Sentiment(Enum):
    """A judgement of an answer."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    NEUTRAL = "neutral"


class Category(Enum):
    """A kind of fault in an answer."""

    UNHELPFUL = "unhelpful"
    TOO_VERBOSE = "tooVerbose"
    DID_NOT_FOLLOW_INSTRUCTIONS = "didNotFollowInstructions"
    INCORRECT = "incorrect"
    STEREOTYPE_OR_BIAS = "stereotypeOrBias"
    SUGGESTIVE_OR_SEXUAL = "suggestiveOrSexual"
    VULGAR_OR_OFFENSIVE = "vulgarOrOffensive"
    TRIGGERED_GUARDRAIL_UNEXPECTEDLY = "triggeredGuardrailUnexpectedly"


@dataclass(frozen=True)
class Issue:
    """A fault in an answer.

    Args:
        category: a `Category` or its value. An unknown one raises `ValueError`.
        explanation: what is wrong, in words.
    """

    category: Category
    explanation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "category", _member(Category, "category", self.category))


class LanguageModelFeedback:
    """The classes of feedback, under the framework's names."""

    Sentiment = Sentiment
    Issue = Issue
    Category = Category


def feedback_attachment(
    transcript: Transcript,
    rejected: Iterable[Entry],
    error: str | None,
    sentiment: object,
    issues: Iterable[Issue],
    desired: object,
) -> bytes:
    """Write feedback about a session's last turn, or about a later request that failed, as a line of JSON.

    `rejected` are the entries of the failed request, which are not in the transcript, and `error` is what it
    raised, None without one. See `LanguageModelSession.log_feedback_attachment` for the rest.
    """
    issues = list(issues)
    if not all(isinstance(issue, Issue) for issue in issues):
        raise TypeError(
            f"issues is {shown(issues)}; LanguageModelFeedback.Issue(category, ...) are needed."
        )
    judged = None if sentiment is None else _member(Sentiment, "sentiment", sentiment)
    before, turns = transcript.turns()
    failed = [entry.to_dict() for entry in rejected]
    # The feedback is about the turn that failed, else the last one.
    turn = failed or (turns.pop() if turns else [])
    document: dict[str, Any] = {
        "type": "LanguageModelFeedback",
        "version": 1,
        "input": [*before, *(entry for part in turns for entry in part), *turn[:1]],
        "output": turn[1:],
        "sentiment": judged and judged.value,
        "issues": [
            {"category": i.category.value}
            | ({"explanation": i.explanation} if i.explanation else {})
            for i in issues
        ],
    }
    if error is not None:
        document["error"] = error
    if desired is not None:
        document["desiredOutput"] = _entry(desired).to_dict()
    return json.dumps(document, ensure_ascii=False).encode() + b"\n"


def _entry(desired: object) -> Entry:
    if isinstance(desired, Entry):
        return desired
    if isinstance(desired, Generable) and not isinstance(desired, type):
        content: GeneratedContent = desired.generated_content  # type: ignore[attr-defined]
        return Response(content, source=type(desired).__name__)
    if isinstance(desired, Mapping):
        desired = GeneratedContent(dict(desired))
    if isinstance(desired, str | GeneratedContent):
        return Response(desired)
    raise TypeError(
        f"desired_output is {shown(desired)}; a text, GeneratedContent, an instance of a generable class or an "
        "entry of a transcript is needed."
    )


def _member(kind: type[_Member], name: str, given: object) -> _Member:
    try:
        return kind(given)
    except ValueError:
        allowed = ", ".join(member.value for member in kind)
        raise ValueError(f"{name} is {shown(given)}; allowed are {allowed}.") from None
