"""Log-probabilities of prompts, against one full forward of the whole prompt in float32."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine import prompt_scores
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, stream_generate
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import PromptLogprobs, PromptScores, Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import LogitsError
from afm_mlx.guidance.constraint import Constraint
from tests.tools.cases import all_pairs
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import SIZES, Adapters, run, run_one, some_prompt, tiny, tokens_of
from tests.tools.zoo import small_model

VOCAB = SIZES["vocab_size"]
KINDS = ("float", "int8", "2-bit", "llama", "llama blocks", "gemma3_text", "lfm2")
# Packed weights: products round otherwise for other numbers of tokens, and then a code of int8 may be another.
ATOL = {"2-bit": 5e-3, "int8": 2e-2}


def full_forward(model, prompt):
    """(len(prompt) - 1, vocab_size) float64: log-probabilities of the tokens after the first."""
    logits = np.array(model(mx.array([prompt]))[0, :-1].astype(mx.float32), np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def assert_right(scores: PromptScores, model, prompt, asked: PromptLogprobs, atol=1e-4):
    wanted = full_forward(model, prompt)[asked.start - 1 :]
    tokens = np.array(prompt[asked.start :], np.int64)
    own = wanted[np.arange(len(tokens)), tokens]
    assert scores.start == asked.start
    assert scores.logprobs.shape == scores.ranks.shape == (len(tokens),)
    np.testing.assert_allclose(scores.logprobs, own, atol=atol, rtol=0)
    assert scores.total == pytest.approx(own.sum(), abs=atol * max(1, len(tokens)))
    # Ranks may differ where other tokens are as likely, up to rounding.
    least = 1 + (wanted > own[:, None] + 2 * atol).sum(-1)
    most = (wanted >= own[:, None] - 2 * atol).sum(-1)
    assert ((least <= scores.ranks) & (scores.ranks <= most)).all()
    assert scores.is_greedy == bool((scores.ranks == 1).all())
    assert scores.top_tokens.shape == scores.top_logprobs.shape == (len(tokens), asked.top)
    others = wanted[:, np.array(asked.others, int)]
    np.testing.assert_allclose(scores.other_logprobs, others, atol=atol, rtol=0)
    likeliest = -np.sort(-wanted, axis=-1)[:, : asked.top]
    np.testing.assert_allclose(scores.top_logprobs, likeliest, atol=atol, rtol=0)
    found = np.take_along_axis(wanted, scores.top_tokens, axis=-1)
    np.testing.assert_allclose(found, likeliest, atol=2 * atol, rtol=0)


@pytest.mark.parametrize(
    ("kind", "chunk", "start", "top", "max_tokens"),
    all_pairs(KINDS, (None, 1, 7, 64), (1, 2, 30, 60), (0, 1, 4), (0, 3)),
)
def test_each_position_is_that_of_a_full_forward(
    rng, tokenizer, kind, chunk, start, top, max_tokens
):
    model, prompt = small_model(rng, kind), some_prompt(rng, 60)
    asked = PromptLogprobs(start, top, (5, 3, 5)[:top])
    request = Request(prompt, max_tokens, prompt_logprobs=asked, logprobs=False)
    first, *others = run_one(model, tokenizer, request, prefill_step_size=chunk)
    assert_right(first.prompt_logprobs, model, prompt, asked, ATOL.get(kind, 1e-4))
    assert all(response.prompt_logprobs is None for response in others)
    if max_tokens == 0:
        assert (first.token, first.text, first.finish_reason, others) == (-1, "", "length", [])
    else:
        plain = run_one(model, tokenizer, Request(prompt, 3, logprobs=False))
        assert [r.token for r in (first, *others)] == [r.token for r in plain]


@pytest.mark.parametrize("kind", ["float", "2-bit", "llama", "lfm2"])
@pytest.mark.parametrize("speculation", [None, Speculation(prompt_lookup=True)])
def test_rows_of_a_batch_are_scored_as_if_alone(rng, tokenizer, kind, speculation):
    model = small_model(rng, kind)
    lengths = rng.integers(1, 40, 9).tolist()
    prompts = [some_prompt(rng, length) for length in lengths]
    asks = [
        None
        if i % 3 == 2
        else PromptLogprobs(int(rng.integers(1, n + 1)), int(rng.integers(4)), (1, 2)[: i % 2])
        for i, n in enumerate(lengths)
    ]
    alone = [tokens_of(run_outcome(model, tokenizer, [Request(prompt, 4)])) for prompt in prompts]
    requests = [
        Request(prompt, 0 if i % 2 else 4, prompt_logprobs=asked)
        for i, (prompt, asked) in enumerate(zip(prompts, asks, strict=True))
    ]
    options = {"prefill_step_size": 48, "speculation": speculation, "max_batch": 5}
    found = run_outcome(model, tokenizer, requests, **options)
    for i, (prompt, asked) in enumerate(zip(prompts, asks, strict=True)):
        responses = found[i]
        if asked is None:
            assert all(r.prompt_logprobs is None for r in responses)
        else:
            assert_right(responses[0].prompt_logprobs, model, prompt, asked, ATOL.get(kind, 1e-4))
        wanted = [-1] if i % 2 else alone[i][0]
        assert [r.token for r in responses] == wanted


def run_outcome(model, tokenizer, requests, **options):
    engine = Engine(model, tokenizer, **options)
    for request in requests:
        engine.submit(request)
    return run(engine)


def test_only_what_is_asked_runs_through_all_blocks(rng, model, tokenizer, monkeypatch, chunks):
    scored, hidden = [], type(model).hidden

    def counted(self, tokens, cache):
        scored.append(tokens.shape)
        return hidden(self, tokens, cache)

    monkeypatch.setattr(type(model), "hidden", counted)
    asking = Request(some_prompt(rng, 50), 0, prompt_logprobs=PromptLogprobs(41))
    others = [Request(some_prompt(rng, 50), 1) for _ in range(2)]
    run_outcome(model, tokenizer, [others[0], asking, others[1]], prefill_step_size=1000)
    assert scored == [(1, 9)]  # the last token predicts none of the prompt
    assert sorted(chunks) == [(1, 40), (2, 49)]


@pytest.mark.parametrize("kind", ["float", "2-bit", "llama"])
def test_few_logits_are_in_memory_at_a_time(rng, tokenizer, kind, monkeypatch):
    model, prompt = small_model(rng, kind), some_prompt(rng, 60)
    monkeypatch.setattr(prompt_scores, "MOST_LOGITS", 5 * VOCAB)
    seen, scores_of = [], prompt_scores._scores

    def counted(logits, *rest):
        seen.append(logits.shape)
        return scores_of(logits, *rest)

    monkeypatch.setattr(prompt_scores, "_scores", counted)
    request = Request(prompt, 0, prompt_logprobs=PromptLogprobs(3, 2))
    (response,) = run_one(model, tokenizer, request, prefill_step_size=32)
    asked = PromptLogprobs(3, 2)
    assert_right(response.prompt_logprobs, model, prompt, asked, ATOL.get(kind, 1e-4))
    assert max(seen) <= (5, VOCAB)
    assert sum(rows for rows, _ in seen) == 57


@pytest.mark.parametrize("kind", ["float", "llama", "lfm2"])
def test_the_prefix_cache_serves_what_is_before_the_first_asked_token(rng, tokenizer, kind):
    model, prompt = small_model(rng, kind), some_prompt(rng, 100)
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(1 << 30))

    def ask(prompt, start):
        asked = PromptLogprobs(start, 1)
        row = engine.submit(Request(prompt, 0, prompt_logprobs=asked))
        (response,) = run(engine)[row]
        assert_right(response.prompt_logprobs, model, prompt, asked)
        return response.cached_tokens

    engine.submit(Request(prompt[:81], 0))  # its last token is not fed
    run(engine)
    for answer in ([7], [9, 2, 4]):  # continuations of 81 tokens
        assert ask([*prompt[:81], *answer], 81) == 80
    assert ask(prompt, 1) == 0
    # The cache has all of it now; states, only behind the prompts that ended.
    assert ask(prompt, 50) == (0 if kind == "lfm2" else 49)


def test_adapters_change_their_own_rows(rng, model, tokenizer, tmp_path):
    prompt, asked = some_prompt(rng, 30), PromptLogprobs(1, 2)
    with AdapterPool(model) as pool:
        adapters = Adapters(model, rng, tmp_path)
        for name, rank in (("a", 2), ("b", 4)):
            adapters.add(pool, name, rank)
        names = ["a", None, "b", {"a": 0.5, "b": 1.0}]
        requests = [Request(prompt, 0, prompt_logprobs=asked, adapter=name) for name in names]
        found = run_outcome(model, tokenizer, requests, adapters=pool, prefill_step_size=80)
        for i, name in enumerate(names):
            scores = found[i][0].prompt_logprobs
            if isinstance(name, dict):  # adapters are float16, merged ones float32
                assert_right(scores, adapters.merged(name), prompt, asked, 2e-3)
            else:
                own = copy.deepcopy(model)
                attach_adapter(own, tmp_path / name) if name else None
                assert_right(scores, own, prompt, asked)
        assert not any(each["rows"] for each in pool.describe()["adapters"])
        totals = [found[i][0].prompt_logprobs.total for i in range(4)]
        assert len({round(total, 3) for total in totals}) == 4


@pytest.mark.parametrize("kind", ["float", "llama", "lfm2"])
def test_a_prompt_without_an_answer_fills_the_callers_cache(rng, tokenizer, kind):
    model, prompt, rest = small_model(rng, kind), some_prompt(rng, 20), some_prompt(rng, 7)
    engine = Engine(model, tokenizer)
    cache = engine.make_cache()
    progress = []
    report = lambda *counts: progress.append(counts)  # noqa: E731
    first = Request(prompt, 0, cache=cache, on_prefill=report)
    (response,) = run_one(model, tokenizer, first)
    assert (response.token, response.prompt_logprobs) == (-1, None)
    assert progress[-1] == (20, 20)
    # The last token is not in the cache.
    whole = [*prompt, *rest]
    request = Request(whole[19:], 3, cache=cache, prompt_logprobs=PromptLogprobs(1, 0))
    responses = run_one(model, tokenizer, request)
    wanted = full_forward(model, whole)[19:][np.arange(7), rest]
    np.testing.assert_allclose(responses[0].prompt_logprobs.logprobs, wanted, atol=1e-4)
    alone = run_one(model, tokenizer, Request(whole, 3))
    assert [r.token for r in responses] == [r.token for r in alone]


def test_a_prompt_may_fill_the_context(rng, tokenizer):
    model = tiny(rng)
    prompt = some_prompt(rng, 40)
    asked = PromptLogprobs(1)
    for options in ({"max_kv_size": 40}, {"kv_memory": 1 << 22}):
        request = Request(prompt, 0, prompt_logprobs=asked)
        (response,) = run_one(model, tokenizer, request, **options)
        assert_right(response.prompt_logprobs, model, prompt, asked)


def test_an_answer_that_is_forced_comes_with_its_prompts_scores(rng):
    model, tokenizer, prompt = wide_model(rng), nano_tokenizer(), some_prompt(rng, 20)
    constraint = Constraint.choices(["the film"])
    plain = run_one(model, tokenizer, Request(prompt, 9, constraint=constraint))
    asked = PromptLogprobs(1, 1)
    request = Request(prompt, 9, constraint=constraint, prompt_logprobs=asked)
    responses = run_one(model, tokenizer, request)
    assert [r.token for r in responses] == [r.token for r in plain]
    assert [r.finish_reason for r in responses] == [r.finish_reason for r in plain]
    (scores,) = [r.prompt_logprobs for r in responses if r.prompt_logprobs is not None]
    assert_right(scores, model, prompt, asked)


def test_the_smallest_of_equally_likely_tokens_is_the_first(rng):
    logits = mx.array([[0.0, 2.0, 2.0, 1.0]] * 4)
    arrays = prompt_scores._scores(logits, mx.array([0, 1, 2, 3]), 0)
    assert arrays[1].tolist() == [4, 1, 2, 3]


def test_logits_without_a_number_end_their_row_alone(rng, model, tokenizer, monkeypatch):
    head = type(model).head

    def broken(self, h):
        logits = head(self, h)
        return logits + float("nan") if h.ndim == 2 and h.shape[0] == 9 else logits

    monkeypatch.setattr(type(model), "head", broken)
    asked = PromptLogprobs(1)
    bad = Request(some_prompt(rng, 10), 5, prompt_logprobs=asked)
    good = Request(some_prompt(rng, 30), 5, prompt_logprobs=asked)
    found = run_outcome(model, tokenizer, [bad, good], prefill_step_size=30)
    assert isinstance(found[0][-1].error, LogitsError)
    assert found[0][-1].prompt_logprobs is None
    assert len(found[1]) == 5
    assert_right(found[1][0].prompt_logprobs, model, good.prompt, asked)


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_cancelled_row_leaves_its_neighbours(rng, model, tokenizer, max_tokens):
    asked = PromptLogprobs(1)
    prompts = [some_prompt(rng, length) for length in (30, 31, 32)]
    engine = Engine(model, tokenizer)
    engine.submit(Request([1], 60))
    while not engine.step():
        pass
    # While a row decodes on a CPU, the three prompts share chunks of ten columns.
    rows = [engine.submit(Request(p, max_tokens, prompt_logprobs=asked)) for p in prompts]
    engine.step()
    engine.cancel(rows[1])
    found = run(engine)
    assert rows[1] not in found
    for row, prompt in zip(rows[::2], prompts[::2], strict=True):
        assert_right(found[row][0].prompt_logprobs, model, prompt, asked)


def test_generate_passes_them_on(rng, model, tokenizer):
    prompts = [some_prompt(rng, 12), some_prompt(rng, 5)]
    asked = PromptLogprobs(2, 1)
    for max_tokens, count in ((3, 3), (0, 1)):
        stream = stream_generate(model, tokenizer, prompts[0], max_tokens, prompt_logprobs=asked)
        first, *others = stream
        assert_right(first.prompt_logprobs, model, prompts[0], asked)
        assert len(others) == count - 1
        assert first.generation_tokens == min(1, max_tokens)
        batch = batch_generate(model, tokenizer, prompts, max_tokens, prompt_logprobs=asked)
        for prompt, scores in zip(prompts, batch.prompt_logprobs, strict=True):
            assert_right(scores, model, prompt, asked)
        assert [len(tokens) for tokens in batch.token_ids] == [max_tokens] * 2
    assert batch_generate(model, tokenizer, prompts, 1).prompt_logprobs == [None, None]
