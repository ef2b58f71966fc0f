"""Streams for asyncio: they take turns, and tasks can be cancelled."""

import asyncio

import pytest

from afm_mlx import threads
from afm_mlx.engine.generation import generate, stream_generate_async
from afm_mlx.errors import RequestError
from tests.tools.engines import some_prompt


def test_streams_run_side_by_side(rng, model, tokenizer):
    prompts = [some_prompt(rng, length) for length in (3, 8, 5)]
    order = []

    async def one(prompt):
        text = ""
        async for response in stream_generate_async(model, tokenizer, prompt, max_tokens=12):
            order.append(len(prompt))
            text += response.text
        return text

    async def everything():
        whole = asyncio.to_thread(generate, model, tokenizer, prompts[0], max_tokens=12)
        return await asyncio.gather(*map(one, prompts), whole)

    wanted = [generate(model, tokenizer, prompt, max_tokens=12) for prompt in prompts]
    assert asyncio.run(everything()) == [*wanted, wanted[0]]
    assert order != sorted(order, key=order.index)  # they take turns


def test_tasks_can_be_cancelled_and_fail(rng, model, tokenizer):
    async def stream(prompt):
        async for _ in stream_generate_async(model, tokenizer, prompt, max_tokens=-1):
            pass

    async def main():
        task = asyncio.create_task(stream(some_prompt(rng, 3)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestError, match="empty"):
            await stream([])
        # MLX's thread is free again.
        return await asyncio.wait_for(asyncio.wrap_future(threads.submit(int)), 60)

    assert asyncio.run(main()) == 0
