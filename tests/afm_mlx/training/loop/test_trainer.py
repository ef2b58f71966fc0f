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
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.cli.signals import deferred_signals
from afm_mlx.errors import CheckpointError, ConfigError, TrainingError
from afm_mlx.training.loop.events import CheckpointSaved, Report, Resumed, Stepped, Validation
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import TrainingOptions, train
from tests.tools.compare import assert_same_tensors
from tests.tools.training import ToyBatches, ToyModel, joined, toy_loss, toy_run

ROOT = Path(__file__).parents[4]
MEASURED = ("tokens_per_second", "peak_memory")  # by a clock and by the process


class Break(Exception):
    """Stands for whatever ends a process."""


def break_at(step):
    def on_event(event):
        if isinstance(event, Stepped) and event.step == step:
            raise Break

    return on_event


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
    best = [run.load_best() for run in runs]
    assert best[0][1] == best[1][1]
    a["best"], b["best"] = best[0][0], best[1][0]
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
    ours, theirs = (dict(tree_flatten(m.parameters())) for m in (model, other_model))
    assert_same_tensors(ours, theirs)
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
    """Train in processes that are killed, and count those that left a checkpoint behind."""
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
    # The rest of a run of so many steps, and what an unbroken one of them would have been.
    done = RunFolder(tmp_path / "run").steps()[-1]
    with pytest.raises(Break):
        toy_run(tmp_path / "run", 10_000, break_at(done + 3), resume=True, save_every=1)
    with pytest.raises(Break):
        toy_run(tmp_path / "whole", 10_000, break_at(done + 3), save_every=1)
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


def test_evaluation_and_reports_say_what_is(tmp_path):
    seen, valid = [], ToyBatches(2)
    model = ToyModel(seed=1)
    whole = joined([valid(i) for i in range(4)])
    start = (toy_loss(model, whole) / whole.weights.sum()).item()
    run = RunFolder.create(tmp_path / "run", {})
    options = TrainingOptions(7, 0.02, steps_per_report=3, steps_per_eval=5, schedule="constant")
    outcome = train(model, toy_loss, ToyBatches(1), options, run, valid, seen.append)
    evaluations = [e for e in seen if isinstance(e, Validation)]
    assert [e.step for e in evaluations] == [0, 5, 7]
    assert evaluations[0].valid_loss == pytest.approx(start, rel=1e-5)
    assert evaluations[0].valid_perplexity == pytest.approx(math.exp(start), rel=1e-4)
    end = (toy_loss(model, whole) / whole.weights.sum()).item()
    assert outcome.best_loss == pytest.approx(end, rel=1e-5)
    assert outcome.best_loss == min(e.valid_loss for e in evaluations) < start
    assert not model.training

    reports, steps = ([e for e in seen if isinstance(e, kind)] for kind in (Report, Stepped))
    assert [e.step for e in reports] == [3, 6, 7]
    weights = [ToyBatches(1)(i).weights.sum().item() for i in range(7)]
    mean = np.average([e.loss for e in steps[3:6]], weights=weights[3:6])
    assert reports[1].loss == pytest.approx(mean, rel=1e-5)
    assert [e.tokens for e in reports] == [
        3 * 21,
        6 * 21,
        7 * 21,
    ]  # one of 22 targets has no weight
    assert all(e.learning_rate == pytest.approx(0.02) and e.tokens_per_second > 0 for e in reports)
    assert [e.step for e in seen if isinstance(e, CheckpointSaved)] == [7]
    keys = [set(line) for line in metrics(tmp_path / "run")]
    assert {"step", "valid_loss", "valid_perplexity"} in keys
    assert {"step", "loss", "learning_rate", "grad_norm", "tokens"} in keys


def test_patience_keeps_the_best_weights(tmp_path):
    """What helps in training harms on data of another rule; the learning rate makes it worse and worse."""

    def loss(model, batch):
        return toy_loss(model, batch) * (1 if model.training else -1)

    run, model, seen = RunFolder.create(tmp_path / "run", {}), ToyModel(seed=1), []
    options = TrainingOptions(30, 0.02, steps_per_eval=2, patience=3, save_every=100)
    start = {name: np.array(a) for name, a in tree_flatten(model.parameters())}
    outcome = train(model, loss, ToyBatches(1), options, run, ToyBatches(1), seen.append)
    assert outcome.stopped_early
    assert (outcome.best_step, outcome.steps) == (0, 6)
    assert_same_tensors(dict(tree_flatten(model.parameters())), start)
    assert run.steps() == [6]
    again = train(model, loss, ToyBatches(1), options, run, ToyBatches(1))
    assert (again.stopped_early, again.steps) == (True, 6)


@pytest.mark.parametrize("decay", [None, 0.7])
def test_without_validation_the_last_weights_stay(tmp_path, decay):
    run, model = RunFolder.create(tmp_path / "run", {}), ToyModel(seed=1)
    options = TrainingOptions(5, 0.05, ema_decay=decay)
    outcome = train(model, toy_loss, ToyBatches(1), options, run)
    assert (outcome.best_step, outcome.best_loss, outcome.steps) == (5, None, 5)
    tensors, _ = run.load(5)
    kept, last = tensors.get("ema", tensors["trainable"]), tensors["trainable"]
    for name, array in tree_flatten(model.parameters()):
        assert mx.array_equal(array, kept[name])
        assert mx.array_equal(array, last[name]) == (decay is None)


def test_accumulation_and_recomputation_change_nothing_but_memory(tmp_path):
    runs = {"plain": {}, "recomputed": {"grad_checkpoint": True}}
    for name, options in runs.items():
        run, model = RunFolder.create(tmp_path / name, {}), ToyModel(seed=1)
        chosen = TrainingOptions(4, 0.02, grad_accumulation_steps=2, **options)
        train(model, toy_loss, ToyBatches(1), chosen, run)
        runs[name] = dict(tree_flatten(model.parameters()))
    for name, array in runs["plain"].items():
        np.testing.assert_allclose(runs["recomputed"][name], array, atol=1e-4, err_msg=name)


# -- what goes wrong


def spoiled_at(step, what):
    """Batches that a model can't bear from a step on."""

    class Spoiled(ToyBatches):
        def __call__(self, number):
            batch = super().__call__(number)
            if number >= step:
                batch = batch._replace(weights=batch.weights * what)
            return batch

    return Spoiled(1)


def test_nan_ends_the_run_and_names_step_and_layer(tmp_path):
    run, model = RunFolder.create(tmp_path / "run", {}), ToyModel(seed=1)
    down = type(model.layers[1].down)

    class Fragile(down):
        def __call__(self, x):
            y = super().__call__(x)
            return y * mx.where(mx.array(self.calls[0]), mx.inf, 1)

    layer = model.layers[1].down
    layer.__class__ = Fragile
    object.__setattr__(layer, "calls", [False])

    def on_event(event):
        if isinstance(event, Stepped) and event.step == 5:
            layer.calls[0] = True
            weights.update((name, np.array(a)) for name, a in tree_flatten(model.parameters()))

    weights = {}
    options = TrainingOptions(9, 0.01, save_every=4)
    with pytest.raises(TrainingError) as error:
        train(model, toy_loss, ToyBatches(1), options, run, on_event=on_event)
    for part in ("Step 6", r"layers.1.down", "step-0000004", "learning rate (now 0.01)"):
        assert part in str(error.value)
    assert_same_tensors(dict(tree_flatten(model.parameters())), weights)
    assert not model.training
    assert run.steps() == [4]


def test_weights_that_are_not_finite(tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(TrainingError, match=r"Step 3 .*the loss is not finite.*No checkpoint"):
        train(ToyModel(), toy_loss, spoiled_at(2, math.inf), TrainingOptions(9, 0.01), run)


def test_a_validation_loss_that_is_not_finite(tmp_path):
    run = RunFolder.create(tmp_path / "run", {})
    options = TrainingOptions(9, 0.01)
    message = "Validation after step 0: The loss of batch 2 is "
    with pytest.raises(TrainingError, match=message):
        train(ToyModel(), toy_loss, ToyBatches(1), options, run, spoiled_at(2, math.inf))


def test_another_model_is_refused(tmp_path):
    toy_run(tmp_path / "run", 4)
    run = RunFolder.open(tmp_path / "run", {"iters": 4})
    options = TrainingOptions(4, 0.02, ema_decay=0.8)
    with pytest.raises(CheckpointError, match=r"another shape \(embedding.weight first\)"):
        train(ToyModel(dims=8), toy_loss, ToyBatches(1), options, run)


def test_nothing_to_train(tmp_path):
    model = ToyModel()
    model.freeze()
    run = RunFolder.create(tmp_path / "run", {})
    with pytest.raises(TrainingError, match="no trainable parameter"):
        train(model, toy_loss, ToyBatches(1), TrainingOptions(4, 0.1), run)


def test_options_out_of_range():
    for wrong in [
        {"iters": 0},
        {"learning_rate": 0.0},
        {"learning_rate": math.nan},
        {"warmup_iters": 10},
        {"schedule": "linear"},
        {"grad_accumulation_steps": 0},
        {"clip_grad_norm": 0.0},
        {"ema_decay": 1.0},
        {"val_batches": 0},
        {"patience": 0},
        {"seed": -1},
        {"weight_decay": -0.1},
    ]:
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            TrainingOptions(**({"iters": 10, "learning_rate": 0.1} | wrong))


# -- with the package's own parts


def test_weights_on_a_grid_learn_and_resume(tmp_path, rng):
    """A 2-bit AFM model, packed rows, cross-entropy, and recomputed blocks, through one broken run."""
    from afm_mlx.quantization.rule import QuantizationRule
    from afm_mlx.training.data.batches import Batches
    from afm_mlx.training.data.samples import Sample
    from afm_mlx.training.loop.losses import CrossEntropy
    from afm_mlx.training.qat.qat_layers import prepare_qat
    from tests.tools.models import random_config, random_model

    config = random_config(
        rng,
        vocab_size=20,
        hidden_dim=32,
        num_heads=2,
        num_kv_heads=1,
        num_layers=3,
        num_kv_reuse_layers=1,
        hidden_dim_scale_factor=2.0,
    )
    weights = random_model(config, rng).parameters()
    samples = []
    for i, start in enumerate(rng.integers(0, 20, 24).tolist()):
        tokens = [(start + 3 * k) % 20 for k in range(int(rng.integers(4, 14)))]
        samples.append(Sample(tokens, [0.0, *[1.0] * (len(tokens) - 1)], f"memory:{i}"))
    batches = Batches(samples, batch_size=2, length=24, packed=True, seed=1)

    def run_in(folder, on_event=None, resume=False):
        model = random_model(config, rng)
        model.update(weights)
        prepare_qat(model, QuantizationRule(2, granularity="row"), QuantizationRule(4))
        options = TrainingOptions(
            16, 5e-3, grad_checkpoint=True, ema_decay=0.8, save_every=3, steps_per_eval=8
        )
        run = (RunFolder.open if resume else RunFolder.create)(folder, {})
        return model, train(model, CrossEntropy(), batches, options, run, batches, on_event)

    seen = []
    model, outcome = run_in(tmp_path / "whole", seen.append)
    losses = [event.valid_loss for event in seen if isinstance(event, Validation)]
    assert outcome.best_loss == min(losses) < 0.8 * losses[0]
    with pytest.raises(Break):
        run_in(tmp_path / "broken", break_at(8))
    run_in(tmp_path / "broken", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "broken")
    logits = model(mx.array([samples[0].tokens]))
    assert mx.all(mx.isfinite(logits)).item()
