"""Tiny models, and adapters for them."""

import copy
import dataclasses
import functools

import numpy as np
import pytest

from afm_mlx.adapters.lora import add_lora, save_lora
from afm_mlx.quantization import QuantizationRule, quantize_model
from tests.tools.adapters import SIZES, randomize_lora
from tests.tools.models import random_config, random_model


@pytest.fixture
def make_model(rng):
    """A function that makes the same model again, float or packed.

    Without int8 keys and values, unless asked for: on a rounding boundary, two right sums may fall to either
    side.
    """
    config, seed = random_config(rng, **SIZES), int(rng.integers(2**31))

    @functools.cache
    def original(kind, kv_bits):
        model = random_model(
            dataclasses.replace(config, kv_bits=kv_bits), np.random.default_rng(seed)
        )
        if kind == "packed":
            quantize_model(model, {}, QuantizationRule(2), QuantizationRule(4))
        return model.eval()

    def make(kind="packed", kv_bits=None):
        return copy.deepcopy(original(kind, kv_bits))

    return make


@pytest.fixture
def write_adapter(rng, tmp_path):
    """A function that writes a folder for a model, whose every B is random."""

    def write(model, name="adapter", rank=4, scale=None, **options):
        scale = float(rng.uniform(0.2, 0.8)) if scale is None else scale
        add_lora(model, rank, scale, seed=int(rng.integers(2**31)), **options)
        randomize_lora(model, rng)
        save_lora(model, tmp_path / name)
        return tmp_path / name

    return write
