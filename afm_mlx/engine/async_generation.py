"""`stream_generate` for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from afm_mlx import threads
from afm_mlx.engine.generation import GenerationResponse, stream_generate
from afm_mlx.errors import RequestError


async def stream_generate_async(*args: Any, **options: Any) -> AsyncIterator[GenerationResponse]:
    """Yield what `stream_generate` yields, without blocking the event loop.

        async for response in stream_generate_async(model, tokenizer, prompt, max_tokens=100):
            print(response.text, end="")

    Several of them take turns, token by token. Samplers, logits processors and callbacks run in MLX's thread.
    A task that is cancelled ends its answer after the token at hand.

    Args:
        args, options: those of `stream_generate`.

    Raises:
        AFMError: as `stream_generate` does.
    """
    stream = stream_generate(*args, **options)
    try:
        while True:
            response = await asyncio.wrap_future(threads.submit(next, stream, None))
            if response is None:
                return
            yield response
    finally:
        # Once Python has begun to end, the generator can't be closed, and need not be.
        with contextlib.suppress(RequestError):
            threads.submit(stream.close)  # type: ignore[attr-defined]
