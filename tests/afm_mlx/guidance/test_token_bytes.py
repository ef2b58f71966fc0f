"""llguidance's view of tokenizers: bytes of tokens, and how forced text is encoded."""

import numpy as np
import pytest

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher
from afm_mlx.guidance.token_bytes import after_newline, ll_tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from tests.tools.cases import each
from tests.tools.constraints import bytes_of, nano_tokenizer
from tests.tools.models import WordTokenizer
from tests.tools.tokenizers import plain_text, train_tiny_spm
from tests.tools.zoo import zoo_tokenizer


@pytest.fixture(params=["nano", "bpe", "unigram", "tokenizer.json"])
def tokenizer(request, tmp_path):
    if request.param == "nano":
        return nano_tokenizer()
    kind = "bpe" if request.param == "tokenizer.json" else request.param
    path = train_tiny_spm(tmp_path / "tokenizer.model", kind)
    if request.param != "tokenizer.json":
        return load_tokenizer(tmp_path)
    save_tokenizer(path, tmp_path / "hub")
    (tmp_path / "hub" / "tokenizer.model").unlink()
    return load_tokenizer(tmp_path / "hub")


def test_tokens_have_their_bytes_and_control_tokens_none(tokenizer):
    inner = ll_tokenizer(tokenizer)
    assert inner.vocab_size == len(tokenizer)
    for token in range(len(tokenizer)):
        text = bytes_of(tokenizer, token)
        if text == b"\xff":
            continue  # llguidance's mark of special tokens; no text has it
        if text:
            assert inner.decode_bytes([token]) == text
        else:
            assert inner.is_special_token(token) or token == tokenizer.unk_token_id
    assert sorted(inner.eos_tokens) == sorted(tokenizer.eos_token_ids)


def test_forced_text_has_the_tokens_that_it_has_behind_a_newline(tokenizer, rng):
    """A template ends with one, and answers begin there; llguidance must not add the dummy prefix."""
    for _ in range(20):
        text = plain_text(rng) or "a"
        forced = Matcher(Constraint.choices([text]), tokenizer).forced()
        assert b"".join(bytes_of(tokenizer, token) for token in forced).decode() == text
        if "\u2581" not in text and "<n>" not in text:  # encoding would change it
            newline = tokenizer.encode("\n")
            assert forced == tokenizer.encode("\n" + text)[len(newline) :]


def test_names_of_control_tokens_are_forced_as_texts(tokenizer):
    for name in map(tokenizer.convert_ids_to_tokens, tokenizer.eos_token_ids):
        forced = Matcher(Constraint.choices([f"a{name}b"]), tokenizer).forced()
        assert b"".join(bytes_of(tokenizer, token) for token in forced).decode() == f"a{name}b"


def test_a_vocabulary_is_made_once_and_anew_for_other_ends():
    tokenizer = load_tokenizer(nano_tokenizer().name_or_path)
    first = ll_tokenizer(tokenizer)
    assert ll_tokenizer(tokenizer) is first
    tokenizer.add_eos_token("a")
    assert ll_tokenizer(tokenizer) is not first
    assert len(ll_tokenizer(tokenizer).eos_tokens) == len(first.eos_tokens) + 1


def test_tokenizers_that_do_not_say_what_their_tokens_are(rng):
    with pytest.raises(ConstraintError, match=r"tokenizer\.json"):
        ll_tokenizer(WordTokenizer(9))
    joined = after_newline(lambda text: [1] if text == "\n" else [2] * len(text))
    with pytest.raises(ConstraintError, match="newline"):
        joined("abc")


@each("byte_level", [True, False])
def test_tokenizers_of_mlx_lms_zoo(byte_level):
    tokenizer = zoo_tokenizer(byte_level)
    matcher = Matcher(Constraint.choices(["some more words"]), tokenizer)
    forced = matcher.forced()
    assert ll_tokenizer(tokenizer).decode_bytes(forced) == b"some more words"
    for token in forced:
        matcher.accept(token)
    assert matcher.is_stopped
    masked = Matcher(Constraint.regex("[a-z]+"), tokenizer)
    allowed = np.unpackbits(
        np.frombuffer(masked._matcher.compute_bitmask(), np.uint8), bitorder="little"
    )
    assert 0 < allowed.sum() < len(tokenizer._tokenizer)
