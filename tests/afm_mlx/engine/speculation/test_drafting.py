"""Answers with draft tokens are the same as without, whatever is drafted; and what speculation refuses."""

import copy
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_logits_processors, make_sampler
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import all_pairs
from tests.tools.constraints import CONSTRAINTS, nano_tokenizer, wide_model
from tests.tools.drafts import KnownAnswers, outcome
from tests.tools.engines import SIZES, Adapters, some_prompt, tiny
from tests.tools.models import WordTokenizer, random_config, random_model

VOCAB = SIZES["vocab_size"]
FEATURES = {
    "greedy": lambda rng: {"logprobs": False},
    "sampled": lambda rng: {"sampler": make_sampler(1.0), "seed": int(rng.integers(2**60))},
    "top-k": lambda rng: {"sampler": make_sampler(0.8, top_k=5), "seed": int(rng.integers(99))},
    "processors": lambda rng: {
        "logits_processors": make_logits_processors({3: 2.0}, repetition_penalty=1.3)
    },
    "stop": lambda rng: {"stop": [f"w{int(rng.integers(VOCAB))} "]},
    "undrafted": lambda rng: {"draft": False},
}


def drafters(rng, model, answers, kind):
    """Speculation of each kind, with as many draft tokens as pay or a fixed number."""
    count = [None, 1, 3, 7][int(rng.integers(4))]
    other = random_model(random_config(rng, **SIZES, kv_bits=None), rng)
    made = {
        "model itself": {"draft_model": model},
        "other model": {"draft_model": other},
        "known": {"draft_model": KnownAnswers(rng, answers, 0.7, VOCAB)},
        "look-up": {"prompt_lookup": True},
        "both": {"draft_model": model, "prompt_lookup": True},
    }[kind]
    return Speculation(num_draft_tokens=count, **made)


def agree(found, wanted):
    for (*mine, logprobs, _), (*theirs, reference, _) in zip(found, wanted, strict=True):
        assert mine == theirs
        pairs = [(a, b) for a, b in zip(logprobs, reference, strict=True) if b is not None]
        np.testing.assert_allclose(*np.array(pairs).reshape(-1, 2).T, rtol=2e-3, atol=2e-3)


KINDS = ("model itself", "other model", "known", "look-up", "both")


@pytest.mark.parametrize(
    ("drafter", "kind", "kv_bits", "max_batch"),
    all_pairs(KINDS, ("float", "2-bit"), (None, 8), (1, 3)),
)
def test_answers_are_the_same_as_without_drafts(rng, drafter, kind, kv_bits, max_batch):
    model, tokenizer = tiny(rng, kind, kv_bits), WordTokenizer(VOCAB, ends=(1,))
    prompts = [some_prompt(rng, rng.integers(1, 90)) for _ in FEATURES]
    prompts[0] = prompts[0] * 3  # something to look up
    requests = [
        Request(prompt, int(rng.integers(1, 45)), **feature(rng))
        for prompt, feature in zip(prompts, FEATURES.values(), strict=True)
    ]
    wanted = outcome(model, tokenizer, requests, max_batch=max_batch)
    answers = {tuple(r.prompt): w[0] for r, w in zip(requests, wanted, strict=True)}
    speculation = drafters(rng, model, answers, drafter)
    found = outcome(model, tokenizer, requests, max_batch=max_batch, speculation=speculation)
    agree(found, wanted)


@pytest.mark.parametrize("max_batch", [1, 3])
def test_constrained_answers_are_the_same_as_without_drafts(rng, max_batch):
    model, tokenizer = wide_model(rng, extra=5), nano_tokenizer()
    sampler = make_sampler(1.0)
    requests = [
        Request(
            rng.integers(10, 900, 7 + i).tolist(), int(rng.integers(20, 60)), sampler if i % 2 else None,
            i, constraint=make(), at_limit="complete" if i % 3 else "error",
        )
        for i, make in enumerate([*CONSTRAINTS.values()] * 2)
    ]  # fmt: skip
    requests.append(Request([5, 6, 7], 9, logprobs=False))
    wanted = outcome(model, tokenizer, requests, max_batch=max_batch)
    answers = {tuple(r.prompt): w[0] for r, w in zip(requests, wanted, strict=True)}
    known = KnownAnswers(rng, answers, 0.8, len(tokenizer))
    for options in (
        {"draft_model": known, "num_draft_tokens": 5},
        {"draft_model": model, "num_draft_tokens": 2},
        {"prompt_lookup": True},
    ):
        speculation = Speculation(**options)
        found = outcome(model, tokenizer, requests, max_batch=max_batch, speculation=speculation)
        agree(found, wanted)


def test_rows_with_adapters_are_answered_as_without_drafts(rng, tmp_path):
    model, tokenizer = tiny(rng, "2-bit", 8), WordTokenizer(VOCAB, ends=())
    pool = AdapterPool(model)
    adapters = Adapters(model, rng, tmp_path)
    for name in "ab":
        adapters.add(pool, name, 3)
    requests = [
        Request(some_prompt(rng, 30), 40, logprobs=False, adapter=name)
        for name in ("a", None, "b", {"a": 0.5, "b": 1.0})
    ]
    wanted = outcome(model, tokenizer, requests, adapters=pool)
    answers = {tuple(r.prompt): w[0] for r, w in zip(requests, wanted, strict=True)}
    mine, general = (KnownAnswers(rng, answers, 0.9, VOCAB) for _ in range(2))
    asked = []
    mine.propose = lambda drafts, count: asked.extend(d.row.request.adapter for d in drafts)
    speculation = Speculation(general, adapter_drafts={"a": mine}, num_draft_tokens=3)
    found = outcome(model, tokenizer, requests, adapters=pool, speculation=speculation)
    agree(found, wanted)
    assert set(asked) == {"a"}  # the adapter's own draft, and nobody else's
    assert len(general.forgotten) == len(mine.forgotten) >= len(requests)


def test_caches_are_rolled_back_exactly(rng):
    for kv_bits in (None, 8):
        model, tokenizer = tiny(rng, "2-bit", kv_bits), WordTokenizer(VOCAB, ends=(1, 2))
        requests = [Request(some_prompt(rng, n), 70, logprobs=False) for n in (3, 60)]
        states = []
        answers = {}
        for speculation in (None, Speculation(KnownAnswers(rng, answers, 0.6, VOCAB))):
            caches = [model.make_cache() for _ in requests]
            given = [replace(r, cache=c) for r, c in zip(requests, caches, strict=True)]
            found = outcome(model, tokenizer, given, speculation=speculation)
            answers |= {tuple(r.prompt): f[0] for r, f in zip(requests, found, strict=True)}
            states.append([[np.array(a) for e in c for a in e.state] for c in caches])
        for mine, theirs in zip(*states, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.shape == b.shape
                # A step of several tokens rounds otherwise than one of a single token.
                np.testing.assert_allclose(
                    a.astype(float), b.astype(float), atol=1 if kv_bits else 1e-3
                )


def test_sampled_tokens_have_the_models_distribution(rng):
    vocab, draws = 4, 300
    model, draft = (
        random_model(random_config(rng, **(SIZES | {"vocab_size": vocab}), kv_bits=None), rng)
        for _ in range(2)
    )
    tokenizer, prompt = WordTokenizer(vocab, ends=()), rng.integers(0, vocab, 4).tolist()
    seeds = rng.integers(2**60, size=draws).tolist()
    requests = [Request(prompt, 3, make_sampler(1.0), seed, logprobs=False) for seed in seeds]
    speculation = Speculation(draft, num_draft_tokens=2)
    found = outcome(model, tokenizer, requests, max_batch=50, speculation=speculation)
    counts, expected = np.zeros((2, vocab, vocab))
    for tokens, *_ in found:
        counts[tokens[1], tokens[2]] += 1

    def chances(*answer):
        return np.array(mx.softmax(model(mx.array([[*prompt, *answer]]))[0, -1]))

    for a, first in enumerate(chances()):
        for b, second in enumerate(chances(a)):
            expected[b] += draws * first * second * chances(a, b)
    large = expected > 5
    rest = counts[~large].sum() - expected[~large].sum()
    chi_square = ((counts - expected)[large] ** 2 / expected[large]).sum()
    chi_square += rest**2 / max(expected[~large].sum(), 1)
    # Wilson and Hilferty: the cube root is nearly normal. 5 deviations hold for every seed that is ever drawn.
    spread = 2 / (9 * large.sum())
    assert ((chi_square / large.sum()) ** (1 / 3) - 1 + spread) / math.sqrt(spread) < 5
    counts = [f[5] for f in found]
    assert 0 < sum(c.accepted for c in counts) < sum(c.proposed for c in counts)


def test_accepted_draft_tokens_are_marked_and_counted(rng):
    model, tokenizer = tiny(rng), WordTokenizer(VOCAB, ends=())
    request = Request(some_prompt(rng, 5), 20, logprobs=False)
    [(answer, *_)] = outcome(model, tokenizer, [request])
    for rate in (1.0, 0.0):
        drafter = KnownAnswers(rng, {tuple(request.prompt): answer}, rate, VOCAB)
        if not rate:
            drafter.answers = {tuple(request.prompt): [(t + 1) % VOCAB for t in answer]}
            drafter.rate = 1.0
        engine = Engine(model, tokenizer, speculation=Speculation(drafter, num_draft_tokens=3))
        engine.submit(request)
        responses = list(engine.run())
        counts = responses[-1].draft_counts
        assert sum(r.from_draft for r in responses) == counts.accepted == (15 if rate else 0)
        assert counts.proposed == (15 if rate else sum(min(3, 19 - n) for n in range(20)))


def test_a_batch_keeps_its_bound_and_rows_leave_while_others_have_drafts(rng):
    model, tokenizer = tiny(rng), WordTokenizer(VOCAB, ends=())
    requests = [Request(some_prompt(rng, n), -1, logprobs=False) for n in (3, 9, 25)]
    wanted = outcome(model, tokenizer, requests, max_kv_size=40)
    answers = {tuple(r.prompt): w[0] for r, w in zip(requests, wanted, strict=True)}
    speculation = Speculation(KnownAnswers(rng, answers, 0.9, VOCAB), num_draft_tokens=7)
    found = outcome(model, tokenizer, requests, max_kv_size=40, speculation=speculation)
    agree(found, wanted)

    engine = Engine(model, tokenizer, speculation=replace(speculation, draft_model=model))
    rows = [engine.submit(replace(request, max_tokens=15)) for request in requests]
    left = engine.step() + engine.step() + engine.step()
    engine.cancel(rows[0])
    left += list(engine.run())
    for row, (tokens, *_) in zip(rows[1:], wanted[1:], strict=True):
        assert [r.token for r in left if r.row == row] == tokens[:15]
    engine.submit(requests[0])
    engine.step()
    assert engine.drop_started() == []
    assert not engine.busy


def test_a_row_that_is_cancelled_while_it_is_fed_forced_tokens_is_forgotten(rng):
    model, tokenizer = wide_model(rng), nano_tokenizer()
    drafter = KnownAnswers(rng, {}, 0.0, VOCAB)
    drafter.propose = lambda drafts, count: None
    speculation = Speculation(drafter, num_draft_tokens=2)
    engine = Engine(model, tokenizer, prefill_step_size=1, speculation=speculation)
    constraint = Constraint.regex("[a-z]{20}" + "9" * 90 + "[a-z]{9}")
    row = engine.submit(Request(some_prompt(rng, 5), 300, constraint=constraint))
    forced = 0
    while forced < 20:  # it has decoded, and its forced tokens are prefilled one by one
        forced += sum(response.is_forced for response in engine.step())
    engine.cancel(row)
    assert row in drafter.forgotten
    assert not engine.busy


def test_numbers_of_draft_tokens_out_of_range_are_refused():
    for count in (0, 8, True, 2.0, "3"):
        with pytest.raises(RequestError, match=r"num_draft_tokens is .*; allowed are 1 to 7"):
            Speculation(prompt_lookup=True, num_draft_tokens=count)


def test_what_cannot_be_speculated_is_refused(rng):
    model, tokenizer = tiny(rng), WordTokenizer(VOCAB, ends=())
    other = random_model(random_config(rng, **(SIZES | {"vocab_size": VOCAB + 1})), rng)
    with pytest.raises(
        RequestError, match=f"draft_model has {VOCAB + 1} tokens and the model {VOCAB}"
    ):
        Engine(model, tokenizer, speculation=Speculation(other))
    with pytest.raises(RequestError, match=r"a is .*a model is needed"):
        Engine(model, tokenizer, speculation=Speculation(adapter_drafts={"a": "folder"}))
    with pytest.raises(RequestError, match="sliding window"):
        Engine(
            model, tokenizer, sliding_window=True, max_kv_size=30, speculation=Speculation(model)
        )


def test_an_error_of_a_rows_own_ends_that_row_only(rng):
    model, tokenizer = tiny(rng), WordTokenizer(VOCAB, ends=())

    def broken(tokens, logits):
        if len(tokens) > 12:
            raise KeyError("processor")
        return logits

    requests = [
        Request(some_prompt(rng, 5), 20, logits_processors=[broken]),
        Request(some_prompt(rng, 5), 20),
        Request(some_prompt(rng, 5), 20, logits_processors=[lambda t, x: x * math.nan]),
    ]
    wanted = outcome(model, tokenizer, requests)
    found = outcome(model, tokenizer, requests, speculation=Speculation(model, num_draft_tokens=3))
    assert [f[2:4] for f in found] == [w[2:4] for w in wanted]
    assert found[1][0] == wanted[1][0]
    # Drafts may have found the error some tokens earlier.
    assert wanted[0][0][: len(found[0][0]) - 1] == found[0][0][:-1]


def test_quantized_and_copied_models_draft(rng):
    model, tokenizer = tiny(rng, "2-bit", 8), WordTokenizer(VOCAB, ends=())
    draft = copy.deepcopy(tiny(rng))
    quantize_model(draft, {}, QuantizationRule(4), QuantizationRule(4))
    request = Request(some_prompt(rng, 200), 30, logprobs=False)
    wanted = outcome(model, tokenizer, [request])
    options = {"prefill_step_size": 16, "speculation": Speculation(draft, num_draft_tokens=2)}
    found = outcome(model, tokenizer, [request], **options)
    agree(found, wanted)
