"""Tasks with plain text answers: summaries, smart replies and topic tags; `tone_task.py` has the fourth.

Each function draws one sample, in the form that `json_tasks.py` describes. An answer follows from the
prompt alone: every wording of a prompt belongs to exactly one answer template.
"""

from __future__ import annotations

from json_tasks import Sample
from values import Values

# Threads: for each line the wordings to choose from, then the one summary.
_THREADS: tuple[tuple[tuple[tuple[str, ...], ...], str], ...] = (
    (
        (
            (
                "{name}: Can we move the {event}?",
                "{name}: I can't make the {event}, can we shift it?",
            ),
            ("{name2}: Sure, how about {time}?", "{name2}: No problem. Is {time} fine?"),
            ("{name}: Perfect, thanks.", "{name}: Great, see you then.", "{name}: Works for me."),
        ),
        "{name} and {name2} moved the {event} to {time}.",
    ),
    (
        (
            ("{name}: Who brings the {item}?", "{name}: We still need the {item} for Sunday."),
            (
                "{name2}: I have one at home.",
                "{name2}: I can bring it.",
                "{name2}: Leave it to me.",
            ),
            ("{name}: Lovely, thank you!", "{name}: You are the best."),
        ),
        "{name2} will bring the {item} for {name}.",
    ),
    (
        (
            ("{name}: My train is late again.", "{name}: Stuck in traffic, sorry!"),
            ("{name2}: When will you be here?", "{name2}: How long do you need?"),
            ("{name}: I should be there at {time}.", "{name}: Around {time}, I hope."),
        ),
        "{name} is late and will reach {name2} at {time}.",
    ),
    (
        (
            (
                "{name}: Where do we eat tonight?",
                "{name}: Any idea for dinner?",
                "{name}: I am hungry!",
            ),
            ("{name2}: Let's try {venue}.", "{name2}: {venue} has good food.", "{name2}: {venue}?"),
            (
                "{name}: Yes! {time}?",
                "{name}: Good idea, at {time}.",
                "{name}: OK, I'll be there at {time}.",
            ),
        ),
        "{name} and {name2} will eat at {venue} at {time}.",
    ),
    (
        (
            ("{name}: The {item} is broken.", "{name}: Bad news, my {item} stopped working."),
            ("{name2}: Did you call the store?", "{name2}: Is it under warranty?"),
            ("{name}: Yes, a new one comes on {date}.", "{name}: They replace it on {date}."),
        ),
        "{name} gets a new {item} on {date}.",
    ),
    (
        (
            ("{name}: I got the job in {city}!", "{name}: They hired me in {city}!"),
            ("{name2}: Wow, congratulations!", "{name2}: Amazing! When do you start?"),
            ("{name}: I start on {date}.", "{name}: First day is {date}."),
        ),
        "{name} starts a new job in {city} on {date}.",
    ),
    (
        (
            ("{name}: Are you free on {date}?", "{name}: What are you doing on {date}?"),
            ("{name2}: I think so, why?", "{name2}: Nothing yet. What's up?"),
            ("{name}: I have tickets for {city}.", "{name}: Let's take a trip to {city}."),
            ("{name2}: I'm in!", "{name2}: Count me in."),
        ),
        "{name} and {name2} will go to {city} on {date}.",
    ),
    (
        (
            ("{name}: Did you finish the {event} slides?", "{name}: How are the {event} slides?"),
            ("{name2}: Not yet, I need help.", "{name2}: Half done. Could you help?"),
            ("{name}: Sure, come to {venue}.", "{name}: Of course. Meet me at {venue}."),
        ),
        "{name} will help {name2} with the {event} slides at {venue}.",
    ),
    (
        (
            (
                "{name}: Can you lend me {amount} dollars?",
                "{name}: I am short of {amount} dollars.",
            ),
            ("{name2}: Sure. When do I get it back?", "{name2}: OK, until when?"),
            ("{name}: On {date}, promise.", "{name}: You get it back on {date}."),
        ),
        "{name} will pay {name2} back {amount} dollars on {date}.",
    ),
    (
        (
            ("{name}: Is the {event} still on?", "{name}: Are we still doing the {event}?"),
            ("{name2}: No, {name3} is sick.", "{name2}: {name3} has to travel, so no."),
            ("{name}: What a pity.", "{name}: Oh no. Next time then."),
        ),
        "The {event} is cancelled because of {name3}.",
    ),
)
_SUMMARY_ASKS = (
    "Summarize this thread in one line.",
    "Sum up the chat in one sentence.",
    "What is this conversation about?",
    "Give me a one-line summary.",
    "Summarize the messages.",
)


def summarize_thread(values: Values) -> Sample:
    """Draw a message thread of three or four lines -> one line that says what came of it."""
    rng = values.rng
    lines, summary = rng.choice(_THREADS)
    slots: dict[str, str] = {}
    text = "\n".join(values.fill(rng.choice(wordings), slots) for wordings in lines)
    content = f"{rng.choice(_SUMMARY_ASKS)}\n{text}"
    return pair(content, summary.format(**slots))


# Messages: the wordings, then the reply to accept, to decline and to ask back.
_REPLIES = (
    (
        (
            "Shall we meet at {venue} at {time}?",
            "How about {venue}, {time}?",
            "See you at {venue}, {time}?",
        ),
        "Yes, see you at {venue} at {time}.",
        "Sorry, I can't come to {venue} at {time}.",
        "Can we make it later than {time}?",
    ),
    (
        (
            "Will you come to the {event}?",
            "Are you joining the {event}?",
            "The {event} starts soon, coming?",
        ),
        "Yes, I will be at the {event}.",
        "Sorry, I have to miss the {event}.",
        "When does the {event} start?",
    ),
    (
        ("Can you pick up {name} at {time}?", "{name} needs a ride at {time}. Can you drive?"),
        "Sure, I will pick up {name} at {time}.",
        "Sorry, I can't drive {name} today.",
        "Where is {name} at {time}?",
    ),
    (
        ("Do you want my old {item}?", "I am giving away the {item}. Want it?"),
        "Yes, I would love the {item}.",
        "No thanks, I don't need the {item}.",
        "How old is the {item}?",
    ),
    (
        ("Could you lend me {amount} dollars?", "Can I borrow {amount} dollars from you?"),
        "Sure, I can lend you {amount} dollars.",
        "Sorry, I don't have {amount} dollars.",
        "What do you need {amount} dollars for?",
    ),
    (
        (
            "Can you review the {event} notes by {date}?",
            "Please check the {event} notes before {date}.",
        ),
        "Sure, I will check the {event} notes by {date}.",
        "Sorry, I have no time before {date}.",
        "Where are the {event} notes?",
    ),
    (
        ("Want to visit {city} with {name}?", "{name} is going to {city}. Come along?"),
        "Yes, I would love to see {city} with {name}.",
        "Sorry, I can't go to {city}.",
        "How long will {name} stay in {city}?",
    ),
    (
        ("Did you get the {item} from {name}?", "Has {name} sent you the {item}?"),
        "Yes, {name} sent me the {item}.",
        "No, {name} still has the {item}.",
        "Which {item} does {name} have?",
    ),
)
STANCES = (
    ("Accept.", "Say yes.", "Positive reply."),
    ("Decline.", "Say no.", "Negative reply."),
    ("Ask back.", "Ask a question.", "Reply with a question."),
)
_REPLY_ASKS = (
    "Suggest a reply to:",
    "Write a short reply:",
    "Reply to this:",
    "Answer this message:",
)


def suggest_reply(values: Values) -> Sample:
    """Draw a message and a stance (accept, decline, ask back) -> a short reply."""
    rng = values.rng
    wordings, *answers = rng.choice(_REPLIES)
    stance = rng.randrange(3)
    slots: dict[str, str] = {}
    message = values.fill(rng.choice(wordings), slots)
    content = f"{rng.choice(_REPLY_ASKS)} {message}\n{rng.choice(STANCES[stance])}"
    return pair(content, answers[stance].format(**slots))


_TOPICS = {
    "travel": (
        "We fly to {city} on {date}.",
        "My hotel in {city} was lovely.",
        "I packed my suitcase for {city}.",
        "The train to {city} leaves at {time}.",
    ),
    "food": (
        "{name} cooked a great soup.",
        "The pizza at {venue} is the best.",
        "{name} baked bread for breakfast.",
        "We had pasta and salad at {venue}.",
    ),
    "work": (
        "My boss {name} wants the report by {date}.",
        "The office moved to {city}.",
        "{name} got promoted to manager.",
        "Our deadline is {date}.",
    ),
    "sports": (
        "{name} scored twice in the match.",
        "The team from {city} won the cup.",
        "{name} ran the marathon in {city}.",
        "We play tennis at {time}.",
    ),
    "health": (
        "The doctor sees {name} at {time}.",
        "{name} has a fever and a cough.",
        "The clinic in {city} called about my blood test.",
        "{name} needs new medicine by {date}.",
    ),
    "music": (
        "{name} plays the piano.",
        "The concert in {city} starts at {time}.",
        "The new album by {name} is out.",
        "{name} sings in a choir.",
    ),
    "money": (
        "The bank charged me {amount} dollars.",
        "{name} pays the rent on {date}.",
        "I saved {amount} dollars this month.",
        "Taxes are due on {date}.",
    ),
    "weather": (
        "It rained all day in {city}.",
        "A storm hits {city} at {time}.",
        "Snow is expected in {city} on {date}.",
        "It is hot and sunny in {city}.",
    ),
    "family": (
        "My sister {name} had a baby.",
        "Grandma {name} turns {amount} on {date}.",
        "My brother lives in {city} with his wife.",
        "Uncle {name} visits us on {date}.",
    ),
    "school": (
        "{name} passed the exam.",
        "The teacher gave us homework until {date}.",
        "The university in {city} accepted {name}.",
        "{name} studies for the math test.",
    ),
    "shopping": (
        "I bought a {item} on sale.",
        "The {item} is out of stock.",
        "{name} wants to return the {item}.",
        "The shop in {city} sells the {item}.",
    ),
    "pets": (
        "Our dog ran away from {name}.",
        "{name} adopted a kitten.",
        "The vet in {city} checked our cat.",
        "The puppy of {name} barks all night.",
    ),
}
_TAG_ASKS = (
    "Tag the topics:",
    "List the topics of this text:",
    "Which topics is this about?",
    "Give topic tags for:",
    "Topics?",
)


def tag_topics(values: Values) -> Sample:
    """Draw one to three sentences -> their topics in order, separated by commas."""
    rng = values.rng
    topics = rng.sample(sorted(_TOPICS), rng.choice((1, 2, 2, 3)))
    # Sentences share no values: a fresh set of slots for each.
    text = " ".join(values.fill(rng.choice(_TOPICS[topic]), {}) for topic in topics)
    return pair(f"{rng.choice(_TAG_ASKS)} {text}", ", ".join(topics))


def pair(content: str, answer: str) -> Sample:
    """Return a sample of one question and its answer, without tools."""
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}], None
