"""Measure how fast a model runs here, and what share of the memory bandwidth that is.

A case is a prompt, an answer, a number of rows, and tokens in the KV cache before the prompt. It runs
through the engine, as a user's request does, with random tokens and no end token. Rates:

    prefill tokens/s = rows * prompt / time to first token
    decode tokens/s = rows * (answer - 2) / time from the first token to the last but one

(The engine submits a step before it reads the previous one. No step is submitted with the last token, so
its time is not a step's.)

A decode step must read every weight once (the tied embedding as the head), the adapter, and, in each block,
the keys and values that it attends to: `StepCost` counts those bytes. Their rate over the machine's measured
bandwidth (`machine.py`) is the share of what is possible.

`run_speculation` compares decoding with and without draft tokens on the same prompts.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.active import (
    adapter_arrays,
    attach_random_adapters,
    detach_adapter,
    unread_bytes,
)
from afm_mlx.checkpoint.fingerprint import base_parameters
from afm_mlx.config import ModelConfig
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.draft_model import DraftModel
from afm_mlx.engine.speculation.draft_tokens import Draft
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS
from afm_mlx.measure.machine import peak_resident, reset_peak_resident
from afm_mlx.model.model import Model, is_afm
from afm_mlx.quantization.packed_layers import activation_dtype

WARM_UP_TOKENS = 3
_MINIMA = {"generated_tokens": 3, "depth": 0, "adapter_rank": 0}  # of others, 1

# Primitives of MLX that compute nothing: views of the same memory.
_VIEWS = set(
    "Broadcast BroadcastAxes Depends ExpandDims Flatten Reshape Slice Split Squeeze StopGradient "
    "Transpose Unflatten View".split()
)

# A detokenizer without text.
NO_TEXT = SimpleNamespace(last_segment="", add_token=lambda token: None, finalize=lambda: None)


@dataclass(frozen=True)
class BenchmarkCase:
    """The sizes of a benchmark.

    Args:
        prompt_tokens: tokens of each row's prompt.
        generated_tokens: tokens of each row's answer, the first one included, which the prompt's step gives.
        batch: number of rows.
        depth: tokens in each row's cache before the prompt.
        adapter_rank: rank of a random adapter on every linear layer of every block; 0 for no adapter.
        adapters: number of different adapters, which the rows use in turn.
    """

    prompt_tokens: int = 512
    generated_tokens: int = 128
    batch: int = 1
    depth: int = 0
    adapter_rank: int = 0
    adapters: int = 1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < (least := _MINIMA.get(name, 1)):
                raise RequestError(f"{name} of a benchmark is {value}; at least {least} is needed.")
        if self.adapters > 1 and not self.adapter_rank:
            raise RequestError(
                f"adapters of a benchmark is {self.adapters}, and adapter_rank is 0, which means none; give "
                "both."
            )
        most = min(self.batch, MAX_ADAPTERS)
        if self.adapters > most:
            raise RequestError(
                f"adapters of a benchmark is {self.adapters}; a batch of {self.batch} runs at most {most} side "
                "by side."
            )

    @property
    def tokens(self) -> int:
        """Tokens in a row's cache at the end: all except the answer's last, which is never fed."""
        return self.depth + self.prompt_tokens + self.generated_tokens - 1

    @property
    def mean_length(self) -> float:
        """Mean number of tokens that a decode step attends to, including its own."""
        return self.depth + self.prompt_tokens + self.generated_tokens / 2


@dataclass(frozen=True)
class Spread:
    """Mean, median and standard deviation of measurements; a single one has no deviation."""

    mean: float
    median: float
    deviation: float | None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        deviation = statistics.stdev(samples) if len(samples) > 1 else None
        return cls(statistics.fmean(samples), statistics.median(samples), deviation)


@dataclass(frozen=True)
class StepCost:
    """Bytes that one decode step of all rows reads, and its number of operations.

    Args:
        weight_bytes: bytes of every parameter, scales and norms included.
        adapter_bytes: bytes of the adapters' arrays.
        kv_bytes: bytes of keys and values that all blocks read, including reuse blocks.
        cache_bytes: bytes of keys and values in the cache at the end of the case.
        operations: primitives in the graph of the step that compute something. On a GPU each is a dispatch, or
            more where MLX makes several kernels of one.
        unread_bytes: bytes among `weight_bytes` that the step does not read, because a task mask replaces them,
            or because they are of the image encoder.
    """

    weight_bytes: int
    adapter_bytes: int
    kv_bytes: int
    cache_bytes: int
    operations: int
    unread_bytes: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes that a step reads: weights, adapter, keys and values."""
        return self.model_bytes - self.unread_bytes + self.kv_bytes

    @property
    def model_bytes(self) -> int:
        """Weights and adapter."""
        return self.weight_bytes + self.adapter_bytes


@dataclass(frozen=True)
class BenchmarkResult:
    """The measurements of a case.

    Args:
        prefill: prompt tokens per second, of all rows.
        decode: new tokens per second, of all rows.
        first_token: seconds from the request to the first token.
        cost: cost of a decode step; None for mlx-lm's models, whose reads can't be counted.
        peak_memory: peak bytes of MLX.
        peak_resident: peak bytes of the process, including code and Python; None where the system can't
            reset that peak.
    """

    case: BenchmarkCase
    prefill: Spread
    decode: Spread
    first_token: Spread
    cost: StepCost | None
    peak_memory: int
    peak_resident: int | None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes read per token: a step's bytes over its rows."""
        if self.cost is None:
            return None
        return self.cost.step_bytes / self.case.batch

    @property
    def bytes_per_second(self) -> float | None:
        """Rate at which decoding read memory."""
        return None if self.bytes_per_token is None else self.bytes_per_token * self.decode.mean

    @property
    def memory_ratio(self) -> float | None:
        """MLX's peak memory over the bytes of weights, adapters and KV cache, the minimum of a run."""
        if self.cost is None:
            return None
        return self.peak_memory / (self.cost.model_bytes + self.cost.cache_bytes)


def run_case(
    model: nn.Module,
    case: BenchmarkCase,
    repetitions: int = 5,
    *,
    kv: str = "int8",
    tokenizer: Any = None,
    seed: int = 0,
    on_run: Callable[[], None] | None = None,
) -> BenchmarkResult:
    """Measure one case, after a warm-up.

    Args:
        model: an AFM `Model`, or one of mlx-lm's. With `adapter_rank`, it has no adapter afterwards.
        case: the case.
        repetitions: measured runs.
        kv: "int8" or "float" storage of keys and values.
        tokenizer: its detokenizer decodes the tokens during the run; pass None to leave that out.
        seed: seed of the random tokens and adapters.
        on_run: called after every run, including the warm-up.

    Raises:
        RequestError: if the model can't run the case.
    """
    if case.adapter_rank:
        attach_random_adapters(model, case.adapter_rank, seed, case.adapters, case.batch)
    try:
        bench = Bench(model, case, kv, tokenizer, np.random.default_rng(seed))
        bench.run(min(case.generated_tokens, WARM_UP_TOKENS))
        done = on_run or (lambda: None)
        done()
        mx.reset_peak_memory()
        can_reset = reset_peak_resident()
        times = []
        for _ in range(repetitions):
            times.append(bench.run(case.generated_tokens))
            done()
        new = case.batch * (case.generated_tokens - 2)
        prompt = case.batch * case.prompt_tokens
        return BenchmarkResult(
            case,
            prefill=Spread.of([prompt / first for first, _ in times]),
            decode=Spread.of([new / decoding for _, decoding in times]),
            first_token=Spread.of([first for first, _ in times]),
            peak_memory=mx.get_peak_memory(),
            peak_resident=peak_resident() if can_reset else None,
            # Last, because it takes memory itself.
            cost=step_cost(model, case, kv) if bench.is_afm else None,
        )
    finally:
        if case.adapter_rank:
            detach_adapter(model)


class Bench:
    """One case on one model, which can run any number of times.

    Args:
        model, case, kv, tokenizer: as in `run_case`.
        rng: random generator of the tokens.
    """

    def __init__(
        self,
        model: nn.Module,
        case: BenchmarkCase,
        kv: str,
        tokenizer: Any,
        rng: np.random.Generator,
    ):
        self.case = case
        self._model, self._kv, self._rng = model, kv, rng
        self.is_afm = is_afm(model)
        if self.is_afm:
            self._vocab_size = model.args.vocab_size
        else:
            # The configs of mlx-lm's models differ; logits always have the size.
            self._vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]
        detokenizer = tokenizer.detokenizer if tokenizer is not None else NO_TEXT
        self._tokenizer = SimpleNamespace(eos_token_ids=set(), detokenizer=detokenizer)

    def run(self, generated: int) -> tuple[float, float]:
        """Generate `generated` tokens; return seconds to the first, and from there to the last but one."""
        case = self.case
        engine = Engine(
            self._model,
            self._tokenizer,
            max_batch=case.batch,
            max_kv_size=case.tokens + 1 if self.is_afm else None,
            kv=self._kv,
        )
        filled = self._filled_cache(engine) if case.depth else None
        prompts = self._rng.integers(0, self._vocab_size, (case.batch, case.prompt_tokens))
        start = time.perf_counter()
        for prompt in prompts.tolist():
            # Arrays that copies of mlx-lm's caches share are merged before they are written.
            cache = filled and [x.copy() if hasattr(x, "copy") else copy.copy(x) for x in filled]
            request = Request(prompt, max_tokens=generated, cache=cache, logprobs=False)
            engine.submit(request)
            # A request that keeps its cache gets a copy of all keys and values at the end.
            request.cache = None
        filled = cache = None
        read = []  # times of steps with tokens
        while engine.busy:
            responses = engine.step()
            failed = next((r.error for r in responses if r.error is not None), None)
            if failed is not None:
                raise failed
            if responses:
                read.append(time.perf_counter())
        return read[0] - start, read[-2] - read[0]

    def _filled_cache(self, engine: Engine) -> list[Any]:
        """Make a cache of one row with `depth` tokens of random keys and values.

        The time of attention does not depend on them, and computing them would take longer than the run.
        """
        if not self.is_afm:
            return self._filled_zoo_cache(engine)
        config = self._model.args
        cache = engine.make_cache()
        shape = (1, 2 * config.num_kv_heads, self.case.depth, config.head_dim)
        if cache[0].int8:
            kv = mx.array(self._rng.integers(-127, 128, shape, dtype=np.int8))
        else:
            numbers = self._rng.standard_normal(shape, dtype=np.float32)
            kv = mx.array(numbers).astype(activation_dtype())
        for layer in cache[: config.num_kv_layers]:
            layer.update(kv)
        mx.eval([layer.state for layer in cache])
        return cache

    def _filled_zoo_cache(self, engine: Engine) -> list[Any]:
        from mlx_lm.models.cache import KVCache

        cache, example = engine.make_cache(), engine.make_cache()
        if other := next((type(layer) for layer in cache if type(layer) is not KVCache), None):
            raise RequestError(
                f"depth is {self.case.depth}, and this model has a {other.__name__}: only caches of AFM models "
                "and mlx-lm's KVCache can be filled beforehand. Use a longer prompt."
            )
        self._model(mx.zeros((1, 1), mx.int32), cache=example)
        numbers: dict[tuple[int, ...], mx.array] = {}
        for layer, like in zip(cache, example, strict=True):
            parts = []
            for part in (like.keys, like.values):
                heads, width = part.shape[1], part.shape[3]
                shape = (1, heads, self.case.depth, width)
                if shape not in numbers:
                    drawn = self._rng.standard_normal(shape, dtype=np.float32)
                    numbers[shape] = mx.array(drawn).astype(part.dtype)
                parts.append(numbers[shape])
            layer.update_and_fetch(*parts)
        mx.eval([layer.state for layer in cache])
        return cache


def step_cost(model: Any, case: BenchmarkCase, kv: str) -> StepCost:
    """Compute the cost of a decode step of an AFM model, with "int8" or "float" keys and values."""
    config: ModelConfig = model.args
    width = 1 if kv == "int8" and config.kv_bits == 8 else activation_dtype().size
    per_block = 2 * config.kv_dim * width
    vision = {} if model.vision is None else base_parameters(model.vision)
    return StepCost(
        weight_bytes=sum(array.nbytes for array in base_parameters(model).values()),
        adapter_bytes=sum(array.nbytes for array in adapter_arrays(model).values()),
        kv_bytes=round(case.batch * config.num_layers * per_block * case.mean_length),
        cache_bytes=case.batch * config.num_kv_layers * per_block * case.tokens,
        operations=count_operations(model, case.batch, kv),
        unread_bytes=unread_bytes(model) + sum(array.nbytes for array in vision.values()),
    )


def count_operations(model: Any, batch: int = 1, kv: str = "int8") -> int:
    """Count the computing primitives in the graph of one decode step of an AFM model."""
    cache = model.make_cache(kv)
    # Rows are past their first position, as in any decode step.
    cache = [layer.merge([layer] * batch) for layer in cache]
    model.prefill(mx.zeros((batch, 1), mx.int32), cache)
    mx.eval([layer.state for layer in cache])
    tokens, _ = model.greedy(mx.zeros((batch, 1), mx.int32), cache)
    # Unlike tracing (`mx.export_function`), this lists compiled and custom primitives, too.
    drawing = io.StringIO()
    mx.export_to_dot(drawing, tokens)
    names = re.findall(r'\[label ="([^"]*)"', drawing.getvalue())
    return sum(name not in _VIEWS for name in names)


# -- images


@dataclass(frozen=True)
class ImageResult:
    """The speed of an image encoder and its adaptor in one mode.

    Args:
        mode: see `VisionConfig`.
        tiles, tokens: number of tiles of an image, and of its tokens in a prompt.
        seconds: time from an image's pixels to its features.
        encoder_flops: operations of the encoder's products and attention.
        peak_memory: peak bytes of MLX.
    """

    mode: str
    tiles: int
    tokens: int
    seconds: Spread
    encoder_flops: int
    peak_memory: int


def run_image(
    model: nn.Module,
    mode: str,
    repetitions: int = 5,
    *,
    seed: int = 0,
    on_run: Callable[[], None] | None = None,
) -> ImageResult:
    """Measure a pass of the image encoder and its adaptor over one image of random pixels, after a warm-up.

    Tiles are computed one after the other, as in an engine. For other arguments see `run_case`.

    Raises:
        RequestError: if the model takes no images.
    """
    if not is_afm(model) or model.vision is None:
        raise RequestError(
            "The model reads text only; benchmarks of images need one with an image encoder."
        )
    config, vision = model.vision.config, model.vision
    size, count = config.tile_size(mode), config.num_tiles(mode)
    rng = np.random.default_rng(seed)
    tiles = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
    seconds: list[float] = []
    for run in range(repetitions + 1):
        if run == 1:
            mx.reset_peak_memory()
        start = time.perf_counter()
        for tile in tiles:
            mx.eval(vision(vision.whiten(mx.array(tile[None]))))
        seconds.append(time.perf_counter() - start)
        if on_run is not None:
            on_run()
    flops, peak = config.encoder_flops(mode), mx.get_peak_memory()
    return ImageResult(mode, count, config.tokens(mode), Spread.of(seconds[1:]), flops, peak)


# -- speculative decoding

Answers = dict[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class SpeculationResult:
    """The speed of decoding with draft tokens, compared with plain decoding.

    Args:
        rows: rows in the batch.
        drafted: mean draft tokens per row and step, of the steps that had any.
        accepted: share of the draft tokens that were kept; all behind a wrong one are dropped.
        plain: new tokens per second without draft tokens.
        speculative: new tokens per second with draft tokens.
        ratio: `speculative` over `plain`, of neighbouring runs.
        equal: True if all answers were the same.
    """

    rows: int
    drafted: float
    accepted: float
    plain: Spread
    speculative: Spread
    ratio: Spread
    equal: bool


class FixedAcceptance(DraftModel):
    """A draft model that runs, but whose draft tokens are right with a given probability.

    Random weights agree with no draft model, so this sets the share of right draft tokens.

    Args:
        model: the draft model.
        rate: probability that a draft token is right.
        rng: decides which draft tokens are right, and draws the wrong ones.

    Attributes:
        answers: the right tokens, by prompt.
    """

    def __init__(
        self, model: Model, rate: float, rng: np.random.Generator, prefill_step_size: int = 128
    ):
        super().__init__(model, prefill_step_size)
        self.answers: Answers = {}
        self._rate, self._rng = rate, rng

    def next_tokens(self, drafts: dict[int, Draft]) -> list[int]:
        super().next_tokens(drafts)
        found = []
        for draft in drafts.values():
            answer = self.answers[tuple(draft.row.request.prompt)]
            place = len(draft.row.tokens) + len(draft.assumed)
            if place < len(answer) and self._rng.random() < self._rate:
                found.append(answer[place])
            else:
                found.append(int(self._rng.integers(self.model.args.vocab_size)))
        return found


def run_speculation(
    model: Model,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation,
    *,
    generated_tokens: int = 128,
    repetitions: int = 5,
    kv: str = "int8",
    on_run: Callable[[], None] | None = None,
) -> SpeculationResult:
    """Measure decoding with and without draft tokens, in turn, after a warm-up of each.

    Args:
        model: the model.
        prompts: token ids of each row's prompt.
        speculation: how tokens are drafted. A `FixedAcceptance` in it gets the right answers.
        generated_tokens, repetitions, kv, on_run: as in `BenchmarkCase` and `run_case`.

    Raises:
        RequestError: if the model or the case does not support speculation.
    """
    plain, speculative, equal, counts = [], [], True, (0, 0, 0)
    for repetition in range(1 + repetitions):
        answers, tokens_per_second, _ = _timed(model, prompts, None, generated_tokens, kv)
        if isinstance(speculation.draft_model, FixedAcceptance):
            speculation.draft_model.answers |= answers
        if on_run:
            on_run()
        found, faster, counted = _timed(model, prompts, speculation, generated_tokens, kv)
        if on_run:
            on_run()
        equal = equal and found == answers
        if repetition:
            plain.append(tokens_per_second)
            speculative.append(faster)
            counts = tuple(map(sum, zip(counts, counted, strict=True)))  # type: ignore[assignment]
    proposed, accepted, rounds = counts
    return SpeculationResult(
        rows=len(prompts),
        drafted=proposed / max(1, rounds),
        accepted=accepted / max(1, proposed),
        plain=Spread.of(plain),
        speculative=Spread.of(speculative),
        ratio=Spread.of([b / a for a, b in zip(plain, speculative, strict=True)]),
        equal=equal,
    )


def _timed(
    model: Model,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation | None,
    generated_tokens: int,
    kv: str,
) -> tuple[Answers, float, tuple[int, int, int]]:
    """Return answers by prompt, tokens per second after each row's first, and three counts.

    The counts are: draft tokens proposed, draft tokens accepted, steps with draft tokens.
    """
    tokenizer: Any = SimpleNamespace(eos_token_ids=set(), detokenizer=NO_TEXT)
    engine = Engine(model, tokenizer, max_batch=len(prompts), kv=kv, speculation=speculation)
    rows = {
        engine.submit(Request(prompt, max_tokens=generated_tokens, logprobs=False)): tuple(prompt)
        for prompt in prompts
    }
    answers: Answers = {prompt: [] for prompt in rows.values()}
    start = 0.0
    proposed = accepted = rounds = before = 0
    while engine.busy:
        for response in engine.step():
            if response.error is not None:
                raise response.error
            answers[rows[response.row]].append(response.token)
            if response.draft_counts is not None:
                proposed += response.draft_counts.proposed
                accepted += response.draft_counts.accepted
                rounds += response.draft_counts.rounds
        if not start and all(answers.values()):
            start, before = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - start
    tokens = sum(map(len, answers.values())) - before
    return answers, tokens / max(seconds, 1e-9), (proposed, accepted, rounds)
