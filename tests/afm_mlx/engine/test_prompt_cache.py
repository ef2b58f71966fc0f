"""Prompt caches in files."""

import mlx.core as mx
import pytest

from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.prompt_cache import load_prompt_cache, save_prompt_cache
from afm_mlx.errors import CacheFileError
from tests.tools.cases import each
from tests.tools.models import random_config, random_model


@pytest.fixture
def model(rng):
    return random_model(random_config(rng, num_layers=4, num_kv_reuse_layers=1), rng)


@pytest.fixture
def cache(rng, model):
    """Of 9 tokens."""
    cache = model.make_cache()
    model.prefill(mx.array(rng.integers(0, model.args.vocab_size, (1, 9))), cache)
    return cache


@pytest.fixture
def path(model, cache, tmp_path):
    """The file of that cache, the only one in its folder."""
    save_prompt_cache(tmp_path / "c.safetensors", cache, model)
    return tmp_path / "c.safetensors"


@pytest.mark.parametrize("kind", [("int8", None), ("float", 600), ("int8", 16, True)])
def test_a_reloaded_cache_goes_on_as_if_nothing_had_happened(rng, model, tmp_path, kind):
    """Also a window that has forgotten tokens."""
    cache, path = model.make_cache(*kind), tmp_path / "c.safetensors"
    tokens = mx.array(rng.integers(0, model.args.vocab_size, (1, 303)))
    for start in range(0, 300, 100):
        model.prefill(tokens[:, start : start + 100], cache)
    save_prompt_cache(path, cache, model, metadata={"note": "é"})
    loaded, metadata = load_prompt_cache(path, model)
    assert metadata == {"note": "é"}
    assert loaded[0].kind == cache[0].kind
    assert loaded[0].is_trimmable() == (kind[1] != 16)
    assert mx.array_equal(model(tokens[:, 300:], loaded), model(tokens[:, 300:], cache))
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_another_model_or_adapter_are_refused(model, path):
    with pytest.raises(CacheFileError, match="another adapter"):
        load_prompt_cache(path, model, adapter="0123")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = layer.weight * 1.5
    with pytest.raises(CacheFileError, match=r"another model.*fingerprint"):
        load_prompt_cache(path, model)


def test_damaged_and_foreign_files_are_refused(model, path):
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CacheFileError):
            load_prompt_cache(path, model)
    mx.save_safetensors(str(path), {"a": mx.zeros((2,))}, {"format": "mlx"})
    with pytest.raises(CacheFileError, match="version"):
        load_prompt_cache(path, model)
    path.unlink()
    with pytest.raises(CacheFileError, match="no prompt cache file"):
        load_prompt_cache(path, model)


def test_what_can_not_be_saved(model, cache, tmp_path):
    with pytest.raises(CacheFileError, match="holds no tokens"):
        save_prompt_cache(tmp_path / "c.safetensors", model.make_cache(), model)
    with pytest.raises(CacheFileError, match=r"named \*\.safetensors"):
        save_prompt_cache(tmp_path / "c.cache", cache, model)


def test_an_interrupt_leaves_the_old_file(model, cache, path, monkeypatch):
    before = path.read_bytes()

    def interrupted(name, *args):
        save_file(name, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr("afm_mlx.engine.prompt_cache.save_file", interrupted)
    model.prefill(mx.array([[4]]), cache)
    with pytest.raises(KeyboardInterrupt):
        save_prompt_cache(path, cache, model)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@each(
    ("name", "value", "words"),
    [
        ("kind", "x", "kind is 'x', which is no JSON"),
        ("kind", "[]", r"kind is \[\]; 'int8' or 'float'"),
        ("kind", '["int8", 3, true]', "a window of more than 4 tokens"),
        ("kind", '["int8", 8, false]', "seen 9 tokens and forgotten 0, which does not go with 9"),
        ("kind", '["float", null, false]', "block 0: keys are mlx.core.int8"),
        ("kind", None, "has no kind"),
        ("metadata", "[1]", r"metadata is \[1\]"),
        ("metadata", "[" * 100_000, r"metadata is '\[\[\[\["),
        ("rows", [[100], [0]], "block 0: a row has seen 100 tokens and forgotten 0"),
        ("1.rows", [[8], [0]], "blocks 0 and 1 hold different rows"),
        ("1.keys", None, "has no tensor 1.keys"),
        ("9.keys", [1], "has the tensor 9.keys, which no cache has"),
        ("1.values", [[1]], r"1.values is \[1, 1\]; the model needs"),
    ],
)
def test_files_that_contradict_themselves_are_refused(model, path, name, value, words):
    """A false length was believed once, and what lay behind the tokens was attended to."""
    tensors, header = mx.load(str(path), return_metadata=True)
    mx.eval(tensors)
    for key in [n for n in tensors if n.endswith(".rows")] if name == "rows" else [name]:
        held = header if key in header else tensors
        held.pop(key, None)
        if value is not None:
            held[key] = value if isinstance(value, str) else mx.array(value)
    changed = path.with_name("changed.safetensors")
    save_file(changed, tensors, header)
    with pytest.raises(CacheFileError, match=words) as caught:
        load_prompt_cache(changed, model)
    assert str(changed) in str(caught.value)


def test_numbers_that_are_none_are_refused(model, tmp_path):
    path, cache = tmp_path / "c.safetensors", model.make_cache("float")
    model.prefill(mx.array([[1, 2, 3]]), cache)
    cache[1].buffer[0, 0, 1, 0] = float("nan")
    save_prompt_cache(path, cache, model)
    with pytest.raises(CacheFileError, match=r"1\.keys holds NaN or infinity"):
        load_prompt_cache(path, model)
