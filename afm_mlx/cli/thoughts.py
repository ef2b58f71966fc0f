"""Thoughts before answers: the argument that switches them, and how they are printed."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from afm_mlx.cli.arguments import SWITCH, Argument, UsageError
from afm_mlx.cli.output import harmless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from afm_mlx.engine.generation import GenerationResponse
    from afm_mlx.guidance.answer_parts import AnySplitter
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.tokenizer.protocol import Tokenizer

THINK = Argument("--think", SWITCH,
                 "let the model think before it answers, or keep it from that; by default, its chat template "
                 "decides. Thoughts are printed on standard error, and answers on standard output")  # fmt: skip


class Thoughts:
    """Thoughts of the answers of one model.

    Args:
        tokenizer: the model's.
        is_on: as `--think` or `--no-think` says; pass None if neither does.

    Raises:
        UsageError: for `--think`, if the model has no thoughts.
    """

    def __init__(self, tokenizer: Tokenizer, is_on: bool | None) -> None:
        self._form: Any = None
        if hasattr(tokenizer, "template_source"):  # of mlx-lm; AFM models don't think
            from afm_mlx.guidance.thoughts import thought_form

            self._form = thought_form(tokenizer)
        if is_on and self._form is None:
            where = tokenizer.name_or_path or "the model"
            raise UsageError(f"--think: {where} answers without thinking first. Leave it out.")
        self._is_on = is_on

    @property
    def variables(self) -> dict[str, Any]:
        """Variables for the chat template."""
        if self._form is None or self._is_on is None:
            return {}
        return {"enable_thinking": self._is_on, "thinking": self._is_on}

    def ended(self, prompt: list[int]) -> list[int]:
        """Return a prompt in which a thought is ended that the template has begun, if thinking is off."""
        begun = self._form is not None and self._is_on is False and self._form.is_begun(prompt)
        return [*prompt, *self._form.end_ids] if begun else prompt

    def options(
        self,
        prompt: Sequence[int],
        constraint: Constraint | None = None,
        seen: int | None = None,
    ) -> dict[str, Any]:
        """Return options of `stream_generate`; a constraint holds behind the answer's thoughts.

        `seen` is the number of the prompt's last tokens that are not in a prompt cache; pass None for all.
        """
        if self._form is None:
            return {} if constraint is None else {"constraint": constraint}
        from afm_mlx.guidance.thoughts import after_thoughts, limits_of_thoughts

        made: dict[str, Any] = {}
        if constraint is not None:
            is_begun, may_think = self._form.is_begun(prompt), self._is_on is not False
            made["constraint"] = after_thoughts(
                constraint, self._form, is_begun=is_begun, may_think=may_think
            )
        if self._is_on is False:
            made["logits_processors"] = limits_of_thoughts(self._form, prompt, 0, seen=seen)
        return made

    def splitter(self, prompt: Sequence[int]) -> AnySplitter | None:
        """Make the splitter of an answer; None if all of it is text."""
        if self._form is None:
            return None
        from afm_mlx.guidance.answer_parts import splitter_for

        return splitter_for(None, (), self._form, prompt)


class ThoughtPrinter:
    """Prints thoughts on standard error, faint on a terminal, with an empty line between them and the answer.

    Args:
        is_quiet: True to print nothing.
    """

    def __init__(self, is_quiet: bool = False) -> None:
        self._is_quiet = is_quiet
        self._is_open = False
        self.text = ""

    def said(self, splitter: AnySplitter | None, response: GenerationResponse) -> str:
        """Print the thoughts in the next response of an answer, and return the text in it."""
        if splitter is None:
            return response.text
        from afm_mlx.guidance.answer_parts import Text, Thought, split

        said, tokens = "", (response.token, *response.completion)
        for part in split(splitter, response.text, tokens, response.finish_reason is not None):
            if isinstance(part, Text):
                self.close()
                said += part.text
            elif isinstance(part, Thought):
                self._show(part.text)
        return said

    def _show(self, text: str) -> None:
        self.text += text
        if self._is_quiet:
            return
        if sys.stderr.isatty():
            text = ("" if self._is_open else "\x1b[2m") + harmless(text)
        self._is_open = True
        print(text, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the last thought's lines."""
        if self._is_open:
            self._is_open = False
            print("\x1b[0m\n" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
