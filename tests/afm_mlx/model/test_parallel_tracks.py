"""PT-MoE equals tamm's in every switch, with and without caches; tracks and experts are what they say."""

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from afm_mlx.errors import ConfigError
from afm_mlx.model.parallel_tracks import Model, SparseMLP
from afm_mlx.track_config import TRACK_PRESETS, TrackConfig, parameter_shapes
from tests.tools.compare import assert_close, assert_same
from tests.tools.tracks import SMALL, drawn_config, random_tracks, tamm_logits, tamm_model, twin

TOLERANCE = 1e-5


def in_chunks(model, tokens, sizes):
    """Logits of tokens that a cache is fed in chunks."""
    cache, start, parts = make_prompt_cache(model), 0, []
    for size in sizes:
        parts.append(np.array(model(mx.array(tokens[:, start : start + size]), cache)))
        start += size
    assert start == tokens.shape[1]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("seed", range(20))
def test_it_computes_what_tamm_computes(seed):
    """At once; and in chunks and single tokens past the window. Some draws amplify tamm's own rounding."""
    rng = np.random.default_rng(seed)
    config = drawn_config(rng)
    theirs = tamm_model(config, seed)
    model, tokens = twin(config, theirs), rng.integers(1, config.vocab_size, (2, 19))
    rounded, exact = tamm_logits(theirs, tokens), tamm_logits(theirs, tokens, exact=True)
    allowed = TOLERANCE + 3 * np.abs(rounded - exact).max()
    assert allowed < 3e-3
    for ours in (model(mx.array(tokens)), in_chunks(model, tokens, (5, 1, 1, 8, 1, 3))):
        assert np.abs(np.array(ours) - exact).max() < allowed


def test_every_switch_is_drawn():
    drawn = [drawn_config(np.random.default_rng(seed)) for seed in range(20)]
    for name in ("pre_norm", "post_norm", "pre_residual_norm", "tracks_dispatch_norm"):
        assert len({getattr(config, name) for config in drawn}) == 3
    assert len({config.tracks_combine_norm for config in drawn}) == 3
    assert len({config.experts_router_logits_cap for config in drawn}) == 3
    for name in ("scale_qk_norm", "tracks_combine_op", "num_segments"):
        assert len({getattr(config, name) for config in drawn}) == 2
    assert {config.is_local(0) for config in drawn} == {True, False}
    assert {config.is_sparse(0) for config in drawn} == {True, False}
    assert {config.kv_heads < config.num_heads for config in drawn} == {True, False}


def test_sizes_of_presets_without_memory():
    config = TRACK_PRESETS["tamm-default"]
    assert config.num_parameters == 147_803_703_296
    assert config.num_active_parameters == 15_834_122_240
    assert config.num_segments == 12
    assert config.kv_values(4097) == 2 * 8 * 512 * 48 * 4097
    assert config.kv_values(65536) == 2 * 8 * 512 * (36 * 4097 + 12 * 65536)


@pytest.mark.parametrize("name", TRACK_PRESETS)
def test_the_table_of_parameters_is_the_models(name):
    changes = {"num_tracks": 2, "vocab_size": 32, "hidden_dim": 16, "num_experts": 3}
    norms = ("post_norm", "pre_residual_norm", "tracks_dispatch_norm", "tracks_combine_norm")
    for more in ({}, dict.fromkeys(norms, "rms_norm") | {"scale_qk_norm": False}):
        config = dataclasses.replace(TRACK_PRESETS[name], **changes, **more)
        found = {n: a.shape for n, a in tree_flatten(Model(config).parameters())}
        assert found == parameter_shapes(config)


def test_a_config_is_parsed_as_it_was_written():
    config = drawn_config(np.random.default_rng(5))
    assert TrackConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_layers_per_track_per_sync_point": 3}, "divisor of num_layers_per_track, which is 8"),
        ({"num_kv_heads": 3}, "null, or a divisor of num_heads"),
        ({"num_kv_heads": 0}, "null, or a divisor of num_heads"),
        ({"attention_hidden_dim": 36}, "twice num_heads"),
        ({"num_experts_per_token": 6}, "1 to num_experts, which is 5"),
        ({"attention_layer_pattern": ["local"]}, "local_rope and global_nope"),
        ({"feed_forward_layer_pattern": []}, "dense and sparse"),
        ({"post_norm": "layer_norm"}, "null, rms_norm, pre_scale_rms_norm"),
        ({"tracks_combine_op": "max"}, "mean, sum"),
        ({"experts_router_logits_cap": 0}, "numbers above 0"),
        ({"num_tracks": True}, "integers from 1"),
        ({"local_attention_window_size": -1}, "integers from 0"),
        ({"shared_expert": 1}, "unknown keys shared_expert"),
    ],
)
def test_impossible_configs_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        TrackConfig.from_dict(SMALL | changes)


# -- tracks and experts


def test_equal_tracks_stay_equal_and_count_as_one():
    one = random_tracks(TrackConfig(**SMALL | {"num_tracks": 1}), 3)
    many = Model(TrackConfig(**SMALL))
    repeated = {
        name: mx.concatenate([array] * 4) if "layers" in name else array
        for name, array in tree_flatten(one.parameters())
    }
    many.load_weights(list(repeated.items()))
    tokens = mx.array(np.random.default_rng(0).integers(1, 97, (2, 9)))
    assert_close(many(tokens), one(tokens), 1e-5)

    def loss(model):
        return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

    _, gradients = nn.value_and_grad(many, loss)(many)
    gradient = gradients["model"]["layers"][0]["self_attn"]["qkv_proj"]["weight"]
    assert mx.abs(gradient).max().item() > 1e-4
    assert_close(gradient, mx.broadcast_to(gradient[:1], gradient.shape), 1e-6)


def test_a_single_expert_is_a_dense_feed_forward():
    values = SMALL | {"num_tracks": 1, "num_experts": 1, "num_experts_per_token": 1}
    values["dense_feed_forward_hidden_dim"] = values["sparse_feed_forward_hidden_dim"]
    sparse = random_tracks(TrackConfig(**values, feed_forward_layer_pattern=("sparse",)), 1)
    dense = Model(TrackConfig(**values, feed_forward_layer_pattern=("dense",)))
    same = {n.replace(".experts", ""): a for n, a in tree_flatten(sparse.parameters())}
    dense.load_weights([(n, a) for n, a in same.items() if "router" not in n])
    tokens = mx.array([[4, 5, 6, 7]])
    assert_close(sparse(tokens), dense(tokens), 1e-5)


@pytest.mark.parametrize(
    "length", [1, 7]
)  # below and above the 64 rows from which experts are sorted
def test_experts_in_one_table_are_a_loop_over_tracks_and_experts(length):
    config = TrackConfig(**SMALL)
    layer = random_tracks(config, 2).layers[1].mlp
    assert isinstance(layer, SparseMLP)
    x = mx.random.normal((4, 2, length, 32))
    assert (4 * 2 * length * 2 >= 64) == (length == 7)
    found, routing = np.array(layer(x)), layer.route(x)
    ids, weights, x = map(np.array, (routing.experts, routing.weights, x))
    w = {k: np.array(layer.experts[f"{k}_proj"].weight) for k in ("gate", "up", "down")}
    wanted = np.zeros_like(found)
    for t, b, s, k in np.ndindex(ids.shape):
        expert, row = 5 * t + ids[t, b, s, k], x[t, b, s]
        gate = w["gate"][expert] @ row
        product = gate / (1 + np.exp(-gate)) * (w["up"][expert] @ row)
        wanted[t, b, s] += weights[t, b, s, k] * (w["down"][expert] @ product)
    assert_close(found, wanted, 1e-5)


def test_routers_compute_in_float32_and_ties_take_the_lowest_expert():
    layer = random_tracks(TrackConfig(**SMALL), 2).layers[1].mlp
    layer.router.weight = mx.zeros_like(layer.router.weight)
    routing = layer.route(mx.ones((4, 1, 3, 32), mx.bfloat16))
    assert routing.logits.dtype == routing.weights.dtype == mx.float32
    assert_same(routing.experts, np.broadcast_to([0, 1], (4, 1, 3, 2)))
    layer.router.weight = mx.random.normal(layer.router.weight.shape)
    x = 0.1 * mx.random.normal((4, 1, 3, 32))
    layer.cap = 0.5
    capped = layer.route(x)
    layer.cap = None
    free = layer.route(x)
    assert_same(capped.experts, free.experts)  # a cap keeps the order
    assert_close(capped.logits, 0.5 * np.tanh(np.array(free.logits) / 0.5), 1e-6)
    assert mx.abs(free.logits).max().item() > 0.5


def test_half_types_stay_half():
    model = random_tracks(TrackConfig(**SMALL, post_norm="pre_scale_rms_norm"), 4)
    model.update(tree_map(lambda a: a.astype(mx.bfloat16), model.parameters()))
    cache = make_prompt_cache(model)
    assert model(mx.array([[1, 2, 3, 4, 5]]), cache).dtype == mx.bfloat16
    assert {entry.keys.dtype for entry in cache} == {mx.bfloat16}
    assert {entry.keys.shape[1] for entry in cache} == {8}  # 4 tracks of 2 heads
