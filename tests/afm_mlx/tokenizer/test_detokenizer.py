"""The streaming detokenizer against decoding the whole list."""

import copy
from types import SimpleNamespace

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.detokenizer import Piece, PieceKind, Spacing, StreamingDetokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.tokenizers import random_ids, train_tiny_spm


def segments(tokenizer, ids):
    detokenizer = tokenizer.detokenizer
    parts = []
    for token in ids:
        detokenizer.add_token(token)
        parts.append(detokenizer.last_segment)
    detokenizer.finalize()
    parts.append(detokenizer.last_segment)
    assert "".join(parts) == detokenizer.text
    assert detokenizer.tokens == ids
    return parts


def test_segments_join_to_decode_for_any_ids(tokenizer, reference, rng):
    for _ in range(1000):
        ids = random_ids(rng, tokenizer)
        assert "".join(segments(tokenizer, ids)) == reference.decode(ids), ids
        assert tokenizer.decode(ids) == reference.decode(ids), ids


def test_broken_sequence_is_never_shown_early(tokenizer):
    ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀é".encode()]
    assert segments(tokenizer, ids) == ["", "", "", "😀", "", "é", ""]
    # Cut off: only the end of the sequence, or a piece that is no byte, shows that it stays broken.
    assert segments(tokenizer, ids[:3]) == ["", "", "", "\ufffd" * 3]
    x = tokenizer.convert_tokens_to_ids("x")
    assert segments(tokenizer, [*ids[:2], x]) == ["", "", "\ufffd\ufffdx", ""]


def test_newline_spelled_by_several_pieces(tokenizer):
    less, n, greater = tokenizer.convert_tokens_to_ids(["<", "n", ">"])
    assert segments(tokenizer, [n, less, n, greater]) == ["n", "", "", "\n", ""]
    assert segments(tokenizer, [less, less, n, less]) == ["", "<", "", "<n", "<"]
    assert tokenizer.decode([tokenizer.convert_tokens_to_ids("<n>")]) == "\n"


def test_special_tokens_are_skipped_on_demand(tokenizer):
    ids = [0, tokenizer.separator_id, *tokenizer.encode("the"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "the<turn_end>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the"


def test_each_detokenizer_is_its_own(tokenizer):
    first, second = tokenizer.detokenizer, tokenizer.detokenizer
    word = tokenizer.convert_tokens_to_ids("\u2581the")
    first.add_token(word)
    assert (first.text, second.text) == ("the", "")
    # mlx-lm keeps one and hands out copies that it resets.
    copied = copy.copy(first)
    copied.reset()
    copied.add_token(word)
    copied.add_token(word)
    assert (first.text, copied.text) == ("the", "the the")


def test_id_outside_the_vocabulary(tokenizer):
    for token in (-1, tokenizer.vocab_size):
        with pytest.raises(TokenizerError, match=f"{token} is outside the vocabulary"):
            tokenizer.detokenizer.add_token(token)
        with pytest.raises(TokenizerError, match=f"{token} is outside the vocabulary"):
            tokenizer.decode([token])


def test_normalizers_of_other_kinds(tmp_path, rng):
    """Without the dummy prefix, and with repeated spaces removed, decoding drops other spaces."""
    tamm = pytest.importorskip("tamm.tokenizers.afm", reason="parity needs tamm")
    for options in ({"add_dummy_prefix": False}, {"remove_extra_whitespaces": True}):
        path = train_tiny_spm(tmp_path / "tokenizer.model", "bpe", **options)
        tokenizer = load_tokenizer(tmp_path)
        reference = tamm.AFMTokenizer(str(path))
        for _ in range(300):
            ids = random_ids(rng, tokenizer)
            assert "".join(segments(tokenizer, ids)) == reference.decode(ids), (options, ids)


def test_invalid_bytes_match_one_replacement_each():
    """Overlong forms, surrogates and code points past U+10FFFF are invalid byte by byte."""
    source = SimpleNamespace(
        spacing=Spacing(True, False), piece=lambda byte: Piece(PieceKind.BYTE, "", byte)
    )
    for sequence in (b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xff"):
        detokenizer = StreamingDetokenizer(source)
        for byte in sequence:
            detokenizer.add_token(byte)
        detokenizer.finalize()
        assert detokenizer.text == "\ufffd" * len(sequence)
