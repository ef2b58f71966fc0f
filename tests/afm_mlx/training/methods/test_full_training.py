"""Float weights: of a whole model, of its last blocks, and of a draft model that imitates its target."""

import dataclasses

import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load
from afm_mlx.training.loop.evaluation import mean_loss
from afm_mlx.training.loop.losses import Distillation
from afm_mlx.training.loop.trainer import Report, Stepped, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.method import FullTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import read_data
from afm_mlx.training.methods.train import measure_split, train_draft, train_full
from tests.tools.compare import changed
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import Watcher, parameters, random_adapter


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
    loss = mean_loss(trained, Distillation(taught, divergence="reverse"), data.valid)
    assert loss == pytest.approx(result.outcome.best_loss, rel=1e-2)
    again = measure_split(trained, data.test, teacher=taught)
    assert again.acceptance == pytest.approx(after.acceptance, rel=1e-2)
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "with the adapter first, reverse divergence of weight 1" in card
    assert f"| proposals that the target keeps | {after.acceptance:.1%} |" in card


def test_a_draft_model_needs_a_teacher(recipe, tmp_path):
    with pytest.raises(ConfigError, match="there is no teacher"):
        train_draft(recipe, tmp_path / "out")
