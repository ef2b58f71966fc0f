"""Metrics for Prometheus, under the names that dashboards for vLLM use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from afm_mlx.engine.draft_length import DraftCounts

Family = TypeVar("Family", Counter, Gauge, Histogram)
PREFIX = "afm_mlx:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30)
_LONG = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


@dataclass
class AnswerClock:
    """Times of one answer's steps, in seconds of `time.monotonic`.

    Forced tokens don't count: they are known without the model, even while the answer waits.
    """

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None  # when the prefill began
    first: float | None = None  # when the first token was sampled
    last: float | None = None
    sampled: int = 0  # tokens
    left: float | None = None

    @property
    def until_first(self) -> float | None:
        """Seconds from the request to the first sampled token; None until then."""
        return None if self.first is None else self.first - self.arrived

    @property
    def rate(self) -> float | None:
        """Tokens per second from the first sampled token to the last; None if no time passed."""
        if self.first is None or self.last is None or self.last <= self.first:
            return None
        return (self.sampled - 1) / (self.last - self.first)


GaugeValues = Iterable[tuple[str, str, float]]
"""Name, help and value of gauges that are read when metrics are requested."""


class ServerMetrics:
    """The metrics of a server's models, in their own registry, so that servers in one process don't mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.models: dict[str, Metrics] = {}
        self._families: dict[str, Any] = {}
        self._gauges_are_registered = False

    def of(self, model: str) -> Metrics:
        """Return the metrics of a model, which are made at the first call."""
        if model not in self.models:
            self.models[model] = Metrics(model, self)
        if not self._gauges_are_registered:  # behind all others
            self.registry.register(_Gauges(self.models))
            self._gauges_are_registered = True
        return self.models[model]

    def family(self, kind: type[Family], name: str, help: str, *labels: str, **more: Any) -> Family:
        """Return the metric of this name, which is made at the first call; `labels` follow `model_name`."""
        if name not in self._families:
            names = ["model_name", *labels]
            self._families[name] = kind(PREFIX + name, help, names, registry=self.registry, **more)
        made: Family = self._families[name]
        return made

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class Metrics:
    """Counters, gauges and histograms of one model.

    Args:
        model: the model's id, a label of all metrics.
        server: the metrics of all models, which these belong to.

    Attributes:
        gauges: called when metrics are requested, for the values of further gauges.
    """

    def __init__(self, model: str, server: ServerMetrics):
        self._model = model
        self.gauges: Callable[[], GaugeValues] = tuple

        def counter(name: str, help: str, *more: str) -> Counter:
            return server.family(Counter, name, help, *more)

        def gauge(name: str, help: str) -> Gauge:
            return server.family(Gauge, name, help).labels(model)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return server.family(Histogram, name, help, buckets=buckets).labels(model)

        def total(name: str, help: str) -> Counter:
            return counter(name, help).labels(model)

        self._success = counter("request_success", "Answers that ended.", "finished_reason")
        self._errors = counter("request_errors", "Requests that failed.", "status")
        self._prompt = total("prompt_tokens", "Tokens of prompts.")
        self._generated = total("generation_tokens", "New tokens.")
        self._queries = total("prefix_cache_queries", "Prompt tokens looked up in the cache.")
        self._hits = total("prefix_cache_hits", "Prompt tokens found in the cache.")
        self._drafted = total("spec_decode_num_draft_tokens", "Draft tokens.")
        accepted = "spec_decode_num_accepted_tokens"
        self._accepted = total(accepted, "Draft tokens that were accepted.")
        self._running = gauge("num_requests_running", "Answers that run.")
        self._waiting = gauge("num_requests_waiting", "Answers that wait for the batch.")
        first = "time_to_first_token_seconds"
        self._ttft = histogram(first, "Until the first sampled token.", _SHORT)
        between = "inter_token_latency_seconds"
        self._inter = histogram(between, "Between two sampled tokens.", _SHORT)
        each = "request_time_per_output_token_seconds"
        self._per_token = histogram(each, "Mean of an answer's sampled tokens.", _SHORT)
        self._e2e = histogram("e2e_request_latency_seconds", "Duration of whole answers.", _LONG)
        self._queue = histogram("request_queue_time_seconds", "Until the prefill begins.", _LONG)
        self._prompt_sizes = histogram("request_prompt_tokens", "Tokens of one prompt.", _TOKENS)
        sizes = "request_generation_tokens"
        self._answer_sizes = histogram(sizes, "Tokens of one answer.", _TOKENS)

    # -- one answer

    def waits(self) -> None:
        """Count an answer that was requested and now waits for its prefill."""
        self._waiting.inc()

    def scheduled(self, clock: AnswerClock) -> None:
        """Count an answer whose prefill has begun; repeated calls for one answer do nothing."""
        if clock.scheduled is None and clock.left is None:
            clock.scheduled = time.monotonic()
            self._waiting.dec()
            self._running.inc()
            self._queue.observe(clock.scheduled - clock.arrived)

    def sampled(self, clock: AnswerClock) -> None:
        """Count a token that was sampled from the model's logits."""
        self.scheduled(clock)
        now = time.monotonic()
        clock.sampled += 1
        if clock.first is None:
            clock.first = now
            self._ttft.observe(now - clock.arrived)
        elif clock.last is not None:
            self._inter.observe(now - clock.last)
        clock.last = now

    def leaves(self, clock: AnswerClock, reason: str, tokens: int) -> None:
        """Count an answer with `tokens` new tokens that has ended.

        `reason` is "stop", "length", "tool_calls", "abort" or "error".
        """
        clock.left = time.monotonic()
        gauge = self._waiting if clock.scheduled is None else self._running
        gauge.dec()
        self._success.labels(self._model, reason).inc()
        self._generated.inc(tokens)
        self._e2e.observe(clock.left - clock.arrived)
        if tokens:
            self._answer_sizes.observe(tokens)
        if clock.first is not None and clock.last is not None and clock.sampled > 1:
            self._per_token.observe((clock.last - clock.first) / (clock.sampled - 1))

    def drafts(self, drafts: DraftCounts) -> None:
        """Count the draft tokens of an answer that has ended."""
        self._drafted.inc(drafts.proposed)
        self._accepted.inc(drafts.accepted)

    # -- one request

    def prompt(self, tokens: int, cached: int) -> None:
        """Count a prompt, of which `cached` tokens were in the prefix cache."""
        self._prompt.inc(tokens)
        self._prompt_sizes.observe(tokens)
        self._queries.inc(tokens)
        self._hits.inc(cached)

    def failed(self, status: int) -> None:
        """Count a request that was answered with an error of this HTTP status."""
        self._errors.labels(self._model, str(status)).inc()


class _Gauges(Collector):
    def __init__(self, models: Mapping[str, Metrics]):
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for model, metrics in list(self._models.items()):
            for name, help, value in metrics.gauges():
                if name not in families:
                    made = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
                    families[name] = made
                families[name].add_metric([model], value)
        yield from families.values()
