"""The loop of a chat: what is said is a command or a message, and messages are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.cli.chat.commands import run_command
from afm_mlx.cli.chat.conversation import Conversation
from afm_mlx.cli.chat.interrupts import Interrupts
from afm_mlx.cli.chat.lines import Entries, next_message
from afm_mlx.cli.options import MAX_SEED
from afm_mlx.cli.output import note, one_line, print_answer
from afm_mlx.engine.generation import GenerationResponse
from afm_mlx.errors import (
    AFMError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    TokenizerError,
)

Answer = Callable[..., GenerationResponse | None]


class Session:
    """A chat: its conversation, and all else that commands act on.

    Args:
        conversation: the turns so far, and the model that answers.
        adapters: pool of the adapters that may answer.
        arguments: options for `stream_generate`, the seed excepted.
        first_seed: seed of the first answer; each later answer has the next.
        context: tokens that the conversation may have; None when that is not known.
        window_possible: whether the model has `--sliding-window`.
        figures: whether each answer is followed by a line about its speed.
    """

    def __init__(
        self,
        conversation: Conversation,
        adapters: AdapterPool,
        arguments: Mapping[str, Any],
        *,
        first_seed: int,
        context: int | None,
        window_possible: bool,
        figures: bool,
    ):
        self.conversation = conversation
        self.adapters = adapters
        self.context = context
        self.sliding: bool = arguments["sliding_window"]
        self.greedy = arguments["sampler"] is None
        self.own_files: set[Path] = set()  # that /save may write again
        self._arguments = arguments
        self._window_possible = window_possible
        self._figures = figures
        self._first_seed = self._seed = first_seed

    def run(self, entries: Entries) -> None:
        """Run commands and answer messages, until /exit or the end of input."""
        with Interrupts() as interrupts:
            while True:
                try:
                    with interrupts.allowed():
                        message = next_message(entries)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    if not entries.terminal:
                        raise
                    continue
                try:
                    with entries.busy(), interrupts.allowed():
                        self._respond(message)
                except EOFError:  # /exit
                    return
                except KeyboardInterrupt:
                    note("Stopped.")

    def _respond(self, message: str) -> None:
        if message.startswith("//"):
            self.ask(message[1:])
        elif message.startswith("/"):
            run_command(self, message)
        elif message.strip():
            self.ask(message)

    # -- answers

    def ask(self, question: str) -> None:
        """Answer a question, and print what comes of it."""
        answer = partial(self.conversation.ask, question)
        self._answer(answer, "The question is left out of the conversation.")

    def retry(self) -> None:
        """Answer the last question again, with another seed."""
        before, last = self.conversation.turns, self.conversation.last_response
        self._answer(self.conversation.retry, "The conversation stays as it was.")
        answered = self.conversation.last_response is not last
        if self.greedy and answered and self.conversation.turns == before:
            note(
                "The same again: without --temp, an answer is always the most likely one. "
                "Start the chat with --temp 0.7 for others."
            )

    def reset(self) -> None:
        """Forget the conversation, and begin with the first seed again."""
        self.conversation.reset()
        self._seed = self._first_seed

    def _answer(self, answer: Answer, consequence: str) -> None:
        written = False

        def show(text: str) -> None:
            nonlocal written
            written = written or bool(text)
            print_answer(text)

        try:
            response = answer(show, seed=self._next_seed(), **self._arguments)
        except AFMError as error:
            if written:
                print(flush=True)
            if not self._can_go_on(error):
                raise
            note(f"{self._advice(error) or one_line(error)} {consequence}")
            return
        if written or response is not None:
            print(flush=True)
        if response is None:
            note("Stopped." if written else f"Stopped before the answer began. {consequence}")
        elif self._figures:
            speed = f"{response.generation_tps:.1f} per second"
            note(f"[{response.generation_tokens} tokens, {speed}]")

    def _next_seed(self) -> int:
        seed = self._seed
        self._seed = (seed + 1) % MAX_SEED  # the same draws would repeat themselves
        return seed

    def _can_go_on(self, error: AFMError) -> bool:
        """True if the chat goes on: there is a conversation to lose, or only this question caused the error."""
        of_question = (CheckpointError, ConfigError, ContextLengthError, TokenizerError)
        return bool(self.conversation.turns) or isinstance(error, of_question)

    def _advice(self, error: AFMError) -> str | None:
        """What to say of a full context, in the chat's terms and not the engine's; None of other errors."""
        if not isinstance(error, ContextLengthError) or self.context is None or self.sliding:
            return None
        needed = self.conversation.prompt_tokens
        takes = f"the conversation with this question takes {needed:,}"
        if needed <= self.context:
            takes += ", and the answer needs more than the rest"
        window = ", or start afm-mlx chat with --sliding-window, which forgets the oldest tokens"
        return (
            f"The context of {self.context:,} tokens is full: {takes}. Ask for less, /save FILE and "
            f"/reset{window if self._window_possible else ''}."
        )
