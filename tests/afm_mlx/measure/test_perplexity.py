"""Perplexity against float64, against mlx-lm, and the documents that it is measured on."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.engine.generation import stream_generate
from afm_mlx.engine.request import PromptLogprobs
from afm_mlx.errors import DataError
from afm_mlx.measure.perplexity import cut, load_documents, measure_perplexity, token_losses
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cases import each
from tests.tools.models import WordTokenizer, random_config, random_model

WORDS = WordTokenizer(60)


@pytest.fixture
def model(rng):
    return random_model(random_config(rng, vocab_size=60, kv_bits=None), rng)


def random_pieces(rng, lengths):
    return [rng.integers(0, 60, length).tolist() for length in lengths]


def float64_losses(model, piece):
    """-log p of each token but the first, each from a run of its own over what comes before it."""
    losses = []
    for end in range(1, len(piece)):
        logits = np.array(model(mx.array([piece[:end]])), np.float64)[0, -1]
        shifted = logits - logits.max()
        losses.append(np.log(np.exp(shifted).sum()) - shifted[piece[end]])
    return losses


@each("batch_size", [1, 3, 20])
def test_losses_are_those_of_tokens_one_by_one(model, rng, batch_size):
    pieces, seen = random_pieces(rng, rng.integers(2, 12, 7)), []
    expected = [loss for piece in pieces for loss in float64_losses(model, piece)]
    losses = token_losses(model, WORDS, pieces, batch_size, lambda *counts: seen.append(counts))
    np.testing.assert_allclose(losses, expected, atol=1e-4, rtol=0)
    assert seen == [(done, 7) for done in range(1, 8)]
    for piece in pieces[:2]:
        asked = {"max_tokens": 0, "prompt_logprobs": PromptLogprobs()}
        (response,) = stream_generate(model, WORDS, piece, **asked)
        first, losses = losses[: len(piece) - 1], losses[len(piece) - 1 :]
        assert -response.prompt_logprobs.total == pytest.approx(first.sum(), abs=1e-4)
    result = measure_perplexity(model, WORDS, pieces, batch_size)
    assert (result.tokens, result.samples) == (len(expected), 7)
    assert result.perplexity == pytest.approx(math.exp(np.mean(expected)), rel=1e-2)
    deviation = np.std(expected, ddof=1) / math.sqrt(len(expected))
    assert result.standard_error == pytest.approx(result.perplexity * deviation, rel=2e-2)


def test_equal_pieces_give_mlx_lms_figures(model, rng):
    from mlx_lm.perplexity import eval_ppl

    pieces = random_pieces(rng, [16] * 6)
    result = measure_perplexity(model, WORDS, pieces, batch_size=6)
    perplexity, error = eval_ppl(model, mx.array(pieces), batch_size=6)
    assert (result.perplexity, result.standard_error) == pytest.approx(
        (perplexity, error), rel=1e-4
    )


def test_every_token_but_the_first_is_scored_once(rng):
    for _ in range(50):
        documents = [list(range(n)) for n in rng.integers(0, 30, 4)]
        length = int(rng.integers(2, 12))
        pieces = cut(documents, length)
        assert all(2 <= len(piece) <= length for piece in pieces)
        assert sorted(token for piece in pieces for token in piece[1:]) == sorted(
            token for document in documents for token in document[1:]
        )


def test_samples_are_drawn_from_the_seed(rng):
    documents = [list(range(100 * i, 100 * i + 50)) for i in range(10)]
    everything = cut(documents, 8)
    some = cut(documents, 8, 5, seed=1)
    assert len(some) == 5
    assert all(piece in everything for piece in some)
    assert cut(documents, 8, 1000) == everything


@each("pieces", [[], [[1]], [[1, 2]]])
def test_too_little_to_score(model, pieces):
    with pytest.raises(DataError, match="at least 2 are needed"):
        measure_perplexity(model, WORDS, pieces)


# -- documents

MESSAGES = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_text_lies_between_separators(tokenizer, tmp_path):
    tokens = [2, *tokenizer.encode("The\nfox"), 2]
    assert load_documents(write(tmp_path / "a.jsonl", {"text": "The\nfox"}), tokenizer) == [tokens]
    (tmp_path / "a.txt").write_text("The\nfox")
    assert load_documents(tmp_path / "a.txt", tokenizer) == [tokens]
    with pytest.raises(DataError, match=r"a\.parquet is neither"):
        load_documents(tmp_path / "a.parquet", tokenizer)


def test_chats_in_three_spellings(tokenizer, tmp_path):
    file = write(
        tmp_path / "a.jsonl",
        {"messages": MESSAGES},
        {"prompt": "Who?", "completion": "The fox."},
        MESSAGES,
        {"messages": MESSAGES, "tools": [{"name": "f"}]},
    )
    plain = tokenizer.apply_chat_template(MESSAGES)
    with_tools = tokenizer.apply_chat_template(MESSAGES, tools=[{"name": "f"}])
    assert load_documents(file, tokenizer) == [plain, plain, plain, with_tools]


def test_folders_give_their_test_split_first(tokenizer, tmp_path):
    with pytest.raises(DataError, match=r"holds no test, valid, train"):
        load_documents(tmp_path, tokenizer)
    for name in ("train", "valid", "test"):
        write(tmp_path / f"{name}.jsonl", {"text": name})
        assert load_documents(tmp_path, tokenizer) == [[2, *tokenizer.encode(name), 2]]
