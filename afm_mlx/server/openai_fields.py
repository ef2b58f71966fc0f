"""Fields that several of OpenAI's routes have, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Usage
from afm_mlx.server.request_fields import (
    MAX_STOP,
    MAX_STOPS,
    ChatFormat,
    ChatSchemaFormat,
    JsonObjectFormat,
    SampledRequest,
    Stop,
    StructuredOutputs,
)
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.token_texts import TokenLogprob
from afm_mlx.server.workers import in_thread


def limit(name: str, value: int | None) -> int | None:
    """The most new tokens that a field allows; -1 is as many as the context holds.

    Raises:
        ApiError: for 0.
    """
    if value == 0:
        raise bad_request(
            f"{name} is 0; 1 or more are allowed, or -1 for as many as the context holds.",
            name,
            "invalid_value",
        )
    return value


def stops(stop: Stop) -> list[str]:
    """Stop strings.

    Raises:
        ApiError: for empty, too many or too long ones.
    """
    given = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if len(given) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP for text in given):
        raise bad_request(
            f"stop is {shown(stop)}; allowed are up to {MAX_STOPS} texts of 1 to {MAX_STOP} characters.",
            "stop",
        )
    return given


def biases(logit_bias: Mapping[str, float] | None) -> dict[int, float]:
    """Biases by token ids, which JSON has as texts.

    Raises:
        ApiError: for what is no id.
    """
    found = {}
    for token, bias in (logit_bias or {}).items():
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise bad_request(
                f"logit_bias has the token {shown(token)}; ids of tokens are needed, see /tokenize.",
                "logit_bias",
            )
        found[int(token)] = bias
    return found


def check_count(n: int | None, served: ServedModel, name: str = "n", prompts: int = 1) -> int:
    """The number of choices for each prompt.

    Raises:
        ApiError: for more than the server gives in one request.
    """
    most = served.options.max_choices
    if (n or 1) * prompts > most:
        of = f" for each of {prompts} prompts" if prompts > 1 else ""
        raise bad_request(
            f"{name} is {n or 1}{of}; this server gives {most} answers at most to one request.",
            name if prompts == 1 else "prompt",
        )
    return n or 1


async def constraint_of(
    response_format: ChatFormat | None, structured: StructuredOutputs | None, place: str
) -> tuple[Constraint | None, dict[str, Any] | None]:
    """What an answer must look like, and the response format that a chat shows to the model.

    Args:
        response_format: OpenAI's field.
        structured: vLLM's; only one of the two may ask for something.
        place: the latter's name in the body.

    Raises:
        ApiError: for what can't be honoured, with its place.
    """
    shown_format = None
    make: Callable[[], Constraint] | None = None
    param = "response_format"
    if isinstance(response_format, JsonObjectFormat):
        make = _json_object
    elif isinstance(response_format, ChatSchemaFormat):
        param = "response_format.json_schema.schema"
        given = response_format.json_schema
        schema = given.schema if given.schema is not None else {"type": "object"}
        described = {} if given.description is None else {"description": given.description}
        shown_format = {
            "type": "json_schema",
            "json_schema": {"name": given.name, **described, "schema": schema},
        }
        make = _schema(schema)
    if structured is not None:
        if make is not None:
            raise bad_request(
                f"response_format and {place} both say what the answer must look like; choose one.",
                place,
            )
        make, param = _of_structured(structured, place)
    if make is None:
        return None, None
    try:
        # A large schema takes a while to be compiled, and others must not wait for that.
        return await in_thread(make, compiles=True), shown_format
    except ConstraintError as error:
        raise bad_request(str(error), param, "invalid_schema") from error


def _json_object() -> Constraint:
    return Constraint.json_schema({"type": "object"})


def _schema(schema: Any) -> Callable[[], Constraint]:
    return lambda: Constraint.json_schema(schema)


STRUCTURED = ("json", "regex", "choice", "grammar", "json_object")
"""What `structured_outputs` may ask for."""


def _of_structured(given: StructuredOutputs, place: str) -> tuple[Callable[[], Constraint], str]:
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
    if name == "json":
        if isinstance(value, str):
            try:
                value = msgspec.json.decode(value)
            except (msgspec.DecodeError, RecursionError) as error:
                raise bad_request(f"{place}.json is no JSON ({error}).", f"{place}.json") from None
        return _schema(value), f"{place}.json"
    makers: dict[str, Callable[[], Constraint]] = {
        "regex": lambda: Constraint.regex(value),
        "choice": lambda: Constraint.choices(value),
        "grammar": lambda: _grammar(value),
        "json_object": _json_object,
    }
    return makers[name], f"{place}.{name}"


def _grammar(text: str) -> Constraint:
    """A grammar in GBNF, which defines its rules with `::=`, or in llguidance's Lark."""
    return Constraint.gbnf(text) if "::=" in text else Constraint.lark(text)


def guided(body: SampledRequest) -> tuple[StructuredOutputs | None, str]:
    """vLLM's newer field, or its older ones (`guided_json` and so on) in its form.

    Returns:
        What is asked for, and the name under which it was.

    Raises:
        ApiError: when both are there.
    """
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
    return StructuredOutputs(**newer), next(iter(given))


# -- log-probabilities, as responses have them


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Log-probabilities of tokens in the form of chat completions."""
    return {"content": [_chat_logprob(token) for token in tokens], "refusal": None}


def _chat_logprob(token: TokenLogprob) -> dict[str, Any]:
    return {
        **_one(token),
        "top_logprobs": [_one(other) for other in token.top],
    }


def _one(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}


def sampling_of(body: SampledRequest) -> dict[str, Any]:
    """The fields of an `Ask` about sampling, of a body of chats or completions.

    Raises:
        ApiError: for a bias or stop strings that can't be honoured.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    penalties = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    return {
        **{name: getattr(body, name) for name in names},
        **{name: getattr(body, name) or 0.0 for name in penalties},
        "logit_bias": biases(body.logit_bias),
        "stop": stops(body.stop),
    }


def usage(counts: Usage) -> dict[str, Any]:
    """Counts of tokens in OpenAI's form."""
    told: dict[str, Any] = {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
    if counts.guessed is not None:
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": counts.accepted,
            "rejected_prediction_tokens": counts.guessed - counts.accepted,
        }
    return told


def timings(counts: Usage) -> dict[str, float | None]:
    """How fast the first choice came, without what its constraint forced; null where nothing was drawn."""
    first = counts.until_first
    return {
        "first_token_ms": None if first is None else round(1000 * first, 3),
        "tokens_per_second": None if counts.rate is None else round(counts.rate, 3),
    }
