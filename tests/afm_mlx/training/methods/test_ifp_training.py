"""Instruction-Following Pruning: both stages, resuming, the folder, masks of tasks, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.mask_predictor import has_predictor
from afm_mlx.adapters.task_mask import read_mask
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.errors import AFMError, ConfigError, DataError
from afm_mlx.loading.load import load, load_predictor
from afm_mlx.training.loop.trainer import Resumed, Validation
from afm_mlx.training.methods.ifp_training import IFPTraining
from afm_mlx.training.methods.train import train_ifp
from afm_mlx.training.pruning.predicted_mask import predict_mask
from tests.tools.training_runs import Break, Watcher, break_at, parameters

METHOD = IFPTraining(stage="chunk", chunk_size=8, ffn=0.25, group=4, rank=6)


@pytest.fixture
def chats(recipe) -> None:
    """Leave the texts out of the recipe's data."""
    for file in Path(recipe.data).glob("*.jsonl"):
        kept = [line for line in file.read_text().splitlines() if "messages" in line]
        file.write_text("\n".join(kept) + "\n")


def predictor_of(folder):
    return load_predictor(folder, load(folder)[0].args)


def test_both_stages_and_what_is_saved(recipe, tmp_path, chats):
    watcher = Watcher()
    longer = dataclasses.replace(recipe.options, iters=30, learning_rate=2e-3, steps_per_eval=10)
    longer_recipe = dataclasses.replace(recipe, options=longer, test=True)
    first = train_ifp(longer_recipe, tmp_path / "first", METHOD, **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert min(losses[1:]) < losses[0]
    metrics = watcher.losses(Validation, "metrics")[-1]
    assert 0 < metrics["overlap"] <= 1
    assert 0 < metrics["soft_share"] <= 1
    model, _ = load(first.path)
    predictor = predictor_of(first.path)
    config = predictor.config
    assert (config.blocks, config.ffn_dim) == (model.args.num_layers, model.args.ffn_dim)
    assert config.kept == round(config.ffn_dim * 0.25 / 4) * 4
    assert predictor.body.args.hidden_dim < model.args.hidden_dim
    assert "Instruction-Following Pruning" in (first.path / "README.md").read_text()

    (Path(recipe.data) / "valid.jsonl").unlink()  # the last weights are kept, and not the best
    second = train_ifp(
        dataclasses.replace(recipe, model=first.path), tmp_path / "second", IFPTraining()
    )
    again = predictor_of(second.path)
    assert again.config == config
    before, after = (dict(tree_flatten(each.parameters())) for each in (predictor, again))
    changed = [name for name in before if not mx.array_equal(before[name], after[name])]
    assert {"w1", "w2", "body.model.embedding.weight"} <= set(changed)
    assert parameters(second.path).keys() == parameters(recipe.model).keys()
    text = json.loads((tmp_path / "second-run" / "run.json").read_text())
    assert (text["kind"], text["stage"]) == ("ifp", "prompt")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_resumed_run_ends_as_an_unbroken_one(recipe, tmp_path, chats, checkpointing):
    options = dataclasses.replace(
        recipe.options, iters=4, steps_per_eval=2, grad_checkpoint=checkpointing
    )
    recipe = dataclasses.replace(recipe, options=options)
    method = dataclasses.replace(METHOD, stage="prompt", binary=True)
    whole = train_ifp(recipe, tmp_path / "whole", method)
    with pytest.raises(Break):
        train_ifp(recipe, tmp_path / "broken", method, on_event=break_at(3))
    other = dataclasses.replace(method, temperature=0.5)
    with pytest.raises(AFMError, match="predictor"):
        train_ifp(recipe, tmp_path / "broken", other, resume=True)
    watcher = Watcher()
    broken = train_ifp(recipe, tmp_path / "broken", method, resume=True, **watcher.hooks())
    assert [event.step for event in watcher.events if isinstance(event, Resumed)] == [2]
    for found in (
        lambda f: parameters(f),
        lambda f: dict(tree_flatten(predictor_of(f).parameters())),
    ):
        one, other_one = found(whole.path), found(broken.path)
        assert one.keys() == other_one.keys()
        assert all(mx.array_equal(one[name], other_one[name]) for name in one)


def test_a_predictor_starts_from_a_small_model(recipe, draft, tmp_path, chats):
    options = dataclasses.replace(recipe.options, iters=1, learning_rate=1e-9)
    recipe = dataclasses.replace(recipe, options=options)
    method = dataclasses.replace(METHOD, predictor=draft)
    result = train_ifp(recipe, tmp_path / "out", method)
    body, start = predictor_of(result.path).body, load(draft)[0]
    assert body.args == start.args
    assert mx.allclose(body.model.embedding.weight, start.model.embedding.weight, atol=1e-6)
    with pytest.raises(ConfigError, match="no AFM model with the model's vocabulary"):
        train_ifp(
            recipe, tmp_path / "b", dataclasses.replace(method, predictor=_smaller(draft, tmp_path))
        )


def _smaller(draft, tmp_path):
    """A copy of a draft model's folder whose config has another vocabulary."""
    folder = tmp_path / "other"
    folder.mkdir()
    values = json.loads((draft / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": 7}))
    (folder / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    return folder


def test_masks_of_tasks(recipe, tmp_path, chats):
    result = train_ifp(recipe, tmp_path / "ifp", METHOD)
    model, tokenizer = load(result.path)
    predictor = predictor_of(result.path)
    text = "You are an expert in words."
    mask = predict_mask(result.path, tmp_path / "described", task=text)
    message = [{"role": "user", "content": text}]
    prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    assert (mask.kept == predictor.task_mask([prompt]).kept).all()
    stored = read_mask(tmp_path / "described")
    assert (stored.kept == mask.kept).all()
    assert (stored.task, stored.criterion) == (text, "predictor")
    assert stored.base_model_fingerprint == folder_fingerprint(model.args, result.path)

    mask = predict_mask(result.path, tmp_path / "of-data", task="say", data=recipe.data)
    prompts = []
    for line in (Path(recipe.data) / "train.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"][:1]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    assert (mask.kept == predictor.task_mask(prompts).kept).all()
    for arguments, fault in (
        ({"path": tmp_path / "described", "task": text}, "exists"),
        ({"path": tmp_path / "x"}, "nothing to read"),
        ({"path": tmp_path / "x", "model": recipe.model, "task": text}, "no predictor of masks"),
    ):
        with pytest.raises(AFMError, match=fault):
            predict_mask(**{"model": result.path} | arguments)
    assert not (tmp_path / "x").exists()


def test_what_is_refused(recipe, packed, tmp_path):
    for arguments, fault in (({"stage": "x"}, "The stage is 'x'"), ({"ffn": 0.0}, "ffn is 0.0")):
        with pytest.raises(ConfigError, match=fault):
            IFPTraining(**arguments)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="a text has no prompt"):
        train_ifp(recipe, out, dataclasses.replace(METHOD, stage="prompt"))
    with pytest.raises(ConfigError, match="is quantized"):
        train_ifp(dataclasses.replace(recipe, model=packed), out, METHOD)
    with pytest.raises(ConfigError, match="multiples of the group"):
        train_ifp(recipe, out, dataclasses.replace(METHOD, group=7))
    result = train_ifp(recipe, tmp_path / "ifp", METHOD)
    assert has_predictor(result.path)
    with pytest.raises(ConfigError, match=r"ffn, group, rank: .* has a predictor"):
        train_ifp(dataclasses.replace(recipe, model=result.path), out, METHOD)
    assert not out.exists()
