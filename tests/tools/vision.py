"""Tiny image encoders and pictures for tests."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import mlx.core as mx
import numpy as np
from PIL import Image

from afm_mlx.config import ModelConfig
from afm_mlx.model.model import Model
from afm_mlx.tokenizer.tokenizer import AFMTokenizer
from afm_mlx.vision.vision import Vision
from afm_mlx.vision_config import AdaptorConfig, VisionConfig

TINY = VisionConfig(
    image_token_id=5,
    image_size=84,
    rapid_size=28,
    position_size=56,
    patch_size=4,
    hidden_dim=32,
    num_layers=3,
    num_heads=2,
    mlp_dim=64,
    window_size=7,
    global_layers=(2,),
    adaptor=AdaptorConfig(num_heads=2, mlp_dim=64, pool_grid=4, rapid_pool_grid=2),
)
"""The default's proportions (1, 4 and 9 windows) with 80, 16 and 4 tokens in its modes."""


def with_images(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The same architecture with a tiny image encoder, whose fields `changes` replaces."""
    return dataclasses.replace(config, vision_config=dataclasses.replace(TINY, **changes))


def random_vision_config(rng: np.random.Generator, **fixed: Any) -> VisionConfig:
    """An encoder of odd sizes, without padded windows."""
    patch, window = int(rng.integers(1, 5)), int(rng.integers(2, 5))
    heads, layers = int(rng.choice([1, 2, 3])), int(rng.integers(1, 5))
    few = rng.choice(layers, int(rng.integers(0, layers + 1)), replace=False)
    values = {
        "image_token_id": 5,
        "patch_size": patch,
        "window_size": window,
        "image_size": patch * window * int(rng.integers(2, 4)),
        "rapid_size": patch * window,
        "position_size": patch * int(rng.integers(2, 9)),
        "hidden_dim": heads * int(rng.integers(4, 9)),
        "num_layers": layers,
        "num_heads": heads,
        "mlp_dim": int(rng.integers(3, 40)),
        "global_layers": tuple(map(int, few)),
        "num_registers": int(rng.integers(0, 4)),
        "qkv_bias": bool(rng.integers(2)),
        "adaptor": AdaptorConfig(num_heads=heads, mlp_dim=9, pool_grid=3, rapid_pool_grid=2),
    }
    return VisionConfig(**(values | fixed))


def picture(rng: np.random.Generator, width: int, height: int, format: str = "PNG") -> bytes:
    """The file of a picture of random colours."""
    colours = rng.integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, format)
    return file.getvalue()


def give_eyes(model: Model, tokenizer: AFMTokenizer, rng: np.random.Generator) -> None:
    """Add a tiny random vision part to a model, whose placeholder is the padding token."""
    config = dataclasses.replace(TINY, image_token_id=tokenizer.pad_token_id)
    mx.random.seed(int(rng.integers(2**31)))
    model.args = dataclasses.replace(model.args, vision_config=config)
    model.vision = Vision(config, model.args.hidden_dim)
    # Larger than at first, so that what is seen changes what is said.
    model.vision.adaptor.conv.weight = 8 * model.vision.adaptor.conv.weight
    mx.eval(model.vision.parameters())
    model.eval()
    tokenizer.vision_config = config
