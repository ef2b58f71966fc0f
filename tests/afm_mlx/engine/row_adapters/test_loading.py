"""Rows wait for their own adapters, for nobody else's, and give them back."""

import gc
import shutil
import time

import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import LOADING_STEP, Engine
from afm_mlx.engine.generation import stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import WAIT
from tests.tools.engines import Adapters, run, some_prompt


def test_rows_that_need_no_file_do_not_wait(rng, model, tokenizer, setup, gate):
    pool, _ = setup
    gate.set()
    pool.load("b")
    gate.clear()
    engine = Engine(model, tokenizer, adapters=pool)
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


def test_a_load_that_fails_ends_its_own_rows(rng, model, tokenizer, setup):
    pool, adapters = setup
    shutil.rmtree(adapters.folder / "c")
    engine = Engine(model, tokenizer, adapters=pool)
    names = ["a", "c", None, "c", {"a": 1, "c": 1}]
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


def test_a_load_that_fails_at_once_is_a_response_too(rng, model, tokenizer, setup, monkeypatch):
    pool, adapters = setup
    shutil.rmtree(adapters.folder / "c")
    request = pool.request

    def failed(adapter):
        lease = request(adapter)
        assert lease.wait(WAIT)
        return lease

    monkeypatch.setattr(pool, "request", failed)
    engine = Engine(model, tokenizer, adapters=pool)
    row = engine.submit(Request(some_prompt(rng, 4), 3, adapter="c"))
    ((response,),) = run(engine).values()
    assert (response.row, response.finish_reason) == (row, "error")


def test_a_folder_that_is_deleted_while_rows_use_it(rng, model, tokenizer, setup):
    pool, adapters = setup
    prompt = some_prompt(rng, 5)
    engine = Engine(model, tokenizer, adapters=pool)
    engine.submit(Request(prompt, 6, adapter="a"))
    (before,) = run(engine).values()
    row = engine.submit(Request(prompt, 6, adapter="a"))
    tokens = [r.token for r in (*engine.step(), *engine.step())]
    shutil.rmtree(adapters.folder / "a")
    again = engine.submit(Request(prompt, 6, adapter="a"))
    found = run(engine)
    assert tokens + [r.token for r in found[row]] == [r.token for r in before]
    assert [r.token for r in found[again]] == [r.token for r in before]
    pool.unload("a")
    engine.submit(Request(prompt, 6, adapter="a"))
    engine.submit(Request(prompt, 6, adapter="b"))
    lost, other = run(engine).values()
    assert "moved or deleted" in str(lost[0].error)
    assert len(other) == 6


@pytest.mark.parametrize("room", [1, 2])
def test_a_small_budget_makes_rows_take_turns(rng, model, tokenizer, tmp_path, room):
    adapters = Adapters(model, rng, tmp_path)
    with AdapterPool(model) as measured:
        adapters.add(measured, "s", 4)
        size = measured.load("s").nbytes
    pool = AdapterPool(model, budget=room * size)
    for name in "abcd":
        adapters.add(pool, name, 4)
    engine = Engine(model, tokenizer, adapters=pool)
    prompt = some_prompt(rng, 4)
    names = ["abcd"[i] for i in rng.integers(0, 4, 12)]
    ids = [engine.submit(Request(prompt, 3, adapter=name)) for name in names]
    found = {}
    while engine.busy:
        assert pool.nbytes <= room * size
        for response in engine.step():
            found.setdefault(response.row, []).append(response)
    answers = {}
    for row, name in zip(ids, names, strict=True):
        tokens = [r.token for r in found[row]]
        assert len(tokens) == 3
        assert answers.setdefault(name, tokens) == tokens
    adapters.add(pool, "large", 9 * room)
    row = engine.submit(Request(prompt, 3, adapter="large"))
    (response,) = run(engine)[row]
    assert f"budget is {room * size:,}" in str(response.error)
    pool.close()


@pytest.mark.parametrize("when", ["loading", "waiting", "prefill", "decode"])
def test_cancelled_rows_give_their_adapters_back(rng, model, tokenizer, setup, gate, when):
    pool, _ = setup
    engine = Engine(model, tokenizer, max_batch=2, prefill_step_size=2, adapters=pool)
    if when != "loading":
        gate.set()
        pool.load("a")
    if when == "waiting":
        for _ in range(2):
            engine.submit(Request(some_prompt(rng, 3), 9))
    others = [engine.submit(Request(some_prompt(rng, 9), 9))]
    row = engine.submit(Request(some_prompt(rng, 9), 9, adapter="a"))
    for _ in range({"loading": 2, "waiting": 3, "prefill": 2, "decode": 7}[when]):
        engine.step()
    found = {e["name"]: e for e in pool.describe()["adapters"]}["a"]
    assert found["rows"] + found["waiting"] == 1
    engine.cancel(row)
    answers = run(engine)
    assert row not in answers
    assert answers[others[0]][-1].finish_reason == "length"
    gate.set()
    assert pool.load("a").rank == 4
    pool.unload("a")


def test_an_engine_that_is_dropped_gives_its_adapters_back(rng, model, tokenizer, setup):
    pool, _ = setup
    stream = stream_generate(
        model, tokenizer, some_prompt(rng, 4), adapter="a", adapters=pool, max_tokens=9
    )
    next(stream)
    with pytest.raises(RequestError, match="in use"):
        pool.unload("a")
    del stream
    gc.collect()
    pool.unload("a")
    assert pool.resident == []
