"""Calls of the functions of a Core AI bundle in Apple's runtime, without the package's own code for that."""

import asyncio
from contextlib import AsyncExitStack

import numpy as np


class Executed:
    """A bundle's asset, compiled by Apple's runtime; `close` it."""

    def __init__(self, bundle):
        from coreai.authoring import AIModelAsset

        self._runner, self._stack = asyncio.Runner(), AsyncExitStack()
        asset = AIModelAsset.load(bundle / f"{bundle.name}.aimodel")
        self._model = self._runner.run(self._stack.enter_async_context(asset.executable()))
        self.function_names = self._model.function_names

    def call(self, name, inputs, states):
        """Logits of a function as float32; writes into states, which `make_states` made."""
        from coreai.runtime import NDArray

        inputs = {key: NDArray(np.ascontiguousarray(array)) for key, array in inputs.items()}
        outputs = self._runner.run(self._call(name, inputs, states))
        return outputs["logits"].numpy().astype(np.float32)

    async def _call(self, name, inputs, states):
        return await self._model.load_function(name)(inputs, state=states)

    def close(self):
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
