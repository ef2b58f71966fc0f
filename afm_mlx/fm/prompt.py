"""Prompts: texts and attachments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Union


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
    """An image in a prompt.

    Args:
        path: the image's file.
        label: the name of the image in the prompt's text.

    Raises:
        ImagePromptError: if there is no such file.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = Path(path)
        self._label = label
        if not self.path.is_file():
            raise ImagePromptError(f"The image {self.path} is not a file.")

    @property
    def label(self) -> str | None:
        """The name of this attachment in the prompt's text."""
        return self._label


PromptComponent = Union[str, Attachment]  # noqa: UP007  so that `Prompt` prints as its parts
Prompt = Union[PromptComponent, list[PromptComponent]]  # noqa: UP007


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt's text; the parts of a list are joined by newlines.

    Raises `ImagePromptError` for an attachment, because AFM's checkpoints read text only, and `PromptError` for
    what is neither text nor attachment.
    """
    is_one = isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable)
    parts: list[object] = [prompt] if is_one else list(prompt)  # type: ignore[arg-type]
    for part in parts:
        if isinstance(part, Attachment):
            raise ImagePromptError(
                "The prompt has an attachment, and this model reads text only. Describe in words what the "
                "model needs to know about it."
            )
        if not isinstance(part, str):
            raise PromptError(
                f"A prompt is a str, an Attachment or a list of these; got a {type(part).__name__}."
            )
    return "\n".join(parts)  # type: ignore[arg-type]
