"""Tokenizer files for the tests of this folder."""

import shutil

import pytest

from afm_mlx.tokenizer.tokenizer import save_tokenizer
from tests.tools.tokenizers import train_tiny_spm


@pytest.fixture(scope="session")
def spm_bpe(tmp_path_factory):
    """The path of a tiny SentencePiece BPE model with AFM's special pieces."""
    return train_tiny_spm(tmp_path_factory.mktemp("bpe") / "tokenizer.model", "bpe")


@pytest.fixture(scope="session")
def spm_unigram(tmp_path_factory):
    """The path of a tiny SentencePiece Unigram model with AFM's special pieces."""
    return train_tiny_spm(tmp_path_factory.mktemp("unigram") / "tokenizer.model", "unigram")


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def spm_path(request):
    """Each of the two SentencePiece models in turn."""
    return request.getfixturevalue(f"spm_{request.param}")


@pytest.fixture(scope="session")
def tokenizer_folder(spm_path, tmp_path_factory):
    """A model folder's tokenizer files, as `save_tokenizer` writes them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(spm_path, folder)
    return folder


@pytest.fixture(scope="session", params=["tokenizer.model", "tokenizer.json"])
def either_folder(request, tokenizer_folder, tmp_path_factory):
    """The same with SentencePiece's file, and with Hugging Face's file alone."""
    if request.param == "tokenizer.model":
        return tokenizer_folder
    folder = tmp_path_factory.mktemp("hub")
    for file in tokenizer_folder.iterdir():
        if file.name != "tokenizer.model":
            shutil.copy(file, folder)
    return folder
