"""Blocks of mlx-lm's Llama and Qwen3 that run through this package's operations.

On a CPU, MLX has no kernels for norms, RoPE and attention, and computes each by some ten operations in a single
thread: a step of Qwen3-4B was 5,067 operations, and attention to 4,096 tokens four fifths of its time. In these
blocks, packed layers compute the norms and additions, SwiGLU is one operation, and so are QK-norm with RoPE
(20 microseconds instead of 83 for a token of Qwen3-0.6B's block) and attention over a `ZooKVCache`. On a GPU
the caches are mlx-lm's, and a step of one row takes 16 dispatches for each block of Qwen3 where mlx-lm takes
21, and 14 of Llama where it takes 19 (`tests/metal/zoo_steps.py`). Parameters are mlx-lm's, and so are the
calls of any other cache.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen3
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import Llama3RoPE

from afm_mlx.kernels import NewToken, norm_rope
from afm_mlx.model.fused_layers import Normed, feed_forward, project, project_each
from afm_mlx.model.zoo_kv_cache import ZooKVCache

_PERIODS = "_rope_periods"
"""Key of RoPE's periods in an attention layer; the underscore keeps them out of its parameters."""


class _ZooBlock:
    """A base of blocks that replaces the `__call__` of mlx-lm's class."""

    takes_zoo_kv_cache = True

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return hidden states (B, L, D) for hidden states of that shape."""
        block: Any = self
        y = _attention(block.self_attn, Normed(x, block.input_layernorm), mask, cache)
        x = project(block.self_attn.o_proj, y, residual=x)
        return feed_forward(block.mlp, Normed(x, block.post_attention_layernorm))


class LlamaBlock(_ZooBlock, llama.TransformerBlock):
    """A block of `mlx_lm.models.llama`."""


class Qwen3Block(_ZooBlock, qwen3.TransformerBlock):
    """A block of `mlx_lm.models.qwen3`."""


def _attention(layer: Any, x: Normed, mask: Any, cache: Any) -> mx.array:
    """Return attention's output before the output projection, (B, L, n_heads * head_dim)."""
    q, k, v = project_each((layer.q_proj, layer.k_proj, layer.v_proj), x)
    if (token := _new_token(layer, (q, k, v), cache)) is not None:
        return cache.attend_new(token)
    q, k, v = _heads(q, layer.n_heads), _heads(k, layer.n_kv_heads), _heads(v, layer.n_kv_heads)
    offset = 0 if cache is None else cache.offset
    q, k = (
        _norm_rope(layer, x, offset, layer.get(norm)) for x, norm in ((q, "q_norm"), (k, "k_norm"))
    )
    if isinstance(cache, ZooKVCache):
        y = cache.attend(q, k, v, mask)
    else:
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=layer.scale, mask=mask)
    if y.shape[2] > 1:  # else the order in memory is the same, and one operation is enough
        y = y.swapaxes(1, 2)
    return y.reshape(*x.x.shape[:2], -1)


def _new_token(layer: Any, qkv: tuple[mx.array, mx.array, mx.array], cache: Any) -> NewToken | None:
    """Return the operand of `norm_rope_attend` for a row's single new token; None if it can't run."""
    periods, (rows, length, _) = layer.get(_PERIODS), qkv[0].shape
    if periods is None or layer.training or not isinstance(cache, ZooKVCache):
        return None
    if rows > 1 or length > 1:  # for 8 rows, the operation's parts were 1.1 to 1.2 times as fast
        return None
    if not cache.takes_new_token(qkv[0].dtype):
        return None
    q_norm, k_norm = layer.get("q_norm"), layer.get("k_norm")
    if q_norm is None:
        return NewToken(*qkv, periods)
    return NewToken(*qkv, periods, (q_norm.weight, k_norm.weight), q_norm.eps)


def _norm_rope(layer: Any, x: mx.array, offset: Any, norm: Any) -> mx.array:
    """Return queries or keys (B, n_heads, L, head_dim) after their norm, if they have one, and RoPE."""
    periods = layer.get(_PERIODS)
    if periods is None or layer.training:  # no gradient
        return layer.rope(x if norm is None else norm(x), offset=offset)
    if norm is None:
        return norm_rope(x, periods, offset)
    return norm_rope(x, periods, offset, norm.weight, norm.eps)


def _periods(rope: Any) -> mx.array | None:
    """Return `periods` of `norm_rope` for mlx-lm's plain RoPE and Llama 3's; None for others."""
    if type(rope) not in (nn.RoPE, Llama3RoPE) or rope.traditional:
        return None
    if type(rope) is Llama3RoPE:
        return rope._freqs
    return rope.base ** (mx.arange(0, rope.dims, 2) / rope.dims) / rope.scale


def _heads(x: mx.array, count: int) -> mx.array:
    """Reshape (B, L, count * head_dim) to (B, count, L, head_dim)."""
    if x.shape[1] == 1:  # the order in memory is the same, and one operation is enough
        return x.reshape(x.shape[0], count, 1, -1)
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


_BLOCKS = {llama.TransformerBlock: LlamaBlock, qwen3.TransformerBlock: Qwen3Block}


def replace_blocks(model: nn.Module) -> None:
    """Make a model's Llama and Qwen3 blocks run through this package's operations."""
    for module in model.modules():
        if type(module) in _BLOCKS:
            module.__class__ = _BLOCKS[type(module)]
            if (periods := _periods(module.self_attn.rope)) is not None:
                mx.eval(periods)
                module.self_attn[_PERIODS] = periods
