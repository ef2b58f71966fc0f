"""The real server with a tiny random model of a long context, whose answers follow a script.

AFM's model is held to the script by a constraint. A model of the zoo prefers the script's tokens, and the
server's own constraints hold: it may think first, and its calls are held to the tools' schemas.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np

from afm_mlx import threads
from afm_mlx.engine.request import LogitsProcessor
from afm_mlx.guidance.call_forms import CallForm, call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import _lark
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server import answer_events
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.model_scripts import FollowsText
from tests.tools.models import random_config, random_model
from tests.tools.server import RunningServer, running_server
from tests.tools.zoo_chats import write_family_folder

MODEL = "tiny"
Calls = Sequence[tuple[str, dict[str, Any]]]


@dataclass
class Script:
    """The model's answers.

    Attributes:
        steps: the answers of each conversation in order: tool calls (names and arguments), or a text.
        thought: what a model of the zoo thinks before each answer, unless thinking is switched off.
        prompts: texts of the answered prompts.
        tools: names of the tools offered with each prompt.
    """

    steps: Sequence[Calls | str]
    thought: str = ""
    prompts: list[str] = field(default_factory=list)
    tools: list[list[str]] = field(default_factory=list)

    def step(
        self, served: ServedModel, request: GenerationRequest, ids: Sequence[int]
    ) -> Calls | str:
        """Return the answer to a prompt with tools, and keep the prompt."""
        prompt = served.tokenizer.decode(list(ids))
        self.prompts.append(prompt)
        self.tools.append([tool["function"]["name"] for tool in request.tools.definitions])
        answers = sum(map(prompt.count, ("<turn_start> assistant", "<|im_start|>assistant")))
        return self.steps[min(answers - 1, len(self.steps) - 1)]

    def constraint(
        self, served: ServedModel, request: GenerationRequest, ids: Sequence[int]
    ) -> Constraint:
        """Return a constraint that allows only the script's answer, with or without one space.

        With no choice at all the engine would not compute the prompt. Answers under a schema are free.
        """
        step = self.step(served, request, ids)
        if not request.tools.may_call:
            return request.format.constraint or _text("Done.")
        if isinstance(step, str):
            return _text(step)
        form = call_form(served.tokenizer)
        opening = _lark(form, form.opening)
        calls = _lark(form, _calls(form, step).removeprefix(form.opening))
        return Constraint(f'start: {opening} " "? {calls}', "script")

    def processors(
        self, served: ServedModel, request: GenerationRequest, ids: Sequence[int]
    ) -> list[LogitsProcessor]:
        """Return the server's own logits processors, and one that prefers the script's answer."""
        made = _PROCESSORS(served, request, ids)
        if request.format.constraint is not None and not request.tools.may_call:
            return made
        step: Calls | str = "Done."
        if request.tools.definitions:
            step = self.step(served, request, ids)
        text = step if isinstance(step, str) else _calls(call_form(served.tokenizer), step)
        form = served.thoughts
        if self.thought and form and request.thinking and served.thinks(request.thinking):
            text = f"{form.start}\n{self.thought}\n{form.end}\n\n{text}"
        return [FollowsText(served.tokenizer, text, len(ids)), *made]


_PROCESSORS = answer_events.logits_processors


def _calls(form: CallForm, step: Calls) -> str:
    texts = [
        form.head_of(name) + json.dumps(arguments, ensure_ascii=False) + form.tail
        for name, arguments in step
    ]
    return form.opening + (form.between or "").join(texts) + form.closing


def _text(text: str) -> Constraint:
    return Constraint.choices([text, f"{text} "])


@contextmanager
def scripted_server(
    *steps: Calls | str,
    context: int = 32768,
    family: str | None = None,
    thought: str = "",
    **settings: Any,
) -> Iterator[tuple[RunningServer, Script]]:
    """Start a server whose model, of a context of this size, follows a script.

    The model is AFM's, or mlx-lm's Qwen3 with the tokenizer and template of a `family` whose turns are Qwen's.
    """
    options = ServerOptions(**{"port": 0, "grace": 1, **settings})
    script = Script(steps, thought)

    def make_zoo(folder: Path) -> ServedModel:
        write_family_folder(folder, str(family), max_position_embeddings=context)
        return ServedModel(*load(folder), None, name=MODEL, options=options)

    def make() -> ServedModel:
        if family is not None:
            with TemporaryDirectory() as folder:
                return make_zoo(Path(folder))
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

    patched: tuple[str, Any] = ("tools_constraint", script.constraint)
    if family is not None:
        patched = ("logits_processors", script.processors)
    served = threads.submit(make).result()
    try:
        with (
            mock.patch.object(answer_events, *patched),
            running_server(served, **settings) as server,
        ):
            yield server, script
    finally:
        served.close()
