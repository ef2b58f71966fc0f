"""A tiny model folder, and ways to run a command on it."""

import io
import json
import sys

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import RewardUse
from afm_mlx.adapters.reward_head import RewardHead, save_reward_head
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.cli import main
from afm_mlx.config import ModelConfig
from afm_mlx.loading.load import load
from afm_mlx.measure import machine
from afm_mlx.measure.machine import Bandwidth
from tests.tools import adapters
from tests.tools.cli import CONFIG, write_folder
from tests.tools.training_data import TRAINABLE, write_data


@pytest.fixture
def quick(monkeypatch):
    """A bandwidth without the gigabyte."""
    measured = Bandwidth(2e9, "by hand")
    monkeypatch.setattr(machine, "measure_bandwidth", lambda threads: measured)


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
def fingerprint(folder):
    return folder_fingerprint(ModelConfig.from_file(folder / "config.json"), folder)


@pytest.fixture
def make_adapter(folder, fingerprint, tmp_path, rng):
    """Write an adapter of the tiny model in float16; it changes what the model says."""

    def make(name, rank=4, scale=0.5, keys=""):
        tensors = adapters.draw_tensors(load(folder)[0], rng, rank, keys, strength=4)
        return adapters.write_folder(tmp_path / name, tensors, scale, fingerprint)

    return make


@pytest.fixture
def reward_adapter(make_adapter, rng):
    """The folder of a reward adapter of the tiny model."""
    path = make_adapter("judge")
    head = RewardHead(CONFIG.hidden_dim, RewardUse(()), seed=2)
    head.reward = mx.array(rng.normal(size=CONFIG.hidden_dim).astype("float32"))
    save_reward_head(path, head)
    config = path / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "reward": {"grades": []}}))
    return path


@pytest.fixture
def write_config(tmp_path):
    """Write a YAML file of arguments; returns its path."""

    def write_config(text):
        (tmp_path / "config.yaml").write_text(text)
        return tmp_path / "config.yaml"

    return write_config


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
def done(run):
    """Run a command that must succeed and warn of nothing; returns its output."""

    def done(*argv):
        status, out, err = run(*argv)
        assert (status, err) == (0, "")
        return out

    return done


@pytest.fixture
def say(monkeypatch):
    """Put bytes on standard input."""

    def say(data: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))

    return say


@pytest.fixture
def chat(folder, run, say):
    """Say lines in a chat with answers of 12 tokens; returns what it answers and what it notes."""

    def chat(*lines, flags=()):
        say("".join(f"{line}\n" for line in lines).encode())
        status, out, err = run("chat", "--model", folder, "-m", 12, *flags)
        assert status == 0
        return out, err.splitlines()

    return chat
