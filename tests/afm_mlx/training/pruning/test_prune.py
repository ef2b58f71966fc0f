"""Masks from data: what is kept and written, recovery, resuming, and what is refused."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.task_mask import TaskMask, apply_mask, read_mask
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, DataError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.loop.trainer import Validation
from afm_mlx.training.pruning.mask_training import RecoveryTraining
from afm_mlx.training.pruning.prune import CRITERIA, Pruning, generation_speed, prune
from tests.tools.cases import each
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import Break, Watcher, break_at, parameters

QUICK = Pruning(score_iters=4)
WIDTH, GROUPS = 96, 6


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def idle(model, rng):
    """Make half of the groups of every block do nothing; return True for the others, (blocks, groups)."""
    used = np.stack([rng.permutation([True] * 3 + [False] * 3) for _ in range(3)])
    weights = parameters(model)
    for name in weights:
        if name.endswith("mlp.down_proj.weight"):
            block = int(name.split(".")[2]) + (2 if "reuse" in name else 0)
            weights[name] = weights[name] * mx.array(np.repeat(used[block], 16), mx.float32)
    save_weights(model, weights)
    return used


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("shares", ["equal", "sensitivity"])
def test_channels_that_do_nothing_are_cut_and_nothing_changes(
    idle, recipe, model, tmp_path, criterion, shares, rng
):
    pruning = dataclasses.replace(QUICK, criterion=criterion, shares=shares, task="echo a word")
    result = prune(recipe, tmp_path / "mask", pruning)
    if shares == "equal":
        assert np.array_equal(result.mask.kept, idle)
    assert result.block_shares == result.mask.kept.mean(axis=1).tolist()
    assert result.mask.share == 0.5
    found = read_mask(tmp_path / "mask")
    assert np.array_equal(found.kept, result.mask.kept)
    assert (found.task, found.criterion, found.group) == ("echo a word", criterion, 16)
    assert found.base_model_fingerprint == folder_fingerprint(TRAINABLE, model)
    card = (tmp_path / "mask" / "README.md").read_text()
    assert f"| kept | 50.0% of {WIDTH} channels in 3 blocks, groups of 16 |" in card
    assert f"{result.bytes_after:,} of {result.bytes_before:,} bytes" in card
    assert "| 2 | 48 | 50.0% |" in card or shares == "sensitivity"
    whole, _ = load(model)
    cut = apply_mask(load(model)[0], found)
    nbytes = sum(array.nbytes for array in parameters(model).values())
    assert result.bytes_before == nbytes
    left = nbytes - sum(3 * 48 * 32 * 4 for _ in range(3))
    assert result.bytes_after == left
    if shares == "equal":
        tokens = mx.array(rng.integers(1, 900, (2, 9)))
        np.testing.assert_allclose(whole(tokens), cut(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("criterion", CRITERIA)
def test_the_same_seed_makes_the_same_folder(recipe, packed, tmp_path, criterion):
    recipe = dataclasses.replace(recipe, model=packed)
    pruning = dataclasses.replace(QUICK, criterion=criterion)
    for name in ("a", "b"):
        prune(recipe, tmp_path / name / "mask", pruning)
    assert files(tmp_path / "a" / "mask") == files(tmp_path / "b" / "mask")
    assert (tmp_path / "a" / "mask-run").exists() == (criterion == "learned")


def test_recovery_trains_an_adapter_of_full_shapes_for_the_kept_channels(recipe, packed, tmp_path):
    recipe, watcher = dataclasses.replace(recipe, model=packed, test=True), Watcher()
    result = prune(
        recipe, tmp_path / "mask", QUICK, RecoveryTraining(rank=4), on_event=watcher.events.append
    )
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    assert result.outcome.best_loss == min(losses)
    mask = read_mask(tmp_path / "mask")
    tensors, config = load_adapter(tmp_path / "mask")
    assert config.rank == 4
    assert config.base_model_fingerprint == mask.base_model_fingerprint is not None
    names = [path for path in tensors if "mlp." in path]
    assert len(names) == 3 * 3 * 2
    for name in names:
        block = int(name.split(".")[2]) + (2 if "reuse" in name else 0)
        tensor, kept = np.array(tensors[name]), mask.channel_bits(block)
        if "down_proj.lora_a" in name:
            tensor = tensor.T
        elif "down_proj" in name or "lora_a" in name:
            continue
        assert tensor.shape == (4, WIDTH)
        assert not tensor[:, ~kept].any()
        assert tensor[:, kept].any()
    card = (tmp_path / "mask" / "README.md").read_text()
    assert "## Recovery" in card
    assert "test cross-entropy, with the mask alone" in card


@pytest.mark.parametrize("criterion", ["gradient", "learned"])
def test_an_interrupted_run_resumes_to_the_same_folder(recipe, packed, tmp_path, criterion):
    recipe = dataclasses.replace(recipe, model=packed)
    arguments = dataclasses.replace(QUICK, criterion=criterion), RecoveryTraining(rank=2)
    prune(recipe, tmp_path / "unbroken" / "mask", *arguments)
    path = tmp_path / "broken" / "mask"
    for resume in (False, True) if criterion == "learned" else (False,):
        # With "learned", the first run ends in the 4 steps of scores, and the second one in the recovery's 6.
        with pytest.raises(Break):
            prune(recipe, path, *arguments, resume=resume, on_event=break_at(6 if resume else 3))
        assert not path.exists()
        assert (tmp_path / "broken" / "mask-run" / "mask").exists() == (
            resume or criterion != "learned"
        )
    with pytest.raises(TrainingError, match="holds a training run already"):
        prune(recipe, path, *arguments)
    other = dataclasses.replace(arguments[0], share=0.3)
    with pytest.raises(TrainingError, match=r"share was 0.5 and is now 0.3"):
        prune(recipe, path, other, arguments[1], resume=True)
    prune(recipe, path, *arguments, resume=True)
    assert files(path) == files(tmp_path / "unbroken" / "mask")
    assert sorted(each.name for each in (tmp_path / "broken").iterdir()) == ["mask", "mask-run"]


def test_an_interrupted_pass_leaves_nothing(recipe, tmp_path):
    (tmp_path / "out").mkdir()

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune(recipe, tmp_path / "out" / "mask", progress=interrupt)
    assert not list((tmp_path / "out").iterdir())


def test_a_target_chooses_the_share(recipe, packed, tmp_path, monkeypatch):
    recipe = dataclasses.replace(recipe, model=packed)
    whole = prune(recipe, tmp_path / "whole", Pruning(share=1.0))
    assert whole.mask.is_full
    assert whole.bytes_after == whole.bytes_before
    half = prune(recipe, tmp_path / "half", Pruning(share=0.5)).bytes_after
    by_bytes = prune(recipe, tmp_path / "bytes", Pruning(target_bytes=half))
    assert by_bytes.mask.share == 0.5
    speeds = iter([10.0, 20.0])  # whole, and a sixth
    monkeypatch.setattr(
        "afm_mlx.training.pruning.prune.generation_speed", lambda model: next(speeds)
    )
    by_speed = prune(recipe, tmp_path / "speed", Pruning(target_tokens_per_second=14.2))
    assert by_speed.mask.share == 0.5
    with pytest.raises(ConfigError, match="out of reach"):
        prune(recipe, tmp_path / "small", Pruning(target_bytes=1))
    assert not (tmp_path / "small").exists()


def test_the_speed_is_measured_by_generating(model):
    assert generation_speed(load(model)[0]) > 0


# -- what is refused


@each(
    ("option", "values", "message"),
    [
        ("share", [0, -0.5, 1.01, float("nan")], "share is .*allowed: more than 0, up to 1"),
        ("group", [0, -1, 1.5], "group is .*allowed: 1 or more"),
        ("criterion", ["weight", ""], "criterion is .*allowed: activation, gradient, learned"),
        ("shares", ["random"], "shares is 'random'; allowed: equal, sensitivity"),
        ("score_batches", [0, -2], "score_batches is "),
    ],
)
def test_an_option_out_of_range(option, values, message):
    for value in values:
        with pytest.raises(ConfigError, match=message):
            Pruning(**{option: value})


def test_what_can_not_be_pruned(recipe, packed, tmp_path):
    with pytest.raises(ConfigError, match="leave one out"):
        Pruning(target_bytes=5, target_tokens_per_second=5)
    with pytest.raises(
        ConfigError, match=r"group is 20, which does not divide the 96 .*1, 2, 4, 8, 16, 32"
    ):
        prune(recipe, tmp_path / "mask", Pruning(group=20))
    words = dataclasses.replace(recipe, model=packed)
    with pytest.raises(CheckpointError, match=r"groups of 8 channels, .*--group 16"):
        prune(words, tmp_path / "mask", Pruning(group=8))
    zoo = tmp_path / "zoo"
    zoo.mkdir()
    (zoo / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="zoo is no AFM model"):
        prune(dataclasses.replace(recipe, model=zoo), tmp_path / "mask")
    with pytest.raises(ConfigError, match="has no run to resume"):
        prune(recipe, tmp_path / "mask", resume=True)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match="holds no samples"):
        prune(dataclasses.replace(recipe, data=tmp_path / "empty.jsonl"), tmp_path / "mask")
    (tmp_path / "there").mkdir()
    with pytest.raises(AFMError, match="exists already"):
        prune(recipe, tmp_path / "there")
    assert not (tmp_path / "mask").exists()


def test_a_float_model_may_keep_single_channels(recipe, tmp_path):
    mask = prune(recipe, tmp_path / "mask", Pruning(group=1, share=0.25)).mask
    assert mask.widths == (24, 24, 24)
    assert isinstance(mask, TaskMask)
