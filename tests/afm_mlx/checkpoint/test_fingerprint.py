"""Fingerprints: the same for the same numbers wherever they are, another for any other model."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.checkpoint.fingerprint import (
    base_model_fingerprint,
    folder_fingerprint,
    model_fingerprint,
)
from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.config import PRESETS
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_model

NANO = PRESETS["afm-nano"]


@pytest.fixture
def model(rng):
    sizes = {"vocab_size": 97, "hidden_dim": 24, "num_heads": 2, "num_kv_heads": 1, "num_layers": 3}
    return random_model(random_config(rng, **sizes, num_kv_reuse_layers=1), rng)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_it_does_not_depend_on_where_the_weights_are(model, tmp_path, dtype):
    config = model.args
    arrays = {name: array.astype(dtype) for name, array in tree_flatten(model.parameters())}
    save_weights(tmp_path, arrays, max_shard_bytes=5000)
    fingerprint = folder_fingerprint(config, tmp_path)
    assert len(fingerprint) == 64
    wide = {name: array.astype(mx.float32) for name, array in arrays.items()}
    for same in (arrays, load_weights(tmp_path), wide, dict(reversed(arrays.items()))):
        assert model_fingerprint(config, same) == fingerprint


def test_it_tells_models_apart(model):
    config, arrays = model.args, dict(tree_flatten(model.parameters()))
    name = "model.layers.1.mlp.up_proj.weight"
    others = {
        "theta": (dataclasses.replace(config, rope_theta=2e4), arrays),
        "rounded": (config, {n: a.astype(mx.bfloat16) for n, a in arrays.items()}),
        "scaled": (config, arrays | {name: arrays[name] * 1.001}),
        "reshaped": (config, arrays | {name: arrays[name].T}),
        "renamed": (config, {("x" if n == name else n): a for n, a in arrays.items()}),
        "fewer": (config, {n: a for n, a in arrays.items() if n != name}),
        "packed": (config, arrays | {name: mx.ones((78, 3), mx.uint32)}),
        "packed otherwise": (config, arrays | {name: mx.ones((78, 3), mx.int32)}),
    }
    found = {key: model_fingerprint(*value) for key, value in others.items()}
    found["itself"] = model_fingerprint(config, arrays)
    assert len(set(found.values())) == len(found)
    longer = dataclasses.replace(config, context_length=8192)
    assert model_fingerprint(longer, arrays) == found["itself"]


def test_it_tells_models_of_mlx_lm_apart(rng):
    seed = int(rng.integers(2**31))
    model = zoo_model("llama", 64, seed)
    found = [base_model_fingerprint(model)]
    assert base_model_fingerprint(zoo_model("llama", 64, seed)) == found[0]
    add_lora(model, 2, 0.5)
    assert base_model_fingerprint(model) == found[0]
    for changes in ({"rope_theta": 2e4}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}):
        found.append(base_model_fingerprint(zoo_model("llama", 64, seed, **changes)))
    found.append(base_model_fingerprint(zoo_model("llama", 64, seed + 1)))
    assert len(set(found)) == len(found)

    @dataclasses.dataclass
    class Newer(type(model.args)):
        later: bool = False
        settings: dict = dataclasses.field(default_factory=dict)

    model.args = Newer(**vars(model.args))
    assert base_model_fingerprint(model) == found[0]
    model.args.later = True
    assert base_model_fingerprint(model) not in found


def test_a_change_of_some_columns_or_rows_is_seen():
    base = mx.zeros((1024, 256))
    same = model_fingerprint(NANO, {"w": base})
    for start in range(0, 256, 32):
        rows = base.at[4 * start : 4 * start + 16].add(1)
        columns = base.at[:, start : start + 16].add(1)
        assert model_fingerprint(NANO, {"w": rows}) != same
        assert model_fingerprint(NANO, {"w": columns}) != same


def test_zeros_signs_and_subnormals_that_devices_round_differently_are_one():
    prints = {
        model_fingerprint(NANO, {"w": mx.array(np.array([zero, 1, -2], np.float32))})
        for zero in (0.0, -0.0, 1e-40)
    }
    assert len(prints) == 1
