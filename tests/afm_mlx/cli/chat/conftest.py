"""A terminal that a test types on."""

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from afm_mlx.cli.chat.loop import next_message
from afm_mlx.cli.chat.terminal import TerminalEntries


class Adapters:
    registered = ("redact", "tidy", "triage")


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    """A folder for the history that is not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("AFM_MLX_HISTORY", raising=False)
    return tmp_path / "state" / "afm-mlx"


@pytest.fixture
def keyboard():
    with create_pipe_input() as keyboard:
        yield keyboard


@pytest.fixture
def terminal(keyboard):
    return lambda: TerminalEntries(Adapters(), keyboard, DummyOutput())


@pytest.fixture
def typed(terminal, keyboard):
    """Type keys on a new terminal; returns the first entry that they make."""

    def typed(*keys):
        keyboard.send_text("".join(keys))
        return next_message(terminal())

    return typed
