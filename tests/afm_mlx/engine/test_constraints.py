"""Rows under constraints: their tokens are a naive loop's, and no other row is affected."""

import json
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_random_adapters
from afm_mlx.engine.decoding import FORCED_ALONE, FORCED_IN_BATCH
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate
from afm_mlx.engine.prompt_cache import PromptCaches, tokens_in
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_logits_processors, make_sampler
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import IncompleteError, LogitsError
from afm_mlx.guidance import matcher
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, fill_masks
from tests.tools.constraints import (
    CONSTRAINTS,
    EVENT,
    bytes_of,
    naive_by_regex,
    naive_constrained,
    nano_tokenizer,
    wide_model,
)
from tests.tools.engines import forced, run, run_one, tokens_of
from tests.tools.zoo import zoo_model, zoo_tokenizer


@pytest.fixture
def tokenizer():
    return nano_tokenizer()


@pytest.fixture
def model(rng):
    return wide_model(rng, extra=0)


def a_prompt(rng, length=None):
    return rng.integers(10, len(nano_tokenizer()), length or int(rng.integers(1, 20))).tolist()


def drawn(rng, name, sampler=None, **more):
    constraint = CONSTRAINTS[name]()
    seed = int(rng.integers(2**60))
    return Request(
        a_prompt(rng), 60, sampler, seed, constraint=constraint, at_limit="complete", **more
    )


def text_of(responses):
    return "".join(r.text for r in responses)


@pytest.mark.parametrize("max_batch", [1, 5])
def test_constrained_rows_have_the_tokens_of_a_naive_loop(rng, tokenizer, max_batch):
    model = wide_model(rng)
    requests = [drawn(rng, name, logprobs=False) for name in CONSTRAINTS]
    engine = Engine(model, tokenizer, max_batch=max_batch)
    for request in requests:
        engine.submit(request)
    for row, tokens in tokens_of(run(engine)).items():
        assert tokens == naive_constrained(model, tokenizer, requests[row])


def test_what_is_allowed_is_what_another_matcher_allows(rng, model, tokenizer):
    pattern = r"[a-f]{2,9}(-[0-9]+){0,2}"
    prompt = a_prompt(rng)
    request = Request(prompt, 10, constraint=Constraint.regex(pattern), at_limit="complete")
    tokens = [r.token for r in run_one(model, tokenizer, request)]
    wanted = naive_by_regex(model, tokenizer, prompt, pattern, 10)
    assert tokens == wanted[: len(tokens)]
    assert wanted[len(tokens) :] in ([], [tokenizer.eos_token_id], [tokenizer.separator_id])


def test_forced_tokens_are_fed_at_once(rng, model, tokenizer, chunks):
    for company, least in ((0, FORCED_ALONE), (1, FORCED_IN_BATCH)):
        met = set()
        for words in range(FORCED_IN_BATCH + 2):
            # Nothing is forced at first; what comes last may have other tokens.
            text = " the" * words + "\n"
            constraint = Constraint.lark(f"start: /[ab]/ {json.dumps(text)} /[a-z]{{1,2}}/")
            state = Matcher(constraint, tokenizer)
            state.accept(tokenizer.convert_tokens_to_ids("a"))
            count = len(state.forced())
            met.add(count >= least)
            engine = Engine(model, tokenizer)
            for _ in range(company):
                engine.submit(Request(a_prompt(rng, 3), 40))
            row = engine.submit(Request(a_prompt(rng, 3), 40, constraint=constraint))
            chunks.clear()
            assert text_of(run(engine)[row])[1:].startswith(text)
            # The first shape is the prompts', which are fed in one step.
            assert chunks[1:] == ([(1, count - 1)] if count >= least else [])
        assert met == {True, False}


def test_unconstrained_rows_are_what_they_are_alone(rng, model, tokenizer):
    """To the bit next to a row that is constrained or not; alone, other kernels may run."""
    prompts = [a_prompt(rng, 9), a_prompt(rng, 4)]
    random = make_sampler(temp=1.0)
    endless = make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -math.inf))

    def answer(sampler, *others):
        engine = Engine(model, tokenizer)
        row = engine.submit(Request(prompts[0], 20, sampler, 5, endless))
        for options in others:
            engine.submit(Request(prompts[1], 20, random, 6, endless, **options))
        responses = run(engine)[row]
        return [r.token for r in responses], [r.logprobs for r in responses]

    constrained = {"constraint": Constraint.regex("[a-z]{400}"), "at_limit": "complete"}
    (tokens, free), together = answer(random, {}), answer(random, constrained)
    alone = answer(forced(tokens))
    assert tokens == together[0] == alone[0]
    for one, other, third in zip(free, together[1], alone[1], strict=True):
        assert mx.array_equal(one, other)
        np.testing.assert_allclose(third, one, atol=1e-3)


def test_rows_join_leave_and_are_cancelled_under_constraints(rng, model, tokenizer):
    names = [*CONSTRAINTS, None, None]
    for _ in range(4):
        kinds = [names[i] for i in rng.integers(len(names), size=6)]
        requests = [
            drawn(rng, kind, make_sampler(temp=1.0))
            if kind
            else Request(a_prompt(rng), 15, logprobs=False)
            for kind in kinds
        ]
        wanted = [[r.token for r in run_one(model, tokenizer, request)] for request in requests]
        engine, found, gone = Engine(model, tokenizer, max_batch=3), [[] for _ in requests], set()
        waiting = list(requests)
        while waiting or engine.busy:
            if waiting and rng.integers(3) == 0:
                engine.submit(waiting.pop(0))
            if rng.integers(25) == 0 and (begun := len(requests) - len(waiting)):
                gone.add(int(rng.integers(begun)))
                engine.cancel(max(gone))
            for response in engine.step():
                found[response.row].append(response.token)
        for row, (tokens, whole) in enumerate(zip(found, wanted, strict=True)):
            assert tokens == whole or (row in gone and tokens == whole[: len(tokens)])


def test_the_masks_are_made_while_the_logits_are_computed(
    rng, model, tokenizer, monkeypatch, events
):
    fill = matcher.fill_masks
    monkeypatch.setattr(matcher, "fill_masks", lambda m: (events.append("masks"), fill(m))[1])
    engine = Engine(model, tokenizer)
    engine.submit(
        Request(a_prompt(rng), 4, constraint=Constraint.regex("[a-z]+"), at_limit="complete")
    )
    for _ in range(2):
        engine.step()
    assert events == ["submit", "masks", "submit", "submit", "read", "masks", "submit"]


def test_log_probabilities_are_those_of_allowed_tokens(rng, tokenizer):
    model = wide_model(rng)
    request = Request(a_prompt(rng), 60, constraint=CONSTRAINTS["schema"](), at_limit="complete")
    responses = run_one(model, tokenizer, request)
    sure = 0
    for response in responses:
        logprobs = np.array(response.logprobs, np.float64)
        assert logprobs.shape == (len(tokenizer) + 5,)
        assert abs(np.exp(logprobs).sum() - 1) < 1e-4
        assert np.isneginf(logprobs[-5:]).all(), "rows of the embedding that no token has"
        assert math.isfinite(logprobs[response.token])
        sure += logprobs[response.token] == 0
    assert sure > 3, "tokens that are forced have no alternative"


def test_prompt_caches_hold_what_was_fed(rng, model, tokenizer):
    for name, limit in (("schema", 60), ("forced", 60), ("forced", 9), ("choices", 60)):
        request = replace(drawn(rng, name, logprobs=False), max_tokens=limit)
        caches = PromptCaches(model.make_cache)
        with caches.continuing(request.prompt) as turn:
            responses = run_one(model, tokenizer, replace(request, cache=turn.cache))
            turn.answer += [r.token for r in responses]
        assert tokens_in(turn.cache) <= len(request.prompt) + len(turn.answer) - 1
        second = replace(request, prompt=[*request.prompt, *turn.answer, *a_prompt(rng, 3)])
        with caches.continuing(second.prompt) as turn:
            rest = replace(second, prompt=turn.rest, cache=turn.cache)
            again = [r.token for r in run_one(model, tokenizer, rest)]
        assert again == naive_constrained(model, tokenizer, second)


def test_an_answer_that_is_cut_off_is_an_error_or_completed(rng, model, tokenizer):
    constraint = Constraint.json_schema(EVENT)
    for limit in (1, 2, 7, 40):
        prompt = a_prompt(rng)
        engine = Engine(model, tokenizer, max_kv_size=len(prompt) + 8)
        engine.submit(Request(prompt, limit, constraint=constraint))
        engine.submit(Request(prompt, limit, constraint=constraint, at_limit="complete"))
        found = run(engine)
        if found[0][-1].finish_reason == "stop":
            continue
        error = found[0][-1].error
        assert isinstance(error, IncompleteError)
        assert error.text == text_of(found[0])
        assert ("context was full" in str(error)) == (limit == 40)
        assert found[1][-1].finish_reason == "length"
        whole = text_of(found[1])
        assert whole.startswith(error.text.rstrip("\ufffd")), "half a character may be completed"
        assert set(json.loads(whole)) == {"title", "guests", "days"}


def test_a_limit_that_comes_with_the_end_is_no_error(rng, model, tokenizer):
    whole = Constraint.choices(["New York"])
    count = len(run_one(model, tokenizer, Request(a_prompt(rng), 60, constraint=whole)))
    for limit, reason in ((count, "stop"), (count + 1, "stop")):
        responses = run_one(model, tokenizer, Request(a_prompt(rng), limit, constraint=whole))
        assert (text_of(responses), responses[-1].finish_reason) == ("New York", reason)
    more = Request(a_prompt(rng), 3, constraint=Constraint.regex("a+"))
    assert run_one(model, tokenizer, more)[-1].error is None


def test_an_answer_that_is_forced_as_a_whole_needs_no_step(rng, model, tokenizer):
    engine = Engine(model, tokenizer)
    engine.submit(Request(a_prompt(rng), constraint=Constraint.choices(["New York"])))
    assert text_of(engine.step()) == "New York"
    assert not engine.busy


def test_stop_strings_end_an_answer_that_may_end(rng, model, tokenizer):
    items = Constraint.regex("(ab;)+")
    engine = Engine(model, tokenizer)
    engine.submit(Request(a_prompt(rng), 30, constraint=items, stop=["ab;"]))
    engine.submit(Request(a_prompt(rng), 30, constraint=items, stop=["b"], at_limit="complete"))
    found = run(engine)
    assert (text_of(found[0]), found[0][-1].finish_reason) == ("", "stop")
    assert isinstance(found[1][-1].error, IncompleteError)
    assert "stop string" in str(found[1][-1].error)


def test_a_constraint_bans_control_tokens_and_keeps_the_first_space(rng, model, tokenizer):
    request = Request(a_prompt(rng), 25, make_sampler(temp=9.0), 3, constraint=Constraint.text())
    banned = tokenizer.control_ids - tokenizer.eos_token_ids
    assert not banned & {r.token for r in run_one(model, tokenizer, request)}
    request = Request(a_prompt(rng), 9, constraint=Constraint.regex(" [a-z]{3}"))
    spaced = run_one(model, tokenizer, request)
    assert text_of(spaced)[0] == " "
    assert len(text_of(spaced)) == 4


def test_prompts_that_end_within_a_word_are_healed(rng, model, tokenizer):
    prompt = "The New Yor"
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    cities = Constraint.choices(["k", "k City"])
    text = generate(model, tokenizer, prompt, constraint=cities)
    assert text in ("k", "k City")
    responses = run_one(model, tokenizer, Request(ids, 20, constraint=cities, heal=True))
    assert text_of(responses) == text
    generated = b"".join(bytes_of(tokenizer, r.token) for r in responses)
    assert generated.decode().endswith(bytes_of(tokenizer, ids[-1]).decode() + text)
    # Without a constraint, and where there is nothing to heal.
    free = run_one(model, tokenizer, Request(ids, 6, heal=True))
    generated = b"".join(bytes_of(tokenizer, r.token) for r in free).decode("utf-8", "ignore")
    shown = text_of(free).replace("\ufffd", "")
    assert generated == bytes_of(tokenizer, ids[-1]).decode() + shown
    for last in (
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<n>"),
        tokenizer.convert_tokens_to_ids("<0x41>"),
    ):
        request = Request([*ids, last], 5, logprobs=False)
        plain = [r.token for r in run_one(model, tokenizer, request)]
        assert [r.token for r in run_one(model, tokenizer, replace(request, heal=True))] == plain
    assert [r.token for r in run_one(model, tokenizer, Request(ids[-1:], 5, heal=True))]


def test_constraints_of_many_prompts_and_with_an_adapter(rng, model, tokenizer):
    attach_random_adapters(model, 4)
    constraints = [CONSTRAINTS["regex"](), None, CONSTRAINTS["lark"]()]
    prompts = [a_prompt(rng) for _ in constraints]
    found = batch_generate(
        model, tokenizer, prompts, 30, constraint=constraints, at_limit="complete"
    )
    for prompt, constraint, tokens in zip(prompts, constraints, found.token_ids, strict=True):
        if constraint is not None:
            request = Request(prompt, 30, constraint=constraint)
            wanted = naive_constrained(model, tokenizer, request)
            assert tokens == [t for t in wanted if t not in tokenizer.eos_token_ids]


def test_models_of_mlx_lms_zoo_are_constrained_too(rng):
    tokenizer = zoo_tokenizer(byte_level=True)
    model = zoo_model("llama", len(tokenizer._tokenizer) + 3, seed=int(rng.integers(99)))
    engine = Engine(model, tokenizer)
    prompts = [rng.integers(2, 250, n).tolist() for n in (3, 9)]
    names = ("schema", "forced")
    requests = [
        Request(p, 60, constraint=CONSTRAINTS[n](), at_limit="complete", logprobs=bool(i))
        for i, (p, n) in enumerate(zip(prompts, names, strict=True))
    ]
    for request in requests:
        engine.submit(request)
    for row, responses in run(engine).items():
        tokens = [r.token for r in responses]
        assert tokens == naive_constrained(model, tokenizer, requests[row])


def test_processors_that_ban_what_a_constraint_allows_end_their_row(rng, model, tokenizer):
    def banned(tokens, logits):
        assert tokens.tolist() == prompt
        return mx.full(logits.shape, -math.inf)

    prompt = a_prompt(rng)
    request = Request(prompt, 9, logits_processors=[banned], constraint=Constraint.regex("[a-z]+"))
    error = run_one(model, tokenizer, request)[-1].error
    assert isinstance(error, LogitsError)
    assert "regular expression" in str(error)


@pytest.mark.parametrize("speculation", [None, Speculation(prompt_lookup=True, num_draft_tokens=2)])
def test_a_matcher_that_fails_ends_its_row_alone(rng, monkeypatch, speculation):
    engine = Engine(wide_model(rng), nano_tokenizer(), speculation=speculation)
    failing, other = (
        engine.prepare(Request([5, 6, 7], 6, constraint=Constraint.regex(f"[{letters}]{{200}}")))
        for letters in ("a-f", "u-z")
    )
    failing.matcher.what = "failing"
    bad, good = engine.submit_prepared(failing), engine.submit_prepared(other)

    def fails(given):
        if any(state.what == "failing" for state in given):
            raise KeyError("of the matcher")
        return fill_masks(given)

    monkeypatch.setattr(matcher, "fill_masks", fails)
    found = run(engine)
    assert isinstance(found[bad][-1].error, KeyError)
    assert isinstance(found[good][-1].error, IncompleteError)
    assert len(found[good]) == 6


def test_items_differ_with_drafts_and_without(rng):
    """Drafts are followed by copies of a row's state; a token that they may not have, the row may not have."""
    model = wide_model(rng)
    items = {"type": "integer", "minimum": 0, "maximum": 30}
    schema = {"type": "array", "items": items, "uniqueItems": True, "minItems": 12, "maxItems": 20}
    constraint = Constraint.json_schema(schema)
    options = {"constraint": constraint, "max_tokens": 200}
    found = [
        generate(model, nano_tokenizer(), [5, 6, 7], draft_model=drafter, **options)
        for drafter in (None, model)
    ]
    assert found[0] == found[1]
    values = json.loads(found[0])
    assert len(set(values)) == len(values) >= 12
