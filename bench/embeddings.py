"""What embeddings cost: 1,000 short texts together and one at a time, and chats next to other requests.

The texts: the embedded model, and one of the 3B's shape with random weights. Both ways take turns, a part of
the texts at a time. With `--llama-python`, llama.cpp computes vectors of a model of mlx-lm's zoo, by turns with
this package: both have random weights, in 4 bits, and prompts of the same lengths.

The chats: a server of the embedded model, a process of its own, with 32 clients that chat, and then with 16
more that ask for embeddings and 16 for scores. Both loads take turns, too.

    python -m bench.embeddings --llama-python /path/to/python
    python -m bench.embeddings --layers 4 --seconds 10 --rounds 1          a quick look
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import mlx.nn as nn
import numpy as np

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.engine.embedding import embed
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.machine import threads_in_use
from afm_mlx.measure.random_model import random_packed_model
from bench.peer_models import EXACT, LLAMA, commands
from bench.peer_zoo import CONFIGS, zoo_model
from bench.peers import started
from bench.server_client import Address, Exchange
from bench.server_load import Turn, drive
from bench.server_process import ServerProcess
from bench.server_programs import Job, Jobs, Part, Program
from bench.targets import Target, markdown, target_rows

TEXTS, PARTS = 1000, 10
TOGETHER = 3.0  # times the speed of one text at a time
SLOWER = 1.5  # times chats' p99 without other requests
CHATS, OTHERS = 32, 16  # clients that chat, and of each other kind

Figures = dict[str, Any]


def short_texts(count: int) -> list[str]:
    """Make texts of 3 to 12 words."""
    jobs = Jobs(resolve_model("afm-nano"), (3, 12), (1, 1)).stream(0)
    return [job.text for job in itertools.islice(jobs, count)]


def together(model: nn.Module, tokenizer: Any, count: int) -> Figures:
    """Measure the seconds that texts take together, and one at a time."""
    texts = short_texts(count)
    seconds = {"together": 0.0, "one at a time": 0.0}
    part = -(-count // PARTS)
    embed(model, tokenizer, texts[:part])  # warms up
    for first in range(0, count, part):
        for way, batch_size in zip(seconds, (32, 1), strict=True):
            start = time.perf_counter()
            embed(model, tokenizer, texts[first : first + part], batch_size=batch_size)
            seconds[way] += time.perf_counter() - start
    rates = {f"{way}, texts per second": count / taken for way, taken in seconds.items()}
    return {**rates, "ratio": seconds["one at a time"] / seconds["together"]}


def next_to_llama(python: str, name: str, layers: int | None, count: int, rounds: int) -> Figures:
    """Measure texts per second of this package and llama.cpp, together and one at a time."""
    threads = threads_in_use()
    lengths = np.random.default_rng(0).integers(5, 16, count).tolist()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = zoo_model(name, layers)
        made = commands(model, Path(folder), threads, 1024, python)
        made = {peer: made[peer] for peer in made if peer == EXACT or peer.startswith(LLAMA)}
        with started(made, threads) as peers:
            for _ in range(rounds):
                for peer, together in itertools.product(peers, (True, False)):
                    answer = peers[peer].measure("embed", lengths=lengths, together=together)
                    way = "together" if together else "one at a time"
                    found.setdefault(f"{peer}, {way}", []).append(answer["texts_per_second"])
    return {what: statistics.median(values) for what, values in found.items()}


# -- chats next to other requests


def chat_program() -> Program:
    """The server of the embedded model, with streamed chats."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "afm_mlx", "server", "--port", str(port)]

    def body(job: Job) -> dict[str, Any]:
        return {
            "model": "afm-nano",
            "messages": [{"role": "user", "content": job.text}],
            "max_tokens": job.tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def read(data: str) -> Part | None:
        if data == "[DONE]":
            return None
        event = json.loads(data)
        if error := event.get("error"):
            return Part(error=str(error))
        usage = event.get("usage") or {}
        texts = [choice["delta"].get("content") for choice in event.get("choices", ())]
        return Part(any(texts), usage.get("prompt_tokens"), usage.get("completion_tokens"))

    return Program("afm-mlx", command, "/v1/chat/completions", body, read, "/ready")


def embedding_body(jobs: Iterator[Job]) -> tuple[str, dict[str, Any]]:
    texts = [next(jobs).text for _ in range(8)]
    return "/v1/embeddings", {"model": "afm-nano", "input": texts, "encoding_format": "base64"}


def score_body(jobs: Iterator[Job]) -> tuple[str, dict[str, Any]]:
    body = {"prompt": next(jobs).text, "max_tokens": 0, "echo": True, "logprobs": 1}
    return "/v1/completions", {"model": "afm-nano", **body}


Body = Callable[[Iterator[Job]], tuple[str, dict[str, Any]]]


async def keep_asking(
    address: Address, make: Body, jobs: Iterator[Job], done: Counter[str]
) -> None:
    """Send one request after the other until the task is cancelled, and count the responses by status."""
    while True:
        path, body = make(jobs)
        async with Exchange(address) as exchange:
            status = await exchange.send("POST", path, body)
            await exchange.body()
            done[f"{path} {status}"] += 1


async def by_requests(address: Address, count: int) -> Figures:
    """Measure the seconds that texts take in requests of many, and in one request each, one after the other."""
    texts = short_texts(count)
    seconds = {"together": 0.0, "one at a time": 0.0}
    part = -(-count // PARTS)
    for first in range(0, count, part):
        some = texts[first : first + part]
        for way, inputs in zip(seconds, ([some], [[text] for text in some]), strict=True):
            start = time.perf_counter()
            for each in inputs:
                async with Exchange(address) as exchange:
                    body = {"model": "afm-nano", "input": each, "encoding_format": "base64"}
                    if await exchange.send("POST", "/v1/embeddings", body) != 200:
                        raise RuntimeError((await exchange.body()).decode())
                    await exchange.body()
            seconds[way] += time.perf_counter() - start
    rates = {f"{way}, texts per second": count / taken for way, taken in seconds.items()}
    return {**rates, "ratio": seconds["one at a time"] / seconds["together"]}


async def load_test(seconds: float, rounds: int, count: int) -> Figures:
    """Measure chats' times to the first text with and without the other clients, by turns."""
    program = chat_program()
    chats = Jobs(resolve_model("afm-nano"), (8, 60), (16, 64))
    texts = Jobs(resolve_model("afm-nano"), (3, 60), (1, 1))
    turns: dict[str, list[Turn]] = {"alone": [], "mixed": []}
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        async with ServerProcess(program.command, program.ready_path, log) as server:
            await drive(program, server.address, chats.stream(0), CHATS, 3)  # warms up
            requests = await by_requests(server.address, count)
            for turn in range(rounds):
                for way, made in turns.items():
                    others = [
                        asyncio.create_task(
                            keep_asking(server.address, make, texts.stream(turn, i, j), done)
                        )
                        for i, make in enumerate((embedding_body, score_body))
                        for j in range(OTHERS if way == "mixed" else 0)
                    ]
                    # Not the same chats: the prefix cache would have them from the turn before.
                    jobs = chats.stream(1, turn, way == "mixed")
                    made.append(await drive(program, server.address, jobs, CHATS, seconds))
                    for task in others:
                        task.cancel()
                    for result in await asyncio.gather(*others, return_exceptions=True):
                        with suppress(asyncio.CancelledError):
                            if isinstance(result, BaseException):
                                raise result
    found: Figures = {"other responses": dict(done), "requests": requests}
    for way, made in turns.items():
        answers = [answer for each in made for answer in each.answers]
        firsts = [answer.first for answer in answers if answer.first is not None]
        found[way] = {
            "chats": len(answers),
            "errors": sum(answer.error is not None for answer in answers),
            "first_p50": float(np.quantile(firsts, 0.5)),
            "first_p99": float(np.quantile(firsts, 0.99)),
            "tokens_per_second": statistics.median(each.tokens_per_second for each in made),
        }
    return {**found, "ratio": found["mixed"]["first_p99"] / found["alone"]["first_p99"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=integer(2), help="blocks of the 3B; all by default")
    parser.add_argument("--texts", type=integer(PARTS), default=TEXTS, help="of the embedded model")
    parser.add_argument("--texts-3b", type=integer(PARTS), default=60, help="of the 3B's shape")
    parser.add_argument("--seconds", type=integer(1), default=30, help="of a turn of the load")
    parser.add_argument("--rounds", type=integer(1), default=3, help="turns of each load")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument(
        "--zoo", default="qwen3-0.6b", choices=list(CONFIGS), help="llama.cpp's model"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=["texts", "load"])
    args = parser.parse_args()
    figures: Figures = {}
    targets = []
    if "load" not in args.skip:
        figures["load"] = asyncio.run(load_test(args.seconds, args.rounds, args.texts))
        what = f"{args.texts} texts in requests of {-(-args.texts // PARTS)}, times requests of one"
        targets.append(Target(what, figures["load"]["requests"]["ratio"], TOGETHER))
        what = "p99 to the first text of chats next to 32 other clients, times alone"
        targets.append(Target(what, figures["load"]["ratio"], SLOWER, True))
    if "texts" not in args.skip:
        small, tokenizer = load("afm-nano")
        config = PRESETS["afm-3b"]
        if args.layers:
            reuse = args.layers * config.num_kv_reuse_layers // config.num_layers
            config = dataclasses.replace(
                config, num_layers=args.layers, num_kv_reuse_layers=max(1, reuse)
            )
        models = {
            "afm-nano": (small, args.texts),
            "3B": (random_packed_model(config), args.texts_3b),
        }
        for name, (model, count) in models.items():
            figures[name] = together(model, tokenizer, count)
            what = f"{count} texts together, times one at a time, {name}"
            targets.append(Target(what, figures[name]["ratio"], TOGETHER))
    if args.llama_python is not None:
        options = args.zoo, args.layers, args.texts_3b, args.rounds
        figures[f"{args.zoo}, texts per second"] = next_to_llama(args.llama_python, *options)
    print(markdown(target_rows(targets)))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
