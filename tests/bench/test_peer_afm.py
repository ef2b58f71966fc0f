"""What the peers run has AFM's shapes, and as many operations as it is said to have."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.model.model import Model
from bench.peer_afm import llama_shapes, prompt_weights, shrunk
from bench.peer_mlx_lm import quantized_model
from bench.peer_models import EXACT, MLX_LM
from tests.tools.models import random_config


def test_weights_that_a_prompt_token_is_multiplied_with(config):
    arrays = [(n, a) for n, a in tree_flatten(Model(config).parameters()) if a.ndim == 2]
    writing = sum(a.size for name, a in arrays if name.startswith("model.layers"))
    reuse = sum(a.size for name, a in arrays if name.startswith("model.kv_reuse_layers"))
    assert prompt_weights(config, EXACT) == writing
    assert prompt_weights(config, MLX_LM) == writing + reuse
    # llama.cpp's have a key and a value projection in each block that has none.
    width = config.num_kv_heads * config.head_dim
    more = config.num_kv_reuse_layers * 2 * config.hidden_dim * width
    assert prompt_weights(config, "llama.cpp Q2_K") == writing + reuse + more
    assert llama_shapes(config).matrix_parameters == writing + reuse + more


def test_mlx_lms_model_is_packed_and_runs(config):
    ours_only = ("model_type", "kv_bits", "context_length")
    model = quantized_model({k: v for k, v in config.to_dict().items() if k not in ours_only})
    shapes = {n: a.shape for n, a in tree_flatten(Model(config).parameters()) if a.ndim == 2}
    for name, array in tree_flatten(model.parameters()):
        if name.endswith(".weight") and array.ndim == 2:
            bits = 4 if "embedding" in name else 2
            assert array.dtype == mx.uint32
            assert array.shape == (shapes[name][0], shapes[name][1] * bits // 32)
    logits = model(mx.array([[1, 2, 3]]), cache=model.make_cache())
    assert logits.shape == (1, 3, config.vocab_size)
    assert np.isfinite(np.array(logits)).all()


def test_shrunk_keeps_the_share_of_reuse(rng):
    config = random_config(rng, num_layers=56, num_kv_reuse_layers=21)
    for layers, reuse in ((8, 3), (1, 0)):
        small = shrunk(config, layers)
        assert (small.num_layers, small.num_kv_reuse_layers) == (layers, reuse)
