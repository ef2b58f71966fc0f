"""Tokenizers of both kinds of file, and tamm's for comparison."""

import pytest

from afm_mlx.tokenizer.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(either_folder):
    return load_tokenizer(either_folder)


@pytest.fixture(scope="module")
def reference(spm_path):
    """tamm's tokenizer of the same SentencePiece model."""
    tamm = pytest.importorskip("tamm.tokenizers.afm", reason="parity needs tamm")
    return tamm.AFMTokenizer(str(spm_path), extra_properties={"eot_id": 4})
