"""A tiny model with an adapter, and its bundle with the adapter's file."""

from typing import NamedTuple

import numpy as np
import pytest

from tests.tools import adapters

pytest.importorskip(
    "coreai.runtime", reason="coreai-core has wheels for Linux on x86-64 and macOS 26"
)

CONTEXT, LENGTHS, ADAPTER = 40, (4, 12), "tone"


class Made(NamedTuple):
    folder: object
    bundle: object
    adapter: object


@pytest.fixture(scope="session")
def core_ai(spm_bpe, tmp_path_factory):
    from afm_mlx.config import ModelConfig
    from afm_mlx.converters.convert import convert
    from afm_mlx.converters.coreai.adapter_file import write_adapter_file
    from afm_mlx.coreai.bundle import CoreAIBundle
    from afm_mlx.loading.load import load_model
    from tests.tools.cli import CONFIG, write_folder

    rng, place = np.random.default_rng(0), tmp_path_factory.mktemp("coreai")
    config = ModelConfig.from_dict(CONFIG.to_dict() | {"context_length": 64, "vocab_size": 300})
    folder = write_folder(place / "model", spm_bpe, rng, config)
    tensors = adapters.draw_tensors(load_model(folder), rng, 4, strength=4)
    adapters.write_folder(folder / "adapters" / ADAPTER, tensors)
    options = {"dtype": "float32", "prompt_lengths": LENGTHS, "context": CONTEXT}
    bundle = convert(folder, place / "tiny", to="coreai", adapter_rank=4, **options)
    file = bundle / "adapters" / f"{ADAPTER}.safetensors"
    write_adapter_file(folder / "adapters" / ADAPTER, CoreAIBundle.read(bundle), file)
    return Made(folder, bundle, file)
