"""The pool: what is loaded and what is dropped, by name or as a sum, and the memory that it takes."""

import gc
import itertools
import json
import shutil
import tracemalloc

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.adapters.layer_places import place_shapes
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import build_resident
from afm_mlx.checkpoint.safetensors_file import StoredTensor
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import WAIT, deltas, memory_falls_to, state
from tests.tools.compare import assert_close


def test_an_adapter_is_loaded_when_it_is_asked_for_and_then_stays(make_pool, model, size, tmp_path):
    pool = make_pool()
    assert pool.registered == ["a", "b", "c"]
    assert (pool.resident, pool.nbytes) == ([], 0)
    first = pool.load("b")
    assert (pool.resident, pool.nbytes) == (["b"], size)
    tensors, config = load_adapter(tmp_path / "b")
    mx.eval(tensors)
    wanted = build_resident(tensors, config.scale, place_shapes(model), "b")
    assert first.fingerprint == wanted.fingerprint
    with pool.request("b") as lease:
        assert lease.resident is first is pool.load("b")
        described = json.loads(json.dumps(pool.describe()))
    counts = {"loads": 1, "hits": 2, "evictions": 0, "failures": 0}
    assert {name: described[name] for name in counts} == counts
    assert described["adapters"][1] == {
        "name": "b",
        "source": str(tmp_path / "b"),
        "state": "resident",
        "bytes": size,
        "rank": 4,
        "fingerprint": first.fingerprint,
        "pinned": False,
        "rows": 1,
        "waiting": 0,
        "error": None,
    }
    assert pool.name_of(first.fingerprint) == "b"
    assert state(pool, "a")["fingerprint"] is None


def test_files_are_read_in_a_thread_of_their_own(make_pool, gate):
    pool = make_pool()
    leases = [pool.request(name) for name in ("a", "a", "b")]
    assert gate.reached.wait(WAIT)
    assert not any(lease.ready for lease in leases)
    assert state(pool, "a")["state"] == "loading"
    with pytest.raises(RequestError, match="not loaded yet"):
        leases[0].resident  # noqa: B018  the property raises
    assert not leases[0].wait(0.001)
    gate.set()
    assert all(lease.wait(WAIT) for lease in leases)
    assert leases[0].resident is leases[1].resident is not leases[2].resident
    assert pool.describe()["loads"] == 2


def test_sums_add_what_their_parts_add(make_pool, folder, model, rng):
    """Of unequal ranks, on unequal layers; named, not named, and a sum of sums."""
    pool = make_pool("")
    pool.register("all", folder("all", rank=6))
    pool.register("mlp", folder("mlp", rank=3, keys="mlp"))
    weights = {"all": float(rng.uniform(-1, 1)), "mlp": float(rng.uniform(-1, 1))}
    pool.register("both", weights)
    pool.register("nested", {"both": 0.5, "mlp": -1})
    parts = {name: deltas(pool.load(name), model) for name in ("all", "mlp")}
    for name, wanted in (
        ("both", weights),
        (weights, weights),
        ("nested", {"all": 0.5 * weights["all"], "mlp": 0.5 * weights["mlp"] - 1}),
    ):
        found = deltas(pool.load(name), model)
        assert set(found) == set(parts["all"])
        for path, added in found.items():
            exact = sum(w * parts[part][path] for part, w in wanted.items() if path in parts[part])
            assert_close(added, exact, 2e-3, path)
    ranks = {part.rank for part in pool.load("both").parts.values()}
    assert ranks == {6, 9}
    assert pool.load({"all": 1.0}) is pool.load("all")
    unnamed = pool.load(weights)
    assert pool.load(dict(reversed(weights.items()))) is unnamed
    assert pool.load({"both": 1}) is pool.load("both") is not unnamed
    assert len(pool.registered) == 4


def test_sums_are_read_matrix_by_matrix(make_pool, folder):
    pool = make_pool("")
    for name in "ab":
        pool.register(name, folder(name, 64))
    pool.load("a")  # imports and tables are not counted
    tracemalloc.start()
    try:
        nbytes = pool.load({"a": 0.5, "b": -0.25}).nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < nbytes / 2


@pytest.mark.usefixtures("exact_memory")
def test_memory_is_given_back(make_pool, size):
    pool = make_pool("abc", budget=2 * size)

    def takes(nbytes):
        memory_falls_to(before + nbytes)

    gc.collect()
    before = mx.get_active_memory()
    lease = pool.request("a")
    assert lease.wait(WAIT)
    takes(size)
    pool.load("b")
    takes(2 * size)
    pool.load("c")  # for which b goes
    takes(2 * size)
    lease.release()
    pool.unload("a")
    takes(size)
    pool.unregister("c")
    takes(0)
    assert pool.resident == []
    with pytest.raises(RequestError, match="no adapter 'c'; registered are a, b"):
        pool.load("c")


@pytest.mark.usefixtures("exact_memory")
def test_a_load_that_fails_keeps_no_memory(make_pool, folder, monkeypatch):
    pool, path = make_pool("a"), folder("deleted", 64)
    pool.register("deleted", path)
    read, count = StoredTensor.read_into, itertools.count()

    def deletes(*arguments):
        if next(count) == 5:
            shutil.rmtree(path)
        read(*arguments)

    monkeypatch.setattr(StoredTensor, "read_into", deletes)
    gc.collect()
    before = mx.get_active_memory()
    lease = pool.request("deleted")
    assert lease.wait(WAIT)
    with pytest.raises(CheckpointError, match="can't be read"):
        lease.resident  # noqa: B018
    memory_falls_to(before)
    assert "can't be read" in state(pool, "deleted")["error"]


def test_sums_without_a_name_are_unloaded_and_not_pinned(make_pool):
    pool = make_pool("ab")
    weights = {"a": 1, "b": 0.5}
    assert pool.load(weights).rank == 8
    with pytest.raises(RequestError, match="registered are a, b"):
        pool.pin(weights)
    pool.unload(weights)
    assert (pool.resident, pool.nbytes) == ([], 0)
    pool.unload(weights)


def test_what_is_in_use_is_not_unloaded(make_pool, gate):
    pool = make_pool("ab")
    pool.register("sum", {"a": 0.5, "b": 0.5})
    lease = pool.request("a")
    for call in (pool.unload, pool.unregister):
        with pytest.raises(RequestError, match=r"in use|part of"):
            call("a")
    gate.set()
    assert lease.wait(WAIT)
    with pytest.raises(RequestError, match="in use: 1 rows"):
        pool.unload("a")
    lease.release()
    pool.unload("a")
    with pytest.raises(RequestError, match="part of the registered adapter 'sum'"):
        pool.unregister("a")
    pool.unregister("sum")
    pool.unregister("a")
    assert pool.registered == ["b"]


def test_a_name_that_is_registered_anew_leaves_no_old_sums(make_pool, folder):
    pool = make_pool("ab")
    before = pool.load({"a": 1, "b": 1})
    pool.unregister("a")
    assert pool.resident == []
    pool.register("a", folder("another"))
    assert pool.load({"a": 1, "b": 1}).fingerprint != before.fingerprint


def test_pools_that_can_not_be(model, folder):
    for budget in (0, -1, 1.5, True):
        with pytest.raises(RequestError, match=f"budget is {budget}"):
            AdapterPool(model, budget=budget)
    attach_adapter(model, folder("x"))
    with pytest.raises(RequestError, match="detach_adapter"):
        AdapterPool(model)
