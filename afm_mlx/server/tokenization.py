"""`/tokenize` and `/detokenize`: the tokens of a prompt, in the form of vLLM's routes of these names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.errors import AFMError
from afm_mlx.server.bodies import read_body
from afm_mlx.server.chat_inputs import OfferedTools
from afm_mlx.server.images import RequestImages
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.openai_chat import chat_messages, chat_tools
from afm_mlx.server.replies import (
    JsonObject,
    api_error,
    bad_request,
    json_response,
    while_connected,
)
from afm_mlx.server.request_fields.openai_chats import ChatMessage, ChatTool
from afm_mlx.server.request_fields.shared import MAX_TOKENS, SOME_MESSAGES, TOOLS
from afm_mlx.server.served_model import ServedModel

Token = Annotated[int, Meta(ge=0)]


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    """A text (`prompt`), or a chat (`messages` and `tools`)."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], SOME_MESSAGES] | None = None
    tools: Annotated[list[ChatTool], TOOLS] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    """Token ids."""

    tokens: Annotated[list[Token], Meta(max_length=MAX_TOKENS)]
    model: str | None = None


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a chat that the chat template has rendered."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, TokenizeRequest)
    lease = models.lease(request, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("Either prompt or messages is needed.", "prompt")

    def tokenized() -> Response:
        served = lease.served
        tokens = _tokens(served, body, lease.images())
        written: JsonObject = {
            "count": len(tokens),
            "max_model_len": served.context_size,
            "tokens": tokens,
        }
        if body.return_token_strs:
            written["token_strs"] = served.tokenizer.convert_ids_to_tokens(tokens)
        return json_response(written)

    return await while_connected(request, lease.run(tokenized))


def _tokens(served: ServedModel, body: TokenizeRequest, images: RequestImages) -> list[int]:
    try:
        if body.messages is None:
            text = body.prompt or ""
            served.check_length([text], "prompt")
            return list(served.tokenizer.encode(text, add_special_tokens=body.add_special_tokens))
        messages = chat_messages(body.messages, images, folds=not served.options.strict)
        tools = OfferedTools(chat_tools(body.tools))
        return served.encode_chat(messages, tools, images=images.chat)
    except AFMError as error:
        raise api_error(error, "prompt" if body.messages is None else "messages") from error


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, DetokenizeRequest)
    lease = models.lease(request, body.model)

    def detokenized() -> Response:
        lease.served.check_tokens(body.tokens, "tokens")
        return json_response({"prompt": lease.served.tokenizer.decode(body.tokens)})

    try:
        return await while_connected(request, lease.run(detokenized))
    except AFMError as error:
        raise bad_request(str(error), "tokens") from error
