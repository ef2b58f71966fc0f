"""A tiny model folder, and ways to run a command on it."""

import io
import sys

import pytest

from afm_mlx.cli import main
from tests.tools.cli import write_folder


@pytest.fixture
def folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng)


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
