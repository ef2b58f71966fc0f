"""Fields of Ollama's API."""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Ignored, Refused
from afm_mlx.server.request_fields.embeddings import DIMENSIONS, Dimensions
from afm_mlx.server.request_fields.openai_chats import PART, PENALTY, ChatTool
from afm_mlx.server.request_fields.shared import (
    ECHO,
    MAX_STOPS,
    MAX_TOKENS,
    MESSAGES,
    NEVER_SHORTENED,
    NO_THOUGHTS,
    PARTS,
    SAMPLING,
    SEED,
    STREAM,
    TEXT_ONLY,
    THOUGHT,
    TOOLS,
    TOP_K,
    Limit,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    StopSequence,
    Temperature,
    TopLogprobs,
    Whole,
)


class OllamaFunction(Fields):
    name: str
    arguments: dict[str, Any]
    rules = {"index": ECHO}


class OllamaCall(Fields):
    function: OllamaFunction
    id: str | None = None


OllamaImages = Annotated[list[str], PARTS]
OLLAMA_IMAGES = (
    "images in base64, if the model [sees](images.md): each in the place of an `[img]` in the text, the "
    "others before it"
)


class OllamaMessage(Fields):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], PARTS] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: OllamaImages | None = None
    rules = {
        "thinking": THOUGHT,
        "images": Refused(PART.text, if_seen=f"{OLLAMA_IMAGES}. Not in answers and instructions"),
    }


LOADED = Ignored("the model was loaded with the server's settings")
NO_LONGER = Ignored("not one of Ollama's own options any more")


class OllamaOptions(Fields):
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    stop: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Limit | None = None
    rules = {
        "temperature top_p min_p": SAMPLING,
        "top_k": TOP_K,
        "seed": SEED,
        "num_predict": "maximum number of new tokens, by default the server's (`--max-tokens`); -1, -2 and 0 "
        "mean as many as the context holds",
        "stop": "up to 16 strings that end the answer and are not part of it",
        "frequency_penalty presence_penalty": PENALTY,
        "repeat_penalty": Honoured(
            "above 0 to 10, for the last tokens of prompt and answer", off=(1, 1.0)
        ),
        "repeat_last_n": "number of last tokens for `repeat_penalty`: 64 by default, -1 for all, 0 for none",
        "typical_p": Refused("there is no typical sampling", (1, 1.0, *EMPTY)),
        "num_ctx num_batch num_gpu main_gpu num_thread use_mmap draft_num_predict": LOADED,
        "num_keep": NEVER_SHORTENED,
        "numa low_vram f16_kv logits_all vocab_only use_mlock embedding_only penalize_newline": NO_LONGER,
        "mirostat mirostat_tau mirostat_eta tfs_z": NO_LONGER,
    }


class OllamaRequest(Fields):
    """The fields that Ollama's chats and prompts share."""

    model: str
    stream: bool | None = None
    format: Literal["json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    keep_alive: float | str | None = None
    rules = {
        "model": "a name of `/api/tags`, with or without `:latest`; any other is a 404",
        "stream": Honoured(STREAM.text + ", one JSON object a line; true by default"),
        "format": Honoured('`"json"`, or a schema, which answers always follow', off=("",)),
        "think": Ignored(
            "`true` and `false` switch thinking on and off; `low`, `medium`, `high` and `max` switch it on "
            "and are shown to the model if its template has a place for them" + NO_THOUGHTS,
            unless_thinking=True,
        ),
        "options": Honoured(off=({},)),
        "logprobs top_logprobs": Honoured(
            "log-probabilities, in streams too; up to 20 most likely tokens", off=(0, False)
        ),
        "keep_alive": Honoured(
            "0 without a prompt loads no model; otherwise `--keep-alive` decides how long a model stays loaded",
            shapes_answers=False,
        ),
        "truncate shift": NEVER_SHORTENED,
        "_debug_render_only": Refused("prompts are not shown; see /tokenize"),
    }


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage], MESSAGES] | None = None
    tools: Annotated[list[ChatTool], TOOLS] | None = None
    rules = {
        "messages": "roles `system`, `user`, `assistant`, `tool`. A result is of the call that `tool_call_id` "
        "or `tool_name` says, or of the first call without one. Instructions after other messages become a "
        "part of the user's turn there; an answer at the end is continued. Without messages, nothing is "
        "generated",
        "tools": "functions; arguments always follow their schema",
    }


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: OllamaImages | None = None
    rules = {
        "prompt": "one message of the user; without it, nothing is generated",
        "system": Honoured("instructions; not with `raw`", off=("",)),
        "raw": Honoured(
            "the prompt is continued without the chat template, as it is if the model has none",
            off=(False,),
        ),
        "template": Refused("the model's own chat template is used; see `raw`"),
        "context": Refused("Ollama has deprecated it; send the conversation to /api/chat"),
        "suffix": Refused("this model continues texts, and does not fill gaps"),
        "images": Refused(TEXT_ONLY, if_seen=f"{OLLAMA_IMAGES}. Not with `raw`"),
        "width height steps": Refused(TEXT_ONLY),
    }


TRUNCATES = Honoured(
    "texts that the context can't hold are shortened, unless this is false", shapes_answers=False
)


LASTING = Ignored("`--keep-alive` decides how long a model stays loaded")


class OllamaEmbedRequest(Fields):
    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_TOKENS)] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    rules = {
        "model": OllamaRequest.rules["model"],
        "input": "a text, or a list of up to 2,048; without it, the model is loaded",
        "truncate": TRUNCATES,
        "dimensions": DIMENSIONS,
        "options": LOADED,
        "keep_alive": LASTING,
    }


class OllamaEmbeddingRequest(Fields):
    model: str
    prompt: str | None = None
    rules = {
        "model": OllamaRequest.rules["model"],
        "prompt": "a text; without it, the model is loaded",
        "options": LOADED,
        "keep_alive": LASTING,
    }
