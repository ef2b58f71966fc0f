"""Requests that can't be honoured, and the other ways in."""

import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import RequestError
from tests.tools.engines import logprobs_of, run, some_prompt, tiny, wanted_logprobs


def test_requests_that_can_not_be_honoured(make_engine, pool):
    engine = make_engine()
    for options, words in (
        ({"adapter": "z"}, "no adapter 'z'; registered are a, b, c, d"),
        ({"adapter": {"a": float("inf")}}, "weight of the adapter 'a' is inf"),
        ({"adapter": 3}, "a registered name, weights by name, or None"),
        ({"adapter": "a", "max_tokens": 0}, "max_tokens is 0"),
    ):
        with pytest.raises(RequestError, match=words):
            engine.submit(Request([1], **options))
    assert not engine.busy
    assert not any(e["rows"] or e["waiting"] for e in pool.describe()["adapters"])


def test_engines_that_can_not_be(rng, model, tokenizer, pool, adapters):
    for wrong in ("a", {"a": 1.0}):
        with pytest.raises(RequestError, match="a pool is needed"):
            Engine(model, tokenizer, adapters=wrong)
    with pytest.raises(RequestError, match="made for another model"):
        Engine(tiny(rng), tokenizer, adapters=pool)
    with pytest.raises(RequestError, match="there is no adapter pool"):
        Engine(model, tokenizer).submit(Request([1], adapter="a"))
    attach_adapter(model, adapters.folder / "a")
    with pytest.raises(RequestError, match="detach_adapter"):
        Engine(model, tokenizer, adapters=pool)


def test_an_engine_keeps_its_adapters_when_the_model_is_stripped(rng, model, make_engine, adapters):
    engine = make_engine()
    prompt, wanted = some_prompt(rng, 6), adapters.merged({"c": 1})
    detach_adapter(model)
    engine.submit(Request(prompt, 3, adapter="c"))
    (responses,) = run(engine).values()
    tokens = [response.token for response in responses]
    assert np.abs(logprobs_of(responses) - wanted_logprobs(wanted, prompt, tokens)).max() < 1e-3


def test_generate_takes_adapters(rng, model, tokenizer, pool):
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
    for adapter, words in (
        (names[:2], "adapter has 2 entries for 3 prompts"),
        (5, "adapter is 5; a registered name, weights by name"),
    ):
        with pytest.raises(RequestError, match=words):
            batch_generate(model, tokenizer, prompts, adapter=adapter, **options)
