"""Logits from which no token can be chosen end their row with an error that says so, and no other row."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import LogitsError, RequestError
from tests.tools.engines import SIZES, Adapters, run, run_one, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
KINDS = {
    "greedy": {"logprobs": False},
    "log-probabilities": {},
    "sampler": {"sampler": mx.random.categorical, "seed": 3},
    "processors": {"logits_processors": [lambda tokens, logits: logits]},
}


@pytest.mark.parametrize("kind", ["float", "2-bit", "zoo"])
def test_a_logit_that_is_no_number_is_an_error(rng, tokenizer, kind):
    model = zoo_model("llama", VOCAB, 3) if kind == "zoo" else tiny(rng, kind, kv_bits=8)
    embedding = model.model.embed_tokens if kind == "zoo" else model.model.embedding
    embedding["scales" if "scales" in embedding else "weight"][7] = math.nan
    for options in KINDS.values():
        (response,) = run_one(model, tokenizer, Request([1, 2, 3], 5, **options))
        assert isinstance(response.error, LogitsError)
        assert (response.token, response.text, response.finish_reason) == (-1, "", "error")
    with pytest.raises(LogitsError, match="no token can be chosen"):
        generate(model, tokenizer, [1, 2, 3], max_tokens=5)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_other_rows_of_the_batch_go_on(rng, tokenizer, options, tmp_path):
    """An adapter that overflows spoils the rows that use it, from their first token on."""
    model = tiny(rng, "2-bit", kv_bits=8)
    prompts = [some_prompt(rng, length) for length in (4, 6, 3)]
    with AdapterPool(model) as pool:
        Adapters(model, rng, tmp_path).add(pool, "good", 2)
        pool.register("huge", {"good": 1e30})
        pool.load("huge").numbers[:] = mx.array(np.float16(np.inf))

        def answers(*adapters):
            engine = Engine(model, tokenizer, adapters=pool)
            for prompt, adapter in zip(prompts, adapters, strict=True):
                engine.submit(Request(prompt, 6, adapter=adapter, **options))
            found = run(engine)
            assert not any(entry["rows"] for entry in pool.describe()["adapters"])
            return [[r.token for r in found[row]] for row in range(3)], found[2][-1].error

        wanted, _ = answers(None, "good", None)
        tokens, error = answers(None, "good", "huge")
        assert tokens == [*wanted[:2], [-1]]
        assert isinstance(error, LogitsError)


@pytest.mark.parametrize("sampler", [None, mx.random.categorical])
def test_bans_are_no_error_until_nothing_is_left(rng, tokenizer, sampler):
    engine = Engine(tiny(rng, kv_bits=8), tokenizer)

    def submit(tokens, value):
        def processor(seen, logits):
            return mx.put_along_axis(logits, mx.array([tokens]), mx.array(value), axis=-1)

        options = {"logits_processors": [processor], "sampler": sampler, "seed": 1}
        return engine.submit(Request([1, 2], 4, **options))

    only = submit([token for token in range(VOCAB) if token != 9], -math.inf)
    failing = {
        submit(list(range(VOCAB)), -math.inf): "Every token is banned",
        submit([3], math.nan): "what the logits processors made of them, hold nan",
        submit([3], math.inf): "hold inf",
    }
    found = run(engine)
    assert [r.token for r in found[only]] == [9] * 4
    for row, message in failing.items():
        (response,) = found[row]
        assert isinstance(response.error, LogitsError)
        assert message in str(response.error)


def test_an_answer_that_fails_later_is_whole_up_to_there(rng, tokenizer):
    model = tiny(rng, kv_bits=8)
    words = generate(model, tokenizer, [1, 2, 3], max_tokens=6).split()

    def fails_later(seen, logits):
        return logits * (math.nan if len(seen) >= 3 + 3 else 1)

    for stop in ((), (f"{words[2]} never",)):
        cache, text = model.make_cache(), ""
        options = {"prompt_cache": cache, "logits_processors": [fails_later], "stop": stop}
        with pytest.raises(LogitsError):
            for response in stream_generate(model, tokenizer, [1, 2, 3], 6, **options):
                text += response.text
        assert text.split() == words[:3]
        assert cache[0].lengths == [3 + 3 - 1]
        more = generate(model, tokenizer, [int(words[2][1:])], max_tokens=3, prompt_cache=cache)
        assert more.split() == words[3:]


@pytest.mark.parametrize("kind", ["float", "2-bit"])
@pytest.mark.parametrize(
    "place", ["layers.0.mlp.down_proj", "layers.0.self_attn.out_proj", "layers.0.mlp.up_proj"]
)
def test_a_number_whose_square_overflows_is_an_error_and_no_zeros(rng, tokenizer, kind, place):
    """A norm of numbers whose mean square is infinite would make zeros of them, and of all logits."""
    model = tiny(rng, kind, kv_bits=8)
    layer = model.model
    for part in place.split("."):
        layer = layer[int(part)] if part.isdigit() else layer[part]
    name = "scales" if kind == "2-bit" else "weight"
    numbers = np.array(layer[name])
    numbers.reshape(-1)[3] = 1e25
    layer[name] = mx.array(numbers)
    for options in KINDS.values():
        (response,) = run_one(model, tokenizer, Request([1, 2, 3], 5, **options))
        assert isinstance(response.error, LogitsError)


class BadTokenizer(WordTokenizer):
    """A tokenizer whose detokenizers fail in one of their methods, from the third token on."""

    def __init__(self, fails_in):
        super().__init__(VOCAB, ends=())
        self.fails_in = fails_in

    @property
    def detokenizer(self):
        inner, count, fails_in = super().detokenizer, [0], self.fails_in

        class Failing:
            def add_token(self, token):
                count[0] += 1
                if fails_in == "add_token" and count[0] == 3:
                    raise KeyError("of add_token")
                inner.add_token(token)

            def finalize(self):
                if fails_in == "finalize":
                    raise KeyError("of finalize")
                inner.finalize()

            @property
            def last_segment(self):
                if fails_in == "last_segment" and count[0] == 3:
                    raise KeyError("of last_segment")
                return inner.last_segment

        return Failing()


@pytest.mark.parametrize("fails_in", ["add_token", "finalize", "last_segment"])
def test_what_a_detokenizer_raises_is_its_rows_error(rng, model, fails_in):
    engine = Engine(model, BadTokenizer(fails_in))
    short, long = (engine.submit(Request(some_prompt(rng, 3), n, logprobs=False)) for n in (2, 5))
    found = run(engine)
    assert not engine.busy
    with pytest.raises(KeyError, match=f"of {fails_in}"):
        raise found[long][-1].error
    is_whole = fails_in != "finalize"
    assert found[short][-1].finish_reason == ("length" if is_whole else "error")


WRONG_TOKENS = {
    "negative": lambda logprobs: mx.array([-1]),
    "past the end": lambda logprobs: mx.array([VOCAB]),
    "far past the end": lambda logprobs: mx.array([2**40 + 5], mx.int64),
    "unsigned": lambda logprobs: mx.array([2**40], mx.uint64),
    "float": lambda logprobs: mx.array([3.0]),
    "boolean": lambda logprobs: mx.array([True]),
    "two": lambda logprobs: mx.array([3, 4]),
    "int": lambda logprobs: 3,
    "numpy": lambda logprobs: np.array([3]),
    "nothing": lambda logprobs: None,
}
WRONG_LOGITS = {
    "short": lambda tokens, logits: logits[:, :-1],
    "complex": lambda tokens, logits: logits.astype(mx.complex64),
    "boolean": lambda tokens, logits: logits > 0,
    "numpy": lambda tokens, logits: np.array(logits),
    "nothing": lambda tokens, logits: None,
}


@pytest.mark.parametrize("kind", ["float", "2-bit", "zoo"])
@pytest.mark.parametrize("speculates", [False, True])
def test_what_a_callers_function_returns_wrongly_is_its_rows_error(
    rng, tokenizer, kind, speculates
):
    """From the second token on; neighbours go on, and no id that is none reaches the model."""
    if kind == "zoo" and speculates:
        pytest.skip("models of the zoo are not drafted for")
    model = zoo_model("llama", VOCAB, 3) if kind == "zoo" else tiny(rng, kind, kv_bits=8)
    options = {"speculation": Speculation(prompt_lookup=True, num_draft_tokens=2)}
    options = options if speculates else {}
    prompt = some_prompt(rng, 3)
    alone = run_one(model, tokenizer, Request(prompt, 6, logprobs=False))
    wanted = [response.token for response in alone]

    def later(wrong, right):
        calls = []

        def function(*given):
            calls.append(1)
            return (right if len(calls) == 1 else wrong)(*given)

        return function

    engine = Engine(
        model, tokenizer, max_batch=len(WRONG_TOKENS) + len(WRONG_LOGITS) + 1, **options
    )
    bad = {}
    for name, wrong in WRONG_TOKENS.items():
        sampler = later(wrong, lambda logprobs: mx.argmax(logprobs, axis=-1))
        bad[engine.submit(Request(prompt, 6, sampler=sampler))] = name, "The sampler returned"
    for name, wrong in WRONG_LOGITS.items():
        processor = later(wrong, lambda tokens, logits: logits)
        request = Request(prompt, 6, logits_processors=[processor])
        bad[engine.submit(request)] = name, "A logits processor returned"
    good = engine.submit(Request(prompt, 6, logprobs=False))
    found = run(engine)
    assert [response.token for response in found[good]] == wanted
    for row, (name, message) in bad.items():
        last = found[row][-1]
        assert (last.finish_reason, type(last.error)) == ("error", RequestError), name
        assert str(last.error).startswith(message), name
        assert len(found[row]) <= 2, name


def test_what_raises_in_a_rows_first_step_changes_no_other_row(rng, tokenizer):
    model = tiny(rng, "2-bit", kv_bits=8)
    prompts = [some_prompt(rng, 4) for _ in range(2)]
    wanted = generate(model, tokenizer, prompts[0], max_tokens=8)

    def fails(*arrays):
        raise KeyError("of the caller")

    for options in (
        {"sampler": fails},
        {"sampler": mx.random.categorical, "logits_processors": [fails]},
        {"on_prefill": fails},
    ):
        engine = Engine(model, tokenizer)
        good = engine.submit(Request(prompts[0], 8))
        bad = engine.submit(Request(prompts[1], 8, **options))
        found = run(engine)
        assert isinstance(found[bad][-1].error, KeyError)
        assert "".join(response.text for response in found[good]) == wanted
