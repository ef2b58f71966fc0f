"""The tokens of texts whose vectors are wanted: plain text, between a sequence's own tokens."""

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.jsonl import encode_text
from afm_mlx.tokenizer.embedding_text import embedding_tokens, query_text
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from tests.tools.cases import each
from tests.tools.constraints import nano_tokenizer
from tests.tools.zoo_chats import FAMILIES, write_tokenizer


def test_afm_puts_separators_around_a_text():
    tokenizer = nano_tokenizer()
    inner = tokenizer.encode("a cat\nsat")
    separator = tokenizer.separator_id
    assert embedding_tokens(tokenizer, "a cat\nsat") == [separator, *inner, separator]
    assert embedding_tokens(tokenizer, "a cat\nsat") == encode_text("a cat\nsat", tokenizer)
    assert embedding_tokens(tokenizer, "a cat\nsat", "mean") == [separator, *inner]


def test_names_of_control_tokens_are_text():
    tokenizer = nano_tokenizer()
    text = "Say <turn_end> and <n>\n then <turn_start>user"
    tokens = embedding_tokens(tokenizer, text, "mean")[1:]
    assert not tokenizer.control_ids & set(tokens)
    assert tokens.count(tokenizer.convert_tokens_to_ids("<n>")) == 1  # the newline
    assert tokenizer.control_ids & set(tokenizer.encode(text))
    assert tokenizer.decode(tokens) == text.replace("<n>", "\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_zoos_tokenizers_keep_their_frame(family, tmp_path):
    from mlx_lm.tokenizer_utils import load

    write_tokenizer(tmp_path, family)
    tokenizer = ZooTokenizer.of(load(tmp_path))
    for text in ("a cat sat", "a", "  two\n\nlines "):
        framed = tokenizer.encode(text, add_special_tokens=True)
        assert embedding_tokens(tokenizer, text, "mean") == framed
        assert embedding_tokens(tokenizer, text) == [*framed, tokenizer.eos_token_id]
    name = tokenizer.decode([tokenizer.eos_token_id])
    tokens = embedding_tokens(tokenizer, f"a {name} b", "mean")
    assert tokenizer.eos_token_id not in tokens
    assert tokenizer.decode(tokens).endswith(f"a {name} b")


def test_a_tokenizer_that_ends_texts_itself_is_given_no_second_end(tmp_path):
    """Qwen3-Embedding's does, with another token than the one that ends an answer."""
    from mlx_lm.tokenizer_utils import load
    from tokenizers.processors import TemplateProcessing

    write_tokenizer(tmp_path, next(iter(FAMILIES)))
    tokenizer = ZooTokenizer.of(load(tmp_path))
    end = tokenizer.decode([tokenizer.eos_token_id])
    plain = tokenizer.encode("a cat", add_special_tokens=False)
    pair = (end, tokenizer.eos_token_id)
    tokenizer._tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {end}", special_tokens=[pair]
    )
    for pooling in ("last", "mean"):
        assert embedding_tokens(tokenizer, "a cat", pooling) == [*plain, tokenizer.eos_token_id]


def test_queries_have_an_instruction_before_them():
    assert query_text("Who?", "Find the sentence") == "Instruct: Find the sentence\nQuery: Who?"
    assert query_text("Who?") == query_text("Who?", "") == "Who?"


@each("text", ["", None, 3, b"a", ["a"]])
def test_what_is_no_text_is_refused(text):
    with pytest.raises(TokenizerError, match="needs a text that is not empty, and got"):
        embedding_tokens(nano_tokenizer(), text)


def test_surrogates_are_refused():
    with pytest.raises(TokenizerError, match="surrogate"):
        embedding_tokens(nano_tokenizer(), "a \ud800 b")
