"""Float weights: of a whole model, of its last blocks, and of a draft model that imitates its target."""

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.loop.losses import CrossEntropy, Distillation
from afm_mlx.training.loop.mean_loss import mean_loss
from afm_mlx.training.loop.trainer import Report, Stepped, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.method import FullTraining, QATTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, read_data
from afm_mlx.training.methods.train import measure_split, train_draft, train_full, train_qat
from tests.tools.cli import lines
from tests.tools.compare import changed
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import OPTIONS, Watcher, parameters, random_adapter
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def test_all_weights_but_the_int8_scales(recipe, model, tmp_path):
    watcher = Watcher()
    recipe = dataclasses.replace(recipe, test=True)
    result = train_full(recipe, tmp_path / "full", **watcher.hooks())
    before, after = parameters(model), parameters(tmp_path / "full")
    fixed = {name for name in before if name.endswith(("key_scale", "value_scale"))}
    assert len(fixed) == 4
    assert changed(before, after) == set(before) - fixed
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    assert result.outcome.best_loss == min(losses)
    assert len(watcher.losses(Stepped, "loss")) == 6
    assert watcher.losses(Report, "step") == [6]
    plan = watcher.plan
    assert plan.parameters == TRAINABLE.num_parameters + len(fixed)
    assert plan.trainable == plan.parameters - len(fixed)
    assert plan.memory > 16 * plan.trainable
    assert len(plan.data.train) == 9
    assert 0 < plan.data.train.n_targets < plan.data.train.n_tokens
    card = (tmp_path / "full" / "README.md").read_text()
    assert f"| validation loss | {result.outcome.best_loss:.4f} |\n" in card
    assert f"| test cross-entropy | {result.test_loss:.4f} nats a token |\n" in card
    assert str(tmp_path) not in card
    tokenizers = [load(folder)[1] for folder in (model, tmp_path / "full")]
    assert tokenizers[0].encode("a word") == tokenizers[1].encode("a word")
    assert result.run_path == tmp_path / "full-run"


def test_the_last_blocks(recipe, model, tmp_path):
    train_full(recipe, tmp_path / "full", FullTraining(num_layers=1))
    names = changed(parameters(model), parameters(tmp_path / "full"))
    assert names
    assert all(name.startswith("model.kv_reuse_layers.0.") for name in names)
    with pytest.raises(ConfigError, match="num_layers is 4; allowed are 1 to 3"):
        train_full(recipe, tmp_path / "other", FullTraining(num_layers=4))
    assert not (tmp_path / "other-run").exists()


def test_a_draft_model_learns_from_an_adapted_target(recipe, packed, draft, tmp_path, rng):
    adapter = random_adapter(packed, tmp_path / "first", rng)
    options = TrainingOptions(12, 2e-2, warmup_iters=2, schedule="constant", steps_per_eval=4)
    recipe = dataclasses.replace(
        recipe, model=draft, options=options, teacher=packed, teacher_adapter=adapter,
        divergence="reverse", test=True,
    )  # fmt: skip
    watcher = Watcher()
    result = train_draft(recipe, tmp_path / "trained", **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < 0.9 * losses[0]
    before, after = result.test.untrained, result.test.trained
    assert 0 < before.acceptance < after.acceptance < 1
    assert changed(parameters(draft), parameters(tmp_path / "trained"))
    # What is evaluated is the reverse divergence from the target with its adapter.
    taught = load(packed, adapter_path=str(adapter))[0]
    data = read_data(recipe, ModelSource.open(draft))
    trained = load(tmp_path / "trained")[0]
    loss = mean_loss(trained, Distillation(taught, divergence="reverse"), data.valid).loss
    assert loss == pytest.approx(result.outcome.best_loss, rel=1e-2)
    again = measure_split(trained, data.test, teacher=taught)
    assert again.acceptance == pytest.approx(after.acceptance, rel=1e-2)
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "with the adapter first, reverse divergence of weight 1" in card
    assert f"| proposals that the target keeps | {after.acceptance:.1%} |" in card


def test_a_draft_model_needs_a_teacher(recipe, tmp_path):
    with pytest.raises(ConfigError, match="there is no teacher"):
        train_draft(recipe, tmp_path / "out")


# -- Weights on a grid, of an AFM model and of one of mlx-lm's: what is trained, and the packed folder


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
    # The folder's loss equals the trained weights' loss.
    tested = read_data(recipe, ModelSource.open(tmp_path / "qat")).test
    assert mean_loss(model, CrossEntropy(), tested).loss == pytest.approx(
        result.test_loss, rel=1e-2
    )
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
