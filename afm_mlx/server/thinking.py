"""Thinking before an answer, as requests switch and limit it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from afm_mlx.errors import shown
from afm_mlx.server.replies import bad_request
from afm_mlx.server.request_fields import openai_chats as fields

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Words of APIs that models were not trained on."""
_OWN_VARIABLES = (
    *("messages", "conversation", "tools", "documents", "tokenize", "self", "chat_template"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Variables of chat templates that the server sets."""


@dataclass(frozen=True)
class Thinking:
    """How a model is to think before its answer.

    Args:
        is_on: True or False to switch thinking on or off; pass None for the chat template's default.
        effort: "low", "medium" or "high", for templates that tell the model.
        budget: maximum number of tokens in all thoughts; pass None for no limit.
        is_shown: False to leave thoughts out of the reply.
        variables: variables for the chat template.
    """

    is_on: bool | None = None
    effort: str | None = None
    budget: int | None = None
    is_shown: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)

    def template_variables(self, defaults: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return the variables for a chat template with this source, over the server's `defaults`."""
        switch = "enable_thinking"
        if switch not in source and "thinking is defined" in source:
            switch = "thinking"  # DeepSeek's
        made = dict(defaults)
        if self.is_on is not None:
            made[switch] = self.is_on
        if self.effort is not None:
            made["reasoning_effort"] = self.effort
        return made | dict(self.variables)

    def is_off(self, variables: Mapping[str, Any]) -> bool:
        """True if the answer, whose template has these variables, is to have no thoughts."""
        given = variables.get("enable_thinking", variables.get("thinking"))
        return given is False or (self.budget == 0 and given is not True)


BY_DEFAULT = Thinking()


def thinking_of(
    body: fields.ThinkingFields | fields.ChatRequest, effort: str | None, effort_place: str
) -> Thinking:
    """Read how a request's answer is to think; the request has the word `effort` at `effort_place`.

    Raises:
        ApiError: 400 for fields that contradict each other, or variables that the server sets itself.
    """
    given, other = body.thinking, getattr(body, "reasoning", None)
    of_chat = other if isinstance(other, fields.ChatReasoning) else fields.ChatReasoning()
    switches = {
        "enable_thinking": body.enable_thinking,
        "thinking.type": None if given is None else given.type != "disabled",
        "reasoning.enabled": of_chat.enabled,
    }
    is_on = _agreed(switches)
    if of_chat.effort is not None:
        effort = _agreed({effort_place: effort, "reasoning.effort": of_chat.effort})
    if effort is not None and is_on is None:
        is_on = effort != "none"
    budget = _agreed(
        {
            "thinking_budget": body.thinking_budget,
            "thinking_token_budget": body.thinking_token_budget,
            "thinking.budget_tokens": None if given is None else given.budget_tokens,
            "reasoning.max_tokens": of_chat.max_tokens,
        }
    )
    variables = body.chat_template_kwargs or {}
    if taken := sorted(variables.keys() & set(_OWN_VARIABLES)):
        raise bad_request(
            f"chat_template_kwargs can't set {', '.join(taken)}: the server does.",
            "chat_template_kwargs",
        )
    hides = of_chat.exclude or (given is not None and given.display == "omitted")
    effort = None if effort == "none" else effort
    return Thinking(is_on, _EFFORTS.get(effort or "", effort), budget, not hides, variables)


def _agreed(values: Mapping[str, Any]) -> Any:
    """Return the one value that fields of the same meaning have, or None; raise a 400 if they differ."""
    found = {name: value for name, value in values.items() if value is not None}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} {shown(value)}" for name, value in found.items())
        raise bad_request(
            f"{' and '.join(found)} say the same thing, and differ ({said}); choose one.",
            next(iter(found)),
        )
    return next(iter(found.values()), None)
