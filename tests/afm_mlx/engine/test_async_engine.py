"""One engine for many tasks: their answers are the same as in single runs, whatever joins, leaves or fails."""

import asyncio
import gc
import threading
import weakref
from contextlib import aclosing, contextmanager
from types import SimpleNamespace

import mlx.core as mx
import pytest

from afm_mlx import threads
from afm_mlx.engine import async_engine
from afm_mlx.engine.async_engine import AsyncEngine, StepError
from afm_mlx.engine.generation import generate
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request
from afm_mlx.engine.scheduler import EngineGroup
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import ContextLengthError, RequestError
from afm_mlx.guidance.constraint import Constraint
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.drafts import FaultyDrafter
from tests.tools.engines import some_prompt


@pytest.fixture
def engine(model, tokenizer):
    return AsyncEngine(model, tokenizer)


async def answer(engine, prompt, count=12, **options):
    text = ""
    request = Request(prompt, count, logprobs=False, **options)
    async for response in engine.stream(request):
        text += response.text
    return text


async def idle(engine):
    """Wait for the jobs that are queued in MLX's thread, and those that they queue."""
    for _ in range(3):
        await asyncio.wrap_future(threads.submit(int))
    return engine.rows


def test_tasks_of_several_loops_share_a_batch_and_have_the_answers_of_single_runs(
    rng, model, tokenizer, engine
):
    prompts = [some_prompt(rng, n) for n in (3, 14, 1, 7, 5, 9)]
    limits = [*rng.integers(1, 30, 5).tolist(), 60]
    wanted = [
        generate(model, tokenizer, p, max_tokens=n) for p, n in zip(prompts, limits, strict=True)
    ]
    most = 0

    async def one(index):
        nonlocal most
        text = ""
        async for response in engine.stream(Request(prompts[index], limits[index])):
            most = max(most, engine.rows)
            text += response.text
        return text

    async def some(indices):
        return await asyncio.gather(*map(one, indices))

    found = {}
    other = threading.Thread(target=lambda: found.update(other=asyncio.run(some([4, 5]))))
    other.start()
    assert asyncio.run(some([0, 1, 2, 3])) == wanted[:4]
    other.join()
    assert found["other"] == wanted[4:]
    assert most >= 3


def test_a_row_is_gone_when_its_iterator_is_left_or_its_task_cancelled(rng, engine):
    async def leave(how):
        responses = engine.stream(Request(some_prompt(rng, 4), -1))
        if how == "never begun":
            return
        if how == "closed":
            async with aclosing(responses):
                await anext(responses)
            return
        async for _ in responses:
            if how == "broken off":
                break
            if how == "failed":
                raise KeyError

    async def main():
        for how in (
            "never begun",
            "closed",
            "broken off",
            "failed",
            "cancelled",
            "cancelled at once",
        ):
            company = asyncio.create_task(answer(engine, some_prompt(rng, 3), 10**6))
            task = asyncio.create_task(leave(how))
            if "cancelled" in how:
                while how == "cancelled" and engine.rows < 2:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            del task  # its exception holds the frame that holds the iterator
            await asyncio.sleep(0)  # asyncio closes what nobody holds
            assert await idle(engine) == 1
            company.cancel()
            await asyncio.gather(company, return_exceptions=True)
            assert await idle(engine) == 0
            assert not engine.engine.busy
            steps = []
            engine.engine.step = lambda steps=steps: steps.append(1) or []
            await idle(engine)
            assert not steps  # there are none while there are no rows
            del engine.engine.step

    asyncio.run(main())


def test_a_request_that_waits_is_cancelled_within_a_step(rng, model, tokenizer):
    engine = AsyncEngine(model, tokenizer, max_batch=1)
    assert engine.engine is None

    async def main():
        running = engine.stream(Request(some_prompt(rng, 3), 10**6))
        await anext(running)
        for how in ("waits", "prompt"):
            if how == "prompt":
                await running.aclose()
            task = asyncio.create_task(answer(engine, some_prompt(rng, 400), 10**6))
            while engine.rows < 1 + (how == "waits"):
                await asyncio.sleep(0)
            if how == "waits":
                assert (engine.engine.rows_waiting, engine.engine.rows_running) == (1, 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await idle(engine) == (how == "waits")
            assert engine.engine.rows_waiting == 0
        assert engine.engine.rows_running == engine.engine.kv_bytes == 0

    asyncio.run(main())


def test_the_event_loop_goes_on_while_the_engine_computes(rng, model, tokenizer):
    """Each step waits for another task of the loop: it would wait forever if the loop waited for the step."""
    engine = AsyncEngine(model, tokenizer)
    ticked = threading.Event()

    def waits(tokens, logits):
        ticked.clear()
        assert ticked.wait(60), "the event loop is blocked"
        return logits

    async def tick():
        while True:
            await asyncio.sleep(1e-3)
            ticked.set()

    async def main():
        task = asyncio.create_task(tick())
        await answer(engine, some_prompt(rng, 4), 12, logits_processors=[waits])
        task.cancel()

    asyncio.run(main())


def test_requests_that_cant_be_honoured_fail_alone(rng, model, tokenizer, engine):
    prompt = some_prompt(rng, 5)
    wanted = generate(model, tokenizer, prompt, max_tokens=12)

    async def main():
        bad = [
            answer(engine, []),
            answer(engine, prompt, adapter="unknown"),
            answer(engine, prompt * 400),
            answer(engine, prompt, logits_processors=[lambda tokens, logits: logits / 0]),
            answer(AsyncEngine(model, tokenizer, max_batch=0), prompt),
        ]
        good = answer(engine, prompt)
        *errors, text = await asyncio.gather(*bad, good, return_exceptions=True)
        assert text == wanted
        kinds = [RequestError, RequestError, ContextLengthError]
        assert [type(e) for e in errors[:3]] == kinds
        assert "hold" in str(errors[3])
        assert "max_batch" in str(errors[4])

    asyncio.run(main())


def test_the_text_so_far_comes_before_the_error(rng, model, tokenizer):
    engine = AsyncEngine(model, tokenizer, max_kv_size=8)
    text = ""

    async def main():
        nonlocal text
        async for response in engine.stream(Request(some_prompt(rng, 5), -1)):
            text += response.text

    with pytest.raises(ContextLengthError, match="full after 4"):
        asyncio.run(main())
    assert len(text.split()) == 4


@pytest.mark.parametrize("kind", [KeyError, SystemExit, asyncio.CancelledError, KeyboardInterrupt])
def test_a_step_that_raises_fails_its_rows_and_the_engine_goes_on(rng, model, tokenizer, kind):
    engine = AsyncEngine(model, tokenizer, max_batch=1)
    prompts = [some_prompt(rng, 4) for _ in range(2)]
    wanted = generate(model, tokenizer, prompts[1], max_tokens=12)

    async def main():
        decoding = engine.stream(Request(prompts[0], 10**6))
        await anext(decoding)
        waits = asyncio.create_task(answer(engine, prompts[1]))
        await idle(engine)
        real = engine.engine.step

        def fails():
            engine.engine.step = real
            raise kind("of the step")

        engine.engine.step = fails
        with pytest.raises(StepError, match=f"{kind.__name__}: .*of the step"):
            [r async for r in decoding]
        assert await waits == wanted
        assert await answer(engine, prompts[1]) == wanted

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_can_not_recover_fails_all_rows_and_another_one_is_made(
    rng, model, tokenizer
):
    engine = AsyncEngine(model, tokenizer, max_batch=1, group=EngineGroup())
    prompt = some_prompt(rng, 4)

    async def main():
        running = engine.stream(Request(prompt, 10**6))
        await anext(running)
        waits = asyncio.create_task(answer(engine, prompt))
        await idle(engine)

        def fails():
            raise KeyError("broken")

        broken = engine.engine  # kept, as a traceback may keep it: its rows take no places
        broken.step = broken.drop_started = fails
        with pytest.raises(StepError, match="broken"):
            [r async for r in running]
        with pytest.raises(StepError, match="broken"):
            await waits
        assert await answer(engine, prompt) == generate(model, tokenizer, prompt, max_tokens=12)
        assert broken.rows_running

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_drafter_that_can_not_forget_holds_nobody_up(rng, model, tokenizer):
    prompts = [some_prompt(rng, 4) for _ in range(3)]
    wanted = [generate(model, tokenizer, p, max_tokens=12) for p in prompts]

    def fails():
        raise KeyError("of forget")

    speculation = Speculation(FaultyDrafter(forget=fails), num_draft_tokens=2)
    engine = AsyncEngine(model, tokenizer, speculation=speculation, max_batch=2)

    async def main():
        left = engine.stream(Request(prompts[0], 10**6))
        await anext(left)
        answers = asyncio.gather(*(answer(engine, p) for p in prompts))
        await left.aclose()
        assert await answers == wanted

    with pytest.warns(RuntimeWarning, match="FaultyDrafter failed to forget rows .*of forget"):
        asyncio.run(asyncio.wait_for(main(), 60))


@contextmanager
def held(engine, number):
    """Hold up a step: the one that has responses of another row than the first for the `number`-th time.

    Yields:
        Event that is set when that step was computed; event that lets it go on; and its responses.
    """
    computed, go_on, late, seen = threading.Event(), threading.Event(), [], 0
    step = engine.engine.step

    def held_step():
        nonlocal seen
        responses = step()
        seen += any(response.row for response in responses)
        if seen == number and not late:
            late.extend(response for response in responses if response.row)
            computed.set()
            go_on.wait(30)
        return responses

    engine.engine.step = held_step
    try:
        yield computed, go_on, late
    finally:
        go_on.set()
        engine.engine.step = step


def test_responses_that_come_too_late_fail_nobody(rng):
    engine = AsyncEngine(wide_model(rng, extra=0), nano_tokenizer())
    prompt = some_prompt(rng, 4)
    # The second token forces others: a step has several responses of the row.
    constraint = Constraint.regex("[a-c][0-9]: and a long text that is forced")
    ends = []

    def never_ends(tokens, logits):
        return logits.at[..., mx.array(sorted(nano_tokenizer().eos_token_ids))].add(-1e9)

    async def leave(limit):
        with held(engine, 2) as (computed, go_on, late):
            request = Request(prompt, limit, logprobs=False, logits_processors=[never_ends])
            stream = engine.stream(request)
            await anext(stream)
            assert await asyncio.to_thread(computed.wait, 30)
            await stream.aclose()
            go_on.set()
            assert await idle(engine) == 1
        ends.append(late[-1].finish_reason)

    def close_the_loop():
        loop = asyncio.new_event_loop()
        with held(engine, 2) as (computed, go_on, late):
            stream = engine.stream(Request(prompt, 60, logprobs=False, constraint=constraint))
            loop.run_until_complete(anext(stream))
            assert computed.wait(30)
            loop.close()
            go_on.set()
        assert len(late) > 2

    async def main():
        stays = asyncio.create_task(answer(engine, prompt, 400, logits_processors=[never_ends]))
        while not engine.rows:
            await asyncio.sleep(0)
        for limit in (50, 2):
            await leave(limit)
        await asyncio.to_thread(close_the_loop)
        assert await idle(engine) == 1
        assert not stays.done()
        whole = answer(engine, prompt, 400, logits_processors=[never_ends])
        assert await stays == await whole

    asyncio.run(main())
    assert ends == [None, "length"]


def test_a_dropped_engine_is_freed_without_the_garbage_collector(rng, model, tokenizer):
    async def main():
        prefixes = PrefixCache(1 << 20)
        engine = AsyncEngine(model, tokenizer, prefix_cache=prefixes)
        await answer(engine, some_prompt(rng, 100))
        with pytest.raises(RequestError):
            await answer(engine, [])
        await idle(engine)
        (root,) = prefixes._roots.values()
        return [weakref.ref(part) for part in (engine, engine.engine, root)]

    gc.disable()
    try:
        parts = asyncio.run(main())
        threads.submit(int).result()
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()


def test_a_closed_engine_fails_its_rows_and_gives_their_places_to_its_group(rng, model, tokenizer):
    group = EngineGroup()
    closed, other = (AsyncEngine(model, tokenizer, max_batch=1, group=group) for _ in range(2))

    async def main():
        running = [asyncio.create_task(answer(closed, some_prompt(rng, 3), 10**6))]
        while closed.engine is None or not closed.engine.rows_running:
            await asyncio.sleep(0)
        running.append(asyncio.create_task(answer(closed, some_prompt(rng, 5), 10**6)))
        waits = asyncio.create_task(answer(other, some_prompt(rng, 4)))
        while closed.rows < 2 or not other.rows:
            await asyncio.sleep(0)
        assert not other.engine.rows_running
        for _ in range(2):
            await asyncio.to_thread(closed.close)
        for each in running:
            with pytest.raises(RequestError, match="was closed"):
                await each
        assert await waits
        with pytest.raises(RequestError, match="is closed"):
            await answer(closed, some_prompt(rng, 3))

    asyncio.run(asyncio.wait_for(main(), 60))


# -- compiling kernels in advance


@pytest.fixture
def warming(model, tokenizer, monkeypatch):
    """Make an engine whose warm-up takes the steps of an iterator, as on a GPU."""

    def make(steps):
        monkeypatch.setattr(async_engine, "dispatch", SimpleNamespace(device=lambda: "gpu"))
        monkeypatch.setattr(async_engine, "warm_up", lambda *args, **options: steps)
        return AsyncEngine(model, tokenizer)

    return make


def test_kernels_are_compiled_while_no_rows_run(rng, warming):
    rows = []

    def steps():
        for _ in range(100):
            rows.append(engine.rows)
            yield

    engine = warming(steps())

    async def run():
        task = asyncio.create_task(answer(engine, some_prompt(rng, 3), 20))
        while engine.rows == 0:
            await asyncio.sleep(0)
        engine.warm_up()
        await task
        while len(rows) < 100:
            await idle(engine)

    asyncio.run(run())
    assert rows == [0] * 100


def test_a_kernel_that_does_not_compile_is_logged_and_answers_go_on(rng, warming, caplog):
    def steps():
        yield None
        raise RuntimeError("Unable to build metal library from source")

    engine = warming(steps())
    engine.warm_up()
    assert asyncio.run(answer(engine, some_prompt(rng, 3), 5))
    asyncio.run(idle(engine))
    (message,) = [record.message for record in caplog.records]
    assert message == (
        "Kernels could not be compiled in advance (RuntimeError: Unable to build metal library from source)."
    )


def test_nothing_is_compiled_in_advance_on_a_cpu(engine, monkeypatch):
    monkeypatch.setattr(threads, "submit", lambda *args: pytest.fail("a job was queued"))
    engine.warm_up()
