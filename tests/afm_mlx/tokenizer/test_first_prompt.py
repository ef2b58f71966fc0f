"""The first prompt in a chat's tokens."""

from __future__ import annotations

import pytest

from afm_mlx.loading.resolve import resolve_model
from afm_mlx.tokenizer.first_prompt import first_prompt
from afm_mlx.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("afm-nano"))


def test_of_a_prompt_and_of_conversations(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi <turn_start> assistant<n>"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "no"},
    ]
    prompt = tokenizer.apply_chat_template(messages[:2], add_generation_prompt=True)
    assert first_prompt(prompt, tokenizer) == len(prompt)
    for count, start in ((3, False), (4, True), (5, False)):
        tokens = tokenizer.apply_chat_template(messages[:count], add_generation_prompt=start)
        assert tokens[: len(prompt)] == prompt
        assert first_prompt(tokens, tokenizer) == len(prompt)


def test_of_what_has_no_answer(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    for tokens in (whole, tokenizer.encode("a text"), [], [3]):
        assert first_prompt(tokens, tokenizer) is None
