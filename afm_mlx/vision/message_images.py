"""Images in the messages of data files: files by their paths, and data URIs.

    {"type": "image", "path": "a.png", "mode"?: "high"}
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,...", "detail"?: "low" | "high" | "auto"}}

The second is OpenAI's form. A path is relative to the folder of the data file. Nothing is fetched.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from afm_mlx.errors import ImageError, shown
from afm_mlx.vision.prompt_image import PromptImage, read_image
from afm_mlx.vision_config import MODE_CHOICES, VisionConfig

DETAILS = {"auto": "auto", "low": "rapid", "high": "high", "original": "high"}
"""Modes by OpenAI's names of details."""
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_NEEDED = "a data URI in base64 is needed, such as data:image/png;base64,iVBO..."

_FORMS = (
    '{"type": "image", "path": a file, "mode": one of auto, high, balanced and rapid} and '
    '{"type": "image_url", "image_url": {"url": "data:image/...;base64,..."}}'
)


_Messages = TypeVar("_Messages")


def folder_of_line(where: str) -> Path:
    """Return the folder of a data file from "file:line"."""
    return Path(where.rpartition(":")[0]).parent


def with_images(
    messages: _Messages, config: VisionConfig | None, folder: str | Path
) -> _Messages | list[Any]:
    """Return messages whose image parts hold the image, as `tokenizer.chat_messages` takes it.

    Args:
        messages: unchecked; what holds no image is returned as it is.
        config: the model's; with None all messages are returned as they are, and its tokenizer refuses images.
        folder: paths are relative to it.

    Raises:
        ImageError: names the message and the part.
    """
    if config is None or not isinstance(messages, list | tuple):
        return messages
    return [
        _with_images(message, config, Path(folder), f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _with_images(message: Any, config: VisionConfig, folder: Path, where: str) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_is_image, content)):
        return message
    parts = []
    for index, part in enumerate(content):
        if not _is_image(part):
            parts.append(part)
            continue
        try:
            parts.append({"type": "image", "image": _read(part, config, folder)})
        except ImageError as error:
            raise ImageError(f"{where}['content'][{index}]: {error}") from None
    return {**message, "content": parts}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _read(part: Mapping[str, Any], config: VisionConfig, folder: Path) -> PromptImage:
    if isinstance(image := part.get("image"), PromptImage):
        return image
    source: bytes | Path
    if part["type"] == "image":
        path, mode = part.get("path"), part.get("mode", "auto")
        if not isinstance(path, str) or not path:
            raise ImageError(f"the path of an image is {shown(path)}; allowed are {_FORMS}.")
        if mode not in MODE_CHOICES:
            raise ImageError(
                f"mode is {shown(mode)}; allowed are {', '.join(map(repr, MODE_CHOICES))}."
            )
        source = folder / path
    else:
        given = part.get("image_url")
        given = given if isinstance(given, Mapping) else {"url": given}
        detail = given.get("detail") or "auto"
        if not isinstance(detail, str) or detail not in DETAILS:
            raise ImageError(
                f"detail is {shown(detail)}; allowed are {', '.join(map(repr, DETAILS))}."
            )
        source, mode = data_uri_content(given.get("url")), DETAILS[detail]
    return read_image(source, config, mode)


def data_uri_content(uri: object) -> bytes:
    """Return the content of a data URI in base64, of any media type; raise `ImageError` for anything else."""
    head = _DATA_URI.match(uri) if isinstance(uri, str) else None
    if head is None:
        raise ImageError(f"the url of an image is {shown(uri)}; {_NEEDED}")
    try:
        return base64.b64decode("".join(str(uri)[head.end() :].split()), validate=True)
    except ValueError as error:
        raise ImageError(f"the data of an image is no base64 ({error}); {_NEEDED}") from None
