"""Fields that OpenAI's chats and completions share: checked, and read into a `GenerationRequest`'s terms."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.admission import in_thread
from afm_mlx.server.answer_events import (
    Ended,
    Event,
    PromptScored,
    TextDelta,
    ThoughtDelta,
    TokenCounts,
    ToolCallBegins,
    ToolCallDelta,
)
from afm_mlx.server.chat_inputs import FREE_TEXT, AnswerFormat, json_object_format, schema_format
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.images import RequestImages
from afm_mlx.server.replies import JsonObject, bad_request
from afm_mlx.server.request_fields import openai_chats, openai_responses
from afm_mlx.server.request_fields.shared import MAX_STOP, MAX_STOPS
from afm_mlx.server.served_model import LEAST_LOGPROB, TokenLikelihood, TokenTexts
from afm_mlx.server.server_options import ServerOptions

Part = (
    openai_chats.ThinkingPart
    | openai_chats.TextPart
    | openai_chats.ImagePart
    | openai_responses.InputTextPart
    | openai_responses.InputImagePart
    | openai_responses.OutputTextPart
    | openai_chats.RefusalPart
)


PROMPT_NOT_STREAMED = (
    "log-probabilities of the prompt are not streamed; leave out stream, or the log-probabilities."
)


def text_of(
    content: str | Sequence[Part] | None, place: str = "", images: RequestImages | None = None
) -> str:
    """Join the texts and refusals of a message's parts, and the marks of its `images`.

    Raises:
        ApiError: 400 about an image, below the content's `place` in the body.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, openai_chats.ImagePart | openai_responses.InputImagePart):
            texts.append(_marked(part, f"{place}[{index}]", images))
        elif isinstance(part, openai_chats.RefusalPart):
            texts.append(part.refusal)
        elif not isinstance(part, openai_chats.ThinkingPart):
            texts.append(part.text)
    return "".join(texts)


def _marked(
    part: openai_chats.ImagePart | openai_responses.InputImagePart,
    place: str,
    images: RequestImages | None,
) -> str:
    if images is None:
        raise bad_request(
            f"{place} is an image, which only messages of the user and results of tools have. Put it there.",
            place,
            "unsupported_value",
        )
    given = part.image_url
    url, detail = (
        (given.url, given.detail) if isinstance(given, openai_chats.ImageUrl) else (given, None)
    )
    if isinstance(part, openai_responses.InputImagePart):
        detail = part.detail
    where = f"{place}.image_url"
    if url is None:
        raise bad_request(f"{where} is missing; it is needed.", where, "missing_required_parameter")
    return images.mark(url, where, detail)


def thought_of(content: str | Sequence[Part] | None) -> str:
    """Join the thoughts among a message's parts."""
    parts = () if content is None or isinstance(content, str) else content
    return "".join(p.thinking for p in parts if isinstance(p, openai_chats.ThinkingPart))


def limit(name: str, value: int | None, allows_none: bool = False) -> int | None:
    """Check a maximum number of new tokens (-1 is the rest of the context).

    Raises `ApiError` for 0, unless `allows_none`.
    """
    if value == 0 and not allows_none:
        raise bad_request(
            f"{name} is 0; 1 or more are allowed, or -1 for as many as the context holds.",
            name,
            "invalid_value",
        )
    return value


def check_count(n: int | None, options: ServerOptions, name: str = "n", prompts: int = 1) -> int:
    """Return the number of choices for each prompt; raise `ApiError` if they exceed the server's limit."""
    most = options.max_choices
    if (n or 1) * prompts > most:
        of = f" for each of {prompts} prompts" if prompts > 1 else ""
        raise bad_request(
            f"{name} is {n or 1}{of}; this server gives {most} answers at most to one request.",
            name if prompts == 1 else "prompt",
        )
    return n or 1


def sampled_request(body: openai_chats.SampledRequest, **inputs: Any) -> GenerationRequest:
    """Make a request with the body's sampling and stop strings, and with `inputs`, its other fields.

    Raises:
        ApiError: for values that can't be honoured.
    """
    for token in body.logit_bias or ():
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise bad_request(
                f"logit_bias has the token {shown(token)}; ids of tokens are needed, see /tokenize.",
                "logit_bias",
            )
    stop = [] if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
    if len(stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP for text in stop):
        raise bad_request(
            f"stop is {shown(body.stop)}; allowed are up to {MAX_STOPS} texts of 1 to {MAX_STOP} characters.",
            "stop",
        )
    return GenerationRequest(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 0.0,
        repetition_context_size=body.repetition_context_size,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        stop=stop,
        **inputs,
    )


# -- answer formats

STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""The kinds of `structured_outputs`."""


async def format_of(
    body: openai_chats.SampledRequest, response_format: openai_chats.ChatFormat | None
) -> AnswerFormat:
    """Read what an answer must look like, from vLLM's fields or OpenAI's, which only chats have.

    Raises:
        ApiError: for a format that can't be honoured, or several formats.
    """
    make: Callable[[], AnswerFormat] | None = None
    param = "response_format"
    if isinstance(response_format, openai_chats.JsonObjectFormat):
        make = json_object_format
    elif isinstance(response_format, openai_chats.ChatSchemaFormat):
        param = "response_format.json_schema.schema"
        given = response_format.json_schema
        schema = given.schema if given.schema is not None else {"type": "object"}
        make = lambda: schema_format(schema, param, given.name, given.description)  # noqa: E731
    structured, place = _structured_outputs(body)
    if structured is not None:
        if make is not None:
            raise bad_request(
                f"response_format and {place} both say what the answer must look like; choose one.",
                place,
            )
        make, param = _structured_format(structured, place)
    if make is None:
        return FREE_TEXT
    try:
        # In a thread, because a large schema takes a while.
        return await in_thread(make, compiles=True)
    except ConstraintError as error:
        raise bad_request(str(error), param, "invalid_schema") from error


def _structured_outputs(
    body: openai_chats.SampledRequest,
) -> tuple[openai_chats.StructuredOutputs | None, str]:
    """Return vLLM's `structured_outputs`, or its older fields such as `guided_json` as one, and its name."""
    names = (name for name in body.__struct_fields__ if name.startswith("guided_"))
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    if not given:
        return body.structured_outputs, "structured_outputs"
    if body.structured_outputs is not None:
        raise bad_request(
            f"structured_outputs and {', '.join(given)} say the same thing; choose one.",
            "structured_outputs",
        )
    newer = {name.removeprefix("guided_"): value for name, value in given.items()}
    return openai_chats.StructuredOutputs(**newer), next(iter(given))


def _structured_format(
    given: openai_chats.StructuredOutputs, place: str
) -> tuple[Callable[[], AnswerFormat], str]:
    """Return a function that makes the format, and the format's place in the body."""
    names = [n for n in STRUCTURED if getattr(given, n) not in (None, False)]
    if given.json is False:
        names.append("json")
    if len(names) != 1:
        raise bad_request(
            f"{place} has {', '.join(names) or 'nothing'}; exactly one of "
            f"{', '.join(STRUCTURED)} is needed.",
            place,
        )
    (name,) = names
    value = getattr(given, name)
    if name == "json" and isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{place}.json is no JSON ({error}).", f"{place}.json") from None
    makers: dict[str, Callable[[], Constraint]] = {
        "json": lambda: Constraint.json_schema(value),
        "regex": lambda: Constraint.regex(value),
        "choice": lambda: Constraint.choices(value),
        # GBNF defines its rules with ::=, llguidance's Lark with a colon.
        "grammar": lambda: Constraint.gbnf(value) if "::=" in value else Constraint.lark(value),
        "json_object": lambda: Constraint.json_schema({"type": "object"}),
    }
    return lambda: AnswerFormat(makers[name]()), f"{place}.{name}"


# -- responses


def head(kind: str, prefix: str, model: str) -> JsonObject:
    """Return the first fields of a reply, or of all events of a stream.

    `kind` is their `object`, such as "chat.completion"; `prefix` is put before the id.
    """
    new_id = f"{prefix}-{uuid.uuid4().hex}"
    return {"id": new_id, "object": kind, "created": int(time.time()), "model": model}


def tool_call(begun: ToolCallBegins) -> JsonObject:
    """Return a tool call as it is before its arguments."""
    function = {"name": begun.name, "arguments": ""}
    return {"id": begun.id, "type": "function", "function": function}


@dataclass
class WholeChoice:
    """A choice of a reply that is not streamed, built from events."""

    text: str = ""
    thought: str = ""
    calls: list[JsonObject] = field(default_factory=list)
    logprobs: list[TokenLikelihood] = field(default_factory=list)
    reason: str = ""
    prompt: PromptScored | None = None  # of the first choice, if requested

    def take(self, event: Event) -> None:
        """Add an event's text, thought, tool call, finish reason, or log-probabilities of the prompt."""
        match event:
            case PromptScored():
                self.prompt = event
            case TextDelta():
                self.text += event.text
                self.logprobs += event.logprobs
            case ThoughtDelta():
                self.thought += event.text
            case ToolCallBegins():
                self.calls.append(tool_call(event))
            case ToolCallDelta():
                self.calls[event.call]["function"]["arguments"] += event.arguments
            case Ended():
                self.reason = event.reason


def chat_logprobs(tokens: Sequence[TokenLikelihood]) -> JsonObject:
    """Return log-probabilities as the `logprobs` object of chat completions."""

    def one(token: TokenLikelihood) -> JsonObject:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}

    content = [{**one(token), "top_logprobs": [one(t) for t in token.top]} for token in tokens]
    return {"content": content, "refusal": None}


def prompt_logprobs(prompt: PromptScored, top: int, texts: TokenTexts) -> list[JsonObject | None]:
    """Return the log-probabilities of a prompt as vLLM writes them; None for its first token.

    Each other token's entry maps its id, and the `top` most likely ones, to log-probability, rank and text.
    """
    written: list[JsonObject | None] = [None]
    scores = prompt.scores.part(0, len(prompt.scores.ranks), top)
    columns = (scores.logprobs, scores.ranks, scores.top_tokens, scores.top_logprobs)
    each = zip(prompt.tokens[scores.start :], *(column.tolist() for column in columns), strict=True)
    for token, logprob, rank, tops, values in each:
        entry: JsonObject = {}
        ranked = enumerate(zip(tops, values, strict=True), start=1)
        for known, value, place in ((token, logprob, rank), *((t, v, r) for r, (t, v) in ranked)):
            text = texts.bytes_of(known).decode("utf-8", "replace")
            bounded = max(value, LEAST_LOGPROB)
            entry.setdefault(str(known), {"logprob": bounded, "rank": place, "decoded_token": text})
        written.append(entry)
    return written


def usage(counts: TokenCounts) -> JsonObject:
    """Return numbers of tokens as OpenAI's `usage` object."""
    written: JsonObject = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
    details = {"reasoning_tokens": counts.thought} if counts.thought else {}
    if counts.drafted is not None:
        details |= {
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.drafted - counts.accepted,
        }
    if details:
        written["completion_tokens_details"] = details
    return written


def timings(counts: TokenCounts) -> dict[str, float | None]:
    """Return the first choice's times, which leave out forced tokens; None values if nothing was sampled."""
    first, rate = counts.clock.until_first, counts.clock.rate
    return {
        "first_token_ms": None if first is None else round(1000 * first, 3),
        "tokens_per_second": None if rate is None else round(rate, 3),
    }
