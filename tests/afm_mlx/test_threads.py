"""Generation in threads: the same answers as in the main one, and no state that stays behind."""

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint import finite
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import batch_generate, generate, stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import RequestError
from afm_mlx.loading.load import load, load_model
from afm_mlx.loading.resolve import resolve_model
from tests.tools.engines import SIZES, Adapters, run, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model


@pytest.fixture
def model(rng):
    return tiny(rng, "2-bit", kv_bits=8)


@pytest.fixture
def tokenizer():
    return WordTokenizer(SIZES["vocab_size"], ends=())  # answers are as long as they were asked for


def in_thread(function, *args, **options):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args, **options).result(60)


def at_once(calls):
    barrier = threading.Barrier(len(calls))

    def one(call):
        barrier.wait(60)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(one, calls, timeout=60))


def answer(engine, prompt, count=12):
    engine.submit(Request(prompt, count, logprobs=False))
    return [response.token for response in engine.run()]


@pytest.mark.parametrize("kind", ["2-bit", "float", "zoo"])
def test_an_engine_in_each_of_four_threads_gives_the_answers_of_one_thread(rng, tokenizer, kind):
    zoo = kind == "zoo"
    model = zoo_model("llama", SIZES["vocab_size"], 5) if zoo else tiny(rng, kind, kv_bits=8)
    prompts = [some_prompt(rng, length) for length in (3, 9, 5, 14)]
    # In the threads first: what they leave behind must not disturb the main one.
    got = at_once([lambda p=p: answer(Engine(model, tokenizer), p) for p in prompts])
    assert got == [answer(Engine(model, tokenizer), prompt) for prompt in prompts]


def test_every_way_to_generate_is_that_of_the_main_thread(rng, model, tokenizer):
    prompts = [some_prompt(rng, length) for length in (4, 7, 2)]
    options = {"max_tokens": 9, "seed": 11, "sampler": mx.random.categorical}

    def ways():
        texts = [generate(model, tokenizer, prompt, **options) for prompt in prompts]
        return texts, batch_generate(model, tokenizer, prompts, **options).token_ids

    assert in_thread(ways) == ways() == in_thread(ways)


def test_the_main_thread_and_others_take_turns(rng, model, tokenizer):
    prompt = some_prompt(rng, 4)
    wanted = answer(Engine(model, tokenizer), prompt, 150)
    order = []

    def stream(name):
        tokens = []
        for response in stream_generate(model, tokenizer, prompt, 150, logprobs=False):
            order.append(name)
            tokens.append(response.token)
        return tokens

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(stream, "other")
        while not order:
            time.sleep(1e-3)
        assert stream("main") == wanted
        assert other.result(60) == wanted
    first, last = order.index("main"), len(order) - order[::-1].index("other")
    assert "other" in order[first:]
    assert last > first


def test_log_probabilities_and_caches_go_from_thread_to_thread(rng, model, tokenizer):
    prompt = some_prompt(rng, 5)

    def turns(cache, prompt, count):
        return list(stream_generate(model, tokenizer, prompt, count, prompt_cache=cache))

    one, two = model.make_cache(), model.make_cache()
    wanted = turns(one, prompt, 4) + turns(one, [3, 1], 4)
    got = in_thread(turns, two, prompt, 4) + turns(two, [3, 1], 2)
    got += in_thread(turns, two, [got[-1].token], 2)
    assert [r.token for r in got] == [r.token for r in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.array(mine.logprobs), np.array(theirs.logprobs), atol=1e-3)
    begun = model.make_cache()
    model.prefill(mx.array([[1, 2]]), begun)
    with pytest.raises(RequestError, match="prompt cache has arrays that another thread"):
        in_thread(turns, begun, prompt, 1)


def test_an_engine_of_the_main_thread_is_refused_elsewhere(rng, model, tokenizer):
    engine = Engine(model, tokenizer)
    engine.submit(Request(some_prompt(rng, 3), 4))
    for method in (engine.step, lambda: engine.cancel(0)):
        with pytest.raises(RequestError, match="main thread"):
            in_thread(method)
    assert len(list(engine.run())) == 4


def test_an_engine_of_another_thread_serves_all(rng, model, tokenizer):
    prompt = some_prompt(rng, 3)
    engine = in_thread(Engine, model, tokenizer)
    rows = at_once([lambda: engine.submit(Request(prompt, 4, logprobs=False))] * 3)
    rows.append(engine.submit(Request(prompt, 4, logprobs=False)))
    found = run(engine)
    wanted = answer(Engine(model, tokenizer), prompt, 4)
    assert [[r.token for r in found[row]] for row in rows] == [wanted] * 4


def test_errors_and_callbacks_come_through(rng, model, tokenizer):
    prompt = some_prompt(rng, 9)
    with pytest.raises(RequestError, match="empty"):
        in_thread(generate, model, tokenizer, [])

    def fails(logprobs):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        in_thread(generate, model, tokenizer, prompt, sampler=fails)
    seen = []
    options = {"prompt_progress_callback": lambda *done: seen.append(done), "max_tokens": 2}
    in_thread(generate, model, tokenizer, prompt, **options)
    assert seen[-1] == (9, 9)


def test_a_stream_that_is_closed_half_way_frees_its_row(rng, model, tokenizer, tmp_path):
    with AdapterPool(model) as pool:
        Adapters(model, rng, tmp_path).add(pool, "a", 2)

        def abandon():
            options = {"adapter": "a", "adapters": pool, "max_tokens": 50}
            stream = stream_generate(model, tokenizer, some_prompt(rng, 4), **options)
            next(stream)
            assert pool.describe()["adapters"][0]["rows"] == 1
            stream.close()

        for place in (abandon, lambda: in_thread(abandon)):
            place()
            gc.collect()
            assert pool.describe()["adapters"][0]["rows"] == 0


def test_a_model_leaves_nothing_behind_in_threads(rng, tokenizer):
    """It is freed, and no other model gets its traces: MLX knows a traced function by its address."""
    prompt = some_prompt(rng, 4)
    for _ in range(6):
        model = tiny(rng, "2-bit", kv_bits=8)
        got = in_thread(generate, model, tokenizer, prompt, max_tokens=6)
        assert got == generate(model, tokenizer, prompt, max_tokens=6)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


def test_a_lazy_model_runs_in_all_threads_once_one_has_read_it():
    model, tokenizer = load(lazy=True)
    with pytest.raises(RequestError, match="lazy"):
        in_thread(generate, model, tokenizer, "hello", max_tokens=5)
    wanted = generate(model, tokenizer, "hello", max_tokens=5)
    for each in (model, in_thread(load, lazy=True)[0]):
        assert in_thread(generate, each, tokenizer, "hello", max_tokens=5) == wanted
        assert generate(each, tokenizer, "hello", max_tokens=5) == wanted


FORKED = """
import asyncio, os, sys, threading, time
import afm_mlx
from afm_mlx import fm, threads
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import AFMError
from afm_mlx.training.methods.train import train_lora

def in_child(check):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            threading.Timer(60, os._exit, [3]).start()
            check()
            code = 0
        except BaseException as error:
            print(repr(error), file=sys.stderr)
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def works():
    assert afm_mlx.generate(*afm_mlx.load("afm-nano"), "A", max_tokens=2)

async def streamed(engine):
    async for response in engine.stream(Request([1])):
        pass

def refuses():
    def in_thread():
        raised = []
        def run():
            try:
                afm_mlx.generate(model, tokenizer, "A")
            except AFMError as error:
                raised.append(error)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join(30)
        raise raised[0]

    for entry in (
        lambda: afm_mlx.load("afm-nano"),
        lambda: afm_mlx.generate(model, tokenizer, "A"),
        lambda: afm_mlx.batch_generate(model, tokenizer, ["A"]),
        lambda: next(afm_mlx.stream_generate(model, tokenizer, "A")),
        lambda: Engine(model, tokenizer),
        lambda: engine.step(),
        lambda: asyncio.run(streamed(many)),
        lambda: asyncio.run(streamed(AsyncEngine(model, tokenizer))),
        lambda: afm_mlx.AdapterPool(model),
        lambda: model.make_cache() and model(None),
        lambda: train_lora(None, "x"),
        lambda: asyncio.run(fm.LanguageModelSession().respond("A")),
        in_thread,
    ):
        try:
            entry()
        except (AFMError, fm.errors.FoundationModelsError) as error:
            assert "Use spawn" in str(error), error
        else:
            raise AssertionError(entry)

if sys.platform != "darwin":  # where the frameworks that mlx.core starts don't survive it
    assert in_child(works) == 0, "a child of a process in which MLX has not run"
model, tokenizer = afm_mlx.load("afm-nano")
engine, many = Engine(model, tokenizer), AsyncEngine(model, tokenizer)
engine.submit(Request([1], 2))
engine.step()
asyncio.run(streamed(many))
assert in_child(lambda: None) == 0
assert in_child(refuses) == 0
print("done")
"""


def test_a_forked_child_is_told_to_be_spawned(tmp_path):
    """Where MLX has run before, it would wait for threads that are not there."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.stdout == "done\n", done.stderr[-2000:]


def test_a_long_job_gives_way_to_jobs_that_wait_but_not_within_one(rng, tmp_path):

    order = []

    def inner(name):
        threads.give_way()  # nothing, within another call
        order.append(name)
        if name == "first":
            threads.submit(inner, "later")
            raise ValueError(name)

    def long_job(waits):
        waits.wait(60)
        order.append("begins")
        threads.give_way()
        order.append("goes on")
        threads.give_way()
        order.append("ends")

    waits = threading.Event()
    job = threads.submit(long_job, waits)
    inside = [threads.submit(inner, name) for name in ("first", "second")]
    waits.set()
    job.result(60)
    with pytest.raises(ValueError, match="first"):
        inside[0].result(60)
    assert order == ["begins", "first", "second", "goes on", "later", "ends"]
    threads.give_way()  # in another thread, nothing


def test_reading_a_model_gives_way(rng, monkeypatch):

    monkeypatch.setattr(finite, "_PORTION", 1)
    order = []

    def read():
        read_before = load_model(resolve_model("afm-nano"))
        order.append("read")
        return read_before

    with threads_stopped():
        reading = threads.submit(read)
        threads.submit(order.append, "another job")
    assert reading.result(60) is not None
    assert order == ["another job", "read"]


@contextlib.contextmanager
def threads_stopped():
    """Keep the MLX thread from its jobs within the context."""

    goes_on = threading.Event()
    threads.submit(goes_on.wait, 60)
    try:
        yield
    finally:
        goes_on.set()
