"""Weights on a grid, of an AFM model and of one of mlx-lm's: what is trained, and the packed folder."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.evaluation import mean_loss
from afm_mlx.training.loop.losses import CrossEntropy
from afm_mlx.training.loop.trainer import Validation
from afm_mlx.training.methods.method import QATTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, read_data
from afm_mlx.training.methods.train import train_qat
from tests.tools.cli import lines
from tests.tools.training_runs import OPTIONS, Watcher
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def test_a_packed_model_is_saved(recipe, tmp_path):
    watcher = Watcher()
    recipe = dataclasses.replace(recipe, test=True, options=dataclasses.replace(OPTIONS, iters=12))
    result = train_qat(recipe, tmp_path / "qat", QATTraining(calibrate_kv=2), **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    model = load(tmp_path / "qat")[0]
    linear = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert {(m.bits, m.mode, m.granularity) for m in linear} == {(2, "balanced", "tensor")}
    embedding = model.model.embedding
    assert isinstance(embedding, PackedEmbedding)
    assert (embedding.bits, embedding.granularity) == (4, "row")
    # The folder's loss is that of the weights that were trained.
    tested = read_data(recipe, ModelSource.open(tmp_path / "qat")).test
    assert mean_loss(model, CrossEntropy(), tested) == pytest.approx(result.test_loss, rel=1e-2)
    assert watcher.plan.options.ema_decay == pytest.approx(1 - 10 / 12)


def test_a_model_without_int8_scales_gets_them(recipe, model, tmp_path):
    source = ModelSource.open(model)
    as_float = dataclasses.replace(source, values={**source.values, "kv_bits": None})
    with pytest.raises(ConfigError, match="stores keys and values as floats"):
        QATTraining(learn_kv_scales=True).check(recipe, as_float)
    file = model / "model.safetensors"
    weights = {name: a for name, a in mx.load(str(file)).items() if "quant_" not in name}
    (model / "model.safetensors.index.json").unlink()
    mx.save_safetensors(str(file), weights)
    (model / "config.json").write_text(json.dumps(as_float.values))
    method = QATTraining(calibrate_kv=2, learn_kv_scales=True, average=False)
    train_qat(recipe, tmp_path / "qat", method)
    assert load(tmp_path / "qat")[0].args.kv_bits == 8


def test_a_model_of_the_zoo(tmp_path, rng):
    folder = tmp_path / "zoo"
    write_zoo_folder(folder, "llama", zoo_model("llama", 96, 1), word_tokenizer_json(96))
    rows = [{"text": " ".join(f"w{i}" for i in rng.integers(2, 96, 20))} for _ in range(6)]
    data = lines(tmp_path / "train.jsonl", *rows)
    recipe = Recipe(data, OPTIONS, folder, batch_size=2, max_seq_length=64, teacher="self")
    rule = QuantizationRule(4, "affine", "group", 32)
    train_qat(recipe, tmp_path / "qat", QATTraining(rule=rule, embedding_rule=rule))
    from mlx_lm import load as load_by_mlx_lm

    tokens = mx.array([[5, 6, 7]])
    theirs, ours = load_by_mlx_lm(str(tmp_path / "qat"))[0], load(tmp_path / "qat")[0]
    np.testing.assert_allclose(theirs(tokens), ours(tokens), atol=1e-2)
    with pytest.raises(ConfigError, match="no int8 scales"):
        train_qat(recipe, tmp_path / "other", QATTraining(calibrate_kv=1))
    with pytest.raises(ConfigError, match="--no-packing"):
        train_qat(dataclasses.replace(recipe, packing=True), tmp_path / "other")
