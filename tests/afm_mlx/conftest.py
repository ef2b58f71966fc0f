"""Tokenizer files, Core ML packages and missing kernels for the tests of this folder."""

import shutil

import numpy as np
import pytest

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.tokenizer.tokenizer import save_tokenizer
from tests.conftest import SEED
from tests.tools.coreai import make_bundle
from tests.tools.coreml import InterpretedPackage, make_package
from tests.tools.tokenizers import train_tiny_spm


@pytest.fixture(scope="session")
def spm_bpe(tmp_path_factory):
    return train_tiny_spm(tmp_path_factory.mktemp("bpe") / "tokenizer.model", "bpe")


@pytest.fixture(scope="session")
def spm_unigram(tmp_path_factory):
    return train_tiny_spm(tmp_path_factory.mktemp("unigram") / "tokenizer.model", "unigram")


@pytest.fixture(scope="session", params=["bpe", "unigram"])
def spm_path(request):
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


@pytest.fixture(scope="session")
def core_ml(spm_bpe, tmp_path_factory):
    pytest.importorskip("coremltools", reason="pip install '.[coreml]'")
    return make_package(tmp_path_factory.mktemp("coreml"), spm_bpe, np.random.default_rng(SEED))


@pytest.fixture(scope="session")
def core_ai(spm_bpe, tmp_path_factory):
    pytest.importorskip("coreai.runtime", reason="pip install '.[coreai]'")
    return make_bundle(tmp_path_factory.mktemp("coreai"), spm_bpe, np.random.default_rng(SEED))


@pytest.fixture
def interpreted(monkeypatch):
    """Core ML's place is taken by an interpreter of packages, which runs everywhere."""
    monkeypatch.setattr("afm_mlx.coreml.coreml_model.CompiledPackage", InterpretedPackage)
    shares = {"prefill": {"CPU": 0.25, "Neural Engine": 0.75}}
    monkeypatch.setattr("afm_mlx.measure.coreml_report.planned_devices", lambda *_: shares)
    for room in ("measure.coreml_report", "coreml.availability"):
        monkeypatch.setattr(f"afm_mlx.{room}.obstacle", lambda: None)


@pytest.fixture
def no_extension(monkeypatch):
    """A process whose C++ extension is missing."""
    monkeypatch.setattr(extension, "unavailable", lambda: "nobody built it; build it")
    dispatch.invalidate()
    yield
    monkeypatch.undo()
    dispatch.invalidate()
