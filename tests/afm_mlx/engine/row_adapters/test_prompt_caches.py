"""Keys and values that one adapter has computed never meet another."""

import pytest

from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.engine.request import Request
from afm_mlx.errors import CacheFileError, RequestError
from tests.tools.compare import same
from tests.tools.engines import run, some_prompt, tokens_of


def filled(engine, rng, adapter):
    cache = engine.make_cache()
    engine.submit(Request(some_prompt(rng, 6), 2, cache=cache, adapter=adapter))
    assert all(r.error is None for r in engine.run())
    return cache


def test_prompt_caches_never_cross_adapters(rng, make_engine, pool):
    engine = make_engine()
    kinds = [None, "a", "b", {"a": 0.5, "b": 0.5}]
    caches = [filled(engine, rng, kind) for kind in kinds]
    prints = [pool.load(kind).fingerprint if kind else "no adapter" for kind in kinds]
    for i, cache in enumerate(caches):
        before = cache[0].copy().state
        for j in {0, 1, 2, 3} - {i}:
            with pytest.raises(
                RequestError, match=f"was filled under .*{prints[i]}.* runs with .*{prints[j]}"
            ):
                engine.submit(Request([1, 2], 1, adapter=kinds[j], cache=cache))
        assert all(same(x, y) for x, y in zip(before, cache[0].state, strict=True))
    with pytest.raises(RequestError, match=r"was filled under the adapter a \("):
        engine.submit(Request([1, 2], 1, cache=caches[1]))
    for kind, cache in zip(kinds, caches, strict=True):
        length = cache[0].lengths[0]
        engine.submit(Request(some_prompt(rng, 2), 2, adapter=kind, cache=cache))
        assert all(r.error is None for r in engine.run())
        assert cache[0].lengths[0] == length + 3
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_an_adapter_that_is_not_loaded_yet_is_compared_when_it_is(rng, make_engine, pool):
    engine = make_engine()
    cache = filled(engine, rng, "a")
    wrong = engine.submit(Request([1], 2, adapter="b", cache=cache))
    pool.unload("a")
    right = engine.submit(Request([1], 2, adapter="a", cache=cache))
    found = run(engine)
    (response,) = found[wrong]
    assert isinstance(response.error, RequestError)
    assert "was filled under the adapter a (" in str(response.error)
    assert [r.error for r in found[right]] == [None, None]
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_copies_and_files_of_caches_keep_their_adapter(rng, model, make_engine, pool, tmp_path):
    engine = make_engine()
    cache, path = filled(engine, rng, "a"), tmp_path / "cache.safetensors"
    fingerprint = pool.load("a").fingerprint
    assert cache[0].copy().adapter == fingerprint
    save_prompt_cache(path, cache, model)
    with pytest.raises(CacheFileError, match=f"another adapter.*{fingerprint}.* has none"):
        load_prompt_cache(path, model)
    with pytest.raises(CacheFileError, match="filled under the adapter"):
        save_prompt_cache(path, cache, model, adapter=pool.load("b").fingerprint)
    loaded, _ = load_prompt_cache(path, model, adapter=fingerprint)
    for wrong in (None, "b"):
        with pytest.raises(RequestError, match="filled under the adapter a"):
            engine.submit(Request([1], 2, adapter=wrong, cache=loaded))
    for each in (cache, loaded):
        engine.submit(Request([1, 2], 4, adapter="a", cache=each))
    first, second = tokens_of(run(engine)).values()
    assert first == second


def test_caches_of_an_attached_adapter(rng, model, tokenizer, make_engine, pool, adapters):
    """The same holds without a pool."""
    attach_adapter(model, adapters.folder / "a")
    engine = Engine(model, tokenizer)
    cache = filled(engine, rng, None)
    detach_adapter(model)
    with pytest.raises(RequestError, match=r"was filled under .* runs with no adapter"):
        engine.submit(Request([1], 2, cache=cache))
    mine = make_engine()
    pool.load("a")
    mine.submit(Request([1], 2, cache=cache, adapter="a"))
    assert all(r.error is None for r in mine.run())
