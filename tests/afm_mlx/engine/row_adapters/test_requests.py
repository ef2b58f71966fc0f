"""Requests that can't be honoured, and the other ways in."""

import shutil

import numpy as np
import pytest

from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.engines import logprobs_of, run, some_prompt, tiny, wanted_logprobs


def test_requests_that_can_not_be_honoured(rng, model, tokenizer, setup):
    pool, _ = setup
    engine = Engine(model, tokenizer, adapters=pool)
    for adapter, words in (
        ("z", "no adapter 'z'; registered are a, b, c, d"),
        ("", "no adapter ''"),
        ({"a": 1, "z": 1}, "no adapter 'z'"),
        ({"a": float("inf")}, "weight of the adapter 'a' is inf"),
        ({}, "leave no adapter"),
        (["a"], "a registered name, weights by name, or None"),
        (3, "a registered name, weights by name, or None"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(Request([1], adapter=adapter))
    with pytest.raises(RequestError, match="max_tokens is 0"):
        engine.submit(Request([1], max_tokens=0, adapter="a"))
    assert not engine.busy
    assert not any(e["rows"] or e["waiting"] for e in pool.describe()["adapters"])
    with pytest.raises(RequestError, match="there is no adapter pool"):
        Engine(model, tokenizer).submit(Request([1], adapter="a"))
    with pytest.raises(RequestError, match="made for another model"):
        Engine(tiny(rng), tokenizer, adapters=pool)


def test_what_is_no_pool(model, tokenizer):
    for wrong in ("a", {"a": 1.0}):
        with pytest.raises(RequestError, match="a pool is needed"):
            Engine(model, tokenizer, adapters=wrong)


def test_an_attached_adapter_and_a_pool_exclude_each_other(model, tokenizer, setup):
    pool, adapters = setup
    attach_adapter(model, adapters.folder / "a")
    with pytest.raises(RequestError, match="detach_adapter"):
        Engine(model, tokenizer, adapters=pool)


def test_an_engine_keeps_its_adapters_when_the_model_is_stripped(rng, model, tokenizer, setup):
    pool, adapters = setup
    engine = Engine(model, tokenizer, adapters=pool)
    prompt, wanted = some_prompt(rng, 6), adapters.merged({"c": 1})
    detach_adapter(model)
    engine.submit(Request(prompt, 3, adapter="c"))
    (responses,) = run(engine).values()
    tokens = [response.token for response in responses]
    assert np.abs(logprobs_of(responses) - wanted_logprobs(wanted, prompt, tokens)).max() < 1e-3


def test_generate_takes_adapters(rng, model, tokenizer, setup):
    pool, _ = setup
    prompts = [some_prompt(rng, n) for n in (4, 7, 2)]
    names = ["a", None, {"a": 0.5, "c": 1}]
    options = {"max_tokens": 5, "adapters": pool}
    texts = [
        generate(model, tokenizer, prompt, adapter=name, **options)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    assert batch_generate(model, tokenizer, prompts, adapter=names, **options).texts == texts
    same = batch_generate(model, tokenizer, prompts, adapter="a", **options).texts
    assert same[0] == texts[0]
    with pytest.raises(RequestError, match="adapter has 2 entries for 3 prompts"):
        batch_generate(model, tokenizer, prompts, adapter=names[:2], **options)
    with pytest.raises(RequestError, match="adapter is 5; a registered name, weights by name"):
        batch_generate(model, tokenizer, prompts, adapter=5, **options)
    with pytest.raises(RequestError, match="no adapter 'z'"):
        generate(model, tokenizer, prompts[0], adapter="z", **options)


def test_generate_raises_what_loading_has_raised(rng, model, tokenizer, setup):
    pool, adapters = setup
    shutil.rmtree(adapters.folder / "b")
    with pytest.raises(CheckpointError, match="moved or deleted"):
        next(stream_generate(model, tokenizer, [1, 2], adapter="b", adapters=pool))
    with pytest.raises(CheckpointError, match="moved or deleted"):
        batch_generate(model, tokenizer, [[1], [2]], adapter=[None, "b"], adapters=pool)
