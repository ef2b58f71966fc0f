"""Requests of every kind for the soak test, and whether a response is what its request promised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_WORDS = (
    "Make this formal: hey there can we move the lecture to Sunday order redact list the to-dos triage message "
    "call at noon hall stranger account city account logged in please answer briefly with one word or more"
).split()

EVENT = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "day": {"enum": ["Monday", "Tuesday", "Sunday"]},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
        "outside": {"type": "boolean"},
    },
    "required": ["title", "day", "people", "outside"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "track_order",
        "description": "Find an order",
        "parameters": {
            "type": "object",
            "properties": {"order": {"type": "string", "maxLength": 20}},
            "required": ["order"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Query:
    """A valid request.

    Args:
        kind: name of the kind of request, for tables.
        path, body: URL path and JSON body of the POST.
        choices: number of answers that are requested.
        has_schema: True if each answer has to be an `EVENT`.
    """

    kind: str
    path: str
    body: dict[str, Any]
    choices: int = 1
    has_schema: bool = False

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))


class Traffic:
    """Random requests.

    Args:
        rng: random generator that draws the requests.
        models: ids of the model and of its adapters.
        longest: words of the longest prompt.
        apis: paths of further APIs that the server has.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        models: Sequence[str],
        longest: int = 300,
        apis: Sequence[str] = (),
    ):
        self.rng, self.models, self.longest = rng, list(models), longest
        self._kinds = [self._chat, self._chat, self._schema, self._tools, self._completion]
        known = {"/v1/responses": self._response, "/v1/messages": self._message}
        self._kinds += [known[path] for path in apis]

    def query(self) -> Query:
        """Draw the next valid request."""
        kind = self._kinds[self.rng.integers(len(self._kinds))]
        return kind()

    def text(self) -> str:
        """Draw a text of random words; most texts are short."""
        length = int(np.exp(self.rng.uniform(0, np.log(self.longest))))
        return " ".join(self.rng.choice(_WORDS, length))

    def _common(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": str(self.rng.choice(self.models)),
            "stream": bool(self.rng.random() < 0.6),
        }
        if self.rng.random() < 0.5:
            body |= {"temperature": float(self.rng.uniform(0.1, 1.5)), "top_p": 0.9}
        return body

    def _openai(self) -> dict[str, Any]:
        body = self._common() | {"max_tokens": int(self.rng.integers(1, 120))}
        rare: dict[str, Any] = {
            "seed": int(self.rng.integers(2**31)),
            "stop": ["\n\n", "the end"],
            "frequency_penalty": 0.5,
            "n": int(self.rng.integers(2, 4)),
            "logit_bias": {"300": -5},
        }
        return body | {name: value for name, value in rare.items() if self.rng.random() < 0.15}

    def _chat(self, **fields: Any) -> Query:
        messages = [{"role": "user", "content": self.text()}]
        if self.rng.random() < 0.3:
            messages.insert(0, {"role": "system", "content": "You are brief."})
        body = self._openai() | {"messages": messages} | fields
        if self.rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 3}
        if body["stream"] and self.rng.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
        return Query("chat", "/v1/chat/completions", body, body.get("n", 1))

    def _schema(self) -> Query:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "e", "schema": EVENT, "strict": True},
        }
        # Long enough for every event, so that each has to be whole.
        query = self._chat(response_format=form, max_tokens=200)
        return Query("schema", query.path, query.body | {"stop": None}, query.choices, True)

    def _tools(self) -> Query:
        choice = str(self.rng.choice(["auto", "required", "none"]))
        query = self._chat(tools=[TOOL], tool_choice=choice, max_tokens=150)
        return Query("tools", query.path, query.body, query.choices)

    def _completion(self) -> Query:
        prompts: list[Any] = [self.text()]
        if self.rng.random() < 0.2:
            prompts.append(self.text())
        if self.rng.random() < 0.3:
            prompts = [self.rng.integers(300, 2000, 20).tolist()]
        body = self._openai() | {"prompt": prompts if len(prompts) > 1 else prompts[0]}
        return Query("completion", "/v1/completions", body, len(prompts) * body.get("n", 1))

    def _response(self) -> Query:
        body = self._common() | {"input": self.text(), "max_output_tokens": 60}
        return Query("response", "/v1/responses", body)

    def _message(self) -> Query:
        messages = [{"role": "user", "content": self.text()}]
        body = self._common() | {"messages": messages, "max_tokens": 60}
        if body.get("temperature", 0) > 1:
            body["temperature"] = 1.0
        return Query("message", "/v1/messages", body)


# -- what comes back


@dataclass
class Reading:
    """The response to a query, as far as it has come.

    Args:
        query: the query.
        events: number of events of a stream so far.
        ended: True if the last event of the stream has come.
        texts: text of each choice.
        reasons: finish reason of each choice that has ended.
        error: the error that the stream ended with.
    """

    query: Query
    events: int = 0
    ended: bool = False
    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None

    def event(self, data: str) -> None:
        """Add the data of an event."""
        self.events += 1
        if data == "[DONE]":
            self.ended = True
            return
        found = json.loads(data)
        kind = str(found.get("type", ""))
        if found.get("error") or kind in ("error", "response.failed"):
            self.error, self.ended = str(found.get("error") or found), True
        elif kind in ("response.completed", "response.incomplete", "message_stop"):
            self.reasons[0], self.ended = kind, True
        for choice in found.get("choices", ()):
            self._choice(choice, choice.get("delta") or choice)

    def body(self, data: bytes) -> None:
        """Add the body of a response that is no stream."""
        found = json.loads(data)
        self.ended = True
        for choice in found.get("choices", ()):
            self._choice(choice, choice.get("message") or choice)
        if reason := found.get("stop_reason") or found.get("status"):
            self.reasons[0] = reason

    def _choice(self, choice: dict[str, Any], part: dict[str, Any]) -> None:
        index = choice["index"]
        text = part.get("content") or part.get("text") or ""
        self.texts[index] = self.texts.get(index, "") + text
        if choice.get("finish_reason"):
            self.reasons[index] = choice["finish_reason"]

    def complaint(self) -> str | None:
        """Return what is wrong with a response that has ended; None if nothing is."""
        if not self.ended:
            return "the stream has no last event"
        if self.error is not None:
            return None
        if sorted(self.reasons) != list(range(self.query.choices)):
            return f"{self.query.choices} choices asked for, ended have {sorted(self.reasons)}"
        if self.query.has_schema:
            return next(
                filter(None, map(_event_complaint, self.reasons, self.texts.values())), None
            )
        return None


def _event_complaint(index: int, text: str) -> str | None:
    """Return why the text of choice `index` is not an `EVENT`; None if it is one."""
    try:
        event = json.loads(text)
    except ValueError:
        return f"choice {index} is no JSON: {text[:100]!r}"
    if sorted(event) != sorted(EVENT["properties"]) or event["day"] not in (
        "Monday",
        "Tuesday",
        "Sunday",
    ):
        return f"choice {index} is not of its schema: {text[:100]!r}"
    return None
