"""What constraints cost at the 3B's shape: a step with one, with eight, and before the first token.

The model has random weights, its tokenizer 153,600 pieces. What is compared takes turns, step by step, so that
a machine's moods hit both alike. Answers are drawn at temperature 1, with and without constraints.

    python -m bench.constraints --output results
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher, fill_masks
from afm_mlx.measure.random_model import random_packed_model
from bench.bystanders import Bystanders
from bench.targets import Target, report
from bench.vocabulary import large_tokenizer

ONE_ROW, EIGHT_ROWS = 1.03, 1.05  # of a step without a constraint
COMPILE_SECONDS = 0.05
FIRST_TOKEN = 1.02

Figures = dict[str, Any]

_NAMES = "title author year pages language publisher summary tags".split()


def schemas(count: int) -> list[dict[str, Any]]:
    """Make `count` different schemas of objects with texts, numbers, choices and lists."""
    kinds: list[dict[str, Any]] = [
        {"type": "string"},
        {"type": "integer", "minimum": 0},
        {"type": "array", "items": {"type": "string"}},
        {"type": "string", "minLength": 3, "maxLength": 400},
        {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
        {"enum": ["short", "long", "other"]},
        {"type": "number"},
        {"type": "string", "pattern": "^[A-Z][a-z ]+$"},
    ]
    return [
        {
            "type": "object",
            "properties": {n: kinds[(i + j) % 8] for j, n in enumerate(_NAMES[i:] + _NAMES[:i])},
            "required": _NAMES,
            "additionalProperties": False,
        }
        for i in range(count)
    ]


def object_with(count: int) -> dict[str, Any]:
    """Make the schema of an object with a given number of properties."""
    kinds = [{"type": "string"}, {"type": "integer"}, {"enum": ["a", "b"]}, {"type": "boolean"}]
    properties = {f"property_{i}": kinds[i % 4] for i in range(count)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def steps(model: Any, tokenizer: Any, rows: int, count: int) -> Figures:
    """Measure seconds of a step with a constraint in each row and without, in turn."""
    constraints = [Constraint.json_schema(schema) for schema in schemas(rows)]
    engines = {
        "free": _started(model, tokenizer, [None] * rows),
        "constrained": _started(model, tokenizer, constraints),
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    while min(map(len, seconds.values())) < count:
        for name, engine in engines.items():
            start = time.perf_counter()
            responses = engine.step()
            elapsed = time.perf_counter() - start
            ended = any(response.finish_reason for response in responses)
            # Steps in which forced tokens come, or are fed, say nothing about masks.
            if not ended and len({r.row for r in responses}) == len(responses) == rows:
                seconds[name].append(elapsed)
            if ended or not engine.busy:
                given = [None] * rows if name == "free" else constraints
                engines[name] = _started(model, tokenizer, given)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return medians | {"ratio": medians["constrained"] / medians["free"]}


def _started(model: Any, tokenizer: Any, constraints: list[Constraint | None]) -> Engine:
    engine = Engine(model, tokenizer)
    sampler = make_sampler(temp=1.0)
    for seed, constraint in enumerate(constraints):
        prompt = list(range(300, 364))
        engine.submit(
            Request(
                prompt,
                400,
                sampler,
                seed,
                constraint=constraint,
                logprobs=False,
                at_limit="complete",
            )
        )
    for _ in range(3):
        engine.step()
    return engine


def masks(tokenizer: Any, rows: int, count: int) -> Figures:
    """Measure seconds of the masks of a batch, alone and in the middle of random answers."""
    rng = np.random.default_rng(0)
    matchers = [Matcher(Constraint.json_schema(schema), tokenizer) for schema in schemas(rows)]
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        found = fill_masks(matchers)
        seconds.append(time.perf_counter() - start)
        bits = np.unpackbits(found.view(np.uint8), axis=1, bitorder="little")
        for i, matcher in enumerate(matchers):
            matcher.accept(int(rng.choice(np.flatnonzero(bits[i]))))
            if matcher.is_stopped:
                matchers[i] = Matcher(Constraint.json_schema(schemas(rows)[i]), tokenizer)
    return {"median": statistics.median(seconds), "p99": float(np.quantile(seconds, 0.99))}


def compiling(tokenizer: Any, properties: int, rounds: int) -> Figures:
    """Measure seconds until a schema with `properties` properties can be used: a new one, and a known one."""
    new, known = [], []
    for i in range(rounds):
        schema = object_with(properties) | {"title": f"Schema {i}"}
        schema["properties"][f"another_{i}"] = {"type": "string"}
        for seconds in (new, known):
            start = time.perf_counter()
            Matcher(Constraint.json_schema(schema), tokenizer)
            seconds.append(time.perf_counter() - start)
    return {"new": statistics.median(new), "known": statistics.median(known)}


def first_token(model: Any, tokenizer: Any, rounds: int) -> Figures:
    """Measure seconds from a request to its first sampled token, with a known schema and with none, in turn."""
    # Nothing is forced at the beginning: forced tokens would come before the prompt is read.
    constraint = Constraint.json_schema({"type": ["string", "array", "integer"]})
    seconds: dict[str, list[float]] = {"free": [], "constrained": []}
    for i in range(rounds):
        for name, given in (("free", None), ("constrained", constraint)):
            engine = Engine(model, tokenizer)
            request = Request(
                list(range(300, 364)), 2, make_sampler(temp=1.0), i, logprobs=False,
                constraint=given, at_limit="complete",
            )  # fmt: skip
            start = time.perf_counter()
            engine.submit(request)
            next(engine.run())
            seconds[name].append(time.perf_counter() - start)
            for _ in engine.run():
                pass
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return medians | {"ratio": medians["constrained"] / medians["free"]}


def targets(figures: Figures) -> list[Target]:
    return [
        Target("a step with a constraint over one without, 1 row", figures["steps 1"]["ratio"], ONE_ROW, True),
        Target("8 rows, 8 schemas", figures["steps 8"]["ratio"], EIGHT_ROWS, True),
        Target("a schema of 100 properties", 1e3 * figures["compiling"]["new"], 1e3 * COMPILE_SECONDS,
               True, "ms"),
        Target("first token, known schema over none", figures["first token"]["ratio"], FIRST_TOKEN, True),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder for constraints.json")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="afm-3b", help="the shape")
    parser.add_argument("--steps", type=integer(1), default=100, help="steps of each kind")
    parser.add_argument("--rounds", type=integer(1), default=9, help="first tokens of each kind")
    args = parser.parse_args()
    config = PRESETS[args.preset]
    tokenizer = large_tokenizer(config.vocab_size)
    model = random_packed_model(config)
    bystanders = Bystanders()
    figures: Figures = {f"masks {rows}": masks(tokenizer, rows, args.steps) for rows in (1, 8)}
    figures["compiling"] = compiling(tokenizer, 100, args.rounds)
    figures["first token"] = first_token(model, tokenizer, args.rounds)
    for rows in (1, 8):
        figures[f"steps {rows}"] = steps(model, tokenizer, rows, args.steps)
        mx.clear_cache()
    for name, found in figures.items():
        print(name, {key: round(value, 6) for key, value in found.items()})
    path = None if args.output is None else args.output / "constraints.json"
    report(targets(figures), bystanders.processors(), path, figures)


if __name__ == "__main__":
    main()
