"""What is counted and measured, for Prometheus, under the names that vLLM's dashboards know."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from afm_mlx.engine.speculation.draft_length import RowGuesses
    from afm_mlx.server.served_model import ServedModel

PREFIX = "afm_mlx:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30)
_LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass
class AnswerClock:
    """Times of the steps of one answer, in seconds of `time.monotonic`.

    Attributes:
        arrived: when it was asked for.
        scheduled: when its prompt began to be computed; None before.
        first, last: when its first and its last token was drawn, so far; None before. Tokens that a constraint
            forces are known without the model, even while the answer waits.
        drawn: number of tokens that were drawn.
        has_left: whether it has ended.
    """

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None
    drawn: int = 0
    has_left: bool = False

    @property
    def until_first(self) -> float | None:
        """Seconds until the first token was drawn; None before."""
        return None if self.first is None else self.first - self.arrived

    @property
    def rate(self) -> float | None:
        """Tokens per second, from the first that was drawn to the last; None where that was no time."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.drawn - 1) / (self.last - self.first)


class Metrics:
    """A registry of its own, so that several servers of one process don't meet.

    Args:
        served: the model, whose adapters and queue are looked at when metrics are asked for.
    """

    def __init__(self, served: ServedModel):
        self.registry = CollectorRegistry()
        self._model = served.name

        labels = ["model_name"]

        def counter(name: str, help: str) -> Counter:
            made = Counter(PREFIX + name, help, labels, registry=self.registry)
            return made.labels(self._model)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(PREFIX + name, help, labels, registry=self.registry).labels(self._model)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, help, labels, registry=self.registry, buckets=buckets)
            return made.labels(self._model)

        self._success = Counter(
            PREFIX + "request_success",
            "Answers that ended.",
            [*labels, "finished_reason"],
            registry=self.registry,
        )
        self._errors = Counter(
            PREFIX + "request_errors",
            "Requests that failed.",
            [*labels, "status"],
            registry=self.registry,
        )
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "New tokens.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._guessed = counter("spec_decode_num_draft_tokens", "Tokens that were guessed.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Guesses that were right.")
        self._running = gauge("num_requests_running", "Answers that are computed.")
        self._waiting = gauge("num_requests_waiting", "Answers that wait for the batch.")
        self._ttft = histogram(
            "time_to_first_token_seconds", "Until the first drawn token.", _SHORT
        )
        self._inter = histogram("inter_token_latency_seconds", "Between two drawn tokens.", _SHORT)
        self._per_token = histogram(
            "request_time_per_output_token_seconds", "Mean of an answer's drawn tokens.", _SHORT
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Of whole answers.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "Until it is begun.", _LONG)
        self._prompt_sizes = histogram("request_prompt_tokens", "Of one prompt.", _TOKENS)
        self._answer_sizes = histogram("request_generation_tokens", "Of one answer.", _TOKENS)
        self.registry.register(_Memory(served))

    # -- one answer

    def waits(self) -> None:
        """An answer was asked for."""
        self._waiting.inc()

    def scheduled(self, clock: AnswerClock) -> None:
        """Its prompt is being computed; called once or again, in the event loop's thread."""
        if clock.scheduled is None and not clock.has_left:
            clock.scheduled = time.monotonic()
            self._waiting.dec()
            self._running.inc()
            self._queue.observe(clock.scheduled - clock.arrived)

    def drawn(self, clock: AnswerClock) -> None:
        """A token was drawn from the model's logits."""
        self.scheduled(clock)
        now = time.monotonic()
        clock.drawn += 1
        if clock.first is None:
            clock.first = now
            self._ttft.observe(now - clock.arrived)
        elif clock.last is not None:
            self._inter.observe(now - clock.last)
        clock.last = now

    def leaves(self, clock: AnswerClock, reason: str, tokens: int) -> None:
        """An answer has ended.

        Args:
            clock: the answer's.
            reason: "stop", "length", "tool_calls", "abort" or "error".
            tokens: new tokens that it had.
        """
        clock.has_left = True
        gauge = self._waiting if clock.scheduled is None else self._running
        gauge.dec()
        self._success.labels(self._model, reason).inc()
        self._generated.inc(tokens)
        self._e2e.observe(time.monotonic() - clock.arrived)
        if tokens:
            self._answer_sizes.observe(tokens)
        if clock.first is not None and clock.last is not None and clock.drawn > 1:
            self._per_token.observe((clock.last - clock.first) / (clock.drawn - 1))

    def guesses(self, guesses: RowGuesses) -> None:
        """The guesses for an answer that has ended."""
        self._guessed.inc(guesses.proposed)
        self._accepted.inc(guesses.accepted)

    # -- one request

    def prompt(self, tokens: int, cached: int) -> None:
        """A prompt was computed, apart from what was known of it."""
        self._prompt.inc(tokens)
        self._prompt_sizes.observe(tokens)
        self._queries.inc(tokens)
        self._hits.inc(cached)

    def failed(self, status: int) -> None:
        """A request was answered with an error."""
        self._errors.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)


class _Memory(Collector):
    """Memory of adapters and of the prefix cache, looked at when metrics are asked for."""

    def __init__(self, served: ServedModel):
        self._served = served

    def collect(self) -> Any:
        pool = self._served.pool
        known: dict[str, Any] = {"bytes": 0, "adapters": []} if pool is None else pool.describe()
        resident = [each for each in known["adapters"] if each["state"] == "resident"]
        labels = ["model_name"]
        prefixes, kv = self._served.prefix_cache, self._served.engine.engine
        for name, help, value in (
            (
                "prefix_cache_bytes",
                "Memory of the prefix cache.",
                prefixes.nbytes if prefixes else 0,
            ),
            ("kv_cache_bytes", "Keys and values of running answers.", kv.kv_bytes if kv else 0),
            ("kv_cache_usage_perc", "Share of what they may take, 1 is all.", self._kv_usage()),
            ("adapter_resident_bytes", "Memory of adapters.", known["bytes"]),
            ("adapters_resident", "Adapters in memory.", len(resident)),
            ("adapters_registered", "Adapters by name.", len(known["adapters"])),
        ):
            family = GaugeMetricFamily(PREFIX + name, help, labels=labels)
            family.add_metric([self._served.name], value)
            yield family

    def _kv_usage(self) -> float:
        """Bytes of the budget; without one, tokens of those that the whole batch could have."""
        kv = self._served.engine.engine
        if kv is None:
            return 0.0
        if kv.kv_memory is not None:
            return kv.kv_bytes / kv.kv_memory
        return kv.kv_tokens / (kv.max_batch * self._served.context_size)
