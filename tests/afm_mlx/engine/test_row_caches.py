"""Prompt caches as mlx-lm's users make them: `make_prompt_cache(model)`, and several turns on it."""

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import ContextLengthError, RequestError
from tests.tools.engines import SIZES, run, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
TURNS = ([5, 9, 3, 7], [2], [8, 8, 1])
COUNT = 4


@pytest.fixture
def model(rng):
    return tiny(rng, kv_bits=8)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(VOCAB)
    tokenizer.eos_token_ids = set()
    return tokenizer


def streamed(model, tokenizer, prompt, cache, **options):
    stream = stream_generate(model, tokenizer, prompt, COUNT, prompt_cache=cache, **options)
    return [r.token for r in stream]


def generated(model, tokenizer, prompt, cache, **options):
    text = generate(model, tokenizer, prompt, max_tokens=COUNT, prompt_cache=cache, **options)
    return tokenizer.encode(text)


def batched(model, tokenizer, prompt, cache, **options):
    found = batch_generate(model, tokenizer, [prompt], COUNT, cache=cache, **options)
    return found.token_ids[0]


def submitted(model, tokenizer, prompt, cache):
    engine = Engine(model, tokenizer)
    row = engine.submit(Request(prompt, COUNT, cache=cache))
    return [r.token for r in run(engine)[row]]


WAYS = [streamed, generated, batched, submitted]


def in_one_go(model, tokenizer, prompts, answers, **options):
    """Each turn's answer when the whole conversation before it is the prompt."""
    context, found = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        context += prompt
        found += [[r.token for r in stream_generate(model, tokenizer, context, COUNT, **options)]]
        context += answer[:-1]  # the last one is not in the cache
    return found


@pytest.mark.parametrize("kind", ["int8", "float", "zoo"])
def test_turns_on_a_cache_of_make_prompt_cache(rng, tokenizer, kind):
    for way in WAYS:
        if kind == "zoo":
            model = zoo_model("llama", VOCAB, 3)
        else:
            model = tiny(rng, kv_bits=8 if kind == "int8" else None)
        for make in (make_prompt_cache, getattr(type(model), "make_cache", make_prompt_cache)):
            cache = make(model)
            answers = [way(model, tokenizer, prompt, cache) for prompt in TURNS]
            assert answers == in_one_go(model, tokenizer, TURNS, answers)


def test_kv_bits_and_windows_are_for_the_engine_to_choose(model, tokenizer):
    for way in [streamed, generated, batched]:
        for options in (
            {"kv_bits": 16},
            {"kv_bits": 8},
            {"sliding_window": True, "max_kv_size": 8},
            {"sliding_window": True, "max_kv_size": 200, "kv_bits": 16},
            {"max_kv_size": 30},
        ):
            cache = make_prompt_cache(model)
            answers = [way(model, tokenizer, prompt, cache, **options) for prompt in TURNS]
            # The first of these options is not needed again.
            again = make_prompt_cache(model)
            first = way(model, tokenizer, TURNS[0], again, **options)
            assert [
                first,
                *(way(model, tokenizer, prompt, again) for prompt in TURNS[1:]),
            ] == answers
            assert cache[0].int8 == (options.get("kv_bits") != 16)
            assert cache[0].sliding_window == ("sliding_window" in options)
            if options.get("max_kv_size") != 8:  # a window forgets at other times in other turns
                whole = in_one_go(model, tokenizer, TURNS, answers, **options)
                assert answers == whole


@pytest.mark.parametrize("kind", ["int8", "zoo", "zoo, bounded"])
def test_mlx_lms_own_loop_goes_on_with_the_same_caches(model, tokenizer, kind):
    # Past it, mlx-lm's batches forget the first four tokens, which its single caches keep.
    size = 20 if kind == "zoo, bounded" else None
    model = model if kind == "int8" else zoo_model("qwen3", VOCAB, 3)
    ours, theirs = (make_prompt_cache(model, max_kv_size=size) for _ in range(2))
    for turn, prompt in enumerate(TURNS):
        steps = generate_step(mx.array(prompt), model, max_tokens=COUNT, prompt_cache=theirs)
        assert streamed(model, tokenizer, prompt, ours) == [token for token, _ in steps]
        if turn < len(TURNS) - 1:
            for layer in theirs:
                layer.trim(1)  # mlx-lm feeds an answer's last token, too
    assert getattr(ours[0], "max_size", None) == size


def test_the_smaller_bound_ends_a_row_and_no_other(rng, model, tokenizer):
    """Rows of one batch, with caches of no bound, of a small one, of a large one, and none."""
    engine = Engine(model, tokenizer, max_kv_size=40)
    bounds = {"free": None, "small": 12, "large": 10**6}
    caches = {name: model.make_cache(max_size=size) for name, size in bounds.items()}
    prompts = {name: some_prompt(rng, 6) for name in (*bounds, "own")}
    rows = {n: engine.submit(Request(p, -1, cache=caches.get(n))) for n, p in prompts.items()}
    found = run(engine)
    for name, row in rows.items():
        tokens, last = [r.token for r in found[row]], found[row][-1]
        assert isinstance(last.error, ContextLengthError)
        limit = 12 if name == "small" else 40
        assert f"context of {limit} tokens" in str(last.error)
        assert len(tokens) == limit - 6 + 1
        alone = generate(model, tokenizer, prompts[name], max_tokens=len(tokens))
        assert tokens == tokenizer.encode(alone)
    for name, cache in caches.items():
        assert cache[0].max_size == bounds[name]
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
    for i, cache in enumerate(caches):
        turns, answers = [prompts[i]] * 2, [first.token_ids[i], second.token_ids[i]]
        wanted = in_one_go(model, tokenizer, turns, answers)
        assert answers == (wanted if cache is not None else [wanted[0]] * 2)


def test_caches_that_cannot_go_on_are_refused_in_a_sentence(rng, model, tokenizer):
    filled = model.make_cache()
    streamed(model, tokenizer, [1, 2], filled)
    window = model.make_cache(max_size=16, sliding_window=True)
    engine = Engine(model, tokenizer)
    for cache, message in (
        (model.make_cache("float"), "holds floats, and this engine int8 codes"),
        (window, "int8 codes in a sliding window of 16, and this engine int8 codes"),
        (
            make_prompt_cache(zoo_model("llama", VOCAB, 3)),
            "entries, and this model's has|a KVCache",
        ),
        ([], "0 entries"),
        ("words", "'words'"),
        ([layer.merge([layer] * 2) for layer in filled], "one row"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.submit(Request([1], cache=cache))
    for options, message in (
        ({"kv_bits": 16}, "holds int8 codes, and this engine floats"),
        ({"sliding_window": True, "max_kv_size": 16}, "this engine int8 codes in a sliding window"),
    ):
        with pytest.raises(RequestError, match=message):
            streamed(model, tokenizer, [1], filled, **options)
    for cache in ([filled], [filled] * 3, 7, [[], None, None]):
        with pytest.raises(RequestError):
            batch_generate(model, tokenizer, [[1]] * 2, cache=cache)
    with pytest.raises(RequestError, match="prompt cache has 7"):
        streamed(model, tokenizer, [1], 7)
    assert filled[0].lengths == [2 + COUNT - 1]
