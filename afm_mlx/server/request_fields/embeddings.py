"""Fields of embeddings, as OpenAI has them, and of rankings, as Jina and Cohere have them."""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Ignored, Refused
from afm_mlx.server.request_fields.openai_chats import PROMPTS, TokenIds
from afm_mlx.server.request_fields.shared import ALIKE, MAX_TOKENS, MODEL, WHO, Count

Dimensions = Annotated[int, Meta(ge=1, le=2**31 - 1)]
DIMENSIONS = Honoured(
    "numbers of each vector, from the first on; all by default", shapes_answers=False
)


class EmbeddingRequest(Fields):
    model: str
    input: str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["last", "mean"] | None = None
    input_type: (
        Literal["query", "document", "search_query", "search_document", "passage"] | None
    ) = None
    instruction: str | None = None
    rules = {
        "model": MODEL,
        "input": Honoured(PROMPTS.text + ", up to 2,048; none of them empty", PROMPTS.hint),
        "encoding_format": Honoured(
            "`float`, or `base64` of little-endian float32", shapes_answers=False
        ),
        "dimensions": DIMENSIONS,
        "pooling": Honoured(
            "`last` or `mean`, by default what the adapter was trained with, or else `last`",
            shapes_answers=False,
        ),
        "input_type": Honoured(
            "`query` or `search_query` puts the adapter's instruction before texts; others are documents",
            off=("",),
            shapes_answers=False,
        ),
        "instruction": Honoured(
            "a text to put before queries in place of the adapter's; inputs are queries then",
            off=("",),
            shapes_answers=False,
        ),
        "user": WHO,
        "output_dtype embedding_type embedding_types": Refused(
            "vectors are of float32", ("float", ["float"], *EMPTY)
        ),
        "output_dimension": Refused("it is called dimensions here"),
        "normalized": Refused("all vectors have a norm of 1", (True, *EMPTY[:-1])),
        "truncate truncation": Refused("texts are never shortened", ("NONE", *EMPTY)),
        "task late_chunking": Refused(
            "there are no such tasks; adapters are models, see /v1/models"
        ),
    }


class DocumentText(Fields):
    text: str


class RerankRequest(Fields):
    model: str
    query: str
    documents: Annotated[list[str | DocumentText], Meta(max_length=MAX_TOKENS)]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    rules = {
        "model": MODEL,
        "query": Honoured("a text", shapes_answers=False),
        "documents": "up to 2,048 texts, or objects with a `text`; they are never shortened",
        "top_n": Honoured("number of results; all by default", shapes_answers=False),
        "return_documents": Honoured("results have their documents", shapes_answers=False),
        "instruction": Honoured(
            "what makes a document relevant; by default that it answers a web search query",
            off=("",),
            shapes_answers=False,
        ),
        "max_tokens_per_doc max_chunks_per_doc": Refused("documents are never shortened"),
        "rank_fields": Refused("a document is one text", (["text"], *EMPTY)),
        "truncation": Ignored("documents are never shortened"),
        "user": WHO,
        "priority": ALIKE,
    }
