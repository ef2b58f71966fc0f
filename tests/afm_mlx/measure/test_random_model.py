"""Random models that are packed from the start."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.config import PRESETS
from afm_mlx.measure.random_model import random_packed_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import each
from tests.tools.compare import assert_same_tensors


@each("mode", ["balanced", "affine", "palette"])
def test_random_models_are_packed_from_the_start(rng, mode):
    config, seed = PRESETS["afm-nano"], int(rng.integers(2**31))
    rules = QuantizationRule(2, mode), QuantizationRule(4, mode)
    model, twin = (random_packed_model(config, *rules, seed) for _ in range(2))
    parameters = dict(tree_flatten(model.parameters()))
    assert_same_tensors(parameters, dict(tree_flatten(twin.parameters())))
    for path, array in parameters.items():
        if path.endswith(("proj.weight", "embedding.weight")):
            assert array.dtype == mx.uint32, path
    # Weights of deviation K^-0.5 keep the variance of what they multiply.
    weight = np.array(model.layers[0].mlp.up_proj.dequantize())
    assert weight.std() == pytest.approx(config.hidden_dim**-0.5, rel=0.15)
    logits = np.array(model(mx.array(rng.integers(0, config.vocab_size, (1, 8)))))
    assert 0.3 < logits.std() < 3
