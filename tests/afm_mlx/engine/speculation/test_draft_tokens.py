"""Draft tokens of one row, and look-up in the prompt against a search that looks everywhere."""

import pytest

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import generate
from afm_mlx.engine.request import Request
from afm_mlx.engine.row import Row
from afm_mlx.engine.speculation.draft_tokens import LENGTHS, Draft, PromptLookup
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from tests.tools.drafts import FaultyDrafter
from tests.tools.engines import run, some_prompt


def by_search(tokens, count):
    for length in LENGTHS:
        end = tokens[-length:]
        for at in range(len(tokens) - length - 1, -1, -1):
            if len(end) == length and tokens[at : at + length] == end:
                return tokens[at + length : at + length + count]
    return []


def test_draft_tokens_are_what_followed_before(rng):
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


def test_nothing_is_drafted_after_an_end_or_past_the_limit(rng):
    row = Row(0, Request([1, 2, 3, 9, 5, 1, 2]), None)
    row.pending = []
    for limit, ends, fed in ((6, {9}, [2, 3, 9]), (2, set(), [2, 3]), (1, set(), [2])):
        draft = Draft(row, limit, ends)
        PromptLookup().propose([draft], 4)
        assert [*draft.fed] == fed
        assert not draft.is_open


@pytest.mark.parametrize("tokens", [[-1], [64], [2**40], [1.5], ["a"], [None], [[1, 2]], [True]])
def test_draft_tokens_outside_the_vocabulary_end_their_row_alone(rng, model, tokenizer, tokens):
    prompts = [some_prompt(rng, 4) for _ in range(2)]
    wanted = generate(model, tokenizer, prompts[1], max_tokens=12)

    def propose(drafts):
        for draft in drafts:
            if draft.row.request.prompt == prompts[0]:
                draft.extend(tokens)

    engine = Engine(
        model, tokenizer, speculation=Speculation(FaultyDrafter(propose), num_draft_tokens=2)
    )
    bad, good = (engine.submit(Request(p, 12, logprobs=False)) for p in prompts)
    found = run(engine)
    assert found[bad][-1].finish_reason == "error"
    with pytest.raises(RequestError, match="A drafter proposed"):
        raise found[bad][-1].error
    assert "".join(response.text for response in found[good]) == wanted


@pytest.mark.parametrize(
    "propose",
    [
        lambda drafts: 1 / 0,
        lambda drafts: [d.fed.append(-7) for d in drafts],
        lambda drafts: [d.fed.append(7) for d in drafts],
        lambda drafts: [d.fed.clear() for d in drafts],
        lambda drafts: [d.fed.__setitem__(0, 7) for d in drafts],
        lambda drafts: [d.masks.clear() for d in drafts],
        *(
            lambda drafts, name=name: [setattr(d, name, None) for d in drafts]
            for name in ("fed", "masks", "proposed", "n_pending", "row")
        ),
    ],
    ids="raises appends bypasses clears rewrites unmasks fed masks proposed n_pending row".split(),
)
def test_a_drafter_that_fails_ends_its_rows_alone(rng, model, tokenizer, propose):
    prompts = [some_prompt(rng, 4) for _ in range(2)]
    wanted = generate(model, tokenizer, prompts[1], max_tokens=12)
    engine = Engine(
        model, tokenizer, speculation=Speculation(FaultyDrafter(propose), num_draft_tokens=2)
    )
    bad = engine.submit(Request(prompts[0], 12, logprobs=False))
    good = engine.submit(Request(prompts[1], 12, logprobs=False, draft=False))
    found = run(engine)
    with pytest.raises(RequestError, match="The drafter FaultyDrafter"):
        raise found[bad][-1].error
    assert "".join(response.text for response in found[good]) == wanted
