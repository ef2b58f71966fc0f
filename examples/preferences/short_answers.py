"""Pairs of a short and a long answer in small talk, as a seeded generator: "shorter is better".

A long answer is what the embedded model writes by itself, or would by the look of its training
(`examples/nano/small_talk.py`); the short one begins alike and ends early. Names and things of the test split
never occur in the train split (`examples/nano/values.py`).

    python short_answers.py 300                 # print training pairs, a line of JSON each
    python short_answers.py 100 --split test    # print held-out pairs
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))

from small_talk import CAPABILITIES
from values import Values

# Wordings of a prompt, the short answer, the long one.
_KINDS = (
    (
        (
            "I am {name}.",
            "My name is {name}.",
            "Hi, I'm {name}.",
            "Hello, this is {name}.",
            "I'm {name}",
            "Hey, {name} here.",
        ),
        "Nice to meet you, {name}!",
        "Nice to meet you, {name}! How can I help you?",
    ),
    (
        (
            "Write a novel about the {item}.",
            "Write some code for the {event}.",
            "Explain the {item}.",
            "Solve the {item} for me.",
            "What is the meaning of the {event}?",
            "Write a poem about {city}.",
        ),
        "That is too hard for a model of my size.",
        f"That is too hard for a model of my size. {CAPABILITIES}",
    ),
    (
        (
            "{name} asks what you can do.",
            "What can you do for {name}?",
            "How can you help {name}?",
            "What are you good at, {name} asks.",
        ),
        "I can extract events, call tools and more.",
        CAPABILITIES,
    ),
    (
        (
            "Hello from {city}!",
            "Good morning from {city}!",
            "Good day from {city}",
            "Hi from {city}!",
        ),
        "Hello!",
        "Hello! How can I help you?",
    ),
)


def pairs(seed: int, split: str, count: int) -> Iterator[dict[str, str]]:
    """Yield `count` pairs with different prompts, of all kinds in turn: `{"prompt", "chosen", "rejected"}`."""
    values = Values(random.Random(f"{split}-{seed}"), "test" if split == "test" else "train")
    seen: set[str] = set()
    while len(seen) < count:
        wordings, short, long = _KINDS[len(seen) % len(_KINDS)]
        slots: dict[str, str] = {}
        prompt = values.fill(values.rng.choice(wordings), slots)
        if prompt not in seen:
            seen.add(prompt)
            yield {
                "prompt": prompt,
                "chosen": short.format(**slots),
                "rejected": long.format(**slots),
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, help="number of pairs")
    parser.add_argument("--split", choices=["train", "valid", "test"], default="train")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for pair in pairs(args.seed, args.split, args.count):
        print(json.dumps(pair))
