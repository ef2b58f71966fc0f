"""Answers under JSON schemas, by models: whether each one is valid, at several temperatures.

    python -m bench.schema_answers --suite suite --schemas schemas --count 200

The embedded model, and one of its shape with random weights, answer every schema that is honoured; the
folders are the same as for `bench.json_schemas`. Answers that reach their limit of tokens are
completed. All are validated with `jsonschema`, by the draft that the schema is written in.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core, for its fast products

# isort: split
import mlx.core as mx
from mlx.utils import tree_map

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.loading.load import load
from afm_mlx.model.model import Model
from bench.json_schemas import bench_schemas, is_valid, suite_cases
from bench.targets import markdown

Schema = tuple[str, Any, Constraint]


def honoured(schemas: Iterator[tuple[str, Any]]) -> list[Schema]:
    """Return the named schemas of which a constraint can be made."""
    found = []
    for name, schema in schemas:
        try:
            found.append((name, schema, Constraint.json_schema(schema)))
        except ConstraintError:
            continue
    return found


def random_twin(model: Model, seed: int) -> Model:
    """Make a float model of the same shape with random weights, whose answers are noise."""
    mx.random.seed(seed)
    twin = Model(model.args)
    twin.update(tree_map(_randomized, twin.parameters()))
    mx.eval(twin.parameters())
    return twin.eval()


def _randomized(array: mx.array) -> mx.array:
    if array.ndim < 2:
        return mx.full(array.shape, 0.03) if array.ndim == 0 else mx.ones(array.shape)
    return 1.5 * mx.random.normal(array.shape) / array.shape[-1] ** 0.5


def answers(
    model: Any,
    tokenizer: Any,
    schemas: list[Schema],
    temperature: float,
    max_tokens: int,
    seed: int,
) -> tuple[Counter[str], list[str]]:
    """Answer each schema once.

    Returns:
        Numbers of whole, completed, invalid and failed answers; and the errors, each with its schema's name.
    """
    engine = Engine(model, tokenizer, max_batch=16)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Answer in JSON."}], add_generation_prompt=True
    )
    sampler = make_sampler(temp=temperature) if temperature else None
    counts: Counter[str] = Counter()
    faults, texts = [], {}
    for i, (name, _, constraint) in enumerate(schemas):
        request = Request(
            prompt, max_tokens, sampler, seed + i, logprobs=False, constraint=constraint,
            at_limit="complete",
        )  # fmt: skip
        try:
            texts[engine.submit(request)] = [i, ""]
        except ConstraintError as error:
            counts["refused"] += 1
            faults.append(f"{name}: {error}")
    for response in engine.run():
        texts[response.row][1] += response.text
        if response.finish_reason is None:
            continue
        index, text = texts[response.row]
        name, schema, _ = schemas[index]
        if response.error is not None:
            counts["failed"] += 1
            faults.append(f"{name}: {response.error}")
        elif not is_valid(schema, json.loads(text)):
            counts["invalid"] += 1
            faults.append(f"{name}: {text[:200]}")
        else:
            counts["completed" if response.finish_reason == "length" else "whole"] += 1
    return counts, faults


def main(arguments: list[str] | None = None) -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--suite", type=Path, help="folder of JSON-Schema-Test-Suite")
    parser.add_argument("--schemas", type=Path, help="folder of jsonschemabench")
    parser.add_argument("--count", type=int, default=200, help="schemas of jsonschemabench in all")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0, 5.0])
    parser.add_argument("--max-tokens", type=int, default=80, help="before an answer is completed")
    parser.add_argument("--seed", type=int, default=0, help="of the choice and of the answers")
    args = parser.parse_args(arguments)
    nano, tokenizer = load()
    models = {"afm-nano": nano, "random weights": random_twin(nano, args.seed)}
    sets: dict[str, list[Schema]] = {}
    if args.suite:
        sets["official suite"] = honoured(
            (name, schema) for name, schema, _ in suite_cases(args.suite)
        )
    if args.schemas:
        found = bench_schemas(args.schemas, args.count, args.seed)
        sets["JSONSchemaBench"] = honoured((name, schema) for _, name, schema in found)
    heads = ["whole", "completed", "invalid", "failed", "refused"]
    rows = [["set, model, temperature", "answers", *heads, "seconds"]]
    for set_name, schemas in sets.items():
        for model_name, model in models.items():
            for temperature in args.temperatures:
                start = time.perf_counter()
                counts, faults = answers(
                    model, tokenizer, schemas, temperature, args.max_tokens, args.seed
                )
                name = f"{set_name}, {model_name}, {temperature:g}"
                seconds = f"{time.perf_counter() - start:.0f}"
                rows.append([name, str(len(schemas)), *(str(counts[h]) for h in heads), seconds])
                print(rows[-1], *faults[:5], sep="\n  ", flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
