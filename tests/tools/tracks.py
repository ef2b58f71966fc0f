"""Small random PT-MoE models: of tamm, ours with the same numbers, and their folders."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.folder_texts import write_config
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.converters.tracks import tamm_keys
from afm_mlx.model.parallel_tracks import Model
from afm_mlx.track_config import FEED_FORWARDS, NORMS, TrackConfig

SMALL = {
    "vocab_size": 97,
    "num_tracks": 4,
    "num_layers_per_track": 8,
    "hidden_dim": 32,
    "attention_hidden_dim": 32,
    "dense_feed_forward_hidden_dim": 40,
    "sparse_feed_forward_hidden_dim": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 5,
    "local_attention_window_size": 3,
}


def drawn_config(rng: np.random.Generator) -> TrackConfig:
    """Sizes and switches, each of which is drawn."""

    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    segment, heads = pick(1, 2, 3, 4), pick(1, 2, 4)
    experts = pick(1, 2, 5)
    attention = [pick("local_rope", "global_nope") for _ in range(pick(1, 3, 4))]
    values = {
        "vocab_size": 61,
        "num_tracks": pick(1, 2, 3, 4),
        "num_layers_per_track_per_sync_point": segment,
        "num_layers_per_track": segment * pick(1, 2),
        "hidden_dim": pick(16, 24),
        "attention_hidden_dim": heads * pick(4, 8),
        "dense_feed_forward_hidden_dim": pick(16, 40),
        "sparse_feed_forward_hidden_dim": pick(8, 24),
        "num_heads": heads,
        "num_kv_heads": pick(None, 1, heads),
        "rope_theta": pick(10.0, 5e5),
        "attention_layer_pattern": attention,
        "local_attention_window_size": pick(1, 3, 40),
        "feed_forward_layer_pattern": [pick(*FEED_FORWARDS) for _ in range(pick(1, 2, 3))],
        "num_experts": experts,
        "num_experts_per_token": pick(1, min(2, experts), experts),
        "experts_router_logits_cap": pick(None, 1.5, 50.0),
        "scale_qk_norm": pick(True, False),
        "norm_eps": pick(1e-5, 1e-3),
        "tracks_combine_op": pick("mean", "sum"),
    }
    norms = ("pre_norm", "post_norm", "pre_residual_norm")
    norms += ("tracks_dispatch_norm", "tracks_combine_norm")
    values |= {name: pick(*NORMS) for name in norms}
    if values["pre_norm"] is None and values["pre_residual_norm"] is None:
        values["post_norm"] = "rms_norm"  # or states grow until no float holds them
    return TrackConfig(**values)


def tamm_model(config: TrackConfig, seed: int) -> Any:
    """tamm's model of a config, with random weights."""
    import torch
    from tamm.models.afm_text.afm_pt_moe import AFMParallelTrackMoEConfig

    values = config.to_dict()
    for name in ("model_type", "max_position_embeddings"):
        values.pop(name)
    model = AFMParallelTrackMoEConfig(**values, device="cpu").create_model().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:  # matrices are (..., inputs, outputs)
                inputs = parameter.shape[-1 if "embedding" in name else -2]
                parameter.copy_(0.7 * noise / math.sqrt(inputs))
    return model


def twin(config: TrackConfig, theirs: Any) -> Model:
    """Our model with the numbers of tamm's."""
    state = {key: value.detach().float().numpy() for key, value in theirs.state_dict().items()}
    weights = []
    for name, key in tamm_keys(config).items():
        array = state[key]
        if array.ndim > 2:
            array = array.swapaxes(-1, -2)
        weights.append(
            (name, mx.array(array.reshape(-1, *array.shape[-2:]) if array.ndim > 3 else array))
        )
    model = Model(config)
    model.load_weights(weights)
    return model.eval()


def tamm_logits(theirs: Any, tokens: np.ndarray, exact: bool = False) -> np.ndarray:
    """Logits (B, L, vocab_size) of tokens; `exact` in float64, in which tamm's model stays."""
    import torch

    if exact:
        theirs.double()
        for module in theirs.modules():
            if hasattr(module, "cast_dtype"):
                module.cast_dtype = torch.float64
    with torch.no_grad():
        return theirs(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()


def random_tracks(config: TrackConfig, seed: int) -> Model:
    """Our model with random weights."""
    mx.random.seed(seed)
    model = Model(config)
    weights = []
    for name, array in tree_flatten(model.parameters()):
        noise = mx.random.normal(array.shape)
        is_norm = "norm" in name
        weights.append(
            (name, 1 + 0.3 * noise if is_norm else 1.5 * noise / math.sqrt(array.shape[-1]))
        )
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model.eval()


def write_tracks_folder(folder: Path, model: Model, **values: Any) -> Path:
    """Write a model's folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, model.args.to_dict() | values)
    save_weights(folder, dict(tree_flatten(model.parameters())))
    return folder
