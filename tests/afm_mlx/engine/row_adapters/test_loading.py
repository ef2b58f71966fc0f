"""Rows wait for their own adapters, for nobody else's, and give them back."""

import gc
import shutil
import time

import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import LOADING_STEP, Engine
from afm_mlx.engine.generation import batch_generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import WAIT, state
from tests.tools.engines import run, some_prompt, tokens_of


def test_rows_that_need_no_file_do_not_wait(rng, make_engine, pool, gate):
    gate.set()
    pool.load("b")
    gate.clear()
    engine = make_engine()
    slow = engine.submit(Request(some_prompt(rng, 5), 4, adapter="a"))
    quick = [engine.submit(Request(some_prompt(rng, 5), 4, adapter=name)) for name in (None, "b")]
    ended = set()
    while len(ended) < 2:
        ended |= {r.row for r in engine.step() if r.finish_reason}
    assert ended == set(quick)
    assert engine.busy
    start, idle = time.monotonic(), 5
    for _ in range(idle):  # it waits in steps, so that new requests have their turn
        assert engine.step() == []
    assert time.monotonic() - start > 0.9 * idle * LOADING_STEP  # and lets others compute
    late = engine.submit(Request(some_prompt(rng, 5), 2))
    assert [r.row for _ in range(3) for r in engine.step()] == [late, late]
    gate.set()
    (answer,) = run(engine).values()
    assert [r.row for r in answer] == [slow] * 4


def test_a_load_that_fails_ends_its_own_rows(rng, make_engine, adapters):
    shutil.rmtree(adapters.folder / "c")
    engine, names = make_engine(), ["a", "c", None, "c", {"a": 1, "c": 1}]
    ids = [engine.submit(Request(some_prompt(rng, 4), 3, adapter=name)) for name in names]
    found = run(engine)
    for row, name in zip(ids, names, strict=True):
        if name in ("a", None):
            assert [r.finish_reason for r in found[row]] == [None, None, "length"]
            continue
        (response,) = found[row]
        assert (response.token, response.text, response.finish_reason) == (-1, "", "error")
        assert isinstance(response.error, CheckpointError)
        assert "moved or deleted" in str(response.error)
    engine.submit(Request(some_prompt(rng, 4), 2, adapter="b"))
    assert len(next(iter(run(engine).values()))) == 2


def test_a_load_that_fails_at_once_is_a_response_too(make_engine, pool, adapters, monkeypatch):
    shutil.rmtree(adapters.folder / "c")
    request = pool.request

    def failed(adapter):
        lease = request(adapter)
        assert lease.wait(WAIT)
        return lease

    monkeypatch.setattr(pool, "request", failed)
    engine = make_engine()
    row = engine.submit(Request([1, 2], 3, adapter="c"))
    ((response,),) = run(engine).values()
    assert (response.row, response.finish_reason) == (row, "error")


def test_generate_raises_what_loading_has_raised(model, tokenizer, pool, adapters):
    shutil.rmtree(adapters.folder / "b")
    with pytest.raises(CheckpointError, match="moved or deleted"):
        next(stream_generate(model, tokenizer, [1, 2], adapter="b", adapters=pool))
    with pytest.raises(CheckpointError, match="moved or deleted"):
        batch_generate(model, tokenizer, [[1], [2]], adapter=[None, "b"], adapters=pool)


def test_rows_of_one_adapter_are_gathered_before_it_is_evicted(rng, model, tokenizer, adapters):
    """When the pool has no room for all, each is loaded once."""
    names = "abcdefgh"
    prompts = [some_prompt(rng, length) for length in rng.integers(2, 9, 3 * len(names))]
    with AdapterPool(model) as plenty:
        for name in names:
            adapters.add(plenty, name, 2)
        sizes, answers = [plenty.load(name).nbytes for name in names], []
        with AdapterPool(model, budget=2 * max(sizes)) as scarce:
            for name in names:
                scarce.register(name, adapters.folder / name)
            for pool in (plenty, scarce):
                engine = Engine(model, tokenizer, adapters=pool)
                for i, prompt in enumerate(prompts):  # each needs another one than the one before
                    engine.submit(Request(prompt, 3 + i % 4, adapter=names[i % len(names)]))
                answers.append(tokens_of(run(engine)))
            assert answers[0] == answers[1]
            assert scarce.describe()["loads"] == len(names)


@pytest.mark.parametrize("when", ["loading", "waiting", "prefill", "decode"])
def test_cancelled_rows_give_their_adapters_back(rng, make_engine, pool, gate, when):
    engine = make_engine(max_batch=2, prefill_step_size=2)
    if when != "loading":
        gate.set()
        pool.load("a")
    if when == "waiting":
        for _ in range(2):
            engine.submit(Request(some_prompt(rng, 3), 9))
    other = engine.submit(Request(some_prompt(rng, 9), 9))
    row = engine.submit(Request(some_prompt(rng, 9), 9, adapter="a"))
    for _ in range({"loading": 2, "waiting": 3, "prefill": 2, "decode": 7}[when]):
        engine.step()
    found = state(pool, "a")
    assert found["rows"] + found["waiting"] == 1
    engine.cancel(row)
    answers = run(engine)
    assert row not in answers
    assert answers[other][-1].finish_reason == "length"
    gate.set()
    assert pool.load("a").rank == 4
    pool.unload("a")


def test_an_engine_that_is_dropped_gives_its_adapters_back(model, tokenizer, pool):
    stream = stream_generate(model, tokenizer, [1, 2], adapter="a", adapters=pool, max_tokens=9)
    next(stream)
    with pytest.raises(RequestError, match="in use"):
        pool.unload("a")
    del stream
    gc.collect()
    pool.unload("a")
    assert pool.resident == []
