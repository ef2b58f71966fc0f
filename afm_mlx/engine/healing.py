"""Prompts that end within a word: their last token is generated again, with what follows.

A text's tokens depend on what comes behind them. Where a prompt of plain text ends in the middle of what would
be one token, the model has never seen its last token in that place, and goes on badly. So that token is taken
off the prompt, and the answer has to begin with its text, which is not shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from afm_mlx.engine.request import Request
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.tokenizer import AFMTokenizer


def healed(request: Request, tokenizer: Any) -> tuple[Request, str]:
    """A request without its prompt's last token, and the text of that token.

    The request stays as it is where it doesn't ask for this, and where its last token is no text, or the only
    one: control tokens, newlines and bytes are never joined with what follows.
    """
    text = _text_of(request.prompt[-1], tokenizer) if request.heal else ""
    if not text or len(request.prompt) < 2:
        return request, ""
    constraint = (request.constraint or Constraint.text()).behind(text)
    return replace(request, prompt=request.prompt[:-1], constraint=constraint), text


def _text_of(token: int, tokenizer: Any) -> str:
    if type(tokenizer) is not AFMTokenizer:  # of the zoo
        special = token in tokenizer.all_special_ids
        return "" if special else tokenizer.decode([token])
    piece = tokenizer.piece(token)
    if piece.kind is not PieceKind.TEXT or token in tokenizer.control_ids or piece.text == NEWLINE:
        return ""
    return piece.text.replace(SPACE, " ")
