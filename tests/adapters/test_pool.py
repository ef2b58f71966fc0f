"""The pool: what is in memory, who holds it, and what happens when it does not fit."""

import gc
import itertools
import json
import shutil
import threading
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.layer_places import place_shapes
from afm_mlx.adapters.resident import TensorReader, build_resident
from afm_mlx.adapters.scheduler import PATIENCE
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import (
    WAIT,
    deltas,
    draw_tensors,
    memory_falls_to,
    state,
    until,
    write_folder,
)
from tests.tools.compare import assert_close, assert_same

# -- loading


def test_an_adapter_is_loaded_when_it_is_asked_for_and_then_stays(make_pool, model, size):
    pool = make_pool()
    assert pool.registered == ["a", "b", "c"]
    assert (pool.resident, pool.nbytes) == ([], 0)
    first = pool.load("b")
    assert (pool.resident, pool.nbytes) == (["b"], size)
    assert pool.load("b") is first
    with pool.request("b") as lease:
        assert lease.ready
        assert lease.resident is first
        assert state(pool, "b")["rows"] == 1
    described = json.loads(json.dumps(pool.describe()))
    counts = {"loads": 1, "hits": 2, "evictions": 0, "failures": 0}
    assert {name: described[name] for name in counts} == counts
    assert state(pool, "b") | {"source": ""} == {
        "name": "b",
        "source": "",
        "state": "resident",
        "bytes": size,
        "rank": 4,
        "fingerprint": first.fingerprint,
        "pinned": False,
        "rows": 0,
        "waiting": 0,
        "error": None,
    }
    assert state(pool, "b")["fingerprint"] == first.fingerprint
    assert pool.name_of(first.fingerprint) == "b"
    assert state(pool, "a")["fingerprint"] is None


def test_what_is_loaded_is_what_the_folder_holds(make_pool, folder, model):
    pool, path = make_pool(""), folder("of", rank=7, keys="mlp")
    pool.register("x", path)
    tensors, config = load_adapter(path)
    mx.eval(tensors)
    wanted = build_resident(tensors, config.scale, place_shapes(model), path)
    found = pool.load("x")
    assert found.fingerprint == wanted.fingerprint
    assert_same(found.numbers, wanted.numbers)


def test_wider_files_are_read(make_pool, model, rng, tmp_path):
    tensors, pool = draw_tensors(model, rng, 3), make_pool("")
    for name in ("float32", "bfloat16"):
        wide = {n: mx.array(t).astype(getattr(mx, name)) for n, t in tensors.items()}
        pool.register(name, write_folder(tmp_path / name, wide))
        # bfloat16 has fewer digits than float16, so float16 holds what it rounds to.
        numbers = {n: np.array(t.astype(mx.float32)) for n, t in wide.items()}
        wanted = build_resident(numbers, 0.5, place_shapes(model), "x")
        assert_same(pool.load(name).numbers, wanted.numbers)


def test_files_are_read_in_a_thread_of_their_own(make_pool, gate):
    pool = make_pool()
    start = threading.current_thread()
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
    assert threading.current_thread() is start
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


# -- the budget


def test_the_least_recently_used_adapter_makes_room(make_pool, size):
    pool = make_pool("abcd", budget=3 * size + 10)
    for name in "abc":
        pool.load(name)
    pool.load("a")
    pool.load("d")
    assert pool.resident == ["a", "c", "d"]
    held = pool.request("c")
    pool.load("b")
    assert pool.resident == ["b", "c", "d"]
    pool.load("a")
    assert pool.resident == ["a", "b", "c"]
    held.release()
    assert pool.nbytes == 3 * size
    assert pool.describe()["evictions"] == 3


def test_random_use_is_that_of_a_plain_least_recently_used_list(make_pool, size, rng):
    names = "abcdefgh"
    pool = make_pool(names, budget=4 * size)
    recent, pinned, held = [], set(), {}

    def touch(name):
        """Load by hand; false when there is no room."""
        if name not in recent:
            going = [n for n in recent if n not in pinned and not held.get(n)]
            if len(recent) == 4 and not going:
                return False
            if len(recent) == 4:
                recent.remove(going[0])
        else:
            recent.remove(name)
        recent.append(name)
        return True

    for _ in range(400):
        name, action = names[rng.integers(8)], rng.integers(5)
        if action == 0 and len(pinned) < 2:
            if touch(name):
                pool.pin(name)
                pinned.add(name)
            else:
                with pytest.raises(RequestError, match=r"leave too little|which are pinned"):
                    pool.pin(name)
        elif action == 1 and pinned:
            pinned.remove(unpinned := sorted(pinned)[0])
            pool.unpin(unpinned)
        elif action == 2 and name in recent:
            touch(name)
            held.setdefault(name, []).append(pool.request(name))
        elif action == 3 and held.get(name):
            held[name].pop().release()
            touch(name)
        elif touch(name):
            pool.load(name)
        else:
            with pytest.raises(RequestError, match=r"leave too little|which are pinned"):
                pool.load(name)
        assert sorted(pool.resident) == sorted(recent)
        assert pool.nbytes <= 4 * size


def test_a_budget_smaller_than_an_adapter(make_pool, size):
    pool = make_pool("ab", budget=size - 1)
    with pytest.raises(RequestError, match=f"a needs {size:,} bytes.*budget is {size - 1:,}"):
        pool.load("a")
    lease = pool.request("b")
    assert lease.wait(WAIT)
    assert isinstance(lease.error, RequestError)
    with pytest.raises(RequestError, match="Raise the budget"):
        lease.resident  # noqa: B018
    assert state(pool, "b")["error"] == str(lease.error)
    assert (pool.nbytes, pool.describe()["failures"]) == (0, 2)


def test_pinned_adapters_stay_and_can_be_in_the_way(make_pool, size):
    pool = make_pool("abc", budget=2 * size)
    pool.pin("a")
    pool.load("b")
    pool.load("c")
    assert pool.resident == ["a", "c"]
    pool.pin("c")
    with pytest.raises(RequestError, match="a, c, which are pinned, leave 0 of the budget"):
        pool.load("b")
    lease = pool.request("b")  # rows don't wait for what can't happen
    assert lease.wait(WAIT)
    assert "pinned" in str(lease.error)
    pool.unpin("a")
    pool.load("b")
    assert pool.resident == ["b", "c"]


def test_a_load_waits_for_rows_to_end_and_load_itself_does_not(make_pool, size):
    pool = make_pool("abc", budget=size)
    running = pool.request("a")
    assert running.wait(WAIT)
    waiting = pool.request("b")
    until(lambda: state(pool, "b")["state"] == "waiting")
    with pytest.raises(RequestError, match=f"c needs {size:,} bytes.*in use"):
        pool.load("c")
    assert state(pool, "b")["state"] == "waiting"
    assert not waiting.ready
    running.release()
    assert waiting.wait(WAIT)
    assert pool.resident == ["b"]


def test_a_load_that_waits_is_overtaken_for_a_while_only(make_pool, size):
    pool = make_pool("ab", budget=size)
    held = [pool.request("a")]
    assert held[0].wait(WAIT)
    waiting = pool.request("b")
    until(lambda: state(pool, "b")["state"] == "waiting")
    for _ in range(PATIENCE):
        held.append(pool.request("a"))
        assert held[-1].ready
        held.pop(0).release()
    late = [pool.request("a") for _ in range(3)]
    assert not any(lease.ready for lease in late)
    held.pop().release()
    assert waiting.wait(WAIT)
    assert pool.resident == ["b"]
    assert not late[0].wait(0.05)
    waiting.release()
    assert late[0].wait(WAIT)
    assert all(lease.ready for lease in late)


def draining(pool):
    """Leases of a pool that has room for one: of a, of b that waits for it, of a again that comes too late."""
    held = pool.request("a")
    assert held.wait(WAIT)
    waiting = pool.request("b")
    until(lambda: state(pool, "b")["state"] == "waiting")
    for _ in range(PATIENCE):
        pool.request("a").release()
    late = pool.request("a")
    assert not late.ready
    return held, waiting, late


def test_load_takes_what_drains(make_pool, size):
    """Rows whose end it would wait for may be run by the very thread that calls it."""
    pool = make_pool("ab", budget=size)
    held, waiting, late = draining(pool)
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.load("a")), daemon=True)
    thread.start()
    thread.join(WAIT)
    assert found == [held.resident]
    assert not late.ready
    held.release()
    assert waiting.wait(WAIT)


def test_what_drains_for_a_load_that_is_given_up_serves_again(make_pool, size):
    pool = make_pool("ab", budget=size)
    _held, waiting, late = draining(pool)
    waiting.release()
    assert late.ready


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


# -- memory


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
    read, count = TensorReader._read, itertools.count()

    def deletes(self, tensor):
        if next(count) == 5:
            shutil.rmtree(path)
        return read(self, tensor)

    monkeypatch.setattr(TensorReader, "_read", deletes)
    gc.collect()
    before = mx.get_active_memory()
    lease = pool.request("deleted")
    assert lease.wait(WAIT)
    with pytest.raises(CheckpointError, match="can't be read"):
        _ = lease.resident
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


def test_a_lease_that_is_forgotten_ends(make_pool, size):
    pool = make_pool("ab", budget=size)
    lease = pool.request("a")
    assert lease.wait(WAIT)
    with pytest.raises(RequestError, match="in use"):
        pool.unload("a")
    del lease
    gc.collect()
    pool.load("b")
    assert pool.resident == ["b"]


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


def test_a_name_that_is_registered_anew_leaves_no_old_sums(make_pool, folder, model):
    pool = make_pool("ab")
    before = pool.load({"a": 1, "b": 1})
    pool.unregister("a")
    assert pool.resident == []
    pool.register("a", folder("another"))
    assert pool.load({"a": 1, "b": 1}).fingerprint != before.fingerprint
