"""What a session does when its history leaves too little room for a new prompt and its answer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from afm_mlx.fm.transcript import Transcript, joined

POLICIES = ("error", "drop_oldest", "summarize")
SUMMARY_PROMPT = "Summarize our conversation so far."

Count = Callable[[Transcript], int]
"""Tokens of a history, up to the answer that is to come."""


def room_for_answer(context_size: int, max_tokens: int) -> int:
    """Tokens that are kept free for an answer: as many as it may have, up to a quarter of the context.

    Args:
        context_size: tokens of the whole context.
        max_tokens: of the answer; -1 for no limit.
    """
    most = context_size // 4
    return most if max_tokens < 0 else min(max_tokens, most)


async def made_to_fit(
    draft: Transcript,
    count: Count,
    context_size: int,
    max_tokens: int,
    summarize: Callable[[Transcript, int], Awaitable[str]] | None,
) -> Transcript:
    """A history with as much room for an answer as there should be, without the oldest turns if need be.

    The last turn, which has the new prompt, and the instructions always stay. If turns have to go, half of the
    context is made free, so that this does not happen with every prompt.

    Args:
        draft: the history.
        count: counts its tokens.
        context_size, max_tokens: see `room_for_answer`.
        summarize: gives a summary of a history that ends with the prompt for one, in so many tokens at most.
            The summary takes the place of the turns that go. None drops them.
    """
    if count(draft) + room_for_answer(context_size, max_tokens) <= context_size:
        return draft
    before, turns = draft.turns()
    room = context_size // 8 if summarize else 0
    target = context_size // 2 - room

    def without(first: int) -> Transcript:
        return draft.with_entries([*before, *joined(turns[first:])])

    # Fewer turns have fewer tokens; if even the last one alone has too many, it alone stays.
    first = bisect_left(range(len(turns) - 1), -target, key=lambda n: -count(without(n)))
    kept = without(first)
    if first == 0 or summarize is None or count(kept) > context_size - 2 * room:
        return kept
    summary = await _summary(
        draft, before, turns[:first], count, context_size - room, summarize, room
    )
    if not summary:
        return kept
    said = draft.with_entries(before)
    said.add_prompt(SUMMARY_PROMPT)
    said.add_response(summary)
    return draft.with_entries([*joined([before, *said.turns()[1], *turns[first:]])])


async def _summary(
    draft: Transcript,
    before: list[Any],
    turns: Sequence[list[Any]],
    count: Count,
    most: int,
    summarize: Callable[[Transcript, int], Awaitable[str]],
    room: int,
) -> str:
    """A summary of turns, as many of the newest as fit; empty when none does."""
    for first in range(len(turns)):
        asking = draft.with_entries([*before, *joined(turns[first:])])
        asking.add_prompt(SUMMARY_PROMPT)
        if count(asking) <= most:
            return await summarize(asking, room)
    return ""
