"""A tiny model with its Core AI bundle, and calls of functions in Apple's runtime itself."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.coreai.bundle import CoreAIBundle
from afm_mlx.loading.load import load_model
from tests.tools import adapters
from tests.tools.cli import CONFIG, write_folder

CONTEXT, LENGTHS = 40, (4, 12)
ADAPTER, OWN = "tone", "formal"
"""An adapter that is an input, and one that has functions."""


class Made(NamedTuple):
    folder: Path
    bundle: Path
    adapter: Path


def make_bundle(place, spm, rng):
    """A model with adapters, its bundle, which computes in float32, and the file of `ADAPTER` for it."""
    from afm_mlx.converters.coreai.adapter_file import write_adapter_file

    config = ModelConfig.from_dict(CONFIG.to_dict() | {"context_length": 64, "vocab_size": 300})
    folder = write_folder(place / "model", spm, rng, config)
    for name in (ADAPTER, OWN):
        tensors = adapters.draw_tensors(load_model(folder), rng, 4, strength=4)
        adapters.write_folder(folder / "adapters" / name, tensors)
    options = {"dtype": "float32", "prompt_lengths": LENGTHS, "context": CONTEXT}
    options |= {"adapter_rank": 4, "adapter_functions": [OWN]}
    bundle = convert(folder, place / "tiny", to="coreai", **options)
    file = bundle / "adapters" / f"{ADAPTER}.safetensors"
    write_adapter_file(folder / "adapters" / ADAPTER, CoreAIBundle.read(bundle), file)
    return Made(folder, bundle, file)


class Executed:
    """A bundle's asset, compiled by Apple's runtime; a context manager."""

    def __init__(self, bundle):
        from coreai.authoring import AIModelAsset

        self.path = bundle
        self._runner, self._stack = asyncio.Runner(), AsyncExitStack()
        asset = AIModelAsset.load(bundle / f"{bundle.name}.aimodel")
        self._model = self._runner.run(self._stack.enter_async_context(asset.executable()))

    def call(self, name, inputs, states):
        """Logits of a function as float32; writes into states, which `make_states` made."""
        from coreai.runtime import NDArray

        inputs = {key: NDArray(np.ascontiguousarray(array)) for key, array in inputs.items()}
        outputs = self._runner.run(self._call(name, inputs, states))
        return outputs["logits"].numpy().astype(np.float32)

    async def _call(self, name, inputs, states):
        return await self._model.load_function(name)(inputs, state=states)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._runner.run(self._stack.aclose())
        self._runner.close()


def make_states(config, dtype, columns=None):
    from coreai.runtime import NDArray

    columns = columns or config.context_length
    shape = (config.num_kv_layers, 1, config.num_kv_heads, columns, config.head_dim)
    kind = np.int8 if config.kv_bits else dtype
    return {name: NDArray(np.zeros(shape, kind)) for name in ("keys", "values")}


def ints(*numbers):
    return np.array(numbers, np.int32)
