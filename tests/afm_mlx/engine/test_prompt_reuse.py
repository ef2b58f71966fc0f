"""Caches that the next prompt goes on with: answers are those from scratch, and little is computed again."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from afm_mlx.engine.generation import stream_generate
from afm_mlx.engine.prompt_cache import PromptCaches, tokens_in
from afm_mlx.errors import ContextLengthError
from tests.tools.engines import SIZES, some_prompt
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
COUNT = 5


@pytest.fixture
def fed(model, tokenizer):
    """Run a prompt on a store's cache; returns its answer, and how many tokens of the prompt were fed."""

    def fed(caches, prompt, adapter=None, max_tokens=COUNT):
        with caches.continuing(prompt, adapter) as run:
            for response in stream_generate(
                model, tokenizer, run.rest, max_tokens, prompt_cache=run.cache, logprobs=False
            ):
                run.answer.append(response.token)
        return run.answer, len(run.rest)

    return fed


def from_scratch(model, tokenizer, prompt):
    return [r.token for r in stream_generate(model, tokenizer, prompt, COUNT, logprobs=False)]


def test_what_two_prompts_begin_with_is_not_computed_again(model, tokenizer, fed, rng):
    caches = PromptCaches(model.make_cache)
    first, other = some_prompt(rng, 9), some_prompt(rng, 3)
    answer, count = fed(caches, first)
    assert (answer, count) == (from_scratch(model, tokenizer, first), 9)
    for prompt, expected in (
        ([*first, *answer, *other], 1 + 3),  # the last token of an answer is not in the cache
        ([*first[:6], (first[6] + 1) % VOCAB], 1),
        (first[:6], 1),  # the last token always is fed
        ([(first[0] + 1) % VOCAB, *first], 10),
    ):
        answer, count = fed(caches, prompt)
        assert (answer, count) == (from_scratch(model, tokenizer, prompt), expected)


def test_each_adapter_has_a_cache_of_its_own(model, fed, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 8)
    assert [fed(caches, prompt, name)[1] for name in ("a", None, "b", "a", None)] == [8, 8, 8, 1, 1]


def test_a_window_that_has_forgotten_tokens_goes_on_or_begins_anew(model, fed, rng):
    caches = PromptCaches(lambda: model.make_cache(max_size=16, sliding_window=True))
    prompt = some_prompt(rng, 600)
    answer, _ = fed(caches, prompt)
    assert fed(caches, [*prompt, *answer, 3])[1] == 2
    assert fed(caches, prompt) == (answer, 600)


def test_after_an_error_the_cache_holds_what_was_fed(model, tokenizer, fed, rng):
    caches = PromptCaches(lambda: model.make_cache(max_size=12))
    prompt = some_prompt(rng, 8)
    fed(caches, prompt, max_tokens=2)
    with pytest.raises(ContextLengthError):
        fed(caches, [*prompt, *some_prompt(rng, 9)])
    assert fed(caches, prompt, max_tokens=2)[1] == 1
    with pytest.raises(ContextLengthError):
        fed(caches, prompt, max_tokens=-1)
    answer, count = fed(caches, prompt)
    assert (answer, count) == (from_scratch(model, tokenizer, prompt), 1)


def test_after_ctrl_c_a_cache_is_kept_only_if_nothing_was_written(model, tokenizer, fed, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 8)
    fed(caches, prompt)
    with pytest.raises(KeyboardInterrupt), caches.continuing(prompt):
        raise KeyboardInterrupt
    assert fed(caches, prompt)[1] == 1
    with pytest.raises(KeyboardInterrupt), caches.continuing(prompt) as run:
        model.prefill(mx.array([run.rest]), run.cache)
        raise KeyboardInterrupt
    answer, count = fed(caches, prompt)
    assert (answer, count) == (from_scratch(model, tokenizer, prompt), 8)


def test_a_cache_that_is_in_use_is_lent_to_nobody_else(model, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 4)
    with caches.continuing(prompt) as one, caches.continuing(prompt) as other:
        assert one.cache is not other.cache
        assert one.rest == other.rest == prompt


def test_a_cache_is_kept_only_if_it_says_that_it_holds_the_tokens(model, rng):
    caches = PromptCaches(model.make_cache)
    cache = model.make_cache()
    model.prefill(mx.array([[1, 2, 3]]), cache)
    assert tokens_in(cache) == 3
    caches.keep(cache, [1, 2])
    with caches.continuing([1, 2, 3, 4]) as run:
        assert len(run.rest) == 4
    cache[0].trim(1)
    assert tokens_in(cache) is None


def test_caches_of_the_zoo(rng):
    model = zoo_model("llama", VOCAB, 3)
    cache = [KVCache() for _ in model.layers]
    model(mx.array([some_prompt(rng, 6)]), cache=cache)
    assert tokens_in(cache) == 6
    # A recurrent layer neither counts tokens nor takes them back.
    assert tokens_in([ArraysCache(2), KVCache()]) is None
    assert tokens_in([ArraysCache(2)]) is None
