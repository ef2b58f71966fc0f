"""Adapters trained by rewards: they learn, resume at any step, and end well when a reward fails."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.engine.generation import batch_generate
from afm_mlx.errors import ConfigError, RewardError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.loading.load import load
from afm_mlx.measure.rewards import Rewards, make_rewards
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import CheckpointSaved, Report, Resumed, Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.policy_training import PolicyTraining
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import measure_adapter, train_lora
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.training_runs import Break, Watcher, break_at
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

ROOT = Path(__file__).parents[4]
OPTIONS = TrainingOptions(
    iters=6, learning_rate=0.02, steps_per_report=1, steps_per_eval=3, save_every=1, seed=3
)
SHORT = make_rewards(["length:2"])
WORDS = "one two three four five six seven eight".split()
METHOD = PolicyTraining(rank=4, scale=2.0, rewards=SHORT, group_size=4, max_completion_tokens=6)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "prompts"
    folder.mkdir()
    for split, chosen in (("train", WORDS), ("valid", WORDS), ("test", WORDS[3:5])):
        lines(folder / f"{split}.jsonl", *({"prompt": f"say {word}"} for word in chosen))
    return folder


@pytest.fixture
def recipe(packed, data):
    return Recipe(data, OPTIONS, packed, batch_size=4)


def metrics(folder):
    found = map(json.loads, (folder / "metrics.jsonl").open())
    return [{k: v for k, v in line.items() if k[-3:] not in ("ond", "ory")} for line in found]


def contents(folder):
    """What a run has made, except what a clock measures."""
    kept = sorted((folder / "run" / "rollouts").iterdir())
    files = [*folder.glob("*.safetensors"), *kept]
    best = RunFolder(folder / "run").load_best()[1]
    return {file.name: file.read_bytes() for file in files}, metrics(folder / "run"), best


@pytest.mark.parametrize("objective", ["grpo", "rloo", "mdloo"])
def test_rewards_rise(recipe, tmp_path, objective):
    options = dataclasses.replace(
        OPTIONS, iters=12, steps_per_eval=12, save_every=12, best_by="reward"
    )
    model, tokenizer = load(recipe.model)
    constraint = Constraint.choices(["yes", "no"])
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"say {w}"}], add_generation_prompt=True
        )
        for w in WORDS
    ]
    texts = batch_generate(model, tokenizer, prompts, constraint=constraint).texts
    usual = max(texts, key=texts.count)
    other = Rewards(("other",), (lambda prompt, answer, sample: float(answer != usual),), (1.0,))
    method = dataclasses.replace(
        METHOD, objective=objective, beta=0.01, rewards=other, constraint=constraint
    )
    watcher = Watcher()
    recipe = dataclasses.replace(recipe, options=options, test=True)
    result = train_lora(recipe, tmp_path / "adapter", method, **watcher.hooks())
    first, last = [e for e in watcher.events if isinstance(e, Validation)]
    assert first.metrics["reward"] < 1
    assert last.metrics["reward"] == 1
    assert last.valid_loss == pytest.approx(-last.metrics["reward"])
    assert result.outcome.best_step == 12
    assert result.test.trained.metrics["reward"] == 1
    assert result.test.trained.unit == "answers"
    reports = [event for event in watcher.events if isinstance(event, Report)]
    assert reports[0].metrics["kl"] < 1e-6  # the adapter starts as the reference
    assert reports[-1].metrics["kl"] > 1e-4
    load_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("objective", "updates", "micro_batches", "breaks"),
    [
        ("grpo", 3, 2, (2, 4, 5)),  # the third update of a rollout, its first and its second
        ("rloo", None, 1, (3,)),
        ("mdloo", 2, 1, (4,)),  # the second update
    ],
)
def test_a_run_resumes_at_any_step(recipe, tmp_path, objective, updates, micro_batches, breaks):
    method = dataclasses.replace(METHOD, objective=objective, updates_per_rollout=updates)
    options = dataclasses.replace(OPTIONS, grad_accumulation_steps=micro_batches)
    recipe = dataclasses.replace(recipe, options=options, batch_size=3)
    train_lora(recipe, tmp_path / "whole", method)
    for number, step in enumerate(breaks):
        with pytest.raises(Break):
            train_lora(
                recipe, tmp_path / "broken", method, resume=number > 0, on_event=break_at(step)
            )
    events = []
    train_lora(recipe, tmp_path / "broken", method, resume=True, on_event=events.append)
    assert events[0] == Resumed(breaks[-1] - 1)
    assert contents(tmp_path / "whole") == contents(tmp_path / "broken")


CODE = """
import dataclasses, sys
sys.modules["torch"] = None  # transformers would import it, which takes a second
from tests.afm_mlx.training.methods.test_policy_training import METHOD, OPTIONS
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.methods.reward_training import RewardTraining
from afm_mlx.training.methods.train import measure_adapter, train_lora

data, model, path, resume = sys.argv[1:]
method = dataclasses.replace(METHOD, updates_per_rollout=2)
options = dataclasses.replace(OPTIONS, iters=1000)
train_lora(Recipe(data, options, model, batch_size=4), path, method, resume=resume == "resume",
           on_event=lambda event: print(type(event).__name__, flush=True))
"""


def test_a_kill_at_any_moment(recipe, tmp_path, rng):
    """A killed run goes on as an unbroken one, in whichever update of a rollout it was killed."""
    path = tmp_path / "killed"
    arguments = [sys.executable, "-c", CODE, str(recipe.data), str(recipe.model), str(path)]
    process = subprocess.Popen([*arguments, "start"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    saved, last = 0, rng.integers(1, 4)
    for line in process.stdout:
        saved += line.strip() == "CheckpointSaved"
        if saved == last:
            break
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended by itself"
    done = RunFolder(path / "run").steps()[-1]
    options = dataclasses.replace(OPTIONS, iters=1000)
    recipe = dataclasses.replace(recipe, options=options)
    method = dataclasses.replace(METHOD, updates_per_rollout=2)
    for folder, resume in ((path, True), (tmp_path / "whole", False)):
        with pytest.raises(Break):
            train_lora(recipe, folder, method, resume=resume, on_event=break_at(done + 3))
    assert metrics(path / "run") == metrics(tmp_path / "whole" / "run")
    found = [
        RunFolder(folder / "run").load(done + 2).tensors for folder in (path, tmp_path / "whole")
    ]
    for name, group in found[0].items():
        for key, array in group.items():
            assert (array == found[1][name][key]).all().item(), (name, key)


def test_a_reward_that_fails_ends_the_run_with_a_checkpoint(recipe, tmp_path):
    """In the step after the last one, or in the evaluation after it."""
    broken, last = [False], 0

    def reward(prompt, answer, sample):
        if broken[0]:
            raise ValueError("out of order")
        return SHORT(prompt, answer, sample)

    method = dataclasses.replace(METHOD, rewards=Rewards(("mine",), (reward,), (1.0,)))
    options = dataclasses.replace(OPTIONS, save_every=100, ema_decay=0.5)
    recipe = dataclasses.replace(recipe, options=options)
    train_lora(recipe, tmp_path / "whole", method)

    def on_event(event):
        events.append(event)
        broken[0] = isinstance(event, Report) and event.step == last

    def killed(event):
        if isinstance(event, Validation):
            raise Break

    for last, split in ((2, "train"), (3, "valid"), (6, "valid")):
        path, events = tmp_path / f"broken-{last}", []
        words = rf"{split}.jsonl:\d: the reward mine raised ValueError"
        with pytest.raises(RewardError, match=words):
            train_lora(recipe, path, method, on_event=on_event)
        assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [last]
        broken[0] = False
        with pytest.raises(Break):
            train_lora(recipe, path, method, resume=True, on_event=killed)
        train_lora(recipe, path, method, resume=True)
        assert metrics(tmp_path / "whole" / "run") == metrics(path / "run")
        assert contents(tmp_path / "whole") == contents(path)


def test_a_reference_adapter_and_a_reward_adapter(recipe, data, tmp_path):
    options = dataclasses.replace(OPTIONS, iters=2, steps_per_eval=9)
    recipe = dataclasses.replace(recipe, options=options)
    first, second, rewards = (tmp_path / name for name in ("first", "second", "rewards"))
    train_lora(dataclasses.replace(recipe, options=OPTIONS), first, METHOD)
    pairs = tmp_path / "pairs.jsonl"
    records = ({"prompt": f"say {w}", "chosen": w, "rejected": f"{w} {w}"} for w in ("one", "two"))
    scorer = dataclasses.replace(recipe, data=lines(pairs, *records), batch_size=2)
    train_lora(scorer, rewards, RewardTraining(rank=4))
    kl = {}
    for reference in (first, None):
        events = []
        method = dataclasses.replace(
            METHOD,
            rank=None,
            scale=None,
            initial_adapter=first,
            reference_adapter=reference,
            rewards=("length:2", f"adapter:{rewards}"),
            reward_weights=(1.0, 0.5),
        )
        train_lora(recipe, second, method, on_event=events.append)
        (report, *_) = [event for event in events if isinstance(event, Report)]
        kl[reference] = report.metrics["kl"]
        scored = report.metrics["reward"] - report.metrics["reward_length:2"]
        assert scored == pytest.approx(0.5 * report.metrics[f"reward_adapter:{rewards}"], abs=1e-5)
        second = tmp_path / "third"
    assert kl[first] < 1e-6 < kl[None]


def test_an_adapter_is_measured_without_training(recipe, tmp_path):
    result = train_lora(dataclasses.replace(recipe, test=True), tmp_path / "adapter", METHOD)
    scores = measure_adapter(recipe, tmp_path / "adapter", METHOD)
    for found, wanted in (
        (scores.trained, result.test.trained),
        (scores.untrained, result.test.untrained),
    ):
        assert found.metrics["reward"] == pytest.approx(wanted.metrics["reward"])
        assert found.count == 2


def test_models_of_the_zoo(data, tmp_path):
    folder = tmp_path / "zoo"
    write_zoo_folder(folder, "llama", zoo_model("llama", 64, 5), word_tokenizer_json(64))
    lines(data / "train.jsonl", *({"prompt": f"w{i} w4"} for i in range(2, 8)))
    (data / "valid.jsonl").unlink()
    recipe = Recipe(data, dataclasses.replace(OPTIONS, iters=2), folder, batch_size=2)
    train_lora(recipe, tmp_path / "adapter", METHOD)
    tensors, _ = load_adapter(tmp_path / "adapter")
    assert any((tensor != 0).any().item() for n, tensor in tensors.items() if "lora_b" in n)


@each(
    "options, reason",
    [
        ({"objective": "ppo"}, "grpo, rloo, mdloo"),
        ({"rewards": ()}, "one name of a reward"),
        ({"group_size": 1}, "2 and more"),
        ({"temperature": 0.0}, "over 0"),
        ({"epsilon": 1.5}, "between 0 and 1"),
        ({"loss_type": "mean"}, "grpo, bnpo, dr_grpo"),
        ({"objective": "rloo", "updates_per_rollout": 2}, "for one update"),
        ({"dropout": 0.1}, "dropout is 0.1"),
    ],
)
def test_arguments_that_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        dataclasses.replace(METHOD, **options)


@each(
    "options, reason",
    [
        ({"teacher": "afm-nano"}, "teacher would do nothing"),
        ({"packing": True}, "packing would do nothing"),
        ({"prompt_weight": 1.0}, "prompt_weight would do nothing"),
        ({"features": {"prompt": "question"}}, "features would do nothing"),
        ({"max_seq_length": 6}, "max_completion_tokens is 6, and a sample may have 6"),
    ],
)
def test_recipes_that_are_refused(recipe, tmp_path, options, reason):
    with pytest.raises(ConfigError, match=reason):
        train_lora(dataclasses.replace(recipe, **options), tmp_path / "adapter", METHOD)
