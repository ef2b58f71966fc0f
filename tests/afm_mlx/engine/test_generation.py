"""The calls that mlx-lm's users know, over this engine; and this model under mlx-lm's own loops.

Each test that names a letter is a regression test of a defect that mlx-lm 0.32.2 has on this architecture.
"""

import asyncio
import copy
import inspect
from dataclasses import fields

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import GenerationResponse, generate_step, speculative_generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

import afm_mlx
from afm_mlx import threads
from afm_mlx.engine import generation
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import (
    batch_generate,
    generate,
    stream_generate,
    stream_generate_async,
)
from afm_mlx.engine.request import Request
from afm_mlx.errors import RequestError
from tests.tools.engines import SIZES, naive_greedy, run, some_prompt, tiny
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model


def test_signatures_are_mlx_lms():
    def of(function):
        return list(inspect.signature(function).parameters)

    shared = [name for name in of(mlx_lm.stream_generate) if name not in ("kwargs", "stream")]
    assert of(stream_generate)[: len(shared)] == shared
    assert of(generate)[:4] == of(mlx_lm.generate)[:4]
    assert of(afm_mlx.load) == [
        *of(mlx_lm.load),
        "activation_bits",
        "force_adapter",
        "mask",
        "ranks",
    ]
    ours, theirs = (
        {field.name for field in fields(kind)}
        for kind in (generation.GenerationResponse, GenerationResponse)
    )
    assert ours == theirs | {"completion", "draft_counts", "prompt_logprobs"}


def test_stream_generate_yields_mlx_lms_responses(rng, model, tokenizer, capsys):
    prompt = some_prompt(rng, 7)
    wanted = naive_greedy(model, prompt, 5)
    forms = (prompt, mx.array(prompt), np.array(prompt), tokenizer.decode(prompt))
    for form in forms:
        responses = list(stream_generate(model, tokenizer, form, max_tokens=5))
        assert [r.token for r in responses] == wanted
    assert batch_generate(model, tokenizer, forms, 5).token_ids == [wanted] * len(forms)
    assert "".join(r.text for r in responses) == tokenizer.decode(wanted)
    assert [r.finish_reason for r in responses] == [None] * 4 + ["length"]
    assert [r.generation_tokens for r in responses] == [1, 2, 3, 4, 5]
    last = responses[-1]
    assert last.prompt_tokens == 7
    assert min(last.prompt_tps, last.generation_tps, last.peak_memory) > 0
    assert last.logprobs.shape == (SIZES["vocab_size"],)
    text = generate(model, tokenizer, prompt, verbose=True, max_tokens=5)
    assert text == tokenizer.decode(wanted)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["Prompt", "Generation", "Peak memory"]
    assert lines[-3].startswith("Prompt: 7 tokens, ")
    assert lines[-2].endswith(" tokens-per-sec")


def test_batch_generate_equals_single_runs(rng, model, tokenizer):
    prompts = [some_prompt(rng, n) for n in (3, 14, 1, 8)]
    limits = [4, 9, 6, 1]
    answer = batch_generate(model, tokenizer, prompts, limits, max_batch=3)
    wanted = [naive_greedy(model, *each) for each in zip(prompts, limits, strict=True)]
    assert answer.token_ids == wanted
    assert answer.texts == list(map(tokenizer.decode, wanted))
    assert answer.finish_reasons == ["length"] * 4
    assert min(answer.prompt_tps, answer.generation_tps) > 0


def test_kv_bits_are_honoured_or_refused(rng, tokenizer):
    """(d) `--kv-bits` fails in mlx-lm's reuse layers."""
    model = tiny(rng, kv_bits=8)
    for bits in (8, 16):
        assert generate(model, tokenizer, [1, 2], kv_bits=bits, max_tokens=3)
    with pytest.raises(RequestError, match=r"kv_bits is 4.* 8 .*16"):
        generate(model, tokenizer, [1, 2], kv_bits=4)
    with pytest.raises(RequestError, match=r"kv_bits is 8; .* be 16 \(float\)\."):
        generate(tiny(rng), tokenizer, [1, 2], kv_bits=8)


def test_progress_of_the_prompt_is_reported(model, tokenizer):
    calls = []
    options = {"prompt_progress_callback": lambda *done: calls.append(done), "max_tokens": 1}
    generate(model, tokenizer, [1] * 10, prefill_step_size=4, **options)
    assert calls == [(0, 10), (4, 10), (8, 10), (9, 10), (10, 10)]


def test_progress_of_prompts_in_company_reaches_each_ones_end(rng, model, tokenizer):
    engine = Engine(model, tokenizer, prefill_step_size=64)
    reported = {}
    for length in (1, 2, 9, 30):
        calls = reported[length] = []
        request = Request(
            some_prompt(rng, length), 3, on_prefill=lambda *d, calls=calls: calls.append(d)
        )
        engine.submit(request)
    run(engine)
    for length, calls in reported.items():
        done = [d for d, whole in calls]
        assert {whole for _, whole in calls} == {length}
        assert done == sorted(set(done))
        assert done[-2:] == ([length - 1, length] if length > 1 else [0, 1])


def test_a_progress_callback_that_raises_ends_its_row_alone(rng, model, tokenizer):
    prompts = [some_prompt(rng, length) for length in (1, 6, 7, 5)]
    wanted = naive_greedy(model, prompts[3], 8)

    def fails(at):
        def callback(done, whole):
            if done >= at:
                raise KeyError(done)

        return callback

    for at in (0, 7):  # in the prefill, and once the first token is there
        engine = Engine(model, tokenizer)
        cache = engine.make_cache()
        bad = [
            engine.submit(Request(p, 8, on_prefill=fails(at if at < len(p) else len(p)), **extra))
            for p, extra in zip(prompts[:3], ({}, {}, {"cache": cache}), strict=True)
        ]
        good = engine.submit(Request(prompts[3], 8, logprobs=False))
        found = run(engine)
        for row in bad:
            assert isinstance(found[row][-1].error, KeyError)
            assert len(found[row]) == 1
        assert [response.token for response in found[good]] == wanted
        assert not engine.busy
    assert cache[0].lengths == [7]


@pytest.mark.parametrize("kv_bits", [8, 16])
@pytest.mark.parametrize("leave", ["prefill", "early", "late"])
def test_a_stream_that_is_left_leaves_its_cache_with_what_it_computed(
    rng, tokenizer, kv_bits, leave
):
    model, prompt = tiny(rng, kv_bits=8), some_prompt(rng, 40)
    cache = model.make_cache("int8" if kv_bits == 8 else "float")
    options = {"kv_bits": kv_bits, "prefill_step_size": 8, "prompt_cache": cache}

    def interrupt(done, whole):
        if leave == "prefill" and done == 24:
            raise KeyError("enough")

    stream = stream_generate(
        model, tokenizer, prompt, 50, prompt_progress_callback=interrupt, **options
    )
    tokens = []
    if leave == "prefill":
        with pytest.raises(KeyError, match="enough"):
            next(stream)
        held = prompt[:24]
    else:
        for response in stream:
            tokens.append(response.token)
            if len(tokens) == (1 if leave == "early" else 9):
                break
        stream.close()
        held = [*prompt, *tokens[:-1]]
    assert [layer.lengths for layer in cache[: len(model.model.layers)]] == [
        [len(held)] for _ in model.model.layers
    ]
    rest = some_prompt(rng, 3)
    found = [r.token for r in stream_generate(model, tokenizer, rest, 5, **options)]
    whole = [r.token for r in stream_generate(model, tokenizer, held + rest, 5, kv_bits=kv_bits)]
    assert found == whole


def test_caches_of_another_shape_are_refused_at_the_door(rng, model, tokenizer):
    other = random_model(random_config(rng, **(SIZES | {"num_kv_heads": 4})), rng)
    cache = other.make_cache("float")
    other.prefill(mx.array([[1, 2]]), cache)
    uneven = model.make_cache("float")
    model.prefill(mx.array([[1, 2, 3]]), uneven)
    uneven[1].trim(1)
    half = model.make_cache("float")
    half[0].update(uneven[0].in_use())
    engine = Engine(model, tokenizer, kv="float")
    for wrong, message in ((cache, "another model"), (uneven, "different"), (half, "different")):
        with pytest.raises(RequestError, match=message):
            engine.submit(Request([3], 4, cache=wrong))
    assert not engine.busy


def test_what_cannot_be_honoured_is_refused(model, tokenizer):
    with pytest.raises(RequestError, match="num_draft_tokens is given, and no draft_model"):
        generate(model, tokenizer, [1], num_draft_tokens=3)
    with pytest.raises(TypeError):
        generate(model, tokenizer, [1], no_such_option=1)
    with pytest.raises(RequestError, match="2 entries for 1 prompts"):
        batch_generate(model, tokenizer, [[1]], [1, 2])


# -- our model under mlx-lm's own code


def test_mlx_lm_batches_of_unequal_prompts_are_right(rng, model, tokenizer):
    """(f) mlx-lm rotates reuse queries of every row at the longest row's position."""
    prompts = [some_prompt(rng, n) for n in (3, 12, 7)]
    answer = mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=8, return_token_ids=True)
    assert answer.token_ids == [naive_greedy(model, prompt, 8) for prompt in prompts]


def test_mlx_lm_speculative_decoding_with_a_supplied_cache(rng, model):
    """(g) mlx-lm splits the cache at len(model.layers), more entries than its own model makes."""
    sizes = {"num_layers": 1, "num_kv_reuse_layers": 0, "kv_bits": None}
    draft = random_model(random_config(rng, **{**SIZES, **sizes}), rng)
    prompt = some_prompt(rng, 6)
    cache = make_prompt_cache(model) + make_prompt_cache(draft)
    options = {"max_tokens": 6, "prompt_cache": cache}
    steps = speculative_generate_step(mx.array(prompt), model, draft, **options)
    assert [int(token) for token, _, _ in steps] == naive_greedy(model, prompt, 6)


def test_mlx_lm_copies_and_trims_the_cache(rng, model):
    prompt, cache = some_prompt(rng, 9), make_prompt_cache(model)

    def answer(tokens, cache):
        steps = generate_step(mx.array(tokens), model, max_tokens=4, prompt_cache=cache)
        return [token for token, _ in steps]

    wanted = naive_greedy(model, prompt, 4)
    assert answer(prompt, cache) == wanted
    other, held = copy.deepcopy(cache), cache[0].offset
    assert can_trim_prompt_cache(other)
    assert trim_prompt_cache(other, held - 8) == held - 8
    assert answer(prompt[8:], other) == wanted
    assert (cache[0].offset, other[0].offset) == (held, held)
    trim_prompt_cache(cache, held - 8)
    assert answer(prompt[8:], cache) == wanted


# -- mlx-lm's zoo through our engine


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_zoo_models_run_in_the_engine(rng, tokenizer, model_type):
    model = zoo_model(model_type, SIZES["vocab_size"], int(rng.integers(2**31)))
    prompts = [some_prompt(rng, n) for n in (2, 9, 5)]
    wanted = [naive_greedy(model, prompt, 6) for prompt in prompts]
    assert batch_generate(model, tokenizer, prompts, 6, max_batch=2).token_ids == wanted
    for prompt, tokens in zip(prompts, wanted, strict=True):
        got = stream_generate(model, tokenizer, prompt, 6, prefill_step_size=3)
        assert [r.token for r in got] == tokens
        steps = generate_step(mx.array(prompt), model, max_tokens=6)
        assert [int(token) for token, _ in steps] == tokens


def test_what_is_no_model_prompt_or_option_is_refused_at_the_door(rng, model, tokenizer):
    prompt = some_prompt(rng, 3)
    for options in (
        {"speculation": 5},
        {"prefix_cache": "folder"},
        {"kv": None},
        {"kv": ["int8"]},
        {"model": None},
        {"model": "afm-nano"},
    ):
        (name,) = options
        with pytest.raises(RequestError, match=f"^{name} is "):
            Engine(**{"model": model, "tokenizer": tokenizer, **options})
    for request in (None, "text", prompt, Request):
        with pytest.raises(RequestError, match="a Request is needed"):
            Engine(model, tokenizer).submit(request)
        with pytest.raises(RequestError, match="a Request is needed"):
            asyncio.run(anext(AsyncEngine(model, tokenizer).stream(request)))
    for prompts in (None, "text", 5, iter([prompt]), {"a": prompt}):
        with pytest.raises(RequestError, match=r"^prompts is "):
            batch_generate(model, tokenizer, prompts)
    with pytest.raises(RequestError, match=r"^logits_processors is "):
        generate(model, tokenizer, prompt, logits_processors=len)


def test_a_callers_own_error_leaves_the_caches_of_a_batch_filled(rng, model, tokenizer):
    prompts, caches = [some_prompt(rng, n) for n in (3, 5)], [model.make_cache() for _ in range(2)]

    def fails(tokens, logits):
        if len(tokens) == 4:
            raise KeyError("of the caller")
        return logits

    with pytest.raises(KeyError, match="of the caller"):
        batch_generate(model, tokenizer, prompts, 8, cache=caches, logits_processors=[fails])
    assert [cache[0].lengths for cache in caches] == [[3], [5]]  # the last token excepted


# -- asyncio


def test_streams_run_side_by_side(rng, model, tokenizer):
    prompts = [some_prompt(rng, length) for length in (3, 8, 5)]
    order = []

    async def one(prompt):
        text = ""
        async for response in stream_generate_async(model, tokenizer, prompt, max_tokens=12):
            order.append(len(prompt))
            text += response.text
        return text

    async def everything():
        whole = asyncio.to_thread(generate, model, tokenizer, prompts[0], max_tokens=12)
        return await asyncio.gather(*map(one, prompts), whole)

    wanted = [generate(model, tokenizer, prompt, max_tokens=12) for prompt in prompts]
    assert asyncio.run(everything()) == [*wanted, wanted[0]]
    assert order != sorted(order, key=order.index)  # they take turns


def test_tasks_can_be_cancelled_and_fail(rng, model, tokenizer):
    async def stream(prompt):
        async for _ in stream_generate_async(model, tokenizer, prompt, max_tokens=-1):
            pass

    async def main():
        task = asyncio.create_task(stream(some_prompt(rng, 3)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestError, match="empty"):
            await stream([])
        # MLX's thread is free again.
        return await asyncio.wait_for(asyncio.wrap_future(threads.submit(int)), 60)

    assert asyncio.run(main()) == 0
