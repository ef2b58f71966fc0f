"""Vectors of prompts, against one full forward of each prompt in float32."""

from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import embed
from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.adapter_folder import EmbeddingUse, load_adapter, save_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Embedding, PromptLogprobs, Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import DataError, EmbeddingError, RequestError
from afm_mlx.model.model import ReuseBlock, Transformer
from afm_mlx.model.pooling import hidden_states
from afm_mlx.tokenizer.embedding_text import embedding_tokens
from tests.tools.cases import all_pairs, each
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import SIZES, Adapters, run, run_one, some_prompt, tiny
from tests.tools.zoo import small_model, zoo_model

VOCAB = SIZES["vocab_size"]
ZOO = ("llama", "llama blocks", "qwen3", "gemma3_text", "gpt_oss", "lfm2", "falcon_h1", "mamba2")
KINDS = ("float", "int8", "2-bit", *ZOO)
# Products with packed weights, and codes of int8, round otherwise for other numbers of tokens.
COSINE = {"2-bit": 1e-2, "int8": 1e-2}


def full_forward(model, prompt, asked):
    """The vector of a prompt, pooled in float64."""
    states = np.array(hidden_states(model, mx.array([prompt]))[0].astype(mx.float32), np.float64)
    vector = (states[-1] if asked.pooling == "last" else states.mean(0))[: asked.dimensions]
    return vector / np.linalg.norm(vector)


def assert_right(found, model, prompt, asked, kind="float"):
    wanted = full_forward(model, prompt, asked)
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    assert np.linalg.norm(found) == pytest.approx(1, abs=1e-5)
    if kind in COSINE:
        assert found @ wanted > 1 - COSINE[kind]
    else:
        np.testing.assert_allclose(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("kind", "chunk", "pooling", "length", "dimensions"),
    all_pairs(KINDS, (None, 1, 7, 64), ("last", "mean"), (1, 2, 60), (None, 5)),
)
def test_a_vector_is_that_of_a_full_forward(
    rng, tokenizer, kind, chunk, pooling, length, dimensions
):
    model, prompt = small_model(rng, kind), some_prompt(rng, length)
    asked = Embedding(pooling, dimensions)
    request = Request(prompt, 0, embedding=asked)
    (response,) = run_one(model, tokenizer, request, prefill_step_size=chunk)
    assert (response.token, response.text, response.finish_reason) == (-1, "", "length")
    assert_right(response.embedding, model, prompt, asked, kind)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_state_may_keep_its_length(rng, tokenizer, pooling):
    model, prompt = small_model(rng, "float"), some_prompt(rng, 20)
    found = {}
    for normalized in (True, False):
        request = Request(prompt, 0, embedding=Embedding(pooling, 6, normalized))
        (response,) = run_one(model, tokenizer, request)
        found[normalized] = response.embedding
    states = np.array(hidden_states(model, mx.array([prompt]))[0], np.float64)
    state = (states[-1] if pooling == "last" else states.mean(0))[:6]
    np.testing.assert_allclose(found[False], state, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[True], state / np.linalg.norm(state), atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("speculation", [None, Speculation(prompt_lookup=True)])
def test_rows_of_all_kinds_leave_each_other_alone(rng, tokenizer, kind, speculation):
    """Vectors of both kinds, scores and answers, ragged, in one engine."""
    model = small_model(rng, kind)
    lengths = rng.integers(1, 50, 12).tolist()
    prompts = [some_prompt(rng, length) for length in lengths]
    asks = [None if i % 4 == 3 else Embedding(("last", "mean", "last")[i % 4]) for i in range(12)]
    requests = [
        Request(prompt, 4, logprobs=False) if asked is None else Request(prompt, 0, embedding=asked)
        for prompt, asked in zip(prompts, asks, strict=True)
    ]
    requests.append(Request(prompts[0], 0, prompt_logprobs=PromptLogprobs(1)))
    answers = {
        i: [r.token for r in run_one(model, tokenizer, Request(prompts[i], 4, logprobs=False))]
        for i, asked in enumerate(asks)
        if asked is None
    }
    engine = Engine(model, tokenizer, max_batch=5, prefill_step_size=48, speculation=speculation)
    for request in requests:
        engine.submit(request)
    found = run(engine)
    for i, (prompt, asked) in enumerate(zip(prompts, asks, strict=True)):
        if asked is None:
            assert [r.token for r in found[i]] == answers[i]
            assert all(r.embedding is None for r in found[i])
        else:
            (response,) = found[i]
            assert_right(response.embedding, model, prompt, asked, kind)
    assert len(found[12][0].prompt_logprobs.logprobs) == lengths[0] - 1
    assert engine.kv_bytes == engine.rows_running == 0


@pytest.mark.parametrize("kv_memory", [None, 1 << 24])
def test_reuse_blocks_run_for_one_token_of_each_row(rng, model, tokenizer, monkeypatch, kv_memory):
    reuse, write = ReuseBlock.__call__, Transformer.write
    reused, written = [], []

    def counted(self, x, *rest):
        reused.append(x.shape[:2])
        return reuse(self, x, *rest)

    def counted_write(self, inputs, *rest):
        written.append(inputs.shape)
        return write(self, inputs, *rest)

    prompts = [some_prompt(rng, length) for length in (11, 21, 15)]
    for pooling, wanted in (("last", (3, 1)), ("mean", (3, 21))):
        engine = Engine(model, tokenizer, prefill_step_size=63, kv_memory=kv_memory)
        for prompt in prompts:
            engine.submit(Request(prompt, 0, embedding=Embedding(pooling)))
        with monkeypatch.context() as patched:
            patched.setattr(ReuseBlock, "__call__", counted)
            patched.setattr(Transformer, "write", counted_write)
            found = run(engine)
        for row, prompt in enumerate(prompts):
            assert_right(found[row][0].embedding, model, prompt, Embedding(pooling))
        assert reused == [wanted] * len(model.model.kv_reuse_layers)
        assert written == [(3, 21)]
        reused.clear()
        written.clear()


@pytest.mark.parametrize("kind", ["float", "2-bit", "llama", "lfm2"])
def test_the_prefix_cache_serves_the_last_token_and_no_mean(rng, tokenizer, kind):
    model, prompt = small_model(rng, kind), some_prompt(rng, 100)
    prefixes = PrefixCache(1 << 30)
    engine = Engine(model, tokenizer, prefix_cache=prefixes)
    engine.submit(Request(prompt[:81], 0))  # its last token is not fed
    run(engine)
    kept = prefixes.nbytes
    for pooling, cached in (("last", 80), ("mean", 0), ("last", 80)):
        asked = Embedding(pooling)
        row = engine.submit(Request(prompt, 0, embedding=asked))
        (response,) = run(engine)[row]
        assert_right(response.embedding, model, prompt, asked, kind)
        assert response.cached_tokens == cached
        assert prefixes.nbytes == kept  # an index of texts displaces nothing
    for keeps_prefix, grows in ((False, False), (True, True)):
        engine.submit(Request(some_prompt(rng, 90), 0, keeps_prefix=keeps_prefix))
        run(engine)
        assert (prefixes.nbytes > kept) == grows


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_rows_of_a_sliding_window_run_one_by_one(rng, model, tokenizer, pooling):
    prompts, asked = [some_prompt(rng, n) for n in (20, 9, 14)], Embedding(pooling)
    engine = Engine(model, tokenizer, max_kv_size=32, sliding_window=True)
    for prompt in [*prompts, some_prompt(rng, 90)]:
        engine.submit(Request(prompt, 0, embedding=asked))
    found = run(engine)
    for row, prompt in enumerate(prompts):
        assert_right(found[row][0].embedding, model, prompt, asked)
    assert np.isfinite(found[3][0].embedding).all()  # of what the window kept


def test_adapters_change_their_own_rows(rng, model, tokenizer, tmp_path):
    prompt = some_prompt(rng, 30)
    with AdapterPool(model) as pool:
        adapters = Adapters(model, rng, tmp_path)
        for name, rank in (("a", 2), ("b", 4)):
            adapters.add(pool, name, rank)
        names = ["a", None, "b", {"a": 0.5, "b": 1.0}]
        for asked in (Embedding(), Embedding("mean")):
            engine = Engine(model, tokenizer, adapters=pool)
            for name in names:
                engine.submit(Request(prompt, 0, embedding=asked, adapter=name))
            found = run(engine)
            vectors = [found[i][0].embedding for i in range(4)]
            wanted = full_forward(adapters.merged({"a": 0.5, "b": 1.0}), prompt, asked)
            np.testing.assert_allclose(vectors[3], wanted, atol=2e-3)  # adapters are float16
            assert not any(each["rows"] for each in pool.describe()["adapters"])
            assert min(np.abs(a - b).max() for a, b in pairwise(vectors)) > 1e-3
    detach_adapter(model)
    assert_right(vectors[1], model, prompt, asked)
    attach_adapter(model, tmp_path / "a")
    assert_right(vectors[0], model, prompt, asked)


def test_states_without_a_number_end_their_row_alone(rng, model, tokenizer, monkeypatch):
    norm = type(model).final_norm
    for broken in (float("nan"), float("inf"), 0.0):

        def spoil(self, h, broken=broken):
            states = norm(self, h)
            is_first = mx.arange(h.shape[0]) == 0
            return mx.where(is_first[:, None], broken, states)

        monkeypatch.setattr(type(model), "final_norm", spoil)
        prompts = [some_prompt(rng, 9), some_prompt(rng, 9)]
        engine = Engine(model, tokenizer)
        rows = [engine.submit(Request(prompt, 0, embedding=Embedding())) for prompt in prompts]
        found = run(engine)
        (bad,), (good,) = (found[row] for row in rows)
        assert (bad.finish_reason, bad.embedding) == ("error", None)
        assert isinstance(bad.error, EmbeddingError)
        monkeypatch.setattr(type(model), "final_norm", norm)
        assert_right(good.embedding, model, prompts[1], Embedding())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_cancelled_row_leaves_its_neighbours(rng, model, tokenizer, pooling):
    prompts = [some_prompt(rng, length) for length in (30, 31, 32)]
    asked = Embedding(pooling)
    engine = Engine(model, tokenizer, prefill_step_size=96)
    rows = [engine.submit(Request(p, 0, embedding=asked)) for p in prompts]
    engine._scheduler._chunk = 12  # of each row four columns
    engine.step()
    engine.cancel(rows[1])
    found = run(engine)
    assert rows[1] not in found
    for row, prompt in zip(rows[::2], prompts[::2], strict=True):
        assert_right(found[row][0].embedding, model, prompt, asked)
    engine.submit(Request(prompts[0], 0, embedding=asked))
    engine.step()
    engine.cancel(3)
    assert not engine.busy


def test_a_mean_holds_one_vector_besides_keys_and_values(rng, tokenizer):
    model, prompt = tiny(rng), some_prompt(rng, 500)
    asked, held = Embedding("mean"), []
    engine = Engine(model, tokenizer, prefill_step_size=32)
    row = engine.submit(Request(prompt, 0, embedding=asked))
    while not (responses := engine.step()):
        prefill = engine._scheduler.prefills[0]
        held.append(prefill._states.nbytes)
    assert [r.row for r in responses] == [row]
    assert len(held) > 10
    assert set(held) == {4 * model.args.hidden_dim}
    assert_right(responses[0].embedding, model, prompt, asked)


@each(
    ("fields", "words"),
    [
        ({"embedding": "last"}, "embedding is 'last'; Embedding.pooling, dimensions. or None"),
        ({"embedding": Embedding("max")}, "pooling is 'max'; allowed are last, mean"),
        ({"embedding": Embedding(dimensions=0)}, "dimensions are 0; 1 or more are allowed"),
        ({"embedding": Embedding(dimensions=True)}, "dimensions are True"),
        (
            {"embedding": Embedding(dimensions=999)},
            r"dimensions are 999; this model's vectors have \d+",
        ),
        ({"embedding": Embedding(normalized=1)}, "normalized is 1; True or False"),
        ({"max_tokens": 3}, "max_tokens is 3, and an embedding has no answer"),
        ({"cache": []}, "embedding and cache are both given"),
        ({"prompt_logprobs": PromptLogprobs(1)}, "embedding and prompt_logprobs are both given"),
        ({"heal": True}, "embedding and heal are both given"),
        ({"prompt": []}, "The prompt is empty"),
    ],
)
def test_requests_that_can_not_be_honoured(rng, model, tokenizer, fields, words):
    request = {"prompt": [1, 2], "max_tokens": 0, "embedding": Embedding()} | fields
    with pytest.raises(RequestError, match=words):
        Engine(model, tokenizer).submit(Request(**request))


def test_a_model_without_these_states_is_refused(rng, tokenizer):
    model = zoo_model("llama", VOCAB, 1)
    named = type("Model", (type(model),), {})
    named.__module__ = "mlx_lm.models.gpt_neox"
    model.__class__ = named
    engine = Engine(model, tokenizer)
    with pytest.raises(RequestError, match="No embeddings of gpt_neox"):
        engine.submit(Request([1, 2], 0, embedding=Embedding()))


# -- embed


@pytest.fixture(scope="module")
def wide():
    return wide_model(np.random.default_rng(5)), nano_tokenizer()


TEXTS = ["a cat", "Tax law of <turn_end> 1998\n and later", "b " * 30, "a cat", "x"]


@pytest.mark.parametrize(("pooling", "batch_size"), [("last", 1), ("last", 3), ("mean", 8)])
def test_texts_come_back_in_their_order(wide, pooling, batch_size):
    model, tokenizer = wide
    seen = []
    options = {"pooling": pooling, "batch_size": batch_size, "dimensions": 6}
    vectors = embed(model, tokenizer, TEXTS, progress=lambda *n: seen.append(n), **options)
    assert vectors.shape == (5, 6)
    for text, vector in zip(TEXTS, vectors, strict=True):
        prompt = embedding_tokens(tokenizer, text, pooling)
        assert_right(vector, model, prompt, Embedding(pooling, 6))
    assert sorted(seen) == seen
    assert seen[-1] == (5, 5)
    assert embed(model, tokenizer, []).shape == (0, model.args.hidden_dim)


def test_queries_have_their_instruction(wide):
    model, tokenizer = wide
    (plain,) = embed(model, tokenizer, ["Instruct: Find it\nQuery: cat"])
    (query,) = embed(model, tokenizer, ["cat"], instruction="Find it")
    np.testing.assert_array_equal(query, plain)
    (without,) = embed(model, tokenizer, ["cat"], queries=True)
    np.testing.assert_array_equal(without, embed(model, tokenizer, ["cat"])[0])


def test_an_adapter_says_how_it_was_trained(wide, rng, tmp_path):
    model, tokenizer = wide
    with AdapterPool(model) as pool:
        Adapters(model, rng, tmp_path).add(pool, "a", 2)
        tensors, config = load_adapter(tmp_path / "a")
        mx.eval(tensors)
        config = replace(config, embedding=EmbeddingUse("mean", "Find it"))
        save_adapter(tmp_path / "trained", tensors, config)
        pool.register("trained", tmp_path / "trained")
        for given, meant in (
            ({}, {"pooling": "mean"}),
            ({"queries": True}, {"pooling": "mean", "instruction": "Find it"}),
            ({"instruction": "B"}, {"pooling": "mean", "instruction": "B"}),
            ({"pooling": "last"}, {"pooling": "last"}),
        ):
            found = embed(model, tokenizer, ["a cat"], adapter="trained", adapters=pool, **given)
            wanted = embed(model, tokenizer, ["a cat"], adapter="a", adapters=pool, **meant)
            np.testing.assert_array_equal(found, wanted)
        wanted = embed(model, tokenizer, ["a cat"], adapter="trained", adapters=pool, queries=True)
    detach_adapter(model)
    attach_adapter(model, tmp_path / "trained")
    np.testing.assert_allclose(embed(model, tokenizer, ["a cat"], queries=True), wanted, atol=1e-6)
    detach_adapter(model)
    assert model.embedding_use is None


def test_what_all_vectors_have_in_common_is_subtracted(wide):
    model, tokenizer = wide
    texts = ["a cat", "tax law", "the sea"]
    raw = embed(model, tokenizer, texts)
    found = embed(model, tokenizer, texts, center=True, dimensions=7)
    wanted = (raw - raw.mean(0))[:, :7]
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    with pytest.raises(EmbeddingError, match="Text 0 has the mean of all vectors"):
        embed(model, tokenizer, ["a", "a"], center=True)
    with pytest.raises(RequestError, match="center needs the mean of several texts"):
        embed(model, tokenizer, ["a"], center=True)


@each(
    ("texts", "options", "kind", "words"),
    [
        ("a cat", {}, RequestError, "texts is one text"),
        (["a", ""], {}, DataError, "Text 1 is ''; a text that is not empty"),
        (["a", 3], {}, DataError, "Text 1 is 3; a text that is not empty"),
        (["a", "\ud800"], {}, DataError, "Text 1: .*surrogate"),
        (["a", "b " * 50], {"max_kv_size": 20}, DataError, "Text 1: The prompt needs .* holds 20"),
        ([], {"dimensions": 10**6}, RequestError, "dimensions are 1000000; this model's"),
        ([], {"pooling": "max"}, RequestError, "pooling is 'max'"),
        (["a"], {"adapter": "x"}, DataError, "Text 0: .*there is no adapter pool"),
    ],
)
def test_texts_that_have_no_vector(wide, texts, options, kind, words):
    with pytest.raises(kind, match=words):
        embed(*wide, texts, **options)
