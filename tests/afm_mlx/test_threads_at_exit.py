"""Processes that generate in threads, and end: during, after, and from daemons. None may abort."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import asyncio, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import afm_mlx
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request

model = tokenizer = None
begun = threading.Event()

def load():
    global model, tokenizer
    model, tokenizer = afm_mlx.load()

def stream(count=40, pause=0.0):
    options = {"seed": 1, "sampler": lambda logprobs: logprobs.argmax(-1)}
    options |= {"max_kv_size": 64, "sliding_window": True}  # which goes on forever
    for _ in afm_mlx.stream_generate(model, tokenizer, "hello", count, **options):
        begun.set()
        time.sleep(pause)

def engine():
    engine = Engine(model, tokenizer)
    engine.submit(Request([1, 2, 3], 10**6, logprobs=False))
    for _ in engine.run():
        begun.set()

def start(work, *args, daemon):
    thread = threading.Thread(target=work, args=args, daemon=daemon)
    thread.start()
    return thread

async def tasks():
    pieces = afm_mlx.stream_generate_async(model, tokenizer, "hello", max_tokens=10)
    await asyncio.gather(asyncio.to_thread(stream, 5), anext(pieces))

async def rows(wait):
    engine = AsyncEngine(model, tokenizer)
    responses = [engine.stream(Request([1, 2, 3], 10**6)) for _ in range(2)]
    await asyncio.gather(*map(anext, responses))
    begun.set()
    await wait()

def rows_of_a_daemon():
    start(lambda: asyncio.run(rows(asyncio.Event().wait)), daemon=True)
    begun.wait()

def rows_of_a_loop_that_is_closed():
    loop = asyncio.new_event_loop()
    globals()["kept"] = loop.create_task(rows(asyncio.Event().wait))
    while not begun.is_set():
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    kept._log_destroy_pending = False

def after():
    for daemon in (True, False):
        start(stream, 5, daemon=daemon).join()

def while_it_runs():
    start(stream, daemon=False)
    begun.wait()

def while_daemons_run():
    for work in (engine, stream, lambda: stream(10**6, 0.001)):
        begun.clear()
        start(work, daemon=True)
        begun.wait()

def half_way():
    pieces = afm_mlx.stream_generate(model, tokenizer, "hello", 10**6)
    ThreadPoolExecutor(1).submit(next, pieces).result()
    globals()["kept"] = pieces

if sys.argv[1] == "loaded_in_a_thread":
    start(load, daemon=False).join()
    start(stream, 3, daemon=True).join()
else:
    load()
    asyncio.run(tasks()) if sys.argv[1] == "tasks" else globals()[sys.argv[1]]()
print("the end")
"""

ENDS = ["after", "while_it_runs", "while_daemons_run", "half_way", "loaded_in_a_thread", "tasks"]
ENDS += ["rows_of_a_daemon", "rows_of_a_loop_that_is_closed"]


def ends(ways):
    """Run processes two at a time; what they say besides the last line, and their exit statuses."""
    found = []
    for pair in zip(ways[::2], ways[1::2], strict=True):
        command = [sys.executable, "-c", SCRIPT]
        running = [
            subprocess.Popen([*command, way], cwd=ROOT, text=True, stdout=-1, stderr=-1)
            for way in pair
        ]
        for process in running:
            out, err = process.communicate(timeout=240)
            found.append((out.strip(), err.strip(), process.returncode))
    return found


def test_python_ends_in_good_order():
    assert ends(ENDS) == [("the end", "", 0)] * len(ENDS)


@pytest.mark.slow
@pytest.mark.parametrize("way", ENDS)
def test_python_ends_in_good_order_every_time(way):
    assert ends([way] * 20) == [("the end", "", 0)] * 20
