"""Adapters and the fingerprint of their base; what the commands do with them is in tests/afm_mlx/cli."""

import dataclasses

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.converters.adapter_conversion import BaseFolder, read_for
from afm_mlx.errors import CheckpointError
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_adapter, resolve_model


def test_an_adapter_gets_the_fingerprint_of_its_base_and_another_is_refused(tmp_path):
    folder, other = resolve_model(EMBEDDED_MODEL), "ab" * 32
    base = BaseFolder.read(folder)
    tensors, config = load_adapter(resolve_adapter("todo", folder))
    mx.eval(tensors)
    for number, (own, wanted) in enumerate([(None, base.fingerprint), (other, other)]):
        path = tmp_path / str(number)
        save_adapter(path, tensors, dataclasses.replace(config, base_model_fingerprint=own))
        assert read_for(path, base, force=True)[1].base_model_fingerprint == wanted
        assert read_for(path, None)[1].base_model_fingerprint == own
    with pytest.raises(CheckpointError, match=other):
        read_for(path, base)
