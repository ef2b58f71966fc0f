"""`/v1/completions`: texts continued, without a chat template."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.server.bodies import read_body
from afm_mlx.server.errors import ApiError, bad_request
from afm_mlx.server.generation import Ask, Ended, Event, TextDelta, Usage, answer
from afm_mlx.server.openai_fields import (
    check_count,
    constraint_of,
    guided,
    limit,
    sampling_of,
    usage,
)
from afm_mlx.server.request_fields import PROMPTS, CompletionRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import EventStream, event, json_response, while_connected
from afm_mlx.server.token_texts import TokenLogprob
from afm_mlx.server.workers import in_thread


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    served: ServedModel = request.app.state.served
    body = await read_body(request, CompletionRequest)
    asked = await while_connected(request, _asked(body, served, request.state.client))
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_chunks(served, asked, with_usage), request)
    return json_response(await while_connected(request, _completion(served, asked)))


@dataclass(frozen=True)
class _Asked:
    """What a body asks for.

    Args:
        model: the model id.
        asks: one for each prompt.
        echoes: what the choices of each prompt begin with.
        n: choices for each prompt that are told; there may be more, of which they are the best.
        tells_logprobs: whether the response has log-probabilities.
    """

    model: str
    asks: Sequence[Ask]
    echoes: Sequence[str]
    n: int
    tells_logprobs: bool


def _check(body: CompletionRequest) -> None:
    """Raise `ApiError` for fields that can't be honoured together."""
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "logprobs can't be combined with echo: logprobs of the prompt are not computed.",
            "logprobs",
            "unsupported_parameter",
        )
    if body.best_of is None:
        return
    if body.best_of < (body.n or 1):
        raise bad_request(
            f"best_of is {body.best_of} and n is {body.n}; the best n are chosen of best_of.",
            "best_of",
        )
    if body.stream and body.best_of > (body.n or 1):
        raise bad_request("best_of can't be streamed: the best are known in the end.", "best_of")


async def _asked(body: CompletionRequest, served: ServedModel, client: str) -> _Asked:
    _check(body)
    adapter = served.adapter_of(body.model)
    structured, name = guided(body)
    constraint, _ = await constraint_of(None, structured, name)
    given = await in_thread(lambda: _prompts(body.prompt))
    n = check_count(body.n, served, "n", len(given))
    best_of = check_count(body.best_of or n, served, "best_of", len(given))
    prompts, echoes = await in_thread(lambda: _encoded(given, served, bool(body.echo)))
    ask = Ask(
        answer=constraint,
        adapter=adapter,
        max_tokens=limit("max_tokens", body.max_tokens),
        **sampling_of(body),
        n=best_of,
        logprobs=0 if best_of > n and body.logprobs is None else body.logprobs,
        client=client,
    )
    asks = [replace(ask, prompt=prompt) for prompt in prompts]
    return _Asked(body.model, asks, echoes, n, body.logprobs is not None)


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds not in ({str}, {list}):
        raise bad_request(f"prompt is {shown(prompt)}. {PROMPTS.hint}", "prompt")
    return prompt


def _encoded(
    prompts: Sequence[str | list[int]], served: ServedModel, echo: bool
) -> tuple[list[list[int]], list[str]]:
    """Token ids of prompts, of which those that were given are checked; and what their answers begin with."""
    encoded, echoes = [], []
    for index, prompt in enumerate(prompts):
        place = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        text = prompt if isinstance(prompt, str) else None
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
        encoded.append(prompt)
        if echo:
            echoes.append(served.tokenizer.decode(prompt) if text is None else text)
    return encoded, echoes if echo else [""] * len(encoded)


async def _answers(
    served: ServedModel, asks: Sequence[Ask]
) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of several answers as they come, each with the number of its prompt."""
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue()

    async def take(number: int, ask: Ask) -> None:
        try:
            async with aclosing(answer(served, ask)) as events:
                async for each in events:
                    queue.put_nowait((number, each))
            queue.put_nowait((number, None))
        except Exception as error:
            queue.put_nowait((number, error))

    tasks = [asyncio.create_task(take(*each)) for each in enumerate(asks)]
    try:
        running = len(tasks)
        while running:
            number, each = await queue.get()
            if isinstance(each, Exception):
                raise _of_prompt(each, number, len(asks))
            if each is None:
                running -= 1
            else:
                yield number, each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _of_prompt(error: Exception, number: int, count: int) -> Exception:
    """An error that says which of several prompts it is of."""
    if isinstance(error, ApiError) and error.param == "prompt" and count > 1:
        error.param = f"prompt[{number}]"
    return error


class _Logprobs:
    """Log-probabilities of a choice in the form of this route, with places in its text."""

    def __init__(self, before: str):
        self._start, self._bytes = len(before), b""

    def told(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Those of further tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._start + len(self._bytes.decode("utf-8", "ignore")))
            self._bytes += token.bytes
        return {
            "text_offset": offsets,
            "token_logprobs": [token.logprob for token in tokens],
            "tokens": [_name(token) for token in tokens],
            "top_logprobs": [
                {_name(each): each.logprob for each in (*token.top, token)} for token in tokens
            ]
            if any(token.top for token in tokens)
            else None,
        }


def _name(token: TokenLogprob) -> str:
    """A token's text, or its bytes where they are a part of a character."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


@dataclass
class _Choice:
    """A choice while it comes."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str = ""

    @property
    def score(self) -> float:
        """The mean log-probability of its tokens."""
        return sum(t.logprob for t in self.logprobs) / max(1, len(self.logprobs))


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }


async def _completion(served: ServedModel, asked: _Asked) -> dict[str, Any]:
    """Whole answers: those of the first prompt, then those of the next."""
    choices = [[_Choice() for _ in range(ask.n)] for ask in asked.asks]
    counts: list[Usage] = []
    async with aclosing(_answers(served, asked.asks)) as events:
        async for number, each in events:
            if isinstance(each, Usage):
                counts.append(each)
            elif isinstance(each, TextDelta):
                choices[number][each.index].text += each.text
                choices[number][each.index].logprobs += each.logprobs
            elif isinstance(each, Ended):
                choices[number][each.index].reason = each.reason
    told: list[dict[str, Any]] = []
    for echo, of_prompt in zip(asked.echoes, choices, strict=True):
        best = of_prompt
        if len(of_prompt) > asked.n:
            best = sorted(of_prompt, key=lambda choice: -choice.score)[: asked.n]
        for choice in best:
            logprobs = _Logprobs(echo).told(choice.logprobs) if asked.tells_logprobs else None
            told.append(
                {
                    "index": len(told),
                    "text": echo + choice.text,
                    "logprobs": logprobs,
                    "finish_reason": choice.reason,
                }
            )
    return {**_head(asked.model), "choices": told, "usage": _total(counts)}


def _total(counts: Sequence[Usage]) -> dict[str, Any]:
    guessed = [each.guessed for each in counts if each.guessed is not None]
    return usage(
        Usage(
            sum(each.prompt for each in counts),
            sum(each.cached for each in counts),
            sum(each.completion for each in counts),
            sum(guessed) if guessed else None,
            sum(each.accepted for each in counts),
        )
    )


async def _chunks(
    served: ServedModel, asked: _Asked, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of streamed answers."""
    head = _head(asked.model)
    if with_usage:
        head["usage"] = None

    def chunk(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice]})

    counts: list[Usage] = []
    places: dict[int, _Logprobs] = {}
    async with aclosing(_answers(served, asked.asks)) as events:
        async for number, each in events:
            if isinstance(each, Usage):
                counts.append(each)
                continue
            index, echo = number * asked.n + each.index, asked.echoes[number]
            if index not in places:
                places[index] = _Logprobs(echo)
                if echo:
                    yield chunk(index, echo)
            if isinstance(each, TextDelta):
                told = places[index].told(each.logprobs) if each.logprobs else None
                yield chunk(index, each.text, told)
            elif isinstance(each, Ended):
                yield chunk(index, "", None, each.reason)
    if with_usage:
        yield event({**head, "choices": [], "usage": _total(counts)})
    yield event("[DONE]")
