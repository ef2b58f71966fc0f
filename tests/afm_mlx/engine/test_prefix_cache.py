"""What is kept of prompts and answers: the answers are those without it, and little is computed again."""

import gc
import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PAGE, PrefixBudget, PrefixCache
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from afm_mlx.model.zoo_blocks import replace_blocks
from tests.tools.engines import SIZES, Adapters, run, some_prompt, tiny, tokens_of
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
LARGE = 1 << 30


def answer(engine, prompt, count=5, **options):
    """Tokens, and how many tokens of the prompt were found."""
    row = engine.submit(Request(prompt, count, logprobs=False, **options))
    responses = run(engine)[row]
    assert len({r.cached_tokens for r in responses}) == 1
    return [r.token for r in responses], responses[-1].cached_tokens


def scratch(model, tokenizer, prompt, count=5, **options):
    return answer(Engine(model, tokenizer, **options), prompt, count)[0]


def kind_of_model(rng, kind):
    if kind == "zoo":
        return zoo_model("llama", VOCAB, int(rng.integers(2**31)))
    if kind == "zoo blocks":  # as `load` has them, with a batch's cache of our own
        made = zoo_model("llama", VOCAB, int(rng.integers(2**31)))
        replace_blocks(made)
        return made
    return tiny(rng, kv_bits=8 if kind == "int8" else None)


@pytest.mark.parametrize("kind", ["int8", "float", "zoo", "zoo blocks", "window"])
def test_what_two_prompts_begin_with_is_computed_once(rng, tokenizer, kind):
    model = kind_of_model(rng, kind)
    options = {"max_kv_size": 260, "sliding_window": True} if kind == "window" else {}
    prefixes = PrefixCache(LARGE)
    engine = Engine(model, tokenizer, prefix_cache=prefixes, prefill_step_size=50, **options)
    first = some_prompt(rng, 2 * PAGE + 9)
    said, _ = answer(engine, first)
    for prompt, found in (
        (first, len(first) - 1),  # the last token is always fed
        ([*first, *said, 3], len(first) + len(said) - 1),  # an answer's last token was not fed
        ([*first[:PAGE], *some_prompt(rng, 5)], None),
        (first[: PAGE + 7], PAGE + 6),
        ([*first[: PAGE + 20], (first[PAGE + 20] + 1) % VOCAB, 1, 2], PAGE + 20),
        ([(first[0] + 1) % VOCAB, *first], 0),
    ):
        tokens, cached = answer(engine, prompt)
        assert tokens == scratch(model, tokenizer, prompt, **options)
        assert found is None or cached == found
    assert prefixes.hits >= 4 * PAGE
    assert prefixes.queries > prefixes.hits
    if kind == "window":
        long = some_prompt(rng, 700)
        tokens = answer(engine, long)[0]
        again, found = answer(engine, long)
        assert tokens == again == scratch(model, tokenizer, long, **options)
        assert 260 < found < 600  # what was kept before the window has forgotten some


def test_nobody_finds_what_another_owner_or_adapter_has_left(rng, model, tokenizer, tmp_path):
    from afm_mlx.adapters.pool import AdapterPool

    prompt = some_prompt(rng, PAGE + 10)
    whole = len(prompt) - 1
    with AdapterPool(model) as pool:
        adapters = Adapters(model, rng, tmp_path)
        for name in "ab":
            adapters.add(pool, name, 4)
        engine = Engine(model, tokenizer, adapters=pool, prefix_cache=PrefixCache(LARGE))
        plain, found = Engine(model, tokenizer, adapters=pool), {}
        wanted = {
            str(adapter): answer(plain, prompt, adapter=adapter)[0]
            for adapter in (None, "a", "b", {"a": 0.5}, {"a": 0.5, "b": 1})
        }
        for _ in range(2):
            for client in ("one", "other"):
                for adapter in (None, "a", "b", {"a": 0.5}, {"a": 0.5, "b": 1}):
                    tokens, cached = answer(engine, prompt, adapter=adapter, client=client)
                    found.setdefault((client, str(adapter)), []).append(cached)
                    assert tokens == wanted[str(adapter)]
        assert all(cached == [0, whole] for cached in found.values())
        # A name that stands for another adapter now.
        pool.register("c", {"a": 2.0})
        assert answer(engine, prompt, adapter="c")[1] == 0
    cache = engine.make_cache()
    assert answer(engine, prompt, cache=cache)[1] == 0  # a cache of its own


def test_a_tiny_budget_keeps_what_was_used_last_and_is_never_exceeded(rng, model, tokenizer):
    probe = PrefixCache(LARGE)
    answer(Engine(model, tokenizer, prefix_cache=probe), some_prompt(rng, PAGE), 1)
    block = probe.nbytes
    prefixes = PrefixCache(4 * block)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    prompts = [some_prompt(rng, 2 * PAGE) for _ in range(3)]
    answer(engine, prompts[0], 1)
    answer(engine, prompts[1], 1)
    assert answer(engine, prompts[0], 1)[1] == 2 * PAGE - 1
    answer(engine, prompts[2], 1)  # makes room by the other one, from its end
    assert prefixes.evictions == 2
    assert [answer(engine, p, 1)[1] for p in (prompts[0], prompts[2], prompts[1])] == [
        *[2 * PAGE - 1] * 2,
        0,
    ]
    long = some_prompt(rng, 7 * PAGE)
    answer(engine, long, 1)
    assert answer(engine, long, 1)[1] == 4 * PAGE  # as much of it as there is room for
    assert prefixes.nbytes <= prefixes.budget
    assert prefixes.tokens == 4 * PAGE
    small = PrefixCache(100)
    assert answer(Engine(model, tokenizer, prefix_cache=small), long, 1)[1] == small.nbytes == 0


def test_caches_of_two_models_share_a_budget_and_the_oldest_pages_of_both_go(rng, tokenizer):
    shared = PrefixBudget(LARGE)
    caches = [PrefixCache(shared) for _ in range(2)]
    engines = [Engine(tiny(rng), tokenizer, prefix_cache=cache) for cache in caches]
    prompts = [some_prompt(rng, 3 * PAGE) for _ in range(2)]
    for engine, prompt in zip(engines, prompts, strict=True):
        answer(engine, prompt)
    shared.nbytes = sum(cache.nbytes for cache in caches)
    answer(engines[0], prompts[0])  # now the second model's pages are the oldest
    for _ in range(2):
        answer(engines[0], some_prompt(rng, PAGE))
        assert sum(cache.nbytes for cache in caches) <= shared.nbytes
    assert [cache.evictions > 0 for cache in caches] == [False, True]
    assert answer(engines[0], prompts[0])[1] == 3 * PAGE - 1
    assert answer(engines[1], prompts[1])[1] < 3 * PAGE - 1
    evictions = caches[0].evictions
    del engines[1], caches[1], engine
    gc.collect()
    answer(engines[0], some_prompt(rng, 2 * PAGE))
    assert caches[0].evictions == evictions  # the room of a model that is gone is free


def test_cancelled_and_failed_rows_leave_what_they_have_computed(rng, model, tokenizer):
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(LARGE), prefill_step_size=32)
    prompt, company = some_prompt(rng, 100), some_prompt(rng, 3)

    row = engine.submit(Request(prompt, 5))
    engine.step()
    engine.step()
    engine.cancel(row)  # in its prompt
    assert answer(engine, prompt)[1] == 64

    row = engine.submit(Request(prompt + company, -1, logprobs=False))
    tokens = []
    for _ in range(8):
        tokens += [response.token for response in engine.step()]
    engine.cancel(row)  # in its answer
    again, cached = answer(engine, [*prompt, *company, *tokens, 5])
    assert cached == 103 + len(tokens) - 1
    assert again == scratch(model, tokenizer, [*prompt, *company, *tokens, 5])

    def fails(tokens, logits):
        if len(tokens) == 6:
            raise KeyError("mine")
        return logits

    own = some_prompt(rng, 3)
    row = engine.submit(Request(own, 9, logits_processors=[fails]))
    *good, failed = run(engine)[row]
    assert isinstance(failed.error, KeyError)
    prompt = [*own, *(r.token for r in good), 7]
    assert answer(engine, prompt) == (scratch(model, tokenizer, prompt), 5)


def test_a_step_that_raises_leaves_nothing_of_its_own(rng, model, tokenizer, monkeypatch):
    prefixes = PrefixCache(LARGE)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    kept = some_prompt(rng, PAGE + 5)
    lost = [kept[0] ^ 1, *some_prompt(rng, PAGE + 4)]  # which begins otherwise
    answer(engine, kept)
    tokens = prefixes.tokens
    engine.submit(Request([*kept, 1], 9))
    engine.submit(Request(lost, 9))
    engine.step()
    assert prefixes.tokens > tokens
    monkeypatch.setattr(type(model), "__call__", lambda *inputs, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.step()
    engine.drop_started()
    monkeypatch.undo()
    assert answer(engine, lost)[1] == 0
    assert answer(engine, kept)[1] == PAGE + 4


def test_sixty_interleavings_have_the_answers_without_the_cache(rng, tokenizer):
    model = tiny(rng, kv_bits=8)
    stems = [some_prompt(rng, n) for n in (3, PAGE, PAGE + 30, 2 * PAGE + 9)]
    prompts = [
        [*stem[: rng.integers(1, len(stem) + 1)], *some_prompt(rng, 2)] for stem in stems * 4
    ]
    plain = Engine(model, tokenizer, max_batch=16)
    for _ in range(2):  # the next turns of these conversations
        rows = [plain.submit(Request(prompt, 4, logprobs=False)) for prompt in prompts[-16:]]
        said = tokens_of(run(plain))
        prompts += [[*p, *said[r], 1] for p, r in zip(prompts[-16:], rows, strict=True)]
    rows = [plain.submit(Request(prompt, 4, logprobs=False)) for prompt in prompts]
    said = tokens_of(run(plain))
    wanted = [said[row] for row in rows]

    prefixes = PrefixCache(150_000)
    options = {"max_batch": 4, "prefix_cache": prefixes, "prefill_step_size": 64}
    drafting = Speculation(prompt_lookup=True, num_draft_tokens=3)
    engines = [Engine(model, tokenizer, **options, speculation=s) for s in (None, drafting)]
    for round in range(60):
        engine, asked, got = engines[round % 2], {}, {}
        for _ in range(rng.integers(1, 4)):
            index, client = rng.integers(len(prompts)), "ab"[rng.integers(2)]
            row = engine.submit(Request(prompts[index], 4, logprobs=False, client=client))
            asked[row], got[row] = wanted[index], []
            for _ in range(rng.integers(3)):
                for response in engine.step():
                    got[response.row].append(response.token)
            if rng.random() < 0.2:
                engine.cancel(row)
                asked[row] = asked[row][: len(got[row])]
        for row, tokens in tokens_of(run(engine)).items():
            got[row] += tokens
        assert got == asked
        assert prefixes.nbytes <= prefixes.budget
        blocks = list(prefixes._pages)
        assert prefixes.nbytes == sum(block.nbytes for block in blocks)
        assert prefixes.tokens == sum(block.tokens for block in blocks)
    assert prefixes.evictions > 10
    assert prefixes.hits > prefixes.queries / 3


def test_windows_of_another_size_and_other_models_share_nothing(rng, model, tokenizer):
    other = zoo_model("qwen3", VOCAB, 1)
    prefixes = PrefixCache(LARGE)
    prompt = some_prompt(rng, 90)
    for size in (64, 40, None):
        options = {"max_kv_size": size}  # rotating caches
        engine = Engine(other, tokenizer, prefix_cache=prefixes, **options)
        tokens, found = answer(engine, prompt)
        assert (tokens, found) == (scratch(other, tokenizer, prompt, **options), 0)
        assert answer(engine, prompt) == (tokens, len(prompt) - 1)
    with pytest.raises(RequestError, match="another model"):
        Engine(model, tokenizer, prefix_cache=prefixes)
    with pytest.raises(RequestError, match="budget is 0"):
        PrefixCache(0)


def test_blocks_are_copies_that_keep_no_other_memory(rng, model, tokenizer):
    """The cache's arrays are as large as it says, and a row writes in place although it has left a copy."""
    prefixes = PrefixCache(LARGE)
    arrays = [mx.array(rng.normal(size=(1, 3, 3000, 8)).astype(np.float32)) for _ in range(4)]
    tokens = some_prompt(rng, 1500)
    mx.eval(arrays)
    gc.collect()  # what other tests have left is not to be freed in between
    before = mx.get_active_memory()
    prefixes.keep("key", tokens, arrays)
    prefixes.advance()
    prefixes.advance()
    taken = mx.get_active_memory() - before
    assert math.isclose(taken, 4 * 3 * 1500 * 8 * 4, rel_tol=0.1)
    found = prefixes.find("key", [*tokens[:100], 99])
    assert found.tokens == found.shared == 100
    for array, original in zip(found.arrays, arrays, strict=True):
        assert (array == original[:, :, :100]).all().item()
