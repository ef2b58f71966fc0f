"""The frozen text model in PyTorch: the numbers of a model folder, dequantized, behind a fixed beginning.

Only what training of the vision part needs: tokens that follow the beginning all chats share, whose keys and
values are computed once, and logits of chosen tokens, for which alone the reuse blocks run. Gradients reach
the embeddings. `tests/examples` compares it with `afm_mlx`.
"""

from __future__ import annotations

from collections.abc import Sequence

import afm_mlx
import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from torch import Tensor
from torch.nn import functional as F


class FrozenText:
    """A text model behind the tokens `beginning`, which are the same in all rows."""

    def __init__(self, model: afm_mlx.Model, beginning: Sequence[int]):
        args = self.args = model.args
        self.weights = float_weights(model)
        self.embedding = self.weights["model.embedding.weight"]
        half = args.hidden_dim // args.num_heads // 2
        periods = args.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(args.context_length)[:, None] * periods
        self.cos, self.sin = angles.cos(), angles.sin()
        self.start = 0
        self.shared: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            h = self.embedding[torch.tensor([list(beginning)])]
            self.shared = self._write(h)[1]
        self.start = len(beginning)

    def __call__(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary) at `targets` (B, T), indices into the embeddings h (B, L, D)."""
        b, length, width = h.shape
        h, written = self._write(h)
        k, v = written[-1]
        h = h.gather(1, targets[..., None].expand(-1, -1, width))
        sees = torch.arange(self.start + length) <= (self.start + targets)[..., None]
        for index in range(self.args.num_kv_reuse_layers):
            name = f"model.kv_reuse_layers.{index}"
            x = self._norm(h, f"{name}.input_layernorm")
            q = self._heads(self._linear(x, f"{name}.self_attn.q_proj"))
            q = self._rope_norm(q, targets + self.start, f"{name}.self_attn.q_norm")
            h = self._output(h, q, k, v, name, attn_mask=sees[:, None])
        h = self._norm(h, "model.output_norm")
        return h @ self.embedding.T

    def _write(self, h: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the writing blocks; return states, and the keys and values of each with the beginning's."""
        b, length, _ = h.shape
        args, start = self.args, self.start
        places = torch.arange(start, start + length)
        sees = torch.arange(start + length) <= places[:, None]
        written = []
        for index in range(args.num_layers - args.num_kv_reuse_layers):
            name = f"model.layers.{index}"
            x = self._norm(h, f"{name}.input_layernorm")
            heads = self._heads(self._linear(x, f"{name}.self_attn.qkv_proj"))
            q, k, v = heads.split([args.num_heads, args.num_kv_heads, args.num_kv_heads], 1)
            q = self._rope_norm(q, places, f"{name}.self_attn.q_norm")
            k = self._rope_norm(k, places, f"{name}.self_attn.k_norm")
            k = self._rounded(k, f"{name}.self_attn.quant_key_scale")
            v = self._rounded(v, f"{name}.self_attn.quant_value_scale")
            if self.shared:
                before = self.shared[index]
                k, v = (
                    torch.cat([old.expand(b, -1, -1, -1), new], 2)
                    for old, new in zip(before, (k, v), strict=True)
                )
            written.append((k, v))
            h = self._output(h, q, k, v, name, attn_mask=sees)
        return h, written

    def _output(
        self, h: Tensor, q: Tensor, k: Tensor, v: Tensor, name: str, attn_mask: Tensor
    ) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, enable_gqa=True)
        h = h + self._linear(y.transpose(1, 2).flatten(2), f"{name}.self_attn.out_proj")
        x = self._norm(h, f"{name}.post_attention_layernorm")
        gate, up = (self._linear(x, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return h + self._linear(F.silu(gate) * up, f"{name}.mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.args.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.args.hidden_dim // self.args.num_heads).transpose(1, 2)

    def _rope_norm(self, x: Tensor, places: Tensor, name: str) -> Tensor:
        """Rotate adjacent pairs of heads (B, H, L, d) by their places (L,) or (B, L), then normalize them."""
        cos, sin = self.cos[places], self.sin[places]
        if places.ndim == 2:
            cos, sin = cos[:, None], sin[:, None]
        one, other = x.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([one * cos - other * sin, one * sin + other * cos], -1).flatten(-2)
        return self._norm(turned, name)

    def _rounded(self, x: Tensor, name: str) -> Tensor:
        """Return x on its int8 grid; the gradient is of x where the grid holds it."""
        if (scale := self.weights.get(name)) is None:
            return x
        lowest, highest = -128 * scale, 127 * scale
        clipped = x.clamp(lowest, highest)
        return clipped + ((clipped / scale).round() * scale - clipped).detach()


def float_weights(model: afm_mlx.Model) -> dict[str, Tensor]:
    """Return a model's numbers as float32 tensors by their names, packed layers dequantized."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "dequantize"):
            found[f"{name}.weight"] = module.dequantize()
    for name, array in tree_flatten(model.parameters()):
        if name.rpartition(".")[0] + ".weight" not in found:
            found[name] = array
    return {
        name: torch.from_numpy(np.array(array.astype(mx.float32))) for name, array in found.items()
    }
