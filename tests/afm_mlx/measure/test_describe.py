"""What is said of a model folder."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.stored_tensor import StoredTensor
from afm_mlx.measure import describe


def test_packed_weights_are_counted_unpacked():
    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False))
    layers.layers[0] = layers.layers[0].to_quantized(32, 4)
    layers.layers[1] = layers.layers[1].to_quantized(64, 2)
    arrays = dict(tree_flatten(layers.parameters()))
    tensors = {n: StoredTensor(n, a.shape, a.dtype, Path("x"), 0) for n, a in arrays.items()}
    values = {"quantization": {"group_size": 32, "bits": 4, "layers.1": {"bits": 2}}}
    assert describe._count_parameters(tensors, values) == 64 * (32 + 96)


def test_the_speed_of_a_product_is_its_multiplications_and_additions_over_seconds(monkeypatch):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(describe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert describe.measure_gflops() == 2 * 512**3 / 0.5 / 1e9
