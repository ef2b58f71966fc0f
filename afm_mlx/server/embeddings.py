"""`/v1/embeddings`: vectors of texts, as OpenAI's API has them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.adapters.adapter_folder import EmbeddingUse, embedding_use
from afm_mlx.engine.request import Embedding
from afm_mlx.engine.request import Request as EngineRequest
from afm_mlx.errors import AFMError, RequestError
from afm_mlx.server.admission import in_thread
from afm_mlx.server.bodies import read_body
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.openai_completions import encoded_prompt, prompts_of
from afm_mlx.server.prompt_rows import MAX_INPUTS, check_prompt, run_prompts
from afm_mlx.server.replies import api_error, bad_request, json_response, while_connected
from afm_mlx.server.request_fields.embeddings import EmbeddingRequest
from afm_mlx.tokenizer.embedding_text import embedding_tokens, query_text


@dataclass(frozen=True)
class TextInputs:
    """Texts, or lists of token ids, whose vectors are wanted.

    Args:
        field: the body's field that has them.
        dimensions: numbers of each vector; pass None for all.
        pooling: pass None for the adapter's, or else "last".
        are_queries: True to put the adapter's instruction before texts, if it has one.
        instruction: text to put before them in place of the adapter's.
        truncates: True to shorten texts that the context can't hold.
    """

    inputs: Sequence[str | list[int]]
    field: str
    dimensions: int | None = None
    pooling: str | None = None
    are_queries: bool = False
    instruction: str | None = None
    truncates: bool = False

    def place(self, index: int) -> str:
        """Return the field of an input, for errors."""
        return f"{self.field}[{index}]" if len(self.inputs) > 1 else self.field


async def embeddings(request: Request) -> Response:
    """Return a vector for each input, as numbers or base64."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, EmbeddingRequest)
    lease = models.lease(request, body.model)
    return await while_connected(request, _embeddings(lease, body))


async def _embeddings(lease: ModelLease, body: EmbeddingRequest) -> Response:
    kind = body.input_type or "document"
    async with lease:
        texts = TextInputs(
            await in_thread(lambda: prompts_of(body.input, "input")) if body.input != [] else [],
            "input",
            body.dimensions,
            body.pooling,
            bool(body.instruction) or kind in ("query", "search_query"),
            body.instruction,
        )
        vectors, tokens = await embedded(lease, texts)
        is_base64 = body.encoding_format == "base64"
        written = await in_thread(lambda: written_vectors(vectors, is_base64), is_admitted=True)
    return json_response(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(written)
            ],
            "model": body.model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def embedded(lease: ModelLease, texts: TextInputs) -> tuple[list[np.ndarray], int]:
    """Return the vectors of texts, each (dimensions,) float32, and the number of their tokens.

    Raises:
        ApiError: 400 about the field for inputs that have no vectors; 429, 503 and 504 as answers have them.
    """
    count = len(texts.inputs)
    if not 1 <= count <= MAX_INPUTS:
        code = "empty_array" if not count else "array_above_max_length"
        raise bad_request(
            f"{texts.field} has {count} inputs; 1 to {MAX_INPUTS} are allowed.", texts.field, code
        )
    try:
        most = await lease.served.engine.embedding_dim()
    except RequestError as error:
        raise api_error(error, "model") from error
    if texts.dimensions is not None and texts.dimensions > most:
        raise bad_request(
            f"dimensions is {texts.dimensions}; the vectors of {lease.served.name} have {most}. Ask for 1 to "
            f"{most}, or leave it out.",
            "dimensions",
            "integer_above_max_value",
        )
    requests = await in_thread(lambda: _requests(lease, texts))
    responses = await run_prompts(lease, requests, texts.place)
    vectors = [response.embedding for response in responses]
    assert all(vector is not None for vector in vectors)
    return vectors, sum(len(request.prompt) for request in requests)  # type: ignore[return-value]


def _requests(lease: ModelLease, texts: TextInputs) -> list[EngineRequest]:
    """Encode the inputs; slow for many or long ones."""
    use, pool = EmbeddingUse(), lease.served.pool
    if lease.adapter is not None and pool is not None and lease.adapter in pool.paths:
        try:
            use = embedding_use(pool.paths[lease.adapter]) or use
        except AFMError as error:
            raise api_error(error, "model") from error
    pooling = texts.pooling or use.pooling
    instruction = texts.instruction or (use.instruction if texts.are_queries else None)
    asked = Embedding(pooling, texts.dimensions)
    made = []
    for index, given in enumerate(texts.inputs):
        prompt = _prompt(lease, given, texts.place(index), pooling, instruction)
        size = lease.served.context_size
        if texts.truncates and len(prompt) > size:
            # The end of a text is a token of its own.
            end = prompt[-1:] if pooling == "last" else []
            prompt = [*prompt[: size - len(end)], *end]
        check_prompt(lease, prompt, texts.place(index))
        made.append(EngineRequest(prompt, 0, embedding=asked))
    return made


def _prompt(
    lease: ModelLease, given: str | list[int], place: str, pooling: str, instruction: str | None
) -> list[int]:
    if not given:
        what = "text" if isinstance(given, str) else "list of token ids"
        code = "empty_string" if isinstance(given, str) else "empty_array"
        raise bad_request(f"{place} is an empty {what}, which has no vector.", place, code)
    if not isinstance(given, str):
        return encoded_prompt(given, lease.served, place)
    lease.served.check_length([given], place)
    try:
        return embedding_tokens(lease.served.tokenizer, query_text(given, instruction), pooling)
    except AFMError as error:
        raise api_error(error, place) from error


def written_vectors(vectors: Sequence[np.ndarray], is_base64: bool = False) -> list[object]:
    """Return vectors for JSON: lists of numbers, encoded already, or base64 of little-endian float32.

    They are encoded one by one, because the encoder lets no other thread run.
    """
    if is_base64:
        return [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return [msgspec.Raw(msgspec.json.encode(vector.tolist())) for vector in vectors]
