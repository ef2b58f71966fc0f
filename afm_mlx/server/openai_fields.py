"""Fields that several of OpenAI's routes have, checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import msgspec
from msgspec import Meta

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Usage
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.token_texts import TokenLogprob

MAX_STOPS, MAX_STOP = 16, 1000
"""Stop strings of a request, and characters of one, at most."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Stop = str | list[str] | None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool | None = None


def check_stream(options: StreamOptions | None, stream: bool | None) -> None:
    """Raise `ApiError` for options that can't be honoured, or of no stream."""
    if options is None:
        return
    if not stream:
        raise bad_request("stream_options needs stream: true.", "stream_options", "invalid_value")
    if options.include_obfuscation:
        unsupported("stream_options.include_obfuscation", "chunks are not padded")


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class JsonObjectFormat(
    msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    pass


class JsonSchemaFormat(
    msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer must look like, under vLLM's names; exactly one of them."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SampledRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats and completions share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    seed: Seed | None = None
    stop: Stop = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    # What others' servers have besides
    top_k: Whole | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # The name of who asks, for OpenAI's own use
    user: str | None = None

    @property
    def guided(self) -> dict[str, Any]:
        """The fields `guided_json` and so on, by their names."""
        names = (name for name in self.__struct_fields__ if name.startswith("guided_"))
        return {name: getattr(self, name) for name in names}


def unsupported(name: str, why: str) -> NoReturn:
    """Raise for a field that can't be honoured."""
    raise bad_request(f"{name} can't be honoured: {why}.", name, "unsupported_parameter")


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
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, place: str
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
    elif isinstance(response_format, JsonSchemaFormat):
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
        return await asyncio.to_thread(make), shown_format
    except ConstraintError as error:
        raise bad_request(str(error), param, "invalid_schema") from error


def _json_object() -> Constraint:
    return Constraint.json_schema({"type": "object"})


def _schema(schema: Any) -> Callable[[], Constraint]:
    return lambda: Constraint.json_schema(schema)


def _of_structured(given: StructuredOutputs, place: str) -> tuple[Callable[[], Constraint], str]:
    names = [n for n in given.__struct_fields__ if getattr(given, n) not in (None, False)]
    if given.json is False:
        names.append("json")
    if len(names) != 1:
        raise bad_request(
            f"{place} has {', '.join(names) or 'nothing'}; exactly one of "
            f"{', '.join(given.__struct_fields__)} is needed.",
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


def guided(
    structured: StructuredOutputs | None,
    legacy: Mapping[str, Any],
) -> tuple[StructuredOutputs | None, str]:
    """vLLM's newer field, or its older ones (`guided_json` and so on) in its form.

    Returns:
        What is asked for, and the name under which it was.

    Raises:
        ApiError: when both are there.
    """
    given = {name: value for name, value in legacy.items() if value is not None}
    if not given:
        return structured, "structured_outputs"
    if structured is not None:
        raise bad_request(
            f"structured_outputs and {', '.join(given)} say the same thing; choose one.",
            "structured_outputs",
        )
    names = {name.removeprefix("guided_"): value for name, value in given.items()}
    return StructuredOutputs(**names), next(iter(given))


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
