"""Adapters trained by preferences: they learn, start at their reference, resume and are measured again."""

import dataclasses
import json
import math

import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.formats import read_adapter, write_adapter
from afm_mlx.adapters.lora import add_lora
from afm_mlx.errors import AFMError, ConfigError, DataError
from afm_mlx.training.loop.losses import log_probabilities
from afm_mlx.training.loop.preference_losses import OBJECTIVES, PreferenceLoss
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import Preparing, Report, Resumed, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import DataSplits, Recipe
from afm_mlx.training.methods.train import measure_adapter, train_preferences
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.compare import assert_same_tensors
from tests.tools.tokenizers import docstrings
from tests.tools.training_runs import Break, Watcher, break_at, random_adapter
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

OPTIONS = TrainingOptions(
    iters=8, learning_rate=0.01, steps_per_eval=4, save_every=4, steps_per_report=1, seed=3
)
WORDS = sorted({word for word in docstrings().split() if word.isalpha()})[:60]
METHOD = PreferenceTraining(rank=4, scale=2.0)


def write_preferences(folder, rng, words, labels=False):
    """One word is better than five."""
    folder.mkdir()

    def record(index):
        drawn = [str(word) for word in rng.choice(words, 6, replace=False)]
        prompt, chosen, rejected = f"say {drawn[0]}", drawn[0], " ".join(drawn[1:])
        if labels:
            answer = {"completion": rejected if index % 2 else chosen, "label": not index % 2}
            return {"prompt": prompt} | answer
        strength = {"strength": "better"} if index % 2 else {}
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | strength

    # Random weights know no words, so that only what was trained on is sure to be learned.
    records = list(map(record, range(12)))
    for split, chosen in (("train", records), ("valid", records[:6]), ("test", records[6:11])):
        lines(folder / f"{split}.jsonl", *chosen)
    return folder


@pytest.fixture
def preferences(tmp_path, rng):
    return write_preferences(tmp_path / "preferences", rng, WORDS)


@pytest.fixture
def recipe(packed, preferences):
    return Recipe(preferences, OPTIONS, packed, batch_size=4, test=True)


def reports(watcher):
    return [event for event in watcher.events if isinstance(event, Report)]


@pytest.mark.parametrize("packing", [True, False])
def test_dpo_of_a_packed_model(recipe, tmp_path, packing):
    recipe = dataclasses.replace(recipe, packing=packing)
    watcher = Watcher()
    result = train_preferences(recipe, tmp_path / "adapter", METHOD, **watcher.hooks())
    first, *_, last = reports(watcher)
    assert first.metrics["margin"] == first.metrics["accuracy"] == first.metrics["kl"] == 0
    # A label of 0.85 or 1: at a margin of 0, any smoothing gives log 2.
    assert first.loss == pytest.approx(math.log(2), rel=1e-6)
    assert last.loss < 0.6
    assert last.metrics["margin"] > 0.1
    assert last.metrics["kl"] > 0
    before = next(event for event in watcher.events if isinstance(event, Validation))
    assert (before.step, before.metrics["margin"], before.metrics["kl"]) == (0, 0, 0)
    assert before.valid_loss == pytest.approx(math.log(2), rel=1e-6)
    assert result.outcome.tokens == 8 * 4
    # The adapter goes into a package and back.
    adapter, net = load_adapter(result.path), ModelSource.open(recipe.model).load()
    package = tmp_path / "own.fmadapter"
    write_adapter(package, *adapter, "fmadapter", model_config=net.args, any_rank=True)
    tensors, config = read_adapter(package, net.args)
    assert_same_tensors(tensors, adapter[0])
    assert (config.rank, config.scale) == (4, 2.0)
    # The adapter is measured again by the kernels that run adapters.
    trained, untrained = result.test.trained, result.test.untrained
    assert untrained.loss == pytest.approx(math.log(2), rel=1e-6)
    assert trained.loss < untrained.loss
    assert (trained.count, trained.unit) == (5, "pairs")
    assert result.test_perplexity is None
    again = measure_adapter(recipe, result.path, METHOD)
    assert again.untrained.loss == pytest.approx(math.log(2), rel=1e-6)
    assert again.trained.loss == pytest.approx(trained.loss, rel=2e-2)
    written = [json.loads(line) for line in (result.run_path / "metrics.jsonl").open()]
    for line, prefix in ((written[0], "valid_"), (written[1], "")):
        names = ("margin", "accuracy", "chosen", "rejected", "kl", "length")
        assert line.keys() >= {prefix + name for name in names}
    assert not any("valid_perplexity" in line for line in written)


@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "dpo"])
def test_every_objective_learns(packed, rng, tmp_path, objective):
    data = write_preferences(tmp_path / "data", rng, WORDS, labels=objective == "kto")
    options = dataclasses.replace(OPTIONS, iters=4)
    recipe = Recipe(data, options, packed, batch_size=4)
    method = dataclasses.replace(METHOD, loss=PreferenceLoss(objective, delta=1.0))
    watcher = Watcher()
    result = train_preferences(recipe, tmp_path / "adapter", method, **watcher.hooks())
    first, *_, last = [e for e in watcher.events if isinstance(e, Validation)]
    assert last.valid_loss < first.valid_loss
    assert last.metrics["margin"] > first.metrics["margin"]
    if objective == "dpop":
        assert last.metrics["chosen"] > first.metrics["chosen"]
    is_kept = (result.run_path / "reference-train.safetensors").exists()
    assert is_kept == OBJECTIVES[objective].has_reference


def test_the_kept_reference_is_the_model_without_its_adapter(recipe, tmp_path, model):
    """As it is computed live, in training mode for training data, and from batches of a later epoch.

    There a row has other rows next to it, so a last bit may differ, and move keys by a step of their int8 grid.
    """
    source = ModelSource.open(recipe.model)
    trained = source.load()
    train, valid = (METHOD.read_split(recipe, source, split) for split in ("train", "valid"))
    METHOD.prepare(trained, source, train, 0)
    manifest = {"model_weights": "", "reference_adapter": None}
    with RunFolder.create(tmp_path / "run", manifest) as run:
        data = METHOD.complete_data(
            trained, source, DataSplits(train, valid, None), run, on_event=[].append
        )
    for batches, mode in ((data.train, True), (data.valid, False)):
        # Layers in wrappers, which round as the policy's do: kernels of layers without one round otherwise.
        live = add_lora(source.load(), 4, 2.0).train(mode)
        for step in (0, 1, 2 * batches.per_epoch + 1):
            batch = batches(step)
            is_target = np.array(batch.numbers) < batches.n_scored
            found, wanted = np.array(batch.reference), np.array(log_probabilities(live, batch))
            near = 1e-6 if step < batches.per_epoch else 2e-3
            np.testing.assert_allclose(found[is_target], wanted[is_target], rtol=near, atol=near)


def test_a_resumed_run_ends_as_an_unbroken_one(recipe, tmp_path, monkeypatch):
    whole = train_preferences(recipe, tmp_path / "whole", METHOD)
    with pytest.raises(Break):
        train_preferences(recipe, tmp_path / "broken", METHOD, on_event=break_at(6))
    other = dataclasses.replace(METHOD, loss=PreferenceLoss(beta=0.2))
    with pytest.raises(AFMError, match="loss was"):
        train_preferences(recipe, tmp_path / "broken", other, resume=True)
    computed = []
    reference = PreferenceTraining._reference

    def watched(self, *arguments):
        computed.append(arguments)
        return reference(self, *arguments)

    monkeypatch.setattr(PreferenceTraining, "_reference", watched)
    # One split's file is lost, another's is of other data.
    run = tmp_path / "broken" / "run"
    (run / "reference-test.safetensors").write_bytes(b"")
    (run / "reference-valid.safetensors").write_bytes(
        (run / "reference-train.safetensors").read_bytes()
    )
    watcher = Watcher()
    broken = train_preferences(recipe, tmp_path / "broken", METHOD, resume=True, **watcher.hooks())
    assert [event.step for event in watcher.events if isinstance(event, Resumed)] == [4]
    assert len(computed) == 2
    prepared = [dataclasses.astuple(e) for e in watcher.events if isinstance(e, Preparing)]
    log_probabilities = "the reference's log-probabilities of"
    assert prepared == [
        (f"{log_probabilities} {what}", done, 2)
        for what in ("6 pairs (valid)", "5 pairs (test)")
        for done in range(3)
    ]
    assert broken.outcome.best_loss == whole.outcome.best_loss
    assert_same_tensors(load_adapter(whole.path)[0], load_adapter(broken.path)[0])


@each("kind", ["another", "the initial one"])
def test_another_adapter_as_the_reference(recipe, rng, tmp_path, kind):
    folder = tmp_path / kind.replace(" ", "-")
    first = random_adapter(recipe.model, folder / "first", rng, rank=3)
    is_own = kind == "the initial one"
    method = PreferenceTraining(
        rank=None if is_own else 4,
        initial_adapter=first if is_own else None,
        reference_adapter=first,
    )
    watcher = Watcher()
    result = train_preferences(recipe, folder / "adapter", method, **watcher.hooks())
    start = reports(watcher)[0]
    if is_own:
        assert (start.metrics["margin"], start.metrics["kl"]) == (0, 0)
        assert start.loss == pytest.approx(math.log(2), rel=1e-6)
    else:
        assert start.metrics["kl"] > 0
    assert load_adapter(result.path)[1].rank == (3 if is_own else 4)
    again = measure_adapter(recipe, result.path, method)
    assert again.trained.loss == pytest.approx(result.test.trained.loss, rel=2e-2)


def test_the_reference_of_an_initial_adapter_is_the_base(recipe, rng, tmp_path):
    first = random_adapter(recipe.model, tmp_path / "first", rng)
    watcher = Watcher()
    method = PreferenceTraining(initial_adapter=first)
    train_preferences(recipe, tmp_path / "adapter", method, **watcher.hooks())
    assert reports(watcher)[0].metrics["kl"] > 0


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
def test_of_a_model_of_mlx_lm(rng, tmp_path, objective):
    model = zoo_model("llama", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "model", "llama", model, word_tokenizer_json(64))
    (tmp_path / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }} w1 {% endfor %}"
    )
    words = [f"w{i}" for i in range(2, 60)]
    data = write_preferences(tmp_path / "data", rng, words)
    recipe = Recipe(data, OPTIONS, tmp_path / "model", batch_size=4, test=True)
    method = dataclasses.replace(METHOD, loss=PreferenceLoss(objective))
    watcher = Watcher()
    result = train_preferences(recipe, tmp_path / "adapter", method, **watcher.hooks())
    if objective == "dpo":
        assert reports(watcher)[0].loss == pytest.approx(math.log(2), rel=1e-6)
    assert result.test.trained.loss < result.test.untrained.loss
    assert result.test.trained.unit == ("answers" if objective == "kto" else "pairs")
    packing = dataclasses.replace(recipe, packing=True)
    with pytest.raises(ConfigError, match="--no-packing"):
        train_preferences(packing, tmp_path / "packed", method)


def test_soft_labels_reach_the_loss(recipe):
    source = ModelSource.open(recipe.model)
    method = dataclasses.replace(METHOD, loss=PreferenceLoss(label_smoothing=0.25))
    batches = method.read_split(recipe, source, "valid")
    strengths = sorted(batches(0).strengths.tolist() + batches(1).strengths.tolist())
    assert strengths == pytest.approx([0.75] * 3 + [0.85] * 3)


@each(
    "changes, fault",
    [
        ({"teacher": "self"}, "teacher would do nothing"),
        ({"prompt_weight": 0.5}, "prompt_weight would do nothing"),
        ({"features": {"text": "body"}}, "features would do nothing"),
    ],
)
def test_what_a_recipe_of_preferences_has_no_use_for(recipe, tmp_path, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        train_preferences(dataclasses.replace(recipe, **changes), tmp_path / "adapter", METHOD)


def test_a_loss_without_a_reference_takes_no_adapter_for_it():
    with pytest.raises(ConfigError, match="orpo has no reference"):
        PreferenceTraining(loss=PreferenceLoss("orpo"), reference_adapter="a")


def test_chats_are_no_preferences(recipe, tmp_path):
    lines(tmp_path / "train.jsonl", {"prompt": "a", "completion": "b"})
    other = dataclasses.replace(recipe, data=tmp_path / "train.jsonl", test=False)
    with pytest.raises(DataError, match=r"train.jsonl:1: the line lacks 'chosen' and 'rejected'"):
        train_preferences(other, tmp_path / "adapter", METHOD)
