"""Fingerprints: the same for the same numbers wherever they are, another for any other model."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.architecture import parameter_shapes
from afm_mlx.checkpoint.fingerprint import folder_fingerprint, model_fingerprint
from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.model.model import Model


@pytest.fixture
def model_folder(rng, tmp_path):
    """A config and a folder of weights of one type, by type."""
    config = ModelConfig(
        vocab_size=97,
        hidden_dim=24,
        num_layers=3,
        num_kv_reuse_layers=1,
        num_heads=2,
        num_kv_heads=1,
        rope_theta=1e4,
    )
    shapes = parameter_shapes(config)

    def make(dtype):
        arrays = {n: mx.array(rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()}
        folder = tmp_path / str(dtype)
        folder.mkdir()
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        save_weights(folder, arrays, max_shard_bytes=5000)
        return config, folder, arrays

    return make


def test_fingerprint_does_not_depend_on_where_the_weights_are(model_folder):
    for dtype in [mx.float32, mx.float16, mx.bfloat16]:
        config, folder, arrays = model_folder(dtype)
        fingerprint = model_fingerprint(config, arrays)
        assert len(fingerprint) == 64
        assert fingerprint == folder_fingerprint(config, folder)
        assert fingerprint == model_fingerprint(config, load_weights(folder))
        wide = {name: array.astype(mx.float32) for name, array in arrays.items()}
        assert fingerprint == model_fingerprint(config, wide)
        reordered = dict(reversed(arrays.items()))
        assert fingerprint == model_fingerprint(config, reordered)
        model = Model(config)
        model.load_weights(list(arrays.items()))
        assert fingerprint == model_fingerprint(config, dict(tree_flatten(model.parameters())))


def test_fingerprint_tells_models_apart(model_folder):
    import dataclasses

    config, _, arrays = model_folder(mx.float32)
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


def test_fingerprint_samples_all_columns_and_rows():
    """A change to a single row or column of a matrix of the usual shape is seen as a rule."""
    config = PRESETS["afm-nano"]
    base = mx.zeros((1024, 256))
    same = model_fingerprint(config, {"w": base})
    rows = sum(
        model_fingerprint(config, {"w": base.at[i : i + 16].add(1)}) != same
        for i in range(0, 1024, 128)
    )
    columns = sum(
        model_fingerprint(config, {"w": base.at[:, i : i + 16].add(1)}) != same
        for i in range(0, 256, 32)
    )
    assert (rows, columns) == (8, 8)


def test_fingerprint_ignores_what_devices_round_differently():
    config = PRESETS["afm-nano"]
    values = [0.0, 1.0, -2.0]
    odd = [-0.0, 1.0, -2.0]
    tiny = [1e-40, 1.0, -2.0]
    prints = {
        model_fingerprint(config, {"w": mx.array(np.array(v, np.float32))})
        for v in (values, odd, tiny)
    }
    assert len(prints) == 1
