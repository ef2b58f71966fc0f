"""Prompts: texts and attachments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union


class PromptError(Exception):
    """A prompt that can't be given to the model."""


class ImagePromptError(PromptError):
    """An image that can't be read, or that this model can't look at."""


class Attachment(ABC):
    """Something in a prompt that is no text, with or without a label."""

    @property
    @abstractmethod
    def label(self) -> str | None:
        """The name by which the prompt's text speaks of it."""


class ImageAttachment(Attachment):
    """An image in a prompt.

    Args:
        path: its file.
        label: the name by which the prompt's text speaks of it.

    Raises:
        ImagePromptError: when there is no such file.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = Path(path)
        self._label = label
        if not self.path.is_file():
            raise ImagePromptError(f"The image {self.path} is no file.")

    @property
    def label(self) -> str | None:
        """The name by which the prompt's text speaks of it."""
        return self._label


PromptComponent = Union[str, Attachment]  # noqa: UP007  so that `Prompt` prints as its parts
Prompt = Union[PromptComponent, list[PromptComponent]]  # noqa: UP007


def prompt_text(prompt: Prompt) -> str:
    """The text of a prompt; the parts of a list come on lines of their own.

    Raises:
        ImagePromptError: for an attachment: AFM's checkpoints read text only.
        PromptError: for what is neither text nor attachment.
    """
    is_one = isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable)
    parts: list[Any] = [prompt] if is_one else list(prompt)  # type: ignore[arg-type]
    for part in parts:
        if isinstance(part, Attachment):
            raise ImagePromptError(
                "The prompt has an attachment, which this model can't look at: it reads text only. "
                "Say in words what the model needs to know of it."
            )
        if not isinstance(part, str):
            raise PromptError(
                f"A prompt is a str, an Attachment or a list of these; got a {type(part).__name__}."
            )
    return "\n".join(parts)
