"""Entries typed on a terminal, and their history."""

import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from dataclasses import replace

import pytest

from afm_mlx.cli.chat.terminal import MAX_HISTORY_BYTES
from tests.tools.cli import CONFIG, ROOT, write_folder

PASTE, PASTED = "\x1b[200~", "\x1b[201~"


@pytest.mark.parametrize(
    ("keys", "entry"),
    [
        ("the fox\r", "the fox"),
        ("the fox\x1b\rthe dog\r", "the fox\nthe dog"),  # Alt-Enter
        ("the fox\n", "the fox"),  # from terminals and programs that send line feeds
        ("the fox\x04\r", "the fox"),  # Ctrl-D
        (f"{PASTE}/a\r\n\tb\r\rc\n{PASTED}d\r", "/a\n\tb\n\nc\nd"),
        ('"""\rthe fox\r\r/exit\r"""\r', "the fox\n\n/exit"),
        ("/sy\t\r", "/system"),
        ("/adapter re\t\r", "/adapter redact"),
        ("/load ~/my\t\r", "/load ~/my chat.json"),
        ("/image ~/my\t\r", "/image ~/my chat.json"),
        ("/save {}/my\t\r", "/save {}/my chat.json"),
        ("a /sy\t\r", "a /sy"),
        ("/reset re\t\r", "/reset re"),
    ],
)
def test_keys_make_an_entry(typed, tmp_path, monkeypatch, keys, entry):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my chat.json").touch()
    assert typed(keys.format(tmp_path)) == entry.format(tmp_path)


@pytest.mark.parametrize(
    ("keys", "raised"),
    [("\x03", KeyboardInterrupt), ("the fox\x03", KeyboardInterrupt), ("\x04", EOFError)],
)
def test_ctrl_c_drops_the_line_and_ctrl_d_ends_only_without_one(typed, keys, raised):
    with pytest.raises(raised):
        typed(keys)


class Screen:
    """A process on a real terminal."""

    def __init__(self, *argv, environment):
        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (24, 80))
        self.settings = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "afm_mlx", *map(str, argv)],
            env=environment,
            preexec_fn=lambda: os.login_tty(self._slave),
        )
        self.text = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def wait_for(self, text, more=0):
        """Read until a text comes, and a number of characters after it."""
        end = time.monotonic() + 60
        while len(self.text.partition(text)[2]) < more or text not in self.text:
            assert select.select([self._master], [], [], end - time.monotonic())[0], self.text
            self.text += os.read(self._master, 1 << 16).decode(errors="replace")
        self.text = self.text.partition(text)[2]

    def end(self):
        """Wait for the process's end; returns its status, and whether the terminal is as it was."""
        status = self.process.wait(30)
        return status, termios.tcgetattr(self._slave) == self.settings

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_chat_on_a_real_terminal(tmp_path, spm_bpe, rng, request, term):
    """A pasted question, Ctrl-C in its answer and in an entry; and the conversation is there."""
    endless = replace(CONFIG, context_length=1 << 20)  # answers end with Ctrl-C only
    folder = write_folder(tmp_path / "endless", spm_bpe, rng, endless)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": term}
    screen = Screen("chat", "--model", folder, "-m", -1, environment=environment)
    request.addfinalizer(screen.close)
    begin, end = ('"""\r', '\r"""') if term == "dumb" else (PASTE, PASTED)
    screen.wait_for(">>")
    screen.type(f"{begin}the fox\rthe dog{end}\r")
    screen.wait_for("the dog", more=500)  # of the answer
    screen.type("\x03")
    screen.wait_for("Stopped.")
    screen.wait_for(">>")
    screen.type("never sent\x03")
    screen.wait_for(">>")
    file = tmp_path / "saved.json"
    screen.type(f"/save {file}\r")
    screen.wait_for("Saved")
    screen.wait_for(">>")
    screen.type("\x04")
    assert screen.end() == (0, True)
    question, answer = json.loads(file.read_text())["messages"]
    assert question == {"role": "user", "content": "the fox\nthe dog"}
    assert answer["content"]


UP = "\x1b[A"


def test_what_was_typed_is_there_in_the_next_chat_and_private(typed, state):
    typed("the fox\x1b\rthe dog\r")
    assert typed(UP, "\r") == "the fox\nthe dog"
    file = state / "chat-history"
    assert (file.stat().st_mode & 0o777, state.stat().st_mode & 0o777) == (0o600, 0o700)
    file.chmod(0o666)
    typed("a cat\r")
    assert file.stat().st_mode & 0o777 == 0o600
    assert typed("\x12fo\r", "\r") == "the fox\nthe dog"  # Ctrl-R


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
    for make in (os.mkfifo, lambda path: os.symlink("/dev/full", path), os.mkdir):
        file.unlink()
        make(file)
        assert typed("the fox\r") == "the fox"


def test_a_folder_that_vanishes_stops_no_chat(terminal, keyboard, state):
    opened = terminal()
    (state / "chat-history").unlink()
    state.rmdir()
    for _ in range(2):
        keyboard.send_text("the fox\r")
        assert opened.read("") == "the fox"


def test_history_stays_of_moderate_size(typed, state):
    state.mkdir(parents=True)
    file = state / "chat-history"
    file.write_text("".join(f"\n# then\n+line {n}\n+more\n" for n in range(60_000)))
    assert file.stat().st_size > MAX_HISTORY_BYTES
    assert typed(UP, "\r") == "line 59999\nmore"
    assert MAX_HISTORY_BYTES // 2 - 100 < file.stat().st_size < MAX_HISTORY_BYTES
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().startswith("# then\n+line ")
