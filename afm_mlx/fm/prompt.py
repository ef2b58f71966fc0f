"""Prompts: texts and attachments."""

from __future__ import annotations

import base64
import mimetypes
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Union

from afm_mlx.errors import reason_of, shown
from afm_mlx.files import read_file
from afm_mlx.vision_config import MODE_CHOICES


class PromptError(Exception):
    """A prompt that the model can't take."""


class ImagePromptError(PromptError):
    """An image that can't be read, or that the model can't see."""


class Attachment(ABC):
    """A part of a prompt other than text, with or without a label."""

    @property
    @abstractmethod
    def label(self) -> str | None:
        """The name of this attachment in the prompt's text."""


class ImageAttachment(Attachment):
    """An image in a prompt, for a model that reads images.

    Args:
        path: the image's file, which is read when a prompt has it.
        label: the name of the image in the prompt's text, before it; pass None for none.
        mode: "high", "balanced" or "rapid": how much of the image the model sees, and how many tokens it takes;
            "auto" chooses by the image's size. Apple's SDK has no such argument.

    Raises:
        ImagePromptError: if there is no such file.
        ValueError: for another mode.
    """

    def __init__(self, path: Path, label: str | None = None, *, mode: str = "auto") -> None:
        self.path, self.mode = Path(path), mode
        self._label = label
        if not self.path.is_file():
            raise ImagePromptError(f"The image {self.path} is not a file.")
        if mode not in MODE_CHOICES:
            raise ValueError(f"mode is {shown(mode)}; allowed are {', '.join(MODE_CHOICES)}.")

    @property
    def label(self) -> str | None:
        """The name of this attachment in the prompt's text."""
        return self._label

    def data_uri(self) -> str:
        """Read the file, and return it as a data URI; raise `ImagePromptError` if that fails."""
        from afm_mlx.vision.prompt_image import MAX_BYTES  # imports Pillow

        try:
            data = read_file(self.path, MAX_BYTES)
        except OSError as error:
            raise ImagePromptError(
                f"The image {self.path} can't be read: {reason_of(error)}."
            ) from error
        kind = mimetypes.guess_type(self.path)[0] or "application/octet-stream"
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


PromptComponent = Union[str, Attachment]  # noqa: UP007  so that `Prompt` prints as its parts
Prompt = Union[PromptComponent, list[PromptComponent]]  # noqa: UP007


def prompt_parts(prompt: Prompt) -> list[PromptComponent]:
    """Return the parts of a prompt; consecutive texts are joined by newlines.

    Raises `PromptError` for what is neither text nor an image.
    """
    is_one = isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable)
    given: list[object] = [prompt] if is_one else list(prompt)  # type: ignore[arg-type]
    parts: list[PromptComponent] = []
    for part in given:
        if not isinstance(part, str | ImageAttachment):
            raise PromptError(
                f"A prompt is a str, an ImageAttachment or a list of these; got a {type(part).__name__}."
            )
        if isinstance(part, str) and parts and isinstance(parts[-1], str):
            parts[-1] = f"{parts[-1]}\n{part}"
        else:
            parts.append(part)
    return parts or [""]


def prompt_text(prompt: Prompt) -> str:
    """Return the text of a prompt; raise `ImagePromptError` if it has an image, and as `prompt_parts` does."""
    first, *others = prompt_parts(prompt)
    if others or not isinstance(first, str):
        raise ImagePromptError("An image is given, and only text can be taken here. Leave it out.")
    return first
