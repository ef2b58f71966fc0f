"""One adapter after the other: nothing is traced anew, and nothing stays behind."""

import gc
import os

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.model.model import Model
from tests.tools.adapters import memory_falls_to
from tests.tools.engines import Adapters, logprobs_of, some_prompt, tiny


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


@pytest.mark.usefixtures("exact_memory")
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's statistics")
@pytest.mark.parametrize(("kv_bits", "count"), [(8, 300), (None, 60)])
def test_swapping_leaks_nothing(rng, tokenizer, tmp_path, monkeypatch, kv_bits, count):
    _swapped(count, rng, tokenizer, tmp_path, monkeypatch, kv_bits, 4e6)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_memory")
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


@pytest.mark.usefixtures("exact_memory")
def test_loading_again_and_again_leaks_nothing(rng, model, tokenizer, setup):
    pool, _ = setup
    engine = Engine(model, tokenizer, adapters=pool)

    def answer(adapter):
        engine.submit(Request([1, 2], 2, adapter=adapter))
        assert all(r.error is None for r in engine.run())

    answer(None)
    gc.collect()
    before = mx.get_active_memory()
    for i in range(20):
        answer("abcd"[i % 4])
        assert mx.get_active_memory() > before
        pool.unload("abcd"[i % 4])
        memory_falls_to(before)
    assert pool.describe()["loads"] == 20
