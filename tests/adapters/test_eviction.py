"""What a budget decides: which adapters go, which load comes first, and what never fits."""

import pytest

from afm_mlx.adapters.scheduler import PATIENCE
from afm_mlx.errors import RequestError
from tests.tools.adapters import WAIT, state, until


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
    with pytest.raises(RequestError, match="Raise the budget"):
        lease.resident  # noqa: B018  the property raises
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


def test_the_adapter_that_most_rows_wait_for_is_loaded_next(make_pool, size):
    pool = make_pool("abcd", budget=size)
    with pool.request("a") as first:
        assert first.wait(WAIT)
        waiting = {
            name: [pool.request(name) for _ in range(n)]
            for name, n in zip("bcd", (1, 3, 2), strict=True)
        }
        settled(pool)
    for name in "cdb":
        assert waiting[name][0].wait(WAIT)
        assert all(lease.ready for lease in waiting[name]), "they run together"
        assert pool.resident == [name]
        for lease in waiting[name]:
            lease.release()
    assert pool.describe()["loads"] == 4


def test_the_oldest_load_is_overtaken_for_a_while_only(make_pool, size):
    """Two adapters that many rows ask for again and again, and one that a single row asks for."""
    pool = make_pool("abc", budget=size)
    held = [pool.request("a")]
    assert held[0].wait(WAIT)
    lonely = pool.request("b")
    settled(pool)
    served = 0
    for turn in range(PATIENCE):
        more = [pool.request("ca"[turn % 2]) for _ in range(5)]
        settled(pool)
        for lease in held:
            lease.release()
        settled(pool)
        if lonely.ready:
            break
        served += len(more)
        held = more
    assert lonely.ready
    assert PATIENCE <= served < PATIENCE + 2 * 5
