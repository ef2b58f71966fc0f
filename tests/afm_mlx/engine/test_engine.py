"""The engine against a naive loop that recomputes everything at each step."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request, StopStrings
from afm_mlx.errors import AFMError, ContextLengthError, RequestError
from tests.tools.models import WordTokenizer, random_config, random_model


def naive_greedy(model, prompt, count, end_tokens=()):
    """Greedy continuation by full recomputation, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
        if tokens[-1] in end_tokens:
            break
    return tokens[len(prompt) :]


def collect(engine):
    tokens = {}
    for response in engine.run():
        assert response.error is None, response.error
        tokens.setdefault(response.row, []).append(response.token)
    return tokens


@pytest.fixture
def model(rng):
    """Without int8 rounding, which may turn a difference of 1e-7 into another token."""
    sizes = {"num_layers": 4, "num_kv_reuse_layers": 2, "vocab_size": 64, "kv_bits": None}
    return random_model(random_config(rng, **sizes), rng)


@pytest.fixture
def int8_model(rng):
    sizes = {"num_layers": 4, "num_kv_reuse_layers": 2, "vocab_size": 64}
    return random_model(random_config(rng, **sizes), rng)


def assert_likely(model, prompt, tokens):
    """Every token is, given those before it, the likeliest one but for a rounding step of int8."""
    logits = np.array(model(mx.array([prompt + tokens]))[0, len(prompt) - 1 : -1])
    chosen = logits[np.arange(len(tokens)), tokens]
    assert (logits.max(-1) - chosen).max() < 0.1 * logits.std()


@pytest.fixture
def tokenizer(model):
    return WordTokenizer(model.args.vocab_size)


def prompt_of(rng, model, length):
    return rng.integers(0, model.args.vocab_size - 1, length).tolist()


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("max_batch", [2, 8])
def test_int8_rows_equal_the_naive_loop(rng, int8_model, tokenizer, kv, max_batch):
    prompts = [prompt_of(rng, int8_model, int(n)) for n in rng.integers(1, 20, size=5)]
    engine = Engine(int8_model, tokenizer, max_batch=max_batch, prefill_step_size=4, kv=kv)
    rows = [engine.submit(Request(prompt, max_tokens=9)) for prompt in prompts]
    tokens = collect(engine)
    for row, prompt in zip(rows, prompts, strict=True):
        assert_likely(int8_model, prompt, tokens[row])


@pytest.mark.parametrize("step", [1, 3, 2048])
def test_single_row_equals_the_naive_loop(rng, model, tokenizer, step):
    for length in (1, 2, 11):
        prompt = prompt_of(rng, model, length)
        engine = Engine(model, tokenizer, prefill_step_size=step)
        engine.submit(Request(prompt, max_tokens=12))
        (tokens,) = collect(engine).values()
        assert tokens == naive_greedy(model, prompt, 12, tokenizer.eos_token_ids)


@pytest.mark.parametrize("max_batch", [2, 8])
@pytest.mark.parametrize("step", [2, 2048])
def test_ragged_batch_equals_the_naive_loop(rng, model, tokenizer, max_batch, step):
    prompts = [prompt_of(rng, model, int(n)) for n in rng.integers(1, 20, size=5)]
    limits = [int(n) for n in rng.integers(1, 15, size=5)]
    engine = Engine(model, tokenizer, max_batch=max_batch, prefill_step_size=step)
    rows = [engine.submit(Request(p, max_tokens=n)) for p, n in zip(prompts, limits, strict=True)]
    tokens = collect(engine)
    for row, prompt, limit in zip(rows, prompts, limits, strict=True):
        assert tokens[row] == naive_greedy(model, prompt, limit, tokenizer.eos_token_ids)


def test_rows_without_logprobs_take_the_same_tokens(rng, model, tokenizer):
    """Greedy rows that nobody wants log-probabilities of skip the logits; the tokens are the same."""
    prompts = [prompt_of(rng, model, n) for n in (5, 2, 8)]
    for wanted in ([False] * 3, [False, True, False]):
        engine = Engine(model, tokenizer)
        for prompt, logprobs in zip(prompts, wanted, strict=True):
            engine.submit(Request(prompt, max_tokens=7, logprobs=logprobs))
        tokens = {}
        for response in engine.run():
            assert (response.logprobs is not None) == wanted[response.row]
            tokens.setdefault(response.row, []).append(response.token)
        for row, prompt in enumerate(prompts):
            assert tokens[row] == naive_greedy(model, prompt, 7, tokenizer.eos_token_ids)


def test_rows_join_late_and_leave_early(rng, model, tokenizer):
    prompts = [prompt_of(rng, model, n) for n in (4, 9, 1, 6)]
    engine = Engine(model, tokenizer, prefill_step_size=3)
    rows, tokens = {}, {}
    for turn in range(60):
        if turn % 4 == 0 and len(rows) < len(prompts):
            index = len(rows)
            rows[engine.submit(Request(prompts[index], max_tokens=9 - index))] = index
        for response in engine.step():
            tokens.setdefault(response.row, []).append(response.token)
    assert not engine.busy
    for row, index in rows.items():
        wanted = naive_greedy(model, prompts[index], 9 - index, tokenizer.eos_token_ids)
        assert tokens[row] == wanted


def test_cancelled_rows_disturb_nobody(rng, model, tokenizer):
    prompts = [prompt_of(rng, model, n) for n in (7, 3, 5)]
    for cancel_at in range(6):
        engine = Engine(model, tokenizer, prefill_step_size=4)
        rows = [engine.submit(Request(p, max_tokens=8)) for p in prompts]
        tokens = {}
        for turn in range(40):
            if turn == cancel_at:
                engine.cancel(rows[1])
            for response in engine.step():
                tokens.setdefault(response.row, []).append(response.token)
        assert not engine.busy
        for i in (0, 2):
            wanted = naive_greedy(model, prompts[i], 8, tokenizer.eos_token_ids)
            assert tokens[rows[i]] == wanted
        assert len(tokens.get(rows[1], [])) < 8 or cancel_at > 8


def test_the_next_step_is_submitted_before_the_last_token_is_read(
    rng, model, tokenizer, monkeypatch
):
    tokenizer.eos_token_ids = set()
    events = []
    submit = mx.async_eval
    monkeypatch.setattr(mx, "async_eval", lambda *a: (events.append("submit"), submit(*a)))
    engine = Engine(model, tokenizer)
    read = engine._read
    monkeypatch.setattr(engine, "_read", lambda f: (events.append("read"), read(f))[1])
    engine.submit(Request(prompt_of(rng, model, 3), max_tokens=4))
    for _ in range(3):
        engine.step()
    assert events[:5] == ["submit", "submit", "read", "submit", "read"]


@pytest.mark.parametrize("company", [0, 3])
def test_a_rows_random_stream_is_its_own(rng, model, tokenizer, company):
    """The same seed gives the same tokens, alone or in a batch, and the global stream is left alone."""
    prompt = prompt_of(rng, model, 5)
    sampler = make_sampler(temp=1.0, top_p=0.9)

    def run(seed, others):
        engine = Engine(model, tokenizer)
        for i in range(others):
            engine.submit(
                Request(prompt_of(rng, model, 4), max_tokens=12, sampler=sampler, seed=900 + i)
            )
        row = engine.submit(Request(prompt, max_tokens=10, sampler=sampler, seed=seed))
        return collect(engine)[row]

    mx.random.seed(7)
    wanted_global = mx.random.uniform(shape=(3,)).tolist()
    mx.random.seed(7)
    first = run(1, company)
    assert mx.random.uniform(shape=(3,)).tolist() == wanted_global
    assert run(1, 0) == first
    assert run(2, 0) != first


def test_without_a_seed_mlx_random_seed_decides(rng, model, tokenizer):
    prompt, sampler = prompt_of(rng, model, 5), make_sampler(temp=1.0)
    runs = []
    for seed in (3, 3, 4):
        mx.random.seed(seed)
        engine = Engine(model, tokenizer)
        engine.submit(Request(prompt, max_tokens=12, sampler=sampler))
        runs.append(next(iter(collect(engine).values())))
    assert runs[0] == runs[1] != runs[2]


def test_logits_processors_see_their_own_rows_tokens(rng, model, tokenizer):
    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    prompts = [prompt_of(rng, model, 6), prompt_of(rng, model, 2)]
    engine = Engine(model, tokenizer)
    row = engine.submit(Request(prompts[0], max_tokens=3, logits_processors=[spy]))
    engine.submit(Request(prompts[1], max_tokens=5))
    tokens = collect(engine)[row]
    assert seen[: len(tokens)] == [prompts[0] + tokens[:i] for i in range(len(tokens))]


def test_log_probabilities_are_those_of_the_model(rng, model, tokenizer):
    prompt = prompt_of(rng, model, 5)
    engine = Engine(model, tokenizer)
    engine.submit(Request(prompt, max_tokens=3))
    for response in engine.run():
        logits = np.array(model(mx.array([prompt]))[0, -1], dtype=np.float64)
        wanted = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        np.testing.assert_allclose(np.array(response.logprobs), wanted, atol=1e-4)
        prompt.append(response.token)


def test_an_error_in_a_rows_own_callable_ends_that_row_only(rng, model, tokenizer):
    def broken(tokens, logits):
        if tokens.size > 6:
            raise ZeroDivisionError("mine")
        return logits

    tokenizer.eos_token_ids.clear()  # with which the row might end before
    prompts = [prompt_of(rng, model, 5), prompt_of(rng, model, 5)]
    engine = Engine(model, tokenizer)
    bad = engine.submit(Request(prompts[0], max_tokens=9, logits_processors=[broken]))
    good = engine.submit(Request(prompts[1], max_tokens=9))
    tokens, errors = [], []
    for response in engine.run():
        if response.row == good:
            tokens.append(response.token)
        elif response.error:
            errors.append((response.finish_reason, response.error))
    assert tokens == naive_greedy(model, prompts[1], 9, tokenizer.eos_token_ids)
    assert bad != good
    assert len(errors) == 1
    assert errors[0][0] == "error"
    assert isinstance(errors[0][1], ZeroDivisionError)


def test_end_tokens_stop_strings_and_lengths(rng, model):
    prompt = prompt_of(rng, model, 6)
    plain = naive_greedy(model, prompt, 12)

    def run(end=(), **options):
        tokenizer = WordTokenizer(model.args.vocab_size)
        tokenizer.eos_token_ids = set(end)
        engine = Engine(model, tokenizer)
        engine.submit(Request(prompt, **options))
        responses = list(engine.run())
        return "".join(r.text for r in responses), responses[-1].finish_reason, responses

    text, reason, responses = run(max_tokens=12)
    assert reason == "length"
    assert text == "".join(f"w{t} " for t in plain)
    assert [r.token for r in responses] == plain

    end = plain[4]
    first = plain.index(end)
    text, reason, responses = run(end=[end], max_tokens=12)
    assert reason == "stop"
    assert text == "".join(f"w{t} " for t in plain[:first])
    assert responses[-1].token == end

    stop = f"{plain[2]} w{plain[3]}"
    text, reason, _ = run(max_tokens=12, stop=["never seen", stop])
    assert reason == "stop"
    whole = "".join(f"w{t} " for t in plain)
    assert text == whole[: whole.index(stop)]


def test_stop_strings_hold_back_only_what_may_become_one(rng):
    letters = "ab"
    for _ in range(300):
        text = "".join(rng.choice(list(letters), size=int(rng.integers(0, 12))))
        stops = ["".join(rng.choice(list(letters), size=int(rng.integers(1, 4)))) for _ in range(2)]
        cut = min((text.find(s) for s in stops if s in text), default=None)
        machine, shown, stopped = StopStrings(stops), "", False
        position = 0
        while position < len(text) and not stopped:
            size = int(rng.integers(1, 4))
            part, stopped = machine.feed(text[position : position + size])
            shown += part
            position += size
        if cut is None:
            assert not stopped
            assert shown + machine.flush() == text
        else:
            assert stopped
            # Fed in pieces, the first stop string to be completed ends the text.
            assert text.startswith(shown)
            assert any(text[len(shown) :].startswith(s) for s in stops)


def test_context_limit_ends_with_an_error_or_slides(rng, model, tokenizer):
    tokenizer.eos_token_ids = set()
    prompt = prompt_of(rng, model, 10)
    engine = Engine(model, tokenizer, max_kv_size=14)
    engine.submit(Request(prompt, max_tokens=50))
    responses = list(engine.run())
    # 14 tokens fit; the fifteenth is drawn from them and ends the row.
    assert [r.token for r in responses] == naive_greedy(model, prompt, 5)
    assert [r.finish_reason for r in responses] == [None] * 4 + ["error"]
    assert isinstance(responses[-1].error, ContextLengthError)

    with pytest.raises(ContextLengthError, match="needs 15 tokens and the context holds 14"):
        engine.submit(Request(prompt_of(rng, model, 15)))

    sliding = Engine(model, tokenizer, max_kv_size=14, sliding_window=True)
    sliding.submit(Request(prompt_of(rng, model, 20), max_tokens=50))
    sliding.submit(Request(prompt, max_tokens=30))
    counts = {row: len(tokens) for row, tokens in collect(sliding).items()}
    assert sorted(counts.values()) == [30, 50]


def test_requests_that_cannot_be_honoured(model, tokenizer):
    for request_, message in [
        (Request([]), "empty"),
        (Request([1], max_tokens=0), "max_tokens is 0"),
        (Request([1], max_tokens=-2), "max_tokens is -2"),
        (Request([64]), "ids from 64 to 64"),
        (Request([-1]), "ids from -1"),
        (Request([1], stop="word"), "stop is 'word'"),
        (Request([1], stop=[""]), "stop is"),
        (Request([1], seed=-1), "seed is -1"),
        (Request([1], cache=[]), "prompt cache"),
    ]:
        with pytest.raises(RequestError, match=message):
            Engine(model, tokenizer).submit(request_)


def test_engine_arguments_and_foreign_caches(rng, int8_model, tokenizer):
    model = int8_model
    with pytest.raises(AFMError, match="max_batch is 0"):
        Engine(model, tokenizer, max_batch=0)
    engine = Engine(model, tokenizer)
    with pytest.raises(RequestError, match="holds floats, and this engine int8"):
        engine.submit(Request([1], cache=model.make_cache("float")))


@pytest.mark.parametrize("sliding", [False, True])
def test_reuse_blocks_run_for_one_token_per_row_and_step(
    rng, model, tokenizer, sliding, monkeypatch
):
    """Single, batched, chunked: prompts of any length never pass through the reuse blocks."""
    lengths = []
    read = type(model.model).read

    def spy(self, h, *rest):
        lengths.append(h.shape[1])
        return read(self, h, *rest)

    monkeypatch.setattr(type(model.model), "read", spy)
    tokenizer.eos_token_ids = set()
    for prompts in ([9], [3, 17, 8]):
        engine = Engine(
            model, tokenizer, prefill_step_size=4, max_kv_size=64, sliding_window=sliding
        )
        for length in prompts:
            engine.submit(Request(prompt_of(rng, model, length), max_tokens=3))
        collect(engine)
    assert set(lengths) == {1}
