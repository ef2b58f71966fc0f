"""The loop: exact resume, kills, interrupts, the best weights, and what goes wrong."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.cli.signals import deferred_signals
from afm_mlx.errors import CheckpointError, ConfigError, TrainingError
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import (
    CheckpointSaved,
    Report,
    Resumed,
    Stepped,
    Validation,
    train,
)
from afm_mlx.training.loop.training_options import TrainingOptions
from tests.tools.compare import assert_same_tensors
from tests.tools.training import ToyBatches, ToyModel, joined, toy_loss, toy_run
from tests.tools.training_runs import Break, break_at

ROOT = Path(__file__).parents[4]
MEASURED = ("tokens_per_second", "peak_memory")  # by a clock and by the process


@pytest.fixture
def run(tmp_path):
    return RunFolder.create(tmp_path / "run", {})


def weights_of(model):
    return dict(tree_flatten(model.parameters()))


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def assert_same_run(folder, other):
    """Equal to the last bit: metrics, the newest checkpoint, and the best weights."""
    assert metrics(folder) == metrics(other)
    runs = [RunFolder(folder), RunFolder(other)]
    step = runs[0].steps()[-1]
    (a, state), (b, other_state) = (run.load(step) for run in runs)
    for values in (state, other_state):
        for key in ("seconds", "new_seconds"):
            del values["progress"][key]
    assert state == other_state
    (a["best"], best), (b["best"], other_best) = (run.load_best() for run in runs)
    assert best == other_best
    assert a.keys() == b.keys() == {"trainable", "optimizer", "ema", "best"}
    for name, group in a.items():
        assert_same_tensors(group, b[name])


def test_a_resumed_run_is_an_unbroken_one(tmp_path, rng):
    model, outcome = toy_run(tmp_path / "whole", 13)
    broken = tmp_path / "broken"
    steps = sorted(rng.choice(np.arange(1, 14), 2, replace=False).tolist())
    for number, step in enumerate(steps):
        with pytest.raises(Break):
            toy_run(broken, 13, break_at(step), resume=number > 0)
    seen = []
    other_model, other_outcome = toy_run(broken, 13, seen.append, resume=True)
    saved = max(0, (steps[-1] - 1) // 4 * 4)
    assert [e.step for e in seen if isinstance(e, Resumed)] == ([saved] if saved else [])
    assert_same_run(tmp_path / "whole", broken)
    assert_same_tensors(weights_of(model), weights_of(other_model))
    for key in ("steps", "best_step", "best_loss", "stopped_early", "tokens"):
        assert getattr(outcome, key) == getattr(other_outcome, key)


def test_a_finished_run_resumes_to_its_end(tmp_path):
    model, outcome = toy_run(tmp_path / "run", 6)
    seen = []
    again, same = toy_run(tmp_path / "run", 6, seen.append, resume=True)
    assert seen == [Resumed(6)]
    assert (same.best_step, same.best_loss) == (outcome.best_step, outcome.best_loss)
    assert mx.array_equal(again.norm.weight, model.norm.weight)


def kill_at_random(folder, iters, kills, rng):
    saves = 0
    for number in range(kills):
        arguments = [sys.executable, "-m", "tests.tools.training", str(folder), str(iters)]
        mode = "resume" if number else "start"
        process = subprocess.Popen([*arguments, mode], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if line.strip() == "CheckpointSaved":
                break
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended by itself"
        run = RunFolder(folder)
        assert run.steps(), "no checkpoint"
        assert run.load(run.steps()[-1]).tensors.keys() == {"trainable", "optimizer", "ema"}
        saves += run.steps()[-1]
    return saves


@pytest.mark.parametrize("kills", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path, rng, kills):
    assert kill_at_random(tmp_path / "run", 10_000, kills, rng) >= kills
    # The rest of the run, and a run of the same steps without a break.
    done = RunFolder(tmp_path / "run").steps()[-1]
    for name, resume in (("run", True), ("whole", False)):
        with pytest.raises(Break):
            toy_run(tmp_path / name, 10_000, break_at(done + 3), resume, save_every=1)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_same_seed_gives_the_same_run(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        toy_run(tmp_path / name, 4, seed=seed)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert metrics(tmp_path / "a") != metrics(tmp_path / "c")


def test_an_interrupt_ends_the_step_and_saves(tmp_path):
    def on_event(event):
        if isinstance(event, Stepped) and event.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        toy_run(tmp_path / "run", 12, on_event, stopping=deferred_signals)
    assert signal.getsignal(signal.SIGINT) is before
    assert RunFolder(tmp_path / "run").steps() == [4, 6]
    toy_run(tmp_path / "run", 12, resume=True)
    toy_run(tmp_path / "whole", 12)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


# -- what is measured


def test_evaluation_and_reports_say_what_is(run):
    seen, valid, model = [], ToyBatches(2), ToyModel(seed=1)
    whole = joined([valid(i) for i in range(4)])
    start = (toy_loss(model, whole) / whole.weights.sum()).item()
    options = TrainingOptions(7, 0.02, steps_per_report=3, steps_per_eval=5, schedule="constant")
    outcome = train(model, toy_loss, ToyBatches(1), options, run, valid, seen.append)
    evaluations, reports, steps, saved = (
        [event for event in seen if isinstance(event, kind)]
        for kind in (Validation, Report, Stepped, CheckpointSaved)
    )
    assert [e.step for e in evaluations] == [0, 5, 7]
    assert evaluations[0].valid_loss == pytest.approx(start, rel=1e-5)
    assert evaluations[0].valid_perplexity == pytest.approx(math.exp(start), rel=1e-4)
    end = (toy_loss(model, whole) / whole.weights.sum()).item()
    assert outcome.best_loss == pytest.approx(end, rel=1e-5)
    assert outcome.best_loss == min(e.valid_loss for e in evaluations) < start
    assert not model.training

    assert [e.step for e in reports] == [3, 6, 7]
    weights = [ToyBatches(1)(i).weights.sum().item() for i in range(7)]
    mean = np.average([e.loss for e in steps[3:6]], weights=weights[3:6])
    assert reports[1].loss == pytest.approx(mean, rel=1e-5)
    # One of 22 targets has no weight.
    assert [e.tokens for e in reports] == [3 * 21, 6 * 21, 7 * 21]
    assert all(e.learning_rate == pytest.approx(0.02) and e.tokens_per_second > 0 for e in reports)
    assert [e.step for e in saved] == [7]
    keys = [set(line) for line in metrics(run.path)]
    assert {"step", "valid_loss", "valid_perplexity"} in keys
    assert {"step", "loss", "learning_rate", "grad_norm", "tokens"} in keys


def test_patience_keeps_the_best_weights(run):
    """What helps in training harms on data of another rule; the learning rate makes it worse and worse."""

    def loss(model, batch):
        return toy_loss(model, batch) * (1 if model.training else -1)

    model, batches = ToyModel(seed=1), ToyBatches(1)
    options = TrainingOptions(30, 0.02, steps_per_eval=2, patience=3, save_every=100)
    outcome = train(model, loss, batches, options, run, batches)
    assert outcome.stopped_early
    assert (outcome.best_step, outcome.steps) == (0, 6)
    assert_same_tensors(weights_of(model), weights_of(ToyModel(seed=1)))
    assert run.steps() == [6]
    again = train(model, loss, batches, options, run, batches)
    assert (again.stopped_early, again.steps) == (True, 6)


def loss_with_metrics(model, batch):
    """The loss, and a metric that is best where the loss is highest."""
    loss = toy_loss(model, batch)
    return loss, {"accuracy": 2 * loss, "length": 3 * batch.weights.sum()}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_metrics_are_means_over_weights(run, accumulation):
    seen, valid = [], ToyBatches(2)
    options = TrainingOptions(4, 0.02, steps_per_report=2, grad_accumulation_steps=accumulation)
    outcome = train(
        ToyModel(seed=1), loss_with_metrics, ToyBatches(1), options, run, valid, seen.append
    )
    for event in seen:
        if isinstance(event, Report | Validation):
            loss = event.loss if isinstance(event, Report) else event.valid_loss
            assert event.metrics == pytest.approx({"accuracy": 2 * loss, "length": 3}, rel=1e-5)
    lines = metrics(run.path)
    assert all(
        line["accuracy"] == pytest.approx(2 * line["loss"]) for line in lines if "loss" in line
    )
    assert lines[0]["valid_accuracy"] == pytest.approx(2 * lines[0]["valid_loss"])
    assert outcome.best_metrics["accuracy"] == pytest.approx(2 * outcome.best_loss)


def test_the_best_weights_are_chosen_by_a_metric(run):
    options = TrainingOptions(6, 0.02, steps_per_eval=2, best_by="accuracy", patience=3)
    arguments = loss_with_metrics, ToyBatches(1), options, run
    model, seen = ToyModel(seed=1), []
    outcome = train(model, *arguments, ToyBatches(1), seen.append)
    evaluations = [event for event in seen if isinstance(event, Validation)]
    assert evaluations[-1].valid_loss < evaluations[0].valid_loss
    assert (outcome.best_step, outcome.steps, outcome.stopped_early) == (0, 6, True)
    assert outcome.best_metrics == evaluations[0].metrics
    assert_same_tensors(weights_of(model), weights_of(ToyModel(seed=1)))
    again = train(ToyModel(seed=1), *arguments, ToyBatches(1))
    assert again.best_metrics == outcome.best_metrics


@pytest.mark.parametrize(
    ("name", "valid", "message"),
    [
        ("accurracy", ToyBatches(1), "best_by is 'accurracy'; allowed are loss, accuracy, length"),
        ("accuracy", None, "there is no valid.jsonl to measure it on"),
    ],
)
def test_a_metric_that_is_not_measured_is_refused(run, name, valid, message):
    options = TrainingOptions(6, 0.02, best_by=name)
    with pytest.raises(ConfigError, match=message):
        train(ToyModel(seed=1), loss_with_metrics, ToyBatches(1), options, run, valid)


@pytest.mark.parametrize("decay", [None, 0.7])
def test_without_validation_the_last_weights_stay(run, decay):
    model, options = ToyModel(seed=1), TrainingOptions(5, 0.05, ema_decay=decay)
    outcome = train(model, toy_loss, ToyBatches(1), options, run)
    assert (outcome.best_step, outcome.best_loss, outcome.steps) == (5, None, 5)
    tensors, _ = run.load(5)
    kept, last = tensors.get("ema", tensors["trainable"]), tensors["trainable"]
    for name, array in weights_of(model).items():
        assert mx.array_equal(array, kept[name])
        assert mx.array_equal(array, last[name]) == (decay is None)


# -- what goes wrong


class Spoiled(ToyBatches):
    def __call__(self, number):
        batch = super().__call__(number)
        return batch._replace(weights=batch.weights * (math.inf if number >= 2 else 1))


def test_nan_ends_the_run_and_names_step_and_layer(run):
    model, weights, is_broken = ToyModel(seed=1), {}, []
    layer = model.layers[1].down

    class Fragile(type(layer)):
        def __call__(self, x):
            return super().__call__(x) * (mx.inf if is_broken else 1)

    layer.__class__ = Fragile

    def on_event(event):
        if isinstance(event, Stepped) and event.step == 5:
            is_broken.append(True)
            weights.update((name, np.array(a)) for name, a in weights_of(model).items())

    options = TrainingOptions(9, 0.01, save_every=4)
    with pytest.raises(TrainingError) as error:
        train(model, toy_loss, ToyBatches(1), options, run, on_event=on_event)
    for part in ("Step 6", "layers.1.down", "step-0000004", "learning rate (now 0.01)"):
        assert part in str(error.value)
    assert_same_tensors(weights_of(model), weights)
    assert not model.training
    assert run.steps() == [4]


@pytest.mark.parametrize(
    ("batches", "valid", "message"),
    [
        (Spoiled(1), None, "Step 3 .*the loss is not finite.*No checkpoint"),
        (ToyBatches(1), Spoiled(1), "Validation after step 0: The loss of batch 2 is "),
    ],
)
def test_a_loss_that_is_not_finite(run, batches, valid, message):
    with pytest.raises(TrainingError, match=message):
        train(ToyModel(), toy_loss, batches, TrainingOptions(9, 0.01), run, valid)


def test_another_model_is_refused(tmp_path):
    toy_run(tmp_path / "run", 4)
    run = RunFolder.open(tmp_path / "run", {"iters": 4})
    options = TrainingOptions(4, 0.02, ema_decay=0.8)
    with pytest.raises(CheckpointError, match=r"another shape \(embedding.weight first\)"):
        train(ToyModel(dims=8), toy_loss, ToyBatches(1), options, run)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ToyModel().freeze(), "no trainable parameter"),
        (nn.Linear(2, 2), "no list `layers` of blocks to recompute"),
    ],
)
def test_a_model_that_can_not_be_trained(run, model, message):
    options = TrainingOptions(4, 0.1, grad_checkpoint=True)
    with pytest.raises(TrainingError, match=message):
        train(model, toy_loss, ToyBatches(1), options, run)
