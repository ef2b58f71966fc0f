"""The AFM text v7 architecture in MLX.

- Two kinds of block: a `WritingBlock` writes keys and values to its cache, and a `ReuseBlock` attends to the
  keys and values of the last writing block. Each computes

      x = x + self_attn(input_layernorm(x))
      x = x + mlp(post_attention_layernorm(x))

  where a packed layer computes the norm before it and the addition after it in its own kernel
  (`fused_layers.py`), and attention takes the operation that fits the call (`attention.py`).
- A prompt needs only the writing blocks: `Model.prefill` runs them and stops. The reuse blocks and the head run
  where logits are needed.
- RoPE rotates adjacent pairs, and comes before the norm of queries and keys.
- Keys and values are rounded to static int8 scales on their way into the cache, as in training.
- Decode steps are traced once and replayed (`decode_step.py`).
- Parameter names and the protocol (`model(tokens, cache)`, `make_cache`, `layers`) equal mlx-lm's `afm7`, so
  folders are exchanged without renaming.

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_text_v7.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeGuard, TypeVar

import mlx.core as mx
import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.config import MODEL_TYPE, ModelConfig
from afm_mlx.kernels import HeadOptions, KeyValues, QueryRope, reads_tails, rms_norm
from afm_mlx.model.attention import Positions, attend, attend_and_write, row_positions
from afm_mlx.model.decode_step import DecodeStep
from afm_mlx.model.fused_layers import (
    Normed,
    feed_forward,
    head_argmax,
    head_logits,
    is_fusable,
    project,
)
from afm_mlx.model.kv_cache import KVCache, NoKVCache, TailWriter
from afm_mlx.vision.vision import Vision

ModelCache: TypeAlias = Sequence[KVCache | NoKVCache]
T = TypeVar("T")


class WritingAttention(nn.Module):
    """Grouped-query attention that writes its keys and values to a cache."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        qkv_dim = config.hidden_dim + 2 * config.kv_dim
        self.qkv_proj = nn.Linear(config.hidden_dim, qkv_dim, bias=False)
        self.out_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.set_config(config)

    def set_config(self, config: ModelConfig) -> None:
        """Set the config; if it has int8 scales, set them to 1, for a checkpoint or calibration to replace."""
        self._config = config
        self.kv_heads = config.num_kv_heads
        if config.kv_bits:
            self.quant_key_scale = mx.array(1.0)
            self.quant_value_scale = mx.array(1.0)

    def head_options(self) -> HeadOptions:
        config = self._config
        int8 = bool(config.kv_bits)
        return HeadOptions(
            self.q_norm.weight,
            self.k_norm.weight,
            self.quant_key_scale if int8 else None,
            self.quant_value_scale if int8 else None,
            self.kv_heads,
            config.rope_theta,
            config.rms_norm_eps,
        )

    def __call__(
        self, x: Normed, positions: Positions, cache: TailWriter | None, residual: mx.array
    ) -> tuple[mx.array, KeyValues]:
        """Return `residual` plus the output for the normalized `x`, (B, L, D), and the keys and values."""
        qkv, options = project(self.qkv_proj, x), self.head_options()
        merge = not is_fusable(self.out_proj)
        y, kv = attend_and_write(
            qkv, options, positions, cache, training=self.training, merge=merge
        )
        return project(self.out_proj, y, residual), kv


class ReuseAttention(nn.Module):
    """Attention over keys and values that another block wrote."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self._config = config
        self.q_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.out_proj = nn.Linear(config.hidden_dim, config.hidden_dim, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def __call__(
        self, x: Normed, positions: Positions, kv: KeyValues, residual: mx.array
    ) -> mx.array:
        q = project(self.q_proj, x)
        rope = QueryRope(self.q_norm.weight, self._config.rope_theta, self._config.rms_norm_eps)
        y = attend(q, rope, positions, kv, merge=not is_fusable(self.out_proj))
        return project(self.out_proj, y, residual)


class MLP(nn.Module):
    """SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.hidden_dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.hidden_dim, bias=False)

    def __call__(self, x: Normed) -> mx.array:
        """Return `x.x` plus the output for the normalized x, (B, L, D)."""
        return feed_forward(self, x)


class _Block(nn.Module):
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
        self, x: mx.array, positions: Positions, cache: TailWriter | None
    ) -> tuple[mx.array, KeyValues]:
        """Return hidden states (B, L, D), and the keys and values of all tokens so far."""
        x, kv = self.self_attn(Normed(x, self.input_layernorm), positions, cache, residual=x)
        return self.mlp(Normed(x, self.post_attention_layernorm)), kv


class ReuseBlock(_Block):
    """A block that reads the keys and values of the last writing block."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, ReuseAttention(config))

    def __call__(self, x: mx.array, positions: Positions, kv: KeyValues) -> mx.array:
        x = self.self_attn(Normed(x, self.input_layernorm), positions, kv, residual=x)
        return self.mlp(Normed(x, self.post_attention_layernorm))


class Transformer(nn.Module):
    """Embedding, writing blocks, reuse blocks, and the final norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_dim)
        self.layers = [WritingBlock(config) for _ in range(config.num_kv_layers)]
        self.kv_reuse_layers = [ReuseBlock(config) for _ in range(config.num_kv_reuse_layers)]
        self.output_norm = nn.RMSNorm(config.hidden_dim, eps=config.rms_norm_eps)

    def embed(self, inputs: mx.array) -> mx.array:
        """Return embeddings (B, L, D) of token ids (B, L); embeddings are returned unchanged."""
        return self.embedding(inputs) if inputs.ndim == 2 else inputs

    def write(
        self, inputs: mx.array, positions: Positions, cache: Sequence[TailWriter | None]
    ) -> tuple[mx.array, KeyValues]:
        """Run the writing blocks; return hidden states (B, L, D) and the last block's keys and values."""
        h = self.embed(inputs)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            h, kv = layer(h, positions, layer_cache)
        return h, kv

    def __call__(
        self, inputs: mx.array, positions: Positions, cache: Sequence[TailWriter | None]
    ) -> mx.array:
        """Return hidden states (B, L, D) before the final norm."""
        h, kv = self.write(inputs, positions, cache)
        for layer in self.kv_reuse_layers:
            h = layer(h, positions, kv)
        return h


class Model(nn.Module):
    """A causal language model with a tied head.

    Every method that takes token ids (B, L) also takes embeddings (B, L, hidden_dim), such as `embed` returns,
    with an image's `vision.features` at the places of its tokens.

    Args:
        config: the architecture. Weights start random; `afm_mlx.load` fills them.

    Attributes:
        vision: the image encoder and its adaptor; None if the model takes no images.
        kv_heads: heads of keys, and of values, that this process has: all, or a rank's share (`split_model`).
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        threads.check_process()
        self.args = config  # mlx-lm's name
        self.model_type = MODEL_TYPE
        self.model = Transformer(config)
        vision = config.vision_config
        self.vision = None if vision is None else Vision(vision, config.hidden_dim)
        self._step = DecodeStep()
        self.kv_heads = config.num_kv_heads

    def __call__(self, inputs: mx.array, cache: ModelCache | None = None) -> mx.array:
        """Return the logits (B, L, vocab_size), in the activation dtype, for the next L tokens of every row.

        A cache (of `make_cache`) grows by L tokens; without one, tokens begin at position 0.
        """
        return self._next(inputs, cache, Model.head)

    def embed(self, inputs: mx.array) -> mx.array:
        """Return embeddings (B, L, hidden_dim) of token ids (B, L)."""
        return self.model.embed(inputs)

    def hidden(self, inputs: mx.array, cache: ModelCache | None = None) -> mx.array:
        """Return the hidden states (B, L, hidden_dim) of the next L tokens of every row, for `head`.

        A cache grows by L tokens; without one, tokens begin at position 0.
        """
        return self._next(inputs, cache, Model._no_head)

    def _no_head(self, h: mx.array) -> mx.array:
        return h

    def greedy(self, inputs: mx.array, cache: ModelCache) -> tuple[mx.array, mx.array]:
        """Return the most likely next token of every row, without writing logits to memory where possible.

        The cache grows by `inputs` (B, 1), the last token of every row.

        Returns:
            tokens (B,) uint32, and their logits (B,), the max logits: NaN or infinity if any of the row's is.
        """
        tokens, max_logits = self._next(inputs, cache, Model.greedy_head, few=True)
        return tokens[:, 0], max_logits[:, 0]

    def verify(self, inputs: mx.array, cache: ModelCache) -> mx.array:
        """Return the logits (B, L, vocab_size) behind a few tokens of every row, for speculative decoding.

        Keys and values are read as in a decode step, so rows may have different lengths; `__call__` is for
        prompts. L is at most `kv_cache.TAIL`; 2 to 8 have kernels made for them. The cache grows by L tokens,
        and `KVCache.trim_rows` removes the ones that are rejected.
        """
        return self._next(inputs, cache, Model.head, few=True)

    def verify_greedy(self, inputs: mx.array, cache: ModelCache) -> tuple[mx.array, mx.array]:
        """Return what `greedy` does behind a few tokens of every row (`verify`): tokens and logits (B, L)."""
        return self._next(inputs, cache, Model.greedy_head, few=True)

    def _next(
        self,
        inputs: mx.array,
        cache: ModelCache | None,
        head: Callable[[Model, mx.array], T],
        few: bool = False,
    ) -> T:
        """Run the model over the next tokens and apply `head`, by a replayed decode step where possible.

        With `few`, tokens are read as in a decode step, see `verify`.
        """
        threads.check_process()
        if cache is None:
            return head(self, self._uncached(inputs))
        positions, writing = self._cached_positions(inputs, cache, few)
        if positions.lengths is not None and self._step.applies(self, writing):
            return self._step(self, inputs, positions.lengths, writing, head)
        return head(self, self.forward(inputs, positions, writing))

    def forward(
        self, inputs: mx.array, positions: Positions, cache: Sequence[TailWriter | None]
    ) -> mx.array:
        """Run every block over tokens (B, L), with the caches of the writing blocks.

        Returns:
            hidden states before the final norm, (B, L, hidden_dim): the input of `head` and `greedy_head`.
        """
        return self.model(inputs, positions, cache)

    def _uncached(
        self,
        inputs: mx.array,
        segments: mx.array | None = None,
        shared: mx.array | None = None,
    ) -> mx.array:
        positions = row_positions(inputs, segments, shared)
        return self.forward(inputs, positions, [None] * len(self.model.layers))

    def hidden_at(
        self,
        inputs: mx.array,
        positions: mx.array,
        segments: mx.array | None = None,
        shared: mx.array | None = None,
    ) -> mx.array:
        """Return the hidden states (T, hidden_dim) of chosen tokens, without a cache, for `head`.

        Args:
            inputs: (B, L) integers.
            positions: (T,) integers, indices into the B * L tokens.
            segments, shared: see `row_positions`; pass None if each row is one sample.
        """
        threads.check_process()
        h = self._uncached(inputs, segments, shared)
        return h.reshape(-1, h.shape[-1])[positions]

    def hidden_last(
        self, inputs: mx.array, lengths: mx.array, cache: ModelCache | None = None
    ) -> mx.array:
        """Return the hidden states (B, hidden_dim) of the last of each row's next tokens, for `final_norm`.

        The reuse blocks, which write nothing that another token needs, run for these tokens alone. Rows of
        `inputs` (B, L) are padded on the right, and `lengths` (B,) are integers of 1 to L. A cache grows by L
        tokens; without one, tokens begin at position 0.
        """
        threads.check_process()
        if inputs.shape[1] == 1:
            return self.hidden(inputs, cache)[:, 0]
        positions = row_positions(inputs)
        writing: Sequence[TailWriter | None] = [None] * len(self.model.layers)
        if cache is not None:
            positions, writing = self._cached_positions(inputs, cache)
        h, kv = self.model.write(inputs, positions, writing)
        index = (lengths - 1)[:, None, None]
        h = mx.take_along_axis(h, index, axis=1)
        sees = positions.mask
        if isinstance(sees, mx.array):
            sees = mx.take_along_axis(sees, index[..., None], axis=2)
        else:  # all rows begin at one position
            sees = (
                mx.arange(positions.offset + inputs.shape[1]) <= positions.offset + index[..., None]
            )
        positions = Positions(positions.offset + index[:, 0, 0], sees)
        for layer in self.model.kv_reuse_layers:
            h = layer(h, positions, kv)
        return h[:, 0]

    def final_norm(self, h: mx.array) -> mx.array:
        """Return hidden states (..., hidden_dim) after the final norm, which `head` applies itself."""
        norm = self.model.output_norm
        # The kernel has no gradient; of numbers whose squares overflow it makes NaN, where MLX makes zeros.
        return norm(h) if self.training else rms_norm(h, norm.weight, norm.eps)

    def head(self, h: mx.array) -> mx.array:
        """Return logits (..., vocab_size) of hidden states (..., hidden_dim): final norm and tied embedding."""
        return head_logits(self.model.embedding, Normed(h, self.model.output_norm))

    def greedy_head(self, h: mx.array) -> tuple[mx.array, mx.array]:
        """Return most likely tokens (...) uint32 of hidden states (..., hidden_dim), and their logits (...)."""
        return head_argmax(self.model.embedding, Normed(h, self.model.output_norm))

    def prefill(self, inputs: mx.array, cache: ModelCache) -> None:
        """Write the keys and values of prompt tokens (B, L) to the cache, and compute nothing else.

        The reuse blocks, 37.5 % of the 3B's blocks, and the head are not run. The prompt's last token goes
        through `__call__`, which returns the logits of the first new token.
        """
        threads.check_process()
        positions, writing = self._cached_positions(inputs, cache)
        self.model.write(inputs, positions, writing)

    def _cached_positions(
        self, inputs: mx.array, cache: ModelCache, few: bool = False
    ) -> tuple[Positions, list[KVCache]]:
        """Return the positions of the next tokens, and the caches of the writing blocks.

        With `few`, L tokens per row are read as in a decode step, and not as a prompt.
        """
        length = inputs.shape[1]
        writing = [entry for entry in cache if isinstance(entry, KVCache)]
        first, lengths = writing[0], None
        if few or length == 1:
            opens_tail = first.int8
            if not opens_tail and first.buffer is not None:
                # Floats go to a tail only if attention reads tails in place.
                opens_tail = reads_tails(first.buffer.dtype, self.args.head_dim)
            lengths = first.decode_lengths(length) if opens_tail else None
        mask = first.make_mask(length) if lengths is None else None
        return Positions(first.offset, mask, lengths, cached=True), writing

    def make_cache(
        self, kv: str = "int8", max_size: int | None = None, sliding_window: bool = False
    ) -> list[KVCache | NoKVCache]:
        """Make an empty cache of one row, with one entry per block, as mlx-lm expects.

        Args:
            kv: "int8" stores the codes of the checkpoint's static scales; "float" stores activations,
                rounded to the same grid. A model without scales always stores floats.
            max_size: tokens that a row can hold; pass None for no limit.
            sliding_window: past `max_size`, forget the oldest tokens instead of raising.
        """
        if kv not in ("int8", "float"):
            raise ValueError(f"[make_cache] kv is {kv!r}; allowed are 'int8' and 'float'.")
        kind = (kv == "int8" and self.args.kv_bits == 8, max_size, sliding_window)
        return [
            *(KVCache(*kind) for _ in self.model.layers),
            *(NoKVCache() for _ in self.model.kv_reuse_layers),
        ]

    def add_kv_scales(self) -> None:
        """Give a model without int8 scales (`kv_bits` null) scales of 1, for calibration to set."""
        self.args = dataclasses.replace(self.args, kv_bits=8)
        for block in self.model.layers:
            block.self_attn.set_config(self.args)

    def train(self, mode: bool = True) -> Model:
        """Set the mode as `nn.Module.train` does, and drop traced steps: layers may have been replaced."""
        self._step = DecodeStep()
        super().train(mode)
        return self

    @property
    def layers(self) -> list[nn.Module]:
        return self.model.layers + self.model.kv_reuse_layers


def is_afm(model: object) -> TypeGuard[Model]:
    """True if a model is this package's `Model`, and not one of mlx-lm's."""
    return isinstance(model, Model)
