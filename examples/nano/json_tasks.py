"""Tasks with JSON in them: event extraction, tool calls, and answers from a tool's result.

Each function draws one sample: `(messages, tools)`, where the last message is the assistant's answer and
`tools` is None or the list of tool definitions for the system message.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from values import DAYS, Values

Message = dict[str, Any]
Sample = tuple[list[Message], list[dict[str, Any]] | None]

_EVENT_SLOTS = {"title": "event", "person": "name", "day": "day", "time": "time", "place": "venue"}
# A clause for each field, so that any subset of the fields makes a sentence.
_EVENT_OPENINGS = (
    ("{person} has invited you to the {title}", ("title", "person")),
    ("{person} is hosting the {title}", ("title", "person")),
    ("The {title} with {person} is set", ("title", "person")),
    ("Reminder from {person}: {title}", ("title", "person")),
    ("Don't forget the {title}", ("title",)),
    ("The {title} takes place", ("title",)),
    ("Please join us for the {title}", ("title",)),
    ("Invitation: {title}", ("title",)),
    ("We are planning the {title}", ("title",)),
)
_EVENT_CLAUSES = {
    "day": (" on {day}", " this {day}", ", {day}"),
    "time": (" at {time}", " from {time}", ", {time}"),
    "place": (" in {place}", " at {place}", ", {place}"),
}
_EVENT_ASKS = (
    "Extract the event.",
    "Extract the event as JSON.",
    "Get the event details.",
    "What event is this?",
    "Pull out the event.",
    "Fill in the event.",
)
_FIELD_ASKS = (
    "Extract {fields} as JSON.",
    "Extract these fields as JSON: {fields}.",
    "Give me JSON with {fields}.",
    "Find {fields}. Answer in JSON.",
)


def extract_event(values: Values) -> Sample:
    """Draw a sentence about an event -> a JSON object with the fields that the schema asks for."""
    rng = values.rng
    opening, named = rng.choice(_EVENT_OPENINGS)
    day = rng.choice(DAYS) if rng.random() < 0.5 else values.draw("date")
    slots = {
        "day": day,
        **{f: values.draw(_EVENT_SLOTS[f]) for f in ("title", "person", "time", "place")},
    }
    spoken = [field for field in ("day", "time", "place") if rng.random() < 0.8] or ["time"]
    rng.shuffle(spoken)
    text = opening + "".join(rng.choice(_EVENT_CLAUSES[field]) for field in spoken) + "."
    text = text.format(**slots)

    wanted = [field for field in _EVENT_SLOTS if field in named or field in spoken]
    if len(wanted) > 2 and rng.random() < 0.4:
        wanted.remove(rng.choice(wanted))
    user = {"role": "user"}
    if rng.random() < 0.8:
        ask = rng.choice(_EVENT_ASKS)
        user["content"] = f"{ask}\n{text}" if rng.random() < 0.8 else f"{text}\n{ask}"
        user["response_format"] = _event_format(wanted)
    else:
        # Without a schema the request names the fields.
        user["content"] = f"{rng.choice(_FIELD_ASKS).format(fields=', '.join(wanted))}\n{text}"
    answer = json.dumps({field: slots[field] for field in wanted})
    return [user, {"role": "assistant", "content": answer}], None


def _event_format(fields: list[str]) -> dict[str, Any]:
    """Return the `response_format` of an event with these fields, in OpenAI's form."""
    schema = {
        "type": "object",
        "properties": {field: {"type": "string"} for field in fields},
        "required": fields,
    }
    json_schema = {"name": "Event", "description": "An event", "schema": schema}
    return {"type": "json_schema", "json_schema": json_schema}


@dataclass(frozen=True)
class Tool:
    """One tool of the bank: what it takes, how people ask for it, what it returns and what to say then.

    `parameters` and `result` map a field to a kind of value (see `values.py`), or to the text of a closed
    choice, `a|b|c`. Asks mention every parameter; answers use parameters and results.
    """

    name: str
    description: str
    parameters: dict[str, str]
    asks: tuple[str, ...]
    result: dict[str, str]
    answer: str

    def definition(self) -> dict[str, Any]:
        """Return the definition as the chat template takes it, in OpenAI's form."""
        properties = {
            field: {"type": "integer" if kind in _NUMBERS else "string"}
            for field, kind in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


_NUMBERS = ("count", "amount")  # kinds of values that are integers in JSON
_SKIES = "sunny|cloudy|rainy|windy|foggy|snowy"
TOOLS = (
    Tool(
        "get_weather",
        "Weather of a city",
        {"city": "city"},
        (
            "What's the weather like in {city}?",
            "How is the weather in {city} today?",
            "Do I need an umbrella in {city}?",
            "Is it cold in {city} right now?",
            "{city} weather, please.",
        ),
        {"sky": _SKIES, "degrees": "count"},
        "It is {sky} in {city}, with {degrees} degrees.",
    ),
    Tool(
        "set_alarm",
        "Set an alarm",
        {"time": "time"},
        (
            "Wake me up at {time}.",
            "Set an alarm for {time}.",
            "I need to get up at {time}.",
            "Can you wake me at {time} tomorrow?",
            "Alarm at {time}, please.",
        ),
        {"rings_in_minutes": "amount"},
        "Your alarm for {time} is set. It rings in {rings_in_minutes} minutes.",
    ),
    Tool(
        "set_timer",
        "Start a timer",
        {"minutes": "amount"},
        (
            "Start a timer for {minutes} minutes.",
            "Set a {minutes} minute timer.",
            "Count down {minutes} minutes for me.",
            "Remind me in {minutes} minutes.",
            "Time {minutes} minutes, please.",
        ),
        {"ends_at": "time"},
        "The timer runs for {minutes} minutes and ends at {ends_at}.",
    ),
    Tool(
        "send_message",
        "Message a contact",
        {"to": "name", "about": "event"},
        (
            "Text {to} about the {about}.",
            "Send {to} a message about the {about}.",
            "Can you write to {to} about the {about}?",
            "Let {to} know about the {about}.",
            "Tell {to} about the {about}.",
        ),
        {"status": "sent|delivered|read|queued"},
        "Your message to {to} about the {about} was {status}.",
    ),
    Tool(
        "find_flight",
        "Find a flight",
        {"origin": "city", "destination": "city"},
        (
            "Find a flight from {origin} to {destination}.",
            "I want to fly from {origin} to {destination}.",
            "Is there a plane from {origin} to {destination}?",
            "Look up flights to {destination} from {origin}.",
            "How can I fly to {destination} from {origin}?",
        ),
        {"flight": "code", "departs": "time"},
        "Flight {flight} from {origin} to {destination} departs at {departs}.",
    ),
    Tool(
        "track_order",
        "Find an order",
        {"order": "code"},
        (
            "Where is my order {order}?",
            "Track order {order}.",
            "Has order {order} shipped yet?",
            "When will {order} arrive?",
            "What is the status of order {order}?",
        ),
        {"city": "city", "arrives": "date"},
        "Order {order} is in {city} and arrives on {arrives}.",
    ),
    Tool(
        "book_table",
        "Reserve a table",
        {"place": "venue", "time": "time", "guests": "count"},
        (
            "Book a table at {place} at {time} for {guests}.",
            "Reserve {place} for {guests} people at {time}.",
            "Get us a table for {guests} at {place}, {time}.",
            "We are {guests} people, book {place} at {time}.",
            "Table for {guests} at {time} at {place}, please.",
        ),
        {"code": "code"},
        "Your table for {guests} at {place} is booked for {time}. The code is {code}.",
    ),
    Tool(
        "play_music",
        "Play a song",
        {"song": "song"},
        (
            "Play {song}.",
            "Put on {song}, please.",
            "I want to hear {song}.",
            "Can you play the song {song}?",
            "Start {song} for me.",
        ),
        {"artist": "name"},
        "Now playing {song} by {artist}.",
    ),
    Tool(
        "call_contact",
        "Call a contact",
        {"name": "name"},
        (
            "Call {name}.",
            "Ring {name} for me.",
            "I want to speak to {name}.",
            "Give {name} a call.",
            "Phone {name}, please.",
        ),
        {"state": "busy|away|ringing|offline"},
        "{name} is {state}.",
    ),
    Tool(
        "check_price",
        "Price of an item",
        {"item": "item"},
        (
            "How much is the {item}?",
            "What does the {item} cost?",
            "Check the price of the {item}.",
            "Is the {item} expensive?",
            "Price of the {item}, please.",
        ),
        {"dollars": "amount", "store": "venue"},
        "The {item} costs {dollars} dollars at {store}.",
    ),
    Tool(
        "add_event",
        "Add to the calendar",
        {"title": "event", "date": "date", "time": "time"},
        (
            "Add the {title} on {date} at {time}.",
            "Put the {title} in my calendar for {date} at {time}.",
            "Schedule the {title} for {date}, {time}.",
            "I have the {title} on {date} at {time}, save it.",
            "New event: {title}, {date}, {time}.",
        ),
        {"conflict": "event"},
        "The {title} is saved for {date} at {time}. It overlaps with the {conflict}.",
    ),
    Tool(
        "send_money",
        "Pay a contact",
        {"to": "name", "dollars": "amount"},
        (
            "Send {dollars} dollars to {to}.",
            "Pay {to} {dollars} dollars.",
            "Transfer {dollars} dollars to {to}.",
            "I owe {to} {dollars} dollars, pay it.",
            "Give {to} {dollars} dollars.",
        ),
        {"balance": "amount"},
        "I sent {dollars} dollars to {to}. Your balance is {balance} dollars.",
    ),
)

# Tools made up from a verb and an object, so that the model reads definitions instead of learning a list.
_VERBS = (
    "open close find order cancel rent repair print share delete start stop check sell lock copy clean "
    "move test archive inspect save label scan ship"
).split()
_OBJECTS = {
    "door": "code",
    "ticket": "code",
    "room": "venue",
    "invoice": "code",
    "package": "code",
    "product": "item",
    "account": "name",
    "folder": "event",
    "office": "city",
    "machine": "code",
    "playlist": "song",
    "report": "event",
    "profile": "name",
    "locker": "amount",
    "seat": "count",
    "parcel": "code",
}
_MADE_UP_ASKS = (
    "{Verb} the {noun} {value}.",
    "Please {verb} the {noun} {value}.",
    "Can you {verb} the {noun} {value}?",
    "I want to {verb} the {noun} {value}.",
    "{Verb} {noun} {value} for me.",
    "Could you {verb} {noun} {value} now?",
)
_STATES = "done|pending|blocked|ready|failed"


def _make_up_tool(rng: random.Random) -> Tool:
    verb, noun = rng.choice(_VERBS), rng.choice(sorted(_OBJECTS))
    words = {"verb": verb, "Verb": verb.capitalize(), "noun": noun, "value": f"{{{noun}}}"}
    return Tool(
        name=f"{verb}_{noun}",
        description=f"{verb.capitalize()} a {noun}",
        parameters={noun: _OBJECTS[noun]},
        asks=tuple(ask.format(**words) for ask in _MADE_UP_ASKS),
        result={"state": _STATES},
        answer=f"The request to {verb} the {noun} {{{noun}}} is {{state}}.",
    )


def _offer_tools(rng: random.Random, count: int) -> list[Tool]:
    """Draw tools with different names, some of them made up."""
    offered: dict[str, Tool] = {}
    while len(offered) < count:
        tool = _make_up_tool(rng) if rng.random() < 0.35 else rng.choice(TOOLS)
        offered[tool.name] = tool
    return list(offered.values())


def _draw_fields(values: Values, kinds: dict[str, str], drawn: dict[str, str]) -> dict[str, Any]:
    """Draw a value for each field; `drawn` collects the texts, numbers come back as integers."""
    fields: dict[str, Any] = {}
    for field, kind in kinds.items():
        if "|" in kind:
            drawn[field] = values.rng.choice(kind.split("|"))
        else:
            drawn[field] = values.draw(kind, tuple(drawn.values()))
        fields[field] = int(drawn[field]) if kind in _NUMBERS else drawn[field]
    return fields


def _ask_and_call(values: Values, tool: Tool, drawn: dict[str, str]) -> list[Message]:
    """Return the user's request and the assistant's call of `tool`; `drawn` gets the values' texts."""
    arguments = _draw_fields(values, tool.parameters, drawn)
    ask = values.rng.choice(tool.asks).format(**drawn)
    call = {"type": "function", "function": {"name": tool.name, "arguments": json.dumps(arguments)}}
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]


def call_tool(values: Values) -> Sample:
    """Draw two or three tools and a request -> the call of the tool that fits, with its arguments."""
    offered = _offer_tools(values.rng, 3 if values.rng.random() < 0.3 else 2)
    tool = values.rng.choice(offered)
    return _ask_and_call(values, tool, {}), [each.definition() for each in offered]


def answer_from_tool(values: Values) -> Sample:
    """Draw a request, the call and the tool's result -> a sentence for the user."""
    (tool,) = _offer_tools(values.rng, 1)
    drawn: dict[str, str] = {}
    messages = _ask_and_call(values, tool, drawn)
    result = _draw_fields(values, tool.result, drawn)
    messages.append({"role": "tool", "content": json.dumps(result)})
    messages.append({"role": "assistant", "content": tool.answer.format(**drawn)})
    return messages, [tool.definition()]
