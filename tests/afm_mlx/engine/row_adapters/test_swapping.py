"""One adapter after the other: nothing is traced anew, and nothing stays behind."""

import gc
import os
from collections import deque
from pathlib import Path

import mlx.core as mx
import pytest

from afm_mlx.engine.request import Request
from afm_mlx.model.model import Model
from tests.tools.adapters import memory_falls_to
from tests.tools.compare import assert_same
from tests.tools.engines import logprobs_of, some_prompt

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

    for name in (
        None,
        *"abcd",
    ):  # the traces of their layouts stay, with some hundred bytes of constants each
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
