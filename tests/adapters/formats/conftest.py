"""Random adapters of random small AFM models."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import AdapterConfig
from afm_mlx.adapters.formats.pair_order import keys_of, num_layers_of, pair_targets
from tests.converters.conftest import (  # noqa: F401 (fixtures)
    edit_state,
    make_checkpoint,
    tokenizer_bytes,
)
from tests.tools.cases import draw as draw_array
from tests.tools.compare import assert_same_tensors, exact
from tests.tools.models import random_config


def assert_same_numbers(got, wanted):
    assert_same_tensors(got, wanted, dtypes=False)


def delta(tensors, config, place):
    """scale * A B of a place in float64, (inputs, outputs)."""
    return config.scale * exact(tensors[place.a]) @ exact(tensors[place.b])


@pytest.fixture(scope="session")
def core_ml():
    """coremltools' extension module, which few platforms have."""
    return pytest.importorskip("coremltools.libmilstoragepython")


def core_ml_bytes(core_ml, path, arrays):
    """The file that coremltools writes of these arrays, and where the data of each starts."""
    writer = core_ml._BlobStorageWriter(str(path))
    offsets = [writer.write_fp16_data(a.reshape(-1).view(np.uint16)) for a in arrays]
    del writer
    return path.read_bytes(), offsets


@pytest.fixture
def model_config(rng):
    return random_config(rng)


@pytest.fixture
def draw_adapter(rng):
    def draw(model_config, rank=4, scale=0.5, dtype=mx.float16, keep=None, fingerprint="ab" * 32):
        tensors = {}
        for place in pair_targets(model_config):
            if keep is None or keep(place):
                for name, shape in place.shapes(rank).items():
                    tensors[name] = (draw_array(rng, shape) * shape[0] ** -0.5).astype(dtype)
        return tensors, AdapterConfig(
            rank=rank,
            scale=scale,
            num_layers=num_layers_of(tensors, model_config),
            keys=keys_of(tensors),
            base_model_fingerprint=fingerprint,
        )

    return draw
