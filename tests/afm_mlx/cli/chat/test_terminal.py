"""A chat on a terminal: keys, pasted lines, completion, history, and the whole program on a real one."""

import contextlib
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from afm_mlx.cli.chat.history import MAX_BYTES
from afm_mlx.cli.chat.lines import next_message
from afm_mlx.cli.chat.terminal import Terminal
from afm_mlx.cli.output import note, print_answer
from tests.tools.cli import CONFIG, ROOT, write_folder

PASTE, PASTED = "\x1b[200~", "\x1b[201~"


class Adapters:
    registered = ("redact", "tidy", "triage")


@pytest.fixture(autouse=True)
def state(monkeypatch, tmp_path):
    """A folder for the history that is not the user's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("AFM_MLX_HISTORY", raising=False)
    return tmp_path / "state" / "afm-mlx"


@pytest.fixture
def typed():
    """Type keys on a new terminal; returns the first entry that they make."""

    def typed(*keys):
        with create_pipe_input() as keyboard:
            keyboard.send_text("".join(keys))
            return next_message(Terminal(Adapters(), keyboard, DummyOutput()))

    return typed


def test_enter_sends_and_alt_enter_breaks_the_line(typed):
    assert typed("the fox\r") == "the fox"
    assert typed("the fox\x1b\rthe dog\r") == "the fox\nthe dog"
    assert typed("the fox\n") == "the fox"  # from terminals and programs that send line feeds


def test_pasted_lines_are_one_message(typed):
    assert typed(PASTE, "/a\r\n\tb\r\rc\n", PASTED, "d\r") == "/a\n\tb\n\nc\nd"


def test_lines_between_quotes_are_one_message(typed):
    assert typed('"""\rthe fox\r\r/exit\r"""\r') == "the fox\n\n/exit"


def test_ctrl_c_drops_the_line_and_ctrl_d_ends_only_without_one(typed):
    for keys, expected in (("\x03", KeyboardInterrupt), ("the fox\x03", KeyboardInterrupt)):
        with pytest.raises(expected):
            typed(keys)
    with pytest.raises(EOFError):
        typed("\x04")
    assert typed("the fox\x04\r") == "the fox"


def test_tab_completes_commands_adapters_and_files(typed, tmp_path):
    for keys, entry in [
        ("/sy\t\r", "/system"),
        ("/adapter re\t\r", "/adapter redact"),
        ("/load {}/my\t\r", "/load {}/my chat.json"),
        ("/save {}/my\t\r", "/save {}/my chat.json"),
        ("a /sy\t\r", "a /sy"),
        ("/reset re\t\r", "/reset re"),
    ]:
        (tmp_path / "my chat.json").touch()
        assert typed(keys.format(tmp_path)) == entry.format(tmp_path)


# -- history

UP = "\x1b[A"


def test_what_was_typed_is_there_in_the_next_chat_and_private(typed, state):
    typed("the fox\x1b\rthe dog\r")
    assert typed(UP, "\r") == "the fox\nthe dog"
    file = state / "chat-history"
    assert (file.stat().st_mode & 0o777, state.stat().st_mode & 0o777) == (0o600, 0o700)
    file.chmod(0o666)
    typed("x\r")
    assert file.stat().st_mode & 0o777 == 0o600


def test_ctrl_r_finds_what_was_typed(typed):
    for entry in ("the fox", "the dog", "a cat"):
        typed(entry, "\r")
    assert typed("\x12fo\r", "\r") == "the fox"


def test_history_can_be_switched_off(typed, state, monkeypatch):
    monkeypatch.setenv("AFM_MLX_HISTORY", "0")
    typed("the fox\r")
    assert not state.exists()
    assert typed(UP, "x\r") == "x"


def test_no_history_file_stops_a_chat(typed, state, rng):
    state.mkdir(parents=True)
    file = state / "chat-history"
    file.write_bytes(rng.bytes(5000))
    assert typed("the fox\r") == "the fox"
    file.unlink()
    for make in (os.mkfifo, lambda path: os.symlink("/dev/full", path), os.mkdir):
        make(file)
        assert typed("the fox\r") == "the fox"
        if not file.is_dir():
            file.unlink()


def test_a_folder_that_vanishes_stops_no_chat(state):
    with create_pipe_input() as keyboard:
        terminal = Terminal(Adapters(), keyboard, DummyOutput())
        (state / "chat-history").unlink()
        state.rmdir()
        for text in ("the fox", "half \udce4 letter"):
            keyboard.send_text(
                f"{text}\r".encode(errors="surrogateescape").decode(errors="replace")
            )
            assert terminal.read("")


def test_history_stays_of_moderate_size(typed, state):
    state.mkdir(parents=True)
    file = state / "chat-history"
    file.write_text("".join(f"\n# then\n+line {n}\n+more\n" for n in range(60_000)))
    assert file.stat().st_size > MAX_BYTES
    assert typed(UP, "\r") == "line 59999\nmore"
    assert file.stat().st_size <= MAX_BYTES
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().startswith("# then\n+line ")


# -- what a model writes

ORDERS = "a\x1b[2Jb\x9b1mc\x07\r\x7f\td\n"


def test_a_terminal_gets_no_orders_from_a_model(capsys, monkeypatch):
    for print_it, stream in ((print_answer, "stdout"), (note, "stderr")):
        print_it(ORDERS)
        assert getattr(capsys.readouterr(), stream[3:])[: len(ORDERS)] == ORDERS
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
        print_it(ORDERS)
        printed = getattr(capsys.readouterr(), stream[3:])
        assert printed.startswith("a\\x1b[2Jb\\x9b1mc\\x07\\x0d\\x7f\td\n")


# -- the whole program


class Screen:
    """A process on a real terminal."""

    def __init__(self, *argv, environment):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "afm_mlx", *map(str, argv)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._slave = slave
        self.settings = termios.tcgetattr(slave)
        self.text = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, text, more=0):
        """Read until a text comes, and so many characters after it."""
        end = time.monotonic() + 60
        while len(self.text.partition(text)[2]) < more or text not in self.text:
            assert select.select([self._master], [], [], end - time.monotonic())[0], self.text
            self.text += os.read(self._master, 1 << 16).decode(errors="replace")
        self.text = self.text.partition(text)[2]

    def end(self):
        """Wait for the process's end; returns its status, and whether the terminal is as it was."""
        status = self.process.wait(30)
        same = termios.tcgetattr(self._slave) == self.settings
        return status, same

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.fixture
def screen(tmp_path, spm_bpe, rng):
    """A chat whose answers end with Ctrl-C only, on a terminal of some kind."""
    endless = replace(CONFIG, context_length=1 << 20)
    folder = write_folder(tmp_path / "endless", spm_bpe, rng, endless)
    with contextlib.ExitStack() as screens:

        def screen(term):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": term}
            argv = ("chat", "--model", folder, "-m", -1)
            opened = Screen(*argv, environment=environment)
            screens.callback(opened.close)
            return opened

        yield screen


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_chat_on_a_real_terminal(screen, tmp_path, term):
    """A pasted question, Ctrl-C in its answer, in a command and in an entry; and the conversation is there."""
    terminal, file = screen(term), tmp_path / "saved.json"
    pasted = (
        f"{PASTE}the fox\rthe dog{PASTED}\r" if term != "dumb" else '"""\rthe fox\rthe dog\r"""\r'
    )
    terminal.wait_for(">>")
    terminal.type(pasted)
    terminal.wait_for("the dog", more=500)  # of the answer
    terminal.type("\x03")
    terminal.wait_for("Stopped.")
    terminal.wait_for(">>")
    terminal.type("never sent\x03")
    terminal.wait_for(">>")
    terminal.type(f"/save {file}\r")
    terminal.wait_for("Saved")
    terminal.wait_for(">>")
    terminal.type("\x04")
    assert terminal.end() == (0, True)
    question, answer = json.loads(file.read_text())["messages"]
    assert question == {"role": "user", "content": "the fox\nthe dog"}
    assert answer["content"]
