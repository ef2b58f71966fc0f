"""Requests of one body that end with their prompts: vectors, and scores of documents.

They run a few at a time, as one answer of their client, and take no place from answers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from afm_mlx.engine.request import Request, TokenResponse
from afm_mlx.errors import AFMError
from afm_mlx.server.answer_events import row_error
from afm_mlx.server.metrics import AnswerClock
from afm_mlx.server.model_registry import ModelLease
from afm_mlx.server.replies import ApiError

MAX_INPUTS = 2048
"""Maximum number of texts of one request."""
_LOG = logging.getLogger("afm_mlx.server")


async def run_prompts(
    lease: ModelLease, requests: Sequence[Request], place: Callable[[int], str]
) -> list[TokenResponse]:
    """Run requests with `max_tokens` 0, and return their responses, in the requests' order.

    Args:
        lease: of the requests' model and adapter; it is entered.
        requests: the engine's requests, without adapter and client.
        place: returns the body's field that the request of an index is from, for errors.

    Raises:
        ApiError: for the first request that can't be honoured; 429, 503 and 504 as answers have them.
    """
    served, options = lease.served, lease.served.options
    loop = asyncio.get_running_loop()
    clock, stopped = AnswerClock(), loop.create_future()
    found: dict[int, TokenResponse] = {}
    left = iter(enumerate(requests))

    def stop(error: ApiError) -> None:
        if not stopped.done():
            stopped.set_exception(error)

    def begun(done: int, tokens: int) -> None:
        loop.call_soon_threadsafe(served.metrics.scheduled, clock)

    async def run_next() -> None:
        for index, request in left:
            row = replace(request, adapter=lease.adapter, client=lease.client, on_prefill=begun)
            if options.log_prompts:
                _LOG.info("Prompt: %r", served.tokenizer.decode(row.prompt))
            try:
                async with aclosing(served.engine.stream(row)) as responses:
                    async for response in responses:
                        found[index] = response
            except AFMError as error:
                raise row_error(served, lease.adapter, error, place(index)) from error
            served.metrics.prompt(len(row.prompt), found[index].cached_tokens)

    with served.admission.admitted(lease.client, 1, stop):
        reason = "abort"
        served.metrics.waits()
        tasks = [
            asyncio.ensure_future(run_next()) for _ in range(min(options.max_batch, len(requests)))
        ]
        work = asyncio.gather(*tasks)
        try:
            waited = await asyncio.wait(
                (work, stopped), timeout=options.timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not waited[0]:
                raise ApiError(
                    504, f"The answer was not complete after {options.timeout:g} s.", code="timeout"
                )
            for done in waited[0]:
                done.result()
            reason = "stop"
        except Exception:
            reason = "error"
            raise
        finally:
            served.metrics.leaves(clock, reason, 0)
            stopped.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(work, return_exceptions=True)
    return [found[index] for index in range(len(requests))]


def check_prompt(lease: ModelLease, prompt: Sequence[int], place: str) -> None:
    """Raise a 400 about the field `place` if the context can't hold a prompt."""
    size = lease.served.context_size
    if len(prompt) > size:
        raise ApiError(
            400,
            f"{place} has {len(prompt)} tokens, and the context of {lease.served.name} holds {size}. "
            "Shorten it.",
            param=place,
            code="context_length_exceeded",
        )
