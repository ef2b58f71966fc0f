"""NaN, infinity, and integers in place of numbers: refused when a model is loaded, by the tensor's name."""

import json
import os
import shutil
import time

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.checkpoint.finite import check_finite, not_finite
from afm_mlx.checkpoint.weights import load_weights, save_weights, stored_tensors
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.mlx_lm import write_mlx_lm
from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.loading.load import load, load_model
from tests.hostile.folders import write_folders
from tests.tools.cases import all_pairs

BAD = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize(
    ("device", "dtype", "size"),
    all_pairs(["cpu", "gpu"], [mx.float32, mx.float16, mx.bfloat16], [1, 100, 20_000]),
)
def test_one_bad_number_is_found_wherever_it_is(rng, monkeypatch, device, dtype, size):
    if device == "gpu":  # the way that is taken there, by MLX's operations
        monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    numbers = rng.standard_normal((4, size)).astype(np.float32)
    tensors = {"good": mx.array(numbers).astype(dtype), "codes": mx.array([1, 2])}
    assert not_finite(tensors) == []
    for value in BAD:
        bad = numbers.copy()
        bad[int(rng.integers(4)), int(rng.integers(size))] = value
        assert not_finite(tensors | {"bad": mx.array(bad).astype(dtype)}) == ["bad"]
        with pytest.raises(CheckpointError, match="here: bad holds NaN or infinity"):
            check_finite(tensors | {"bad": mx.array(bad).astype(dtype)}, "here")
    extreme = mx.full((4, size), mx.finfo(dtype).max, dtype)  # sums and squares of them overflow
    assert not_finite({"high": extreme, "both": mx.concatenate([extreme, -extreme])}) == []


@pytest.fixture
def folders(tmp_path, rng):
    return write_folders(tmp_path, rng)


def rewritten(folder, name, change):
    weights = load_weights(folder)
    array = weights[name]
    mx.eval(weights)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_weights(folder, weights | {name: change(array)})


def drawn(folder, rng, part):
    """A tensor of the folder with that end."""
    names = sorted(name for name in stored_tensors(folder) if name.endswith(part))
    return names[int(rng.integers(len(names)))]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("float", "embedding.weight"),
        ("float", "proj.weight"),
        ("halves", "proj.weight"),
        ("halves", "norm.weight"),
        ("packed", "scales"),
        ("packed", "norm.weight"),
        ("affine", "biases"),
        ("palette", "table"),
        ("float", "quant_key_scale"),
    ],
)
def test_numbers_that_are_none_are_refused_by_name(folders, rng, kind, part):
    folder, name = folders[kind], drawn(folders[kind], rng, part)
    for value in BAD:

        def change(array, value=value):
            flat = array.reshape(-1)
            flat[int(rng.integers(flat.size))] = value
            return flat.reshape(array.shape)

        rewritten(folder, name, change)
        with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
            load_model(folder)
    load_model(folder, lazy=True)  # looks at no number, as its docstring says
    shutil.copy(folder / "config.json", folder / "tokenizer.model")
    (folder / "out").mkdir()
    with pytest.raises(CheckpointError, match=name):
        write_mlx_lm(folder, folder / "out", "out", ConversionOptions())


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("float", "proj.weight"),
        ("halves", "norm.weight"),
        ("packed", "scales"),
        ("float", "_scale"),
    ],
)
def test_integers_are_refused_by_name(folders, rng, kind, part):
    folder, name = folders[kind], drawn(folders[kind], rng, part)
    layer, _, _ = name.rpartition(".")
    for dtype in (mx.int32, mx.uint32, mx.int8, mx.bool_):
        rewritten(folder, name, lambda array, dtype=dtype: mx.ones(array.shape, dtype))
        for lazy in (False, True):
            # Words of 32 bits look like a packed matrix's.
            with pytest.raises(CheckpointError, match=rf"{layer}.*(float|stored packed)"):
                load_model(folder, lazy=lazy)


@pytest.mark.parametrize("value", [0.0, -0.01])
def test_scales_of_keys_and_values_are_above_zero(folders, rng, value):
    name = drawn(folders["packed"], rng, "quant_value_scale")
    rewritten(folders["packed"], name, lambda array: mx.array(value))
    with pytest.raises(CheckpointError, match=f"{name} is {value:g}; a scale of int8"):
        load_model(folders["packed"])


def test_a_config_of_other_sizes_than_the_weights_builds_nothing(folders, monkeypatch):
    folder = folders["packed"]
    values = json.loads((folder / "config.json").read_text())

    def built(config):
        raise AssertionError("a model was built")

    monkeypatch.setattr("afm_mlx.loading.load.Model", built)
    for change in ({"num_layers": 1000}, {"vocab_size": 1 << 24}, {"hidden_dim": 1 << 16}):
        start = time.perf_counter()
        with pytest.raises(CheckpointError, match=r"must be|missing"):
            load_model(folder, values | change)
        assert time.perf_counter() - start < 5
    with pytest.raises(ConfigError, match="num_layers is 20000"):
        load_model(folder, values | {"num_layers": 20_000})


def test_overrides_that_are_no_values_of_a_config(folders):
    for override in ([1], {1: 2}, "x"):
        with pytest.raises(ConfigError, match=r"a mapping of config\.json's keys"):
            load(folders["float"], model_config=override)
    with pytest.raises(ConfigError, match="model_type is None; it names the architecture"):
        load(folders["float"], model_config={"model_type": None})


def test_a_file_that_is_cut_off_after_its_header_was_read(folders, monkeypatch):
    folder = folders["packed"]
    original = mx.load

    def cut(path, **options):
        arrays = original(path, **options)
        os.truncate(path, 2000)
        return arrays

    monkeypatch.setattr(mx, "load", cut)
    with pytest.raises(CheckpointError, match=f"{folder} can't be read"):
        load_model(folder)


def test_a_source_that_is_cut_off_while_it_is_converted(folders, monkeypatch):
    """A mapped file would end the process."""
    folder = folders["float"]
    (folder / "tokenizer.model").write_bytes(b"")
    (folder / "out").mkdir()
    monkeypatch.setattr(
        "afm_mlx.converters.folder_writer.write_weights",
        lambda out, specs, read, **options: [
            os.truncate(folder / "model.safetensors", 5000),
            [list(read(spec)) for spec in specs],
        ],
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends within"):
        write_mlx_lm(folder, folder / "out", "out", ConversionOptions())


def test_a_header_that_says_otherwise_than_what_mlx_reads(folders, monkeypatch):
    original = mx.load

    def other(path, **options):
        arrays = original(path, **options)
        return {name: array[:1] if array.ndim else array for name, array in arrays.items()}

    monkeypatch.setattr(mx, "load", other)
    with pytest.raises(CheckpointError, match="is not what the header says"):
        load_model(folders["float"])
