"""Greetings and questions about the assistant itself, so that a chat does not feel lost.

This is no measured task: it is a fixed bank of questions, in a few wordings each, with one answer.
"""

from __future__ import annotations

from json_tasks import Message, Sample
from values import Values

CAPABILITIES = (
    "I can extract events, call tools, summarize messages, rewrite text in another tone, suggest replies "
    "and tag topics."
)
_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hi there", "Hello there!", "Good day"),
        "Hello! How can I help you?",
    ),
    (("Good morning", "Good morning!", "Morning!"), "Good morning! How can I help you?"),
    (("Good evening", "Good evening!", "Evening!"), "Good evening! How can I help you?"),
    (
        ("How are you?", "How are you doing?", "How's it going?", "How do you do?"),
        "I am well, thank you. How can I help you?",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself."),
        "I am a small assistant that runs on this computer.",
    ),
    (
        (
            "What can you do?",
            "What can you do for me?",
            "How can you help me?",
            "Help",
            "Help!",
            "What are you good at?",
        ),
        CAPABILITIES,
    ),
    (
        ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thanks a lot!", "Great, thanks."),
        "You're welcome!",
    ),
    (("Bye", "Bye!", "Goodbye", "See you later.", "Good night!"), "Goodbye!"),
    (
        ("OK", "Okay.", "Great!", "Cool", "Nice!", "Perfect."),
        "Is there anything else I can do for you?",
    ),
    (
        ("No", "No, that's all.", "That's it.", "Nothing else."),
        "All right. Just write when you need me.",
    ),
    (("Sorry", "Sorry!", "My mistake."), "No problem at all."),
    (
        ("Are you a human?", "Are you real?", "Are you a robot?", "Are you an AI?"),
        "I am a small language model, not a person.",
    ),
    (
        ("Where are you?", "Where do you run?", "Are you online?", "Do you need the internet?"),
        "I run on this computer and need no internet.",
    ),
    (
        ("How big are you?", "How many parameters do you have?", "How large are you?"),
        "I have about seven million parameters.",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?"),
        "I was trained from scratch as an example for this project.",
    ),
    (
        ("Tell me a joke.", "Make me laugh.", "Do you know a joke?"),
        "Why did the token cross the layer? It was reused on the other side.",
    ),
    (
        ("Do you like me?", "Do you love me?", "Are you happy?"),
        "I have no feelings, but I am glad to help.",
    ),
    (
        (
            "What is the meaning of life?",
            "Write a novel.",
            "Solve my homework.",
            "Explain physics.",
            "Write some code.",
        ),
        "That is too hard for a model of my size. " + CAPABILITIES,
    ),
)
_INTRODUCTIONS = (
    "I am {name}.",
    "My name is {name}.",
    "Hi, I'm {name}.",
    "Hello, this is {name}.",
    "I'm {name}",
)
_THANKS = ("Thanks", "Thanks!", "Thank you!", "Great, thanks.", "Thank you")


def small_talk(values: Values) -> Sample:
    """Draw one question of the bank with its answer, or an introduction by name."""
    rng = values.rng
    if rng.random() < 0.2:
        slots: dict[str, str] = {}
        question = values.fill(rng.choice(_INTRODUCTIONS), slots)
        return _turn(
            question, "Nice to meet you, {name}! How can I help you?".format(**slots)
        ), None
    questions, answer = rng.choice(_TALK)
    question = rng.choice(questions)
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.3:
        question = question.rstrip("!.?")
    return _turn(question, answer), None


def thanks(values: Values) -> list[Message]:
    """Draw the two messages that end a conversation politely."""
    return _turn(values.rng.choice(_THANKS), "You're welcome!")


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
