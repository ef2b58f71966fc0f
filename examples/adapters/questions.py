"""Questions and the sentences that answer them, as a seeded generator: what the adapter `search` learns from.

A fact is about a subject (a person, an event, an item, an order) and has one of 20 relations. A question names
the subject and the relation, and the sentence that answers it has the value in addition:

    When is the Chess Workshop?     The Chess Workshop takes place on June 3.

The right sentence among many is the one with the same subject and the same relation. Values come from the
generator of the embedded model (`examples/nano/values.py`): subjects of the test split never occur in training.

    python questions.py 64    # print training pairs, a line of JSON each
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))

from values import Values


@dataclass(frozen=True)
class Relation:
    """What a fact says about its subject: wordings of the question, and of the sentence that answers it."""

    questions: tuple[str, ...]
    sentences: tuple[str, ...]


RELATIONS: dict[str, tuple[Relation, ...]] = {
    "name": (
        Relation(
            ("Where does {name} live?", "Which town is the home of {name}?"),
            ("{name} lives in {city}.", "The home of {name} is in {city}."),
        ),
        Relation(
            ("When is the birthday of {name}?", "On which day was {name} born?"),
            ("{name} has a birthday on {date}.", "{name} was born on {date}."),
        ),
        Relation(
            ("What did {name} buy?", "Which thing has {name} bought?"),
            ("{name} bought a {item}.", "A {item} was bought by {name}."),
        ),
        Relation(
            ("When can I call {name}?", "At what time is {name} free for a call?"),
            ("Call {name} at {time}.", "{name} is free for a call at {time}."),
        ),
        Relation(
            ("How much does {name} owe?", "What is the debt of {name}?"),
            ("{name} owes us {amount} dollars.", "The debt of {name} is {amount} dollars."),
        ),
        Relation(
            ("Which order is for {name}?", "What is the order number of {name}?"),
            ("Order {code} is for {name}.", "The order number of {name} is {code}."),
        ),
        Relation(
            ("What is the favorite song of {name}?", "Which song does {name} like?"),
            ("{name} likes the song {song}.", "The favorite song of {name} is {song}."),
        ),
        Relation(
            ("Where does {name} have lunch?", "In which place does {name} eat?"),
            ("{name} has lunch at the {venue}.", "At noon {name} eats in the {venue}."),
        ),
    ),
    "event": (
        Relation(
            ("When is the {event}?", "On which day is the {event}?"),
            ("The {event} takes place on {date}.", "{date} is the day of the {event}."),
        ),
        Relation(
            ("Where is the {event}?", "Which room is the {event} in?"),
            ("The {event} takes place at the {venue}.", "Come to the {venue} for the {event}."),
        ),
        Relation(
            ("At what time does the {event} start?", "When does the {event} begin?"),
            ("The {event} starts at {time}.", "We begin the {event} at {time}."),
        ),
        Relation(
            ("Who leads the {event}?", "Who is the host of the {event}?"),
            ("{name} leads the {event}.", "The host of the {event} is {name}."),
        ),
        Relation(
            ("How many people come to the {event}?", "How many guests has the {event}?"),
            ("{count} people come to the {event}.", "The {event} has {count} guests."),
        ),
    ),
    "item": (
        Relation(
            ("What does the {item} cost?", "How much is the {item}?"),
            ("The {item} costs {amount} dollars.", "We sell the {item} for {amount} dollars."),
        ),
        Relation(
            ("How many of the {item} are left?", "Is the {item} still in stock?"),
            ("There are {count} of the {item} in stock.", "Of the {item}, {count} are left."),
        ),
        Relation(
            ("Where was the {item} made?", "Which town does the {item} come from?"),
            ("The {item} was made in {city}.", "The {item} comes from {city}."),
        ),
    ),
    "code": (
        Relation(
            ("Where does order {code} go?", "To which town do we send order {code}?"),
            ("Order {code} goes to {city}.", "We send order {code} to {city}."),
        ),
        Relation(
            ("What is in order {code}?", "Which thing was ordered in {code}?"),
            ("Order {code} is a {item}.", "There is a {item} in order {code}."),
        ),
        Relation(
            ("When does order {code} arrive?", "On which day do we get order {code}?"),
            ("Order {code} arrives on {date}.", "Expect order {code} on {date}."),
        ),
        Relation(
            ("Who packed order {code}?", "Who has worked on order {code}?"),
            ("{name} packed order {code}.", "Order {code} was packed by {name}."),
        ),
    ),
}
_KINDS = ("name", "name", "event", "item", "code")  # of subjects: two of five are people


def pairs(seed: int, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield lines of `afm-mlx lora --objective contrastive` without end; equal arguments give equal streams.

    Each subject has three facts, which follow each other, and the sentence of each is another one's negative.
    The splits "train" and "valid" have values of training, and "test" the others; no subject comes twice in a
    split.
    """
    rng = random.Random(f"{split}-questions-{seed}")
    values = Values(rng, "test" if split == "test" else "train")
    seen: set[str] = set()
    while True:
        kind = rng.choice(_KINDS)
        subject = values.draw(kind)
        if subject in seen:
            continue
        seen.add(subject)
        facts = []
        for relation in rng.sample(RELATIONS[kind], 3):
            slots = {kind: subject}
            sentence = values.fill(rng.choice(relation.sentences), slots)
            facts.append((rng.choice(relation.questions).format(**slots), sentence))
        for (question, sentence), (_, other) in zip(facts, facts[1:] + facts[:1], strict=True):
            yield {"query": question, "positive": sentence, "negative": [other]}


def main(argv: Sequence[str] | None = None) -> None:
    """Print pairs of a split, a line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("count", nargs="?", type=int, default=5, help="pairs (default: 5)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.add_argument("--split", choices=["train", "valid", "test"], default="train")
    args = parser.parse_args(argv)
    for pair in islice(pairs(args.seed, args.split), args.count):
        print(json.dumps(pair))


if __name__ == "__main__":
    main()
