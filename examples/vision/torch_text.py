"""The frozen text model in PyTorch with a LoRA adapter: the numbers of a model folder, dequantized.

Only what training of the vision part needs: the beginning that all chats share is computed for one row, and the
reuse blocks run for chosen tokens alone. Gradients reach the embeddings and the adapter. `tests/examples`
compares it with `afm_mlx`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch
from mlx.utils import tree_flatten
from torch import Tensor, nn
from torch.nn import functional as F

import afm_mlx
from afm_mlx.adapters.target_modules import TEXT, target_modules

RANK, SCALE = 16, 1.0  # of the adapter


class AdaptedText(nn.Module):
    """A frozen text model with a LoRA adapter, behind the tokens `beginning`, which are the same in all rows.

    Parameters are the adapter's: A (K, rank) and B (rank, N) of each linear layer, or of each projection of a
    fused one, by the names of an adapter's file.
    """

    def __init__(self, model: afm_mlx.Model, beginning: Sequence[int], rank: int, scale: float):
        super().__init__()
        args = self.args = model.args
        self.weights = float_weights(model)
        self.embedding = self.weights["model.embedding.weight"]
        self.beginning, self.scale = torch.tensor([list(beginning)]), scale
        half = args.hidden_dim // args.num_heads // 2
        periods = args.rope_theta ** (-torch.arange(half) / half)
        angles = torch.arange(args.context_length)[:, None] * periods
        self.cos, self.sin = angles.cos(), angles.sin()
        self.pairs: dict[str, list[str]] = {}  # of each layer, its pairs' suffixes
        self.lora = nn.ParameterDict()
        for target in target_modules(model):
            if target.part != TEXT:
                continue
            self.pairs[target.path] = list(target.shapes)
            for end, (inputs, outputs) in target.shapes.items():
                a = torch.randn(inputs, rank) * inputs**-0.5
                self.lora[key_of(f"{target.path}.lora_a{end}")] = nn.Parameter(a)
                b = torch.zeros(rank, outputs)
                self.lora[key_of(f"{target.path}.lora_b{end}")] = nn.Parameter(b)

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapter's tensors by their names in a file."""
        return {name.replace("/", "."): each for name, each in self.lora.items()}

    def forward(self, h: Tensor, targets: Tensor) -> Tensor:
        """Return logits (B, T, vocabulary) at `targets` (B, T), indices into the embeddings h (B, L, D)."""
        _, length, width = h.shape
        start = self.beginning.shape[1]
        _, shared = self._write(self.embedding[self.beginning], 0, None)
        h, written = self._write(h, start, shared)
        k, v = written[-1]
        h = h.gather(1, targets[..., None].expand(-1, -1, width))
        sees = torch.arange(start + length) <= (start + targets)[..., None]
        for index in range(self.args.num_kv_reuse_layers):
            name = f"model.kv_reuse_layers.{index}"
            x = self._norm(h, f"{name}.input_layernorm")
            q = self._heads(self._linear(x, f"{name}.self_attn.q_proj"))
            q = self._rope_norm(q, targets + start, f"{name}.self_attn.q_norm")
            h = self._output(h, q, k, v, name, attn_mask=sees[:, None])
        h = self._norm(h, "model.output_norm")
        return h @ self.embedding.T

    def _write(
        self, h: Tensor, start: int, shared: list[tuple[Tensor, Tensor]] | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Run the writing blocks; return states, and the keys and values of each with the `shared` ones."""
        b, length, _ = h.shape
        args = self.args
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
            if shared is not None:
                before = shared[index]
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
        y = F.linear(x, self.weights[f"{name}.weight"])
        added = [
            x @ self.lora[key_of(f"{name}.lora_a{end}")] @ self.lora[key_of(f"{name}.lora_b{end}")]
            for end in self.pairs[name]
        ]
        return y + self.scale * (added[0] if len(added) == 1 else torch.cat(added, -1))

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


def key_of(name: str) -> str:
    """Return the key of a tensor in a `ParameterDict`, whose keys have no dots."""
    return name.replace(".", "/")


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
