"""Tiny models, adapters for them, and pools of these."""

import contextlib
import copy
import dataclasses
import functools

import numpy as np
import pytest

from afm_mlx.adapters.lora import add_lora, save_lora
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.resident import build_resident
from afm_mlx.adapters.target_modules import target_shapes
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import SIZES, draw_tensors, gated_reads, randomize_lora, write_folder
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

    return lambda kind="packed", kv_bits=None: copy.deepcopy(original(kind, kv_bits))


@pytest.fixture
def write_adapter(rng, tmp_path):
    def write(model, name="adapter", rank=4, scale=None, **options):
        scale = float(rng.uniform(0.2, 0.8)) if scale is None else scale
        add_lora(model, rank, scale, seed=int(rng.integers(2**31)), **options)
        randomize_lora(model, rng)
        save_lora(model, tmp_path / name)
        return tmp_path / name

    return write


@pytest.fixture
def model(make_model):
    return make_model("float")


@pytest.fixture
def folder(rng, model, tmp_path):
    def write(name, rank=4, **options):
        scale = float(rng.uniform(0.2, 0.8))
        return write_folder(tmp_path / name, draw_tensors(model, rng, rank, **options), scale)

    return write


@pytest.fixture
def size(model, rng):
    tensors = draw_tensors(model, rng, 4)
    return build_resident(tensors, 1.0, target_shapes(model), "drawn").nbytes


@pytest.fixture
def make_pool(model, folder):
    with contextlib.ExitStack() as pools:

        def make(names="abc", **options):
            pool = pools.enter_context(AdapterPool(model, **options))
            for name in names:
                pool.register(name, folder(name))
            return pool

        yield make


@pytest.fixture
def gate(monkeypatch):
    """Reads wait until it is opened; `reached` says that one has begun."""
    with gated_reads(monkeypatch) as gate:
        yield gate
