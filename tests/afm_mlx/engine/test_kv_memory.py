"""Rows start only when the keys and values that they may come to need have room in the budget."""

import pytest

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import RequestError
from afm_mlx.model.kv_cache import STEP, TAIL
from tests.tools.engines import SIZES, naive_greedy, run, some_prompt, tiny
from tests.tools.zoo import zoo_model

SMALLEST = STEP + TAIL  # columns of a row with few tokens


def bytes_of_a_token(model, tokenizer):
    """What the cache grows by."""
    cache = Engine(model, tokenizer).make_cache()
    engine = Engine(model, tokenizer)
    engine.submit(Request([1, 2, 3], 2, cache=cache))
    run(engine)
    return sum(a.nbytes // a.shape[2] for entry in cache for a in list(entry.state)[:2])


@pytest.mark.parametrize("kind", ["int8", "float", "zoo"])
def test_rows_wait_for_memory_and_never_take_more(rng, tokenizer, kind):
    zoo = zoo_model("llama", SIZES["vocab_size"], 3) if kind == "zoo" else None
    model = zoo or tiny(rng, kv_bits=8 if kind == "int8" else None)
    a_row = SMALLEST * bytes_of_a_token(model, tokenizer)
    engine = Engine(model, tokenizer, kv_memory=3 * a_row, prefill_step_size=16)
    asked = [(some_prompt(rng, n), count) for n, count in ((3, 9), (150, 4), (7, 30), (250, 12))]
    asked += [(some_prompt(rng, 5), 6) for _ in range(4)]  # the fourth one alone needs more columns
    wanted = {engine.submit(Request(p, n, logprobs=False)): (p, n) for p, n in asked}
    assert (engine.rows_waiting, engine.rows_running, engine.kv_bytes) == (8, 0, 0)
    told, most = {}, 0
    while engine.busy:
        for response in engine.step():
            told.setdefault(response.row, []).append(response.token)
        most = max(most, engine.rows_running)
        assert engine.kv_bytes <= 3 * a_row
        if 3 in told and len(told[3]) < 12:
            assert engine.rows_running == 1  # two rows of 512 columns are too many
    assert most == 3
    for row, (prompt, count) in list(wanted.items())[:3]:
        assert told[row] == naive_greedy(model, prompt, count)
    assert (engine.rows_waiting, engine.rows_running, engine.kv_tokens) == (0, 0, 0)


def test_what_could_never_fit_is_refused(rng, model, tokenizer):
    a_row = SMALLEST * bytes_of_a_token(model, tokenizer)
    engine = Engine(model, tokenizer, kv_memory=a_row)
    for request in (
        Request([1], STEP),
        Request(some_prompt(rng, STEP), 1),
        Request([1], -1),  # the context has 512 tokens
    ):
        with pytest.raises(RequestError, match="kv_memory"):
            engine.submit(request)
    assert not engine.busy
    assert len(run(engine)) == 0
    engine.submit(Request([1], STEP - 1))
    bounded = Engine(model, tokenizer, kv_memory=a_row, max_kv_size=100)
    bounded.submit(Request([1], -1))
    window = {"max_kv_size": 32, "sliding_window": True}
    slides = Engine(model, tokenizer, kv_memory=2 * a_row, prefill_step_size=8, **window)
    slides.submit(Request([1] * 300, -1, logprobs=False))
    for _ in range(100):
        slides.step()
        assert slides.kv_bytes <= 2 * a_row
    with pytest.raises(RequestError, match="smallest cache"):
        Engine(model, tokenizer, kv_memory=a_row - 1)
    zoo = zoo_model("llama", SIZES["vocab_size"], 3)
    with pytest.raises(RequestError, match="a row needs a limit"):
        Engine(zoo, tokenizer, kv_memory=1 << 30).submit(Request([1], -1))
    zoo = zoo_model("qwen3", SIZES["vocab_size"], 3)
    with pytest.raises(RequestError, match="RotatingKVCache"):
        Engine(zoo, tokenizer, kv_memory=1 << 30, max_kv_size=64)
