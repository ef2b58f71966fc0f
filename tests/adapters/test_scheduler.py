"""Loads and leases: what waits for what, and pools that several threads use or that change while they read."""

import gc
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.scheduler import PATIENCE
from afm_mlx.errors import RequestError
from tests.tools.adapters import WAIT, hold_and_wait, memory_falls_to, state, until

# -- without room for all


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


def draining(pool):
    """Leases of a pool that has room for one: of a, of b that waits for it, of a again that comes too late."""
    held, waiting = hold_and_wait(pool, "a", "b")
    for _ in range(PATIENCE):
        with pool.request("a") as lease:
            assert lease.ready
    late = pool.request("a")
    assert not late.ready
    return held, waiting, late


def test_a_load_that_has_waited_for_long_is_overtaken_no_more(make_pool, size):
    """But by `load`: rows whose end it would wait for may be run by the very thread that calls it."""
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
    assert pool.resident == ["b"]
    assert not late.wait(0.05)
    waiting.release()
    assert late.wait(WAIT)
    assert late.ready


def test_what_drains_for_a_load_that_is_given_up_serves_again(make_pool, size):
    pool = make_pool("ab", budget=size)
    _held, waiting, late = draining(pool)
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


# -- changed while it is read


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
    """Nothing is lost, nothing is over the budget, and all is given back."""
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
