"""Requests of any API, and what the engine computes for them: prompt, sampler, penalties, constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import LogitsProcessor, PromptLogprobs, Request, Sampler
from afm_mlx.engine.samplers import make_logits_processors, make_sampler
from afm_mlx.errors import AFMError, ConstraintError
from afm_mlx.guidance.call_forms import CallForm, call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import ThoughtBudget, after_thoughts, limits_of_thoughts
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.server.chat_inputs import (
    FREE_TEXT,
    NO_TOOLS,
    AnswerFormat,
    Message,
    OfferedTools,
    is_answer,
)
from afm_mlx.server.replies import ApiError, bad_request
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.thinking import BY_DEFAULT, Thinking
from afm_mlx.tokenizer.chat_images import ChatImages


@dataclass(frozen=True)
class GenerationRequest:
    """A request of any API, after its fields were checked.

    Args:
        messages: a chat for the chat template; an answer at its end is continued.
        prompt: token ids, in place of messages.
        images: the images in the messages, or in the chat that `prompt` was encoded from; pass None for none.
        format: what an answer without tool calls must look like.
        thinking: how the model is to think before its answer; pass None for texts without thoughts apart.
        adapter: the adapter that answers; pass None for the base model.
        max_tokens: maximum number of new tokens; pass None for the server's default, -1 for the rest of the
            context, 0 for none.
        temperature, top_p, top_k, min_p: sampling; pass None for the server's defaults.
        seed: seed of the first choice, from which the other choices' are derived; pass None for random seeds.
        frequency_penalty, presence_penalty: penalties for tokens that the answer has.
        repetition_penalty: penalty for tokens that the prompt or the answer has.
        repetition_context_size: number of last tokens that `repetition_penalty` looks at; pass None for all.
        n: number of choices.
        logprobs: number of most likely tokens reported for each token; pass None for no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens, reported once, with the first choice.
        with_end: True if `logprobs` include the end token, which is not part of the text.
        client: the client's id; clients share the batch fairly, and don't see each other's cached prompts.
    """

    messages: Sequence[Message] | None = None
    prompt: Sequence[int] | None = None
    images: ChatImages | None = None
    tools: OfferedTools = NO_TOOLS
    format: AnswerFormat = FREE_TEXT
    thinking: Thinking | None = None
    adapter: AdapterChoice | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 0.0
    repetition_context_size: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    with_end: bool = False
    client: str = ""

    @property
    def continues(self) -> bool:
        """True if the answer continues a text: a prompt, or an answer at the end of a chat."""
        return self.messages is None or (bool(self.messages) and is_answer(self.messages[-1]))

    @property
    def prompt_field(self) -> str:
        """The field that errors of the prompt are about."""
        return "prompt" if self.messages is None else "messages"


def engine_request(served: ServedModel, request: GenerationRequest) -> Request:
    """Make the engine's request for the first choice, without its constraint; slow for long prompts."""
    if request.messages is None:
        prompt = list(request.prompt or ())
    else:
        given = request.thinking or BY_DEFAULT
        prompt = served.encode_chat(
            request.messages, request.tools, request.format, given, request.images
        )
    default = served.options.max_tokens
    max_tokens = default if request.max_tokens is None else request.max_tokens
    capacity = served.context_size - len(prompt)
    if capacity < (0 if max_tokens == 0 else 1):
        raise ApiError(
            400,
            f"The prompt has {len(prompt)} tokens, and the context of {served.name} holds "
            f"{served.context_size} with the answer. Shorten it.",
            param=request.prompt_field,
            code="context_length_exceeded",
        )
    if request.logit_bias and max(request.logit_bias) >= served.vocab_size:
        raise bad_request(
            f"logit_bias has the token {max(request.logit_bias)}; this model's go from 0 to "
            f"{served.vocab_size - 1}.",
            "logit_bias",
        )
    top = request.prompt_logprobs
    return Request(
        prompt,
        max_tokens=capacity if max_tokens == -1 else min(max_tokens, capacity),
        sampler=_sampler(served, request),
        stop=list(request.stop),
        logprobs=request.logprobs is not None,
        prompt_logprobs=None if top is None else PromptLogprobs(top=top),
        adapter=request.adapter,
        images=request.images.placed if request.images else (),
    )


def _sampler(served: ServedModel, request: GenerationRequest) -> Sampler | None:
    """Make the sampler of a request; return None if it takes the most likely token."""
    options = served.options
    temperature = options.temperature if request.temperature is None else request.temperature
    if (
        temperature == 0 or request.top_p == 0
    ):  # of the APIs; a top_p of 0 keeps all in make_sampler
        return None
    top_k = options.top_k if request.top_k is None else request.top_k
    return make_sampler(
        temperature,
        options.top_p if request.top_p is None else request.top_p,
        options.min_p if request.min_p is None else request.min_p,
        top_k=0 if top_k >= served.vocab_size else top_k,  # keeps all either way
    )


def logits_processors(
    served: ServedModel, request: GenerationRequest, prompt: Sequence[int]
) -> list[LogitsProcessor]:
    """Make the logits processors of one choice.

    Frequency and presence penalties count the answer's tokens, as in OpenAI's API; the repetition penalty
    counts the prompt's, too.
    """
    whole = make_logits_processors(
        request.logit_bias or None,
        repetition_penalty=request.repetition_penalty or None,
        repetition_context_size=request.repetition_context_size,
    )
    of_answer = make_logits_processors(
        presence_penalty=request.presence_penalty or None,
        presence_context_size=None,
        frequency_penalty=request.frequency_penalty or None,
        frequency_context_size=None,
    )
    made: list[LogitsProcessor] = (
        [*whole, _AnswerProcessor(len(prompt), of_answer)] if of_answer else whole
    )
    form, thinking = served.thoughts, request.thinking
    if form is None or thinking is None:
        return made
    if not served.thinks(thinking):
        return [*made, *limits_of_thoughts(form, prompt, 0, request.tools.may_call)]
    if thinking.budget == 0:  # and a switch that is on
        return [*made, ThoughtBudget(form, 0, prompt)]
    return [*made, *limits_of_thoughts(form, prompt, thinking.budget, request.tools.may_call)]


class _AnswerProcessor:
    """Applies logits processors to the tokens of the answer alone."""

    def __init__(self, prompt_size: int, processors: Sequence[LogitsProcessor]):
        self._prompt_size, self._processors = prompt_size, processors

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[self._prompt_size :]
        if answer.shape[0]:
            for processor in self._processors:
                logits = processor(answer, logits)
        return logits


def behind_thoughts(
    served: ServedModel,
    request: GenerationRequest,
    prompt: Sequence[int],
    constraint: Constraint,
    is_answer: bool = True,
) -> Constraint:
    """Let a constraint hold behind the model's thoughts; `is_answer` as in `after_thoughts`."""
    form, thinking = served.thoughts, request.thinking
    if form is None or thinking is None:
        return constraint
    return after_thoughts(
        constraint,
        form,
        is_begun=form.is_begun(prompt),
        may_think=served.thinks(thinking),
        is_answer=is_answer,
    )


def tools_constraint(
    served: ServedModel, request: GenerationRequest, prompt: Sequence[int]
) -> Constraint | None:
    """Make the constraint of an answer whose prompt has tools, called or not; slow for large schemas."""
    tools, answer = request.tools, request.format.constraint
    form = form_of_calls(served, request)
    if form is None:  # the prompt shows tools, so calls must be kept out
        return behind_thoughts(served, request, prompt, answer or Constraint.text())
    try:
        if not form.has_grammar and tools.allowed is not None:
            raise ConstraintError(
                f"Calls in this model's form ({form.name}) can't be limited to some of the tools. Leave out "
                "the others."
            )
        made = tool_call_constraint(
            tools.callable, tools.choice, answer, parallel=tools.parallel, form=form
        )
        has_thoughts = answer is None and tools.choice in ("auto", "none")
        if made is None or has_thoughts:
            return made
        return behind_thoughts(served, request, prompt, made, is_answer=tools.choice == "none")
    except AFMError as error:
        raise bad_request(str(error), "tools") from error


def form_of_calls(served: ServedModel, request: GenerationRequest) -> CallForm | None:
    """Return the form of the model's calls; None for a prompt without tools.

    Raises a 400 about the tools if the answer may call them, and the model can't.
    """
    if not request.tools.definitions:
        return None
    try:
        return call_form(served.tokenizer)
    except AFMError as error:
        if not request.tools.may_call:
            return None
        raise bad_request(str(error), "tools") from error
