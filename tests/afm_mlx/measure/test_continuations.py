"""Continuations have the scores that whole prompts give them, and a context is computed once."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.row import Row
from afm_mlx.errors import DataError
from afm_mlx.measure.continuations import score_continuations
from afm_mlx.model.model import Model
from tests.tools.cases import each
from tests.tools.engines import SIZES, Adapters, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
WORDS = WordTokenizer(VOCAB, ends=())


def likelihoods(model, context, continuation):
    """log p of each token of the continuation, of one full forward, and if all are the likeliest."""
    tokens = [*context, *continuation]
    logits = np.array(model(mx.array([tokens]))[0, len(context) - 1 : -1], np.float64)
    logits -= logits.max(-1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = logprobs[np.arange(len(continuation)), np.array(continuation, int)]
    return own, bool((logprobs.argmax(-1) == continuation).all())


def some_pairs(rng, model):
    """Contexts that begin alike, with one to four continuations each, one of them the likeliest token."""
    shared = some_prompt(rng, 30)
    pairs = []
    for length in (1, 2, 5, 40):
        context = [*shared[:length], *some_prompt(rng, length)]
        likeliest = int(mx.argmax(model(mx.array([context]))[0, -1]).item())
        pairs += [(context, [likeliest])]
        pairs += [(context, some_prompt(rng, n)) for n in rng.integers(0, 6, rng.integers(4))]
    return [pairs[i] for i in rng.permutation(len(pairs))]


@pytest.fixture
def fed(monkeypatch):
    """The number of tokens that rows were fed."""
    counts, taken = [], Row.close

    def counted(self):
        counts.append(len(self.request.prompt) - 1 - self.cached_tokens)
        return taken(self)

    monkeypatch.setattr(Row, "close", counted)
    return counts


@pytest.mark.parametrize("kind", ["float", "llama", "lfm2"])
@pytest.mark.parametrize(("batch_size", "prefix_memory"), [(1, 1 << 30), (5, 1 << 30), (3, 0)])
def test_scores_are_those_of_whole_prompts(rng, kind, batch_size, prefix_memory):
    model = tiny(rng) if kind == "float" else zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    pairs = some_pairs(rng, model)
    options = {"batch_size": batch_size, "prefix_memory": prefix_memory, "top": 2}
    found = dict(score_continuations(model, WORDS, pairs, **options))
    assert sorted(found) == list(range(len(pairs)))
    greedy = 0
    for i, (context, continuation) in enumerate(pairs):
        wanted, is_greedy = likelihoods(model, context, continuation)
        np.testing.assert_allclose(found[i].logprobs, wanted, atol=1e-4, rtol=0)
        assert found[i].is_greedy == is_greedy
        assert found[i].top_tokens.shape == (len(continuation), 2)
        greedy += is_greedy
    assert greedy >= 4


@pytest.mark.parametrize("kind", ["float", "lfm2"])
def test_a_context_is_computed_once(rng, kind, fed):
    model = tiny(rng) if kind == "float" else zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    context = some_prompt(rng, 100)
    pairs = [(context, some_prompt(rng, 3)) for _ in range(4)]
    assert len(list(score_continuations(model, WORDS, pairs))) == 4
    assert fed == [99, 3, 3, 3, 3]
    fed.clear()
    list(score_continuations(model, WORDS, pairs, prefix_memory=0))
    assert fed == [102] * 4


def test_continuations_of_a_shared_context_are_not_kept(rng, monkeypatch):
    kept, keep = [], PrefixCache.keep

    def counted(self, key, tokens, *more):
        kept.append(len(tokens))
        keep(self, key, tokens, *more)

    monkeypatch.setattr(PrefixCache, "keep", counted)
    model, context = tiny(rng), some_prompt(rng, 100)
    list(score_continuations(model, WORDS, [(context, some_prompt(rng, 9)) for _ in range(4)]))
    assert kept
    assert set(kept) <= {99, 100}
    kept.clear()
    list(score_continuations(model, WORDS, [(context, some_prompt(rng, 9))]))
    assert max(kept) >= 108  # another context may go on from there


def test_contexts_that_begin_alike_share_their_beginning(rng, fed):
    model, shared = tiny(rng), some_prompt(rng, 100)
    pairs = [([*shared, i], [j]) for i in range(3) for j in range(2)]
    list(score_continuations(model, WORDS, pairs, batch_size=1))
    assert fed == [100, 1, 1, 0, 1, 1, 0, 1, 1]


def test_adapters(rng, tmp_path):
    model = tiny(rng)
    pairs = some_pairs(rng, model)
    with AdapterPool(model) as pool:
        adapters = Adapters(model, rng, tmp_path)
        adapters.add(pool, "a", 2)
        found = dict(score_continuations(model, WORDS, pairs, adapter="a", adapters=pool))
        merged = adapters.merged({"a": 1.0})
    for i, pair in enumerate(pairs):
        np.testing.assert_allclose(found[i].logprobs, likelihoods(merged, *pair)[0], atol=2e-3)


def test_continuations_of_a_context_share_chunks(rng, chunks_of_scores):
    pairs = [(some_prompt(rng, 20), some_prompt(rng, 3)) for _ in range(6)]
    pairs = [(context, some_prompt(rng, 3)) for context, _ in pairs for _ in range(4)]
    list(score_continuations(tiny(rng), WORDS, pairs))
    assert all(rows % 4 == 0 and columns == 3 for rows, columns in chunks_of_scores)
    assert sum(rows for rows, _ in chunks_of_scores) == 24


@pytest.fixture
def chunks_of_scores(monkeypatch):
    """The (rows, columns) that ran through all blocks."""
    chunks, hidden = [], Model.hidden

    def counted(self, tokens, cache):
        chunks.append(tokens.shape)
        return hidden(self, tokens, cache)

    monkeypatch.setattr(Model, "hidden", counted)
    return chunks


def test_few_rows_wait_at_a_time(rng, monkeypatch):
    """Contexts that are computed long before their continuations would be evicted."""
    model, most, step = tiny(rng), [], Engine.step

    def counted(self):
        most.append(self.rows_waiting + self.rows_running)
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    pairs = [(some_prompt(rng, 5), [j]) for _ in range(30) for j in range(2)]
    pairs += [(context, [3]) for context, _ in pairs[::2]]
    assert len(list(score_continuations(model, WORDS, pairs, batch_size=4))) == 90
    assert 3 <= max(most) <= 4


@each(
    "pair, message",
    [
        (([], [1]), "Pair 1: the context is empty"),
        (([1], [VOCAB]), f"Pair 1: The prompt has token ids from 1 to {VOCAB}"),
        (([1] * 500, [1] * 20), "Pair 1: The prompt needs 520 tokens"),
        (("w1", [1]), "Pair 1: The prompt is 'w1'"),
        (([1], "w1"), "Pair 1: The prompt is 'w1'"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_named(rng, pair, message):
    model = tiny(rng, kv_bits=8)
    assert model.args.context_length == 512
    with pytest.raises(DataError, match=message):
        list(score_continuations(model, WORDS, [([1], [2]), pair]))
