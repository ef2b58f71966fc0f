"""Sizes, switches and parameters of a parallel-track mixture of experts (PT-MoE), and presets.

`num_tracks` narrow transformers run side by side and exchange their states once per segment of
`num_layers_per_track_per_sync_point` layers. The keys of `config.json` are the fields of tamm's
`AFMParallelTrackMoEConfig`.

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_pt_moe.py`; arXiv 2602.07306, algorithm 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from afm_mlx.config import refuse_unknown
from afm_mlx.errors import ConfigError, shown

MODEL_TYPE = "afm_pt_moe"
ATTENTIONS = ("local_rope", "global_nope")
FEED_FORWARDS = ("dense", "sparse")
NORMS = (None, "rms_norm", "pre_scale_rms_norm")
LAYER_NORMS = ("pre_norm", "pre_residual_norm", "post_norm")
SEGMENT_NORMS = ("dispatch_norm", "combine_norm")  # fields have the prefix `tracks_`
COMBINE_OPS = ("mean", "sum")

_SIZES = {
    "vocab_size": 1 << 24,
    "num_tracks": 1 << 10,
    "num_layers_per_track": 1 << 10,
    "num_layers_per_track_per_sync_point": 1 << 10,
    "hidden_dim": 1 << 17,
    "attention_hidden_dim": 1 << 17,
    "num_heads": 1 << 16,
    "dense_feed_forward_hidden_dim": 1 << 20,
    "sparse_feed_forward_hidden_dim": 1 << 20,
    "num_experts": 1 << 16,
    "num_experts_per_token": 1 << 16,
    "local_attention_window_size": (1 << 31) - 2,
    "max_position_embeddings": (1 << 31) - 1,
}


@dataclass(frozen=True)
class TrackConfig:
    """Architecture of a PT-MoE model; the defaults are tamm's.

    Args:
        num_layers_per_track_per_sync_point: layers of a segment; divides `num_layers_per_track`.
        hidden_dim: width of each track, and of the states that tracks exchange.
        attention_hidden_dim: width of a track's queries, `num_heads` times the head's.
        num_kv_heads: heads of keys and values of a track; None for `num_heads`.
        local_attention_window_size: tokens before itself that a token sees in a local layer.
        attention_layer_pattern: "local_rope" or "global_nope" of each layer, repeated over all layers.
        feed_forward_layer_pattern: "dense" or "sparse", the same.
        num_experts: experts of a track, of which a token takes `num_experts_per_token`.
        experts_router_logits_cap: c of `c tanh(logits / c)`; None for logits as they are.
        pre_norm, post_norm, pre_residual_norm: norms before a layer, behind its addition, and before it.
        tracks_dispatch_norm, tracks_combine_norm: norms behind the start of a segment, and before its end.
        tracks_combine_op: "mean" or "sum" of the tracks' states.
        scale_qk_norm: whether the norms of queries and keys have weights.
        max_position_embeddings: number of tokens that servers and evaluations take as the model's context.

    Raises:
        ConfigError: for contradictory values, and for values that no model has.
    """

    vocab_size: int = 153600
    num_tracks: int = 8
    num_layers_per_track: int = 48
    num_layers_per_track_per_sync_point: int = 4
    hidden_dim: int = 2048
    attention_hidden_dim: int = 512
    dense_feed_forward_hidden_dim: int = 5888
    sparse_feed_forward_hidden_dim: int = 2944
    num_heads: int = 4
    num_kv_heads: int | None = None
    rope_theta: float = 500000.0
    attention_layer_pattern: tuple[str, ...] = ("local_rope",) * 3 + ("global_nope",)
    local_attention_window_size: int = 4096
    feed_forward_layer_pattern: tuple[str, ...] = FEED_FORWARDS
    num_experts: int = 40
    num_experts_per_token: int = 2
    experts_router_logits_cap: float | None = 50.0
    pre_norm: str | None = "rms_norm"
    post_norm: str | None = None
    pre_residual_norm: str | None = None
    tracks_dispatch_norm: str | None = None
    tracks_combine_norm: str | None = None
    scale_qk_norm: bool = True
    norm_eps: float = 1e-5
    tracks_combine_op: str = "mean"
    max_position_embeddings: int = 65536
    model_type: str = MODEL_TYPE

    def __post_init__(self) -> None:
        for name, most in _SIZES.items():
            value = getattr(self, name)
            least = 0 if name == "local_attention_window_size" else 1
            self._require(
                type(value) is int and least <= value <= most,
                f"{name} is {shown(value)}",
                f"integers from {least} to {most:,}",
            )
        numbers = {"rope_theta": 1e30, "norm_eps": 1.0}
        if self.experts_router_logits_cap is not None:
            numbers["experts_router_logits_cap"] = 1e30
        for name, largest in numbers.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self._require(
                is_number and 0 < value <= largest,
                f"{name} is {shown(value)}",
                f"numbers above 0 up to {largest:g}",
            )
            object.__setattr__(self, name, float(value))
        for name, kinds in (
            ("attention_layer_pattern", ATTENTIONS),
            ("feed_forward_layer_pattern", FEED_FORWARDS),
        ):
            pattern = getattr(self, name)
            self._require(
                isinstance(pattern, list | tuple) and pattern and all(k in kinds for k in pattern),
                f"{name} is {shown(pattern)}",
                f"a list of {' and '.join(kinds)}",
            )
            object.__setattr__(self, name, tuple(pattern))
        choices: dict[str, tuple[object, ...]] = {
            "model_type": (MODEL_TYPE,),
            "tracks_combine_op": COMBINE_OPS,
            "scale_qk_norm": (True, False),
        }
        choices |= dict.fromkeys(
            (*LAYER_NORMS, *(f"tracks_{norm}" for norm in SEGMENT_NORMS)), NORMS
        )
        for name, allowed in choices.items():
            value = getattr(self, name)
            self._require(
                value in allowed,
                f"{name} is {shown(value)}",
                ", ".join("null" if each is None else str(each) for each in allowed),
            )
        layers, segment = self.num_layers_per_track, self.num_layers_per_track_per_sync_point
        self._require(
            layers % segment == 0,
            f"num_layers_per_track_per_sync_point is {segment}",
            f"a divisor of num_layers_per_track, which is {layers}",
        )
        self._require(
            self.attention_hidden_dim % self.num_heads == 0 and self.head_dim % 2 == 0,
            f"attention_hidden_dim is {self.attention_hidden_dim} with {self.num_heads} heads",
            "a multiple of twice num_heads, because RoPE rotates pairs in each head",
        )
        kv_heads = self.num_kv_heads
        self._require(
            kv_heads is None
            or (type(kv_heads) is int and kv_heads > 0 == self.num_heads % kv_heads),
            f"num_kv_heads is {shown(kv_heads)}",
            f"null, or a divisor of num_heads, which is {self.num_heads}",
        )
        self._require(
            self.num_experts_per_token <= self.num_experts,
            f"num_experts_per_token is {self.num_experts_per_token}",
            f"1 to num_experts, which is {self.num_experts}",
        )

    @staticmethod
    def _require(holds: object, got: str, allowed: str) -> None:
        if not holds:
            raise ConfigError(f"config: {got}; allowed is {allowed}.")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrackConfig:
        """Parse the content of a `config.json`; keys of quantization and tokenizers are ignored.

        Raises:
            ConfigError: names every unknown key.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        refuse_unknown(values, names, "config")
        return cls(**{name: values[name] for name in names & set(values)})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a `config.json`."""
        return dataclasses.asdict(self)

    @property
    def head_dim(self) -> int:
        return self.attention_hidden_dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values of one track."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def num_segments(self) -> int:
        """Number of exchanges between tracks in a forward pass."""
        return self.num_layers_per_track // self.num_layers_per_track_per_sync_point

    @property
    def window(self) -> int:
        """Tokens that a token sees in a local layer, itself included."""
        return self.local_attention_window_size + 1

    def is_local(self, layer: int) -> bool:
        """True if a layer sees a window with RoPE; else it sees all tokens without positions."""
        return (
            self.attention_layer_pattern[layer % len(self.attention_layer_pattern)] == ATTENTIONS[0]
        )

    def is_sparse(self, layer: int) -> bool:
        """True if a layer's feed-forward is a mixture of experts."""
        kinds = self.feed_forward_layer_pattern
        return kinds[layer % len(kinds)] == "sparse"

    @property
    def num_parameters(self) -> int:
        """Number of weights; the head is the embedding."""
        return sum(map(math.prod, parameter_shapes(self).values()))

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that a token uses: of the experts, `num_experts_per_token` in each track."""
        shapes = parameter_shapes(self)
        experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
        skipped = experts * (self.num_experts - self.num_experts_per_token) // self.num_experts
        return self.num_parameters - skipped

    def kv_values(self, tokens: int) -> int:
        """Return the number of keys and values that a row of `tokens` tokens keeps."""
        columns = (
            min(tokens, self.window) if self.is_local(layer) else tokens
            for layer in range(self.num_layers_per_track)
        )
        return 2 * self.num_tracks * self.kv_heads * self.head_dim * sum(columns)


def parameter_shapes(config: TrackConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of a float model's parameters; tracks, or all experts, are the first axis."""
    tracks, width, dim = config.num_tracks, config.hidden_dim, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers_per_track):
        path, inner = f"model.layers.{layer}", config.attention_hidden_dim
        of_layer: dict[str, tuple[int, ...]] = {
            "self_attn.qkv_proj": (tracks, inner + 2 * config.kv_heads * dim, width),
            "self_attn.out_proj": (tracks, width, inner),
        }
        if config.scale_qk_norm:
            of_layer |= {"self_attn.q_norm": (tracks, dim), "self_attn.k_norm": (tracks, dim)}
        ffn, count, at = config.dense_feed_forward_hidden_dim, tracks, "mlp"
        if config.is_sparse(layer):
            of_layer["mlp.router"] = (tracks, config.num_experts, width)
            ffn, at = config.sparse_feed_forward_hidden_dim, "mlp.experts"
            count *= config.num_experts
        of_layer |= {
            f"{at}.gate_proj": (count, ffn, width),
            f"{at}.up_proj": (count, ffn, width),
            f"{at}.down_proj": (count, width, ffn),
        }
        for norm in LAYER_NORMS:
            if getattr(config, norm) is not None:
                of_layer |= {f"{part}_{norm}": (tracks, width) for part in ("attention", "mlp")}
        shapes |= {f"{path}.{name}.weight": shape for name, shape in of_layer.items()}
    for norm in SEGMENT_NORMS:
        if getattr(config, f"tracks_{norm}") is not None:
            for segment in range(config.num_segments):
                shapes[f"model.{norm}s.{segment}.weight"] = (tracks, width)
    shapes["model.norm.weight"] = (width,)
    return shapes


TRACK_PRESETS: dict[str, TrackConfig] = {
    # The defaults of tamm's class: 147,803,703,296 parameters. Apple has published no sizes of its server.
    "tamm-default": TrackConfig(),
    # Small enough to train on a CPU.
    "pt-moe-tiny": TrackConfig(
        vocab_size=4096,
        num_tracks=4,
        num_layers_per_track=8,
        hidden_dim=128,
        attention_hidden_dim=128,
        num_heads=2,
        num_kv_heads=1,
        dense_feed_forward_hidden_dim=256,
        sparse_feed_forward_hidden_dim=128,
        num_experts=8,
        rope_theta=10000.0,
        local_attention_window_size=128,
        max_position_embeddings=1024,
    ),
}
