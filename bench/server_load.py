"""Clients that ask one server for answers, and what they see of its speed."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import h11
import numpy as np

from bench.server_client import Address, Exchange
from bench.server_process import ServerProcess
from bench.server_programs import Job, Program

PATIENCE = 300.0
"""Seconds that a client waits for its answer."""


@dataclass
class Answer:
    """One request, as its client saw it; times are seconds of a clock that never goes back.

    Args:
        sent: when the connection was opened.
        times: when each part of the text came.
        prompt, tokens: tokens of the prompt and of the answer, as the server counted them.
        wanted: number of answer tokens that were asked for.
        error: why the answer is missing or incomplete; None for a whole one.
    """

    sent: float
    wanted: int
    times: list[float] = field(default_factory=list)
    prompt: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds from the connection to the first part of the text; None if no text came."""
        return self.times[0] - self.sent if self.times else None

    @property
    def per_token(self) -> float | None:
        """Mean seconds per token after the first; None after an error, or for fewer than two tokens."""
        if self.error is not None or self.tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between parts of the text."""
        return np.diff(self.times).tolist()


@dataclass(frozen=True)
class Turn:
    """What clients saw of a server for a while.

    Args:
        answers: all answers, including those that ended after `seconds`.
        seconds: seconds for which requests were sent.
        start: time at which the first request was sent.
    """

    answers: Sequence[Answer]
    seconds: float
    start: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens that came before the time was up, over that time."""
        end = self.start + self.seconds
        count = 0.0
        for answer in self.answers:
            if answer.error is None and answer.times:
                in_time = sum(moment <= end for moment in answer.times)
                count += answer.tokens * in_time / len(answer.times)
        return count / self.seconds


async def ask(program: Program, address: Address, job: Job) -> Answer:
    """Send one request, and read its answer to the end."""
    answer = Answer(time.perf_counter(), job.tokens)
    try:
        async with asyncio.timeout(PATIENCE), Exchange(address) as exchange:
            status = await exchange.send("POST", program.path, program.body(job))
            if status != 200:
                answer.error = f"status {status}: {(await exchange.body()).decode()[:200]}"
                return answer
            async for data in exchange.events():
                now = time.perf_counter()
                part = program.read(data)
                if part is None:
                    continue
                if part.has_text:
                    answer.times.append(now)
                answer.prompt = part.prompt or answer.prompt
                answer.tokens = part.tokens or answer.tokens
                answer.error = part.error or answer.error
    except TimeoutError:
        answer.error = f"no whole answer after {PATIENCE:g} seconds"
    except (OSError, h11.ProtocolError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    if answer.error is None and not answer.tokens:
        answer.error = "the stream ended without a count of tokens"
    return answer


async def drive(
    program: Program, address: Address, jobs: Iterator[Job], clients: int, seconds: float
) -> Turn:
    """Let `clients` clients each send one request after the other for `seconds`; await their last answers."""
    answers: list[Answer] = []
    start = time.perf_counter()

    async def client() -> None:
        while not answers_are_due():
            answers.append(await ask(program, address, next(jobs)))

    def answers_are_due() -> bool:
        return time.perf_counter() >= start + seconds

    await asyncio.gather(*(client() for _ in range(clients)))
    return Turn(answers, seconds, start)


# -- figures


def figures(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the figures of all turns with one number of clients; times in seconds, NaN if there are none."""
    answers = [answer for turn in turns for answer in turn.answers]
    firsts = [answer.first for answer in answers if answer.first is not None]
    per_token = [answer.per_token for answer in answers if answer.per_token is not None]
    gaps = [gap for answer in answers for gap in answer.gaps]
    found = {"tokens_per_second": statistics.median(turn.tokens_per_second for turn in turns)}
    for name, values in (("first", firsts), ("per_token", per_token), ("gap", gaps)):
        for q in (50, 99):
            found[f"{name}_p{q}"] = float(np.quantile(values, q / 100)) if values else float("nan")
    whole = [answer for answer in answers if answer.error is None]
    found["requests"] = len(answers)
    found["errors"] = len(answers) - len(whole)
    found["ended_early"] = sum(answer.tokens < answer.wanted for answer in whole)
    found["prompt_tokens"] = sum(answer.prompt for answer in whole)
    found["answer_tokens"] = sum(answer.tokens for answer in whole)
    return found


class Memory:
    """Resident memory of a server over its time under load, in bytes.

    Attributes:
        samples: (seconds under load, bytes), one a second.
    """

    def __init__(self, server: ServerProcess):
        self._server = server
        self.first = server.resident_bytes()
        self.samples: list[tuple[float, int]] = []
        self._loaded = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Take samples while the context is open."""
        start = time.perf_counter()

        async def sample() -> None:
            while True:
                passed = self._loaded + time.perf_counter() - start
                self.samples.append((passed, self._server.resident_bytes()))
                await asyncio.sleep(1)

        task = asyncio.create_task(sample())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            self._loaded += time.perf_counter() - start

    def summary(self) -> dict[str, float]:
        """Return the first sample, that after a minute under load (NaN if there is none), and the last."""
        minute = [size for passed, size in self.samples if passed >= 60]
        return {
            "first": self.first,
            "after_a_minute": minute[0] if minute else float("nan"),
            "last": self._server.resident_bytes(),
        }
