"""Parallel-track mixture of experts (PT-MoE), in mlx-lm's protocol for models.

    segment:  h_t = x for each track t                      [dispatch norm]
    layer:    h_t = h_t + attention(norm(h_t)); h_t = h_t + mlp(norm(h_t))
    border:   x = mean_t h_t, or the sum                    [combine norm before it]

Notable choices:

- Tracks are an axis of every array. States are (T, B, S, D), weights of a layer are one mlx-lm `SwitchLinear`
  whose index is the track, and the experts of all tracks are one `SwitchGLU`, whose index is
  `track * num_experts + expert`. So any mixture's packing and kernels will do.
- In the cache, tracks are heads: (B, T * kv_heads, S, head_dim), so any cache of mlx-lm will do. Local layers
  have a rotating one of `local_attention_window_size + 1` tokens.
- Tracks are equal until a segment's first layer, so the axis of tracks is 1 wide there, and broadcast.
- Over ranks, each holds its share of the tracks, and a segment ends with the one exchange of all ranks.

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_pt_moe.py` and `tamm/layers/mixture_of_experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import sum_gradients
from mlx.utils import tree_map
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from afm_mlx.errors import ConfigError
from afm_mlx.model.split_layers import Cut
from afm_mlx.quantization.packed_layers import is_experts
from afm_mlx.track_config import LAYER_NORMS, SEGMENT_NORMS, TrackConfig

ModelArgs = TrackConfig


class Routing(NamedTuple):
    """What a router decided, with a track's own numbers of its experts."""

    logits: mx.array  # (T, B, S, experts) float32, capped
    experts: mx.array  # (T, B, S, k), from the likeliest to the least likely
    weights: mx.array  # (T, B, S, k) float32, of sum 1


class TrackNorm(nn.Module):
    """RMSNorm with a weight for each track: `weight * x / rms(x)`, or `y / rms(y)` with `y = weight * x`."""

    def __init__(self, tracks: int, dims: int, eps: float, pre_scale: bool = False):
        super().__init__()
        self.weight = mx.ones((tracks, dims))
        self.eps = eps
        self.pre_scale = pre_scale

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize x (T or 1, ..., dims) to (T, ..., dims)."""
        tracks, dims = self.weight.shape
        weight = self.weight.reshape(tracks, *[1] * (x.ndim - 2), dims).astype(x.dtype)
        if self.pre_scale:
            return mx.fast.rms_norm(x * weight, None, self.eps)
        return mx.fast.rms_norm(x, None, self.eps) * weight


def _norm(args: TrackConfig, kind: str) -> TrackNorm:
    return TrackNorm(args.num_tracks, args.hidden_dim, args.norm_eps, kind == "pre_scale_rms_norm")


def _linear(args: TrackConfig, inputs: int, outputs: int) -> SwitchLinear:
    return SwitchLinear(inputs, outputs, args.num_tracks, bias=False)


def project(layer: nn.Module, x: mx.array) -> mx.array:
    """Return each track's product, (T, B, S, N), of x (T or 1, B, S, K) and the track's matrix."""
    matrices = layer.linear if "linear" in layer else layer  # in a wrapper, ours or mlx-lm's
    tracks, rows = matrices.weight.shape[0], x.shape[1:-1]
    vectors = x.reshape(x.shape[0], -1, x.shape[-1])
    if is_experts(layer):
        # Float: one product, which gathers no matrices and scatters no gradients.
        y = vectors @ layer.weight.swapaxes(-1, -2)
    else:
        y = layer(vectors, mx.arange(tracks, dtype=mx.uint32))
    return y.reshape(tracks, *rows, -1)


class Attention(nn.Module):
    """Attention of all tracks: of a window with RoPE, or of all tokens without positions."""

    def __init__(self, args: TrackConfig, layer: int):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = args.num_heads, args.kv_heads, args.head_dim
        outputs = (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
        self.qkv_proj = _linear(args, args.hidden_dim, outputs)
        self.out_proj = _linear(args, args.attention_hidden_dim, args.hidden_dim)
        self.eps = args.norm_eps
        if args.scale_qk_norm:
            self.q_norm = TrackNorm(args.num_tracks, self.head_dim, self.eps)
            self.k_norm = TrackNorm(args.num_tracks, self.head_dim, self.eps)
        if args.is_local(layer):
            self.rope = nn.RoPE(self.head_dim, traditional=True, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return (T, B, S, D) for normalized states x (T or 1, B, S, D)."""
        qkv = project(self.qkv_proj, x)
        tracks, rows, length, _ = qkv.shape
        qkv = qkv.reshape(tracks, rows, length, -1, self.head_dim).transpose(1, 0, 3, 2, 4)
        ends = [self.n_heads, self.n_heads + self.n_kv_heads]
        q, k, v = mx.split(qkv, ends, axis=2)  # (B, T, heads, S, head_dim)
        offset = 0 if cache is None else cache.offset
        q = self._normed(self._rotated(q.flatten(1, 2), offset), "q_norm", tracks)
        k = self._normed(self._rotated(k.flatten(1, 2), offset), "k_norm", tracks)
        v = v.flatten(1, 2)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        y = scaled_dot_product_attention(q, k, v, cache=cache, scale=self.head_dim**-0.5, mask=mask)
        y = y.reshape(rows, tracks, -1, length, self.head_dim).transpose(1, 0, 3, 2, 4)
        return project(self.out_proj, y.flatten(3))

    def _rotated(self, x: mx.array, offset: Any) -> mx.array:
        return self.rope(x, offset=offset) if "rope" in self else x

    def _normed(self, x: mx.array, norm: str, tracks: int) -> mx.array:
        """Return x (B, T * heads, S, head_dim) behind the norm of its tracks."""
        x = mx.fast.rms_norm(x, None, self.eps)
        if norm not in self:
            return x
        weight = mx.repeat(self[norm].weight, x.shape[1] // tracks, axis=0)
        return x * weight[:, None].astype(x.dtype)


class DenseMLP(nn.Module):
    """The SwiGLU of each track: `(silu(x W_gate) * (x W_up)) W_down`."""

    def __init__(self, args: TrackConfig):
        super().__init__()
        width, ffn = args.hidden_dim, args.dense_feed_forward_hidden_dim
        self.gate_proj = _linear(args, width, ffn)
        self.up_proj = _linear(args, width, ffn)
        self.down_proj = _linear(args, ffn, width)

    def __call__(self, x: mx.array) -> mx.array:
        product = nn.silu(project(self.gate_proj, x)) * project(self.up_proj, x)
        return project(self.down_proj, product)


class SparseMLP(nn.Module):
    """A mixture of each track's own experts: each token takes the likeliest k, and none is dropped."""

    def __init__(self, args: TrackConfig):
        super().__init__()
        self.num_experts, self.k = args.num_experts, args.num_experts_per_token
        self.cap = args.experts_router_logits_cap
        self.observer: Callable[[Routing], object] | None = None  # is shown every decision
        # Computes experts for the rows of one adapter at a time; see `ActiveAdapters.by_slot`.
        self.by_slot: Callable[..., mx.array] | None = None
        self.router = _linear(args, args.hidden_dim, args.num_experts)
        self.experts = SwitchGLU(
            args.hidden_dim, args.sparse_feed_forward_hidden_dim, args.num_tracks * args.num_experts
        )

    def __call__(self, x: mx.array) -> mx.array:
        """Return (T, B, S, D) for normalized states x (T, B, S, D)."""
        routing = self.route(x)
        if self.observer is not None:
            self.observer(routing)
        first = mx.arange(0, x.shape[0] * self.num_experts, self.num_experts)
        chosen = routing.experts + first[:, None, None, None]
        y = (
            self.experts(x, chosen)
            if self.by_slot is None
            else self.by_slot(self.experts, x, chosen)
        )
        return (y * routing.weights[..., None]).sum(axis=-2).astype(x.dtype)

    def route(self, x: mx.array) -> Routing:
        """Choose the experts of x (T, B, S, D); of equal logits, the lowest number comes first."""
        logits = project(self.router, x.astype(mx.float32)).astype(mx.float32)
        if self.cap is not None:
            logits = self.cap * mx.tanh(logits / self.cap)
        experts = mx.stop_gradient(mx.argsort(-logits, axis=-1)[..., : self.k])
        # The same as a softmax of all logits, divided by the sum of the chosen ones.
        weights = mx.softmax(mx.take_along_axis(logits, experts, axis=-1), axis=-1, precise=True)
        return Routing(logits, experts.astype(mx.int32), weights)


class TrackLayer(nn.Module):
    """One layer of all tracks."""

    def __init__(self, args: TrackConfig, layer: int):
        super().__init__()
        self.self_attn = Attention(args, layer)
        self.mlp = SparseMLP(args) if args.is_sparse(layer) else DenseMLP(args)
        for part in ("attention", "mlp"):
            for name in LAYER_NORMS:
                if (kind := getattr(args, name)) is not None:
                    self[f"{part}_{name}"] = _norm(args, kind)

    def __call__(self, h: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Return states (T, B, S, D) for states h (T or 1, B, S, D)."""
        y = self.self_attn(self._normed("attention_pre_norm", h), mask, cache)
        h = self._added("attention", h, y)
        return self._added("mlp", h, self.mlp(self._normed("mlp_pre_norm", h)))

    def _added(self, part: str, h: mx.array, y: mx.array) -> mx.array:
        return self._normed(f"{part}_post_norm", h + self._normed(f"{part}_pre_residual_norm", y))

    def _normed(self, name: str, x: mx.array) -> mx.array:
        return self[name](x) if name in self else x


class TrackModel(nn.Module):
    """The model without its head."""

    def __init__(self, args: TrackConfig):
        super().__init__()
        self.args = args
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_dim)
        self.layers = [TrackLayer(args, layer) for layer in range(args.num_layers_per_track)]
        for name in SEGMENT_NORMS:
            if (kind := getattr(args, f"tracks_{name}")) is not None:
                self[f"{name}s"] = [_norm(args, kind) for _ in range(args.num_segments)]
        self.norm = nn.RMSNorm(args.hidden_dim, eps=args.norm_eps)
        self.group: mx.distributed.Group | None = None

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Return the output of the final norm, (B, S, D), for tokens (B, S)."""
        x = self.embed_tokens(inputs) if input_embeddings is None else input_embeddings
        args, of_layer = self.args, [None] * len(self.layers) if cache is None else cache
        is_local = [args.is_local(layer) for layer in range(len(self.layers))]
        masks = {}
        for local in set(is_local):
            first = of_layer[is_local.index(local)]
            masks[local] = create_attention_mask(
                x, first, window_size=args.window if local else None
            )
        size = args.num_layers_per_track_per_sync_point
        for segment in range(args.num_segments):
            h = self._dispatch(segment, x)
            for layer in range(segment * size, (segment + 1) * size):
                h = self.layers[layer](h, masks[is_local[layer]], of_layer[layer])
            x = self._combine(segment, h)
        return self.norm(x)

    def _dispatch(self, segment: int, x: mx.array) -> mx.array:
        if self.group is not None:
            x = sum_gradients(self.group)(x)
        x = x[None]
        return self.dispatch_norms[segment](x) if "dispatch_norms" in self else x

    def _combine(self, segment: int, h: mx.array) -> mx.array:
        if "combine_norms" in self:
            h = self.combine_norms[segment](h)
        x = h.sum(axis=0)
        if self.group is not None:
            x = mx.distributed.all_sum(x, group=self.group)
        return x / self.args.num_tracks if self.args.tracks_combine_op == "mean" else x


class Model(nn.Module):
    """A PT-MoE model whose head is its embedding."""

    def __init__(self, args: TrackConfig):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = TrackModel(args)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> mx.array:
        """Return logits (B, S, vocab_size) for tokens (B, S)."""
        return self.model.embed_tokens.as_linear(self.model(inputs, cache, input_embeddings))

    @property
    def layers(self) -> list[TrackLayer]:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """Return one cache for each layer, of one row."""
        window = self.args.window
        return [
            RotatingKVCache(max_size=window) if self.args.is_local(layer) else KVCache()
            for layer in range(len(self.layers))
        ]

    @property
    def quant_predicate(self) -> Callable[[str, nn.Module], bool | dict[str, int]]:
        """Rule of mlx-lm's `quantize_model`: routers have 8 bits, or stay float if no group fits."""

        def predicate(path: str, module: nn.Module) -> bool | dict[str, int]:
            if not path.endswith("router"):
                return True
            return self.args.hidden_dim % 64 == 0 and {"group_size": 64, "bits": 8}

        return predicate

    def shard(self, group: mx.distributed.Group | None = None) -> None:
        """Keep this rank's share of the tracks; segments then end with one exchange of all ranks.

        Raises:
            ConfigError: if the number of ranks does not divide the number of tracks.
        """
        group = group or mx.distributed.init()
        rank, size, tracks = group.rank(), group.size(), self.args.num_tracks
        if tracks % size:
            allowed = ", ".join(str(n) for n in range(1, tracks + 1) if tracks % n == 0)
            raise ConfigError(
                f"The model has {tracks} tracks, which {size} ranks can't share evenly; "
                f"allowed numbers of ranks are {allowed}."
            )
        if size == 1:
            return

        def share(array: mx.array) -> mx.array:
            if array.ndim == 0:  # a scale of all
                return array
            rows = array.shape[0] // size  # tracks, or the experts of tracks
            return mx.contiguous(array[rank * rows : (rank + 1) * rows])

        own = (rank * tracks // size, (rank + 1) * tracks // size)
        for name in ("layers", "dispatch_norms", "combine_norms"):
            for module in self.model.get(name, ()):
                module.update(tree_map(share, module.parameters()))
                for _, part in module.named_modules():
                    part.track_cut = Cut(0, tracks, (own,))
        self.model.group = group
