"""Running a Core AI bundle by Apple's runtime, on a Mac or on Linux: prompts to logits."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from afm_mlx.coreai.adapter_file import read_adapter_arrays
from afm_mlx.coreai.availability import import_coreai
from afm_mlx.coreai.bundle import ENCODERS, IMAGE, INPUTS, CoreAIBundle, adapter_inputs
from afm_mlx.errors import AFMError, reason_of
from afm_mlx.model.exported_model import ExportedModel

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

_INT32 = np.int32


class CoreAIModel(ExportedModel):
    """A loaded bundle of `afm-mlx convert --to coreai`, with the keys and values of one conversation.

        model = CoreAIModel("nano", adapter="nano/adapters/triage.safetensors")
        for token in model.greedy(prompt, max_tokens=100, end_tokens={2}):
            ...

    A bundle of a model that takes images encodes them, too. In a prompt, an image is as many image tokens as it
    has features:

        features = model.encode(read_image(data, model.bundle.vision_config, "balanced"))
        model.show(features)
        image = [model.bundle.vision_config.image_token_id] * len(features)
        answer = list(model.greedy([*before, *image, *behind], max_tokens=100))

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
        self._features = np.zeros((0, self.bundle.config.hidden_dim), self.bundle.dtype)
        self._use(*found)

    def encode(self, image: PromptImage) -> np.ndarray:
        """Return the features (tokens, hidden_dim) of an image, in the order of its tokens in a prompt.

        Adapters leave features as they are. Features of one image may be shown many times.

        Raises:
            AFMError: if the bundle was made of a model without an image encoder.
        """
        self._check_takes_images()
        name = ENCODERS["rapid" if image.mode == "rapid" else "balanced"]
        tiles = [self._runtime.array(tile[None].astype(np.float32)) for tile in image.tiles]
        return np.concatenate([self._runtime.encode(name, tile) for tile in tiles])

    def show(self, features: np.ndarray) -> None:
        """Queue features (tokens, hidden_dim) for the image tokens of later prompts, in the order of calls.

        A prompt takes features for its image tokens; an image token without features is an error.

        Raises:
            AFMError: if the bundle was made of a model without an image encoder, or for features of another
                width.
        """
        self._check_takes_images()
        width = self.bundle.config.hidden_dim
        if features.ndim != 2 or features.shape[1] != width:
            raise AFMError(
                f"Features have the shape {list(features.shape)}; [tokens, {width}] is needed, as `encode` "
                "returns them."
            )
        self._features = np.concatenate([self._features, features.astype(self.bundle.dtype)])

    def _check_takes_images(self) -> None:
        if self.bundle.vision_config is None:
            raise AFMError(
                f"{self.bundle.path} takes no images: it was made of a model without an image encoder."
            )

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
        name, shown = self._names[length], 0
        if (vision := self.bundle.vision_config) is not None:
            is_image = tokens == vision.image_token_id
            is_image[int(more["count"][0]) if "count" in more else 1 :] = False  # padding
            if shown := int(is_image.sum()):
                name = f"{IMAGE}{name}"
                own["features"] = self._rows_of(is_image, shown)
        arrays = {each: self._runtime.array(array) for each, array in own.items()}
        logits = self._runtime.call(name, length, {**arrays, **self._adapter}, self._states)
        self._features = self._features[shown:]
        return np.array(logits, np.float32).reshape(-1)

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        ids, vision = super()._checked(tokens), self.bundle.vision_config
        count = 0 if vision is None else int((ids == vision.image_token_id).sum())
        if len(self._features) < count:
            raise AFMError(
                f"{count} image tokens have {len(self._features)} features; one for each is needed. Call "
                "`show` with what `encode` returned for each image of the prompt."
            )
        return ids

    def _rows_of(self, is_image: np.ndarray, count: int) -> np.ndarray:
        """Return rows (L, hidden_dim), with features for `count` image tokens, and zeros."""
        rows = np.zeros((len(is_image), self._features.shape[1]), self._features.dtype)
        rows[is_image] = self._features[:count]
        return rows


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

    def encode(self, name: str, colours: Any) -> np.ndarray:
        """Call a function that encodes a tile; return its features."""
        wanted = {"colours": tuple(colours.shape)}
        outputs = self._await(self._loaded(name, wanted, {})({"colours": colours}))
        return outputs["features"].numpy()

    def function(self, name: str, length: int) -> Any:
        """Return a function, which is kept once it is loaded; raise `AFMError` if it takes other arrays."""
        bundle = self._bundle
        wanted: dict[str, tuple[int, ...]] = {"tokens": (1, length or 1), "position": (1,)}
        if length:
            wanted["count"] = (1,)
        if name.startswith(IMAGE):
            wanted["features"] = (length or 1, bundle.config.hidden_dim)
        if name.removeprefix(IMAGE) == bundle.function_names(INPUTS)[length]:
            wanted |= dict(adapter_inputs(*bundle.check_takes_adapters()))
        return self._loaded(name, wanted, dict.fromkeys(("keys", "values"), bundle.state_shape()))

    def _loaded(self, name: str, inputs: Mapping[str, Any], states: Mapping[str, Any]) -> Any:
        """Return a function, which is kept; raise `AFMError` unless its arrays have these shapes."""
        if name not in self._functions:
            try:
                function = self._model.load_function(name)
            except (KeyError, RuntimeError) as error:
                raise self._failed(error) from None
            self._check(name, inputs, states, function.desc)
            self._functions[name] = function
        return self._functions[name]

    def _check(
        self, name: str, inputs: Mapping[str, Any], states: Mapping[str, Any], described: Any
    ) -> None:
        found = {
            each: tuple(described.input_descriptor(each).shape) for each in described.input_names
        }
        found_states = {
            each: tuple(described.state_descriptor(each).shape) for each in described.state_names
        }
        if found != inputs or found_states != states:
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
