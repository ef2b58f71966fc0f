"""Images on the command line: their arguments, and their places in a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.arguments import Argument, UsageError
from afm_mlx.vision_config import MODE_CHOICES

if TYPE_CHECKING:
    from afm_mlx.tokenizer.protocol import Tokenizer
    from afm_mlx.vision.prompt_image import PromptImage

PLACE = "{image}"
"""Stands for an image in a prompt's text."""

# fmt: off
IMAGES = [
    Argument("--image", None,
             "pictures for a model that reads images, before the text; or, in their order, where the text has "
             "{image}. Can be repeated",
             [], action="extend", nargs="+", metavar="FILE"),
    Argument("--image-mode", list(MODE_CHOICES),
             "how much of a picture the model sees, and how many tokens it takes; auto chooses by its size",
             "auto"),
]
# fmt: on


def read_picture(path: str | Path, mode: str, tokenizer: Tokenizer) -> PromptImage:
    """Read a picture's file for a model; `UsageError` if it reads text only, `ImageError` for a bad file."""
    if tokenizer.vision_config is None:
        raise UsageError(f"the model reads text only, and {path} is a picture. Leave it out.")
    from afm_mlx.vision.prompt_image import read_image

    return read_image(Path(path), tokenizer.vision_config, mode)


def message_content(text: str, images: Sequence[Any], flag: str = "--image") -> str | list[Any]:
    """Return a message's content: the text, or its parts with `images`, which are parts themselves.

    Images are where the text has `PLACE`, else before it. Raises `UsageError`, which names the argument `flag`,
    if the text has another number of places.
    """
    if not images:
        return text
    texts = text.split(PLACE)
    if len(texts) == 1:
        return [*images, {"type": "text", "text": text}]
    if len(texts) - 1 != len(images):
        raise UsageError(
            f"the prompt has {PLACE} {len(texts) - 1} times, and {flag} gives {len(images)} pictures. Write it "
            "once for each picture, or not at all to have them before the text."
        )
    parts: list[Any] = []
    for before, image in zip(texts, images, strict=False):
        parts += [{"type": "text", "text": before}, image]
    return [*parts, {"type": "text", "text": texts[-1]}]
