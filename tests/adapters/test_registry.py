"""Names, sources and weights: what can be registered and asked for."""

import numpy as np
import pytest

from afm_mlx.errors import CheckpointError, RequestError


def test_names_and_sources(make_pool, folder, monkeypatch):
    """Names are never paths; paths may begin at home."""
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


def test_weights_of_every_numeric_type(make_pool):
    pool = make_pool("ab")
    for kind in (int, np.int64, np.float16, np.float32, np.float64):
        assert pool.load({"a": kind(2), "b": kind(1)}) is pool.load({"b": 1.0, "a": 2.0})
        assert pool.load({"b": kind(1)}) is pool.load("b")
