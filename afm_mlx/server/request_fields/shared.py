"""Limits of fields, and types and rules that fields of one or several APIs have."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Honoured, Ignored, Refused

MAX_STOPS, MAX_STOP = 16, 1000
"""Limits on the number of stop strings, and on the characters of one."""
MESSAGES, SOME_MESSAGES = Meta(max_length=1 << 14), Meta(min_length=1, max_length=1 << 14)
PARTS, TOOLS = Meta(max_length=1 << 12), Meta(max_length=1 << 10)
"""Limits on the messages or items of a request, on a message's parts, blocks or calls, and on tools."""
MAX_CHOICES, MAX_BIASES, MAX_TOKENS = 1 << 12, 1 << 14, 1 << 20
"""Limits on choices of an answer, on biased tokens, and on prompts or the token ids of one."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
FormatName = Annotated[str, Meta(min_length=1, max_length=64)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}\\Z")]
ClaudeToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}\\Z")]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None
StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]
Detail = Literal["auto", "low", "high", "original"]

MODEL = Honoured("one of `/v1/models`; any other is a 404, `model_not_found`")
STREAM = Honoured("the answer comes as events while it is generated")
LIMIT = Honoured(
    "maximum number of new tokens; -1 for as many as the context holds. A full context always ends an answer"
)
SAMPLING = Honoured("sampling; the defaults are the server's (`--temp` and so on)")
TOP_K = Honoured("samples from this many most likely tokens; 0 and -1 mean all", off=(-1,))
SEED = Honoured("the same seed repeats an answer; -1 is a random seed", off=(-1,))
PARALLEL = Honoured("allows several calls in one answer", shapes_answers=False)
WHO = Ignored("identifies the user to the provider", if_strict=True)
WHO_ELSE = Ignored("for the provider")
CACHE = Ignored("the prefix cache finds shared prefixes by itself")
CACHE_MARK = Ignored(CACHE.text, if_strict=True)
NO_THOUGHTS = "; of no effect if the model answers without thinking first"
EFFORT = Ignored(
    "`none` switches thinking off, other words switch it on and are shown to the model if its template has a "
    "place for them" + NO_THOUGHTS,
    ("none", *EMPTY),
    unless_thinking=True,
)
SWITCH = Ignored("switches thinking on or off" + NO_THOUGHTS, unless_thinking=True)
BUDGET = Ignored(
    "maximum number of tokens of thoughts, after which the answer begins" + NO_THOUGHTS,
    unless_thinking=True,
)
THINKING = Ignored(
    "`type` is `enabled`, `disabled` or `adaptive`; `budget_tokens` limits the tokens of thoughts; `display` "
    "is `summarized` (whole, in fact) or `omitted`" + NO_THOUGHTS,
    ({"type": "disabled"}, *EMPTY),
    unless_thinking=True,
)
VARIABLES = Honoured("variables for the chat template", off=({},))
THOUGHT = Ignored(
    "the thought of an earlier answer, shown to the model if its template has a place for it",
    is_named=False,
    unless_thinking=True,
)
LENGTH = Ignored("answers are as long as the prompt asks for", ("medium", *EMPTY))
ALIKE = Ignored("all requests have one priority", ("auto", "default", "standard", *EMPTY))
NOT_PADDED = Ignored("events are never padded")
ALL_SHOWN = Ignored("all tools are shown at once")
NEVER_SHORTENED = Ignored("a conversation is never shortened", ("disabled", {"edits": []}, *EMPTY))
NO_NAMES = Ignored("the model is not shown names of speakers")
ECHO = Ignored("repeated from an earlier answer; not used here", is_named=False)
OF_USE_TO_CLIENTS = Ignored(ECHO.text, is_named=False, if_strict=True)
KEPT_TO = Ignored("calls and answers always follow their schema", is_named=False, if_strict=True)
TEXT_ONLY = "this model reads and writes text only"
DETAIL = Honoured(
    "`low` gives an image few tokens, `high` and `original` many; `auto`, the default, decides by its size",
    shapes_answers=False,
)
CALLERS = Refused("the model calls tools itself", (["direct"], *EMPTY))
OTHERS_TOOL = "a tool of another provider, which the model is not offered"
