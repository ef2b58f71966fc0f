"""Running a Core AI bundle by Apple's runtime, on a Mac or on Linux: prompts to logits."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx.coreai.adapter_file import read_adapter_arrays
from afm_mlx.coreai.availability import import_coreai
from afm_mlx.coreai.bundle import INPUTS, CoreAIBundle, adapter_inputs
from afm_mlx.errors import AFMError, reason_of
from afm_mlx.model.exported_model import ExportedModel

_INT32 = np.int32


class CoreAIModel(ExportedModel):
    """A loaded bundle of `afm-mlx convert --to coreai`, with the keys and values of one conversation.

        model = CoreAIModel("nano", adapter="nano/adapters/triage.safetensors")
        for token in model.greedy(prompt, max_tokens=100, end_tokens={2}):
            ...

    Functions are compiled when the bundle is loaded. Apple's runtime on Linux may end the process on a program
    that it can't run.

    Args:
        bundle: the bundle's folder.
        adapter: a file of `afm-mlx adapter convert --to coreai`; the name of an adapter that has functions in
            the bundle; or None for none.

    Attributes:
        bundle: the bundle's description.
        position: number of tokens that have keys and values.

    Raises:
        AFMError: if the bundle or the adapter is damaged or was made by others, or can't run here.
    """

    prompts_have_logits = True

    def __init__(self, bundle: str | Path, adapter: str | Path | None = None) -> None:
        self.bundle = CoreAIBundle.read(bundle)
        super().__init__(self.bundle.config, self.bundle.prompt_lengths)
        found = self._adapter_of(adapter)  # an adapter is refused before functions are compiled
        self._runtime = _Runtime(self.bundle)
        # A description can state any sizes: the function's own are compared before states get memory.
        self._runtime.function(self.bundle.function_names()[0], 0)
        kind = np.int8 if self.bundle.config.kv_bits is not None else np.dtype(self.bundle.dtype)
        shape = self.bundle.state_shape()
        self._states = {
            name: self._runtime.array(np.zeros(shape, kind)) for name in ("keys", "values")
        }
        self._use(*found)

    def set_adapter(self, adapter: str | Path | None) -> None:
        """Use another adapter from the next token on, or None for none. No function is compiled again.

        Keys and values of earlier tokens stay; call `rewind` for answers of the new adapter alone.

        Raises:
            AFMError: if the adapter is damaged or was made for another model, or the bundle takes no inputs of
                adapters.
        """
        self._use(*self._adapter_of(adapter))

    def _adapter_of(self, adapter: str | Path | None) -> tuple[str | None, dict[str, np.ndarray]]:
        """Return the adapter's name in functions' names, None for no adapter, and the arrays they take."""
        if adapter is None or adapter in self.bundle.adapters:
            return (None if adapter is None else str(adapter)), {}
        return INPUTS, read_adapter_arrays(adapter, self.bundle)

    def _use(self, name: str | None, arrays: Mapping[str, np.ndarray]) -> None:
        self._adapter = {each: self._runtime.array(array) for each, array in arrays.items()}
        self._names = self.bundle.function_names(name)

    def read_prompt(self, tokens: np.ndarray, count: int) -> np.ndarray:
        return self._call(len(tokens), tokens, count=np.array([count], _INT32))

    def read_token(self, token: int) -> np.ndarray:
        return self._call(0, np.array([token], _INT32))

    def _call(self, length: int, tokens: np.ndarray, **more: np.ndarray) -> np.ndarray:
        """Call the function for prompts of `length` tokens, or for a step if it is 0."""
        own = {"tokens": tokens[None], "position": np.array([self.position], _INT32), **more}
        arrays = {name: self._runtime.array(each) for name, each in own.items()}
        name, inputs = self._names[length], {**arrays, **self._adapter}
        logits = self._runtime.call(name, length, inputs, self._states)
        return np.array(logits, np.float32).reshape(-1)


class _Runtime:
    """A bundle's asset in Apple's runtime, whose calls run in an event loop of a thread of its own."""

    def __init__(self, bundle: CoreAIBundle) -> None:
        self._path, self._bundle = bundle.path, bundle
        self._library = import_coreai("coreai.runtime")
        self._asset = import_coreai("coreai.authoring").AIModelAsset
        self._loop = asyncio.new_event_loop()
        self._functions: dict[str, Any] = {}
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        self._stack = AsyncExitStack()
        self._close = weakref.finalize(self, _end, self._loop, self._stack, thread)
        self._model = self._await(self._load(bundle.asset))

    def array(self, array: np.ndarray) -> Any:
        return self._library.NDArray(np.ascontiguousarray(array))

    def call(
        self, name: str, length: int, inputs: Mapping[str, Any], states: Mapping[str, Any]
    ) -> np.ndarray:
        """Call a function for `length` tokens (0: a step), which writes into the states; return its logits."""
        function = self.function(name, length)
        outputs = self._await(function(dict(inputs), state=dict(states)))
        return outputs["logits"].numpy()

    def function(self, name: str, length: int) -> Any:
        """Return a function, which is kept once it is loaded; raise `AFMError` if it takes other arrays."""
        if name not in self._functions:
            try:
                function = self._model.load_function(name)
            except (KeyError, RuntimeError) as error:
                raise self._failed(error) from None
            self._check(name, length, function.desc)
            self._functions[name] = function
        return self._functions[name]

    def _check(self, name: str, length: int, described: Any) -> None:
        """Raise unless a function has the inputs and states that the bundle's description means."""
        bundle = self._bundle
        wanted: dict[str, tuple[int, ...]] = {"tokens": (1, length or 1), "position": (1,)}
        if length:
            wanted["count"] = (1,)
        if name == bundle.function_names(INPUTS)[length]:
            wanted |= dict(adapter_inputs(*bundle.check_takes_adapters()))
        found = {
            each: tuple(described.input_descriptor(each).shape) for each in described.input_names
        }
        states = {
            each: tuple(described.state_descriptor(each).shape) for each in described.state_names
        }
        shape = bundle.state_shape()
        if found != wanted or states != {"keys": shape, "values": shape}:
            raise AFMError(
                f"{self._path}: {name} takes other arrays than the bundle's config says. Make the bundle again "
                "with afm-mlx convert --to coreai."
            )

    async def _load(self, asset: Path) -> Any:
        return await self._stack.enter_async_context(self._asset.load(asset).executable())

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except RuntimeError as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> AFMError:
        return AFMError(f"Core AI can't run {self._path}: {reason_of(error)}")


def _end(loop: asyncio.AbstractEventLoop, stack: AsyncExitStack, thread: threading.Thread) -> None:
    """Release the compiled asset, and end the thread and the event loop's other threads."""
    for closing in (stack.aclose(), loop.shutdown_default_executor()):
        asyncio.run_coroutine_threadsafe(closing, loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
