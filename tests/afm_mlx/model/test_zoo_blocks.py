"""Blocks of mlx-lm's models in our operations: the same numbers, tokens and caches as mlx-lm's own."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.model import zoo_kv_cache
from afm_mlx.model.decode_step import DecodeStep
from afm_mlx.model.kv_cache import STEP, TAIL
from afm_mlx.model.zoo_blocks import LlamaBlock, Qwen3Block, replace_blocks
from afm_mlx.model.zoo_kv_cache import ZooKVCache
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import all_pairs, each
from tests.tools.compare import assert_close
from tests.tools.engines import naive_greedy
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = 64


def both(kind, rng, packed=None, biased=False):
    """A model with mlx-lm's blocks, and the same with ours."""
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)))
    for block in model.layers if biased else ():
        for layer in (*block.self_attn.children().values(), *block.mlp.children().values()):
            if "weight" in layer and layer.weight.ndim == 2:
                layer.bias = mx.array(rng.standard_normal(layer.weight.shape[0]), mx.float32)
    for block in model.layers:
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight = mx.array(rng.uniform(0.5, 1.5, norm.weight.shape), mx.float32)
    if packed:
        groups = ("group", 32) if packed == "affine" else ()
        rule = QuantizationRule(4, packed, *groups)
        quantize_model(model, {}, rule, rule)
    ours = copy.deepcopy(model)
    replace_blocks(ours)
    wanted = {"llama": LlamaBlock, "qwen3": Qwen3Block}[kind]
    assert {type(block) for block in ours.layers} == {wanted}
    return model, ours


@each(
    ("kind", "packed", "biased", "cache"),
    all_pairs(
        ["llama", "qwen3"], [None, "affine", "balanced"], [False, True], [None, "mlx-lm's", "ours"]
    ),
)
def test_logits_are_those_of_mlx_lms_blocks(rng, kind, packed, biased, cache):
    theirs, ours = both(kind, rng, packed, biased)
    rows, lengths = int(rng.integers(1, 4)), [int(rng.integers(2, 9)), 1, 1, 3, 1]
    caches = [None, None]
    if cache is not None:
        caches = [make_prompt_cache(model) for model in (theirs, ours)]
    if cache == "ours":
        caches[1] = [ZooKVCache(rows) for _ in ours.layers]
    with dispatch.force("reference"):  # products of other kernels round otherwise
        for length in lengths if cache is not None else lengths[:1]:
            tokens = mx.array(rng.integers(0, VOCAB, (rows, length)))
            wanted, got = (m(tokens, cache=c) for m, c in zip((theirs, ours), caches, strict=True))
            assert_close(got, wanted, 1e-4)


def test_while_training_there_are_gradients(rng):
    theirs, ours = both("qwen3", rng)
    tokens = mx.array(rng.integers(0, VOCAB, (2, 5)))
    grads = []
    for model in (theirs.train(), ours.train()):
        value = mx.value_and_grad(lambda p, m=model: (m.update(p), m(tokens).square().mean())[1])
        grads.append(value(model.trainable_parameters())[1]["model"]["layers"][0])
    for path in (("self_attn", "q_proj"), ("mlp", "up_proj")):
        wanted, got = (grad[path[0]][path[1]]["weight"] for grad in grads)
        assert_close(got, wanted, 1e-4)


def test_rows_of_different_lengths_get_the_tokens_of_mlx_lms_blocks(rng):
    theirs, ours = both(str(rng.choice(["llama", "qwen3"])), rng)
    lengths = [int(rng.integers(1, 30)), STEP - TAIL, 2, int(rng.integers(1, 200))]
    counts = [TAIL + 20, 2 * TAIL, int(rng.integers(1, 9)), 5]
    engine = Engine(ours, WordTokenizer(VOCAB, ends=()), max_batch=3)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    kept = make_prompt_cache(ours)
    ids, tokens = [], {}
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        cache = kept if i == 0 else None
        ids.append(engine.submit(Request(prompt, max_tokens=count, cache=cache)))
    for response in engine.run():
        assert response.error is None
        if engine._decode.batch.cache:
            kind = ZooKVCache if dispatch.device() == "cpu" else BatchKVCache
            assert {type(entry) for entry in engine._decode.batch.cache} == {kind}
        tokens.setdefault(response.row, []).append(response.token)
    for id, prompt, count in zip(ids, prompts, counts, strict=True):
        assert tokens[id] == naive_greedy(theirs, prompt, count)
    # The caller's cache is mlx-lm's, and holds what mlx-lm's own blocks write.
    fed = [*prompts[0], *tokens[ids[0]][:-1]]
    wanted = make_prompt_cache(theirs)
    theirs(mx.array([fed]), cache=wanted)
    for mine, own in zip(kept, wanted, strict=True):
        assert type(mine) is type(own)
        assert mine.offset == own.offset == len(fed)
        for got, right in zip(mine.keys_and_values(), own.keys_and_values(), strict=True):
            assert_close(got, right, 1e-3)
    more = Request([3, 5], max_tokens=4, cache=kept)
    engine.submit(more)
    assert [r.token for r in engine.run()] == naive_greedy(theirs, [*fed, 3, 5], 4)


@pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
@pytest.mark.parametrize("lengths", [[5], [STEP - 3, 4]])
def test_a_replayed_step_has_the_bits_of_the_step_run_as_it_is(rng, lengths):
    """The newest columns move to the buffer meanwhile, and the buffer grows."""
    _, ours = both(str(rng.choice(["llama", "qwen3"])), rng, "affine")

    def filled():
        rows = [make_prompt_cache(ours) for _ in lengths]
        for cache, length in zip(rows, lengths, strict=True):
            ours(mx.arange(length)[None] % VOCAB, cache=cache)
        return [ZooKVCache.of_rows(entries) for entries in zip(*rows, strict=True)]

    step, cache, twin = DecodeStep(), filled(), filled()
    for i in range(TAIL + 2):
        tokens = mx.full((len(lengths), 1), 3 + i % 50, dtype=mx.int32)
        got = step.zoo_logits(ours, tokens, cache)
        assert mx.array_equal(got, ours(tokens, cache=twin)[:, -1]), i
    assert step.replays
    assert cache[0].lengths == twin[0].lengths
    assert mx.array_equal(cache[0].in_use(), twin[0].in_use())


@pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_new_tokens_attention_is_one_operation(rng, tmp_path, kind):
    """With its parts' bits. Several rows, other kinds of RoPE, other types than the cache's: the parts."""
    _, ours = both(kind, rng)

    def step(count, dtype=mx.float32, rows=1):
        cache = [ZooKVCache(rows) for _ in ours.layers]
        ours(mx.array([[3, 4, 5]] * rows), cache=cache)
        for entry in cache:
            entry.buffer = entry.buffer.astype(dtype)
        logits = ours(mx.array([[9]] * rows), cache=cache)
        path = tmp_path / "step.dot"
        mx.export_to_dot(str(path), logits)
        assert path.read_text().count("AfmNormRopeAttend") == count
        return logits

    whole = step(len(ours.layers))
    step(0, mx.float16)
    assert_close(step(0, rows=2)[1:], whole, 1e-5)  # BLAS multiplies two rows in another order
    dispatch.disable("cpu/norm_rope_attend", "its parts are wanted")
    parts = step(0)
    dispatch.enable("cpu/norm_rope_attend")
    assert mx.array_equal(whole, parts)
    for layer in ours.layers:
        del layer.self_attn["_rope_periods"]
    assert_close(step(0), whole, 1e-4)


@pytest.mark.skipif(extension.module() is None, reason=extension.unavailable())
@pytest.mark.parametrize("speculates", [False, True])
def test_nothing_reads_the_tail_behind_the_newest_token(rng, monkeypatch, speculates):
    """NaN there changes no answer: of rows alone and with others, with drafts, or kept as prefixes."""
    theirs, ours = both(str(rng.choice(["llama", "qwen3"])), rng)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, STEP - 5, 70)]
    counts = [TAIL + 5, 20, TAIL + 9]
    answers = [naive_greedy(theirs, *each) for each in zip(prompts, counts, strict=True)]
    poisoned = []

    def poisoning(*args, norm_rope_attend=zoo_kv_cache.norm_rope_attend):
        y, tail = norm_rope_attend(*args)
        _, kv, lengths = args
        used = (lengths - kv.starts).max()
        poisoned.append(tail)
        return y, mx.where(mx.arange(tail.shape[2])[:, None] < used, tail, mx.nan)

    monkeypatch.setattr(zoo_kv_cache, "norm_rope_attend", poisoning)
    engine = Engine(
        ours,
        WordTokenizer(VOCAB, ends=()),
        max_batch=2,
        speculation=Speculation(prompt_lookup=True) if speculates else None,
        prefix_cache=PrefixCache(1 << 30),
    )
    for turns in ([0], [1, 2], [0, 1]):
        found = {engine.submit(Request(prompts[i], counts[i])): (i, []) for i in turns}
        for response in engine.run():
            found[response.row][1].append(response.token)
        for i, tokens in found.values():
            assert tokens == answers[i]
    assert poisoned


def test_no_step_is_replayed_without_tokens_or_while_training(rng):
    _, ours = both("llama", rng)
    step, tokens = DecodeStep(), mx.array([[3]])
    for cache in ([ZooKVCache() for _ in ours.layers], make_prompt_cache(ours)):
        assert_close(step.zoo_logits(ours, tokens, cache), ours(tokens)[:, -1], 1e-6)
        ours.train()
        step.zoo_logits(ours, tokens, cache)
        ours.eval()
    assert not step.replays


def test_on_a_gpu_rows_keep_mlx_lms_caches(rng, monkeypatch):
    theirs, ours = both("llama", rng)
    monkeypatch.setattr(dispatch, "device", lambda: "gpu")
    engine = Engine(ours, WordTokenizer(VOCAB, ends=()))
    prompts = [[1, 2, 3], [4, 5]]
    ids = [engine.submit(Request(prompt, max_tokens=6)) for prompt in prompts]
    tokens = {id: [] for id in ids}
    for response in engine.run():
        tokens[response.row].append(response.token)
        if engine._decode.batch.cache:
            assert {type(entry) for entry in engine._decode.batch.cache} == {BatchKVCache}
    assert list(tokens.values()) == [naive_greedy(theirs, prompt, 6) for prompt in prompts]


def test_other_models_keep_their_caches(rng):
    model = zoo_model("qwen2", VOCAB, 1)
    replace_blocks(model)
    engine = Engine(model, WordTokenizer(VOCAB, ends=()))
    engine.submit(Request([1, 2, 3], max_tokens=3))
    engine.step()
    assert type(engine._decode.batch.cache[0]).__name__ == "BatchKVCache"
    _, ours = both("qwen3", rng)
    bounded = Engine(ours, WordTokenizer(VOCAB, ends=()), max_kv_size=16)
    bounded.submit(Request([1, 2, 3], max_tokens=3))
    bounded.step()
    assert type(bounded._decode.batch.cache[0]).__name__ == "BatchRotatingKVCache"
    for options in ({"return_array": True}, {"window_size": 4}):
        with pytest.raises(ValueError, match="allowed are False and None"):
            ZooKVCache().make_mask(3, **options)
