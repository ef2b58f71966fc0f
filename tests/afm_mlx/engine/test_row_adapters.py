"""Rows with adapters: they wait for their own loads, run as if each were alone, and keep caches apart."""

import gc
import os
import shutil
import time
from collections import deque
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters, attach_adapter, detach_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import LOADING_STEP, Engine
from afm_mlx.engine.generation import batch_generate, generate, stream_generate
from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.engine.request import Request
from afm_mlx.engine.scheduler import PATIENCE
from afm_mlx.errors import CacheFileError, CheckpointError, RequestError
from afm_mlx.kernels import MAX_ADAPTERS
from afm_mlx.model.model import Model
from tests.tools.adapters import SIZES, WAIT, gated_reads, memory_falls_to, state
from tests.tools.compare import assert_close, assert_same, same
from tests.tools.engines import (
    BITS,
    Adapters,
    forced,
    logprobs_of,
    run,
    run_one,
    some_prompt,
    tiny,
    tokens_of,
    wanted_logprobs,
)
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model


@pytest.fixture
def model(request, rng):
    """A model of float weights, keys and values, or of the kind and the bits that a parameter says."""
    kind, kv_bits = getattr(request, "param", ("float", None))
    if kind == "llama":
        return zoo_model(kind, SIZES["vocab_size"], int(rng.integers(2**31)))
    return tiny(rng, kind, kv_bits)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    return tokenizer


@pytest.fixture
def adapters(model, rng, tmp_path):
    return Adapters(model, rng, tmp_path)


@pytest.fixture
def pool(model, adapters):
    """A pool with the adapters a to d, of ranks 4, 4, 8 and 3."""
    with AdapterPool(model) as pool:
        for name, rank in zip("abcd", (4, 4, 8, 3), strict=True):
            adapters.add(pool, name, rank)
        yield pool


@pytest.fixture
def make_engine(model, tokenizer, pool):
    return lambda **options: Engine(model, tokenizer, adapters=pool, **options)


@pytest.fixture
def gate(monkeypatch):
    """Reads wait until it is opened."""
    with gated_reads(monkeypatch) as gate:
        yield gate


# -- requests


def test_requests_that_can_not_be_honoured(make_engine, pool):
    engine = make_engine()
    for options, words in (
        ({"adapter": "z"}, "no adapter 'z'; registered are a, b, c, d"),
        ({"adapter": {"a": float("inf")}}, "weight of the adapter 'a' is inf"),
        ({"adapter": 3}, "a registered name, weights by name, or None"),
        ({"adapter": "a", "max_tokens": -2}, "max_tokens is -2"),
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


# -- loading


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


def test_rows_of_one_adapter_are_gathered_before_it_is_evicted(rng, model, tokenizer, adapters):
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


# -- batches


@pytest.mark.parametrize("model", [(kind, kv) for kind in BITS for kv in (8, None)], indirect=True)
def test_a_mixed_batch_is_its_rows_one_by_one(rng, make_engine, model, pool, adapters):
    # Keys and values on the boundary of two int8 codes may fall to either side.
    int8 = model.args.kv_bits == 8
    # So may activations between two of the 16-bit integers that packed layers multiply: ragged prompts have
    # another attention than a prompt alone.
    allowed = 0.1 if int8 else 1e-3
    adapters.add(pool, "r32", 32)
    adapters.add(pool, "few", 5, keys="up_proj")
    named, unnamed = {"c": 0.5, "d": -0.3}, {"r32": 0.4, "few": 1}
    pool.register("sum", named)
    # What each row asks for, and the weights that it means.
    rows = [(name, {name: 1}) for name in ("a", "c", "r32", "few", "a")]
    rows += [(None, {}), (None, {}), ("sum", named), (unnamed, unnamed)]
    rng.shuffle(rows)
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 14, len(rows))]
    answers = [some_prompt(rng, n) for n in rng.integers(2, 8, len(rows))]

    def together(indices):
        options = {"kv": "int8" if int8 else "float", "prefill_step_size": 5}
        engine = make_engine(max_batch=len(rows), **options)
        for i in indices:
            sampler, adapter = forced(answers[i]), rows[i][0]
            engine.submit(Request(prompts[i], len(answers[i]), sampler, adapter=adapter))
        return [logprobs_of(responses) for _, responses in sorted(run(engine).items())]

    differences = []
    for i, mixed in enumerate(together(range(len(rows)))):
        (alone,) = together([i])
        assert np.abs(mixed - alone).max() < allowed
        wanted = wanted_logprobs(adapters.merged(rows[i][1]), prompts[i], answers[i])
        assert_close(mixed, wanted, 0.05 if int8 else 1e-3, rows[i], least=1)
        if rows[i][1]:
            plain = wanted_logprobs(model, prompts[i], answers[i])
            differences.append(np.abs(mixed - plain).max())
    assert max(differences) > 0.5


@pytest.mark.parametrize("model", [("float", None), ("llama", None)], indirect=True)
def test_rows_with_adapters_join_and_leave(rng, make_engine, pool, model, tokenizer):
    requests = [
        Request(
            some_prompt(rng, rng.integers(1, 9)),
            int(rng.integers(1, 9)),
            adapter=["a", "b", "c", "d", None][rng.integers(5)],
        )
        for _ in range(12)
    ]
    engine, ids, found = make_engine(max_batch=3, prefill_step_size=3), [], {}
    while engine.busy or len(ids) < 12:
        if len(ids) < 12:
            ids.append(engine.submit(requests[len(ids)]))
        for response in engine.step():
            found.setdefault(response.row, []).append(response)
    for row, request in zip(ids, requests, strict=True):
        alone = run_one(model, tokenizer, request, adapters=pool)
        assert tokens_of(found)[row] == [r.token for r in alone]
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


@pytest.fixture
def many(pool, adapters):
    """Names of more loaded adapters than run side by side."""
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 3)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    return names


def test_more_adapters_than_run_side_by_side(
    rng, model, tokenizer, pool, make_engine, many, monkeypatch
):
    most, of = [], BatchAdapters.of
    monkeypatch.setattr(BatchAdapters, "of", lambda rows: (most.append(len(rows)), of(rows))[1])
    engine, prompt = make_engine(max_batch=16), some_prompt(rng, 4)
    names = [*many, None, many[0]]
    ids = [engine.submit(Request(prompt, 3, adapter=name)) for name in names]
    found = tokens_of(run(engine))
    assert max(most) == MAX_ADAPTERS + 2  # the row without, and one adapter twice
    for row, name in zip(ids, names, strict=True):
        alone = run_one(model, tokenizer, Request(prompt, 3, adapter=name), adapters=pool)
        assert found[row] == [r.token for r in alone]


def test_rows_of_one_adapter_too_many_are_overtaken_for_a_while_only(make_engine, many):
    engine = make_engine(max_batch=32)

    def submit(name, count):
        return engine.submit(Request([1, 2], count, adapter=name, logprobs=False))

    # Two rows each, of which one always goes on when the other one ends.
    row_of = {submit(name, count): name for name in many[:MAX_ADAPTERS] for count in (3, 6)}
    engine.step()
    last, ended = submit(many[-1], 1), 0
    for _ in range(100):
        responses = engine.step()
        if any(response.row == last for response in responses):
            break
        for response in responses:
            if response.finish_reason is not None:
                ended += 1
                name = row_of.pop(response.row)
                row_of[submit(name, 6)] = name
    else:
        pytest.fail(f"the row has not started after {ended} others")
    assert PATIENCE <= ended <= PATIENCE + 4 * MAX_ADAPTERS


# -- prompt caches


def filled(engine, rng, adapter):
    cache = engine.make_cache()
    engine.submit(Request(some_prompt(rng, 6), 2, cache=cache, adapter=adapter))
    assert all(r.error is None for r in engine.run())
    return cache


def test_prompt_caches_never_cross_adapters(rng, make_engine, pool):
    engine = make_engine()
    kinds = [None, "a", "b", {"a": 0.5, "b": 0.5}]
    caches = [filled(engine, rng, kind) for kind in kinds]
    prints = [pool.load(kind).fingerprint if kind else "no adapter" for kind in kinds]
    for i, cache in enumerate(caches):
        before = cache[0].copy().state
        for j in {0, 1, 2, 3} - {i}:
            with pytest.raises(
                RequestError, match=f"was filled under .*{prints[i]}.* runs with .*{prints[j]}"
            ):
                engine.submit(Request([1, 2], 1, adapter=kinds[j], cache=cache))
        assert all(same(x, y) for x, y in zip(before, cache[0].state, strict=True))
    with pytest.raises(RequestError, match=r"was filled under the adapter a \("):
        engine.submit(Request([1, 2], 1, cache=caches[1]))
    for kind, cache in zip(kinds, caches, strict=True):
        length = cache[0].lengths[0]
        engine.submit(Request(some_prompt(rng, 2), 2, adapter=kind, cache=cache))
        assert all(r.error is None for r in engine.run())
        assert cache[0].lengths[0] == length + 3
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_an_adapter_that_is_not_loaded_yet_is_compared_when_it_is(rng, make_engine, pool):
    engine = make_engine()
    cache = filled(engine, rng, "a")
    wrong = engine.submit(Request([1], 2, adapter="b", cache=cache))
    pool.unload("a")
    right = engine.submit(Request([1], 2, adapter="a", cache=cache))
    found = run(engine)
    (response,) = found[wrong]
    assert isinstance(response.error, RequestError)
    assert "was filled under the adapter a (" in str(response.error)
    assert [r.error for r in found[right]] == [None, None]
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_copies_and_files_of_caches_keep_their_adapter(rng, model, make_engine, pool, tmp_path):
    engine = make_engine()
    cache, path = filled(engine, rng, "a"), tmp_path / "cache.safetensors"
    fingerprint = pool.load("a").fingerprint
    assert cache[0].copy().adapter == fingerprint
    save_prompt_cache(path, cache, model)
    with pytest.raises(CacheFileError, match=f"another adapter.*{fingerprint}.* has none"):
        load_prompt_cache(path, model)
    with pytest.raises(CacheFileError, match="filled under the adapter"):
        save_prompt_cache(path, cache, model, adapter=pool.load("b").fingerprint)
    loaded, _ = load_prompt_cache(path, model, adapter=fingerprint)
    for wrong in (None, "b"):
        with pytest.raises(RequestError, match="filled under the adapter a"):
            engine.submit(Request([1], 2, adapter=wrong, cache=loaded))
    for each in (cache, loaded):
        engine.submit(Request([1, 2], 4, adapter="a", cache=each))
    first, second = tokens_of(run(engine)).values()
    assert first == second


def test_caches_of_an_attached_adapter(rng, model, tokenizer, make_engine, pool, adapters):
    attach_adapter(model, adapters.folder / "a")
    engine = Engine(model, tokenizer)
    cache = filled(engine, rng, None)
    detach_adapter(model)
    with pytest.raises(RequestError, match=r"was filled under .* runs with no adapter"):
        engine.submit(Request([1], 2, cache=cache))
    mine = make_engine()
    pool.load("a")
    mine.submit(Request([1], 2, cache=cache, adapter="a"))
    assert all(r.error is None for r in mine.run())


# -- memory

STATISTICS = Path("/proc/self/statm")


def taken():
    """Bytes of MLX's arrays, and of all the process."""
    gc.collect()
    pages = int(STATISTICS.read_text().split()[1])
    return mx.get_active_memory(), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.skipif(not STATISTICS.exists(), reason="reads Linux's statistics")
@pytest.mark.parametrize(
    ("model", "count", "allowed"),
    [
        (("2-bit", 8), 300, 4e6),
        (("2-bit", None), 60, 4e6),
        pytest.param(("2-bit", 8), 10_000, 8e6, marks=pytest.mark.slow),
    ],
    indirect=["model"],
)
def test_swapping_leaks_nothing(rng, model, make_engine, monkeypatch, count, allowed):
    traced, forward = [], Model.forward
    monkeypatch.setattr(
        Model, "forward", lambda self, *args: (traced.append(1), forward(self, *args))[1]
    )
    engine, prompt, names = make_engine(), some_prompt(rng, 3), ["a", "b", "c", None, "d"]

    def swap(i):
        engine.submit(Request(prompt, 2, adapter=names[i % 5]))
        return logprobs_of(list(engine.run()))

    first = deque(map(swap, range(20)), maxlen=5)
    before, traced[:] = taken(), []
    last = deque(map(swap, range(count)), maxlen=5)
    after = taken()
    for one, other in zip(first, last, strict=True):
        assert_same(one, other)
    assert after[0] == before[0]
    assert after[1] - before[1] < allowed
    if model.args.kv_bits:  # steps over int8 caches are traced once for each layout
        assert not traced


@pytest.mark.usefixtures("exact_memory")
def test_loading_again_and_again_leaks_nothing(make_engine, pool):
    engine = make_engine()

    def answer(adapter):
        engine.submit(Request([1, 2], 2, adapter=adapter))
        assert all(r.error is None for r in engine.run())

    # The traces of their layouts stay, with some hundred bytes of constants each.
    for name in (None, *"abcd"):
        answer(name)
        if name is not None:
            pool.unload(name)
    gc.collect()
    before = mx.get_active_memory()
    for name in 3 * "abcd":
        answer(name)
        assert mx.get_active_memory() > before
        pool.unload(name)
        memory_falls_to(before)
    assert pool.describe()["loads"] == 16
