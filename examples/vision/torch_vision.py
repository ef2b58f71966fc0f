"""The vision encoder and adaptor in PyTorch, where training steps on a CPU are much faster than MLX's.

It computes what `afm_mlx.vision` computes; `tests/examples` compares the two. Two arrangements save time and
change no result:

- Patches stand in the order of their windows from the first layer to the last.
- The adaptor's projection, convolution and pooling are linear, so pooling comes first: the shifted patches are
  pooled for each place of the convolution's kernel, and the products are over pooled tokens, not over patches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from afm_mlx.vision_config import AdaptorConfig, VisionConfig

CONFIG = VisionConfig(
    image_token_id=1,  # <unk>: a vocabulary with bytes has no use for it
    image_size=84,
    rapid_size=28,
    position_size=56,
    patch_size=4,
    hidden_dim=64,
    num_layers=6,
    num_heads=4,
    mlp_dim=256,
    window_size=7,
    global_layers=(1, 3, 5),
    adaptor=AdaptorConfig(num_heads=4, mlp_dim=256, pool_grid=6, rapid_pool_grid=3),
)
SMALL = replace(CONFIG, image_size=56, adaptor=replace(CONFIG.adaptor, pool_grid=4))
"""The config for pictures of 56 pixels: four windows, and 16 tokens as far apart as the 36 of 84 pixels."""


class Block(nn.Module):
    """A pre-norm transformer layer over (B, N, C), with exact GELU."""

    def __init__(self, width: int, heads: int, mlp: int, eps: float):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, eps)
        self.attn = nn.ModuleDict(
            {"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)}
        )
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, mlp), "fc2": nn.Linear(mlp, width)})

    def attention(self, x: Tensor) -> Tensor:
        """Return the term that attention adds to x, (B, N, C)."""
        b, n, c = x.shape
        q, k, v = (
            self.attn["qkv"](self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.attn["proj"](y.transpose(1, 2).reshape(b, n, c))

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.feed_forward(x)


class Encoder(nn.Module):
    """A ViTDet with Register-Window attention, over images whose sides are multiples of a window."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        c, side = config.hidden_dim, config.position_size // config.patch_size
        self.patch_embed = nn.Linear(3 * config.patch_size**2, c)
        self.pos_embed = nn.Parameter(torch.randn(side, side, c) * 0.02)
        self.registers = nn.Parameter(torch.randn(config.num_registers, c) * 0.02)
        sizes = c, config.num_heads, config.mlp_dim, config.layer_norm_eps
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(c, config.layer_norm_eps)

    def forward(self, images: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return features (B, N, C) of the patches of images (B, S, S, 3), in the order of windows.

        `kept` (n,) are indices of the patches of a window to compute, for all windows alike; N is then
        n times the windows.
        """
        p, w = self.config.patch_size, self.config.window_size
        b, size = images.shape[:2]
        side, across = size // p, size // p // w
        windows = across * across
        x = images.view(b, side, p, side, p, 3).permute(0, 1, 3, 2, 4, 5).reshape(b, -1, 3 * p * p)
        order = window_order(side, w)
        positions = self.positions(side)
        if kept is not None:
            order = order.view(windows, -1)[:, kept].flatten()
        x = self.patch_embed(x[:, order]) + positions[order]
        n, c = x.shape[1] // windows, x.shape[-1]
        r = self.registers.expand(b, -1, -1)
        count = r.shape[1]
        for index, block in enumerate(self.blocks):
            if index in self.config.global_layers or windows == 1:
                joint = block(torch.cat([r, x], 1))
                r, x = joint[:, :count], joint[:, count:]
                continue
            copies = r[:, None].expand(-1, windows, -1, -1)
            inside = torch.cat([copies, x.view(b, windows, n, c)], 2).flatten(0, 1)
            y = block.attention(inside).view(b, windows, count + n, c)
            r = r + y[:, :, :count].mean(1)
            x = x + y[:, :, count:].reshape(b, -1, c)
            joint = torch.cat([r, x], 1)
            joint = joint + block.feed_forward(joint)
            r, x = joint[:, :count], joint[:, count:]
        return self.norm(x)

    def positions(self, side: int) -> Tensor:
        """Return the position table (side * side, C), resized bicubically."""
        table = self.pos_embed[None].permute(0, 3, 1, 2)
        if side != table.shape[-1]:
            table = F.interpolate(table, (side, side), mode="bicubic", align_corners=False)
        return table.permute(0, 2, 3, 1).reshape(side * side, -1)


@cache
def window_order(side: int, window: int) -> Tensor:
    """Return the row-major indices (side * side,) of patches in the order of their windows."""
    across = side // window
    index = torch.arange(side * side).view(across, window, across, window)
    return index.permute(0, 2, 1, 3).flatten()


class Adaptor(nn.Module):
    """A transformer layer, a projection, a convolution and average pooling, (B, N, C) to (B, n, hidden)."""

    def __init__(self, config: VisionConfig, hidden: int):
        super().__init__()
        self.config, adaptor = config, config.adaptor
        width = config.hidden_dim
        self.layer = Block(width, adaptor.num_heads, adaptor.mlp_dim, config.layer_norm_eps)
        self.proj = nn.Linear(width, hidden)
        self.conv = nn.Linear(9 * hidden, hidden, bias=False)  # a kernel of 3 x 3, one product

    def forward(self, x: Tensor, grid: int) -> Tensor:
        """Return tokens (B, grid * grid, hidden) of patches in the order of windows."""
        x = self.layer(x)
        side = round(x.shape[1] ** 0.5)
        x = F.pad(x, (0, 1), value=1.0)  # a channel of ones: the projection's bias
        pooled = torch.einsum("tgn,bnc->btgc", _pools(side, grid, self.config.window_size), x)
        weight = torch.cat([self.proj.weight, self.proj.bias[:, None]], 1)  # (hidden, C + 1)
        taps = torch.einsum("oti,ic->tco", self.conv.weight.unflatten(1, (9, -1)), weight)
        return torch.einsum("btgc,tco->bgo", pooled, taps)


@cache
def _pools(side: int, grid: int, window: int) -> Tensor:
    """Return averaging matrices (9, grid * grid, side * side), one for each shift of a 3 x 3 kernel.

    Pooling by tamm's rule: stride = side // grid, kernel = side - (grid - 1) * stride.
    """
    stride = side // grid
    kernel = side - (grid - 1) * stride
    rows = torch.zeros(3, grid, side)
    for shift in range(3):
        for cell in range(grid):
            for place in range(cell * stride, cell * stride + kernel):
                if 0 <= (source := place + shift - 1) < side:
                    rows[shift, cell, source] += 1 / kernel
    pools = torch.einsum("kgy,lhx->klghyx", rows, rows).reshape(9, grid * grid, side * side)
    return pools[:, :, window_order(side, window)]
