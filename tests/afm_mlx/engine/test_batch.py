"""Prompt caches as mlx-lm's users make them: `make_prompt_cache(model)`, and several turns on it."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import ContextLengthError, RequestError
from tests.tools.engines import SIZES, run, some_prompt, tiny
from tests.tools.zoo import zoo_model

TURNS = ([5, 9, 3, 7], [2], [8, 8, 1])
COUNT = 4


@pytest.fixture
def model(rng):
    return tiny(rng, kv_bits=8)


def streamed(model, tokenizer, prompt, cache, **options):
    stream = stream_generate(model, tokenizer, prompt, COUNT, prompt_cache=cache, **options)
    return [r.token for r in stream]


def batched(model, tokenizer, prompt, cache):
    return batch_generate(model, tokenizer, [prompt], COUNT, cache=cache).token_ids[0]


def submitted(model, tokenizer, prompt, cache):
    engine = Engine(model, tokenizer)
    row = engine.submit(Request(prompt, COUNT, cache=cache))
    return [r.token for r in run(engine)[row]]


def in_one_go(model, tokenizer, prompts, answers, **options):
    """Each turn's answer when the whole conversation before it is the prompt."""
    context, found = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        context += prompt
        found.append(streamed(model, tokenizer, context, None, **options))
        context += answer[:-1]  # the last one is not in the cache
    return found


@pytest.mark.parametrize("kind", ["int8", "float", "zoo"])
def test_turns_on_a_cache_of_make_prompt_cache(rng, tokenizer, kind):
    if kind == "zoo":
        model = zoo_model("llama", SIZES["vocab_size"], 3)
    else:
        model = tiny(rng, kv_bits=8 if kind == "int8" else None)
    for way in (streamed, batched, submitted):
        cache = make_prompt_cache(model)
        answers = [way(model, tokenizer, prompt, cache) for prompt in TURNS]
        assert answers == in_one_go(model, tokenizer, TURNS, answers)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_bits": 16},
        {"kv_bits": 8},
        {"sliding_window": True, "max_kv_size": 8},
        {"sliding_window": True, "max_kv_size": 200, "kv_bits": 16},
        {"max_kv_size": 30},
    ],
)
def test_kv_bits_and_windows_are_for_the_engine_to_choose(model, tokenizer, options):
    cache, again = make_prompt_cache(model), make_prompt_cache(model)
    answers = [streamed(model, tokenizer, prompt, cache, **options) for prompt in TURNS]
    assert cache[0].int8 == (options.get("kv_bits") != 16)
    assert cache[0].sliding_window == ("sliding_window" in options)
    # After the first turn, the cache itself says what was asked for.
    given = [options, {}, {}]
    for prompt, chosen, answer in zip(TURNS, given, answers, strict=True):
        assert streamed(model, tokenizer, prompt, again, **chosen) == answer
    if options.get("max_kv_size") != 8:  # a window forgets at other times in other turns
        assert answers == in_one_go(model, tokenizer, TURNS, answers, **options)


@pytest.mark.parametrize("kind", ["int8", "zoo", "zoo, bounded"])
def test_mlx_lms_own_loop_goes_on_with_the_same_caches(model, tokenizer, kind):
    # Past it, mlx-lm's batches forget the first four tokens, which its single caches keep.
    size = 20 if kind == "zoo, bounded" else None
    model = model if kind == "int8" else zoo_model("qwen3", SIZES["vocab_size"], 3)
    ours, theirs = (make_prompt_cache(model, max_kv_size=size) for _ in range(2))
    for prompt in TURNS:
        steps = generate_step(mx.array(prompt), model, max_tokens=COUNT, prompt_cache=theirs)
        assert streamed(model, tokenizer, prompt, ours) == [token for token, _ in steps]
        for layer in theirs:
            layer.trim(1)  # mlx-lm feeds an answer's last token, too
    assert getattr(ours[0], "max_size", None) == size


def test_the_smaller_bound_ends_a_row_and_no_other(rng, model, tokenizer):
    engine = Engine(model, tokenizer, max_kv_size=40)
    bounds = {"free": None, "small": 12, "large": 10**6}
    caches = {name: model.make_cache(max_size=size) for name, size in bounds.items()}
    prompts = {name: some_prompt(rng, 6) for name in (*bounds, "own")}
    rows = {n: engine.submit(Request(p, -1, cache=caches.get(n))) for n, p in prompts.items()}
    found = run(engine)
    for name, row in rows.items():
        error, limit = found[row][-1].error, 12 if name == "small" else 40
        assert isinstance(error, ContextLengthError)
        assert f"context of {limit} tokens" in str(error)
        alone = stream_generate(model, tokenizer, prompts[name], limit - 6 + 1)
        assert [r.token for r in found[row]] == [r.token for r in alone]
    assert {name: cache[0].max_size for name, cache in caches.items()} == bounds
    with pytest.raises(ContextLengthError, match="context holds 12"):
        engine.submit(Request([1], cache=caches["small"]))


def test_an_engine_without_a_limit_takes_the_caches(model, tokenizer):
    context = model.args.context_length
    for size, limit in ((None, context), (20, 20), (context + 50, context + 50)):
        engine, cache = Engine(model, tokenizer), model.make_cache(max_size=size)
        with pytest.raises(ContextLengthError, match=f"context holds {limit}\\."):
            engine.submit(Request([1] * (limit + 1), cache=cache))
        engine.submit(Request([1] * limit, cache=cache))


def test_a_batch_has_a_cache_for_each_prompt(rng, model, tokenizer):
    prompts = [some_prompt(rng, length) for length in (3, 6, 4)]
    caches = [make_prompt_cache(model), None, model.make_cache(max_size=50)]
    first = batch_generate(model, tokenizer, prompts, COUNT, cache=caches)
    second = batch_generate(model, tokenizer, prompts, COUNT, cache=caches)
    for prompt, cache, *answers in zip(
        prompts, caches, first.token_ids, second.token_ids, strict=True
    ):
        wanted = in_one_go(model, tokenizer, [prompt] * 2, answers)
        assert answers == (wanted if cache is not None else [wanted[0]] * 2)


def test_caches_that_cannot_go_on_are_refused_in_a_sentence(model, tokenizer):
    filled = model.make_cache()
    streamed(model, tokenizer, [1, 2], filled)
    window = model.make_cache(max_size=16, sliding_window=True)
    zoo = make_prompt_cache(zoo_model("llama", SIZES["vocab_size"], 3))
    for cache, message in (
        (model.make_cache("float"), "holds floats, and this engine int8 codes"),
        (window, "int8 codes in a sliding window of 16, and this engine int8 codes"),
        (zoo, "entries, and this model's has"),
        ([], "0 entries"),
        ("words", "'words'"),
        ([layer.merge([layer] * 2) for layer in filled], "one row"),
    ):
        with pytest.raises(RequestError, match=message):
            Engine(model, tokenizer).submit(Request([1], cache=cache))
    for options, message in (
        ({"kv_bits": 16}, "holds int8 codes, and this engine floats"),
        ({"sliding_window": True, "max_kv_size": 16}, "this engine int8 codes in a sliding window"),
    ):
        with pytest.raises(RequestError, match=message):
            streamed(model, tokenizer, [1], filled, **options)
    for cache, message in (
        ([filled], "There are 1 prompt caches for 2 prompts"),
        ([filled] * 3, "There are 3 prompt caches"),
        (7, "The prompt cache is 7"),
        ([[], 5], "a list of entries is needed"),
    ):
        with pytest.raises(RequestError, match=message):
            batch_generate(model, tokenizer, [[1]] * 2, cache=cache)
    assert filled[0].lengths == [2 + COUNT - 1]
