"""The tables of fields in docs/server.md, written from the server's own: python -m tests.tools.field_tables"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from afm_mlx.server.field_rules import Fields, Honoured, Ignored, Kinds, Refused
from afm_mlx.server.request_fields import OTHER_SERVERS, all_fields
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

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
TABLES: dict[str, dict[str, type[Fields]]] = {
    "chats and completions": {"chat": ChatRequest, "completions": CompletionRequest},
    "embeddings": {"embeddings": EmbeddingRequest, "rerank": RerankRequest},
    "responses": {"": ResponseRequest},
    "messages": {"": MessageRequest},
    "ollama": {"chat": OllamaChatRequest, "generate": OllamaGenerateRequest},
    "ollama's embeddings": {"embed": OllamaEmbedRequest, "embeddings": OllamaEmbeddingRequest},
}
OTHERS = "other servers"


def table(kinds: dict[str, type[Fields]]) -> str:
    """A row for fields that have one rule in the same requests."""
    routes: dict[tuple[str, str, str], list[str]] = {}
    for route, kind in kinds.items():
        for path, rule in all_fields(kind):
            if rule_text(rule):
                key = field(path, rule), becomes(rule), rule_text(rule)
                routes.setdefault(key, []).append(route)
    rows: dict[tuple[str, str, str], list[str]] = {}
    for (name, what, text), those in routes.items():
        route = "both" if len(those) > 1 else those[0]
        rows.setdefault((route, what, text), []).append(name)
    several = len(kinds) > 1
    lines = ["| field | in | | |", "| --- | --- | --- | --- |"]
    lines = lines if several else ["| field | | |", "| --- | --- | --- |"]
    for wanted in ("honoured", "named", "taken", "refused"):
        for (route, what, text), names in rows.items():
            if what == wanted:
                cells = [", ".join(names), *([route] if several else []), what, text]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def field(path: str, rule: object) -> str:
    if not isinstance(rule, Kinds):
        return f"`{path}`"
    kinds = ", ".join(f"`{kind}`" for kind in sorted(rule.ignored or ()))
    return f"`{path}` of {f'the types {kinds}' if kinds else 'other types'}"


def becomes(rule: object) -> str:
    if isinstance(rule, Refused):
        return "honoured" if rule.if_seen else "refused"
    if isinstance(rule, Honoured):
        return "honoured"
    return "named" if isinstance(rule, Kinds) or rule.is_named else "taken"


def rule_text(rule: Honoured | Ignored | Refused | Kinds) -> str:
    if isinstance(rule, Refused) and rule.if_seen:
        return rule.if_seen
    return rule.why if isinstance(rule, Kinds) else rule.text


def blocks() -> dict[str, str]:
    """The generated blocks of the page, by their names."""
    made = {name: table(kinds) for name, kinds in TABLES.items()}
    names = ", ".join(f"`{name}`" for name in OTHER_SERVERS)
    return {**made, OTHERS: textwrap.fill(f"{names}.", 118, break_on_hyphens=False)}


def written(page: str) -> str:
    """The page with its blocks as they have to be."""
    for name, block in blocks().items():
        start, end = f"<!-- fields: {name} -->\n\n", f"\n\n<!-- end of {name} -->"
        pattern = f"({re.escape(start)}).*?({re.escape(end)})"
        page, count = re.subn(pattern, lambda m, b=block: m[1] + b + m[2], page, flags=re.S)
        assert count == 1, f"docs/server.md has no {start!r}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
