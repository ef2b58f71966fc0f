"""`convert` of a model that takes images: float, packed and back, and what other programs can't have."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import base_model_fingerprint, folder_fingerprint
from afm_mlx.checkpoint.weights import load_weights
from afm_mlx.converters.convert import convert
from afm_mlx.converters.graph_source import Source
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load, load_model
from afm_mlx.measure.describe import describe_folder
from afm_mlx.measure.exported_models import read_afm_config
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.vision.prompt_image import read_image
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
    # Another rule for pictures is another model.
    other = with_images(CONFIG, image_token_id=6)
    assert folder_fingerprint(other, folder) != fingerprint


def test_exports_are_of_the_text_model(folder):
    assert Source.read(folder).config == read_afm_config(folder, "Core ML") == CONFIG


def test_what_can_not_be_converted(folder, tmp_path, spm, rng):
    with pytest.raises(AFMError, match="reads text only, and this model has an image encoder"):
        convert(folder, tmp_path / "stock", to="mlx-lm")
    text = write_folder(tmp_path / "text", spm, rng)
    with pytest.raises(AFMError, match="--q-vision-bits is for models that take images"):
        convert(text, tmp_path / "packed", quantize=True, q_vision_bits=4)
    with pytest.raises(AFMError, match="--q-vision-bits without -q"):
        convert(folder, tmp_path / "copy", q_vision_bits=4)
