"""Texts to the token ids that embeddings are made of.

Names of control tokens in a text are plain text. A query may have an instruction before it; documents have
none.

Source of the forms: Qwen3-Embedding's model card.
"""

from __future__ import annotations

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.protocol import Tokenizer

_PROBE = "a"


def query_text(text: str, instruction: str | None = None) -> str:
    """Return the text of a query: `text` itself, or behind an instruction that says what is looked for."""
    return f"Instruct: {instruction}\nQuery: {text}" if instruction else text


def embedding_tokens(tokenizer: Tokenizer, text: str, pooling: str = "last") -> list[int]:
    """Return the token ids whose hidden states are pooled to a text's vector.

    They begin with what the tokenizer puts before every sequence. With the pooling "last", they end with the
    token that ends a text: the one that the tokenizer puts behind every sequence, else AFM's separator or
    `eos_token_id`, as texts end in training (`afm_mlx.jsonl.encode_text`).

    Raises:
        TokenizerError: if the text is empty, is no text, or has surrogates.
    """
    if not isinstance(text, str) or not text:
        raise TokenizerError(f"An embedding needs a text that is not empty, and got {text!r:.80}.")
    bare, framed = (tokenizer.encode(_PROBE, add_special_tokens=flag) for flag in (False, True))
    first = next(i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    before, behind = framed[:first], framed[first + len(bare) :]
    if pooling == "last" and not behind:
        behind = [getattr(tokenizer, "separator_id", tokenizer.eos_token_id)]
    return [*before, *tokenizer.encode_plain(text), *behind]
