"""From the encoder's patches to tokens of the language model.

    conv:              pool(conv(proj(layer(x))))     with the option pool(relu(rms_norm(conv(...))))
    space_to_channel:  fc2(gelu(fc1(joined(x))))      of `block_size` x `block_size` neighbours

Notable choices:

- Averaging is a product with a small matrix for rows and one for columns. Without a norm between them,
  convolution and average are both linear: the inputs are averaged once for each place of the kernel, and the
  kernel is one product with the averages. That is 12 times less work for 42 x 42 patches and 12 x 12 tokens.
- The pool is tamm's "adaptive" one, which is not torch's: stride `n // m` and kernel `n - (m - 1) * stride`.

Source: tamm 0.2.0, `tamm/layers/vision` (`AdaptiveConvPooler`); the order of the layers is ours.
"""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.vision.encoder import Block, activation
from afm_mlx.vision_config import VisionConfig


class VisionAdaptor(nn.Module):
    """Layers from patches to tokens; see `AdaptorConfig`.

    Args:
        config: the sizes. Weights start random.
        text_dim: width of the language model.
    """

    def __init__(self, config: VisionConfig, text_dim: int):
        super().__init__()
        self.config = config
        dim, adaptor = config.hidden_dim, config.adaptor
        if adaptor.kind == "space_to_channel":
            self.fc1 = nn.Linear(adaptor.block_size**2 * dim, adaptor.mlp_dim)
            self.fc2 = nn.Linear(adaptor.mlp_dim, text_dim)
            return
        eps, bias = config.layer_norm_eps, config.qkv_bias
        self.layer = Block(dim, adaptor.num_heads, adaptor.mlp_dim, eps, bias)
        self.proj = nn.Linear(dim, text_dim)
        # (out, in) where in is a kernel's rows, columns and channels, in MLX's order of convolutions
        self.conv = nn.Linear(adaptor.conv_kernel**2 * text_dim, text_dim, bias=False)
        if adaptor.conv_norm:
            self.norm = nn.RMSNorm(text_dim, eps=1e-5)

    def __call__(self, x: mx.array) -> mx.array:
        """Map states (T, G, G, C) of tiles to tokens (T, n * n, text_dim), row by row.

        If G is the mode rapid's, n is that mode's `token_grid`, else the other modes'.
        """
        if self.config.adaptor.kind == "space_to_channel":
            hidden = self.fc1(space_to_channel(x, self.config.adaptor.block_size))
            return self.fc2(activation(hidden, self.training))
        tiles, grid = x.shape[:2]
        x = self.proj(self.layer(x.flatten(1, 2))).reshape(tiles, grid, grid, -1)
        mode = "rapid" if grid == self.config.grid("rapid") else "balanced"
        return self.pool(x, self.config.token_grid(mode))

    def pool(self, x: mx.array, size: int) -> mx.array:
        """Map (T, G, G, D) to (T, size * size, D): convolution, optional norm and ReLU, average."""
        adaptor = self.config.adaptor
        out = x.shape[1] + 2 * adaptor.conv_padding - adaptor.conv_kernel + 1
        average = averages(out, size)
        before = np.eye(out, dtype=np.float32) if adaptor.conv_norm else average
        kernel, padding = adaptor.conv_kernel, adaptor.conv_padding
        y = self.conv(_on_both_axes(shifted(before, kernel, padding, x.shape[1]), x, kernel))
        if adaptor.conv_norm:
            y = nn.relu(self.norm(y))
            y = _on_both_axes(average, y, 1)
        return y.flatten(1, 2)


def space_to_channel(x: mx.array, block: int) -> mx.array:
    """Map (T, G, G, C) to (T, n * n, block * block * C): neighbours in one vector, with zeros past the grid."""
    size = math.ceil(x.shape[1] / block)
    past = size * block - x.shape[1]
    x = mx.pad(x, [(0, 0), (0, past), (0, past), (0, 0)]) if past else x
    x = x.reshape(x.shape[0], size, block, size, block, -1).swapaxes(2, 3)
    return x.reshape(x.shape[0], size * size, -1)


@functools.lru_cache(maxsize=32)
def averages(old: int, new: int) -> np.ndarray:
    """Return the (new, old) float32 matrix of tamm's adaptive average pool over one axis."""
    stride = old // new
    kernel = old - (new - 1) * stride
    places = np.arange(old) - stride * np.arange(new)[:, None]
    return ((places >= 0) & (places < kernel)).astype(np.float32) / np.float32(kernel)


def shifted(matrix: np.ndarray, kernel: int, padding: int, size: int) -> np.ndarray:
    """Return (m * kernel, size): a row for each row of `matrix` (m, out) and each place of a kernel.

    Row i * kernel + k is row i applied to the inputs at place k of the kernel, without the padding around them.
    """
    rows, out = matrix.shape
    shifted = np.zeros((rows, kernel, size + 2 * padding), np.float32)
    for place in range(kernel):
        shifted[:, place, place : place + out] = matrix
    return shifted[:, :, padding : padding + size].reshape(rows * kernel, size)


def _on_both_axes(matrix: np.ndarray, x: mx.array, kernel: int) -> mx.array:
    """Apply a matrix (m * kernel, G) to both axes of x (T, G, G, D), in float32.

    Returns:
        (T, m, m, kernel * kernel * D), in the type of x.
    """
    weights = mx.array(matrix)
    rows = (weights @ x.flatten(2)).reshape(x.shape[0], weights.shape[0], *x.shape[2:])
    both = (weights @ rows).astype(x.dtype)  # (T, m * kernel, m * kernel, D)
    size = weights.shape[0] // kernel
    both = both.reshape(x.shape[0], size, kernel, size, kernel, -1).swapaxes(2, 3)
    return both.reshape(x.shape[0], size, size, -1)
