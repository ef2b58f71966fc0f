"""A whole packed model on the Metal kernels, run by the emulator, against the plain-MLX definitions."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.adapters.resident import build_resident
from afm_mlx.adapters.target_modules import target_modules, target_shapes
from afm_mlx.config import ModelConfig
from afm_mlx.kernels import dispatch
from afm_mlx.measure.random_model import random_packed_model
from afm_mlx.model.kv_cache import KVCache
from afm_mlx.model.zoo_blocks import replace_blocks
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.compare import assert_close
from tests.tools.zoo import zoo_model

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_dim=64,
    num_layers=2,
    num_kv_reuse_layers=1,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=500000.0,
)


def random_resident(model, rank, rng):
    """An adapter on about two layers of three."""
    tensors = {}
    for place in target_modules(model):
        if rng.random() < 2 / 3:
            for end, (inputs, outputs) in place.shapes.items():
                a, b = rng.standard_normal((inputs, rank)), rng.standard_normal((rank, outputs))
                tensors[f"{place.path}.lora_a{end}"] = a / inputs**0.5
                tensors[f"{place.path}.lora_b{end}"] = b / (4 * rank) ** 0.5
    tensors = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    return build_resident(tensors, rng.uniform(0.5, 1), target_shapes(model), "random")


def run(model, prompts, token, adapters):
    """Logits of the next token of rows of different lengths, and the greedy choice after it."""
    active, caches = bind(model), []
    for prompt, adapter in zip(prompts, adapters, strict=True):
        caches.append(model.make_cache())
        active.set(BatchAdapters.of([adapter]))
        model.prefill(mx.array([prompt]), caches[-1])
    active.set(BatchAdapters.of(adapters))
    cache = [type(entries[0]).merge(entries) for entries in zip(*caches, strict=True)]
    # Both look at the cache before they write to it, so one of them works on a copy.
    copied = [KVCache.merge([c]) if isinstance(c, KVCache) else c for c in cache]
    return np.array(model(token, copied))[:, -1], np.array(model.greedy(token, cache)[0])


# Seven rows are multiplied as matrices.
@pytest.mark.parametrize("count", [1, 3, pytest.param(7, marks=pytest.mark.slow)])
def test_every_row_decodes_with_its_own_adapter_as_defined(metal, rng, count):
    model = random_packed_model(CONFIG, seed=int(rng.integers(2**31)))
    adapters = [random_resident(model, rank, rng) for rank in (3, 8)]
    rows = [None, *adapters, *adapters, *adapters][:count]
    prompts = [rng.integers(0, CONFIG.vocab_size, 2 + i % 3).tolist() for i in range(count)]
    token = mx.array(rng.integers(0, CONFIG.vocab_size, (count, 1)).astype(np.int32))
    got, choice = run(model, prompts, token, rows)
    with dispatch.force("reference"):
        wanted, _ = run(model, prompts, token, rows)
        plain, _ = run(model, prompts, token, [None] * count)
    changed = np.abs(wanted - plain).max(axis=-1) > 0.05 * np.abs(plain).max()
    assert changed.tolist() == [adapter is not None for adapter in rows]
    # A key on the edge between two codes may get either one, which float32 sums decide.
    assert_close(got, wanted, 0.02)
    assert np.abs(got - wanted).mean() <= 0.001 * np.abs(wanted).max()
    # Equal up to the order of sums, which the head's kernels are free to choose.
    chosen = np.take_along_axis(got, choice[:, None].astype(np.int64), axis=-1)[:, 0]
    assert (got.max(axis=-1) - chosen).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_blocks_of_mlx_lm_give_its_own_numbers(metal, rng, kind):
    theirs = zoo_model(kind, 96, int(rng.integers(2**31)))
    rule = QuantizationRule(4, "affine", "group", 32)
    quantize_model(theirs, {}, rule, rule)
    ours = copy.deepcopy(theirs)
    replace_blocks(ours)
    caches = [[BatchKVCache([0, 0]) for _ in theirs.layers] for _ in "ab"]
    for length in (4, 1, 1):  # a prompt, and decode steps
        tokens = mx.array(rng.integers(0, 96, (2, length)))
        got = np.array(ours(tokens, caches[0]))
        with dispatch.force("reference"):
            wanted = np.array(theirs(tokens, caches[1]))
        assert_close(got, wanted, 2e-3)
