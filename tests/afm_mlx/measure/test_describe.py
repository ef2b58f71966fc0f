"""What is said of a model folder."""

from pathlib import Path

import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.stored_tensor import StoredTensor
from afm_mlx.measure.describe import _count_parameters


def test_packed_weights_are_counted_unpacked():
    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False))
    layers.layers[0] = layers.layers[0].to_quantized(32, 4)
    layers.layers[1] = layers.layers[1].to_quantized(64, 2)
    arrays = dict(tree_flatten(layers.parameters()))
    tensors = {n: StoredTensor(n, a.shape, a.dtype, Path("x"), 0) for n, a in arrays.items()}
    values = {"quantization": {"group_size": 32, "bits": 4, "layers.1": {"bits": 2}}}
    assert _count_parameters(tensors, values) == 64 * (32 + 96)
