"""A parallel-track mixture of experts against mlx-lm's Qwen3-MoE with experts of the same shapes.

Both have random weights, as many of them, of 4 bits in groups of 64, and each token runs as many of them. The
tracks' model runs as this package loads it, Qwen3-MoE as mlx-lm does; they take turns.

    python -m bench.pt_moe --output results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_moe
from mlx_lm.models.cache import make_prompt_cache

from afm_mlx.checkpoint.stored_layers import repack_mlx_layers, settle_floats, settle_scales
from afm_mlx.cli.arguments import integer
from afm_mlx.model import parallel_tracks
from afm_mlx.track_config import TrackConfig

GOAL = 1.2
CACHED = 32  # tokens in the cache of decode steps

TRACKS = TrackConfig(
    vocab_size=32768,
    num_layers_per_track=4,
    num_tracks=4,
    hidden_dim=1024,
    attention_hidden_dim=256,
    num_heads=2,
    dense_feed_forward_hidden_dim=2048,
    sparse_feed_forward_hidden_dim=1024,
    num_experts=16,
)


def qwen3_values(tracks: TrackConfig) -> dict[str, Any]:
    """Return the config of a Qwen3-MoE with the heads, feed-forwards and experts of all tracks."""
    count = tracks.num_tracks
    return {
        "model_type": "qwen3_moe",
        "vocab_size": tracks.vocab_size,
        "hidden_size": tracks.hidden_dim,
        "num_hidden_layers": tracks.num_layers_per_track,
        "num_attention_heads": count * tracks.num_heads,
        "num_key_value_heads": count * tracks.kv_heads,
        "head_dim": tracks.head_dim,
        "intermediate_size": count * tracks.dense_feed_forward_hidden_dim,
        "moe_intermediate_size": tracks.sparse_feed_forward_hidden_dim,
        "num_experts": count * tracks.num_experts,
        "num_experts_per_tok": count * tracks.num_experts_per_token,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rms_norm_eps": tracks.norm_eps,
        "rope_theta": tracks.rope_theta,
        "max_position_embeddings": tracks.max_position_embeddings,
        "tie_word_embeddings": True,
    }


def make_models(tracks: TrackConfig) -> dict[str, Any]:
    """Return both models, packed, by their names."""
    mx.random.seed(0)
    args = qwen3_moe.ModelArgs.from_dict(qwen3_values(tracks))
    models = {"pt-moe": parallel_tracks.Model(tracks), "qwen3-moe": qwen3_moe.Model(args)}
    for model in models.values():
        rule = model.quant_predicate

        def fits(path: str, module: nn.Module, rule: Any = rule) -> Any:
            return hasattr(module, "to_quantized") and rule(path, module)

        nn.quantize(model, 64, 4, class_predicate=fits)
        model.eval()
    ours = models["pt-moe"]
    repack_mlx_layers(ours)
    settle_scales(ours)
    settle_floats(ours)
    for model in models.values():
        mx.eval(model.parameters())
    return models


def measure(models: dict[str, Any], prompt: int, steps: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of each prompt and each decode step, by model; the first round is a warm-up."""
    seconds: dict[str, Any] = {name: {"prefill": [], "decode": []} for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            tokens = mx.random.randint(0, model.args.vocab_size, (1, prompt))
            cache = make_prompt_cache(model)
            taken = {"prefill": [_timed(model, tokens, cache)], "decode": []}
            cache = make_prompt_cache(model)
            mx.eval(model(tokens[:, :CACHED], cache))
            for step in range(steps):
                token = tokens[:, step % prompt][:, None]
                taken["decode"].append(_timed(model, token, cache))
            for figure, each in taken.items():
                seconds[name][figure] += each if turn else []
    return seconds


def _timed(model: Any, tokens: mx.array, cache: list[Any]) -> float:
    start = time.perf_counter()
    mx.eval(model(tokens, cache)[:, -1])
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=integer(CACHED), default=256)
    parser.add_argument("--steps", type=integer(1), default=32)
    parser.add_argument("--rounds", type=integer(1), default=5)
    parser.add_argument(
        "--hidden",
        type=integer(64),
        default=TRACKS.hidden_dim,
        help="width of the states, a multiple of 64",
    )
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args(argv)
    tracks = dataclasses.replace(TRACKS, hidden_dim=args.hidden)
    seconds = measure(make_models(tracks), args.prompt, args.steps, args.rounds)
    medians = {
        name: {figure: statistics.median(each) for figure, each in found.items()}
        for name, found in seconds.items()
    }
    args.output.mkdir(parents=True, exist_ok=True)
    figures = {"seconds": seconds, "medians": medians}
    (args.output / "pt_moe.json").write_text(json.dumps(figures, indent=2))
    for figure, unit in (("prefill", args.prompt), ("decode", 1)):
        ours, theirs = (medians[name][figure] for name in ("pt-moe", "qwen3-moe"))
        print(
            f"{figure}: {unit / ours:,.1f} tokens/s, and mlx-lm's Qwen3-MoE {unit / theirs:,.1f}: "
            f"{theirs / ours:.2f} x (at least {GOAL} x: {'met' if theirs / ours >= GOAL else 'missed'})"
        )


if __name__ == "__main__":
    main()
