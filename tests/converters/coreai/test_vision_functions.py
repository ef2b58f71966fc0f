"""Images in Core AI bundles: Apple's runtime encodes tiles and reads prompts as the model does."""

import dataclasses
import itertools
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai.adapter_file import write_adapter_file
from afm_mlx.coreai import CoreAIModel
from afm_mlx.coreai.bundle import CoreAIBundle
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from afm_mlx.vision.prompt_image import read_image
from afm_mlx.vision_config import AdaptorConfig
from tests.tools import adapters
from tests.tools.cli import CONFIG, write_folder
from tests.tools.compare import error
from tests.tools.vision import TINY, picture, with_images

CONV = AdaptorConfig(num_heads=2, mlp_dim=24, pool_grid=4, rapid_pool_grid=2)
CONFIGS = {
    "the default's proportions": {},
    "padded windows, several registers": {"window_size": 5, "num_registers": 3, "qkv_bias": False},
    "no registers, a norm behind the convolution": {
        "num_registers": 0,
        "adaptor": dataclasses.replace(CONV, conv_norm=True, conv_kernel=2, conv_padding=0),
    },
    "joined channels of a padded grid": {
        "global_layers": (),
        "adaptor": AdaptorConfig("space_to_channel", mlp_dim=24, block_size=4),
    },
}


@pytest.fixture
def spm(tmp_path, tokenizer_bytes):
    (path := tmp_path / "tokenizer.model").write_bytes(tokenizer_bytes)
    return path


def folder_with(changes, tmp_path, spm, rng):
    """A folder whose norms and biases are no ones and zeros."""
    config = with_images(CONFIG, **changes)
    config = dataclasses.replace(config, context_length=64)
    folder = write_folder(tmp_path / "model", spm, rng, config)
    weights = mx.load(str(folder / "model.safetensors"))
    for name, array in weights.items():
        if name.startswith("vision.") and array.ndim == 1:
            noise = mx.array(rng.normal(size=array.shape).astype(np.float32))
            weights[name] = array + 0.3 * noise
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


def images_of(rng, config=TINY):
    return {
        mode: read_image(picture(rng, *size), config, mode)
        for mode, size in {"high": (150, 170), "balanced": (80, 60), "rapid": (20, 28)}.items()
    }


@pytest.mark.parametrize("case", CONFIGS)
def test_encoders_equal_the_model(case, tmp_path, spm, rng):
    folder = folder_with(CONFIGS[case], tmp_path, spm, rng)
    options = {"dtype": "float32", "prompt_lengths": [6], "context": 20}
    runner = CoreAIModel(convert(folder, tmp_path / "bundle", to="coreai", **options))
    model = load_model(folder)
    for mode, image in images_of(rng, model.args.vision_config).items():
        features = runner.encode(image)
        assert features.shape == (image.tokens, CONFIG.hidden_dim)
        assert error(features, model.vision.features(image)) < 1e-4, mode


def test_float16(tmp_path, spm, rng):
    folder = folder_with({}, tmp_path, spm, rng)
    options = {"prompt_lengths": [6], "context": 20}
    runner = CoreAIModel(convert(folder, tmp_path / "bundle", to="coreai", **options))
    image = images_of(rng)["rapid"]
    features = runner.encode(image)
    assert features.dtype == np.float16
    assert error(features, load_model(folder).vision.features(image)) < 1e-2


def test_prompts_with_images(tmp_path, spm, rng):
    """Three images over calls of 12, of 6 and of single tokens; adapters of both kinds; packed in 8 bits."""
    # The id that pads prompts, too.
    folder = folder_with({"image_token_id": 0}, tmp_path, spm, rng)
    packed = convert(folder, tmp_path / "packed", quantize=True, q_bits=8)
    for name in ("tone", "formal"):
        tensors = adapters.draw_tensors(load_model(packed), rng, 4, strength=4)
        tensors = {key: each for key, each in tensors.items() if not key.startswith("vision.")}
        adapters.write_folder(packed / "adapters" / name, tensors)
    options = {"dtype": "float32", "prompt_lengths": [6, 12], "context": 35}
    options |= {"adapter_rank": 4, "adapter_functions": ["formal"]}
    path = convert(packed, tmp_path / "bundle", to="coreai", **options)
    write_adapter_file(
        packed / "adapters" / "tone", CoreAIBundle.read(path), path / "adapters/tone.safetensors"
    )
    runner, images = CoreAIModel(path), images_of(rng)
    shown = [images["rapid"], images["balanced"], images["rapid"]]
    ids, parts = [], []
    model = load_model(packed)
    for image in shown:
        text = rng.integers(1, 300, 3).tolist()
        ids += [*text, *[0] * image.tokens]
        parts += [model.embed(mx.array([text]))[0], model.vision.features(image)]
    ids, prompt = [*ids, 7], mx.concatenate([*parts, model.embed(mx.array([[7]]))[0]])[None]
    text = [token or 6 for token in ids]
    answers = []
    for adapter in (None, path / "adapters" / "tone.safetensors", "formal"):
        runner.rewind()
        runner.set_adapter(adapter)
        if adapter is not None:
            attach_adapter(model, packed / "adapters" / Path(adapter).stem, force=True)
        for image in shown:
            runner.show(runner.encode(image))
        logits = [runner.logits(ids)]
        logits.append(runner.decode(9))
        behind = mx.concatenate([prompt, model.embed(mx.array([[9]]))], axis=1)
        wanted = np.array(model(behind)[0, -2:].astype(mx.float32))
        assert error(np.stack(logits), wanted) < 2e-4
        answers.append(wanted)
        runner.rewind()
        assert error(runner.logits(text), wanted[0]) > 1e-2
    for one, other in itertools.combinations(answers, 2):
        assert error(one, other) > 1e-2

    runner.rewind()
    runner.show(runner.encode(shown[0])[:3])
    with pytest.raises(AFMError, match="24 image tokens have 3 features; one for each is needed"):
        runner.prefill(ids)
    with pytest.raises(AFMError, match=r"the shape \[4, 3\]; \[tokens, 32\] is needed"):
        runner.show(np.zeros((4, 3)))
