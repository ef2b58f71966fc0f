"""Rows with adapters of their own: each runs as if it were alone, and waits for nobody else's files."""

import copy
import gc
import os
import shutil
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import row_adapters
from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.places import places
from afm_mlx.adapters.pool import PATIENCE, AdapterPool
from afm_mlx.adapters.sources import OpenAdapter
from afm_mlx.engine import LOADING_STEP, Engine
from afm_mlx.errors import CacheFileError, CheckpointError, RequestError
from afm_mlx.generation import batch_generate, generate, stream_generate
from afm_mlx.kernels import MAX_ADAPTERS
from afm_mlx.model import Model
from afm_mlx.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.quantization import QuantizationRule, dequantize_model, quantize_model
from afm_mlx.request import Request
from tests.tools.adapters import SIZES, draw_tensors, write_folder
from tests.tools.models import WordTokenizer, random_config, random_model
from tests.tools.zoo import zoo_model

WAIT = 20  # seconds until a test gives up on another thread
BITS = {"float": None, "2-bit": 2, "4-bit": 4}


def tiny(rng, kind="float", kv_bits=None):
    model = random_model(random_config(rng, **SIZES, kv_bits=kv_bits), rng)
    if BITS[kind]:
        quantize_model(model, {}, QuantizationRule(BITS[kind]), QuantizationRule(4))
    return model.eval()


@pytest.fixture
def model(rng):
    return tiny(rng)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    return tokenizer


class Adapters:
    """Random adapters in folders, and what each adds to each matrix."""

    def __init__(self, model, rng, folder):
        self.model, self.rng, self.folder = model, rng, folder
        self.added = {}

    def add(self, pool, name, rank, keys=""):
        scale = float(self.rng.uniform(0.3, 1))
        tensors = draw_tensors(self.model, self.rng, rank, keys)
        write_folder(self.folder / name, tensors, scale)
        self.added[name] = scale, tensors
        pool.register(name, self.folder / name)

    def merged(self, weights):
        """A float model whose weights have the adapters added: the definition."""
        model = dequantize_model(copy.deepcopy(self.model))
        for name, weight in weights.items():
            scale, tensors = self.added[name]
            for place in places(model):
                parts = []
                for end, (inputs, outputs) in place.shapes.items():
                    a = tensors.get(f"{place.path}.lora_a{end}", np.zeros((inputs, 1)))
                    b = tensors.get(f"{place.path}.lora_b{end}", np.zeros((1, outputs)))
                    parts.append((a.astype(np.float64) @ b.astype(np.float64)).T)
                delta = weight * scale * np.concatenate(parts)
                place.linear.weight = place.linear.weight + mx.array(delta.astype(np.float32))
        return model.eval()


@pytest.fixture
def setup(model, rng, tmp_path):
    """A pool with the adapters a to d, of ranks 4, 4, 8 and 3, and its folders."""
    pool = AdapterPool(model)
    adapters = Adapters(model, rng, tmp_path)
    for name, rank in zip("abcd", (4, 4, 8, 3), strict=True):
        adapters.add(pool, name, rank)
    yield pool, adapters
    pool.close()


@pytest.fixture
def gate(monkeypatch):
    """Reads wait until it is opened."""
    opened, read = threading.Event(), OpenAdapter.read

    def gated(self):
        assert opened.wait(WAIT)
        return read(self)

    monkeypatch.setattr(OpenAdapter, "read", gated)
    yield opened
    opened.set()


def some_prompt(rng, length):
    return rng.integers(0, SIZES["vocab_size"], int(length)).tolist()


def forced(tokens):
    """A sampler that takes these tokens, so that runs with other rounding see the same ones."""
    left = list(tokens)
    return lambda logprobs: mx.array([left.pop(0)])


def run(engine):
    """Responses by row."""
    found = {}
    for response in engine.run():
        found.setdefault(response.row, []).append(response)
    return found


def logprobs_of(responses):
    assert all(r.error is None for r in responses), responses[-1].error
    return np.stack([np.array(r.logprobs, np.float64) for r in responses])


def wanted_logprobs(model, prompt, tokens):
    logits = np.array(model(mx.array([prompt + tokens]))[0], np.float64)[len(prompt) - 1 : -1]
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# -- the same as alone


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", BITS)
def test_a_mixed_batch_is_its_rows_one_by_one(rng, tokenizer, tmp_path, kind, kv):
    """Ragged prompts; none, ranks 8, 16 and 32, one on few layers, sums with a name and without."""
    # Keys and values on the boundary of two int8 codes may fall to either side.
    int8 = kv == "int8"
    model = tiny(rng, kind, 8 if int8 else None)
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    for name, rank in (("r8", 8), ("r16", 16), ("r32", 32)):
        adapters.add(pool, name, rank)
    adapters.add(pool, "few", 5, keys="up_proj")
    pool.register("sum", {"r8": 0.5, "r16": -0.3})
    rows = [None, "r8", "r16", "r32", "few", "sum", {"r32": 0.4, "few": 1}, "r8", None]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 14, len(rows))]
    answers = [some_prompt(rng, n) for n in rng.integers(2, 8, len(rows))]

    def submit(engine, i):
        return engine.submit(
            Request(prompts[i], len(answers[i]), forced(answers[i]), adapter=rows[i])
        )

    options = {"kv": kv, "adapters": pool, "prefill_step_size": 5}
    engine = Engine(model, tokenizer, max_batch=len(rows), **options)
    ids = [submit(engine, i) for i in range(len(rows))]
    together = run(engine)
    spread = 0.0
    for i, row in enumerate(rows):
        engine = Engine(model, tokenizer, **options)
        submit(engine, i)
        (alone,) = run(engine).values()
        mixed, alone = logprobs_of(together[ids[i]]), logprobs_of(alone)
        assert np.abs(mixed - alone).max() < (0.1 if int8 else 1e-4)
        weights = {"sum": {"r8": 0.5, "r16": -0.3}}.get(row) if isinstance(row, str) else row
        weights = weights or ({} if row is None else {row: 1})
        wanted = wanted_logprobs(adapters.merged(weights), prompts[i], answers[i])
        error = np.abs(mixed - wanted).max() / max(1, np.abs(wanted).max())
        assert error < (0.05 if int8 else 1e-3)
        if row is not None:
            plain = wanted_logprobs(model, prompts[i], answers[i])
            spread = max(spread, np.abs(mixed - plain).max())
    assert spread > 1
    pool.close()


def test_a_zoo_model_runs_mixed_batches_too(rng, tokenizer, tmp_path):
    vocab = 64
    model = zoo_model("llama", vocab, int(rng.integers(2**31)))
    pool = AdapterPool(model)
    for name, rank in (("x", 4), ("y", 6)):
        pool.register(name, write_folder(tmp_path / name, draw_tensors(model, rng, rank)))
    rows, answer = [None, "x", "y"], rng.integers(0, vocab, 4).tolist()
    tokenizer = WordTokenizer(vocab)
    tokenizer.eos_token_ids = set()
    prompts = [rng.integers(0, vocab, n).tolist() for n in (5, 2, 9)]

    def submit(engine, i):
        return engine.submit(Request(prompts[i], 4, forced(answer), adapter=rows[i]))

    engine = Engine(model, tokenizer, adapters=pool)
    ids = [submit(engine, i) for i in range(3)]
    together = run(engine)
    for i in range(3):
        engine = Engine(model, tokenizer, adapters=pool)
        submit(engine, i)
        (alone,) = run(engine).values()
        assert np.abs(logprobs_of(together[ids[i]]) - logprobs_of(alone)).max() < 1e-3
    pool.close()


def test_rows_with_adapters_join_and_leave(rng, model, tokenizer, setup):
    """One after the other, in the middle of others' answers, more of them than fit."""
    pool, _ = setup
    names = [["a", "b", "c", "d", None][i] for i in rng.integers(0, 5, 12)]
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 9, 12)]
    limits = [int(n) for n in rng.integers(1, 9, 12)]
    engine = Engine(model, tokenizer, max_batch=3, prefill_step_size=3, adapters=pool)
    ids, found = {}, {}
    while engine.busy or len(ids) < 12:
        if len(ids) < 12:
            i = len(ids)
            ids[engine.submit(Request(prompts[i], limits[i], adapter=names[i]))] = i
        for response in engine.step():
            found.setdefault(response.row, []).append(response)
    for row, i in ids.items():
        alone = Engine(model, tokenizer, adapters=pool)
        alone.submit(Request(prompts[i], limits[i], adapter=names[i]))
        (wanted,) = run(alone).values()
        assert [r.token for r in found[row]] == [r.token for r in wanted]
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_more_adapters_than_run_side_by_side(rng, model, tokenizer, tmp_path, monkeypatch):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 3)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    most, of = [], BatchAdapters.of
    monkeypatch.setattr(
        row_adapters.BatchAdapters, "of", lambda rows: (most.append(rows), of(rows))[1]
    )
    engine = Engine(model, tokenizer, max_batch=16, adapters=pool)
    prompt = some_prompt(rng, 4)
    ids = {
        engine.submit(Request(prompt, 3, adapter=name)): name for name in [*names, None, names[0]]
    }
    found = run(engine)
    for row, name in ids.items():
        alone = Engine(model, tokenizer, adapters=pool)
        alone.submit(Request(prompt, 3, adapter=name))
        (wanted,) = run(alone).values()
        assert [r.token for r in found[row]] == [r.token for r in wanted]
    assert (
        max(len(rows) for rows in most) == MAX_ADAPTERS + 2
    )  # the row without, and one adapter twice
    pool.close()


def test_rows_of_one_adapter_too_many_are_overtaken_for_a_while_only(
    rng, model, tokenizer, tmp_path
):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 1)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    *busy, late = names
    engine = Engine(model, tokenizer, max_batch=32, adapters=pool)

    def submit(name, count):
        return engine.submit(Request([1, 2], count, adapter=name, logprobs=False))

    # Two rows each, of which one always goes on when the other one ends.
    row_of = {submit(name, count): name for name in busy for count in (3, 6)}
    engine.step()
    last, ended = submit(late, 1), 0
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
    pool.close()


# -- loading beside the others


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
    start, idle = time.monotonic(), 0
    while time.monotonic() < start + 20 * LOADING_STEP:
        assert engine.step() == []
        idle += 1
    assert 1 < idle <= 24  # it waits in steps, so that new requests have their turn
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


# -- caches


def filled(engine, rng, adapter):
    cache = engine.make_cache()
    engine.submit(Request(some_prompt(rng, 6), 2, cache=cache, adapter=adapter))
    assert all(r.error is None for r in engine.run())
    return cache


def test_prompt_caches_never_cross_adapters(rng, model, tokenizer, setup):
    pool, _ = setup
    engine = Engine(model, tokenizer, adapters=pool)
    kinds = [None, "a", "b", {"a": 0.5, "b": 0.5}]
    caches = [filled(engine, rng, kind) for kind in kinds]
    for i, cache in enumerate(caches):
        before = [mx.array(part) for part in cache[0].state]
        for j, kind in enumerate(kinds):
            request = Request(some_prompt(rng, 2), 1, adapter=kind, cache=cache)
            if i == j:
                continue
            with pytest.raises(
                RequestError, match=r"was filled under .* and the request runs with"
            ) as e:
                engine.submit(request)
            for k in (i, j):
                wanted = pool.load(kinds[k]).fingerprint if kinds[k] else "no adapter"
                assert wanted in str(e.value)
            if kinds[i] == "a":
                assert "the adapter a (" in str(e.value)
        assert all(mx.array_equal(x, y) for x, y in zip(before, cache[0].state, strict=True))
    for kind, cache in zip(kinds, caches, strict=True):
        length = cache[0].lengths[0]
        engine.submit(Request(some_prompt(rng, 2), 2, adapter=kind, cache=cache))
        assert all(r.error is None for r in engine.run())
        assert cache[0].lengths[0] == length + 3
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_an_adapter_that_is_not_loaded_yet_is_compared_when_it_is(rng, model, tokenizer, setup):
    pool, _ = setup
    engine = Engine(model, tokenizer, adapters=pool)
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


def test_copies_and_files_of_caches_keep_their_adapter(rng, model, tokenizer, setup, tmp_path):
    pool, _ = setup
    engine = Engine(model, tokenizer, adapters=pool)
    cache, path = filled(engine, rng, "a"), tmp_path / "cache.safetensors"
    fingerprint = pool.load("a").fingerprint
    assert {layer.copy().adapter for layer in cache[:1]} == {fingerprint}
    save_prompt_cache(path, cache, model)
    with pytest.raises(CacheFileError, match=f"another adapter.*{fingerprint}.* has none"):
        load_prompt_cache(path, model)
    with pytest.raises(CacheFileError, match="filled under the adapter"):
        save_prompt_cache(path, cache, model, adapter=pool.load("b").fingerprint)
    loaded, _ = load_prompt_cache(path, model, adapter=fingerprint)
    for wrong in (None, "b"):
        with pytest.raises(RequestError, match="filled under the adapter a"):
            engine.submit(Request([1], 2, adapter=wrong, cache=loaded))
    answers = []
    for each in (cache, loaded):
        engine.submit(Request([1, 2], 4, adapter="a", cache=each))
        answers.append([r.token for r in engine.run()])
    assert answers[0] == answers[1]


def test_caches_of_an_attached_adapter(rng, model, tokenizer, setup):
    """The same holds without a pool."""
    pool, adapters = setup
    attach_adapter(model, adapters.folder / "a")
    engine = Engine(model, tokenizer)
    cache = filled(engine, rng, None)
    detach_adapter(model)
    with pytest.raises(RequestError, match=r"was filled under .* runs with no adapter"):
        engine.submit(Request([1], 2, cache=cache))
    mine = Engine(model, tokenizer, adapters=pool)
    pool.load("a")
    mine.submit(Request([1], 2, cache=cache, adapter="a"))
    assert all(r.error is None for r in mine.run())


# -- swapping


def swaps(count, rng, model, tokenizer, setup, monkeypatch):
    """Rows with one adapter after the other; what is left in memory, and what was traced anew."""
    pool, _ = setup
    traced, forward = [], Model.forward
    monkeypatch.setattr(
        Model, "forward", lambda self, *args: (traced.append(1), forward(self, *args))[1]
    )
    engine, prompt, first = Engine(model, tokenizer, adapters=pool), some_prompt(rng, 3), {}
    names = ["a", "b", "c", None, "d"]

    def swap(i):
        engine.submit(Request(prompt, 2, adapter=names[i % 5]))
        return logprobs_of(list(engine.run()))

    def taken():
        gc.collect()
        with open(f"/proc/{os.getpid()}/statm") as file:
            pages = int(file.read().split()[1])
        return mx.get_active_memory(), pages * os.sysconf("SC_PAGE_SIZE")

    for i in range(20):
        first[i % 5] = swap(i)
    before, traced[:] = taken(), []
    for i in range(count):
        logprobs = swap(i)
        if i >= count - 5:
            assert np.array_equal(logprobs, first[i % 5])
    after = taken()
    assert after[0] == before[0]
    return after[1] - before[1], len(traced)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's statistics")
@pytest.mark.parametrize(("kv_bits", "count"), [(8, 300), (None, 60)])
def test_swapping_leaks_nothing(rng, tokenizer, tmp_path, monkeypatch, kv_bits, count):
    _swapped(count, rng, tokenizer, tmp_path, monkeypatch, kv_bits, 4e6)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's statistics")
def test_swapping_ten_thousand_times_leaks_nothing(rng, tokenizer, tmp_path, monkeypatch):
    _swapped(10_000, rng, tokenizer, tmp_path, monkeypatch, 8, 8e6)


def _swapped(count, rng, tokenizer, tmp_path, monkeypatch, kv_bits, allowed):
    model = tiny(rng, "2-bit", kv_bits)
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    for name, rank in zip("abcd", (4, 4, 8, 3), strict=True):
        adapters.add(pool, name, rank)
    grown, traced = swaps(count, rng, model, tokenizer, (pool, adapters), monkeypatch)
    assert grown < allowed
    if kv_bits:  # steps over int8 caches are traced once for each layout
        assert traced == 0
    pool.close()


def test_loading_again_and_again_leaks_nothing(rng, model, tokenizer, setup):
    pool, _ = setup
    engine, sizes = Engine(model, tokenizer, adapters=pool), set()
    for i in range(20):
        engine.submit(Request([1, 2], 2, adapter="abcd"[i % 4]))
        assert all(r.error is None for r in engine.run())
        pool.unload("abcd"[i % 4])
        if i in (4, 19):
            gc.collect()
            sizes.add(mx.get_active_memory())
    assert len(sizes) == 1
    assert pool.describe()["loads"] == 20


# -- requests that can't be honoured, and the other ways in


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
    with pytest.raises(RequestError, match="no adapter 'z'"):
        generate(model, tokenizer, prompts[0], adapter="z", **options)


def test_generate_raises_what_loading_has_raised(rng, model, tokenizer, setup):
    pool, adapters = setup
    shutil.rmtree(adapters.folder / "b")
    with pytest.raises(CheckpointError, match="moved or deleted"):
        next(stream_generate(model, tokenizer, [1, 2], adapter="b", adapters=pool))
    with pytest.raises(CheckpointError, match="moved or deleted"):
        batch_generate(model, tokenizer, [[1], [2]], adapter=[None, "b"], adapters=pool)
