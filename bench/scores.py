"""What scores cost: four answers to a question and four separate prompts, and memory over a prompt's length.

The embedded model, and one of the 3B's shape with random weights. Ways that are compared take turns, a few
questions at a time.

    python -m bench.scores
    python -m bench.scores --layers 4          a quick look
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import PromptLogprobs, Request
from afm_mlx.loading.load import load
from afm_mlx.measure.continuations import score_continuations
from afm_mlx.measure.random_model import random_packed_model
from bench.targets import Target, markdown, target_rows

CONTEXT, ANSWER, ANSWERS = 200, 6, 4  # tokens, tokens, answers to a question
TOGETHER = 8  # questions that are scored in one call
SHARED = 2.5  # times the speed of separate prompts
GROWTH = 1.1  # of the memory of 512 positions

Figures = dict[str, Any]


def questions(vocab_size: int, count: int, context: int) -> list[list[tuple[list[int], list[int]]]]:
    """Make `count` questions: pairs of one context and each of its answers."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        shared = rng.integers(8, vocab_size, context).tolist()
        made.append(
            [(shared, rng.integers(8, vocab_size, ANSWER).tolist()) for _ in range(ANSWERS)]
        )
    return made


def four_choices(
    model: nn.Module, tokenizer: Any, count: int = 16, context: int = CONTEXT
) -> Figures:
    """Measure the seconds that questions take, with a shared context and with separate prompts.

    The processor's seconds are less noisy on a busy machine; threads that wait count, so use OMP_NUM_THREADS=1.
    """
    seconds, processor = {"shared": 0.0, "separate": 0.0}, {"shared": 0.0, "separate": 0.0}
    made = questions(model.args.vocab_size, count, context)
    for first in range(0, count, TOGETHER):
        pairs = [pair for each in made[first : first + TOGETHER] for pair in each]
        for way in seconds:
            memory = {} if way == "shared" else {"prefix_memory": 0}
            start, begun = time.perf_counter(), time.process_time()
            list(score_continuations(model, tokenizer, pairs, **memory))
            seconds[way] += time.perf_counter() - start
            processor[way] += time.process_time() - begun
    ratios = [each["separate"] / each["shared"] for each in (seconds, processor)]
    return {**seconds, "questions": count, "ratio": ratios[0], "processor's ratio": ratios[1]}


def memory(model: nn.Module, tokenizer: Any, length: int) -> Figures:
    """Measure MLX's peak memory in MB, without weights, for a prompt that is scored and one that isn't."""
    found: Figures = {"tokens": length}
    prompt = np.random.default_rng(0).integers(8, model.args.vocab_size, length).tolist()
    for way, asked in (("plain", None), ("scored", PromptLogprobs(1, 5))):
        engine = Engine(model, tokenizer)
        engine.submit(Request(prompt, 0, prompt_logprobs=asked))
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        start = time.perf_counter()
        list(engine.run())
        found[way] = (mx.get_peak_memory() - before) / 1e6
        found[f"{way} seconds"] = time.perf_counter() - start
    return {**found, "added": found["scored"] - found["plain"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=integer(2), help="blocks of the 3B; all by default")
    parser.add_argument(
        "--tokens", type=integer(512, 4096), default=4096, help="of the longest prompt"
    )
    args = parser.parse_args()
    small, tokenizer = load("afm-nano")
    config = PRESETS["afm-3b"]
    if args.layers:
        reuse = args.layers * config.num_kv_reuse_layers // config.num_layers
        config = dataclasses.replace(
            config, num_layers=args.layers, num_kv_reuse_layers=max(1, reuse)
        )
    large = random_packed_model(config)
    figures: Figures = {
        "afm-nano": four_choices(small, tokenizer),
        "3B": four_choices(large, tokenizer, 2),
        "memory": [memory(large, tokenizer, length) for length in (512, args.tokens)],
    }
    least, most = (each["added"] for each in figures["memory"])
    rows = target_rows(
        [
            Target(
                "four choices, times four prompts, afm-nano", figures["afm-nano"]["ratio"], SHARED
            ),
            Target("four choices, times four prompts, 3B", figures["3B"]["ratio"], SHARED),
            Target(f"memory that {args.tokens} scores add, of 512", most / least, GROWTH, True),
        ]
    )
    print(markdown(rows))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
