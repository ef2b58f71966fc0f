"""The engine against a naive loop that recomputes everything at each step."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import make_sampler

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import ContextLengthError, RequestError, TokenizerError
from tests.tools.cases import each
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import (
    logprobs_of,
    naive_greedy,
    run,
    run_one,
    some_prompt,
    wanted_logprobs,
)


@pytest.mark.parametrize(("max_batch", "step"), [(1, 1), (2, 3), (8, 2), (8, 2048)])
def test_ragged_rows_equal_the_naive_loop(rng, model, tokenizer, max_batch, step):
    """Also those that nobody wants log-probabilities of, which skip the logits if all rows of a batch do."""
    prompts = [some_prompt(rng, n) for n in (1, 2, *rng.integers(3, 20, 3))]
    limits = rng.integers(1, 15, 5).tolist()
    wanted = [naive_greedy(model, *each) for each in zip(prompts, limits, strict=True)]
    for logprobs in ([False] * 5, [True, False, True, False, False]):
        engine = Engine(model, tokenizer, max_batch=max_batch, prefill_step_size=step)
        for prompt, limit, some in zip(prompts, limits, logprobs, strict=True):
            engine.submit(Request(prompt, limit, logprobs=some))
        for row, responses in run(engine).items():
            assert [r.token for r in responses] == wanted[row]
            assert {r.logprobs is not None for r in responses} == {logprobs[row]}


def test_rows_join_late_leave_early_and_are_cancelled(rng, model, tokenizer):
    prompts = [some_prompt(rng, n) for n in (4, 9, 1, 6)]
    wanted = [naive_greedy(model, prompt, 9 - i) for i, prompt in enumerate(prompts)]
    for cancelled_at in range(4, 10):
        engine = Engine(model, tokenizer, prefill_step_size=3)
        tokens = [[], [], [], []]
        for turn in range(40):
            if turn % 4 == 0 and turn < 16:
                engine.submit(Request(prompts[turn // 4], 9 - turn // 4))
            if turn == cancelled_at:
                engine.cancel(1)
            for response in engine.step():
                tokens[response.row].append(response.token)
        assert not engine.busy
        cut = len(tokens[1])
        assert cut <= cancelled_at - 4
        assert tokens == [wanted[0], wanted[1][:cut], *wanted[2:]]


def test_the_next_step_is_submitted_before_the_last_token_is_read(rng, model, tokenizer, events):
    engine = Engine(model, tokenizer)
    engine.submit(Request(some_prompt(rng, 3), max_tokens=4))
    for _ in range(3):
        engine.step()
    assert events[:5] == ["submit", "submit", "read", "submit", "read"]


def test_a_rows_random_stream_is_its_own(rng, model, tokenizer):
    prompt, sampler = some_prompt(rng, 5), make_sampler(temp=1.0, top_p=0.9)

    def answer(seed, company=0):
        engine = Engine(model, tokenizer)
        for i in range(company):
            engine.submit(Request(some_prompt(rng, 4), 12, sampler, seed=900 + i))
        row = engine.submit(Request(prompt, 12, sampler, seed))
        return [r.token for r in run(engine)[row]]

    state = mx.random.state[0].tolist()
    assert answer(1) == answer(1, company=3) != answer(2)
    assert mx.random.state[0].tolist() == state
    drawn = []
    for seed in (3, 3, 4):
        mx.random.seed(seed)
        drawn.append(answer(None))
    assert drawn[0] == drawn[1] != drawn[2], "without a seed, MLX's own stream decides"


def test_logits_processors_see_their_own_rows_tokens(rng, model, tokenizer):
    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    prompt = some_prompt(rng, 6)
    engine = Engine(model, tokenizer)
    row = engine.submit(Request(prompt, max_tokens=3, logits_processors=[spy]))
    engine.submit(Request(some_prompt(rng, 2), max_tokens=5))
    responses = run(engine)[row]
    tokens = [r.token for r in responses]
    assert seen[:3] == [prompt + tokens[:i] for i in range(3)]
    wanted = wanted_logprobs(model, prompt, tokens)
    np.testing.assert_allclose(logprobs_of(responses), wanted, atol=1e-4)


def test_a_token_without_text_ends_its_row_only(rng):
    """A model may have more logits than its tokenizer has tokens."""
    model, tokenizer = wide_model(rng), nano_tokenizer()
    width, size = model.args.vocab_size, tokenizer.vocab_size

    def forced(token):
        return lambda tokens, logits: mx.where(mx.arange(width) == token, logits, -mx.inf)

    engine = Engine(model, tokenizer)
    prompt = some_prompt(rng, 5)
    rows = {
        token: engine.submit(Request(prompt, max_tokens=9, logits_processors=[forced(token)]))
        for token in (size - 1, size, width - 1)
    }
    found = run(engine)
    assert [r.token for r in found[rows[size - 1]]] == [size - 1] * 9
    for token in (size, width - 1):
        (response,) = found[rows[token]]
        assert (response.token, response.text, response.finish_reason) == (token, "", "error")
        assert isinstance(response.error, TokenizerError)


def test_end_tokens_stop_strings_and_lengths(rng, model, tokenizer):
    prompt = some_prompt(rng, 6)
    plain = naive_greedy(model, prompt, 12)
    whole = tokenizer.decode(plain)

    def answer(**options):
        responses = run_one(model, tokenizer, Request(prompt, 12, **options))
        return "".join(r.text for r in responses), responses[-1].finish_reason, responses[-1].token

    assert answer() == (whole, "length", plain[-1])
    stop = f"{plain[2]} w{plain[3]}"
    assert answer(stop=["never seen", stop])[:2] == (whole[: whole.index(stop)], "stop")
    tokenizer.eos_token_ids.add(plain[4])
    shown = tokenizer.decode(plain[: plain.index(plain[4])])
    assert answer() == (shown, "stop", plain[4])


def test_a_full_context_ends_with_an_error_or_slides(rng, model, tokenizer):
    prompt = some_prompt(rng, 10)
    responses = run_one(model, tokenizer, Request(prompt, max_tokens=50), max_kv_size=14)
    # 14 tokens fit; the fifteenth is drawn from them and ends the row.
    assert [r.token for r in responses] == naive_greedy(model, prompt, 5)
    assert [r.finish_reason for r in responses] == [None] * 4 + ["error"]
    assert isinstance(responses[-1].error, ContextLengthError)
    with pytest.raises(ContextLengthError, match="needs 15 tokens and the context holds 14"):
        run_one(model, tokenizer, Request(some_prompt(rng, 15)), max_kv_size=14)

    sliding = Engine(model, tokenizer, max_kv_size=14, sliding_window=True)
    sliding.submit(Request(some_prompt(rng, 20), max_tokens=50))
    sliding.submit(Request(prompt, max_tokens=30))
    assert [len(responses) for _, responses in sorted(run(sliding).items())] == [50, 30]


@each("option", ["max_batch", "prefill_step_size", "max_kv_size"])
def test_sizes_below_one_are_refused(model, tokenizer, option):
    with pytest.raises(RequestError, match=f"{option} is 0; an integer of 1 or more"):
        Engine(model, tokenizer, **{option: 0})


@pytest.mark.parametrize("sliding", [False, True])
def test_reuse_blocks_run_for_one_token_per_row_and_step(
    rng, model, tokenizer, sliding, monkeypatch
):
    lengths = []
    block = type(model.model.kv_reuse_layers[0])
    run_block = block.__call__

    def spy(self, x, *rest):
        lengths.append(x.shape[1])
        return run_block(self, x, *rest)

    monkeypatch.setattr(block, "__call__", spy)
    options = {"prefill_step_size": 4, "max_kv_size": 64, "sliding_window": sliding}
    for prompts in ([9], [3, 17, 8]):
        engine = Engine(model, tokenizer, **options)
        for length in prompts:
            engine.submit(Request(some_prompt(rng, length), max_tokens=3))
        run(engine)
    assert set(lengths) == {1}
