"""Guesses from the prompt, beside a search that looks everywhere."""

from afm_mlx.engine.request import Request
from afm_mlx.engine.row import Row
from afm_mlx.engine.speculation.draft_tokens import LENGTHS, Draft, PromptLookup


def by_search(tokens, count):
    """What follows the last occurrence of the longest end that occurs before."""
    for length in LENGTHS:
        end = tokens[-length:]
        for at in range(len(tokens) - length - 1, -1, -1):
            if len(end) == length and tokens[at : at + length] == end:
                return tokens[at + length : at + length + count]
    return []


def test_guesses_are_what_followed_before(rng):
    found = 0
    for _ in range(30):
        vocab = int(rng.integers(2, 12))
        prompt = rng.integers(0, vocab, int(rng.integers(1, 30))).tolist()
        row, lookup = Row(0, Request(prompt), None), PromptLookup()
        row.pending = []
        for _ in range(12):
            draft = Draft(row, 6, end_tokens=set())
            lookup.propose([draft], 4)
            assert [*draft.fed] == [
                [*prompt, *row.tokens][-1],
                *by_search([*prompt, *row.tokens], 4),
            ]
            found += bool(draft.proposed)
            row.tokens += rng.integers(0, vocab, int(rng.integers(1, 4))).tolist()
        lookup.forget([0])
    assert found > 50


def test_nothing_is_guessed_behind_an_end_or_past_the_limit(rng):
    row = Row(0, Request([1, 2, 3, 9, 5, 1, 2]), None)
    row.pending = []
    for limit, ends, fed in ((6, {9}, [2, 3, 9]), (2, set(), [2, 3]), (1, set(), [2])):
        draft = Draft(row, limit, ends)
        PromptLookup().propose([draft], 4)
        assert [*draft.fed] == fed
        assert not draft.is_open
