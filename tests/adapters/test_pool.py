"""The pool: what is loaded and what is dropped, by name or as a sum, and the memory that it takes."""

import gc
import itertools
import json
import shutil
import threading
import time
import tracemalloc

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import build_resident
from afm_mlx.adapters.target_modules import target_shapes
from afm_mlx.checkpoint.safetensors_file import StoredTensor
from afm_mlx.errors import CheckpointError, RequestError
from tests.tools.adapters import WAIT, deltas, hold_and_wait, memory_falls_to, state, until
from tests.tools.compare import assert_close


def test_an_adapter_is_loaded_when_it_is_asked_for_and_then_stays(make_pool, model, size, tmp_path):
    pool = make_pool()
    assert pool.registered == ["a", "b", "c"]
    assert (pool.resident, pool.nbytes) == ([], 0)
    first = pool.load("b")
    assert (pool.resident, pool.nbytes) == (["b"], size)
    tensors, config = load_adapter(tmp_path / "b")
    mx.eval(tensors)
    wanted = build_resident(tensors, config.scale, target_shapes(model), "b")
    assert first.fingerprint == wanted.fingerprint
    with pool.request("b") as lease:
        assert lease.resident is first is pool.load("b")
        described = json.loads(json.dumps(pool.describe()))
    counts = {"loads": 1, "hits": 2, "evictions": 0, "failures": 0}
    assert {name: described[name] for name in counts} == counts
    assert described["adapters"][1] == {
        "name": "b", "source": str(tmp_path / "b"), "state": "resident", "bytes": size, "rank": 4,
        "fingerprint": first.fingerprint, "pinned": False, "rows": 1, "waiting": 0, "error": None,
        "mask": None, "kept_share": None,
    }  # fmt: skip
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


# -- Names, sources and weights: what can be registered and asked for


def test_names_and_sources(make_pool, folder, monkeypatch):
    pool, path = make_pool(""), folder("x")
    monkeypatch.setenv("HOME", str(path.parent))
    for name in ("", "  ", "a\nb", "\0", "x" * 201, None, 5):
        with pytest.raises(RequestError, match="adapter name is"):
            pool.register(name, path)
    for source in (None, 5, ["a"], ""):
        with pytest.raises(RequestError, match="a path, or weights of registered adapters"):
            pool.register("x", source)
    for source, words in (
        (path / "nowhere", "nowhere, and there is no such path"),
        ("x" * 5000, "xxx, and that can't be read: File name too long"),
    ):
        with pytest.raises(CheckpointError, match=words):
            pool.register("x", source)
    assert pool.registered == []
    for name in ("../../etc", "/", "C:\\x", "a/b c.zip", "日本", "x" * 200):
        pool.register(name, "~/x")
        assert pool.load(name).rank == 4
    with pytest.raises(RequestError, match=f"'/' is taken, by {path}"):
        pool.register("/", path)


def test_weights_that_can_not_be_used(make_pool):
    pool = make_pool("ab")
    pool.register("much", {"a": 1e200})
    for weights, words in (
        ({"z": 1}, "no adapter 'z'; registered are a, b, much"),
        ({"a": float("nan")}, "weight of the adapter 'a' is nan"),
        ({"a": "1"}, "is '1'"),
        ({"a": True}, "is True"),
        ({"a": 10**400}, "a finite number is needed"),
        ({"much": 1e200}, "weight of the adapter 'a' is inf"),
        ({"a": 0}, "leave no adapter"),
        ({}, "leave no adapter"),
    ):
        with pytest.raises(RequestError, match=words):
            pool.register("c", weights)
        with pytest.raises(RequestError, match=words):
            pool.request(weights)
    for adapter in (5, None, ["a"]):
        with pytest.raises(RequestError, match="a registered name, weights by name"):
            pool.request(adapter)
    assert pool.registered == ["a", "b", "much"]
    for kind in (int, np.int64, np.float16, np.float32, np.float64):
        assert pool.load({"a": kind(2), "b": kind(1)}) is pool.load({"b": 1.0, "a": 2.0})
        assert pool.load({"b": kind(1)}) is pool.load("b")


# -- What a budget decides: which adapters go, which load comes first, and what never fits


def settled(pool):
    """Wait until nothing is read, and all that has to wait waits."""
    until(
        lambda: not any(e["state"] in ("opening", "loading") for e in pool.describe()["adapters"])
    )


def test_random_use_is_that_of_a_plain_least_recently_used_list(make_pool, size, rng):
    names = "abcdefgh"
    pool = make_pool(names, budget=4 * size)
    recent, evicted, pinned, held = [], [], set(), {}

    def touch(name):
        """Load by hand; false when there is no room."""
        if name in recent:
            recent.remove(name)
        elif len(recent) == 4:
            going = [n for n in recent if n not in pinned and not held.get(n)]
            if not going:
                return False
            recent.remove(going[0])
            evicted.append(going[0])
        recent.append(name)
        return True

    for _ in range(400):
        name, action = names[rng.integers(8)], rng.integers(5)
        if action == 1 and pinned:
            pinned.remove(unpinned := sorted(pinned)[0])
            pool.unpin(unpinned)
        elif action == 2 and name in recent:
            touch(name)
            held.setdefault(name, []).append(pool.request(name))
        elif action == 3 and held.get(name):
            held[name].pop().release()
            if not held[name]:
                touch(name)
        else:
            pins = action == 0 and len(pinned) < 2
            load = pool.pin if pins else pool.load
            if touch(name):
                load(name)
                pinned |= {name} if pins else set()
            else:
                with pytest.raises(RequestError, match=r"leave too little|which are pinned"):
                    load(name)
        assert sorted(pool.resident) == sorted(recent)
        assert pool.nbytes == len(recent) * size
    assert pool.describe()["evictions"] == len(evicted)


def test_a_budget_smaller_than_an_adapter(make_pool, size):
    pool = make_pool("ab", budget=size - 1)
    with pytest.raises(RequestError, match=f"a needs {size:,} bytes.*budget is {size - 1:,}"):
        pool.load("a")
    lease = pool.request("b")
    assert lease.wait(WAIT)
    assert "Raise the budget" in str(lease.error)
    assert state(pool, "b")["error"] == str(lease.error)
    assert (pool.nbytes, pool.describe()["failures"]) == (0, 2)


def test_pinned_adapters_stay_and_can_be_in_the_way(make_pool, size):
    pool = make_pool("abc", budget=2 * size)
    pool.pin("a")
    pool.load("b")
    pool.pin("c")
    assert pool.resident == ["a", "c"]
    with pytest.raises(RequestError, match="a, c, which are pinned, leave 0 of the budget"):
        pool.load("b")
    lease = pool.request("b")  # rows don't wait for what can't happen
    assert lease.wait(WAIT)
    assert "pinned" in str(lease.error)
    pool.unpin("a")
    pool.load("b")
    assert pool.resident == ["b", "c"]


def test_loads_come_in_the_order_of_their_requests(make_pool, size):
    pool = make_pool("abcd", budget=size)
    with pool.request("a") as first:
        assert first.wait(WAIT)
        waiting = {}
        for name in "bcd":
            waiting[name] = [pool.request(name)]
            settled(pool)
        for name in "dcb":
            waiting[name].append(pool.request(name))
    for name in "bcd":
        assert waiting[name][0].wait(WAIT)
        assert all(lease.ready for lease in waiting[name]), "they run together"
        assert pool.resident == [name]
        for lease in waiting[name]:
            lease.release()
    assert pool.describe()["loads"] == 4


@pytest.mark.parametrize("fit", [1, 2])
def test_a_load_waits_for_rows_that_run_already_and_for_no_others(make_pool, size, fit):
    busy = "abc"[: fit + 1]
    pool = make_pool([*busy, "lonely"], budget=fit * size)
    running = []
    for name in busy[:fit]:
        running.append(pool.request(name))
        assert running[-1].wait(WAIT)
    lonely = pool.request("lonely")
    settled(pool)
    for _ in range(fit):
        later = [pool.request(name) for name in busy for _ in range(3)]
        settled(pool)
        running.pop(0).release()
        settled(pool)
        if lonely.ready:
            break
        running += [lease for lease in later if lease.ready]
    assert lonely.ready


def test_an_adapter_that_no_load_waits_for_takes_new_rows_at_once(make_pool, size):
    pool = make_pool("abc", budget=2 * size)
    leases = {name: pool.request(name) for name in "ab"}
    for lease in leases.values():
        assert lease.wait(WAIT)
    pool.request("a").release()  # b is now the one that was leased longest ago
    waiting = pool.request("c")
    settled(pool)
    assert pool.request("a").ready
    pool.load("b")  # by a program: b is still the one to evict
    late = pool.request("b")
    assert not late.ready
    leases["b"].release()
    assert waiting.wait(WAIT)
    assert sorted(pool.resident) == ["a", "c"]


# -- Loads and leases: what waits for what, and pools that several threads use or that change while they read


def test_a_load_waits_for_rows_to_end_and_load_itself_does_not(make_pool, size):
    pool = make_pool("abc", budget=size)
    running, waiting = hold_and_wait(pool, "a", "b")
    with pytest.raises(RequestError, match=f"c needs {size:,} bytes.*in use"):
        pool.load("c")
    assert state(pool, "b")["state"] == "waiting"
    assert not waiting.ready
    running.release()
    assert waiting.wait(WAIT)
    assert pool.resident == ["b"]


def test_only_load_takes_an_adapter_that_is_to_be_evicted(make_pool, size):
    """Rows whose end `load` would wait for may be run by the very thread that calls it."""
    pool = make_pool("ab", budget=size)
    held, waiting = hold_and_wait(pool, "a", "b")
    late = pool.request("a")
    assert not late.ready
    found = []
    thread = threading.Thread(target=lambda: found.append(pool.load("a")), daemon=True)
    thread.start()
    thread.join(WAIT)
    assert found == [held.resident]
    assert not late.ready
    held.release()
    assert waiting.wait(WAIT)
    assert pool.resident == ["b"]
    assert not late.wait(0.05)
    waiting.release()
    assert late.wait(WAIT)
    assert late.ready


def test_load_takes_free_memory_before_a_load_that_waits_for_rows(make_pool, folder, size):
    pool = make_pool("ab", budget=2 * size)
    pool.register("large", folder("large", 8))
    held, waiting = hold_and_wait(pool, "a", "large")
    assert pool.load("b").nbytes == size
    held.release()
    assert waiting.wait(WAIT)
    assert pool.resident == ["large"]


def test_an_adapter_serves_again_once_the_load_that_waits_for_it_is_given_up(make_pool, size):
    pool = make_pool("ab", budget=size)
    _held, waiting = hold_and_wait(pool, "a", "b")
    late = pool.request("a")
    assert not late.ready
    waiting.release()
    assert late.ready


@pytest.mark.parametrize("forgotten", ["running", "waiting"])
def test_a_lease_that_is_forgotten_keeps_nobody_waiting(make_pool, folder, size, forgotten):
    """Though nothing tells those that wait: for memory, or for a load that comes before."""
    pool = make_pool("ab", budget=size if forgotten == "running" else 2 * size)
    pool.register("large", folder("large", 8))
    leases = list(hold_and_wait(pool, "a", "b" if forgotten == "running" else "large"))
    if forgotten == "waiting":
        leases.append(pool.request("b"))
        until(lambda: state(pool, "b")["state"] == "waiting")
    last = leases.pop()
    thread = threading.Thread(target=last.wait, args=(WAIT,))
    thread.start()
    del leases[-1]
    gc.collect()
    thread.join()
    assert last.ready


def test_unload_and_cancel_while_it_is_read(make_pool, gate):
    pool = make_pool("ab")
    lease = pool.request("a")
    assert gate.reached.wait(WAIT)
    lease.release()
    with pytest.raises(RequestError, match="was released"):
        lease.resident  # noqa: B018
    pool.unload("a")
    other = pool.request("b")
    gate.set()
    assert other.wait(WAIT)
    assert pool.resident == ["b"]

    gate.clear()
    gate.reached.clear()
    lease = pool.request("a")
    assert gate.reached.wait(WAIT)
    lease.release()
    pool.unload("a")
    again = pool.request("a")  # asked for again before the first read has ended
    gate.set()
    assert again.wait(WAIT)
    assert again.ready


@pytest.mark.parametrize("adapter", ["a", {"a": 0.5, "b": 0.5}])
def test_a_name_that_is_registered_anew_while_it_is_read(make_pool, gate, folder, adapter):
    pool = make_pool("ab")
    lease = pool.request(adapter)
    assert gate.reached.wait(WAIT)
    lease.release()
    pool.unregister("a")
    pool.register("a", folder("another"))
    lease = pool.request(adapter)  # the first read has not ended
    gate.set()
    assert lease.wait(WAIT)
    found = lease.resident.fingerprint
    assert len(pool.resident) == 1
    lease.release()
    pool.unload(adapter)
    assert pool.load(adapter).fingerprint == found


def test_a_pool_that_is_closed_while_it_reads(make_pool, gate):
    pool = make_pool("ab")
    lease = pool.request("a")
    assert gate.reached.wait(WAIT)
    closing = threading.Thread(target=pool.close)
    closing.start()  # it waits for the read
    until(lambda: lease.error is not None)
    assert "closed" in str(lease.error)
    gate.set()
    closing.join()
    assert pool.nbytes == 0
    with pytest.raises(RequestError, match="closed"):
        pool.load("b")
    pool.close()


@pytest.mark.usefixtures("exact_memory")
def test_threads_that_do_all_at_once(make_pool, size):
    pool = make_pool("abcdef", budget=3 * size)
    gc.collect()
    before, errors = mx.get_active_memory(), []
    end = time.monotonic() + 1.0

    def work(seed):
        draw = np.random.default_rng(seed)
        while time.monotonic() < end and not errors:
            name, action = "abcdef"[draw.integers(6)], draw.integers(4)
            try:
                if action == 0:
                    with pool.request(name) as lease:
                        assert lease.wait(WAIT)
                        assert lease.resident.nbytes == size
                elif action == 1:
                    pool.request({name: 1, "a": 0.5}).release()
                elif action == 2:
                    assert pool.nbytes <= 3 * size
                else:
                    pool.unload(name)
            except BaseException as error:
                if not (isinstance(error, RequestError) and "in use" in str(error)):
                    errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert not any(e["rows"] or e["waiting"] for e in pool.describe()["adapters"])
    pool.close()
    memory_falls_to(before)
