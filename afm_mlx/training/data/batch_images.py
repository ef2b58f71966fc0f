"""The images of samples in batches: what the model makes features of, and the places of their tokens.

A batch's `images` are a dict of what its images are given as, each with `inputs` and `places`:

| name | inputs | if |
| --- | --- | --- |
| `features` | (N, D) of N image tokens | nothing of the vision part is trained |
| `states`, `rapid_states` | (T, G, G, C): the encoder's states of T tiles | the adaptor is trained |
| `tiles`, `rapid_tiles` | (T, S, S, 3) uint8 | the encoder is trained |

`places` (N,) int32 are indices into the flat (B * L) of tokens, in the order of the features. N and T are
rounded up, so that steps have few shapes; padding has the index B * L. Tiles of the mode rapid have another
size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256

import mlx.core as mx
import numpy as np

from afm_mlx.engine.image_features import PlacedImage
from afm_mlx.training.data.rounding import round_up

TOKEN_MULTIPLE = 64
TILE_MULTIPLE = 4

BatchImages = Mapping[str, Mapping[str, mx.array]]


class SampleImages:
    """The images of samples, by the samples' indices, and what stands for each image in a batch.

    Args:
        samples: the images of each sample, with their places among its tokens.

    Attributes:
        distinct: the different images, by their digests.
    """

    def __init__(self, samples: Sequence[Sequence[PlacedImage]]) -> None:
        self._samples = samples
        self.distinct = {each.image.digest: each.image for placed in samples for each in placed}
        self._kind = "tiles"
        self._inputs: Mapping[bytes, np.ndarray] = {}  # of other kinds

    def as_tiles(self) -> SampleImages:
        """Return the same images, given to the model as tiles."""
        return self.given_as("tiles", {})

    def given_as(self, kind: str, inputs: Mapping[bytes, np.ndarray]) -> SampleImages:
        """Return the same images, given to the model as "states" or "features", by digest.

        States are (T, G, G, C) of an image's T tiles, features are (tokens, D).
        """
        found = copy.copy(self)
        found._kind, found._inputs = kind, inputs
        return found

    @property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal images of equal samples; empty if there are none."""
        if not self.distinct:
            return ""
        digest = sha256()
        for placed in self._samples:
            digest.update(b";" + b"".join(each.image.digest for each in placed))
        return digest.hexdigest()

    def of_batch(self, placed: Iterable[tuple[int, int]], size: int) -> BatchImages | None:
        """Return the images of a batch; None if no sample has any.

        `placed` yields the flat index of each sample's first token, and the sample's index; `size` is B * L.
        """
        if not self.distinct:
            return None
        groups: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for start, sample in placed:
            for each in self._samples[sample]:
                image = each.image
                is_rapid = image.mode == "rapid" and self._kind != "features"
                name = f"{'rapid_' * is_rapid}{self._kind}"
                inputs, indices = groups.setdefault(name, ([], []))
                inputs.append(image.tiles if self._kind == "tiles" else self._inputs[image.digest])
                indices.append(start + each.places)
        return {
            name: _padded(np.concatenate(inputs), np.concatenate(indices), size)
            for name, (inputs, indices) in sorted(groups.items())
        }


def _padded(inputs: np.ndarray, places: np.ndarray, size: int) -> dict[str, mx.array]:
    multiple = TOKEN_MULTIPLE if inputs.ndim == 2 else TILE_MULTIPLE
    more = round_up(len(inputs), multiple) - len(inputs)
    tokens = more * (len(places) // len(inputs))
    padded = np.concatenate([inputs, np.zeros((more, *inputs.shape[1:]), inputs.dtype)])
    indices = np.concatenate([places, np.full(tokens, size)])
    return {"inputs": mx.array(padded), "places": mx.array(indices.astype(np.int32))}
