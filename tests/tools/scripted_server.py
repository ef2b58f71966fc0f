"""The real server with a tiny random model of a long context, whose answers follow a script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

from afm_mlx import threads
from afm_mlx.guidance.constraint import Constraint, literal
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server import answer_events
from afm_mlx.server.answer_events import GenerationRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START
from tests.tools.models import random_config, random_model
from tests.tools.server import RunningServer, running_server

MODEL = "tiny"
Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass
class Script:
    """The model's answers.

    Attributes:
        steps: the answers of each conversation in order: tool calls (names and arguments), or a text.
        prompts: texts of the answered prompts.
        tools: names of the tools offered with each prompt.
    """

    steps: Sequence[Calls | str]
    prompts: list[str] = field(default_factory=list)
    tools: list[list[str]] = field(default_factory=list)

    def constraint(self, served: ServedModel, request: GenerationRequest) -> Constraint:
        """Return a constraint that allows only the script's answer, with or without one space.

        With no choice at all the engine would not compute the prompt. Answers under a schema are free.
        """
        ids = request.prompt
        if request.messages is not None:
            ids = served.encode_chat(request.messages, request.tools, request.format)
        prompt = served.tokenizer.decode(list(ids or ()))
        self.prompts.append(prompt)
        self.tools.append([tool["function"]["name"] for tool in request.tools.definitions])
        if not request.tools.may_call:
            return request.format.constraint or _text("Done.")
        step = self.steps[min(prompt.count("<turn_start> assistant") - 1, len(self.steps) - 1)]
        if isinstance(step, str):
            return _text(step)
        calls = json.dumps([{"name": name, "arguments": arguments} for name, arguments in step])
        opening, rest = literal(" ```function\n["), literal(f"{calls[1:]}```")
        return Constraint.lark(f'start: {EXECUTABLE_START} {opening} " "? {rest} {EXECUTABLE_END}')


def _text(text: str) -> Constraint:
    return Constraint.choices([text, f"{text} "])


@contextmanager
def scripted_server(
    *steps: Calls | str, context: int = 32768, **settings: Any
) -> Iterator[tuple[RunningServer, Script]]:
    """Start a server whose model, of a context of this size, follows a script."""
    options = ServerOptions(**{"port": 0, "grace": 1, **settings})
    script = Script(steps)

    def make() -> ServedModel:
        rng = np.random.default_rng(0)
        config = random_config(
            rng,
            vocab_size=4096,
            hidden_dim=16,
            num_layers=2,
            num_kv_reuse_layers=1,
            num_heads=2,
            num_kv_heads=1,
            kv_bits=8,
            context_length=context,
        )
        tokenizer = load_tokenizer(resolve_model("afm-nano"))
        return ServedModel(random_model(config, rng), tokenizer, None, name=MODEL, options=options)

    served = threads.submit(make).result()
    try:
        with (
            mock.patch.object(answer_events, "_constraint", script.constraint),
            running_server(served, **settings) as server,
        ):
            yield server, script
    finally:
        served.close()
