"""The form of a transcript's JSON, as far as it is read; whatever else it has is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from afm_mlx.fm.errors import DecodingFailureError
from afm_mlx.fm.transcript_entries import json_copy


class _Structure(msgspec.Struct):
    content: Any
    source: str = ""


class _Content(msgspec.Struct):
    type: str
    text: str | None = None
    structure: _Structure | None = None


class _JSONSchema(msgspec.Struct):
    name: str
    schema: dict[str, Any]


class _ResponseFormat(msgspec.Struct):
    jsonSchema: _JSONSchema


class _Call(msgspec.Struct):
    name: str
    arguments: str
    id: str = ""


class _Entry(msgspec.Struct):
    role: Literal["instructions", "user", "response", "tool"]
    id: str
    contents: list[_Content] | None = None
    tools: list[dict[str, Any]] | None = None
    responseFormat: _ResponseFormat | None = None
    toolCalls: list[_Call] | None = None
    options: dict[str, Any] | None = None
    assets: list[str] | None = None
    toolName: str | None = None
    toolCallID: str | None = None


class _Entries(msgspec.Struct):
    entries: list[_Entry]


class _Document(msgspec.Struct):
    transcript: _Entries


def checked_transcript(document: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a transcript's JSON that has all that `Transcript` reads.

    Raises:
        DecodingFailureError: with the place, for what has not the form of a transcript.
    """
    try:
        found = msgspec.convert(document, _Document)
    except msgspec.ValidationError as error:
        raise DecodingFailureError(f"This is no transcript: {error}.") from None
    for index, entry in enumerate(found.transcript.entries):
        where = f"$.transcript.entries[{index}]"
        if entry.contents is None and not entry.toolCalls:
            raise DecodingFailureError(f"This is no transcript: {where} has no `contents`.")
        for content in entry.contents or []:
            if content.type in ("text", "structure") and getattr(content, content.type) is None:
                raise DecodingFailureError(
                    f"This is no transcript: {where} has contents of the type {content.type!r} "
                    f"without `{content.type}`."
                )
    try:
        copied: dict[str, Any] = json_copy(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise DecodingFailureError(
            f"This is no transcript: it holds what JSON can't: {error}."
        ) from None
    return copied
