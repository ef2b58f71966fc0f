"""LoRA adapters on frozen models: new ones, and those that start from another."""

import dataclasses
import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import AdapterConfig, load_adapter, save_adapter
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, TrainingError
from afm_mlx.loading.load import load
from afm_mlx.training.loop.run_folder import RunExistsError
from afm_mlx.training.loop.trainer import Validation
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.lora_training import LoRATraining, read_initial
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.train import measure_adapter, train_lora
from tests.tools.cases import each
from tests.tools.compare import assert_same_tensors
from tests.tools.training_data import TRAINABLE
from tests.tools.training_runs import Watcher, random_adapter


def prepared(folder, method):
    source = ModelSource.open(folder)
    model = source.load()
    method.prepare(model, source, None, seed=0)
    return model


@pytest.mark.parametrize(("initial", "dtype"), [(False, "float16"), (True, "float32")])
def test_the_saved_adapter_is_what_was_tested(recipe, model, packed, tmp_path, rng, initial, dtype):
    recipe = dataclasses.replace(
        recipe, model=packed, teacher=model, distillation_weight=0.5, test=True
    )
    first = random_adapter(packed, tmp_path / "first", rng) if initial else None
    method, watcher = LoRATraining(initial_adapter=first, save_dtype=dtype), Watcher()
    result = train_lora(recipe, tmp_path / "adapter", method, **watcher.hooks())
    losses = watcher.losses(Validation, "valid_loss")
    assert losses[-1] < losses[0]
    # The folder is measured again, by the kernels that generation runs.
    again = measure_adapter(recipe, result.path)
    assert result.test.untrained.loss == pytest.approx(again.untrained.loss, rel=1e-4)
    assert result.test.trained.loss == pytest.approx(again.trained.loss, rel=1e-2)
    assert result.test.label == "without the adapter"
    assert result.test_loss == result.test.trained.loss < result.test.untrained.loss
    assert result.test.trained.count == again.trained.count > 0
    assert result.test_perplexity == pytest.approx(np.exp(result.test_loss))
    saved, config = load_adapter(result.path)
    assert (config.rank, config.scale) == ((4, 2.0) if initial else (16, 0.5))
    assert config.base_model_fingerprint == folder_fingerprint(TRAINABLE, packed)
    # The run has 32 bits whatever the adapter has.
    best = mx.load(str(result.run_path / "best" / "trainable.safetensors"))
    assert saved.keys() == best.keys()
    for name, array in best.items():
        assert array.dtype == mx.float32
        assert saved[name].dtype == getattr(mx, dtype)
        assert mx.array_equal(saved[name], array.astype(saved[name].dtype))
        assert mx.abs(array).max() > 0
    plan, scales = watcher.plan, 2 * TRAINABLE.num_kv_layers
    assert plan.trainable == sum(tensor.size for tensor in best.values())
    assert plan.parameters == TRAINABLE.num_parameters + scales + plan.trainable


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_numbers_are_rounded_as_they_will_be_saved(model, rng, dtype):
    method = LoRATraining(rank=3, save_dtype=dtype)
    adapted = prepared(model, method)
    drawn = {
        name: mx.array(rng.normal(size=array.shape), dtype=mx.float32)
        for name, array in lora_tensors(adapted).items()
    }
    adapted.load_weights(list(drawn.items()), strict=False)
    method.round_as_saved(adapted)
    for name, array in lora_tensors(adapted).items():
        assert array.dtype == mx.float32
        assert np.array_equal(array, np.array(drawn[name]).astype(dtype).astype(np.float32))


def test_numbers_beyond_float16_ask_for_float32(recipe, model, tmp_path, rng):
    first = random_adapter(model, tmp_path / "first", rng)
    tensors, config = load_adapter(first)
    name = str(rng.choice([name for name in tensors if "lora_a" in name]))
    # The other half of the pair is zero, so that the layer still adds nothing.
    tensors[name.replace("lora_a", "lora_b")] *= 0
    tensors[name] = mx.full(tensors[name].shape, 7e4)
    save_adapter(tmp_path / "large", tensors, config)
    tiny = TrainingOptions(iters=1, learning_rate=1e-9)
    recipe = dataclasses.replace(recipe, options=tiny)
    method = LoRATraining(initial_adapter=tmp_path / "large")
    with pytest.raises(TrainingError, match=r"has a number of 70000, .*--save-dtype float32"):
        train_lora(recipe, tmp_path / "adapter", method)
    assert not (tmp_path / "adapter" / "adapters.safetensors").exists()
    wide = dataclasses.replace(method, save_dtype="float32")
    train_lora(recipe, tmp_path / "adapter", wide, resume=True)
    assert load_adapter(tmp_path / "adapter")[0][name].max() == 7e4


# -- adapters to start from


def test_a_task_adapter_starts_from_a_recovery_adapter(recipe, model, tmp_path, rng):
    first = random_adapter(model, tmp_path / "first", rng, keys=["mlp.up_proj"])
    tiny = dataclasses.replace(recipe.options, learning_rate=1e-7)
    recipe = dataclasses.replace(recipe, options=tiny)
    method = LoRATraining(initial_adapter=first, save_dtype="float32")
    train_lora(recipe, tmp_path / "second", method)
    (before, old), (after, new) = load_adapter(first), load_adapter(tmp_path / "second")
    assert old == new
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, atol=1e-5)
    with pytest.raises(ConfigError, match="rank is 8, and the initial adapter"):
        train_lora(recipe, tmp_path / "third", LoRATraining(rank=8, initial_adapter=first))


def test_an_adapter_of_another_model_is_a_start_when_forced(model, tmp_path):
    stranger = add_lora(load(model)[0], 4, 2.0)
    stranger.model.output_norm.weight *= 2
    save_lora(stranger, first := tmp_path / "stranger")
    with pytest.raises(CheckpointError, match="was made for the model with fingerprint"):
        prepared(model, LoRATraining(initial_adapter=first))
    prepared(model, LoRATraining(initial_adapter=first, force=True))


def test_an_adapter_may_start_from_one_of_the_arrays_in_memory(model, tmp_path, monkeypatch):
    # As on a GPU, where they are not the folder's: its float32 numbers are rounded.
    monkeypatch.setattr("afm_mlx.loading.load.activation_dtype", lambda: mx.bfloat16)
    save_lora(add_lora(load(model)[0], 4, 2.0), first := tmp_path / "first")
    fingerprint = load_adapter(first)[1].base_model_fingerprint
    assert fingerprint != folder_fingerprint(TRAINABLE, model)
    prepared(model, LoRATraining(initial_adapter=first))


def test_an_adapter_with_nan_is_no_start(model, tmp_path, rng):
    tensors, config = load_adapter(random_adapter(model, tmp_path / "first", rng))
    name = str(rng.choice(sorted(tensors)))
    tensors[name][0, 0] = np.nan
    save_adapter(tmp_path / "bad", tensors, config)
    with pytest.raises(CheckpointError, match=f"bad: {name} holds NaN or infinity"):
        prepared(model, LoRATraining(initial_adapter=tmp_path / "bad"))


# -- what is refused


@each(
    ("option", "values", "message"),
    [
        ("scale", [0, -1, np.inf, np.nan, 1e39], "scale is .*finite numbers over 0"),
        ("rank", [0, -1, 100_000, 2.0], "rank is .*allowed are 1 to 65536"),
        ("save_dtype", ["int8"], "save_dtype is 'int8'; allowed are 'float16' and"),
    ],
)
def test_an_option_out_of_range(option, values, message):
    for value in values:
        with pytest.raises(ConfigError, match=message):
            LoRATraining(**{option: value})


def test_an_adapter_is_not_overwritten(recipe, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(TrainingError, match="holds an adapter already"):
        train_lora(recipe, tmp_path / "adapter")
    (tmp_path / "killed" / "run").mkdir(parents=True)
    (tmp_path / "killed" / "run" / "run.json").write_text("{}")
    (tmp_path / "killed" / "adapters.safetensors").touch()  # and no config yet
    with pytest.raises(RunExistsError, match=r"Resume it \(--resume\)"):
        train_lora(recipe, tmp_path / "killed")


# -- The adapter that training starts from: a folder, a file of mlx-lm's in one, or a file alone


@pytest.fixture
def tensors(rng):
    rank = int(rng.integers(1, 9))
    shapes = {"a.lora_a": (5, rank), "a.lora_b": (rank, 4), "b.lora_a.0": (6, rank),
              "b.lora_b.0": (rank, 2)}  # fmt: skip
    return {n: mx.array(rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()}


@pytest.fixture
def folder(tensors, tmp_path):
    rank = tensors["a.lora_a"].shape[1]
    save_adapter(tmp_path / "adapter", tensors, AdapterConfig(rank, 2.5, 4))
    return tmp_path / "adapter"


@pytest.mark.parametrize("name", ["", "adapters.safetensors", "0000100_adapters.safetensors"])
def test_a_folder_and_a_file_in_it(folder, tensors, name):
    shutil.copy(folder / "adapters.safetensors", folder / "0000100_adapters.safetensors")
    found, config = read_initial(folder / name)
    assert_same_tensors(found, tensors)
    assert (config.rank, config.scale) == (tensors["a.lora_a"].shape[1], 2.5)


def test_a_file_alone_needs_a_scale(folder, tensors, tmp_path):
    file = shutil.copy(folder / "adapters.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json next to .*--scale"):
        read_initial(file)
    found, config = read_initial(file, 0.25)
    assert_same_tensors(found, tensors)
    assert (config.rank, config.scale) == (tensors["a.lora_a"].shape[1], 0.25)


def test_files_that_are_no_adapter(folder, tensors, tmp_path):
    values = json.loads((folder / "adapter_config.json").read_text())
    values["lora_parameters"]["rank"] += 1
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="they don't belong together"):
        read_initial(folder / "adapters.safetensors")
    with pytest.raises(AFMError, match="missing"):
        read_initial(tmp_path / "missing.safetensors")
    mixed = tensors | {"c.lora_a": mx.zeros((3, 20)), "c.lora_b": mx.zeros((20, 3))}
    for content, message in (
        (mixed, "one rank for all is needed"),
        ({"weight": mx.zeros((2, 2))}, "holds no LoRA pairs"),
    ):
        file = tmp_path / "other.safetensors"
        mx.save_safetensors(str(file), content)
        with pytest.raises(CheckpointError, match=message):
            read_initial(file, 1.0)
