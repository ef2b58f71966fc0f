"""The functions of an asset that encode pictures: the encoder and its adaptor, for one tile of one size.

| function | input | output |
| --- | --- | --- |
| `encode_image` | `colours` (1, S, S, 3) float32 of 0 to 255, S = `image_size` | `features` (n, hidden_dim) |
| `encode_image_rapid` | the same, S = `rapid_size` | the same |

n is the number of a tile's tokens.

A tile is one picture, so all sizes are constants: the order of patches in windows, the places that windows are
padded at, resized positions and the pooling matrices are computed when the function is built.

What is computed is `afm_mlx/vision`, layer by layer; norms in float32. Pooling is in the type of activations:
coreai-core 1.0.0b3 computes a wrong product of float32 with the cast result of a product of float16.
"""

from __future__ import annotations

from collections import OrderedDict

import mlx.core as mx
import numpy as np
from coreai._compiler.dialects import coreai
from coreai._compiler.ir import Value

from afm_mlx.converters.coreai.constants import Constants, tensor_type
from afm_mlx.converters.coreai.functions import axes, transposed
from afm_mlx.converters.graph_source import Float, Source
from afm_mlx.coreai.bundle import ENCODERS
from afm_mlx.vision.adaptor import averages, shifted
from afm_mlx.vision.encoder import Windows, resize_positions, window_order
from afm_mlx.vision_config import VisionConfig

_ENCODER, _ADAPTOR = "vision.encoder", "vision.adaptor"


class VisionFunctionBuilder:
    """Builds the functions that encode pictures; the module must be open.

    Args:
        source: the model's parameters.
        config: the sizes of the image part.
        constants: collects what the functions use.
        dtype: type of activations and features.
    """

    def __init__(
        self, source: Source, config: VisionConfig, constants: Constants, dtype: Float
    ) -> None:
        self._source, self._config = source, config
        self._constants, self._dtype = constants, dtype

    def encode(self, mode: str) -> None:
        """Build `encode_image` or `encode_image_rapid`, for the tiles of a mode."""
        name, size = ENCODERS[mode], self._config.tile_size(mode)
        graph = coreai.GraphOp(
            name=name,
            input_types=[tensor_type((1, size, size, 3), np.float32)],
            result_types=[],
            input_names=["colours"],
        )
        with graph.block:
            features = self._adapted(self._encoded(graph.arguments[0], mode), mode)
            graph.set_outputs_spec_from_dict(OrderedDict(features=features))

    # -- the encoder

    def _encoded(self, colours: Value, mode: str) -> Value:
        """Return the states (N, C) of a tile's patches, row by row."""
        config, grid = self._config, self._config.grid(mode)
        order, slots = window_order(grid, config.window_size)
        x = self._rows(self._patches(colours, grid), order, f"{mode}.order")
        x = self._linear(x, f"{_ENCODER}.patch_embed")
        table = mx.array(self._source.vector(f"{_ENCODER}.pos_embed"))
        positions = np.array(resize_positions(table, grid)).reshape(grid * grid, -1)[order]
        x = coreai.broadcasting_add(x, self._array(f"{mode}.positions", positions))
        count = config.num_registers
        if count:
            path = f"{_ENCODER}.registers"
            x = coreai.concat(0, [self._array(path, self._source.vector(path)), x])
        window = config.window_size
        windows = Windows(count, (-(-grid // window)) ** 2, slots, window * window)
        for index in range(config.num_layers):
            inside = None if index in config.global_layers else windows
            x = self._block(
                x, f"{_ENCODER}.blocks.{index}", config.num_heads, inside, f"{mode}.window"
            )
        back = np.argsort(order) + count
        return self._normed(self._rows(x, back, f"{mode}.back"), f"{_ENCODER}.norm")

    def _patches(self, colours: Value, grid: int) -> Value:
        """Return whitened pixels (N, 3 * patch_size^2) of patches, row by row."""
        images, p = self._config.images, self._config.patch_size
        scale = np.array([1 / (255 * std) for std in images.std], np.float32)
        shift = np.array([m / s for m, s in zip(images.mean, images.std, strict=True)], np.float32)
        x = coreai.broadcasting_mul(colours, self._constants.array("whiten.scale", scale))
        x = coreai.broadcasting_sub(x, self._constants.array("whiten.shift", shift))
        x = transposed(coreai.reshape(x, [grid, p, grid, p, 3]), 0, 2, 1, 3, 4)
        return coreai.cast(coreai.reshape(x, [grid * grid, 3 * p * p]), self._dtype)

    def _block(self, x: Value, path: str, heads: int, windows: Windows | None, key: str) -> Value:
        """Return x (L, C) after a transformer layer; `key` names the constants of windows."""
        normed = self._normed(x, f"{path}.norm1")
        padded = windows if windows is not None and windows.slots is not None else None
        if padded is not None:
            zeros = self._array("zero", np.zeros((1, x.type.shape[1])))
            tokens = padded.padded_tokens(x.type.shape[0])
            normed = self._rows(coreai.concat(0, [normed, zeros]), tokens, f"{key}.pad")
        y = self._attention(self._linear(normed, f"{path}.attn.qkv"), heads, windows)
        if padded is not None:
            y = self._rows(y, padded.unpadded_places(), f"{key}.unpad")
        x = coreai.broadcasting_add(x, self._linear(y, f"{path}.attn.proj"))
        hidden = self._linear(self._normed(x, f"{path}.norm2"), f"{path}.mlp.fc1")
        return coreai.broadcasting_add(x, self._linear(coreai.gelu(hidden), f"{path}.mlp.fc2"))

    def _attention(self, qkv: Value, heads: int, windows: Windows | None) -> Value:
        """Return attention's outputs (L, C) for projections (L, 3 * C) of one tile's tokens."""
        width = qkv.type.shape[1] // 3
        registers, count = self._config.num_registers, 1 if windows is None else windows.count
        if windows is not None and registers:
            sizes = _sizes(registers, qkv.type.shape[0] - registers)
            first, rest = coreai.split(qkv, sizes, 0)
            copies = coreai.tile(coreai.expand_dims(first, axes(0)), _sizes(count, 1, 1))
            qkv = coreai.concat(1, [copies, coreai.reshape(rest, [count, -1, 3 * width])])
        qkv = coreai.reshape(qkv, [count, -1, 3, heads, width // heads])
        length, shape = qkv.type.shape[1], [count * heads, qkv.type.shape[1], width // heads]
        parts = coreai.split(transposed(qkv, 2, 0, 3, 1, 4), _sizes(1, 1, 1), 0)
        q, k, v = (coreai.reshape(part, shape) for part in parts)
        q = coreai.broadcasting_mul(q, np.array((width // heads) ** -0.5, self._dtype))
        scores = coreai.broadcasting_batch_matmul(q, transposed(k, 0, 2, 1))
        y = coreai.broadcasting_batch_matmul(coreai.softmax(scores, -1), v)
        y = transposed(coreai.reshape(y, [count, heads, length, width // heads]), 0, 2, 1, 3)
        if windows is None or not registers:
            return coreai.reshape(y, [-1, width])
        y = coreai.reshape(y, [count, length, width])
        first, rest = coreai.split(y, _sizes(registers, length - registers), 1)
        mean = coreai.reduce_mean(coreai.cast(first, np.float32), [0])
        mean = coreai.cast(coreai.reshape(mean, [registers, width]), self._dtype)
        return coreai.concat(0, [mean, coreai.reshape(rest, [-1, width])])

    # -- the adaptor

    def _adapted(self, x: Value, mode: str) -> Value:
        """Return the features (n, hidden_dim) of a tile's patches (N, C)."""
        config, adaptor, grid = self._config, self._config.adaptor, self._config.grid(mode)
        size = config.token_grid(mode)
        if adaptor.kind == "space_to_channel":
            block, width = adaptor.block_size, config.hidden_dim
            square = np.full((size * block, size * block), grid * grid)  # past the grid: zeros
            square[:grid, :grid] = np.arange(grid * grid).reshape(grid, grid)
            places = square.reshape(size, block, size, block).swapaxes(1, 2).reshape(-1)
            zeros = self._array("zero", np.zeros((1, width)))
            x = self._rows(coreai.concat(0, [x, zeros]), places, f"{mode}.joined")
            x = coreai.reshape(x, [size * size, block * block * width])
            return self._linear(coreai.gelu(self._linear(x, f"{_ADAPTOR}.fc1")), f"{_ADAPTOR}.fc2")
        x = self._block(x, f"{_ADAPTOR}.layer", adaptor.num_heads, None, "")
        x = self._linear(x, f"{_ADAPTOR}.proj")
        x = coreai.reshape(x, [grid, grid, x.type.shape[1]])
        out = config.conv_grid(mode)
        average = averages(out, size)
        kernel, before = adaptor.conv_kernel, np.eye(out) if adaptor.conv_norm else average
        matrix = shifted(before.astype(np.float32), kernel, adaptor.conv_padding, grid)
        y = self._on_both_axes(matrix, x, kernel, f"{mode}.shifted")
        y = coreai.broadcasting_batch_matmul(y, self._constants.transposed(f"{_ADAPTOR}.conv"))
        if adaptor.conv_norm:
            y = self._scaled(coreai.cast(y, np.float32), 1e-5, f"{_ADAPTOR}.norm.weight")
            y = coreai.relu(coreai.cast(y, self._dtype))
            y = coreai.reshape(y, [out, out, y.type.shape[1]])
            y = self._on_both_axes(average, y, 1, f"{mode}.average")
        return y

    def _on_both_axes(self, matrix: np.ndarray, x: Value, kernel: int, key: str) -> Value:
        """Apply a matrix (m * kernel, G) to both axes of x (G, G, D); return (m * m, kernel^2 * D)."""
        grid, width = x.type.shape[1:]
        weights, rows = self._array(key, matrix), matrix.shape[0]
        y = coreai.reshape(x, [grid, grid * width])
        y = coreai.reshape(coreai.broadcasting_batch_matmul(weights, y), [rows, grid, width])
        y = coreai.broadcasting_batch_matmul(weights, y)
        size = rows // kernel
        y = transposed(coreai.reshape(y, [size, kernel, size, kernel, width]), 0, 2, 1, 3, 4)
        return coreai.reshape(y, [size * size, kernel * kernel * width])

    # -- parts of layers

    def _linear(self, x: Value, path: str) -> Value:
        """Return x times a matrix, plus its bias, which all but `qkv` have and that by `qkv_bias`."""
        y = coreai.broadcasting_batch_matmul(x, self._constants.transposed(path))
        if path.endswith(".qkv") and not self._config.qkv_bias:
            return y
        bias = f"{path}.bias"
        return coreai.broadcasting_add(y, self._array(bias, self._source.vector(bias)))

    def _normed(self, x: Value, path: str) -> Value:
        """Return LayerNorm of x."""
        x = coreai.cast(x, np.float32)
        x = coreai.broadcasting_sub(x, coreai.reduce_mean(x, [-1]))
        x = self._scaled(x, self._config.layer_norm_eps, f"{path}.weight")
        bias = self._constants.array(f"{path}.bias", self._source.vector(f"{path}.bias"))
        return coreai.cast(coreai.broadcasting_add(x, bias), self._dtype)

    def _scaled(self, x: Value, eps: float, name: str) -> Value:
        """Return x over the root of its mean square, times the weight called `name`."""
        square = coreai.reduce_mean(coreai.broadcasting_mul(x, x), [-1])
        inverse = coreai.rsqrt(coreai.broadcasting_add(square, np.array(eps, np.float32)))
        weight = self._constants.array(name, self._source.vector(name))
        return coreai.broadcasting_mul(coreai.broadcasting_mul(x, inverse), weight)

    def _array(self, key: str, array: np.ndarray) -> Value:
        return self._constants.array(key, array.astype(self._dtype))

    def _rows(self, x: Value, index: np.ndarray, key: str) -> Value:
        """Return rows of x (L, C)."""
        return coreai.gather_nd(x, self._constants.array(key, index.astype(np.int32)[:, None]))


def _sizes(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.uint32)
