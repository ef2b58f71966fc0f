"""Which load comes first when there is no room for all: rows of one adapter are gathered; nobody starves."""

from afm_mlx.adapters.scheduler import PATIENCE
from tests.tools.adapters import until


def settled(pool):
    """Wait until nothing is read, and all that has to wait waits."""
    until(
        lambda: not any(e["state"] in ("opening", "loading") for e in pool.describe()["adapters"])
    )


def test_the_adapter_that_most_rows_wait_for_is_loaded_next(make_pool, size):
    pool = make_pool("abcd", budget=size)
    with pool.request("a") as first:
        assert first.wait(60)
        waiting = {
            name: [pool.request(name) for _ in range(n)]
            for name, n in zip("bcd", (1, 3, 2), strict=True)
        }
        settled(pool)
    for name in "cdb":
        assert waiting[name][0].wait(60)
        assert all(lease.ready for lease in waiting[name]), "they run together"
        assert pool.resident == [name]
        for lease in waiting[name]:
            lease.release()
    assert pool.describe()["loads"] == 4


def test_the_oldest_load_is_overtaken_for_a_while_only(make_pool, size):
    """Two adapters that many rows ask for again and again, and one that a single row asks for."""
    pool = make_pool("abc", budget=size)
    held = [pool.request("a")]
    assert held[0].wait(60)
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
