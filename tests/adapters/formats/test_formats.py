"""Every format is told apart, and gives back what was written, bit for bit, through every other."""

import shutil
import struct

import mlx.core as mx
import pytest

from afm_mlx.adapters.formats import FORMATS, detect_format, read_adapter, write_adapter
from afm_mlx.adapters.formats.pair_order import pair_places
from afm_mlx.errors import AFMError, CheckpointError
from tests.adapters.formats.conftest import assert_same_numbers, delta

ENDS = {"toolkit": ".pt", "fmadapter": ".fmadapter"}


def path_for(folder, name, kind):
    return folder / f"{name}{ENDS.get(kind, '')}"


@pytest.mark.parametrize("one", FORMATS)
def test_every_pair(one, draw_adapter, model_config, rng, tmp_path):
    rank = int(rng.choice([1, 3, 8, 16, 32]))
    # Apple's fixed scale of 0.5 rounds others than these; 0.25 does, for numbers near float16's smallest.
    tensors, config = draw_adapter(model_config, rank, float(rng.choice([0.5, 1.0, 2.0])))
    first = path_for(tmp_path, "first", one)
    write_adapter(first, tensors, config, one, model_config=model_config)
    assert detect_format(first) == one
    for i, other in enumerate(FORMATS):
        second = path_for(tmp_path, f"second{i}", other)
        write_adapter(second, *read_adapter(first, model_config), other, model_config=model_config)
        assert detect_format(second) == other
        found, found_config = read_adapter(second, model_config)
        assert_same_numbers(found, tensors)
        assert found_config == config


@pytest.mark.parametrize("kind", [k for k in FORMATS if k != "fmadapter"])
def test_any_scale_and_type(kind, draw_adapter, model_config, rng, tmp_path):
    for dtype in (mx.float16, mx.bfloat16, mx.float32):
        tensors, config = draw_adapter(model_config, 5, float(rng.uniform(0.01, 20)), dtype)
        path = path_for(tmp_path, str(dtype), kind)
        write_adapter(path, tensors, config, kind, model_config=model_config)
        found, found_config = read_adapter(path)
        assert_same_numbers(found, tensors)
        assert found_config.scale == pytest.approx(config.scale, rel=1e-15)
        wanted = mx.float32 if kind == "toolkit" else dtype
        assert {tensor.dtype for tensor in found.values()} == {wanted}


@pytest.mark.parametrize("kind", FORMATS)
def test_layers_left_out(kind, draw_adapter, model_config, tmp_path):
    """Formats with a place for every layer get zeros there, which are left out again."""
    tensors, config = draw_adapter(
        model_config,
        keep=lambda p: p.part in (".0", ".2") or p.layer.endswith("down_proj"),
    )
    path = path_for(tmp_path, "a", kind)
    write_adapter(path, tensors, config, kind, model_config=model_config)
    found, found_config = read_adapter(path, model_config)
    for place in pair_places(model_config):
        if place.a in tensors:
            wanted = delta(tensors, config, place)
            assert (delta(found, found_config, place) == wanted).all()
        else:  # a fused layer has all three
            assert place.a not in found or place.part == ".1"
            assert place.a not in found or not mx.any(found[place.b]).item()
    assert found_config.keys == config.keys
    assert found_config.num_layers in (config.num_layers, -1)


def test_a_type_of_choice(draw_adapter, model_config, tmp_path):
    tensors, config = draw_adapter(model_config, dtype=mx.float32)
    write_adapter(tmp_path / "a", tensors, config, "mlx-lm", dtype=mx.float16)
    found, _ = read_adapter(tmp_path / "a")
    assert {tensor.dtype for tensor in found.values()} == {mx.float16}
    assert_same_numbers(found, {n: t.astype(mx.float16) for n, t in tensors.items()})


def test_what_is_no_adapter(draw_adapter, model_config, tmp_path):
    adapter, folder = draw_adapter(model_config), tmp_path / "a"
    write_adapter(folder, *adapter, "mlx-lm")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    shutil.make_archive(str(tmp_path / "b.fmadapter"), "zip", folder)
    shutil.copy(tmp_path / "b.fmadapter.zip", tmp_path / "b.fmadapter")
    for path, words in (
        (tmp_path / "nothing", "There is no"),
        (tmp_path / "empty", "it holds nothing"),
        (tmp_path / "notes.txt", "files are the toolkit's .pt"),
        (tmp_path / "b.fmadapter", "Unpack it first"),
        (tmp_path / "b.fmadapter.zip", "Unpack it first"),
        (folder / "adapters.safetensors", "one file of an adapter; give its folder"),
    ):
        with pytest.raises(CheckpointError, match=words):
            read_adapter(path)
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="which are two adapters"):
        read_adapter(folder)
    for path, tensors, to, words in (
        (tmp_path / "x", adapter[0], "gguf", "The format is 'gguf'; allowed are mlx-lm, peft"),
        (folder, adapter[0], "peft", "exists already"),
        (tmp_path / "x", {}, "peft", "no LoRA tensors"),
    ):
        with pytest.raises(AFMError, match=words):
            write_adapter(path, tensors, adapter[1], to)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["adapter.pt", "adapter"])
def test_an_archive_over_several_disks_is_refused(name, tmp_path):
    """Python's own test for archives raises there."""
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 1, 0, 2)
    (tmp_path / name).write_bytes(b"PK\x03\x04" + bytes(30) + locator + b"PK\x05\x06" + bytes(18))
    with pytest.raises(CheckpointError, match=r"is cut off or damaged: .*multiple disks"):
        read_adapter(tmp_path / name)
