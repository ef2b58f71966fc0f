"""The KV cache against the plainest thing that could work: lists of columns."""

import copy
import itertools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import CacheFileError, ContextLengthError
from afm_mlx.kernels import write_tokens
from afm_mlx.model.attention import Positions
from afm_mlx.model.kv_cache import KEEP, STEP, TAIL, KVCache
from tests.tools.cases import each
from tests.tools.compare import error
from tests.tools.models import random_config, random_model


def columns(rng, rows, length, int8=True):
    """Codes of keys and values, two heads each; or floats that are no codes."""
    codes = mx.array(rng.integers(-128, 128, (rows, 4, length, 4)).astype(np.int8))
    return codes if int8 else codes.astype(mx.bfloat16) + 0.25


def test_one_entry_per_block_and_none_for_those_that_store_nothing(rng):
    config = random_config(rng, num_layers=5, num_kv_reuse_layers=2)
    model = random_model(config, rng)
    cache = model.make_cache()
    assert len(cache) == len(model.layers) == 5
    # A prompt's first tokens take what they need; then capacity grows in steps.
    for capacity in (3, STEP):
        model.prefill(mx.array([[1, 2, 3]]), cache)
        assert [layer.empty() for layer in cache] == [False] * 3 + [True] * 2
        wanted = capacity * config.kv_values_per_token  # a byte each
        assert sum(layer.nbytes for layer in cache) == wanted


def test_growth_in_steps_keeps_what_was_there(rng):
    cache, seen = KVCache(), []
    for length in (3, STEP - 3, 1, 2 * STEP, 7):
        seen.append(columns(rng, 1, length))
        cache.update(seen[-1])
        assert cache.buffer.shape[2] == 3 or cache.buffer.shape[2] % STEP == 0
        wanted = mx.concatenate(seen, axis=2)
        assert mx.array_equal(cache.in_use(), wanted)
        assert mx.array_equal(mx.concatenate(cache.keys_and_values(), axis=1), wanted)


@pytest.mark.usefixtures("exact_memory")
def test_decode_step_does_not_copy_the_cache(rng):
    """A column is written in place: memory at its peak stays far under a second copy of the arrays."""
    size = 64 * STEP
    cache = KVCache()
    cache.update(mx.zeros((1, 4, size, 64), mx.int8))
    cache.update(mx.ones((1, 4, 1, 64), mx.int8))  # grows once
    mx.eval(cache.buffer)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(4):
        cache.update(mx.ones((1, 4, 1, 64), mx.int8))
        mx.eval(cache.state)
    assert mx.get_peak_memory() - held < cache.nbytes / 8


def filled(rng, length, **options):
    """A cache of random columns, and these."""
    cache = KVCache(**options)
    part = columns(rng, 1, length, cache.int8)
    cache.update(part)
    return cache, part


def test_rows_of_different_lengths_lie_side_by_side_join_and_leave(rng):
    caches, parts = zip(*(filled(rng, length) for length in (5, 1, 9)), strict=True)
    batch = KVCache.merge(caches[:2])
    batch.extend(caches[2])
    assert batch.lengths == batch.offset.tolist() == [5, 1, 9]
    new = columns(rng, 3, 2)
    batch.update(new)
    found = batch.in_use()
    batch.filter([2, 0])
    assert batch.lengths == [11, 7]
    for row, place in ((2, 0), (0, 1)):
        wanted = mx.concatenate([parts[row], new[row : row + 1]], axis=2)
        assert mx.array_equal(found[row : row + 1, :, : wanted.shape[2]], wanted)
        alone = batch.extract(place)
        assert alone.lengths == [wanted.shape[2]]
        assert mx.array_equal(alone.in_use(), wanted)


def decoded(rng, cache, count):
    """The columns of `count` tokens per row that decode steps write."""
    parts = []
    for _ in range(count):
        parts.append(columns(rng, len(cache.lengths), 1, cache.int8))
        _, tail, starts = cache.open_tail(4, 4)
        length = mx.array([n + 1 for n in cache.lengths], dtype=mx.int32)
        cache.take_tail(write_tokens(tail, parts[-1], length - starts))
    return mx.concatenate(parts, axis=2)


COUNTS = (1, TAIL - 1, TAIL, TAIL + 1, 2 * TAIL + 3, STEP)


@each("int8, count", list(itertools.product((True, False), COUNTS)))
def test_tokens_of_decode_steps_reach_the_buffer(rng, int8, count):
    rows = [5, 1, STEP - 1]
    caches, parts = zip(*(filled(rng, length, int8=int8) for length in rows), strict=True)
    batch = KVCache.merge(caches)
    new = decoded(rng, batch, count)
    assert batch.in_tail in range(1, TAIL + 1)
    assert batch.lengths == [length + count for length in rows]
    twins = [batch.extract(row) for row in range(3)] if count % 2 else None
    found = batch.in_use()
    assert batch.in_tail == 0
    for row, part in enumerate(parts):
        wanted = mx.concatenate([part, new[row : row + 1]], axis=2)
        assert mx.array_equal(found[row : row + 1, :, : wanted.shape[2]], wanted)
        if twins:
            assert mx.array_equal(twins[row].in_use(), wanted)


def test_a_tail_follows_what_happens_to_its_rows(rng):
    for int8, trim in itertools.product((True, False), (0, 2, 5, 7)):
        cache, part = filled(rng, 10, int8=int8)
        seen = mx.concatenate([part, decoded(rng, cache, 5)], axis=2)
        assert cache.trim(trim) == trim
        seen = seen[:, :, : 15 - trim]
        seen = mx.concatenate([seen, decoded(rng, cache, 3)], axis=2)
        twin = cache.copy()
        more = decoded(rng, twin, 2)
        prompt = columns(rng, 1, 4, int8)
        cache.update(prompt)
        assert mx.array_equal(twin.in_use(), mx.concatenate([seen, more], axis=2))
        assert mx.array_equal(cache.in_use(), mx.concatenate([seen, prompt], axis=2))
        decoded(rng, twin, 2)
        restored = KVCache(int8)
        restored.state = twin.state
        assert mx.array_equal(restored.in_use(), twin.in_use())
        twin.filter([0, 0])
        pair = decoded(rng, twin, 1)
        assert mx.array_equal(twin.in_use()[:, :, -1:], pair)
    # The first tokens of an empty cache.
    cache = KVCache()
    assert mx.array_equal(decoded(rng, cache, 3), cache.in_use())
    bounded = KVCache(max_size=2)
    decoded(rng, bounded, 2)
    with pytest.raises(ContextLengthError, match="bounded to 2 tokens and 3"):
        bounded.open_tail(4, 4)


@pytest.mark.usefixtures("exact_memory")
def test_decode_steps_never_copy_a_buffer_that_is_held(rng):
    cache = KVCache()
    cache.update(mx.zeros((1, 4, 64 * STEP, 64), mx.int8))
    token, held = mx.ones((1, 4, 1, 64), mx.int8), []
    for i in range(8):
        buffer, tail, starts = cache.open_tail(4, 64)
        held += [buffer, tail]
        cache.take_tail(write_tokens(tail, token, mx.array([i + 1], dtype=mx.int32)))
        mx.eval(cache.tail, starts, buffer)
        if i == 0:
            before = mx.get_active_memory()
            mx.reset_peak_memory()
    assert mx.get_peak_memory() - before <= 8 * tail.nbytes


def test_caches_of_different_kinds_do_not_share_a_batch():
    with pytest.raises(ValueError, match="one kind"):
        KVCache.merge([KVCache(int8=True), KVCache(int8=False)])


def test_padding_is_disowned(rng):
    batch = KVCache(rows=2)
    batch.prepare(lengths=[3, 5], right_padding=[2, 0])
    part = columns(rng, 2, 5)
    batch.update(part)
    batch.finalize()
    assert batch.lengths == [3, 5]
    new = columns(rng, 2, 1)
    batch.update(new)
    assert mx.array_equal(
        batch.in_use()[0, :, :4], mx.concatenate([part[0, :, :3], new[0]], axis=1)
    )


@pytest.mark.parametrize("int8", [True, False])
def test_padding_in_the_tail_is_disowned(rng, int8):
    """The last column of a padded prompt is fed as a decode step feeds it; the bound counts no padding."""
    caches, parts = zip(*(filled(rng, n, int8=int8, max_size=9) for n in (6, 2)), strict=True)
    batch = KVCache.merge(caches)
    batch.prepare(lengths=[2, 5], right_padding=[3, 0])
    part = columns(rng, 2, 4, int8)
    batch.update(part)
    part = mx.concatenate([part, decoded(rng, batch, 1)], axis=2)
    batch.finalize()
    assert batch.lengths == [8, 7]
    new = decoded(rng, batch, 1)
    found = batch.in_use()
    for row, fed in enumerate((2, 5)):
        wanted = mx.concatenate(
            [parts[row], part[row : row + 1, :, :fed], new[row : row + 1]], axis=2
        )
        assert mx.array_equal(found[row : row + 1, :, : wanted.shape[2]], wanted)
    with pytest.raises(ContextLengthError, match="bounded to 9 tokens and 10"):
        batch.open_tail(4, 4)


def test_the_first_tokens_stay_the_callers(rng):
    cache, part = KVCache(), columns(rng, 1, 4)
    before = np.array(part)
    cache.update(part)
    cache.trim(2)
    cache.update(columns(rng, 1, 1))
    np.testing.assert_array_equal(np.array(part), before)


def test_trim_and_copies_of_a_prefix_are_independent(rng):
    cache, part = filled(rng, 10)
    prefix = cache.copy(6)
    assert cache.trim(3) == 3
    one = columns(rng, 1, 1)
    cache.update(one)
    other = columns(rng, 1, 2)
    prefix.update(other)
    assert mx.array_equal(prefix.in_use(), mx.concatenate([part[:, :, :6], other], axis=2))
    assert mx.array_equal(cache.in_use(), mx.concatenate([part[:, :, :7], one], axis=2))
    with pytest.raises(ValueError, match="prefix of 99"):
        cache.copy(99)
    assert cache.trim(100) == 8
    assert cache.lengths == [0]


def test_bounded_cache_ends_with_an_error_that_says_what_to_do(rng):
    cache, part = filled(rng, 4, max_size=4)
    with pytest.raises(ContextLengthError, match=r"bounded to 4 tokens and 5 .* sliding window"):
        cache.update(part[:, :, :1])
    assert cache.lengths == [4]
    with pytest.raises(ContextLengthError, match="over 4"):
        KVCache(max_size=KEEP, sliding_window=True)


def windowed_twin(model, tokens, window):
    """Full recomputation with the window as a mask: what the sliding cache must amount to."""
    length = tokens.shape[1]
    query, key = np.arange(length)[:, None], np.arange(length)[None]
    visible = (key <= query) & ((key < KEEP) | (query - key < window - KEEP))
    positions = Positions(0, mx.array(visible))
    return model.head(model.forward(tokens, positions, [None] * len(model.model.layers)))


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_sliding_window_equals_a_masked_full_run(rng, chunk, monkeypatch):
    monkeypatch.setattr("afm_mlx.model.kv_cache.STEP", 16)
    config = random_config(rng, num_layers=4, num_kv_reuse_layers=2, kv_bits=None)
    model = random_model(config, rng)
    tokens = mx.array(rng.integers(0, config.vocab_size, (1, 150)))
    window = 24
    cache = model.make_cache(max_size=window, sliding_window=True)
    parts = [model(tokens[:, i : i + chunk], cache) for i in range(0, 150, chunk)]
    assert error(mx.concatenate(parts, axis=1), windowed_twin(model, tokens, window)) < 1e-4
    assert cache[0].buffer.shape[2] <= window + 16 + 50 + 16, "old tokens are really forgotten"
    assert not cache[0].is_trimmable()


def test_sliding_rows_of_different_ages_share_a_batch(rng, monkeypatch):
    monkeypatch.setattr("afm_mlx.model.kv_cache.STEP", 8)
    config = random_config(rng, num_layers=3, num_kv_reuse_layers=1, kv_bits=None)
    model = random_model(config, rng)
    rows = [mx.array(rng.integers(0, config.vocab_size, (1, n + 30))) for n in (50, 5, 21)]
    caches = [model.make_cache(max_size=16, sliding_window=True) for _ in rows]
    for tokens, cache in zip(rows, caches, strict=True):
        model.prefill(tokens[:, :-30], cache)
    batch = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    for left in range(30, 0, -1):
        logits = model(mx.concatenate([row[:, -left][:, None] for row in rows]), batch)
    for row, got in zip(rows, logits, strict=True):
        assert error(got[0], windowed_twin(model, row, 16)[0, -1]) < 1e-4


def test_a_deep_copy_is_independent(rng):
    """mlx-lm's evaluation code deep-copies caches."""
    cache, part = filled(rng, 3)
    twin = copy.deepcopy(cache)
    cache.update(columns(rng, 1, 1))
    assert (cache.lengths, twin.lengths) == ([4], [3])
    assert mx.array_equal(twin.in_use(), part)


# -- states that are restored from files

CODES = mx.zeros((1, 2, 9, 4), mx.int8)
WINDOW = {"max_size": 8, "sliding_window": True}


def restore(rows, options, **parts):
    state = {"keys": CODES, "values": CODES, "rows": mx.array(rows)} | parts
    KVCache(**options).state = list(state.values())


@pytest.mark.parametrize(
    ("rows", "options"), [([[9], [0]], {}), ([[9], [0]], {"max_size": 9}), ([[99], [90]], WINDOW)]
)
def test_states_that_are_sound(rows, options):
    restore(rows, options)


@each(
    ("rows", "options", "words"),
    [
        ([[100], [0]], {}, "seen 100 tokens and forgotten 0, which does not go with 9 columns"),
        ([[9], [0]], {"max_size": 8}, "seen 9 tokens and forgotten 0"),
        ([[-1], [0]], {}, "seen -1 tokens"),
        ([[12], [3]], {}, "seen 12 tokens and forgotten 3"),
        ([[9], [3]], WINDOW, "seen 9 tokens and forgotten 3"),
        ([[2**30 + 1], [2**30 - 8]], WINDOW, "seen 1073741825 tokens"),
        ([[8], [0]], {}, "no row has tokens for all of the 9 columns"),
        ([[9, 9], [0, 0]], {}, r"rows are mlx.core.int32 \[2, 2\]; int32 \[2, 1\] is needed"),
        ([9, 0], {}, r"rows are mlx.core.int32 \[2\]"),
        ([[9.0], [0.0]], {}, "rows are mlx.core.float32"),
    ],
)
def test_rows_that_do_not_go_with_the_columns(rows, options, words):
    with pytest.raises(CacheFileError, match=words):
        restore(rows, options)


@each(
    ("parts", "words"),
    [
        ({"keys": CODES.astype(mx.float16)}, r"keys are mlx.core.float16 .*; int8 .* are needed"),
        ({"values": CODES[0]}, r"values are mlx.core.int8 \[2, 9, 4\]"),
        ({"keys": CODES[:0]}, r"keys are mlx.core.int8 \[0, 2, 9, 4\]"),
        ({"values": CODES[:, :, :8]}, "both must be the same"),
    ],
)
def test_keys_and_values_of_another_kind(parts, words):
    with pytest.raises(CacheFileError, match=words):
        restore([[9], [0]], {}, **parts)
