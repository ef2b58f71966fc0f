"""Images in chats: marks that stand for them in messages, and their placeholders in token ids.

A message's text holds an image as a mark (`ChatImages.mark`): a few private-use characters, some of them drawn
for each `ChatImages`, so no text of other people has one. Marks survive joins, JSON and chat templates. Each
mark of the rendered chat becomes a control token (`control_tokens.ControlTokens`), and that as many copies of
the model's `image_token_id` as the image has tokens. So no text makes a placeholder, not even its name.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.control_tokens import MarkedChat, private_name

_INDEX = 0x100000  # private-use characters, which the random part has none of
_MOST = 0xFFFD  # images of a chat


@runtime_checkable
class ChatImage(Protocol):
    """An image that is fitted to a model, such as `vision.prompt_image.PromptImage`; `tokens` is its length."""

    @property
    def tokens(self) -> int: ...


class ChatImages:
    """The images of one chat.

    Attributes:
        placed: the images of the chat that was encoded last, in the order of their tokens.
    """

    def __init__(self) -> None:
        self._random = private_name()
        self._images: list[ChatImage] = []
        self._places: dict[int, int] = {}  # by id() of the images, which the list keeps alive
        self.placed: tuple[Any, ...] = ()

    def mark(self, image: ChatImage) -> str:
        """Return the text that stands for an image in messages; the same image has the same mark."""
        index = self._places.get(id(image))
        if index is None:
            if len(self._images) == _MOST:
                raise TokenizerError(f"A chat holds at most {_MOST} images. Leave some out.")
            index = self._places[id(image)] = len(self._images)
            self._images.append(image)
        return self._random + chr(_INDEX + index)

    def __len__(self) -> int:
        return len(self._images)

    def find(self, text: str) -> list[ChatImage]:
        """List the images whose marks a text has, in order."""
        return [self._images[ord(found[1]) - _INDEX] for found in self._pattern("").finditer(text)]

    def replace(self, text: str, name: str, mark: str = "") -> str:
        """Replace the images' marks in a text by `name`; `mark` follows each character of them, if given."""
        return self._pattern(mark).sub(name, text)

    def _pattern(self, mark: str) -> re.Pattern[str]:
        last = chr(_INDEX + max(0, len(self._images) - 1))
        known = f"([{chr(_INDEX)}-{last}])" if self._images else "((?!))"
        return re.compile("".join(character + mark for character in self._random) + known + mark)

    def expand(self, tokens: Sequence[int], placeholder: int, rendered: str) -> list[int]:
        """Repeat each `placeholder` in a chat's ids as its image's tokens demand, and set `placed`.

        `rendered` is the chat with marks. Raises `TokenizerError` unless each mark has one placeholder.
        """
        placed = self.find(rendered)
        if tokens.count(placeholder) != len(placed):
            raise TokenizerError(
                f"The prompt has {tokens.count(placeholder)} image tokens for {len(placed)} images: the chat "
                "template writes the name of the image token. Use a template that leaves images to the text."
            )
        images = iter(placed)
        ids: list[int] = []
        for token in tokens:
            ids += [token] * (next(images).tokens if token == placeholder else 1)
        self.placed = tuple(placed)
        return ids


@dataclass
class ImageChat:
    """A chat whose rendered text has `name` in place of the images' marks, see `control_tokens.MarkedChat`.

    Attributes:
        with_marks: the rendered chat before that.
    """

    chat: MarkedChat
    images: ChatImages
    name: str

    def __post_init__(self) -> None:
        """Raise `TokenizerError` if the template drops or repeats an image."""
        self.with_marks = self.chat.render()
        wanted, got = (
            Counter(map(id, self.images.find(text)))
            for text in ("\0".join(self.chat.texts), self.with_marks)
        )
        if wanted != got:
            raise TokenizerError(
                f"The chat template writes {got.total()} images of the {wanted.total()} in the messages, or "
                "some twice. Move the images to messages that the template uses, such as the user's."
            )

    @property
    def texts(self) -> list[str]:
        return self.chat.texts

    @property
    def source(self) -> str | None:
        return self.chat.source

    def render(self, mark: str = "") -> str:
        text = self.chat.render(mark) if mark else self.with_marks
        return self.images.replace(text, self.name, mark)
