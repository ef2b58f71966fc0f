"""The table of parameters describes the model that is built."""

import pytest
from mlx.utils import tree_flatten

from afm_mlx.architecture import parameter_shapes
from afm_mlx.config import PRESETS
from afm_mlx.model.model import Model


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_shapes_are_the_models(name):
    config = PRESETS[name]
    # Arrays are lazy: nothing of the 3B model takes memory here.
    parameters = dict(tree_flatten(Model(config).parameters()))
    assert parameter_shapes(config) == {k: tuple(v.shape) for k, v in parameters.items()}
