"""Draft models: trained by the reverse divergence against a target with its adapter."""

import dataclasses
import json

import pytest
from mlx.utils import tree_flatten

from afm_mlx.config import PRESETS
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.loop.events import Stepped, Validation
from afm_mlx.training.loop.losses import Distillation
from afm_mlx.training.loop.mean_loss import mean_loss
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.data_splits import read_data
from afm_mlx.training.methods.full_training import DraftTraining
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.model_source import FreshSource, ModelSource
from afm_mlx.training.methods.scores import measure_split
from afm_mlx.training.methods.train import train_draft, train_lora
from tests.tools.cli import write_folder
from tests.tools.compare import changed
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import Watcher, parameters, random_adapter

DRAFT = dataclasses.replace(TRAINABLE, num_layers=1, num_kv_reuse_layers=0, kv_bits=None)


@pytest.fixture
def draft(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "draft", spm_bpe, rng, DRAFT)


@pytest.mark.parametrize("base", ["float", "packed"])
def test_it_learns_from_an_adapted_target(recipe, model, packed, draft, tmp_path, rng, base):
    target = {"float": model, "packed": packed}[base]
    adapter = random_adapter(target, tmp_path / "first", rng)
    options = TrainingOptions(
        iters=12, learning_rate=2e-2, warmup_iters=2, schedule="constant", steps_per_eval=4
    )
    recipe = dataclasses.replace(
        recipe, model=draft, options=options, teacher=target, teacher_adapter=adapter,
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
    taught = load(target, adapter_path=str(adapter))[0]
    data = read_data(recipe, ModelSource.open(draft))
    trained = load(tmp_path / "trained")[0]
    loss = mean_loss(trained, Distillation(taught, divergence="reverse"), data.valid)
    assert loss == pytest.approx(result.outcome.best_loss, rel=1e-2)
    again = measure_split(trained, data.test, teacher=taught)
    assert again.acceptance == pytest.approx(after.acceptance, rel=1e-2)
    card = (tmp_path / "trained" / "README.md").read_text()
    assert "with the adapter first, reverse divergence of weight 1" in card
    assert f"| proposals that the target keeps | {after.acceptance:.1%} |" in card


def test_it_starts_from_random_weights(recipe, model, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny-draft", dataclasses.replace(DRAFT, vocab_size=8, kv_bits=8))
    fresh, again, other = (FreshSource.for_target(model, "tiny-draft", seed) for seed in (1, 1, 2))
    drawn = [dict(tree_flatten(source.load().parameters())) for source in (fresh, again, other)]
    assert not changed(drawn[0], drawn[1])
    assert "model.embedding.weight" in changed(drawn[0], drawn[2])
    target = json.loads((model / "config.json").read_text())
    assert fresh.values["kv_bits"] is None
    for name in ("vocab_size", "context_length"):
        assert fresh.values[name] == target[name]
    options = TrainingOptions(iters=4, learning_rate=5e-3, save_every=2, steps_per_eval=2)
    recipe = dataclasses.replace(
        recipe, model=fresh, options=options, teacher=model, divergence="reverse", test=True
    )

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_draft(recipe, tmp_path / "broken", on_event=interrupt)
    with pytest.raises(TrainingError, match="model_weights was"):
        train_draft(dataclasses.replace(recipe, model=other), tmp_path / "broken", resume=True)
    first = train_draft(recipe, tmp_path / "broken", resume=True)
    second = train_draft(recipe, tmp_path / "unbroken")
    assert not changed(parameters(tmp_path / "unbroken"), parameters(tmp_path / "broken"))
    assert first.test == second.test
    assert first.outcome.best_step > 0
    assert first.test.trained != first.test.untrained


def test_a_fresh_draft_model_needs_sizes_and_an_afm_target(model, tmp_path):
    llama = tmp_path / "llama"
    llama.mkdir()
    (llama / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"no preset 'huge'.*allowed are .*afm-3b-draft"):
        FreshSource.for_target(model, "huge")
    with pytest.raises(ConfigError, match=r"The teacher: .* is no AFM model"):
        FreshSource.for_target(llama, "afm-3b-draft")
    with pytest.raises(AFMError, match="The teacher: There is no folder"):
        FreshSource.for_target(tmp_path / "nowhere", "afm-3b-draft")


def test_a_run_keeps_to_its_adapter(recipe, model, draft, tmp_path, rng):
    first, second = (random_adapter(model, tmp_path / name, rng) for name in ("one", "two"))
    options = TrainingOptions(iters=4, learning_rate=1e-3, save_every=2)
    recipe = dataclasses.replace(
        recipe, model=draft, options=options, teacher=model, teacher_adapter=first
    )

    def interrupt(event):
        if isinstance(event, Stepped) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_draft(recipe, tmp_path / "broken", on_event=interrupt)
    for name, value in (("teacher_adapter", second), ("divergence", "reverse")):
        other = dataclasses.replace(recipe, **{name: value})
        with pytest.raises(TrainingError, match=f"{name} was"):
            train_draft(other, tmp_path / "broken", resume=True)
    train_draft(recipe, tmp_path / "broken", resume=True)
    train_draft(recipe, tmp_path / "unbroken")
    assert not changed(parameters(tmp_path / "unbroken"), parameters(tmp_path / "broken"))


def test_what_can_not_be_trained(recipe, model, packed, draft, tmp_path, spm_bpe, rng):
    with pytest.raises(ConfigError, match="there is no teacher"):
        train_draft(dataclasses.replace(recipe, model=draft), tmp_path / "out")
    taught = dataclasses.replace(recipe, model=packed, teacher=model)
    with pytest.raises(ConfigError, match="is quantized, and training of a draft model"):
        train_draft(taught, tmp_path / "out", DraftTraining())
    wide = dataclasses.replace(DRAFT, vocab_size=TRAINABLE.vocab_size + 8)
    padded = write_folder(tmp_path / "padded", spm_bpe, rng, wide)
    with pytest.raises(ConfigError, match=r"\(1000 and 1008 rows of the embedding\)"):
        train_draft(dataclasses.replace(taught, model=padded), tmp_path / "out")
    stranger = random_adapter(draft, tmp_path / "stranger", rng)
    strange = dataclasses.replace(taught, model=draft, teacher_adapter=stranger)
    with pytest.raises(CheckpointError, match="was made for the model"):
        train_draft(strange, tmp_path / "out")
    with pytest.raises(ConfigError, match="without a teacher to put it on"):
        dataclasses.replace(recipe, teacher_adapter=stranger)
    assert not (tmp_path / "out-run").exists()


def test_a_model_may_learn_from_itself_with_an_adapter(recipe, model, tmp_path, rng):
    adapter = random_adapter(model, tmp_path / "first", rng)
    recipe = dataclasses.replace(recipe, teacher=model, teacher_adapter=adapter)
    watcher = Watcher()
    train_lora(recipe, tmp_path / "small", LoRATraining(rank=2), **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert 0 < losses[-1] < losses[0]
