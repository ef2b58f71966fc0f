"""Answers chosen among several samples: best of N, (weighted) majority, and stepwise resampling.

N samples y_i of a model p are rows of one batch, which share the keys and values of their prompt. A check or a
reward gives each whole answer a potential phi(y) >= 0. A vote with the weights w_i = phi(y_i) is the weighted
majority, and their mean an unbiased estimate of Z = E_p[phi(y)].

Stepwise resampling (`particle_filter`, sequential Monte Carlo) also asks a value function V for the chance of
each unfinished answer when a line of it ends, and lets promising ones multiply:

    psi = V(prefix)^twist            1 for the empty prefix, phi for a whole answer
    w_i <- w_i psi(new) / psi(old)   after each line
    if (sum w)^2 / sum w^2 < N / 2:  log Z += log mean w; N draws by weight; w <- 1

For phi of 0 and 1, the variance of the next factor is least with twist 1/2; Z stays unbiased with any V > 0.

Source: Zhao et al. (arXiv 2404.17546, section 3); for answers with a checker, Feng et al. (arXiv 2410.01920).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.engine.batch import vision_config_of, vocab_size_of
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.generation import encode_prompt
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import CUT_OFF, Request
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import AFMError, RequestError, shown
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

P = TypeVar("P")
SELECTS = ("weighted", "majority", "best", "first")
MAX_BATCH = 32
PREFIX_MEMORY = 1 << 30  # bytes of keys and values that the samples share


class SearchResult(NamedTuple):
    """Distinct answers, the chosen one first, with the weights that they were chosen by.

    Weights are shares of the vote; with "best" and "first" they are what `verify` returned. `log_z` estimates
    the log of E[verify(answer)] over all answers that the model could give: -infinity if no sample has a
    weight; NaN if a reward is negative, or "first" has ended the other samples.
    """

    answers: list[str]
    weights: list[float]
    log_z: float


@dataclass(frozen=True)
class Sample:
    """An answer, or the beginning of one."""

    tokens: tuple[int, ...] = ()  # the end token excepted
    text: str = ""
    is_whole: bool = False
    error: AFMError | None = None  # why it is cut off before its constraint is met


def search(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    n: int,
    *,
    verify: Callable[[str], float] | None = None,
    select: str = "weighted",
    value: Callable[[str], float] | None = None,
    twist: float = 0.5,
    key: Callable[[str], Hashable] = str.strip,
    answer_of: Callable[[str, Sequence[int]], str] = lambda text, tokens: text,
    seed: int | None = None,
    engine_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **request: Any,
) -> SearchResult:
    """Sample n answers to one prompt, and choose among them.

        answers, weights, log_z = search(model, tokenizer, prompt, 16, verify=lambda answer: "42" in answer)

    Args:
        model, tokenizer: what `load` returns.
        prompt: text, or token ids.
        n: number of samples. With 1, the answer is the plain one of that seed.
        verify: phi of an answer, a finite number: 1 or more for one that passes, 0 for one that fails, or
            any reward; negative ones are for "best" and "first" only. Pass None to count all alike.
        select: "weighted" takes the answer with the largest sum of weights, "majority" the most frequent one,
            "best" the one with the largest reward, "first" the first that passes, and ends the other samples.
        value: chance that an unfinished answer, which ends with a whole line, will pass, 0 or more; switches
            stepwise resampling on. Pass None to sample whole answers.
        twist: exponent of `value`, 0 or more.
        key: answers with equal keys are one answer.
        answer_of: makes an answer of a sample's text and tokens; for example without thoughts.
        seed: seed of the first sample's random stream, from which all others are derived; None draws one.
        engine_options: options of `Engine`, such as its pool `adapters`; by default, 32 samples run together.
        progress: called with the number of samples that have ended, and n.
        request: other fields of `Request`. The default sampler draws from the model's own distribution.

    Raises:
        RequestError: for options that can't be honoured, and values of `verify` and `value` that are none.
        IncompleteError: if every answer is cut off before its constraint is met.
        AFMError: as `Engine` does.
    """
    _check(n, select, verify, twist)
    ids = encode_prompt(tokenizer, prompt)
    heal = request.get("constraint") is not None and isinstance(prompt, str) and value is None
    fields = {"sampler": make_sampler(1.0), "logprobs": False, "heal": heal, **request}
    seed = int(mx.random.randint(0, 2**31 - 1).item()) if seed is None else seed
    asked = Request(ids, seed=seed, **fields).checked(vocab_size_of(model), vision_config_of(model))
    rng = np.random.default_rng(asked.seed)
    shared = PrefixCache(PREFIX_MEMORY) if n > 1 and len(ids) > 1 else None
    options = {"max_batch": min(n, MAX_BATCH), "prefix_cache": shared, **(engine_options or {})}
    engine = Engine(model, tokenizer, **options)
    potentials: dict[Sample, float] = {}

    def answer(sample: Sample) -> str:
        return answer_of(sample.text, sample.tokens)

    def phi(sample: Sample) -> float:
        if verify is None or sample.error is not None:
            return float(sample.error is None)
        if sample not in potentials:
            is_signed = select in ("best", "first")
            potentials[sample] = _number("verify", verify(answer(sample)), is_signed)
        return potentials[sample]

    def psi(sample: Sample) -> float:
        if sample.is_whole or value is None:
            return max(phi(sample), 0.0)
        return _number("value", value(answer(sample)), False) ** twist

    def by_line(samples: Sequence[Sample]) -> list[Sample]:
        found = _extended(engine, asked, samples, rng, by_line=True)
        if progress is not None:
            progress(n - sum(not sample.is_whole for sample in found), n)
        return found

    with wired_memory(model):
        if shared is not None:  # computes the prompt, with which all rows begin
            images = asked.images
            engine.submit(
                Request(ids, 0, adapter=asked.adapter, client=asked.client, images=images)
            )
            for response in engine.run():
                if response.error is not None:
                    raise response.error
        if value is None or n == 1:
            passes = (lambda sample: phi(sample) >= 1) if select == "first" else None
            samples = _extended(
                engine, asked, [Sample()] * n, rng, passes=passes, progress=progress
            )
            weights = np.array([phi(sample) for sample in samples])
            has_mean = len(samples) == n and bool((weights >= 0).all())
            log_z = _log(weights.mean()) if has_mean else math.nan
        else:
            start, is_whole = [Sample()] * n, lambda sample: sample.is_whole
            samples, weights, log_z = particle_filter(start, by_line, psi, is_whole, rng)
    whole = [i for i, each in enumerate(samples) if each.is_whole and each.error is None]
    if not whole:
        raise samples[0].error or RequestError("value is 0 for every sample: none goes on.")
    answers, weights = [answer(samples[i]) for i in whole], weights[whole]
    if select in ("best", "first"):
        weights = np.array([phi(samples[i]) for i in whole])
    return SearchResult(*_chosen(answers, weights, select, key), log_z)


def _check(n: object, select: str, verify: Callable[[str], float] | None, twist: float) -> None:
    """Raise `RequestError` for arguments of `search` that can't be honoured."""
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise RequestError(f"n is {shown(n)}; an integer of 1 or more is needed.")
    if select not in SELECTS:
        raise RequestError(f"select is {shown(select)}; allowed are {', '.join(SELECTS)}.")
    if select in ("best", "first") and verify is None:
        raise RequestError(f"select is {select!r}, which needs verify: what makes an answer good.")
    _number("twist", twist, False)


def _chosen(
    answers: Sequence[str], weights: np.ndarray, select: str, key: Callable[[str], Hashable]
) -> tuple[list[str], list[float]]:
    """Return distinct answers, the chosen one first, and the weight of each, from the weights (n,) of all."""
    groups: dict[Hashable, list[int]] = {}
    for i, text in enumerate(answers):
        groups.setdefault(key(text), []).append(i)
    votes = np.ones(len(answers)) if select == "majority" else weights
    found = []
    for members in groups.values():
        if select in ("best", "first"):
            score = weights[members].max()
        else:
            score = votes[members].sum() / (votes.sum() or 1)
        found.append((float(score), len(members), answers[members[0]]))
    # Without a weight, the most frequent answer comes first.
    found.sort(key=lambda each: each[0] < 1 if select == "first" else (-each[0], -each[1]))
    return [text for *_, text in found], [score for score, *_ in found]


def particle_filter(
    particles: Sequence[P],
    extend: Callable[[Sequence[P]], Sequence[P]],
    potential: Callable[[P], float],
    is_whole: Callable[[P], bool],
    rng: np.random.Generator,
) -> tuple[list[P], np.ndarray, float]:
    """Extend N particles step by step until all are whole, and let those with large potentials multiply.

    Args:
        particles: the N beginnings, whose potentials are 1.
        extend: draws the next step of each of these particles.
        potential: psi of a particle, 0 or more. A particle with 0 is not extended.
        is_whole: True for a particle that has ended.
        rng: source of the stratified draws.

    Returns:
        The particles; their weights (N,), whose mean belongs to the last factor of Z; and log Z, where Z is an
        unbiased estimate of the mean potential of whole particles.
    """
    found, count = list(particles), len(particles)
    weights, before, log_z = np.ones(count), np.ones(count), 0.0
    while live := [i for i in range(count) if weights[i] > 0 and not is_whole(found[i])]:
        for i, particle in zip(live, extend([found[i] for i in live]), strict=True):
            found[i], now = particle, potential(particle)
            weights[i] *= now / before[i]
            before[i] = now
        total = weights.sum()
        is_worn = 0 < total**2 < count / 2 * (weights**2).sum()
        if is_worn and not all(map(is_whole, found)):
            log_z += _log(total / count)
            # One draw from each stratum of width 1/N.
            uniform = (rng.random(count) + np.arange(count)) / count
            chosen = np.searchsorted(np.cumsum(weights / total), uniform, side="right")
            chosen = np.minimum(chosen, np.flatnonzero(weights)[-1])  # sums may end below 1
            found, before = [found[i] for i in chosen], before[chosen]
            weights = np.ones(count)
    return found, weights, log_z + _log(weights.mean())


def _extended(
    engine: Engine,
    asked: Request,
    samples: Sequence[Sample],
    rng: np.random.Generator,
    *,
    by_line: bool = False,
    passes: Callable[[Sample], bool] | None = None,
    progress: Progress | None = None,
) -> list[Sample]:
    """Continue samples to their ends, or `by_line` until the next line of each ends.

    Once a whole sample `passes`, the others end, and only those that are whole are returned, it first.
    """
    rows: dict[int, int] = {}
    seeds = rng.integers(0, 2**63, len(samples)).tolist()
    if not samples[0].tokens:
        seeds[0] = asked.seed
    for i, (sample, seed) in enumerate(zip(samples, seeds, strict=True)):
        prompt = [*asked.prompt, *sample.tokens]
        left = asked.max_tokens - len(sample.tokens) if asked.max_tokens > 0 else asked.max_tokens
        # Stop strings may span lines, so `_with_text` looks for them.
        stop = () if by_line else asked.stop
        request = replace(asked, prompt=prompt, max_tokens=left, seed=seed, stop=stop)
        prepared = engine.prepare(request)
        if prepared.matcher is not None:
            for token in sample.tokens:
                prepared.matcher.accept(token)
        rows[engine.submit_prepared(prepared)] = i
    ends = engine.tokenizer.eos_token_ids
    tokens, texts = [list(sample.tokens) for sample in samples], [""] * len(samples)
    ended: dict[int, Sample] = {}
    while rows:
        for response in engine.step():
            if response.row not in rows:
                continue  # a token that was forced after the end of a line
            i, error = rows[response.row], response.error
            if error is not None and not isinstance(error, CUT_OFF):
                raise error
            texts[i] += response.text
            drawn = [response.token, *response.completion]
            tokens[i] += [t for t in drawn if t >= 0 and t not in ends]
            is_whole = response.finish_reason is not None
            if not (is_whole or (by_line and "\n" in response.text)):
                continue
            sample = Sample(tuple(tokens[i]), texts[i], is_whole, error)
            ended[i] = sample = _with_text(engine.tokenizer, asked, sample) if by_line else sample
            engine.cancel(response.row)
            del rows[response.row]
            if progress is not None:
                progress(len(ended), len(samples))
            if passes is not None and passes(sample):
                for row in rows:
                    engine.cancel(row)
                return [sample, *(each for k, each in ended.items() if k != i)]
    return [ended[i] for i in range(len(samples))]


def _with_text(tokenizer: Tokenizer, asked: Request, sample: Sample) -> Sample:
    """Return a sample with the text of all of its tokens, cut at the first stop string."""
    detokenizer = tokenizer.detokenizer
    if asked.constraint is not None and isinstance(tokenizer, AFMTokenizer):
        detokenizer = tokenizer.inner_detokenizer
    for token in sample.tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    text = detokenizer.last_segment
    cut = min((text.find(stop) for stop in asked.stop if stop in text), default=None)
    return replace(sample, text=text[:cut], is_whole=sample.is_whole or cut is not None)


def _number(name: str, value: Any, is_signed: bool) -> float:
    is_number = isinstance(value, Real | np.bool_) and math.isfinite(value)
    if not is_number or not (is_signed or value >= 0):
        least = "" if is_signed else " of 0 or more"
        raise RequestError(f"{name} is {shown(value)}; a finite number{least} is needed.")
    return float(value)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
