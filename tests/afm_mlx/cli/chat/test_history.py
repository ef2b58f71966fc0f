"""What was typed is kept between chats, and nothing about its file stops one."""

import os

from afm_mlx.cli.chat.terminal import MAX_HISTORY_BYTES

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
