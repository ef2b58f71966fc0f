"""A warm-up of models without Metal; tests/kernels/metal/test_libraries.py has what it compiles."""

import dataclasses

import pytest

from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.config import PRESETS
from afm_mlx.engine.warm_up import _residents, warm_up
from afm_mlx.measure.random_model import random_packed_model
from afm_mlx.model.model import Model

NANO = PRESETS["afm-nano"]


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(NANO).eval(),
        lambda: Model(dataclasses.replace(NANO, kv_bits=None)).eval(),
        lambda: random_packed_model(NANO),
        lambda: random_packed_model(dataclasses.replace(NANO, num_layers=2, num_kv_reuse_layers=0)),
    ],
    ids=["floats", "float keys", "packed", "no reuse blocks"],
)
def test_every_model_can_be_warmed_up_and_keeps_its_adapters(make, kv):
    model = make()
    batch = BatchAdapters.of([_residents(model)[0]])
    bind(model).set(batch)
    steps = list(warm_up(model, 2, drafts=True, adapters=True, kv=kv))
    assert len(steps) > 50
    assert set(steps) == {None}  # no kernel of Metal's runs here
    assert bind(model).batch is batch
