"""Prompt caches in files, and kept from one prompt to the next: answers are the same as without them."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.generation import stream_generate
from afm_mlx.engine.prompt_cache import (
    PromptCaches,
    load_prompt_cache,
    save_prompt_cache,
    tokens_in,
)
from afm_mlx.errors import CacheFileError, ContextLengthError
from tests.tools.cases import each
from tests.tools.engines import SIZES, some_prompt
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

# -- files


@pytest.fixture
def stored_model(rng):
    return random_model(random_config(rng, num_layers=4, num_kv_reuse_layers=1), rng)


@pytest.fixture
def cache(rng, stored_model):
    """Of 9 tokens."""
    cache = stored_model.make_cache()
    stored_model.prefill(mx.array(rng.integers(0, stored_model.args.vocab_size, (1, 9))), cache)
    return cache


@pytest.fixture
def path(stored_model, cache, tmp_path):
    """The file of that cache, the only one in its folder."""
    save_prompt_cache(tmp_path / "c.safetensors", cache, stored_model)
    return tmp_path / "c.safetensors"


@pytest.mark.parametrize("kind", [("int8", None), ("float", 600), ("int8", 16, True)])
def test_a_reloaded_cache_goes_on_as_if_nothing_had_happened(rng, stored_model, tmp_path, kind):
    cache, path = stored_model.make_cache(*kind), tmp_path / "c.safetensors"
    tokens = mx.array(rng.integers(0, stored_model.args.vocab_size, (1, 303)))
    for start in range(0, 300, 100):
        stored_model.prefill(tokens[:, start : start + 100], cache)
    save_prompt_cache(path, cache, stored_model, metadata={"note": "é"})
    loaded, metadata = load_prompt_cache(path, stored_model)
    assert metadata == {"note": "é"}
    assert loaded[0].kind == cache[0].kind
    assert loaded[0].is_trimmable() == (kind[1] != 16)
    assert mx.array_equal(
        stored_model(tokens[:, 300:], loaded), stored_model(tokens[:, 300:], cache)
    )
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_another_model_or_adapter_are_refused(stored_model, path):
    with pytest.raises(CacheFileError, match="another adapter"):
        load_prompt_cache(path, stored_model, adapter="0123")
    layer = stored_model.model.layers[0].mlp.up_proj
    layer.weight = layer.weight * 1.5
    with pytest.raises(CacheFileError, match=r"another model.*fingerprint"):
        load_prompt_cache(path, stored_model)


def test_damaged_and_foreign_files_are_refused(stored_model, path):
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CacheFileError):
            load_prompt_cache(path, stored_model)
    mx.save_safetensors(str(path), {"a": mx.zeros((2,))}, {"format": "mlx"})
    with pytest.raises(CacheFileError, match="version"):
        load_prompt_cache(path, stored_model)
    path.unlink()
    with pytest.raises(CacheFileError, match="no prompt cache file"):
        load_prompt_cache(path, stored_model)


def test_what_can_not_be_saved(stored_model, cache, tmp_path):
    with pytest.raises(CacheFileError, match="holds no tokens"):
        save_prompt_cache(tmp_path / "c.safetensors", stored_model.make_cache(), stored_model)
    with pytest.raises(CacheFileError, match=r"named \*\.safetensors"):
        save_prompt_cache(tmp_path / "c.cache", cache, stored_model)


def test_an_interrupt_leaves_the_old_file(stored_model, cache, path, monkeypatch):
    before = path.read_bytes()

    def interrupted(name, *args):
        save_file(name, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr("afm_mlx.engine.prompt_cache.save_file", interrupted)
    stored_model.prefill(mx.array([[4]]), cache)
    with pytest.raises(KeyboardInterrupt):
        save_prompt_cache(path, cache, stored_model)
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
def test_files_that_contradict_themselves_are_refused(stored_model, path, name, value, words):
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
        load_prompt_cache(changed, stored_model)
    assert str(changed) in str(caught.value)


def test_numbers_that_are_none_are_refused(stored_model, tmp_path):
    path, cache = tmp_path / "c.safetensors", stored_model.make_cache("float")
    stored_model.prefill(mx.array([[1, 2, 3]]), cache)
    cache[1].buffer[0, 0, 1, 0] = float("nan")
    save_prompt_cache(path, cache, stored_model)
    with pytest.raises(CacheFileError, match=r"1\.keys holds NaN or infinity"):
        load_prompt_cache(path, stored_model)


# -- from one prompt to the next

VOCAB = SIZES["vocab_size"]
COUNT = 5


@pytest.fixture
def fed(model, tokenizer):
    """Run a prompt on a store's cache; returns its answer, and how many tokens of the prompt were fed."""

    def fed(caches, prompt, adapter=None, max_tokens=COUNT):
        with caches.continuing(prompt, adapter) as run:
            for response in stream_generate(
                model, tokenizer, run.rest, max_tokens, prompt_cache=run.cache, logprobs=False
            ):
                run.answer.append(response.token)
        return run.answer, len(run.rest)

    return fed


def from_scratch(model, tokenizer, prompt):
    return [r.token for r in stream_generate(model, tokenizer, prompt, COUNT, logprobs=False)]


def test_what_two_prompts_begin_with_is_not_computed_again(model, tokenizer, fed, rng):
    caches = PromptCaches(model.make_cache)
    first, other = some_prompt(rng, 9), some_prompt(rng, 3)
    answer, count = fed(caches, first)
    assert (answer, count) == (from_scratch(model, tokenizer, first), 9)
    for prompt, expected in (
        ([*first, *answer, *other], 1 + 3),  # the last token of an answer is not in the cache
        ([*first[:6], (first[6] + 1) % VOCAB], 1),
        (first[:6], 1),  # the last token always is fed
        ([(first[0] + 1) % VOCAB, *first], 10),
    ):
        answer, count = fed(caches, prompt)
        assert (answer, count) == (from_scratch(model, tokenizer, prompt), expected)


def test_each_adapter_has_a_cache_of_its_own(model, fed, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 8)
    assert [fed(caches, prompt, name)[1] for name in ("a", None, "b", "a", None)] == [8, 8, 8, 1, 1]


def test_a_window_that_has_forgotten_tokens_goes_on_or_begins_again(model, fed, rng):
    caches = PromptCaches(lambda: model.make_cache(max_size=16, sliding_window=True))
    prompt = some_prompt(rng, 600)
    answer, _ = fed(caches, prompt)
    assert fed(caches, [*prompt, *answer, 3])[1] == 2
    assert fed(caches, prompt) == (answer, 600)


def test_after_an_error_the_cache_holds_what_was_fed(model, tokenizer, fed, rng):
    caches = PromptCaches(lambda: model.make_cache(max_size=12))
    prompt = some_prompt(rng, 8)
    fed(caches, prompt, max_tokens=2)
    with pytest.raises(ContextLengthError):
        fed(caches, [*prompt, *some_prompt(rng, 9)])
    assert fed(caches, prompt, max_tokens=2)[1] == 1
    with pytest.raises(ContextLengthError):
        fed(caches, prompt, max_tokens=-1)
    answer, count = fed(caches, prompt)
    assert (answer, count) == (from_scratch(model, tokenizer, prompt), 1)


def test_after_ctrl_c_a_cache_is_kept_only_if_nothing_was_written(model, tokenizer, fed, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 8)
    fed(caches, prompt)
    with pytest.raises(KeyboardInterrupt), caches.continuing(prompt):
        raise KeyboardInterrupt
    assert fed(caches, prompt)[1] == 1
    with pytest.raises(KeyboardInterrupt), caches.continuing(prompt) as run:
        model.prefill(mx.array([run.rest]), run.cache)
        raise KeyboardInterrupt
    answer, count = fed(caches, prompt)
    assert (answer, count) == (from_scratch(model, tokenizer, prompt), 8)


def test_a_cache_that_is_in_use_is_lent_to_nobody_else(model, rng):
    caches = PromptCaches(model.make_cache)
    prompt = some_prompt(rng, 4)
    with caches.continuing(prompt) as one, caches.continuing(prompt) as other:
        assert one.cache is not other.cache
        assert one.rest == other.rest == prompt


def test_a_cache_is_kept_only_if_it_says_that_it_holds_the_tokens(model, rng):
    caches = PromptCaches(model.make_cache)
    cache = model.make_cache()
    model.prefill(mx.array([[1, 2, 3]]), cache)
    assert tokens_in(cache) == 3
    caches.keep(cache, [1, 2])
    with caches.continuing([1, 2, 3, 4]) as run:
        assert len(run.rest) == 4
    cache[0].trim(1)
    assert tokens_in(cache) is None


def test_caches_of_the_zoo(rng):
    model = zoo_model("llama", VOCAB, 3)
    cache = [KVCache() for _ in model.layers]
    model(mx.array([some_prompt(rng, 6)]), cache=cache)
    assert tokens_in(cache) == 6
    assert tokens_in([ArraysCache(2), *cache]) == 6
    assert tokens_in([CacheList(ArraysCache(2), *cache)]) == 6
    assert tokens_in([CacheList(KVCache(), *cache)]) is None
    assert tokens_in([ArraysCache(2)]) is None  # a recurrent layer doesn't count tokens
