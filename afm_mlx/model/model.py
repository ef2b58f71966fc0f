"""The AFM text v7 architecture in MLX.

Notable choices:

- Two kinds of block. A `WritingBlock` projects queries, keys and values and writes keys and values to its
  cache; a `ReuseBlock` projects queries only and attends to those of the last writing block.
- A prompt needs only the writing blocks: `Model.prefill` runs them and stops. The reuse blocks and the
  head run where logits are wanted, in `Model.__call__`.
- RoPE rotates adjacent pairs and comes before the norm of queries and keys.
- Keys and values pass through static int8 quantization on their way into the cache, as in training.
- The kernels have no gradient. In training mode, and in rows that hold several samples, heads are made by
  plain MLX operations, and rounding to int8 passes gradients straight through.
- Parameter names are those of mlx-lm's `afm7`, so folders are exchanged without renaming, and the model
  keeps mlx-lm's protocol (`model(tokens, cache)`, `make_cache`, `layers`).

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_text_v7.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeGuard

import mlx.core as mx
import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.config import MODEL_TYPE, ModelConfig
from afm_mlx.kernels import (
    AttentionParts,
    HeadOptions,
    KeyValues,
    QueryRope,
    attention,
    causal_attention,
    decode_attention,
    dequantize_int8,
    fake_int8,
    reads_tails,
    rope_norm,
    rope_norm_quantize,
    write_and_attend,
    write_tokens,
)
from afm_mlx.model.decode_step import DecodeStep
from afm_mlx.model.fused_layers import head_argmax, merges_parts, project, project_head, swiglu
from afm_mlx.model.kv_cache import KVCache
from afm_mlx.model.kv_cache_placeholder import NoKVCache
from afm_mlx.model.positions_and_masks import Positions, causal_mask, packed_positions


def _heads(x: mx.array, head_dim: int) -> mx.array:
    """(B, L, n * head_dim) to (B, n, L, head_dim)."""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def _merge_heads(x: mx.array | AttentionParts) -> mx.array | AttentionParts:
    """(B, n, L, head_dim) to (B, L, n * head_dim); attention's parts stay as they are."""
    if isinstance(x, AttentionParts):
        return x
    x = x.swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1)


def _attention(queries: mx.array, kv: KeyValues, positions: Positions) -> mx.array:
    """Attention of any number of queries; a prompt's has an operation of its own, without gradients."""
    if isinstance(positions.mask, str) and (positions.cached or kv.key_scale is not None):
        return causal_attention(queries, kv)
    return attention(queries, kv, positions.mask)


def _appended(kv: mx.array, cache: KVCache | None) -> KeyValues:
    """Float keys and values of every token so far, the new ones included."""
    if cache is None:
        return KeyValues(kv)
    cache.update(kv)
    return KeyValues(cache.in_use())


class WritingAttention(nn.Module):
    """Grouped-query attention that writes its keys and values to a cache."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._config = config
        qkv_dim = config.hidden_dim + 2 * config.kv_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, qkv_dim, bias=False)
        self.out_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        if config.kv_bits:
            self.take_scales(config)

    def take_scales(self, config: ModelConfig) -> None:
        """Round keys and values to int8 from now on, with scales of 1."""
        self._config = config
        self.quant_key_scale = mx.array(1.0)
        self.quant_value_scale = mx.array(1.0)

    def __call__(
        self, x: mx.array, norm: nn.RMSNorm, positions: Positions, cache: KVCache | None
    ) -> tuple[mx.array, KeyValues]:
        """Returns `x` (B, L, D) plus the output, and the keys and values that were attended to."""
        qkv = project(self.qkv_proj, x, norm=norm)
        plain = cache is None and (self.training or positions.packed)
        if cache is not None and positions.lengths is not None:
            y, kv = self._decode(qkv, positions.lengths, cache)
        else:
            if cache is not None or (self._config.kv_bits and not plain):
                q, kv = self._cached_heads(qkv, positions, cache)
            else:
                q, k, v = self.heads(qkv, positions)
                kv = KeyValues(mx.concatenate(self._fake_int8(k, v), axis=1))
            y = _attention(q, kv, positions)
        return project(self.out_proj, _merge_heads(y), residual=x), kv

    def _decode(
        self, qkv: mx.array, lengths: mx.array, cache: KVCache
    ) -> tuple[mx.array | AttentionParts, KeyValues]:
        """Attention of few new tokens per row, which go to the tail of a cache."""
        config, options, count = self._config, self._head_options(), qkv.shape[1]
        buffer, tail, starts = cache.open_tail(2 * config.num_kv_heads, config.head_dim, count)
        whole = not merges_parts(self.out_proj)
        is_int8 = buffer.dtype == mx.int8
        scales = (options.key_scale, options.value_scale) if is_int8 else (None, None)
        kv = KeyValues(buffer, *scales, tail, starts)
        if is_int8 and count == 1:
            y, tail = write_and_attend(qkv, kv, lengths, options, whole)
            cache.take_tail(tail)
            return y, kv._replace(tail=tail)
        if is_int8:
            q, new = rope_norm_quantize(qkv, lengths - 1, options)
        else:
            q, new = self._float_heads(qkv, lengths - 1)
        tail = write_tokens(tail, new.astype(tail.dtype), lengths - starts + (count - 1))
        cache.take_tail(tail, count)
        kv = kv._replace(tail=tail)
        return decode_attention(q, kv, lengths, whole=whole), kv

    def _head_options(self) -> HeadOptions:
        config = self._config
        norms = (self.q_norm.weight, self.k_norm.weight)
        rope = (config.rope_theta, config.rms_norm_eps)
        return HeadOptions(*norms, *self._scales(), config.num_kv_heads, *rope)

    def _scales(self) -> tuple[mx.array | None, mx.array | None]:
        if not self._config.kv_bits:
            return None, None
        return self.quant_key_scale, self.quant_value_scale

    def _cached_heads(
        self, qkv: mx.array, positions: Positions, cache: KVCache | None
    ) -> tuple[mx.array, KeyValues]:
        if cache is not None and cache.int8:
            q, codes = rope_norm_quantize(qkv, positions.offset, self._head_options())
            cache.update(codes)
            return q, KeyValues(cache.in_use(), *self._scales())
        q, kv = self._float_heads(qkv, positions.offset)
        return q, _appended(kv, cache)

    def _float_heads(self, qkv: mx.array, offset: int | mx.array) -> tuple[mx.array, mx.array]:
        """Queries, and float keys and values (B, 2 * num_kv_heads, L, head_dim), rounded to the int8 grid.

        A model without scales has no grid.
        """
        options = self._head_options()
        q, kv = rope_norm_quantize(qkv, offset, options)
        if options.key_scale is None or options.value_scale is None:
            return q, kv
        k, v = kv.split(2, axis=1)
        floats = [
            dequantize_int8(k, options.key_scale, q.dtype),
            dequantize_int8(v, options.value_scale, q.dtype),
        ]
        return q, mx.concatenate(floats, axis=1)

    def heads(self, qkv: mx.array, positions: Positions) -> tuple[mx.array, mx.array, mx.array]:
        """Float queries, keys and values with RoPE and norm, by operations that have gradients.

        Args:
            qkv: the fused projection, (B, L, (num_heads + 2 * num_kv_heads) * head_dim).
            positions: where the tokens stand.

        Returns:
            queries (B, num_heads, L, head_dim); keys and values (B, num_kv_heads, L, head_dim).
        """
        config = self._config
        ends = [config.hidden_dim, config.hidden_dim + config.kv_dim]
        q, k, v = (_heads(part, config.head_dim) for part in qkv.split(ends, axis=-1))
        turn = (positions.offset, config.rope_theta, config.rms_norm_eps)
        return rope_norm(q, self.q_norm.weight, *turn), rope_norm(k, self.k_norm.weight, *turn), v

    def _fake_int8(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        if not self._config.kv_bits:
            return k, v
        # LSQ's gradient scale of an activation: one over the root of its features times the largest code.
        share = (k.shape[1] * k.shape[3] * 127) ** -0.5
        return (
            fake_int8(k, self.quant_key_scale, share),
            fake_int8(v, self.quant_value_scale, share),
        )


class ReuseAttention(nn.Module):
    """Attention over keys and values that another block wrote."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._config = config
        self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.out_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self, x: mx.array, norm: nn.RMSNorm, positions: Positions, kv: KeyValues
    ) -> mx.array:
        """Returns `x` (B, L, D) plus the output."""
        config = self._config
        q = _heads(project(self.q_proj, x, norm=norm), config.head_dim)
        turn = (self.q_norm.weight, config.rope_theta, config.rms_norm_eps)
        if positions.lengths is not None:
            whole = not merges_parts(self.out_proj)
            y = decode_attention(q, kv, positions.lengths, QueryRope(*turn), whole)
        else:
            q = rope_norm(q, turn[0], positions.offset, *turn[1:])
            y = _attention(q, kv, positions)
        return project(self.out_proj, _merge_heads(y), residual=x)


class MLP(nn.Module):
    """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.hidden_dim, bias=False)

    def __call__(self, x: mx.array, norm: nn.RMSNorm) -> mx.array:
        """Returns `x` (B, L, D) plus the output for the normalized `x`."""
        return project(
            self.down_proj, swiglu(self.gate_proj, self.up_proj, x, norm=norm), residual=x
        )


class _Block(nn.Module):
    """What both kinds of block share. Norms and additions are fused into the linear layers; a block computes

    x = x + self_attn(input_layernorm(x))
    x = x + mlp(post_attention_layernorm(x))
    """

    def __init__(self, config: ModelConfig, self_attn: nn.Module):
        super().__init__()
        self.self_attn = self_attn
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_dim, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_dim, eps=config.rms_norm_eps)


class WritingBlock(_Block):
    """A block that writes keys and values."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, WritingAttention(config))

    def __call__(
        self, x: mx.array, positions: Positions, cache: KVCache | None
    ) -> tuple[mx.array, KeyValues]:
        x, kv = self.self_attn(x, self.input_layernorm, positions, cache)
        return self.mlp(x, self.post_attention_layernorm), kv


class ReuseBlock(_Block):
    """A block that reads the keys and values of the last writing block."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, ReuseAttention(config))

    def __call__(self, x: mx.array, positions: Positions, kv: KeyValues) -> mx.array:
        x = self.self_attn(x, self.input_layernorm, positions, kv)
        return self.mlp(x, self.post_attention_layernorm)


class Transformer(nn.Module):
    """Embedding, both stacks of blocks, and the final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = [WritingBlock(config) for _ in range(config.num_kv_layers)]
        self.kv_reuse_layers = [ReuseBlock(config) for _ in range(config.num_kv_reuse_layers)]
        self.output_norm = nn.RMSNorm(config.hidden_dim, eps=config.rms_norm_eps)

    def write(
        self, inputs: mx.array, positions: Positions, cache: Sequence[KVCache | None]
    ) -> tuple[mx.array, KeyValues]:
        """Run the writing blocks; returns hidden states (B, L, D) and the last block's keys and values."""
        h = self.embedding(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=False):
            h, kv = layer(h, positions, layer_cache)
        return h, kv

    def read(self, h: mx.array, positions: Positions, kv: KeyValues) -> mx.array:
        """Run the reuse blocks on hidden states of the writing blocks; the final norm is the head's."""
        for layer in self.kv_reuse_layers:
            h = layer(h, positions, kv)
        return h


class Model(nn.Module):
    """A causal language model with a tied head.

    Args:
        config: the architecture. Weights start random; `afm_mlx.load` fills them.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        threads.check_process()
        self.args = config  # mlx-lm's name
        self.model_type = MODEL_TYPE
        self.model = Transformer(config)
        self._step = DecodeStep()

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Logits for every given token; the cache, when there is one, grows by L.

        Args:
            inputs: token ids, (B, L) integers, the next L tokens of every row.
            cache: a cache of `make_cache`; None starts at position 0 and keeps nothing.

        Returns:
            (B, L, vocab_size) in the activation dtype.
        """
        return self._next(inputs, cache, "logits")

    def greedy(self, inputs: mx.array, cache: Sequence[Any]) -> tuple[mx.array, mx.array]:
        """The most likely next token of every row, without its logits where the head can do that.

        Args:
            inputs: (B, 1) integers, the last token of every row.
            cache: a cache of `make_cache`; grows by one token.

        Returns:
            tokens (B,) uint32, and their logits (B,): NaN or infinity where any of the row's is.
        """
        tokens, peaks = self._next(inputs, cache, "argmax", few=True)
        return tokens[:, 0], peaks[:, 0]

    def verify(self, inputs: mx.array, cache: Sequence[Any], head: str = "logits") -> Any:
        """What follows each of a few tokens per row: the step of speculative decoding.

        It reads keys and values as a decode step does, each row's where it lies, so rows may have different
        lengths. `KVCache.trim_rows` takes back the tokens that are refused. `__call__` is for prompts.

        Args:
            inputs: (B, L) integers, L at most `kv_cache.TAIL`; 2 to 8 have kernels made for them.
            cache: a cache of `make_cache`; grows by L tokens.
            head: "logits" or "argmax".

        Returns:
            logits (B, L, vocab_size); or the most likely tokens (B, L) uint32 and their logits (B, L), as
            `greedy` has them.
        """
        return self._next(inputs, cache, head, few=True)

    def _next(
        self, inputs: mx.array, cache: Sequence[Any] | None, head: str, few: bool = False
    ) -> Any:
        threads.check_process()
        positions, cache = self._positions(inputs, cache, few)
        writing = cache[: len(self.model.layers)]
        if positions.lengths is not None and self._step.applies(self, writing):
            return self._step(self, inputs, positions.lengths, writing, head)
        return self.forward(inputs, positions, writing, head)

    def forward(
        self,
        inputs: mx.array,
        positions: Positions,
        cache: Sequence[Any],
        head: str,
    ) -> Any:
        """Run every block, and the head.

        Args:
            inputs: (B, L) integers.
            positions: positions and mask of the tokens.
            cache: caches of the writing blocks.
            head: "logits" to return those of every token, (B, L, vocab_size); "argmax" for the most likely
                token after each, (B, L) uint32, and its logit, (B, L).
        """
        h, kv = self.model.write(inputs, positions, cache)
        h = self.model.read(h, positions, kv)
        if head == "argmax":
            return head_argmax(self.model.embedding, h, norm=self.model.output_norm)
        return project_head(self.model.embedding, h, norm=self.model.output_norm)

    def hidden_at(
        self, inputs: mx.array, positions: mx.array, segments: mx.array | None = None
    ) -> mx.array:
        """Hidden states of chosen tokens before the final norm: what `head` takes. There is no cache.

        Losses take it, so that logits are only made where a token is scored.

        Args:
            inputs: (B, L) integers.
            positions: (T,) integers, indices into the B * L tokens.
            segments: (B, L) integers, the number of the sample that a token of a packed row belongs to, see
                `packed_positions`; None when a row is one sample.

        Returns:
            (T, hidden_dim).
        """
        threads.check_process()
        where = self.positions(inputs, segments)
        h, kv = self.model.write(inputs, where, [None] * len(self.model.layers))
        h = self.model.read(h, where, kv)
        return h.reshape(-1, h.shape[-1])[positions]

    def head(self, h: mx.array) -> mx.array:
        """Logits of hidden states: the final norm, and the product with the embedding.

        Args:
            h: (..., hidden_dim), of `hidden_at`.

        Returns:
            (..., vocab_size).
        """
        return project_head(self.model.embedding, h, norm=self.model.output_norm)

    def prefill(self, inputs: mx.array, cache: Sequence[Any]) -> None:
        """Write the keys and values of prompt tokens, and compute nothing else.

        The reuse blocks and the head are not run at all: 37.5 % of the 3B's blocks. The last prompt
        token goes through `__call__`, which gives the logits of the first new one.

        Args:
            inputs: (B, L) integers.
            cache: a cache of `make_cache`; grows by L tokens.
        """
        threads.check_process()
        positions, cache = self._positions(inputs, cache)
        self.model.write(inputs, positions, cache)

    def positions(self, inputs: mx.array, segments: mx.array | None = None) -> Positions:
        """Positions and mask of whole rows of tokens; arguments as in `hidden_at`."""
        if segments is not None:
            return packed_positions(segments)
        return Positions(0, causal_mask(inputs.shape[1]))

    def _positions(
        self, inputs: mx.array, cache: Sequence[Any] | None, few: bool = False
    ) -> tuple[Positions, Sequence[Any]]:
        if cache is None:
            return self.positions(inputs), [None] * len(self.model.layers)
        length = inputs.shape[1]
        first = cache[0]
        few = few or length == 1
        lengths = first.decode_lengths(length) if few and self._opens_tail(first) else None
        mask = first.make_mask(length) if lengths is None else None
        return Positions(first.offset, mask, lengths, cached=True), cache

    def _opens_tail(self, cache: KVCache) -> bool:
        """True if a decode step writes to the cache's tail: of floats where attention copies none for it."""
        if cache.int8 or cache.buffer is None:
            return cache.int8
        return reads_tails(cache.buffer.dtype, self.args.head_dim)

    def make_cache(
        self, kv: str = "int8", max_size: int | None = None, sliding_window: bool = False
    ) -> list[KVCache | NoKVCache]:
        """An empty cache of one row, with one entry per block, as mlx-lm expects.

        Args:
            kv: "int8" stores the codes of the checkpoint's static scales; "float" stores activations,
                rounded to the same grid. A model without scales always stores floats.
            max_size: tokens that a row may hold; None for no limit.
            sliding_window: past `max_size`, forget the oldest tokens instead of raising.
        """
        int8 = kv == "int8" and self.args.kv_bits == 8
        if kv not in ("int8", "float"):
            raise ValueError(f"[make_cache] kv is {kv!r}; allowed are 'int8' and 'float'.")
        return [
            KVCache(int8=int8, max_size=max_size, sliding_window=sliding_window)
            for _ in self.model.layers
        ] + [NoKVCache() for _ in self.model.kv_reuse_layers]

    def add_kv_scales(self) -> None:
        """Give a model without int8 scales (`kv_bits` null) scales of 1, for calibration to set."""
        self.args = dataclasses.replace(self.args, kv_bits=8)
        for block in self.model.layers:
            block.self_attn.take_scales(self.args)

    def train(self, mode: bool = True) -> Model:
        """As `nn.Module.train`; steps are traced anew, for layers may have been replaced."""
        self._step = DecodeStep()
        return super().train(mode)

    @property
    def layers(self) -> list[nn.Module]:
        """Every block, the reuse blocks too."""
        return self.model.layers + self.model.kv_reuse_layers


def is_afm(model: nn.Module) -> TypeGuard[Model]:
    """True if a model is this package's `Model`, not one of mlx-lm's models."""
    return isinstance(model, Model)
