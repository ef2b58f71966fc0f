"""A whole packed model on the Metal kernels, run by the emulator, against the plain-MLX definitions."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.cache import KVCache
from afm_mlx.config import ModelConfig
from afm_mlx.kernels import dispatch
from afm_mlx.quantization import random_packed_model

CONFIG = ModelConfig(
    vocab_size=96,
    hidden_dim=64,
    num_layers=4,
    num_kv_reuse_layers=2,
    num_heads=4,
    num_kv_heads=2,
    rope_theta=500000.0,
)


def run(model, prompts, following):
    """Logits of every step, and the greedy choice after the last one, for rows of different lengths."""
    caches = []
    for prompt in prompts:
        caches.append(model.make_cache())
        model.prefill(mx.array([prompt]), caches[-1])
    cache = [type(entries[0]).merge(entries) for entries in zip(*caches, strict=True)]
    logits = [model(mx.array(following[:, t : t + 1]), cache) for t in range(following.shape[1])]
    # Looked at before it is written, so the choice is made on a copy.
    copy = [KVCache.merge([c]) if isinstance(c, KVCache) else c for c in cache]
    last = mx.array(following[:, :1])
    return np.array(mx.concatenate([*logits, model(last, copy)], axis=1)), model.greedy(last, cache)


@pytest.mark.parametrize("lengths", [(5,), (3, 7)], ids=str)
def test_decoding_equals_the_definitions(metal, rng, lengths):
    model = random_packed_model(CONFIG, seed=int(rng.integers(2**31)))
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in lengths]
    following = rng.integers(0, CONFIG.vocab_size, (len(lengths), 2)).astype(np.int32)
    got, choice = run(model, prompts, following)
    with dispatch.force("reference"):
        wanted, _ = run(model, prompts, following)
    # A key on the edge between two codes may get either one, which float32 sums decide.
    bound = 0.02 * np.abs(wanted).max()
    assert np.abs(got - wanted).max() <= bound
    assert np.abs(got - wanted).mean() <= bound / 20
    chosen = np.take_along_axis(got[:, -1], np.array(choice)[:, None].astype(np.int64), axis=-1)
    # Equal up to the order of sums, which the head's kernels are free to choose.
    assert (got[:, -1].max(axis=-1) - chosen[:, 0]).max() <= 1e-5 * np.abs(wanted).max()
