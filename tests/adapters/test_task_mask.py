"""Task masks: files, what is refused, and models with their kept channels alone."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.active import bind
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.adapters.task_mask import (
    GROUP,
    MASK_CONFIG_NAME,
    MASK_NAME,
    TaskMask,
    apply_mask,
    expand_lora,
    feed_forwards,
    gather,
    has_mask,
    plan_cuts,
    read_mask,
    write_mask,
)
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.errors import CheckpointError, ConfigError, RequestError
from afm_mlx.kernels import PackedWeight, dequantize, pack_codes
from afm_mlx.quantization.packed_layers import PackedLinear
from tests.tools.adapters import KINDS, randomize_lora, some_tokens
from tests.tools.cases import each
from tests.tools.compare import assert_close, assert_same
from tests.tools.masks import draw_mask, zero_channels

BOUNDS = {"float": 1e-5, "packed": 1e-3}


def taken_arrays(arrays, *args):
    return gather({"layer": plan_cuts(arrays, *args)}).arrays()["layer"]


# -- models


@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_model_equals_the_model_whose_other_channels_are_zero(kind, make_model, rng):
    model, whole = make_model(kind), make_model(kind)
    mask, tokens = draw_mask(model, rng, 0.5), some_tokens(rng)
    assert len(set(mask.widths)) > 1
    before = model(tokens)
    assert apply_mask(model, mask) is model
    got = model(tokens)
    # Packed products round their inputs, where the other model's float ones do not.
    assert_close(got, zero_channels(whole, mask)(tokens), BOUNDS[kind])
    assert mx.abs(got - before).max() > 1e-2
    for block, width in zip(model.layers, mask.widths, strict=True):
        weight = block.mlp.gate_proj.weight
        assert weight.shape[0] == width
        assert (width, block.mlp.down_proj.weight.shape[1]) in (
            (width, width),
            (width, width // 16),
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_that_keeps_all_channels_changes_no_layer(kind, make_model, rng):
    model = make_model(kind)
    layers = dict(model.named_modules())
    mask = TaskMask(np.ones((len(model.layers), 128 // GROUP), bool))
    assert mask.is_full
    assert mask.share == 1
    apply_mask(model, mask)
    assert all(layers[path] is layer for path, layer in model.named_modules())


def _palette(rng, tables):
    table = mx.array(rng.normal(size=(tables, 4)).astype(np.float32))
    return {"mode": "palette", "table": table}


def _scales(rng, *shape):
    return mx.array(rng.uniform(0.5, 1, shape).astype(np.float32))


FORMS = {
    "tensor": lambda rng: {"scales": _scales(rng)},
    "row": lambda rng: {"scales": _scales(rng, 64)},
    "group": lambda rng: {"scales": _scales(rng, 64, 4)},
    "affine": lambda rng: {
        "mode": "affine",
        "scales": _scales(rng, 64, 4),
        "biases": _scales(rng, 64, 4),
    },
    "table": lambda rng: _palette(rng, 1),
    "tables": lambda rng: _palette(rng, 4),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_of_kept_channels_are_copied(form, bits, rng):
    parts = FORMS[form](rng)
    if "table" in parts:
        parts["table"] = mx.array(
            rng.normal(size=(parts["table"].shape[0], 2**bits)).astype(np.float32)
        )
    codes = mx.array(rng.integers(0, 2**bits, (64, 128)).astype(np.uint8))
    layer = PackedLinear.from_codes(codes, bits, **parts)
    mx.eval(layer.parameters())
    whole, arrays = dequantize(layer.packed), dict(tree_flatten(layer.parameters()))
    for of_inputs, size, run in ((False, 64, 16), (True, 128, 32)):
        kept = np.repeat(rng.permutation(size // run) < size // run // 2 + 1, run)
        taken = taken_arrays(arrays, kept, of_inputs, "layer")
        packed = PackedWeight(
            taken["weight"],
            bits,
            layer.mode,
            *(taken.get(n, arrays.get(n)) for n in ("scales", "biases", "table")),
        )
        at = mx.array(np.flatnonzero(kept))
        assert_same(packed.codes, pack_codes(codes[:, at] if of_inputs else codes[at], bits))
        assert_same(dequantize(packed), whole[:, at] if of_inputs else whole[at])


@each("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_float_numbers_of_kept_channels_are_copied(rng, dtype):
    arrays = {
        "weight": mx.array(rng.normal(size=(12, 20)).astype(np.float32)).astype(dtype),
        "bias": mx.array(rng.normal(size=12).astype(np.float32)).astype(dtype),
    }
    mx.eval(arrays)
    for of_inputs, size in ((False, 12), (True, 20)):
        kept = np.repeat(np.arange(size // 2) % 3 > 0, 2)
        at, taken = mx.array(np.flatnonzero(kept)), taken_arrays(arrays, kept, of_inputs, "layer")
        weight = arrays["weight"]
        assert_same(taken["weight"], weight[:, at] if of_inputs else weight[at])
        assert taken["weight"].dtype == dtype
        if of_inputs:
            assert set(taken) == {"weight"}
        else:
            assert_same(taken["bias"], arrays["bias"][at])


@each(
    "bits, scales, group, units",
    [(2, (), 8, 16), (4, (), 4, 8), (8, (), 2, 4), (2, (64, 2), 32, 64), (8, (64, 4), 16, 32)],
)
def test_words_and_scales_that_a_mask_would_cut_are_refused(rng, bits, scales, group, units):
    codes = mx.array(rng.integers(0, 2**bits, (64, 128)))
    layer = PackedLinear.from_codes(codes, bits, scales=_scales(rng, *scales), name="layer")
    mx.eval(layer.parameters())
    kept = np.repeat(np.arange(128 // group) % 2 == 0, group)
    with pytest.raises(CheckpointError, match=f"units of {units}, .*--group {units}"):
        taken_arrays(dict(tree_flatten(layer.parameters())), kept, True, "layer")


def test_layers_in_mlx_own_format(rng, make_model):
    model, whole = make_model("float"), make_model("float")
    for each_model in (model, whole):
        nn.quantize(each_model, 64, 4, class_predicate=lambda path, m: ".mlp." in path)
    mask, tokens = draw_mask(model, rng, 0.5, group=64, equal=True), some_tokens(rng)
    assert_close(apply_mask(model, mask)(tokens), zero_channels(whole, mask)(tokens), 1e-5)


def test_lora_trained_behind_a_mask_is_saved_at_the_whole_shape(make_model, rng, tmp_path):
    model, whole = make_model("packed"), make_model("packed")
    layers, mask, tokens = feed_forwards(model), draw_mask(model, rng), some_tokens(rng)
    apply_mask(model, mask)
    add_lora(model, 4, 0.5)
    randomize_lora(model, rng)
    expanded = expand_lora(lora_tensors(model), mask, layers)
    zero_channels(whole, mask)
    add_lora(whole, 4, 0.5)
    shapes = {name: tensor.shape for name, tensor in lora_tensors(whole).items()}
    assert {name: tensor.shape for name, tensor in expanded.items()} == shapes
    whole.load_weights(list(expanded.items()), strict=False)
    assert_close(model.eval()(tokens), whole.eval()(tokens), BOUNDS["packed"])


def test_what_a_mask_can_not_be_applied_to(make_model, rng, write_adapter):
    model = make_model("packed")
    mask = draw_mask(model, rng)
    other = TaskMask(np.ones((3, 8), bool))
    with pytest.raises(
        CheckpointError, match=r"3 blocks .* 128 channels, and this model has 4 of 128"
    ):
        apply_mask(model, other)
    with pytest.raises(CheckpointError, match=r"4 blocks .* of 64 channels"):
        apply_mask(model, TaskMask(np.ones((4, 4), bool)))
    bind(model)
    with pytest.raises(RequestError, match="detach_adapter"):
        apply_mask(model, mask)
    model = make_model("packed")
    add_lora(model, 2, 1.0)
    with pytest.raises(RequestError, match="Apply the mask first"):
        apply_mask(model, mask)
    model = make_model("float")
    del model.layers[1]["mlp"]
    with pytest.raises(RequestError, match="3 of 4 blocks have one"):
        feed_forwards(model)


# -- masks


def test_what_a_mask_says_of_itself():
    kept = np.array([[True, False, True], [False, True, True]])
    mask = TaskMask(kept, 2)
    assert (mask.blocks, mask.ffn_dim, mask.widths) == (2, 6, (4, 4))
    assert mask.share == pytest.approx(2 / 3)
    assert mask.channels(0).tolist() == [0, 1, 4, 5]
    assert not mask.is_full
    same = TaskMask(np.repeat(kept, 2, axis=1), 1, "another text", "gradient")
    assert same.fingerprint == mask.fingerprint
    assert TaskMask(kept[::-1], 2).fingerprint != mask.fingerprint
    assert TaskMask(kept, 4).fingerprint != mask.fingerprint


@each(
    "kept, group, says",
    [
        (np.ones((2, 2)), 16, "bool array"),
        (np.ones(2, bool), 16, "bool array"),
        (np.ones((0, 2), bool), 16, "bool array"),
        ([[True]], 16, "bool array"),
        (np.ones((1, 1), bool), 0, "number of channels"),
        (np.ones((1, 1), bool), 1.5, "number of channels"),
        (np.array([[True], [False]]), 16, "Block 1 keeps no group"),
    ],
)
def test_masks_that_can_not_be(kept, group, says):
    with pytest.raises(RequestError, match=says):
        TaskMask(kept, group)


# -- files


@pytest.mark.parametrize("groups", [8, 13])
def test_a_mask_comes_back_from_its_files(rng, tmp_path, groups):
    kept = rng.random((5, groups)) < 0.5
    kept[:, 0] = True
    mask = TaskMask(kept, 32, "Answer in formal words.", "activation", "f" * 64)
    assert not has_mask(tmp_path)
    write_mask(tmp_path / "m", mask)
    assert has_mask(tmp_path / "m")
    back = read_mask(tmp_path / "m")
    assert (back.kept == kept).all()
    assert (back.group, back.task, back.criterion) == (32, mask.task, "activation")
    assert (back.base_model_fingerprint, back.fingerprint) == ("f" * 64, mask.fingerprint)
    write_mask(tmp_path / "m", TaskMask(~kept | kept[:, :1], 16))
    assert read_mask(tmp_path / "m").group == 16


def test_the_size_of_the_3bs_mask(tmp_path):
    write_mask(tmp_path, TaskMask(np.ones((56, 6656), bool), 1))
    assert (tmp_path / MASK_NAME).stat().st_size < 47_000


def test_a_mask_joins_an_adapters_folder(make_model, rng, tmp_path):
    model = make_model("float")
    add_lora(model, 2, 1.0)
    save_lora(model, tmp_path)
    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    write_mask(tmp_path, draw_mask(model, rng))
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


@pytest.fixture
def written(rng, tmp_path):
    kept = np.zeros((4, 12), bool)
    kept[:, :6] = True
    write_mask(tmp_path, TaskMask(kept, base_model_fingerprint="a"))
    return tmp_path


def _edit(folder, **values):
    path = folder / MASK_CONFIG_NAME
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps(config))


@each(
    "name, value",
    [
        ("format_version", 2),
        ("format_version", None),
        ("group", 0),
        ("group", True),
        ("group", "16"),
        ("group", 2**40),
        ("ffn_dim", 100),
        ("ffn_dim", 2**40),
        ("ffn_dim", 0),
        ("kept_groups", []),
        ("kept_groups", [6, 6, 6, 0]),
        ("kept_groups", {"0": 6}),
        ("task", 5),
        ("criterion", ["a"]),
        ("base_model_fingerprint", 3),
    ],
)
def test_values_that_a_config_can_not_have(written, name, value):
    before = (written / MASK_CONFIG_NAME).read_text()
    _edit(written, **{name: value})
    with pytest.raises(ConfigError, match=f"{name} is .*, and must be "):
        read_mask(written)
    (written / MASK_CONFIG_NAME).write_text(before)


@each(
    "values",
    [
        {"kept_groups": [6, 6, 6, 5]},
        {"mask_fingerprint": "0" * 64},
        {"mask_fingerprint": None},
        {"group": 8, "ffn_dim": 96},
        {"ffn_dim": 176},
    ],
)
def test_a_config_that_was_edited(written, values):
    before = (written / MASK_CONFIG_NAME).read_text()
    _edit(written, **values)
    with pytest.raises(CheckpointError, match="edited or damaged"):
        read_mask(written)
    (written / MASK_CONFIG_NAME).write_text(before)


def _bits(written, *changes):
    bits = np.array(mx.load(str(written / MASK_NAME))["kept"])
    for row, column, value in changes:
        bits[row, column] ^= value
    return mx.array(bits)


@each(
    "changes",
    [
        [(0, 0, 1)],  # a group less
        [(0, 0, 0x81)],  # another group
        [(0, 1, 0x10)],  # beyond the last group
        [(2, 0, 0x3F)],  # none
    ],
)
def test_bits_that_were_edited(written, changes):
    before = (written / MASK_NAME).read_bytes()
    save_file(written / MASK_NAME, {"kept": _bits(written, *changes)})
    with pytest.raises(CheckpointError, match="edited or damaged"):
        read_mask(written)
    (written / MASK_NAME).write_bytes(before)


def test_files_that_are_cut_or_missing_or_of_another_mask(written):
    whole = (written / MASK_NAME).read_bytes()
    (written / MASK_NAME).write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="cut off or damaged"):
        read_mask(written)
    for tensors in (
        {"kept": _zeros((4, 3))},
        {"kept": _zeros((4, 2), mx.uint32)},
        {"lost": _zeros((4, 2))},
        {"kept": _zeros((4, 2)), "more": _zeros((4, 2))},
    ):
        save_file(written / MASK_NAME, tensors)
        with pytest.raises(CheckpointError, match=r"uint8 of shape \[4, 2\]"):
            read_mask(written)
    for name in (MASK_NAME, MASK_CONFIG_NAME):
        (written / MASK_NAME).write_bytes(whole)
        config = (written / MASK_CONFIG_NAME).read_bytes()
        (written / name).unlink()
        assert has_mask(written)
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            read_mask(written)
        (written / MASK_CONFIG_NAME).write_bytes(config)


def _zeros(shape, dtype=mx.uint8):
    return mx.zeros(shape, dtype)
