"""Drawn requests that mlx-lm's server and ours are both sent, and what a right answer to each is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Body = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"]}}},
    {"type": "function", "function": {"name": "stop", "description": "Stops", "parameters": {
        "type": "object", "properties": {}}}},
]  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """An answer that a model is made to give."""

    thought: str = ""
    text: str = ""
    calls: Sequence[tuple[str, Body]] = ()


PORTO = ("weather", {"city": "Porto", "days": 3})
REPLIES = (
    Reply("", "Fine."),
    Reply("", "It is Ü, 日本 \N{SLIGHTLY SMILING FACE} and <b>{1}</b>."),
    Reply("Hm. I <wonder>.", "Fine. Stop, then go on."),
    Reply("Two\n\nparagraphs é.", "Line one.\n\n  Line two.\n"),
    Reply("", "", [PORTO]),
    Reply("I need it.", "", [PORTO]),
    Reply("Both.", "", [PORTO, ("stop", {})]),
    Reply("", "Let me look.", [("weather", {"city": 'São "Tomé" {1}'})]),
    Reply("", "A < b, </ c and [x"),
    Reply("Only a thought.", ""),
)


def written(family: str, reply: Reply) -> str | None:
    """Write a reply as the family's models do, with names of control tokens; None if they have no such form."""
    thought, text = reply.thought, reply.text
    arguments = [(name, json.dumps(given, ensure_ascii=False)) for name, given in reply.calls]
    if family == "qwen3":
        calls = [
            f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in arguments
        ]
        begin = f"<think>\n{thought}\n</think>\n\n" if thought else ""
        return begin + "\n".join([*([text] if text else []), *calls])
    if family == "harmony":
        if len(arguments) > 1 or (text and arguments):
            return None
        parts = [f"<|channel|>analysis<|message|>{thought}"] if thought else []
        parts += [f"<|channel|>final<|message|>{text}"] if text else []
        parts += [
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{a}<|call|>"
            for n, a in arguments
        ]
        return "<|end|><|start|>assistant".join(parts)
    if thought or len(arguments) > 1 or (text and arguments) or (arguments and family != "llama3"):
        return None
    return "".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in arguments) or text


WORDS = (
    *(
        "weather",
        "Porto",
        "how",
        "is",
        "the",
        "sea",
        "é",
        "日本",
        "it's",
        "1,234",
        "{x}",
        "\n",
        "- a",
        "\t",
        "so?",
    ),
    *("\N{SLIGHTLY SMILING FACE}", "e\N{COMBINING ACUTE ACCENT}", "<b>", "ﬁne"),
)


@dataclass
class Case:
    """A request, and what is known of a right answer.

    Args:
        path, body: of the request.
        kind: what is drawn, for reports.
        reply: the answer that the model is made to give; pass None for its own.
        shown: the messages that the template has to write, if they are not the body's.
        adapter: True if the adapter answers.
        status: the status of a right answer.
        param: the field that a right error names.
    """

    path: str
    body: Body
    kind: str
    reply: Reply | None = None
    shown: list[Body] | None = None
    adapter: bool = False
    status: int = 200
    param: str | None = None


class Draw:
    """Draws requests for a model of a family.

    Args:
        rng: the generator.
        family: of `zoo_chats`.
    """

    def __init__(self, rng: np.random.Generator, family: str) -> None:
        self.rng, self.family = rng, family

    def cases(self, count: int) -> Iterator[Case]:
        """Yield `count` requests: all wrong ones, and of the others some of each kind."""
        wrong = list(self.wrong())
        yield from wrong
        kinds: list[Callable[[], Case]] = [
            self.free_chat, self.completion, self.scripted, self.free_chat, self.scripted, self.history,
            self.free_chat, self.completion, self.scripted, self.odd_messages, self.with_adapter,
        ]  # fmt: skip
        for number in range(count - len(wrong)):
            yield kinds[number % len(kinds)]()

    # -- parts

    def one_of(self, *values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def text(self) -> str:
        words = self.rng.choice(len(WORDS), self.rng.integers(1, 9))
        return " ".join(WORDS[i] for i in words)

    def messages(self) -> list[Body]:
        made = [{"role": "system", "content": self.text()}] if self.rng.random() < 0.3 else []
        for _ in range(self.rng.integers(0, 3)):
            made += [
                {"role": "user", "content": self.text()},
                {"role": "assistant", "content": self.text()},
            ]
        return [*made, {"role": "user", "content": self.text()}]

    def body(self, **fields: Any) -> Body:
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return {
            "model": "default_model", "max_tokens": int(self.rng.integers(1, 25)), "temperature": 0.0,
            **(stream if self.rng.random() < 0.4 else {}), **fields,
        }  # fmt: skip

    def sampling(self) -> Body:
        """Fields that leave one token to draw, or that change which token is the most likely one."""
        token = int(self.rng.integers(30, 600))
        return self.one_of(
            {}, {}, {"seed": 7}, {"temperature": 1.0, "top_k": 1}, {"temperature": 0.7, "min_p": 1.0},
            {"temperature": 1.5, "top_p": 1e-6}, {"logit_bias": {str(token): 100}},
            {"logit_bias": {str(token): self.one_of(5, -100), str(token + 1): 3.5}},
            {"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7},
            {"stop": self.one_of("e", ["in", "zz"], [" the", "a"], "no such text")},
        )  # fmt: skip

    # -- kinds

    def free_chat(self) -> Case:
        """A chat, answered by the random weights; they write no messages in Harmony's channels."""
        if self.family == "harmony":
            return self.scripted()
        body = self.body(messages=self.messages(), **self.sampling())
        if self.rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": self.one_of(0, 3)}
        if self.rng.random() < 0.3 and self.family == "qwen3":
            body["chat_template_kwargs"] = {"enable_thinking": bool(self.rng.random() < 0.5)}
        return Case(CHAT, body, "chat")

    def completion(self) -> Case:
        """A text, continued by the random weights."""
        return Case(COMPLETIONS, self.body(prompt=self.text(), **self.sampling()), "completion")

    def scripted(self) -> Case:
        """A chat whose answer is known: thoughts, text and calls."""
        while True:
            number = int(self.rng.integers(len(REPLIES)))
            reply = REPLIES[number]
            script = written(self.family, reply)
            if script:
                break
        messages = self.messages()
        messages[-1] = {"role": "user", "content": f"{self.text()} script {number}."}
        body = self.body(messages=messages, max_tokens=200)
        if reply.calls or (self.rng.random() < 0.3 and self.family != "gemma3"):
            body["tools"] = TOOLS
        if not reply.thought and self.family == "qwen3" and self.rng.random() < 0.5:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        if reply.text and self.rng.random() < 0.3:
            body["stop"] = self.one_of(["Stop"], "ine", ["\n\n", "b>"])
        elif self.rng.random() < 0.2:
            body["max_tokens"] = int(self.rng.integers(1, 20))
        if self.rng.random() < 0.2:
            body["logprobs"] = True
        return Case(CHAT, body, "scripted", reply=reply)

    def history(self) -> Case:
        """A chat with a call and its result, if the family's template has a place for them."""
        if self.family == "gemma3":
            return self.free_chat()
        call = {"id": "call_1", "type": "function",
                "function": {"name": PORTO[0], "arguments": json.dumps(PORTO[1])}}  # fmt: skip
        answer = {"role": "assistant", "content": self.one_of("", None), "tool_calls": [call]}
        result = {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": self.one_of("rain", '{"rain": "Ü"}'),
        }
        more = self.one_of(
            [], [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "And?"}]
        )
        messages = [*self.messages(), answer, result, *more]
        number = self.one_of(0, 2) if written(self.family, REPLIES[2]) else 0
        messages[-1]["content"] += f" script {number}."
        body = self.body(messages=messages, tools=TOOLS, max_tokens=60)
        return Case(CHAT, body, "history", reply=REPLIES[number])

    def odd_messages(self) -> Case:
        """A chat in a form that clients use, and that templates don't know, or not alike."""
        if self.family == "harmony":
            return self.scripted()
        said, text = self.text(), self.text()
        parts = [{"type": "text", "text": said}, {"type": "text", "text": text}]
        user, system = {"role": "user", "content": text}, {"role": "system", "content": said}
        control = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma3": "<end_of_turn>"}
        kinds: list[tuple[str, list[Body], list[Body] | None]] = [
            ("parts", [{"role": "user", "content": parts}], [{"role": "user", "content": said + text}]),
            ("developer", [{"role": "developer", "content": said}, user], [system, user]),
            ("two systems", [system, {"role": "system", "content": text}, user],
             [{"role": "system", "content": f"{said}\n\n{text}"}, user]),
            ("late system", [user, system], [{"role": "user", "content": f"{text}\n\n{said}"}]),
            ("an answer at the end", [user, {"role": "assistant", "content": said}], None),
            ("a control token", [{"role": "user", "content": f"{said} {control[self.family]} {text}"}], None),
        ]  # fmt: skip
        kind, messages, shown = kinds[self.rng.integers(len(kinds))]
        return Case(CHAT, self.body(messages=messages), kind, shown=shown)

    def with_adapter(self) -> Case:
        """A chat or text of an adapter."""
        case = self.one_of(self.free_chat, self.completion)()
        case.adapter = case.reply is None
        return case

    def wrong(self) -> Iterator[Case]:
        """Yield requests that no server should answer, and that leave mlx-lm's alive."""
        chat = {
            "model": "default_model",
            "messages": [{"role": "user", "content": "Hm."}],
            "max_tokens": 3,
        }
        for fields, param in (
            ({"messages": []}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": "Hm."}, "messages"),
            ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
            ({"messages": [{"role": "wizard", "content": "Hm."}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
             "messages[0].content[0].type"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": "7"}, "max_tokens"),
            ({"temperature": -1}, "temperature"),
            ({"temperature": "warm"}, "temperature"),
            ({"top_p": 2}, "top_p"),
            ({"top_k": -3}, "top_k"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": [1]}, "logit_bias"),
            ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
            ({"stream": "yes"}, "stream"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"response_format": {"type": "poem"}}, "response_format.type"),
            ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
            ({"model": "no/such-model"}, "model"),
        ):  # fmt: skip
            status = 404 if param == "model" else 400
            yield Case(CHAT, chat | fields, f"wrong {param}", status=status, param=param)
        yield Case(COMPLETIONS, {"model": "default_model"}, "no prompt", status=400, param="prompt")
