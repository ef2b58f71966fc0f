"""What an engine knows of its prompts' images: their places, their names in prefix caches, and their features.

An image's features, (tokens, hidden_dim), take the places of its tokens' embeddings. A step of the engine
computes one tile of them (an encoder pass), or on a CPU, where a tile takes seconds, some of the encoder's
blocks; so other rows go on. Features are kept under a budget for other prompts with the same image, which is
known by the digest of its pixels and mode.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np

from afm_mlx.errors import ImageError, RequestError, shown

if TYPE_CHECKING:
    from afm_mlx.vision.prompt_image import PromptImage
    from afm_mlx.vision.vision import Vision

FEATURES_BUDGET = 256 << 20  # bytes: 91 images of the 3B in high mode, at 16 bits
_IMAGE_NAME = 1 << 63  # of the names in prefix caches: no token has an id this large


@dataclass(frozen=True)
class PlacedImage:
    """An image, and the indices (tokens,) of its tokens in a prompt, ascending."""

    image: PromptImage
    places: np.ndarray


def placed_images(
    prompt: Sequence[int] | np.ndarray, images: Sequence[PromptImage], image_token_id: int
) -> list[PlacedImage]:
    """Return a prompt's images with the places of their tokens, which follow each other."""
    places = np.flatnonzero(np.asarray(prompt) == image_token_id)
    ends = np.cumsum([image.tokens for image in images])
    return [
        PlacedImage(image, places[end - image.tokens : end])
        for image, end in zip(images, ends, strict=True)
    ]


def prefix_names(prompt: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Return a prompt's ids with numbers below 2**64 for images' tokens, made of what their features depend on.

    Prompts whose names begin alike have the same keys and values there. A number is made of the image's digest
    and the token's index in it.
    """
    names = list(prompt)
    for placed in images:
        drawn = hashlib.shake_256(placed.image.digest).digest(8 * len(placed.places))
        numbers = np.frombuffer(drawn, ">u8") | np.uint64(_IMAGE_NAME)
        for place, number in zip(placed.places.tolist(), numbers.tolist(), strict=True):
            names[place] = number
    return names


@dataclass(eq=False)
class Features:
    """The features of one image, as far as they are computed."""

    image: PromptImage | None  # None once they are whole: its pixels may have more bytes
    key: tuple[bytes, str, str]  # see `ImageFeatures.of`
    tiles: list[mx.array] = field(default_factory=list)  # (tokens of a tile, hidden_dim)
    # Of the tile that is begun: what is to be computed of it (`Vision.steps`), and how many steps are left.
    steps: Iterator[mx.array] | None = None
    steps_left: int = 0

    @property
    def is_whole(self) -> bool:
        return self.image is None

    @property
    def nbytes(self) -> int:
        return sum(tile.nbytes for tile in self.tiles)

    def take(self, indices: np.ndarray) -> mx.array:
        """Return the features (n, hidden_dim) of the image's tokens at `indices` (n,)."""
        whole = self.tiles[0] if len(self.tiles) == 1 else mx.concatenate(self.tiles)
        return whole[mx.array(indices.astype(np.int32))]


class ImageFeatures:
    """Features of images under a budget; the least recently used ones are evicted.

    It is for one model, and for the engines of one thread. What a prompt still needs stays outside the budget.

    Args:
        budget: maximum bytes; 0 to keep nothing for other prompts.

    Attributes:
        nbytes: bytes that are kept.
        passes: number of encoder passes so far; each encodes one tile.

    Raises:
        RequestError: for a budget below 0.
    """

    def __init__(self, budget: int = FEATURES_BUDGET):
        if not isinstance(budget, int) or budget < 0:
            raise RequestError(
                f"The budget of images' features is {shown(budget)}; a number of bytes is needed, 0 for none."
            )
        self.budget, self.nbytes, self.passes = budget, 0, 0
        self._kept: OrderedDict[tuple[bytes, str, str], Features] = OrderedDict()  # by last use
        self._in_use: WeakValueDictionary[tuple[bytes, str, str], Features] = WeakValueDictionary()

    def of(self, image: PromptImage, adapter: str = "", client: str = "") -> Features:
        """Return an image's features, computed or not; prompts that need them at the same time share them.

        Args:
            image: the image, which is known by its digest.
            adapter: fingerprint of the adapter that the features depend on; "" for none.
            client: the caller. Clients share no features: how fast an answer begins would tell one whether
                another has sent the same image.
        """
        key = (image.digest, adapter, client)
        found = self._in_use.get(key)
        if found is None:
            found = self._in_use[key] = Features(image, key)
        if key in self._kept:
            self._kept.move_to_end(key)
        return found

    def encode_tile(self, vision: Vision, features: Features, blocks: int | None = None) -> None:
        """Compute the next tile of an image, and keep the features once they are whole.

        `blocks` is the maximum number of the encoder's blocks to compute of the tile; pass None for all. Raises
        `ImageError` if features hold NaN or infinity.
        """
        index, image = len(features.tiles), features.image
        assert image is not None
        if features.steps is None:
            pixels = vision.whiten(mx.array(image.tiles[index : index + 1]))
            features.steps, features.steps_left = vision.steps(pixels), vision.config.num_layers + 1
        steps = features.steps
        count = features.steps_left if blocks is None else min(blocks, features.steps_left)
        features.steps = None  # lost if a step fails
        *_, found = itertools.islice(steps, count)
        if count < features.steps_left:
            mx.eval(found)
            features.steps, features.steps_left = steps, features.steps_left - count
            return
        found = found[0]
        is_finite = mx.isfinite(found).all()
        mx.eval(found, is_finite)
        self.passes += 1
        if not is_finite.item():
            raise ImageError(
                "The image's features hold NaN or infinity. Weights or adapters that hold NaN or overflow lead "
                "to that; load them in another type (bfloat16, float32), or take other ones."
            )
        features.tiles.append(found)
        if len(features.tiles) < len(image.tiles):
            return
        features.image = None
        if features.nbytes <= self.budget:
            self._kept[features.key] = features
            self.nbytes += features.nbytes
            while self.nbytes > self.budget:
                _, oldest = self._kept.popitem(last=False)
                self.nbytes -= oldest.nbytes
