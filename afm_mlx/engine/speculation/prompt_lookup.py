"""Guesses from the prompt: what followed the last few tokens where they stood before.

Answers that copy from their prompt (extraction, edits, code) are guessed well, and at no cost.

Source: Saxena, "Prompt Lookup Decoding" (github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from afm_mlx.engine.row import Row
from afm_mlx.engine.speculation.draft import Draft

LENGTHS = (4, 3, 2)
"""Numbers of last tokens that are looked for, the longest first."""


class PromptLookup:
    """Guesses what followed the last tokens of prompt and answer where they stood before."""

    def __init__(self) -> None:
        self._places: dict[int, _Places] = {}  # by row

    def propose(self, drafts: Sequence[Draft], count: int) -> None:
        """Append `count` guesses at most to each draft."""
        for draft in drafts:
            places = self._places.setdefault(draft.row.id, _Places())
            draft.extend(places.following(draft.row, draft.assumed, count))

    def forget(self, rows: Iterable[int]) -> None:
        """Drop what is known of rows, by their ids."""
        for row in rows:
            self._places.pop(row, None)


class _Places:
    """Where every few tokens of one row stood last."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # the index behind their last occurrence

    def following(self, row: Row, assumed: Sequence[int], count: int) -> list[int]:
        prompt = row.request.prompt
        for token in self._new(row, len(prompt)):
            # What ends here is found only once something follows it.
            for length in LENGTHS:
                if len(self._tokens) >= length:
                    self._behind[tuple(self._tokens[-length:])] = len(self._tokens)
            self._tokens.append(token)
        last = [*self._tokens[-max(LENGTHS) :], *assumed]
        for length in LENGTHS:
            at = self._behind.get(tuple(last[-length:])) if len(last) >= length else None
            if at is not None:
                return self._tokens[at : at + count]
        return []

    def _new(self, row: Row, prompt_length: int) -> list[int]:
        done = len(self._tokens)
        if done < prompt_length:
            return [*row.request.prompt[done:], *row.tokens]
        return row.tokens[done - prompt_length :]
