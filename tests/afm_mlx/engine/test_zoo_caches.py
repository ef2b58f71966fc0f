"""Every kind of cache that mlx-lm has: what is kept of it for later prompts, and that answers stay the same."""

import inspect

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PAGE, Columns, PrefixCache, _Snapshot
from afm_mlx.engine.prompt_cache import PromptCaches, tokens_in
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.engine.zoo_caches import CUT, KEPT, can_be_kept, leaves
from afm_mlx.errors import RequestError
from afm_mlx.kernels import dispatch
from tests.tools.compare import assert_close
from tests.tools.engines import (
    SIZES,
    Adapters,
    logprobs_of,
    naive_greedy,
    run,
    some_prompt,
    tokens_of,
)
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
LARGE = 1 << 30
KINDS = {  # architectures, and the kinds of their caches
    "llama": ["KVCache"],
    "longcat_flash": ["CacheList", "KVCache"],
    "gemma3_text": ["KVCache", "RotatingKVCache"],
    "gpt_oss": ["KVCache", "RotatingKVCache"],
    "lfm2": ["ArraysCache", "KVCache"],
    "mamba2": ["ArraysCache"],
    "falcon_h1": ["ArraysCache", "CacheList", "KVCache"],
    "baichuan_m1": ["ArraysCache", "CacheList", "KVCache", "RotatingKVCache"],
}
NO_BATCHES = {  # mlx-lm has none for these, so a model with one does not run in the engine
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "QuantizedKVCache",
}


@pytest.fixture(params=KINDS)
def model(request, rng):
    made = zoo_model(request.param, VOCAB, int(rng.integers(2**31)))
    cache = make_prompt_cache(made)
    kinds = {type(entry).__name__ for entry in [*cache, *leaves(cache)]}
    assert sorted(kinds) == KINDS[request.param]
    return made


@pytest.fixture
def fed(model, monkeypatch):
    """The (rows, tokens) that the model has been fed so far."""
    fed, call = [], type(model).__call__

    def counted(self, inputs, *args, **options):
        fed.append(inputs.shape)
        return call(self, inputs, *args, **options)

    monkeypatch.setattr(type(model), "__call__", counted)
    return fed


def answer(engine, prompt, count=6, **options):
    """Tokens, and how many tokens of the prompt were found."""
    row = engine.submit(Request(prompt, count, logprobs=False, **options))
    responses = run(engine)[row]
    return [r.token for r in responses], responses[-1].cached_tokens


def test_each_kind_of_mlx_lm_is_handled(tokenizer):
    """A kind that mlx-lm gains is kept, or stands in NO_BATCHES because it can't be batched."""
    classes = [
        kind
        for _, kind in inspect.getmembers(mlx_caches, inspect.isclass)
        if issubclass(kind, mlx_caches._BaseCache) and kind is not mlx_caches._BaseCache
    ]
    named = {kind.__name__ for kind in classes}
    known = {kind.__name__ for kind in KEPT if kind.__module__ == mlx_caches.__name__}
    assert named == known | NO_BATCHES | {"CacheList"}
    for kind in classes:
        assert hasattr(kind, "merge") == (kind.__name__ not in NO_BATCHES)
    tested = {name for names in KINDS.values() for name in names}
    assert tested | NO_BATCHES | {"BatchKVCache", "BatchRotatingKVCache"} == named
    model = zoo_model("llama", VOCAB, 1)
    for entry in (
        mlx_caches.QuantizedKVCache(),
        CacheList(KVCache(), mlx_caches.ChunkedKVCache(8)),
    ):
        model.make_cache = lambda entry=entry: [KVCache(), entry]
        with pytest.raises(
            RequestError, match=r"has a (Quantized|Chunked)KVCache, of which mlx-lm has no"
        ):
            Engine(model, tokenizer)
    assert not can_be_kept([mlx_caches.QuantizedKVCache()])
    assert not can_be_kept([mlx_caches.CacheList(mlx_caches.ChunkedKVCache(8))])


def test_prompts_are_padded_only_where_states_keep_padding_out(rng, model, tokenizer, fed):
    engine = Engine(model, tokenizer)
    is_baichuan = type(model).__module__.endswith("baichuan_m1")
    assert engine._caches.takes_padding == (not is_baichuan)
    prompts = [some_prompt(rng, n) for n in (4, 9, 20)]
    rows = [engine.submit(Request(prompt, 8, logprobs=False)) for prompt in prompts]
    fed.clear()
    found = tokens_of(run(engine))
    assert [found[r] for r in rows] == [naive_greedy(model, prompt, 8) for prompt in prompts]
    assert ((3, 19) in fed) == (not is_baichuan)


@pytest.mark.skipif(dispatch.device() != "cpu", reason="a GPU has chunks of one size")
def test_padded_prompts_in_two_chunks(rng, model, tokenizer, fed, monkeypatch):
    """While a row decodes; the shorter prompt ends in the first chunk, with it, and in the second one.

    Where a row has more tokens to come than a call feeds, mlx-lm's `ssm_attn` reads beyond its arrays.
    """
    call = type(model).__call__

    def checked(self, inputs, cache, **options):
        for leaf in leaves(cache):
            if getattr(leaf, "lengths", None) is not None:
                assert mx.max(leaf.lengths).item() <= inputs.shape[1]
        return call(self, inputs, cache=cache, **options)

    engine = Engine(model, tokenizer)
    takes_padding = engine._caches.takes_padding  # watches which states are asked for their lengths
    monkeypatch.setattr(type(model), "__call__", checked)
    for length in (10, 17, 25):
        engine.submit(Request(some_prompt(rng, 5), 12))
        engine.step()
        prompts = [some_prompt(rng, n) for n in (30, length)]
        rows = [engine.submit(Request(prompt, 4)) for prompt in prompts]
        fed.clear()
        found = run(engine)
        assert ((2, 16) in fed) == takes_padding
        for row, prompt in zip(rows, prompts, strict=True):
            tokens = [response.token for response in found[row]]
            logits = call(model, mx.array([prompt + tokens]))[:, len(prompt) - 1 : -1]
            wanted = logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True)
            assert_close(logprobs_of(found[row]), wanted, what=length)


@pytest.mark.parametrize("length", [10, PAGE, PAGE + 41])
def test_the_second_turn_of_a_chat_computes_new_tokens_only(rng, model, tokenizer, fed, length):
    plain = Engine(model, tokenizer)
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(LARGE), prefill_step_size=50)
    first = some_prompt(rng, length)
    said, found = answer(engine, first)
    assert (said, found) == (answer(plain, first)[0], 0)
    second = [*first, *said, *some_prompt(rng, 30)]
    wanted = answer(plain, second)[0]
    fed.clear()
    tokens, found = answer(engine, second)
    # The answer's last token was not fed; the prompt's last token is the first decode step.
    assert found == len(first) + len(said) - 1
    assert sum(rows * count for rows, count in fed) == len(second) - found + len(tokens) - 1
    assert tokens == wanted
    # The same prompt again, as a retry has it.
    assert answer(engine, second) == (wanted, len(second) - 1)
    # The first prompt, whose answer the user has changed.
    changed = [*first, (said[0] + 1) % VOCAB, 3]
    assert answer(engine, changed) == (answer(plain, changed)[0], len(first) - _states(model))


def _states(model):
    return any(type(leaf) not in CUT for leaf in leaves(make_prompt_cache(model)))


def test_what_prompts_begin_with_is_found_from_the_third_on(rng, model, tokenizer):
    """Nothing says that a system prompt ends, until a second prompt goes on otherwise there."""
    plain = Engine(model, tokenizer)
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(LARGE))
    system = some_prompt(rng, PAGE + 21)
    found = []
    for first in range(4):
        prompt = [*system, first, *some_prompt(rng, 40)]
        tokens, cached = answer(engine, prompt)
        assert tokens == answer(plain, prompt)[0]
        found.append(cached)
    assert found == [0, 0 if _states(model) else len(system), len(system), len(system)]


def test_rows_of_a_batch_begin_with_what_others_have_left(rng, model, tokenizer):
    plain = Engine(model, tokenizer)
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(LARGE))
    firsts = [some_prompt(rng, n) for n in (5, 31, 90, 70)]
    said = [answer(plain, prompt)[0] for prompt in firsts]
    rows = [engine.submit(Request(prompt, 6, logprobs=False)) for prompt in firsts]
    found = tokens_of(run(engine))
    assert [found[row] for row in rows] == said
    prompts = [[*p, *s, *some_prompt(rng, 9)] for p, s in zip(firsts, said, strict=True)]
    prompts.insert(2, some_prompt(rng, 50))  # one that begins from nothing
    wanted = [answer(plain, prompt)[0] for prompt in prompts]
    rows = [engine.submit(Request(prompt, 6, logprobs=False)) for prompt in prompts]
    responses = run(engine)
    assert [[r.token for r in responses[row]] for row in rows] == wanted
    cached = [responses[row][-1].cached_tokens for row in rows]
    assert cached == [10, 36, 0, 95, 75]


def test_an_answer_that_ends_by_itself_or_is_cancelled_leaves_all_of_it(rng, model, tokenizer):
    plain = Engine(model, tokenizer)
    engine = Engine(model, tokenizer, prefix_cache=PrefixCache(LARGE), prefill_step_size=32)
    prompt = some_prompt(rng, 40)
    said = answer(plain, prompt, 12)[0]
    end = said.index(said[7])
    tokenizer.eos_token_ids = {said[end]}
    tokens, _ = answer(engine, prompt, 12)
    assert tokens == said[: end + 1]
    tokenizer.eos_token_ids = set()
    second = [*prompt, *tokens, 1, 2, 3]
    wanted = answer(plain, second)[0]
    tokens, found = answer(engine, second)
    assert tokens == wanted
    # The end token was fed to the step that was submitted ahead; of pages it is taken back.
    assert found == 40 + end + _states(model)
    row = engine.submit(Request(long := some_prompt(rng, 100), 5))
    engine.step()
    engine.step()
    engine.cancel(row)  # in its prompt
    assert answer(engine, long) == (answer(plain, long)[0], 64)
    row = engine.submit(Request(long, -1, logprobs=False))
    tokens = [response.token for _ in range(6) for response in engine.step()]
    engine.cancel(row)  # in its answer
    again = [*long, *tokens, 7, 8]
    found = answer(engine, again)
    assert found[0] == answer(plain, again)[0]
    assert found[1] >= len(long) + len(tokens) - 1


@pytest.mark.parametrize("speculation", [None, Speculation(prompt_lookup=True, num_draft_tokens=2)])
def test_a_callers_cache_goes_from_turn_to_turn(rng, model, tokenizer, fed, speculation):
    """All of its entries hold the same tokens, also where the end token can't be taken back from some."""
    plain, engine = Engine(model, tokenizer), Engine(model, tokenizer, speculation=speculation)
    caches, prompt, added = PromptCaches(engine.make_cache), some_prompt(rng, 40), []
    is_counted = type(model).__module__.rpartition(".")[2] != "mamba2"
    for turn in range(3):
        if turn == 1:
            said = answer(plain, prompt, 12)[0]
            tokenizer.eos_token_ids = {said[7]}
        wanted = answer(plain, prompt, 12)[0]
        fed.clear()
        with caches.continuing(prompt) as lent:
            lent.answer, _ = answer(engine, lent.rest, 12, cache=lent.cache)
            new = len(lent.rest)
        assert lent.answer == wanted
        known = {
            tokens_in([entry]) for entry in lent.cache if type(entry).__name__ != "ArraysCache"
        }
        assert len(known) == is_counted
        tokenizer.eos_token_ids = set()
        if turn and is_counted:
            # Of what the turn before said, only its last token is fed again, if that.
            assert new - len(added) in ((0, 1) if _states(model) else (1,))
        added = some_prompt(rng, 5)
        prompt = [*prompt, *lent.answer, *added]


def test_snapshots_count_and_are_evicted_before_their_pages(rng, model, tokenizer):
    plain = Engine(model, tokenizer)
    probe = PrefixCache(LARGE)
    answer(Engine(model, tokenizer, prefix_cache=probe), some_prompt(rng, 2 * PAGE))
    prefixes = PrefixCache(2 * probe.nbytes)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    prompts = [some_prompt(rng, int(rng.integers(1, 3 * PAGE))) for _ in range(6)]
    for _ in range(12):
        index = int(rng.integers(len(prompts)))
        prompt = prompts[index]
        tokens, _ = answer(engine, prompt, 4)
        assert tokens == answer(plain, prompt, 4)[0]
        prompts[index] = [*prompt, *tokens, 5] if len(prompt) < 200 else some_prompt(rng, 9)
        kept = list(prefixes._pages)
        assert prefixes.nbytes == sum(item.nbytes for item in kept) <= prefixes.budget
        assert all(item.above() is not None for item in kept)
        # No more columns of a window than the next token sees.
        states = [
            array for item in kept if type(item) is _Snapshot for array in item.columns.groups
        ]
        assert all(array.ndim < 4 or array.shape[2] <= 24 for array in states)
    assert prefixes.evictions
    small = PrefixCache(100)
    assert answer(Engine(model, tokenizer, prefix_cache=small), prompts[0]) == (
        answer(plain, prompts[0])[0],
        0,
    )
    assert small.nbytes == 0


def test_snapshots_are_copies(rng):
    """A snapshot keeps no batch's memory: its arrays are as large as it says."""
    batch = mx.array(rng.normal(size=(8, 1000, 8)).astype(np.float32))
    mx.eval(batch)
    before = mx.get_active_memory()
    kept = Columns.whole([batch[3:4], None])
    mx.eval(kept.groups)
    size = batch.nbytes // 8
    assert kept.nbytes == size
    wanted = np.array(batch[3:4])
    del batch
    assert mx.get_active_memory() - before < -6 * size
    state, nothing = kept.separate()
    assert nothing is None
    assert (np.array(state) == wanted).all()


@pytest.mark.parametrize("kind", ["gemma3_text", "lfm2"])
def test_nobody_finds_what_another_client_or_adapter_has_left(rng, tokenizer, tmp_path, kind):
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    with AdapterPool(model) as pool:
        Adapters(model, rng, tmp_path).add(pool, "a", 4)
        plain = Engine(model, tokenizer, adapters=pool)
        engine = Engine(model, tokenizer, adapters=pool, prefix_cache=PrefixCache(LARGE))
        for _ in range(10):  # few prompts have the same answer with the adapter and without
            prompt = some_prompt(rng, PAGE + 10)
            wanted = {name: answer(plain, prompt, adapter=name)[0] for name in (None, "a")}
            if wanted["a"] != wanted[None]:
                break
        assert wanted["a"] != wanted[None]
        for found in (0, len(prompt) - 1):
            for client in ("one", "other"):
                for name in (None, "a"):
                    got = answer(engine, prompt, adapter=name, client=client)
                    assert got == (wanted[name], found)


def test_a_folder_has_no_pages_that_need_snapshots(rng, model, tokenizer, tmp_path):
    prefixes = PrefixCache(LARGE, tmp_path)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    prompt = some_prompt(rng, 2 * PAGE + 5)
    said = answer(engine, prompt)[0]
    prefixes.close()
    assert len(list(tmp_path.iterdir())) == (0 if _states(model) else 2)
    prefixes = PrefixCache(LARGE, tmp_path)
    again = answer(Engine(model, tokenizer, prefix_cache=prefixes), prompt)
    prefixes.close()
    assert again == (said, 0 if _states(model) else 2 * PAGE)
