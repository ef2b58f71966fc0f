"""Where a model folder's tokenizer lies, its `tokenizer_config.json`, and its chat template.

Functions that read raise `TokenizerError`, which names the file or the key, what it holds and what is allowed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.files import read_file
from afm_mlx.tokenizer.chat_template import ChatTemplate

VOCABULARY_BYTES, CONFIG_BYTES, TEMPLATE_BYTES = 128 << 20, 16 << 20, 1 << 20
"""Bytes that `tokenizer.model` and `tokenizer.json`, a configuration, and a chat template may have. The largest
vocabularies (262,144 tokens) take 35 MB.
"""
DRAFT_FOLDER = "draft"
"""Folder of a draft model, in that of its target, with whose tokenizer it works."""


_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)


def has_tokenizer(folder: Path) -> bool:
    """True if a folder holds a vocabulary itself."""
    return any((folder / name).exists() for name in ("tokenizer.model", "tokenizer.json"))


def tokenizer_folder(folder: Path) -> Path:
    """The folder whose tokenizer a model's folder has: of a draft without files of its own, its target's."""
    if not has_tokenizer(folder) and folder.resolve().name == DRAFT_FOLDER:
        target = folder.resolve().parent
        if has_tokenizer(target):
            return target
    return folder


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files in a model folder of any architecture, sorted by name.

    Raises:
        TokenizerError: when one of them is no regular file, or larger than any tokenizer's.
    """
    found = {file for pattern in _FILES for file in folder.glob(pattern) if not file.is_dir()}
    for file in found:
        if not file.is_file():
            raise TokenizerError(f"{file} is no file; copy the model folder again.")
        if (size := file.stat().st_size) > VOCABULARY_BYTES:
            raise TokenizerError(
                f"{file} has {size:,} bytes, and files of tokenizers have {VOCABULARY_BYTES:,} at most. Copy "
                "the model folder again."
            )
    return sorted(found)


def read_config(path: Path) -> dict[str, Any]:
    """The file's content; empty when there is no such file."""
    if not path.exists():
        return {}
    text = read_text(path, CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} must be a JSON object, got {type(config).__name__}.")
    return config


def text_of(token: Any, key: str) -> str | None:
    """A token of tokenizer_config.json: a string, or an object with `content`; None when there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise TokenizerError(
            f"{key!r} of tokenizer_config.json must be a string, or an object with a string as 'content', "
            f"got {shown(token)}."
        )
    return text


def read_chat_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    """The folder's own chat template: `chat_template.jinja`, else that of its configuration, if any."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return ChatTemplate(read_text(file, TEMPLATE_BYTES), str(file))
    given = source = config.get("chat_template")
    if isinstance(given, list) and all(isinstance(entry, dict) for entry in given):
        source = [entry.get("template") for entry in given if entry.get("name") == "default"]
        source = source[-1] if source else (given or None)
    if source is None:
        return None
    if not isinstance(source, str):
        raise TokenizerError(
            f"'chat_template' in {folder / 'tokenizer_config.json'} must be a string or a list of "
            "{'name', 'template'} objects with one named 'default', got "
            f"{type(given).__name__}: {shown(given)}."
        )
    return ChatTemplate(source, str(folder / "tokenizer_config.json"))


def read_bytes(path: Path, limit: int = VOCABULARY_BYTES) -> bytes:
    """The content of a file of `limit` bytes at most."""
    try:
        return read_file(path, limit)
    except OSError as error:
        raise TokenizerError(f"{path} can't be read: {error.strerror or error}.") from error


def read_text(path: Path, limit: int = VOCABULARY_BYTES) -> str:
    """The content of a UTF-8 file of `limit` bytes at most."""
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error
