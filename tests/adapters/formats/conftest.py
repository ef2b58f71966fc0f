"""Random adapters of random small AFM models."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import AdapterConfig
from afm_mlx.adapters.formats.pair_order import keys_of, num_layers_of, pair_places
from tests.converters.conftest import (  # noqa: F401 (fixtures)
    edit_state,
    make_checkpoint,
    tokenizer_bytes,
)
from tests.tools.models import random_config


def equal(one, other):
    """Whether two adapters' tensors are the same numbers under the same names."""
    return sorted(one) == sorted(other) and all(
        mx.array_equal(one[n].astype(mx.float32), other[n].astype(mx.float32)).item() for n in one
    )


def delta(tensors, config, place):
    """scale * A B of a place in float64, (inputs, outputs)."""
    a, b = (np.array(tensors[n].astype(mx.float32), np.float64) for n in (place.a, place.b))
    return config.scale * a @ b


@pytest.fixture
def model_config(rng):
    """An architecture with reuse blocks, or without."""
    return random_config(rng)


@pytest.fixture
def draw_adapter(rng):
    """A function that draws an adapter for a model: its tensors and its config."""

    def draw(model_config, rank=4, scale=0.5, dtype=mx.float16, keep=None, fingerprint="ab" * 32):
        tensors = {}
        for place in pair_places(model_config):
            if keep is None or keep(place):
                for name, shape in (
                    (place.a, (place.inputs, rank)),
                    (place.b, (rank, place.outputs)),
                ):
                    numbers = rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
                    tensors[name] = mx.array(numbers).astype(dtype)
        return tensors, AdapterConfig(
            rank=rank,
            scale=scale,
            num_layers=num_layers_of(tensors, model_config),
            keys=keys_of(tensors),
            base_model_fingerprint=fingerprint,
        )

    return draw
