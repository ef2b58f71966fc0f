"""Rows with task masks: each answers as a model that has its kept channels alone, whatever else runs."""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters, attach_adapter, bind, detach_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.target_modules import target_modules
from afm_mlx.adapters.task_mask import TaskMask, apply_mask, read_mask, write_mask
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.checkpoint.stored_layers import repack_mlx_layers
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import CheckpointError, RequestError
from afm_mlx.model.zoo_blocks import replace_blocks
from tests.tools.adapters import SIZES, deltas, draw_tensors, some_tokens, write_folder
from tests.tools.compare import assert_close
from tests.tools.constraints import CONSTRAINTS, naive_constrained, nano_tokenizer, wide_model
from tests.tools.engines import (
    logprobs_of,
    naive_greedy,
    run,
    run_one,
    some_prompt,
    tiny,
    tokens_of,
    wanted_logprobs,
)
from tests.tools.masks import draw_mask, zero_channels
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    return tokenizer


def masked(model, folder):
    return apply_mask(copy.deepcopy(model), read_mask(folder))


def write_masks(model, rng, tmp_path, names, **options):
    for name in names:
        write_mask(tmp_path / name, draw_mask(model, rng, **options))


def register(pool, tmp_path, names):
    for name in names:
        pool.register(name, tmp_path / name)


@pytest.mark.parametrize("kind", ["float", "2-bit"])
def test_rows_of_an_engine(rng, tmp_path, tokenizer, kind):
    model = tiny(rng, kind)
    write_masks(model, rng, tmp_path, "ab")
    twins = {None: copy.deepcopy(model)} | {n: masked(model, tmp_path / n) for n in "ab"}
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "ab")
        engine = Engine(model, tokenizer, adapters=pool)
        jobs = [(name, some_prompt(rng, n)) for name, n in zip("abba", (5, 9, 2, 7), strict=True)]
        jobs.append((None, some_prompt(rng, 6)))
        rows = {engine.submit(Request(p, 6, adapter=n)): (n, p) for n, p in jobs}
        found = run(engine)
        for row, (name, prompt) in rows.items():
            tokens = [response.token for response in found[row]]
            wanted = wanted_logprobs(twins[name], prompt, tokens)
            bound = 1e-4 if kind == "float" else 1e-2
            assert np.abs(logprobs_of(found[row]) - wanted).max() < bound
        listed = {entry["name"]: entry for entry in pool.describe()["adapters"]}
        assert listed["a"]["kept_share"] == pytest.approx(read_mask(tmp_path / "a").share)
        assert listed["a"]["rank"] == 0


def test_draft_tokens_are_verified_under_the_mask(rng, tmp_path, tokenizer):
    model, prompt = tiny(rng), some_prompt(rng, 12) * 2
    write_masks(model, rng, tmp_path, "ab")
    wanted = {n: naive_greedy(masked(model, tmp_path / n), prompt, 20) for n in "ab"}
    wanted[None] = naive_greedy(model, prompt, 20)
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "ab")
        options = {"adapters": pool, "speculation": Speculation(None, True, {}, 3)}
        engine = Engine(model, tokenizer, **options)
        rows = {engine.submit(Request(prompt, 20, adapter=name)): name for name in wanted}
        found = tokens_of(run(engine))
        assert {rows[row]: tokens for row, tokens in found.items()} == wanted


def test_constraints_hold_under_a_mask(rng, tmp_path):
    model, tokenizer = wide_model(rng, extra=0), nano_tokenizer()
    write_masks(model, rng, tmp_path, "a", group=model.layers[0].mlp.gate_proj.weight.shape[0] // 4)
    name = next(iter(CONSTRAINTS))
    request = {"max_tokens": 40, "constraint": CONSTRAINTS[name](), "at_limit": "complete"}
    prompt = rng.integers(10, len(tokenizer), 8).tolist()
    wanted = naive_constrained(
        masked(model, tmp_path / "a"), tokenizer, Request(prompt, **request), 40
    )
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "a")
        found = run_one(model, tokenizer, Request(prompt, adapter="a", **request), adapters=pool)
    got = [response.token for response in found]
    assert got == list(wanted)[: len(got)]
    assert len(got) > 3


def test_prefix_caches_are_kept_apart_by_mask(rng, tmp_path, tokenizer):
    model, prompt = tiny(rng), some_prompt(rng, 80)
    write_masks(model, rng, tmp_path, "ab")
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "ab")
        engine = Engine(model, tokenizer, adapters=pool, prefix_cache=PrefixCache(1 << 24))
        cached = {}
        for name in ("a", "b", None, "a", "b", None):
            row = engine.submit(Request(prompt, 2, adapter=name))
            cached.setdefault(name, []).append(run(engine)[row][-1].cached_tokens)
        assert all(counts[0] == 0 and counts[1] > 0 for counts in cached.values())
        cache = engine.make_cache()
        engine.submit(Request(prompt, 2, adapter="a", cache=cache))
        run(engine)
        with pytest.raises(RequestError, match="was filled under the adapter a"):
            engine.submit(Request(prompt[:3], 2, adapter="b", cache=cache))


def test_a_pool_counts_and_evicts_masks(rng, tmp_path):
    model = tiny(rng, "2-bit")
    write_masks(model, rng, tmp_path, "abc", equal=True)
    write_folder(tmp_path / "lora", draw_tensors(model, rng, 4))
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "a")
        size = pool.load("a").nbytes
        layers = [
            m for b in model.layers for m in (b.mlp.gate_proj, b.mlp.up_proj, b.mlp.down_proj)
        ]
        half = sum(layer.weight.nbytes for layer in layers) // 2
        assert half <= size < half + 200 * len(layers)
    with AdapterPool(model, budget=2 * size + 20) as pool:
        register(pool, tmp_path, "abc")
        first = pool.load("a")
        pool.load("b")
        pool.load("c")
        assert sorted(pool.resident) == ["b", "c"]
        assert pool.load("a").fingerprint == first.fingerprint
        pool.register("both", tmp_path / "lora", mask=tmp_path / "a")
        with pytest.raises(RequestError, match="can't be weighted"):
            pool.load({"both": 0.5, "a": 0.5})
        with pytest.raises(RequestError, match="has a task mask, which can't be weighted"):
            pool.load({"a": 0.5, "b": 0.5})
        with pytest.raises(CheckpointError, match="there is no such path"):
            pool.register("none", tmp_path / "lora", mask=tmp_path / "nowhere")


def test_a_sum_of_adapters_with_a_mask(rng, tmp_path):
    """What the sum adds under a mask, it adds to the channels that are kept."""
    model, tokens = tiny(rng), some_tokens(rng)
    for name, rank in (("x", 4), ("y", 3)):
        write_folder(tmp_path / name, draw_tensors(model, rng, rank, "_proj"))
    write_masks(model, rng, tmp_path, "m")
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "xy")
        pool.register("sum", {"x": 0.5, "y": -1.0})
        pool.register("both", {"x": 0.5, "y": -1.0}, mask=tmp_path / "m")
        added, resident = deltas(pool.load("sum"), model), pool.load("both")
        with bind(model).using(BatchAdapters.everywhere(resident)):
            got = model(tokens)
        with pytest.raises(RequestError, match="has a task mask"):
            pool.register("more", {"both": 2.0, "x": 1.0})
    assert resident.rank == 7
    whole = detach_adapter(copy.deepcopy(model))
    for target in target_modules(whole):
        delta = mx.array(added[target.path].astype(np.float32))
        target.linear.weight = target.linear.weight + delta
    assert_close(got, zero_channels(whole, read_mask(tmp_path / "m"))(tokens), 1e-4)


def test_masks_of_other_models(rng, tmp_path, tokenizer):
    model = tiny(rng)
    write_mask(tmp_path / "narrow", TaskMask(np.ones((4, 4), bool)))
    write_mask(tmp_path / "other", TaskMask(np.ones((4, 8), bool), base_model_fingerprint="f" * 64))
    (tmp_path / "lora").mkdir()
    write_folder(tmp_path / "lora", draw_tensors(model, rng, 4))
    for name, says in (
        ("narrow", "4 blocks with feed-forwards of 64 channels, and this model has 4 of 128"),
        ("other", "The task mask .* fingerprint ffff"),
    ):
        with pytest.raises(CheckpointError, match=says):
            attach_adapter(model, tmp_path / name)
    with pytest.raises(CheckpointError, match="holds no task mask"):
        attach_adapter(model, tmp_path / "lora", mask=tmp_path / "lora")
    attach_adapter(model, tmp_path / "other", force=True)
    detach_adapter(model)


# -- mlx-lm's architectures


@pytest.mark.parametrize("stored", ["float", "mlx-lm", "packed"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_zoo_models(rng, tmp_path, tokenizer, kind, stored):
    model = zoo_model(kind, SIZES["vocab_size"], int(rng.integers(2**31)))
    if stored != "float":
        nn.quantize(model, group_size=32, bits=4)
    if stored == "packed":
        repack_mlx_layers(model)
        replace_blocks(model)
    for name in "ab":
        write_mask(tmp_path / name, draw_mask(model, rng, 0.5, group=32, equal=True))
    twins = {n: zero_channels(copy.deepcopy(model), read_mask(tmp_path / n)) for n in "ab"}
    twins[None] = copy.deepcopy(model)
    kinds = [type(block.mlp) for block in model.layers]
    with AdapterPool(model) as pool:
        register(pool, tmp_path, "ab")
        engine = Engine(model, tokenizer, adapters=pool)
        jobs = [("a", 5), (None, 3), ("b", 8), ("a", 2)]
        jobs = [(name, some_prompt(rng, n)) for name, n in jobs]
        rows = {engine.submit(Request(p, 5, adapter=n)): (n, p) for n, p in jobs}
        found = run(engine)
        for row, (name, prompt) in rows.items():
            tokens = [response.token for response in found[row]]
            wanted = wanted_logprobs(twins[name], prompt, tokens)
            assert np.abs(logprobs_of(found[row]) - wanted).max() < 5e-3
    detach_adapter(model)
    assert [type(block.mlp) for block in model.layers] == kinds


def test_a_mask_of_another_zoo_model_is_refused(rng, tmp_path):
    first, second = (
        zoo_model("llama", SIZES["vocab_size"], int(rng.integers(2**31))) for _ in "ab"
    )
    kept = draw_mask(first, rng, 0.5, group=32, equal=True).kept
    write_mask(tmp_path / "m", TaskMask(kept, 32, "", "", base_model_fingerprint(first)))
    attach_adapter(first, tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"The task mask .* was made for the model with"):
        attach_adapter(second, tmp_path / "m")
    attach_adapter(second, tmp_path / "m", force=True)


@pytest.mark.parametrize("kind", ["phi3", "qwen3_moe"])
def test_zoo_models_that_take_no_masks(rng, tmp_path, kind):
    model = zoo_model(kind, SIZES["vocab_size"], int(rng.integers(2**31)))
    write_mask(tmp_path / "m", TaskMask(np.ones((2, 4), bool)))
    with pytest.raises(RequestError, match="can't run with task masks"):
        attach_adapter(model, tmp_path / "m")
