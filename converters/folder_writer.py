"""Writes the parameters of an AFM model into a model folder, whatever format they come from.

A source says where each parameter lies (`Parameter`). How it is written is decided here: packed, unpacked,
repacked in MLX's own format, cast, or copied. Weights go into the folder as a stream. Memory holds one packed
layer or one chunk of a float tensor, and those scales that go to the end of the file because their type is
narrower than that of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from afm_mlx.architecture import KV_SCALES, parameter_shapes
from afm_mlx.checkpoint.folder_texts import write_card, write_config
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.checkpoint.stored_tensor import TensorSpec
from afm_mlx.checkpoint.weights import write_weights
from afm_mlx.config import ModelConfig
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.layer_packing import PackedLayer, float_layer
from afm_mlx.converters.stored_parameters import StoredLayer
from afm_mlx.progress import Progress
from afm_mlx.quantization.float_to_codes import Rows
from afm_mlx.quantization.quantize_model import quantized_config, with_quantization

_OUR_KEYS = ("kv_bits", "context_length")


class Parameter(Protocol):
    """A float parameter of a checkpoint, read in parts."""

    @property
    def dtype(self) -> mx.Dtype: ...

    def rows(self) -> Rows:
        """A matrix, to be packed."""
        ...

    def chunks(self, dtype: mx.Dtype) -> Iterable[Any]:
        """All numbers, row-major, as bytes of `dtype`.

        Raises:
            CheckpointError: for NaN, infinity, and numbers that `dtype` can't hold.
        """
        ...


class FolderWriter:
    """The parameters of one model on their way into a folder.

    Args:
        config: the architecture.
        parameters: every parameter of `parameter_shapes`, by name.
        options: how the checkpoint is converted.

    Raises:
        AFMError: names the layer that can't be packed as asked for, or that mlx-lm has no format for.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Parameter | StoredLayer],
        options: ConversionOptions,
    ) -> None:
        self._config, self._options = config, options
        self._readers: dict[TensorSpec, Callable[[TensorSpec], Iterable[Any]]] = {}
        self._packed: list[PackedLayer] = []
        rules = options.afm_rules(config) if options.quantize else {}
        for name, shape in parameter_shapes(config).items():
            parameter, path = parameters[name], name.removesuffix(".weight")
            if isinstance(parameter, StoredLayer) and not options.dequantize:
                self._keep(parameter)
            elif path in rules:
                assert not isinstance(parameter, StoredLayer)
                rows, dtype = parameter.rows(), options.mlx_dtype
                self._pack(float_layer(path, rows, rules[path], dtype, options.for_mlx_lm))
            else:
                self._cast(name, shape, parameter)

    def _keep(self, layer: StoredLayer) -> None:
        if self._options.for_mlx_lm:
            self._pack(layer.in_mlx_format())
            return
        for part in layer.parts.values():
            self._cast(part.tensor.name, part.tensor.shape, part)

    def _pack(self, layer: PackedLayer) -> None:
        self._packed.append(layer)
        self._readers |= dict.fromkeys(layer.specs(), layer.read)

    def _cast(self, name: str, shape: tuple[int, ...], parameter: Parameter | StoredLayer) -> None:
        dtype = self._options.mlx_dtype
        if dtype is None:
            dtype = parameter.dtype
        elif name.endswith(KV_SCALES):
            dtype = mx.float32
        spec = TensorSpec(name, shape, dtype)
        self._readers[spec] = lambda spec: parameter.chunks(spec.dtype)

    def write_weights(self, folder: Path, progress: Progress | None = None) -> None:
        """Write the weight files."""
        write_weights(
            folder,
            list(self._readers),
            lambda spec: self._readers[spec](spec),
            total_parameters=self._config.num_parameters,
            progress=progress,
        )

    def write_texts(
        self, folder: Path, name: str, source: str, values: Mapping[str, Any], adapters: list[str]
    ) -> None:
        """Write `config.json` and the card, after the weights.

        Args:
            folder: the folder to write into.
            name: what the card calls the folder.
            source: the checkpoint's bare name.
            values: further content of `config.json`; keys of the architecture and of packed layers go over it.
            adapters: names of the adapters in the folder.
        """
        options, rules = self._options, {layer.path: layer.rule for layer in self._packed}
        stored = {} if options.dequantize else quantization_of(values, source)
        content = with_quantization({**values, **self._config.to_dict()}, stored)
        if rules:
            content = quantized_config(content, rules)
        if options.for_mlx_lm:
            content = {key: value for key, value in content.items() if key not in _OUR_KEYS}
        write_config(folder, content)
        exact = sum(layer.exact for layer in self._packed)
        note = (
            f"Of {len(self._packed)} packed layers, {exact} lay on a grid already and stay on it; the others "
            "were rounded to the nearest."
        )
        norm = next(spec for spec in self._readers if spec.name == "model.output_norm.weight")
        write_card(
            folder,
            name=name,
            source=source,
            config=self._config,
            dtype=norm.dtype,
            quantization=content.get("quantization"),
            note=note if options.quantize else "",
            adapters=adapters,
        )
