"""A model and a recipe for whole runs."""

import dataclasses

import pytest

from afm_mlx.config import PRESETS
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.training.methods.method import save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe
from tests.tools.cli import write_folder
from tests.tools.training_data import TRAINABLE, write_data
from tests.tools.training_runs import OPTIONS


@pytest.fixture
def model(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE)


@pytest.fixture
def recipe(model, tmp_path, rng):
    return Recipe(
        write_data(tmp_path / "data", rng), OPTIONS, model, batch_size=2, max_seq_length=96
    )


@pytest.fixture
def packed(model, tmp_path):
    """The model in 2 bits, as a folder."""
    source = ModelSource.open(model)
    quantized, values = quantize_model(source.load(), source.values)
    return save_model_folder(
        tmp_path / "packed", quantized, values, source, what="Rounded.", facts={}
    )


DRAFT = dataclasses.replace(TRAINABLE, num_layers=1, num_kv_reuse_layers=0, kv_bits=None)


@pytest.fixture
def draft(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "draft", spm_bpe, rng, DRAFT)


@pytest.fixture
def draft_preset(monkeypatch):
    """The sizes "tiny-draft", of a vocabulary and with scales that no draft model takes over."""
    monkeypatch.setitem(PRESETS, "tiny-draft", dataclasses.replace(DRAFT, vocab_size=8, kv_bits=8))
