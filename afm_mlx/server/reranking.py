"""`/v1/rerank`: documents by their relevance to a query, as Jina's and Cohere's APIs have it.

A document's relevance is the probability that the model answers "yes", rather than "no", when it is asked in a
chat whether the document is relevant. The query comes before the document, so that all documents share it.

Source of the chat: Qwen3-Reranker's model card.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from itertools import takewhile

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.engine.request import PromptLogprobs
from afm_mlx.engine.request import Request as EngineRequest
from afm_mlx.errors import AFMError
from afm_mlx.server.admission import in_thread
from afm_mlx.server.bodies import read_body
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.prompt_rows import MAX_INPUTS, check_prompt, run_prompts
from afm_mlx.server.replies import (
    JsonObject,
    api_error,
    bad_request,
    json_response,
    while_connected,
)
from afm_mlx.server.request_fields.embeddings import RerankRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.thinking import Thinking

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
    'the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_NO_THOUGHTS = Thinking(is_on=False)
_LEAST_SHARED = 16
"""Number of tokens that documents share at least, if they are computed before the documents."""


async def rerank(request: Request) -> Response:
    """Return the documents' relevance, the most relevant first."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, RerankRequest)
    lease = models.lease(request, body.model)
    return json_response(await while_connected(request, _reranked(lease, body)))


async def _reranked(lease: ModelLease, body: RerankRequest) -> JsonObject:
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    if not body.query:
        raise bad_request("query is an empty text.", "query", "empty_string")
    if not 1 <= len(documents) <= MAX_INPUTS:
        code = "array_above_max_length" if documents else "empty_array"
        raise bad_request(
            f"documents has {len(documents)} texts; 1 to {MAX_INPUTS} are allowed.",
            "documents",
            code,
        )
    async with lease:
        instruction = body.instruction or INSTRUCTION
        requests = await in_thread(lambda: _requests(lease, instruction, body.query, documents))
        place = lambda index: f"documents[{index}]"  # noqa: E731
        shared = _shared([request.prompt for request in requests])
        if len(requests) > 1 and len(shared) >= _LEAST_SHARED and lease.served.prefix_cache:
            await run_prompts(lease, [EngineRequest(shared, 0)], place)
        responses = await run_prompts(lease, requests, place)
    scores = []
    for response in responses:
        assert response.prompt_logprobs is not None
        yes, no = response.prompt_logprobs.other_logprobs[-1].tolist()
        scores.append(1 / (1 + math.exp(min(no - yes, 700))))
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    results: list[JsonObject] = [
        {
            "index": index,
            "relevance_score": scores[index],
            **({"document": {"text": documents[index]}} if body.return_documents else {}),
        }
        for index in order[: body.top_n]
    ]
    tokens = sum(len(request.prompt) - 1 for request in requests)  # without the answer
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": body.model,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _requests(
    lease: ModelLease, instruction: str, query: str, documents: Sequence[str]
) -> list[EngineRequest]:
    """Make the requests that score the answer's first token behind each document; slow for many documents."""
    made = []
    for index, document in enumerate(documents):
        place = f"documents[{index}]"
        try:
            prompt, yes, no = asked(lease.served, instruction, query, document)
        except AFMError as error:
            raise api_error(error, place) from error
        check_prompt(lease, [*prompt, yes], place)
        scored = PromptLogprobs(len(prompt), others=(yes, no))
        made.append(EngineRequest([*prompt, yes], 0, prompt_logprobs=scored, keeps_prefix=False))
    return made


def asked(
    served: ServedModel, instruction: str, query: str, document: str
) -> tuple[list[int], int, int]:
    """Return the tokens of a chat that asks if a document is relevant, and the next token of "yes" and of "no".

    These are the tokens at which the two answers differ; what comes before is a part of the chat.

    Raises:
        ApiError: for a model without a chat template.
        TokenizerError: for texts that can't be encoded.
    """
    said = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": said}]
    prompt = served.encode_chat(chat, thinking=_NO_THOUGHTS)
    answers = []
    for word in ("yes", "no"):
        answer = [*chat, {"role": "assistant", "content": word}]
        whole = served.encode_chat(answer, thinking=_NO_THOUGHTS)
        if whole[: len(prompt)] == prompt and len(whole) > len(prompt):
            answers.append(whole[len(prompt) :])
        else:  # the template writes earlier answers in another way than it begins new ones
            answers.append(served.tokenizer.encode_plain(word))
    common = len(_shared(answers))
    yes, no = (answer[common] for answer in answers)
    return [*prompt, *answers[0][:common]], yes, no


def _shared(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all prompts begin with."""
    columns = zip(*prompts, strict=False)  # up to the end of the shortest
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]
