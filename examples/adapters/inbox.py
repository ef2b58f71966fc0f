"""Three tasks about the same messages, as a seeded generator of chats: what the adapters of afm-nano learn.

A message from a customer is made of clauses, and every task is a view of them:

    redact   the message with names, cities, dates, times, amounts and order numbers replaced by tags
    todo     what is to be done, as a checklist
    triage   how urgent it is, which team gets it, and who wrote

Answers are a function of the prompt, so the measure is exact match. Values that are copied come from the
generator of the embedded model (`examples/nano/values.py`): names of the test split never occur in training.

    python inbox.py            # print one message and what each task makes of it
    python inbox.py todo 64    # print training chats, a line of JSON each
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))

from small_talk import small_talk
from text_tasks import suggest_reply, summarize_thread, tag_topics
from tone_task import rewrite_tone
from values import Values

Message = dict[str, Any]

# An item is no personal data and stays.
TAGS = {
    "name": "[NAME]",
    "city": "[CITY]",
    "date": "[DATE]",
    "time": "[TIME]",
    "amount": "[AMOUNT]",
    "code": "[ORDER]",
}
PRIORITIES = ("urgent", "normal", "low")
# One training chat in five begins with something that the model knew before: an adapter that has seen its task
# alone forgets the others, and answers worse in a conversation.
_SHARE_OF_KNOWN = 0.2


@dataclass(frozen=True)
class Clause:
    """What a customer may want.

    Args:
        wordings: texts to choose from; `{friend}` is the name of somebody else.
        todo: what to do about it, with slots that every wording has.
        priority: one of `PRIORITIES`; None for a wish that leaves the matter as urgent as it was.
        team: who does it; empty without a priority.
    """

    wordings: tuple[str, ...]
    todo: str
    priority: str | None = None
    team: str = ""


_INTRODUCTIONS = (
    "{name} here.",
    "This is {name} from {city}.",
    "Hi, my name is {name}.",
    "Hello, {name} from {city} again.",
    "Good morning, I am {name}.",
)
_PROBLEMS = (
    Clause(
        ("The {item} smells burnt.", "My {item} gets very hot.", "There is smoke from the {item}."),
        "Stop selling the {item}",
        "urgent",
        "safety",
    ),
    Clause(
        ("You charged me {amount} dollars twice.", "I paid {amount} dollars two times."),
        "Refund {amount} dollars",
        "urgent",
        "billing",
    ),
    Clause(
        ("Someone in {city} uses my account.", "A stranger from {city} logged in as me."),
        "Lock the account",
        "urgent",
        "account",
    ),
    Clause(
        ("Order {code} went to {city} by mistake.", "You sent order {code} to {city}, not to me."),
        "Redirect order {code} from {city}",
        "urgent",
        "delivery",
    ),
    Clause(
        (
            "Order {code} has not arrived.",
            "I still wait for order {code}.",
            "Where is order {code}?",
        ),
        "Track order {code}",
        "normal",
        "delivery",
    ),
    Clause(
        ("The {item} in order {code} is broken.", "Order {code} came with a broken {item}."),
        "Replace the {item} of order {code}",
        "normal",
        "returns",
    ),
    Clause(
        ("I never ordered the {item}.", "The {item} in my parcel is not mine."),
        "Collect the {item}",
        "normal",
        "returns",
    ),
    Clause(
        ("The bill of {amount} dollars is wrong.", "I was promised less than {amount} dollars."),
        "Check the bill of {amount} dollars",
        "normal",
        "billing",
    ),
    Clause(
        ("I can't log in since {date}.", "My password has not worked since {date}."),
        "Reset the password",
        "normal",
        "account",
    ),
    Clause(
        (
            "Do you have the {item} in stock?",
            "Can I still buy the {item}?",
            "Is the {item} sold out?",
        ),
        "Check the stock of the {item}",
        "low",
        "sales",
    ),
    Clause(
        ("What does the {item} cost?", "How much is the {item}?"),
        "Quote the price of the {item}",
        "low",
        "sales",
    ),
    Clause(
        ("I moved to {city}.", "I live in {city} now.", "My new address is in {city}."),
        "Change the address to {city}",
        "low",
        "account",
    ),
    Clause(
        ("I need a receipt for order {code}.", "Order {code} came without a receipt."),
        "Send the receipt of order {code}",
        "low",
        "billing",
    ),
    Clause(
        ("I love my new {item}.", "The {item} is wonderful.", "Thanks for the great {item}."),
        "Say thanks for the praise",
        "low",
        "sales",
    ),
)
_WISHES = (
    Clause(
        (
            "Please call me at {time}.",
            "Can you call me at {time}?",
            "I am free for a call at {time}.",
        ),
        "Call at {time}",
    ),
    Clause(
        ("I need an answer by {date}.", "Let me know before {date}.", "Please reply by {date}."),
        "Answer by {date}",
    ),
    Clause(
        ("I will visit your shop in {city} on {date}.", "On {date} I am at your shop in {city}."),
        "Expect a visit in {city} on {date}",
    ),
    Clause(
        ("Please send a copy to {friend}.", "My colleague {friend} needs to know, too."),
        "Write to {friend}",
    ),
)


@dataclass(frozen=True)
class Inquiry:
    """A message of the inbox: its sentences as templates, and the values of their slots."""

    sentences: tuple[str, ...]
    clauses: tuple[Clause, ...]
    todos: tuple[str, ...]
    slots: dict[str, str]

    @property
    def text(self) -> str:
        return " ".join(self.sentences).format(**self.slots)


def draw_inquiry(values: Values) -> Inquiry:
    """Draw a message: an introduction, one or two different problems, in three of five also a wish."""
    rng = values.rng
    clauses = rng.sample(_PROBLEMS, rng.choice((1, 2, 2)))
    if rng.random() < 0.6:
        clauses.append(rng.choice(_WISHES))
    slots: dict[str, str] = {}
    sentences = [rng.choice(_INTRODUCTIONS)]
    todos = []
    for i, clause in enumerate(clauses, 1):
        sentences.append(_own_slots(rng.choice(clause.wordings), i))
        todos.append(_own_slots(clause.todo, i))
    values.fill(" ".join(sentences), slots)
    return Inquiry(tuple(sentences), tuple(clauses), tuple(todos), slots)


def _own_slots(template: str, index: int) -> str:
    """Number a clause's slots, for two clauses may need two cities, and `{name}` is the customer."""
    return template.replace("{friend}", "{name}").replace("}", f"{index}}}")


def redact(inquiry: Inquiry) -> str:
    """Return the message with tags in the place of values."""
    kinds = {slot: slot.rstrip("0123456789") for slot in inquiry.slots}
    tagged = {slot: TAGS.get(kinds[slot], value) for slot, value in inquiry.slots.items()}
    return " ".join(inquiry.sentences).format(**tagged)


def todo(inquiry: Inquiry) -> str:
    """Return a line for everything that the customer wants, in the message's order."""
    return "\n".join(f"- [ ] {line.format(**inquiry.slots)}" for line in inquiry.todos)


def triage(inquiry: Inquiry) -> str:
    """Return priority, team and customer; of two problems the more urgent one counts, or the first."""
    problems = [clause for clause in inquiry.clauses if clause.priority is not None]
    first = min(problems, key=lambda clause: PRIORITIES.index(clause.priority or ""))
    return f"Priority: {first.priority}\nTeam: {first.team}\nCustomer: {inquiry.slots['name']}"


# The instruction in front of the message, and the answer.
TASKS: dict[str, tuple[str, Callable[[Inquiry], str]]] = {
    "redact": ("Redact this message:", redact),
    "todo": ("List the to-dos:", todo),
    "triage": ("Triage this message:", triage),
}


def turn(task: str, inquiry: Inquiry) -> list[Message]:
    """Return a task's question about the message, and its answer."""
    ask, answer = TASKS[task]
    return [
        {"role": "user", "content": f"{ask}\n{inquiry.text}"},
        {"role": "assistant", "content": answer(inquiry)},
    ]


def training_chats(task: str, seed: int, split: str = "train") -> Iterator[list[Message]]:
    """Yield chats without end, and without values of the test split; equal arguments give equal streams.

    One chat in five begins with a turn of what the model knew before, and one in five with another message of
    the same task. The splits "train" and "valid" are streams of their own.
    """
    values = Values(random.Random(f"{split}-{task}-{seed}"), "train")
    known = (small_talk, rewrite_tone, suggest_reply, summarize_thread, tag_topics)
    while True:
        messages: list[Message] = []
        beginning = values.rng.random()
        if beginning < _SHARE_OF_KNOWN:
            messages += values.rng.choice(known)(values)[0]
        elif beginning < 2 * _SHARE_OF_KNOWN:
            messages += turn(task, draw_inquiry(values))
        yield messages + turn(task, draw_inquiry(values))


def test_examples(task: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return `count` different held-out chats for `afm-mlx evaluate`: `{"task", "messages", "answer"}`."""
    values = Values(random.Random(f"held-out-{task}-{seed}"), "test")
    examples: dict[str, dict[str, Any]] = {}
    while len(examples) < count:
        question, answer = turn(task, draw_inquiry(values))
        example = {"task": task, "messages": [question], "answer": answer["content"]}
        examples[json.dumps(question)] = example
    return list(examples.values())


def switching_examples(seed: int, count: int) -> list[list[dict[str, Any]]]:
    """Return `count` held-out messages, each with all tasks in a chat: for every task, the chat so far.

    Tasks are in random order; what stands before a question are right answers.
    """
    values = Values(random.Random(f"held-out-switching-{seed}"), "test")
    chats = []
    for _ in range(count):
        inquiry, messages, chat = draw_inquiry(values), [], []
        for task in values.rng.sample(list(TASKS), len(TASKS)):
            question, answer = turn(task, inquiry)
            messages = [*messages, question]
            chat.append({"task": task, "messages": messages, "answer": answer["content"]})
            messages = [*messages, answer]
        chats.append(chat)
    return chats


def main(argv: Sequence[str] | None = None) -> None:
    """Print training chats of a task, a line of JSON each; without a task, a message and all made of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", nargs="?", choices=list(TASKS))
    parser.add_argument("count", nargs="?", type=int, default=100, help="chats (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    args = parser.parse_args(argv)
    if args.task is not None:
        for messages in islice(training_chats(args.task, args.seed), args.count):
            print(json.dumps({"messages": messages}))
        return
    shown = draw_inquiry(Values(random.Random(), "train"))
    print(shown.text)
    for name, (_, view) in TASKS.items():
        print(f"\n{name}:\n{view(shown)}")


if __name__ == "__main__":
    main()
