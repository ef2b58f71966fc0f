"""Every field of every request of the five APIs, in a file for each: its type and its rule (`field_rules.py`).

The tables of docs/server.md are generated from it. A field is `Honoured`, `Refused` if it would change the
answer and can't be honoured, or `Ignored` if it is a hint or for another program. Fields that a struct doesn't
have are accepted; at the top of a request they are named, or refused if `known_elsewhere`.

| structs | request | file |
| --- | --- | --- |
| `ChatRequest`, `CompletionRequest` | `/v1/chat/completions`, and `/v1/completions` | `openai_chats` |
| `EmbeddingRequest`, `RerankRequest` | `/v1/embeddings`, and `/v1/rerank` | `embeddings` |
| `ResponseRequest`, `InputRequest` | `/v1/responses`, and `/v1/responses/input_tokens` | `openai_responses` |
| `MessageRequest`, `PromptRequest` | `/v1/messages`, and `/v1/messages/count_tokens` | `anthropic_messages` |
| `OllamaChatRequest`, `OllamaGenerateRequest` | `/api/chat`, and `/api/generate` | `ollama` |
| `OllamaEmbedRequest`, `OllamaEmbeddingRequest` | `/api/embed`, and `/api/embeddings` | `ollama` |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from msgspec import Struct

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Kinds, Rule, rules_of
from afm_mlx.server.request_fields.anthropic_messages import MessageRequest
from afm_mlx.server.request_fields.embeddings import EmbeddingRequest, RerankRequest
from afm_mlx.server.request_fields.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from afm_mlx.server.request_fields.openai_chats import ChatRequest, CompletionRequest
from afm_mlx.server.request_fields.openai_responses import ResponseRequest

REQUESTS: tuple[type[Fields], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    MessageRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    EmbeddingRequest,
    RerankRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingRequest,
)
"""The bodies of all APIs."""

OTHER_SERVERS: Mapping[str, tuple[object, ...]] = {
    "adapters": EMPTY,
    "add_generation_prompt": (True,),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "chat_template"), EMPTY),
    "continue_final_message": EMPTY,
    "dry_multiplier": (0, 0.0),
    **dict.fromkeys(("frequency_context_size", "grammar", "ignore_eos", "json_schema"), EMPTY),
    "images": EMPTY,
    "length_penalty": (1, 1.0),
    "max_new_tokens": (-1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "presence_context_size": EMPTY,
    "repeat_penalty": (1, 1.0),
    **dict.fromkeys(("stop_token_ids", "structural_tag", "template"), EMPTY),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1, 1.0),
    "use_beam_search": EMPTY,
    "xtc_probability": (0, 0.0),
}
"""Fields of other servers that change answers, and the values that mean the same as null."""
OFF: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "logprobs": (False, 0),
    "min_p": (0, 0.0),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "seed": (-1,),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}
"""Fields that not all APIs here have, and the values that mean the same as null."""


@cache
def known_elsewhere() -> Mapping[str, tuple[object, ...]]:
    """Return fields that change answers elsewhere, and the values that mean the same as null."""
    shaping = {
        name: OFF.get(name, EMPTY)
        for kind in REQUESTS
        for name, field in rules_of(kind).items()
        if isinstance(field.rule, Honoured) and field.rule.shapes_answers
    }
    return {**shaping, **OTHER_SERVERS}


def all_fields(kind: type[Fields]) -> Iterator[tuple[str, Rule | Kinds]]:
    """Yield the fields of a request at all levels: paths such as `messages[].content[].text`, and rules.

    Ignored objects of a union are yielded with the union's path and its `Kinds`.
    """
    seen: set[str] = set()

    def walk(kind: type[Struct], place: str) -> Iterator[tuple[str, Rule | Kinds]]:
        for name, field in rules_of(kind).items():
            path = f"{place}.{name}" if place else name
            if path not in seen:
                seen.add(path)
                yield path, field.rule
            shape, inner = field.shape, path
            while shape.element is not None:
                shape, inner = shape.element, f"{inner}[]"
            if shape.kinds.why and inner not in seen:
                seen.add(inner)
                yield inner, shape.kinds
            for struct in shape.structs.values():
                yield from walk(struct, inner)

    yield from walk(kind, "")
