"""The image encoder: ViTDet whose windows share registers ("RW-ViTDet").

Patches x (N, C) of a tile are in K windows, and r (R, C) are the tile's registers. With LN before and residuals
around attention and MLP, as in any ViT,

    window layer:  [r_k', x_k'] = Attention([r, x_k]) for each window k;  x += x';  r += mean_k r_k'
    global layer:  [r', x']     = Attention([r, x_1, ..., x_K]);          x += x';  r += r'

so registers carry what one window knows to the others, one layer later. Registers are dropped at the end.

Notable choices:

- A tile's tokens are registers, then patches window by window, from the first layer to the last: windows are
  views, and global attention does not depend on the order. Windows of all tiles are one batch.
- A grid that is no multiple of the window is padded with zeros behind the norm, as in ViTDet: the padding takes
  part in the attention of windows, not in the global one.
- Matrices are `nn.Linear`, the patch embedding too, so all of them can be packed and adapted.

Source: ViTDet, arXiv 2203.16527; transformers' `VitDetModel` equals this encoder without registers and before
the final norm. The registers' role: arXiv 2507.13575. The formula is ours.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.kernels import KeyValues, attention, full_attention, gelu
from afm_mlx.vision_config import VisionConfig


class Windows:
    """The windows of a batch of tiles, each with a copy of its tile's registers.

    Args:
        registers: number R of a tile's registers.
        count: number K of a tile's windows.
        slots: (N,) the place of each patch among the K * n of padded windows; pass None if all are complete.
        size: number n of a padded window's places.
    """

    def __init__(self, registers: int, count: int, slots: np.ndarray | None = None, size: int = 0):
        self.registers, self.count, self.slots, self.size = registers, count, slots, size

    def pad(self, x: mx.array) -> mx.array:
        """Map tokens (T, R + N, C) to (T, R + K * n, C), with zeros where a window has no patch."""
        if self.slots is None:
            return x
        zero = mx.zeros((x.shape[0], 1, x.shape[2]), x.dtype)
        index = mx.array(self.padded_tokens(x.shape[1]))
        return mx.take(mx.concatenate([x, zero], axis=1), index, axis=1)

    def unpad(self, x: mx.array) -> mx.array:
        """Undo `pad`."""
        if self.slots is None:
            return x
        return mx.take(x, mx.array(self.unpadded_places()), axis=1)

    def padded_tokens(self, length: int) -> np.ndarray:
        """Return the token (R + K * n,) int32 in each place of padded windows; `length` stands for zeros.

        `length` is R + N, the number of tokens without padding.
        """
        source = np.full(self.count * self.size, length, np.int32)
        source[self.slots] = np.arange(self.registers, length)
        return np.concatenate([np.arange(self.registers, dtype=np.int32), source])

    def unpadded_places(self) -> np.ndarray:
        """Return the place (R + N,) int32 of each token in padded windows."""
        assert self.slots is not None
        places = [np.arange(self.registers), self.slots + self.registers]
        return np.concatenate(places).astype(np.int32)

    def split(self, x: mx.array) -> mx.array:
        """Map tokens (T, R + K * n, D) to windows (T * K, R + n, D)."""
        registers, patches = x[:, : self.registers], x[:, self.registers :]
        patches = patches.reshape(x.shape[0], self.count, -1, x.shape[2])
        if not self.registers:
            return patches.flatten(0, 1)
        shape = (x.shape[0], self.count, self.registers, x.shape[2])
        copies = mx.broadcast_to(registers[:, None], shape)
        return mx.concatenate([copies, patches], axis=2).flatten(0, 1)

    def join(self, y: mx.array) -> mx.array:
        """Undo `split`, with each register's mean over the windows."""
        y = y.reshape(-1, self.count, *y.shape[1:])
        patches = y[:, :, self.registers :].flatten(1, 2)
        if not self.registers:
            return patches
        return mx.concatenate([y[:, :, : self.registers].mean(axis=1), patches], axis=1)


class Attention(nn.Module):
    """Multi-head attention with one matrix for queries, keys and values."""

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def __call__(self, x: mx.array, windows: Windows | None = None) -> mx.array:
        """Map tokens (T, L, C) to the same shape: all of a tile attend to each other, or its windows do."""
        if windows is None:
            return self.proj(self._attend(self.qkv(x)))
        qkv = self.qkv(windows.pad(x))
        return self.proj(windows.unpad(windows.join(self._attend(windows.split(qkv)))))

    def _attend(self, qkv: mx.array) -> mx.array:
        batch, length, _ = qkv.shape
        heads = qkv.reshape(batch, length, 3 * self.num_heads, -1).swapaxes(1, 2)
        q, kv = heads[:, : self.num_heads], KeyValues(heads[:, self.num_heads :])
        # The kernel has no gradient.
        y = attention(q, kv, None) if self.training else full_attention(q, kv)
        return y.swapaxes(1, 2).reshape(batch, length, -1)


def activation(x: mx.array, training: bool) -> mx.array:
    """Return the exact GELU, by MLX's differentiable operations in training."""
    return nn.gelu(x) if training else gelu(x)


class MLP(nn.Module):
    """`fc2(gelu(fc1(x)))`, with the exact GELU."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, dim)

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(activation(self.fc1(x), self.training))


class Block(nn.Module):
    """A transformer layer: `x += attn(norm1(x)); x += mlp(norm2(x))`."""

    def __init__(self, dim: int, num_heads: int, mlp_dim: int, eps: float, qkv_bias: bool = True):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = Attention(dim, num_heads, qkv_bias)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = MLP(dim, mlp_dim)

    def __call__(self, x: mx.array, windows: Windows | None = None) -> mx.array:
        """Map tokens (T, L, C) to the same shape; see `Attention`."""
        x = x + self.attn(self.norm1(x), windows)
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nn.Module):
    """A ViTDet with registers: tiles of pixels to a vector for each patch.

    Args:
        config: the sizes. Weights start random.
    """

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        dim, positions = config.hidden_dim, config.position_size // config.patch_size
        self.patch_embed = nn.Linear(3 * config.patch_size**2, dim)
        self.pos_embed = mx.random.normal((positions, positions, dim), scale=0.02)
        if config.num_registers:
            self.registers = mx.random.normal((config.num_registers, dim), scale=0.02)
        sizes = (dim, config.num_heads, config.mlp_dim, config.layer_norm_eps, config.qkv_bias)
        self.blocks = [Block(*sizes) for _ in range(config.num_layers)]
        self.norm = nn.LayerNorm(dim, eps=config.layer_norm_eps)

    def __call__(self, pixels: mx.array) -> mx.array:
        """Map whitened pixels (T, S, S, 3) of T tiles to states (T, S / patch, S / patch, C).

        S is a multiple of the patch; positions are resized to it.
        """
        return self.grid_of(self.hidden(pixels))

    def grid_of(self, x: mx.array) -> mx.array:
        """Return the output (T, S / patch, S / patch, C) for `hidden` states of all patches."""
        x, grid = self.norm(x), math.isqrt(x.shape[1])
        back = np.argsort(window_order(grid, self.config.window_size)[0]).astype(np.int32)
        return mx.take(x, mx.array(back), axis=1).reshape(-1, grid, grid, x.shape[-1])

    def hidden(self, pixels: mx.array, kept: mx.array | None = None) -> mx.array:
        """Return the states of patches (T, N, C) before the final norm, window by window.

        Args:
            pixels: (T, S, S, 3).
            kept: (T, K, m) places in its window of the m patches that each of K windows keeps, for training on
                a part of them (FLIP, arXiv 2212.00794). N is K * m then; positions are the whole tile's. The
                grid must be a multiple of the window. Pass None to keep all.
        """
        *_, x = self.states(pixels, kept)
        return x

    def states(self, pixels: mx.array, kept: mx.array | None = None) -> Iterator[mx.array]:
        """Yield the states of patches (T, N, C) behind each block, the last of which `hidden` returns."""
        config = self.config
        grid = pixels.shape[1] // config.patch_size
        order, slots = window_order(grid, config.window_size)
        x = self.patch_embed(patches(pixels, config.patch_size).astype(self.pos_embed.dtype))
        positions = resize_positions(self.pos_embed, grid).reshape(-1, x.shape[-1])
        x = mx.take(x + positions, mx.array(order), axis=1)
        count, size = math.ceil(grid / config.window_size) ** 2, config.window_size**2
        if kept is not None:
            if slots is not None:
                raise ValueError(
                    f"[VisionEncoder] a grid of {grid} x {grid} patches has incomplete windows of "
                    f"{config.window_size} x {config.window_size}; `kept` needs complete ones."
                )
            x = x.reshape(x.shape[0], count, size, -1)
            x = mx.take_along_axis(x, kept[..., None], axis=2).flatten(1, 2)
        windows = Windows(config.num_registers, count, slots, size)
        if config.num_registers:
            shape = (x.shape[0], *self.registers.shape)
            x = mx.concatenate([mx.broadcast_to(self.registers, shape), x], axis=1)
        for index, block in enumerate(self.blocks):
            x = block(x, None if index in config.global_layers else windows)
            yield x[:, config.num_registers :]


def patches(pixels: mx.array, size: int) -> mx.array:
    """Map pixels (T, S, S, 3) to patches (T, (S / size)^2, size * size * 3), row by row."""
    tiles, side = pixels.shape[0], pixels.shape[1] // size
    x = pixels.reshape(tiles, side, size, side, size, 3).swapaxes(2, 3)
    return x.reshape(tiles, side * side, -1)


def resize_positions(table: mx.array, size: int) -> mx.array:
    """Resize a table of positions (P, P, C) to (size, size, C) by bicubic interpolation, as torch does."""
    if table.shape[0] == size:
        return table
    matrix = mx.array(_cubic_matrix(table.shape[0], size))
    rows = (matrix @ table.flatten(1)).reshape(size, *table.shape[1:])
    return (matrix @ rows).astype(table.dtype)


@functools.lru_cache(maxsize=32)
def _cubic_matrix(old: int, new: int) -> np.ndarray:
    """Return (new, old) float32 weights of cubic interpolation: a = -0.75, edges repeated."""
    a, matrix = -0.75, np.zeros((new, old))
    centers = (np.arange(new) + 0.5) * old / new - 0.5
    first = np.floor(centers)
    for step in range(-1, 3):
        x = np.abs(centers - first - step)
        inner = (a + 2) * x**3 - (a + 3) * x**2 + 1
        outer = a * (x**3 - 5 * x**2 + 8 * x - 4)
        columns = np.clip(first + step, 0, old - 1).astype(int)
        np.add.at(matrix, (np.arange(new), columns), np.where(x <= 1, inner, outer))
    return matrix.astype(np.float32)


@functools.lru_cache(maxsize=32)
def window_order(grid: int, window: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the patches (N,), row by row in the grid, in the order of windows; and their slots in these.

    Slots count the places of all windows, padding included; they are None if no window is padded.
    """
    side = math.ceil(grid / window)
    places = np.full((side * window, side * window), -1, np.int32)
    places[:grid, :grid] = np.arange(grid * grid).reshape(grid, grid)
    ordered = places.reshape(side, window, side, window).swapaxes(1, 2).reshape(-1)
    slots = np.flatnonzero(ordered >= 0)
    return ordered[slots], None if slots.size == ordered.size else slots
