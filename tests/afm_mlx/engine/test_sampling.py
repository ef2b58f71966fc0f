"""Logits from which no token can be chosen end their row with an error that says so, and no other row."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import LogitsError
from tests.tools.engines import SIZES, Adapters, run, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
GREEDY = {"logprobs": False}
KINDS = {
    "greedy": GREEDY,
    "log-probabilities": {},
    "sampler": {"sampler": mx.random.categorical, "seed": 3},
    "processors": {"logits_processors": [lambda tokens, logits: logits]},
}


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(VOCAB)
    tokenizer.eos_token_ids = set()
    return tokenizer


def spoiled(model, token, value):
    """One row of the head, and of the embedding, holds no number."""
    embedding = model.model.embedding if hasattr(model.model, "embedding") else None
    embedding = embedding or model.model.embed_tokens
    name = "scales" if "scales" in embedding else "weight"
    numbers = np.array(embedding[name].astype(mx.float32))
    numbers[token] = value
    embedding[name] = mx.array(numbers).astype(embedding[name].dtype)
    return model


@pytest.mark.parametrize("kind", ["float", "2-bit", "zoo"])
def test_logits_that_are_no_numbers_are_an_error(rng, tokenizer, kind):
    for options in KINDS.values():
        model = zoo_model("llama", VOCAB, 3) if kind == "zoo" else tiny(rng, kind, kv_bits=8)
        engine = Engine(spoiled(model, 7, math.nan), tokenizer)
        row = engine.submit(Request([1, 2, 3], 5, **options))
        (response,) = run(engine)[row]
        assert isinstance(response.error, LogitsError)
        assert (response.token, response.text, response.finish_reason) == (-1, "", "error")
        assert not engine.busy
        with pytest.raises(LogitsError, match="no token can be chosen"):
            generate(model, tokenizer, [1, 2, 3], max_tokens=5)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_other_rows_of_the_batch_go_on(rng, tokenizer, options, tmp_path):
    """An adapter that overflows spoils the rows that use it, from their first token on."""
    model = tiny(rng, "2-bit", kv_bits=8)
    prompts = [some_prompt(rng, length) for length in (4, 6, 3)]
    with AdapterPool(model) as pool:
        adapters = Adapters(model, rng, tmp_path)
        adapters.add(pool, "good", 2)
        pool.register("huge", {"good": 1e30})
        names = [None, "huge", "good"]

        def requests(which):
            engine = Engine(model, tokenizer, adapters=pool)
            rows = {
                n: engine.submit(Request(prompts[n], 6, adapter=names[n], **options)) for n in which
            }
            found = run(engine)
            return {n: found[row] for n, row in rows.items()}

        pool.load("huge").numbers[:] = mx.array(np.float16(np.inf))
        found, wanted = requests([0, 1, 2]), requests([0, 2])
        assert isinstance(found[1][-1].error, LogitsError)
        for n in (0, 2):
            assert [r.token for r in found[n]] == [r.token for r in wanted[n]]
            assert len(found[n]) == 6
            assert found[n][-1].error is None
        assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def banned(*tokens, value=-math.inf):
    def processor(seen, logits):
        return mx.put_along_axis(logits, mx.array([tokens]), mx.array(value), axis=-1)

    return processor


@pytest.mark.parametrize("sampler", [None, mx.random.categorical])
def test_bans_are_no_error_until_nothing_is_left(rng, tokenizer, sampler):
    model = tiny(rng, kv_bits=8)
    engine = Engine(model, tokenizer)

    def submit(processor):
        options = {"logits_processors": [processor], "sampler": sampler, "seed": 1}
        return engine.submit(Request([1, 2], 4, **options))

    only = submit(banned(*(set(range(VOCAB)) - {9})))
    none = submit(banned(*range(VOCAB)))
    nan = submit(banned(3, value=math.nan))
    infinite = submit(banned(3, value=math.inf))
    found = run(engine)
    assert [r.token for r in found[only]] == [9] * 4
    for row, message in (
        (none, "Every token is banned"),
        (nan, "what the logits processors made of them, hold nan"),
        (infinite, "hold inf"),
    ):
        (response,) = found[row]
        assert isinstance(response.error, LogitsError)
        assert message in str(response.error)


def test_an_answer_that_fails_later_is_whole_up_to_there(rng, tokenizer):
    """Its text so far, stop strings that were held back included, and a cache that goes on from there."""
    model = tiny(rng, kv_bits=8)

    def fails_after(count):
        return lambda seen, logits: logits * (math.nan if len(seen) >= count else 1)

    def stream(**options):
        cache, text = model.make_cache(), ""
        responses = stream_generate(model, tokenizer, [1, 2, 3], 6, prompt_cache=cache, **options)
        try:
            for response in responses:
                text += response.text
        except LogitsError:
            text += "!"
        return text, cache

    whole, _ = stream()
    words = whole.split()
    for stop in ((), (f"{words[2]} never",)):
        text, cache = stream(logits_processors=[fails_after(3 + 3)], stop=stop)
        assert text.split() == [*words[:3], "!"]
        assert cache[0].lengths == [3 + 3 - 1]
        more = generate(model, tokenizer, [int(words[2][1:])], max_tokens=3, prompt_cache=cache)
        assert more.split() == words[3:]
