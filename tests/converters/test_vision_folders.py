"""`convert` of a model that takes images: float, packed and back, and what other programs can't have."""

import dataclasses
import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.lora import add_lora, save_lora
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.adapter_conversion import BaseFolder, convert_adapter, verify_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai.plan import plan_bundle
from afm_mlx.converters.graph_source import Source
from afm_mlx.errors import AFMError, CheckpointError
from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_folder
from afm_mlx.measure.exported_models import read_afm_config
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.vision.prompt_image import read_image
from tests.tools.adapters import randomize_lora
from tests.tools.cases import draw
from tests.tools.cli import CONFIG, write_folder
from tests.tools.compare import assert_close, assert_same_tensors, error
from tests.tools.vision import TINY, picture, with_images


@pytest.fixture
def spm(tmp_path, tokenizer_bytes):
    (path := tmp_path / "tokenizer.model").write_bytes(tokenizer_bytes)
    return path


@pytest.fixture
def folder(tmp_path, rng, spm):
    return write_folder(tmp_path / "float", spm, rng, with_images(CONFIG))


def test_a_copy_is_the_same(folder, tmp_path, rng):
    copy = convert(folder, tmp_path / "copy")
    assert_same_tensors(load_weights(copy), load_weights(folder))
    assert json.loads((copy / "config.json").read_text())["vision_config"] == json.loads(
        json.dumps(TINY.to_dict())
    )
    model, _ = load(str(copy))
    assert model.args == with_images(CONFIG)
    pixels = draw(rng, (1, 28, 28, 3))
    assert_close(model.vision(pixels), load_model(folder).vision(pixels), 1e-6)


@pytest.mark.parametrize("bits", [None, 4])
def test_packed_and_back(folder, tmp_path, rng, bits):
    """The text model by its rule, the vision part by its own: 8 bits, or the ones asked for."""
    packed = convert(folder, tmp_path / "packed", quantize=True, q_bits=4, q_vision_bits=bits)
    model, wanted = load_model(packed), load_model(folder)
    layers = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    of_vision = {path: m for path, m in layers.items() if path.startswith("vision.")}
    assert {m.bits for path, m in layers.items() if path not in of_vision} == {4}
    assert {(m.bits, m.mode, m.granularity) for m in of_vision.values()} == {
        (bits or 8, "balanced", "row")
    }
    linears = [n for n, a in tree_flatten(wanted.vision.parameters()) if n.endswith("weight")]
    matrices = [n for n in linears if "norm" not in n and "patch_embed" not in n]
    assert {f"vision.{n}".removesuffix(".weight") for n in matrices} == set(of_vision)
    image = read_image(picture(rng, 90, 60), TINY, "balanced")
    bound = 0.1 if bits is None else 0.6
    assert error(model.vision.features(image), wanted.vision.features(image)) < bound
    whole = convert(packed, tmp_path / "whole", dequantize=True, dtype="float32")
    again = convert(whole, tmp_path / "again", quantize=True, q_bits=4, q_vision_bits=bits)
    before, after = load_weights(packed), load_weights(again)
    codes = {name for name, array in before.items() if array.dtype == mx.uint32}
    assert {name for name in codes if not mx.array_equal(before[name], after[name])} == set()


def test_facts_and_fingerprints(folder, rng):
    facts = describe_folder(folder)
    images = facts["images"]
    assert images["tokens"] == {"high": 80, "balanced": 16, "rapid": 4}
    assert sum(images["parameters"].values()) == TINY.num_parameters(CONFIG.hidden_dim)
    assert facts["weights"]["parameters"] == facts["architecture"]["parameters"]
    model = load_model(folder)
    config = with_images(CONFIG)
    fingerprint = folder_fingerprint(config, folder)
    assert base_model_fingerprint(model) == facts["fingerprint"] == fingerprint
    # Another rule for pictures, or another weight of the vision part, is another model.
    images = TINY.images
    others = [with_images(CONFIG, image_token_id=6), CONFIG]
    others += [
        with_images(CONFIG, images=dataclasses.replace(images, **change))
        for change in (
            {"fit": "cover"},
            {"tile_order": "overview_then_tiles"},
            {"mean": (0.5, *images.mean[1:])},
            {"std": (*images.std[:2], 0.5)},
        )
    ]
    found = {fingerprint, *(folder_fingerprint(other, folder) for other in others)}
    for name in ("encoder.registers", "adaptor.conv.weight"):
        weights = load_weights(folder)
        weights[f"vision.{name}"] += 1
        model.load_weights(list(weights.items()))
        found.add(base_model_fingerprint(model))
    assert len(found) == 1 + len(others) + 2


@pytest.fixture
def adapter(folder, rng):
    """A function of the adapted parts that saves an adapter of the folder's model."""

    def save(*parts):
        model = load_model(folder)
        add_lora(model, 2, 1.0, parts=parts)
        randomize_lora(model, rng)
        save_lora(model, path := folder / "adapters" / "_".join(parts), folder)
        return path

    return save


def test_exports_of_models_that_take_images(folder, adapter):
    """Core AI has the encoder, Core ML only the text model; both only adapters of the text model."""
    with pytest.warns(UserWarning, match="the text model alone is converted"):
        assert Source.read(folder).config == read_afm_config(folder, "Core ML") == CONFIG
    options = {"dtype": "float16", "context": None, "lengths": [8], "adapter_rank": 2}
    options["minimum_os"] = "27"
    plan = plan_bundle(folder, adapters=[adapter("text")], **options)
    assert plan.config.vision_config == TINY
    assert plan.fingerprint == folder_fingerprint(with_images(CONFIG), folder)
    assert [each.name for each in plan.adapters] == ["text"]
    with pytest.raises(CheckpointError, match=r"the model has no layer for vision\.adaptor"):
        plan_bundle(folder, adapters=[adapter("adaptor")], **options)


def test_an_adapter_of_the_vision_part_is_verified_and_copied(folder, adapter, tmp_path):
    path, base = adapter("text", "adaptor", "encoder"), BaseFolder.read(folder)
    assert verify_adapter(path, base).problems == []
    convert_adapter(path, tmp_path / "copy", "mlx-lm", base=base)
    assert_same_tensors(load_adapter(tmp_path / "copy")[0], load_adapter(path)[0])
    for to, name in (("peft", "a"), ("toolkit", "a.pt"), ("fmadapter", "a.fmadapter")):
        words = f"changes the image encoder or its adaptor, and {to} has no place"
        with pytest.raises(CheckpointError, match=words):
            convert_adapter(path, tmp_path / name, to, base=base)
    text = dataclasses.replace(base, config=CONFIG)
    assert "the model has no layer for vision." in verify_adapter(path, text).problems[0]


def test_what_can_not_be_converted(folder, tmp_path, spm, rng, monkeypatch):
    with pytest.raises(AFMError, match="reads text only, and this model has an image encoder"):
        convert(folder, tmp_path / "stock", to="mlx-lm")
    text = write_folder(tmp_path / "text", spm, rng)
    (tmp_path / "a.txt").write_text("Some text. " * 100)
    measured = "afm_mlx.converters.mixed_bits.measure_sensitivity"
    monkeypatch.setattr(measured, lambda *_, **__: pytest.fail("minutes before the error"))
    for mix in ({}, {"target_bpw": 4, "data": tmp_path / "a.txt"}):
        with pytest.raises(AFMError, match="--q-vision-bits is for models that take images"):
            convert(text, tmp_path / "packed", quantize=True, q_vision_bits=4, **mix)
    with pytest.raises(AFMError, match="--q-vision-bits without -q"):
        convert(folder, tmp_path / "copy", q_vision_bits=4)
