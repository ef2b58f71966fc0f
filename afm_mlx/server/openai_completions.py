"""`/v1/completions`: continues texts, without a chat template."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.server.admission import in_thread
from afm_mlx.server.answer_events import (
    Ended,
    Event,
    PromptScored,
    TextDelta,
    TokenCounts,
    answer_events,
)
from afm_mlx.server.bodies import read_body
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.openai_fields import (
    PROMPT_NOT_STREAMED,
    WholeChoice,
    check_count,
    format_of,
    head,
    limit,
    prompt_logprobs,
    sampled_request,
    usage,
)
from afm_mlx.server.replies import (
    ApiError,
    EventStream,
    JsonObject,
    bad_request,
    event,
    json_response,
    while_connected,
)
from afm_mlx.server.request_fields.openai_chats import PROMPTS, CompletionRequest
from afm_mlx.server.served_model import ServedModel, TokenLikelihood


async def completions(request: Request) -> Response:
    """Continue one prompt or several, whole or as a stream."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, CompletionRequest)
    lease = models.lease(request, body.model)
    if body.stream:
        return EventStream(_chunks(lease, body), request)
    return json_response(await while_connected(request, _completion(lease, body)))


# -- from a body to requests


@dataclass(frozen=True)
class _CompletionRequests:
    """The generation requests of one body, one per prompt, and the text that each prompt's choices begin with.

    The response has `n` choices for each prompt, the best ones of a request that has more.
    """

    requests: Sequence[GenerationRequest]
    echoes: Sequence[str]
    n: int


async def _completion_requests(body: CompletionRequest, lease: ModelLease) -> _CompletionRequests:
    served = lease.served
    echoed = body.logprobs if body.echo else None
    tops = [top for top in (echoed, body.prompt_logprobs) if top is not None]
    if tops and body.stream:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise bad_request(PROMPT_NOT_STREAMED, name, "unsupported_parameter")
    if body.best_of is not None:
        if body.best_of < (body.n or 1):
            raise bad_request(
                f"best_of is {body.best_of} and n is {body.n}; the best n are chosen of best_of.",
                "best_of",
            )
        if body.stream and body.best_of > (body.n or 1):
            raise bad_request(
                "best_of can't be streamed: the best are known at the end.", "best_of"
            )
    max_tokens = limit("max_tokens", body.max_tokens, bool(body.echo) or bool(tops))
    format = await format_of(body, None)
    if max_tokens == 0 and format.constraint is not None:
        raise bad_request(
            "max_tokens is 0, and the answer is to have a format; leave out one.", "max_tokens"
        )
    given = await in_thread(lambda: prompts_of(body.prompt, "prompt"))
    n = check_count(body.n, served.options, "n", len(given))
    best_of = check_count(body.best_of or n, served.options, "best_of", len(given))
    prompts, echoes = await in_thread(lambda: _encoded(given, served, bool(body.echo)))
    request = sampled_request(
        body,
        format=format,
        adapter=lease.adapter,
        max_tokens=max_tokens,
        n=best_of,
        logprobs=0 if best_of > n and body.logprobs is None else body.logprobs,
        prompt_logprobs=max(tops, default=None),
        # Clients that read an echo's log-probabilities count on one for each token that was generated.
        with_end=echoed is not None,
        client=lease.client,
    )
    requests = [replace(request, prompt=prompt) for prompt in prompts]
    return _CompletionRequests(requests, echoes, n)


def prompts_of(given: str | list[Any], field: str) -> list[str | list[int]]:
    """Return the prompts of a body's `field`, each a text or ids; raise a 400 for an empty or mixed list."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]
    if kinds not in ({str}, {list}):
        raise bad_request(f"{field} is {shown(given)}. {PROMPTS.hint}", field)
    return given


def _encoded(
    prompts: Sequence[str | list[int]], served: ServedModel, echo: bool
) -> tuple[list[list[int]], list[str]]:
    """Return the checked token ids of prompts, and the texts that answers begin with: prompts if `echo`."""
    encoded, echoes = [], []
    for index, prompt in enumerate(prompts):
        place = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        encoded.append(encoded_prompt(prompt, served, place))
        if echo:
            text = prompt if isinstance(prompt, str) else None
            echoes.append(served.tokenizer.decode(encoded[-1]) if text is None else text)
    return encoded, echoes if echo else [""] * len(encoded)


def encoded_prompt(prompt: str | list[int], served: ServedModel, place: str) -> list[int]:
    """Return the checked token ids of a prompt, a text or token ids; raise a 400 about `place`."""
    if isinstance(prompt, str):
        served.check_length([prompt], place)
        try:
            prompt = list(served.tokenizer.encode(prompt, add_special_tokens=True))
        except TokenizerError as error:
            raise bad_request(str(error), place) from error
    else:
        served.check_tokens(prompt, place)
    unknown = [token for token in prompt if not 0 <= token < served.vocab_size]
    if unknown or not prompt:
        got = f"the token {unknown[0]}" if unknown else "no token"
        raise bad_request(
            f"{place} has {got}; needed are ids from 0 to {served.vocab_size - 1}, at least one.",
            place,
        )
    return prompt


# -- answers


async def _all_events(
    lease: ModelLease, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Yield the events of several answers as they come, each with the number of its prompt."""
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()

    async def take(number: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(answer_events(lease, request)) as events:
                async for each in events:
                    queue.put_nowait((number, each))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(take(*each)) for each in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            number, each = await queue.get()
            if isinstance(each, Exception):
                if isinstance(each, ApiError) and each.param == "prompt" and len(requests) > 1:
                    each.param = f"prompt[{number}]"
                raise each
            if each is None:
                running -= 1
            else:
                yield number, each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Logprobs:
    """Converts a choice's log-probabilities to JSON, with offsets into its text, which begins with `before`.

    `top` is the number of most likely tokens that were requested.
    """

    def __init__(self, before: str, top: int):
        self._start, self._bytes, self._top = len(before), b"", top

    def written(self, tokens: Sequence[TokenLikelihood]) -> JsonObject:
        """Return the `logprobs` object of the choice's next tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._start + len(self._bytes.decode("utf-8", "ignore")))
            self._bytes += token.bytes
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [_name(token) for token in tokens],
            "top_logprobs": [_by_name(token) for token in tokens] if self._top else None,
        }

    def of_prompt(self, prompt: PromptScored, served: ServedModel) -> JsonObject:
        """Return the `logprobs` object of an echoed prompt, whose first token has none."""
        likelihoods = served.token_texts.prompt_likelihoods(prompt.tokens, prompt.scores, self._top)
        names = [
            _name(TokenLikelihood(t, served.token_texts.bytes_of(t), 0)) for t in prompt.tokens
        ]
        offsets, end = [], 0
        detokenizer = served.tokenizer.detokenizer
        for token in prompt.tokens:
            offsets.append(min(end, self._start))
            detokenizer.add_token(token)
            end += len(detokenizer.last_segment)
        return {
            "text_offset": offsets,
            "token_logprobs": [None, *(token.logprob for token in likelihoods)],
            "tokens": names,
            "top_logprobs": [None, *map(_by_name, likelihoods)] if self._top else None,
        }


def _by_name(token: TokenLikelihood) -> dict[str, float]:
    """Return the log-probabilities of a token and the most likely ones at its position, by their texts."""
    named: dict[str, float] = {}
    for each in (*token.top, token):  # of two tokens with one text, the likelier comes first
        named.setdefault(_name(each), each.logprob)
    return named


def _name(token: TokenLikelihood) -> str:
    """Return a token's text, or its bytes in OpenAI's notation if they are only a part of a character."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


async def _completion(lease: ModelLease, body: CompletionRequest) -> JsonObject:
    """Return the response: the choices of the first prompt, then the choices of the next."""
    counts: list[TokenCounts] = []
    async with lease:
        made = await _completion_requests(body, lease)
        choices = [[WholeChoice() for _ in range(request.n)] for request in made.requests]
        async with aclosing(_all_events(lease, made.requests)) as events:
            async for number, each in events:
                if isinstance(each, TokenCounts):
                    counts.append(each)
                else:
                    choices[number][each.index].take(each)
        # Admitted already: it is answered even if the server stops meanwhile.
        written = await in_thread(
            lambda: _choices(lease.served, body, made, choices), is_admitted=True
        )
    return {
        **head("text_completion", "cmpl", body.model),
        "choices": written,
        "usage": _total(counts),
    }


def _choices(
    served: ServedModel,
    body: CompletionRequest,
    made: _CompletionRequests,
    choices: Sequence[Sequence[WholeChoice]],
) -> list[JsonObject]:
    """Return the choices of a response, the best ones for each prompt; slow for the tokens of long prompts."""
    written: list[JsonObject] = []
    for echo, best in zip(made.echoes, choices, strict=True):
        prompt, of_prompt = best[0].prompt, None
        if prompt is not None and body.echo and body.logprobs is not None:
            of_prompt = _Logprobs(echo, body.logprobs).of_prompt(prompt, served)
        more: JsonObject = {}
        if prompt is not None and body.prompt_logprobs is not None:
            top = body.prompt_logprobs
            more = {"prompt_logprobs": prompt_logprobs(prompt, top, served.token_texts)}
        if len(best) > made.n:
            best = sorted(best, key=_mean_logprob, reverse=True)[: made.n]
        for choice in best:
            logprobs = None
            if body.logprobs is not None:
                logprobs = _Logprobs(echo, body.logprobs).written(choice.logprobs)
                if of_prompt is not None:
                    logprobs = {k: v and [*v, *logprobs[k]] for k, v in of_prompt.items()}
            reply = {"index": len(written), "text": echo + choice.text, "logprobs": logprobs}
            written.append({**reply, "finish_reason": choice.reason, **more})
    return written


def _mean_logprob(choice: WholeChoice) -> float:
    return sum(t.logprob for t in choice.logprobs) / max(1, len(choice.logprobs))


def _total(counts: Sequence[TokenCounts]) -> JsonObject:
    drafted = [each.drafted for each in counts if each.drafted is not None]
    return usage(
        TokenCounts(
            sum(each.prompt for each in counts),
            sum(each.cached for each in counts),
            sum(each.completion for each in counts),
            drafted=sum(drafted) if drafted else None,
            accepted=sum(each.accepted for each in counts),
        )
    )


async def _chunks(lease: ModelLease, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of a stream."""
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    start = head("text_completion", "cmpl", body.model) | ({"usage": None} if with_usage else {})

    def chunk(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**start, "choices": [choice]})

    counts: list[TokenCounts] = []
    begun: dict[int, _Logprobs] = {}
    async with lease:
        made = await _completion_requests(body, lease)
        async with aclosing(_all_events(lease, made.requests)) as events:
            async for number, each in events:
                if isinstance(each, TokenCounts):
                    counts.append(each)
                    continue
                index, echo = number * made.n + each.index, made.echoes[number]
                if index not in begun:
                    begun[index] = _Logprobs(echo, body.logprobs or 0)
                    if echo:
                        yield chunk(index, echo)
                if isinstance(each, TextDelta):
                    logprobs = begun[index].written(each.logprobs) if each.logprobs else None
                    yield chunk(index, each.text, logprobs)
                elif isinstance(each, Ended):
                    yield chunk(index, "", None, each.reason)
    if with_usage:
        yield event({**start, "choices": [], "usage": _total(counts)})
    yield event("[DONE]")
