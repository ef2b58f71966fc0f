"""Tone rewriting: casual to formal, and formal to friendly, clause by clause.

A clause has a few casual wordings, one formal and one friendly wording, so the answer follows from the
prompt. Formal wordings are the input of the friendly direction.
"""

from __future__ import annotations

from json_tasks import Sample
from text_tasks import pair
from values import Values

# Casual wordings, the formal one, the friendly one.
_GREETINGS = (
    (("hey {name}", "hi {name}", "yo {name}"), "Dear {name}", "Hi {name}"),
    (("hey there", "hiya", "heyo"), "Good day", "Hi there"),
    (("morning {name}", "mornin {name}"), "Good morning {name}", "Morning {name}"),
)
_CLAUSES = (
    (
        ("gonna be late, there at {time}", "running late, be there {time}"),
        "I will be late and arrive at {time}.",
        "I'm a bit late, see you at {time}!",
    ),
    (
        ("can't make it to the {event}", "gotta skip the {event}"),
        "I am unable to attend the {event}.",
        "Sadly I can't come to the {event}!",
    ),
    (
        ("plz send me the {item}", "need the {item} asap"),
        "Please send me the {item} at your earliest convenience.",
        "Could you send me the {item} soon?",
    ),
    (
        ("thx for the {item}", "tysm for the {item}"),
        "Thank you very much for the {item}.",
        "Thanks so much for the {item}!",
    ),
    (
        ("wanna meet at {venue}?", "up for {venue}?"),
        "Would you like to meet at {venue}?",
        "Shall we meet at {venue}?",
    ),
    (
        ("gimme a call at {time}", "call me {time}"),
        "Please call me at {time}.",
        "Give me a ring at {time}!",
    ),
    (
        ("u still owe me {amount} bucks", "where's my {amount} bucks"),
        "I would like to remind you of the {amount} dollars.",
        "Don't forget my {amount} dollars!",
    ),
    (
        ("the {event} was awesome", "loved the {event}"),
        "I enjoyed the {event} very much.",
        "I had a great time at the {event}!",
    ),
    (
        ("no clue about the {event}", "dunno anything about the {event}"),
        "I have no information about the {event}.",
        "I don't know much about the {event}!",
    ),
    (
        ("lemme know by {date}", "tell me by {date} ok"),
        "Please let me know by {date}.",
        "Just let me know by {date}!",
    ),
    (
        ("stuck in {city}, sorry", "still in {city}, my bad"),
        "I apologize, I am still in {city}.",
        "So sorry, I'm still in {city}!",
    ),
    (
        ("pumped for {city}", "{city} is gonna be fun"),
        "I look forward to {city}.",
        "I can't wait for {city}!",
    ),
)
_FORMAL_ASKS = (
    "Make this formal:",
    "Rewrite it in a formal tone:",
    "Make it sound professional:",
    "Turn this into a formal message:",
)
_FRIENDLY_ASKS = (
    "Make this friendly:",
    "Rewrite it in a friendly tone:",
    "Make it sound warm:",
    "Turn this into a friendly message:",
)


def rewrite_tone(values: Values) -> Sample:
    """Draw a casual message -> the formal one, or a formal message -> the friendly one."""
    rng = values.rng
    slots: dict[str, str] = {}
    friendly = rng.random() < 0.4
    chosen = [rng.choice(_GREETINGS), *rng.sample(_CLAUSES, 2 if rng.random() < 0.5 else 1)]
    drafts, answers = [], []
    for i, (casual, formal, warm) in enumerate(chosen):
        # A draft of two clauses may need the same kind of value twice.
        wordings = tuple(_number_slots(text, i) for text in (rng.choice(casual), formal, warm))
        drafts.append(values.fill(wordings[1] if friendly else wordings[0], slots))
        answers.append((wordings[2] if friendly else wordings[1]).format(**slots))
    draft = f"{drafts[0]}, " + (" " if friendly else ", ").join(drafts[1:])
    answer = f"{answers[0]}, " + " ".join(answers[1:])
    ask = rng.choice(_FRIENDLY_ASKS if friendly else _FORMAL_ASKS)
    return pair(f"{ask}\n{draft}", answer)


def _number_slots(text: str, index: int) -> str:
    return text.replace("}", f"{index}}}")
