"""A tiny model folder, and ways to run a command on it."""

import io
import sys

import mlx.core as mx
import pytest

from afm_mlx.cli import main
from tests.tools.cli import write_folder
from tests.tools.training_data import TRAINABLE, write_data


@pytest.fixture
def folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng)


@pytest.fixture
def trainable_folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE)


@pytest.fixture
def data(tmp_path, rng):
    return write_data(tmp_path / "data", rng)


@pytest.fixture
def uncompiled():
    """Compiling takes longer than short runs of training."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def run(capsys):
    """Run a command; returns its status, its output and its errors."""

    def run(*argv):
        status = main([str(a) for a in argv])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def fails(run):
    """Run a command that must fail for what the user got wrong; returns the one line."""

    def fails(*argv, output=""):
        status, out, err = run(*argv)
        assert (status, out) == (2, output)
        assert err.startswith("afm-mlx: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        return err

    return fails


@pytest.fixture
def say(monkeypatch):
    """Put bytes on standard input."""

    def say(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return say
