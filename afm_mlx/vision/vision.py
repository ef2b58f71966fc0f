"""Encoder and adaptor together: from an image to vectors that a language model takes for tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.vision.adaptor import VisionAdaptor
from afm_mlx.vision.encoder import VisionEncoder
from afm_mlx.vision_config import VisionConfig

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage


class Vision(nn.Module):
    """The image part of a model.

    Args:
        config: the sizes. Weights start random.
        text_dim: width of the language model.
    """

    def __init__(self, config: VisionConfig, text_dim: int):
        super().__init__()
        self.config = config
        self.encoder = VisionEncoder(config)
        self.adaptor = VisionAdaptor(config, text_dim)

    def features(self, image: PromptImage) -> mx.array:
        """Return the vectors (tokens, text_dim) of an image, in the order of its tokens in a prompt."""
        return self(self.whiten(mx.array(image.tiles))).flatten(0, 1)

    def whiten(self, tiles: mx.array) -> mx.array:
        """Map colours (..., 3) of 0 to 255 to the encoder's pixels, float32."""
        images = self.config.images
        scale = mx.array([1 / (255 * std) for std in images.std])
        shift = mx.array([m / std for m, std in zip(images.mean, images.std, strict=True)])
        return tiles.astype(mx.float32) * scale - shift

    def __call__(self, pixels: mx.array) -> mx.array:
        """Map whitened pixels (T, S, S, 3) of tiles to tokens (T, n, text_dim)."""
        return self.adaptor(self.encoder(pixels))

    def steps(self, pixels: mx.array) -> Iterator[mx.array]:
        """Yield what `__call__` computes after each block of the encoder, and its result at last.

        These are `config.num_layers` + 1 arrays, none of them evaluated.
        """
        x = None
        for x in self.encoder.states(pixels):
            yield x
        assert x is not None
        yield self.adaptor(self.encoder.grid_of(x))
