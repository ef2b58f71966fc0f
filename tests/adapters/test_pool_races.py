"""A pool that several threads use, and that is changed while it reads."""

import gc
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import RequestError
from tests.tools.adapters import WAIT, memory_falls_to, state, until


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


def test_unregister_while_it_is_read(make_pool, gate, folder):
    pool = make_pool("a")
    lease = pool.request("a")
    assert gate.reached.wait(WAIT)
    lease.release()
    pool.unregister("a")
    pool.register("a", folder("new"))
    gate.set()
    new = pool.load("a")
    assert pool.resident == ["a"]
    assert state(pool, "a")["fingerprint"] == new.fingerprint


@pytest.mark.usefixtures("exact_memory")
def test_threads_that_do_all_at_once(make_pool, size):
    """Nothing is lost, nothing is over the budget, and all is given back."""
    pool = make_pool("abcdef", budget=3 * size)
    gc.collect()
    before, errors = mx.get_active_memory(), []
    end = time.monotonic() + 1.0

    def work(seed):
        draw = np.random.default_rng(seed)
        try:
            while time.monotonic() < end:
                name, action = "abcdef"[draw.integers(6)], draw.integers(4)
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

    def keep_on(seed):
        while time.monotonic() < end and not errors:
            work(seed := seed + 100)

    threads = [threading.Thread(target=keep_on, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert not any(e["rows"] or e["waiting"] for e in pool.describe()["adapters"])
    pool.close()
    memory_falls_to(before)


def test_a_sum_is_read_anew_when_a_name_in_it_is_another_adapter_s(make_pool, gate, folder):
    pool = make_pool("ab")
    weights = {"a": 0.5, "b": 0.5}
    lease = pool.request(weights)
    assert gate.reached.wait(WAIT)
    lease.release()
    pool.unregister("a")
    pool.register("a", folder("another"))
    lease = pool.request(weights)  # the first read has not ended
    gate.set()
    assert lease.wait(WAIT)
    found = lease.resident.fingerprint
    lease.release()
    pool.unload(weights)
    assert pool.load(weights).fingerprint == found


def waits_in_a_thread(pool, lease):
    """Begin to wait for a lease, in vain so far."""
    thread = threading.Thread(target=lease.wait, args=(WAIT,))
    thread.start()
    until(lambda: state(pool, lease.name)["state"] == "waiting")
    return thread


def test_a_lease_that_is_forgotten_keeps_nobody_waiting(make_pool, size):
    """Though nothing tells those that wait."""
    pool = make_pool("ab", budget=size)
    held = pool.request("a")
    assert held.wait(WAIT)
    waiting = pool.request("b")
    thread = waits_in_a_thread(pool, waiting)
    del held
    gc.collect()
    thread.join()
    assert waiting.ready


def test_a_load_that_is_forgotten_keeps_nobody_waiting(make_pool, folder, size):
    """That there is room for, but which comes after one that there is none for."""
    pool = make_pool("ab", budget=2 * size)
    pool.register("large", folder("large", 8))
    held = pool.request("a")
    assert held.wait(WAIT)
    first, waiting = pool.request("large"), pool.request("b")
    thread = waits_in_a_thread(pool, waiting)
    del first
    gc.collect()
    thread.join()
    assert waiting.ready
    assert sorted(pool.resident) == ["a", "b"]


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
