"""NaN, infinity and numbers without a square are found wherever they are, and refused by the tensor's name."""

import os

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.finite import LARGEST, check_finite, not_finite, read_parameters
from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.errors import CheckpointError
from tests.tools.cases import all_pairs, each
from tests.tools.models import random_config, random_model

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    all_pairs(["cpu", "gpu"], [mx.float32, mx.float16, mx.bfloat16], [1, 100, 20_000]),
)
def test_one_bad_number_is_found_wherever_it_is(rng, monkeypatch, device, dtype, size):
    if device == "gpu":  # the way that is taken there, by MLX's operations
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    numbers = rng.standard_normal((4, size)).astype(np.float32)
    tensors = {"good": mx.array(numbers).astype(dtype), "codes": mx.array([1, 2])}
    assert not_finite(tensors) == []
    for value in BAD:
        bad = numbers.copy()
        bad[int(rng.integers(4)), int(rng.integers(size))] = value
        assert not_finite(tensors | {"bad": mx.array(bad).astype(dtype)}) == ["bad"]
    with pytest.raises(CheckpointError, match="here: bad and 1 more tensors holds NaN or infinity"):
        check_finite(tensors | dict.fromkeys(["bad", "too"], mx.array(bad).astype(dtype)), "here")
    highest = min(mx.finfo(dtype).max, 0.99 * LARGEST)
    extreme = mx.full((4, size), highest, dtype)  # sums, and sums of squares of them overflow
    assert not_finite({"high": extreme, "both": mx.concatenate([extreme, -extreme])}) == []
    if dtype != mx.float16:
        for value in (3.38e38, -3.38e38, 1.9e19):
            bad[:] = 0
            bad[int(rng.integers(4)), int(rng.integers(size))] = value
            assert not_finite(tensors | {"bad": mx.array(bad).astype(dtype)}) == ["bad"]


@each(
    ("name", "value", "words"),
    [
        ("model.embedding.weight", float("nan"), "holds NaN or infinity"),
        ("model.embedding.weight", 3.4e38, "holds NaN or infinity, or a number over 1.84e[+]19"),
        ("model.layers.0.self_attn.quant_value_scale", 0.0, "is 0; a scale of int8"),
        ("model.layers.0.self_attn.quant_key_scale", -0.01, "is -0.01; a scale of int8"),
    ],
)
def test_parameters_that_cannot_be_right_are_refused_by_name(rng, name, value, words):
    model = random_model(random_config(rng), rng)
    assert read_parameters(model, "here").keys() == dict(tree_flatten(model.parameters())).keys()
    model.load_weights([(name, mx.full(read_parameters(model, "")[name].shape, value))], False)
    with pytest.raises(CheckpointError, match=f"here: {name} {words}"):
        read_parameters(model, "here")


def test_a_file_that_is_cut_off_before_its_numbers_are_read(rng, tmp_path):
    model = random_model(random_config(rng), rng)
    save_weights(tmp_path, dict(tree_flatten(model.parameters())))
    model.load_weights(list(load_weights(tmp_path).items()))
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match=f"{tmp_path} can't be read"):
        read_parameters(model, tmp_path)
