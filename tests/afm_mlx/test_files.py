"""Files are whole or not there."""

import errno
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from afm_mlx import files
from afm_mlx.errors import AFMError
from afm_mlx.files import atomic_folder, atomic_write, read_file, remove_leftovers
from tests.tools.cli import started

# A process that is killed, or lives, in the middle of a write.
WRITE = """
import os, signal, sys
from afm_mlx.files import atomic_folder
with atomic_folder(sys.argv[1]) as folder:
    (folder / "deep").mkdir()
    (folder / "deep" / "x").write_text("half")
    print("writing", flush=True)
    if sys.stdin.read() == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def writer(path):
    return started(WRITE, path, says="writing")


def test_files_are_read_up_to_a_limit(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than the 4 bytes"):
        read_file(path, 4)
    with path.open("wb") as file:  # nothing of which is read
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="more than the 4,096 bytes"):
        read_file(path, 4096)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none", 5)
    assert read_file("/dev/null", 5) == b""


def test_pipes_are_read_to_their_end_and_devices_are_not(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[b"x" * 100_000])
    writer.start()
    assert read_file(pipe, 100_000, pipes=True) == b"x" * 100_000
    writer.join()
    monkeypatch.setattr(files, "PIPE_PAUSE", 0.05)
    with pytest.raises(TimeoutError, match="nobody wrote to for"):
        read_file(pipe, 5, pipes=True)
    with pytest.raises(OSError, match="a pipe, and a file is needed"):
        read_file(pipe, 5)
    reader, writer = os.pipe()  # what `<(command)` gives
    os.write(writer, b"123456")
    for limit, error in ((5, "more than the 5 bytes"), (9, "nobody wrote to")):
        with pytest.raises(OSError, match=error):
            read_file(f"/dev/fd/{reader}", limit, pipes=True)
    os.write(writer, b"123456")
    os.close(writer)
    assert read_file(f"/dev/fd/{reader}", 9, pipes=True) == b"123456"
    os.close(reader)
    reader, writer = os.pipe()
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match="without an end for"):
        read_file(f"/dev/fd/{reader}", 9, pipes=True)
    os.close(reader)
    os.close(writer)
    for other in ("/dev/zero", tmp_path):
        with pytest.raises(OSError, match="and a file is needed"):
            read_file(other, 1 << 40, pipes=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError):
            read_file(tmp_path / "socket", 5)


def test_an_error_of_writing_names_the_output(tmp_path):
    path = tmp_path / "a.json"
    for error in (OSError(errno.ENOSPC, "No space left"), OSError(errno.EFBIG, "too large", "x")):
        with pytest.raises(OSError) as caught, atomic_write(path):
            raise error
        assert caught.value.filename == (error.filename or str(path))
    with pytest.raises(OSError) as caught, atomic_write(path) as temporary:
        (temporary / "x").write_text("")
    assert caught.value.filename == str(path / "x")
    assert "->" not in str(caught.value)
    with pytest.raises(OSError) as caught, atomic_write(path):
        pass  # nothing was written that could be renamed
    assert caught.value.filename == str(path)
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "none" / "a.json"):
        pass
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(OSError) as caught, atomic_write(path):
        raise OSError(errno.ENOENT, "of something else")
    assert caught.value.filename is None
    for kind in (AFMError, RuntimeError, ValueError):
        with (
            pytest.raises(kind, match=f"{path}/model is damaged") as named,
            atomic_folder(path) as place,
        ):
            raise kind(f"{place}/model is damaged")
        assert ".afm-mlx" not in str(named.value)


def test_a_written_file_takes_its_place(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with atomic_write(path) as temporary:
        assert temporary.suffix == ".json"
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_things_as_they_were(tmp_path, error):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_folders_appear_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "model"
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as temporary:
        (temporary / "x").write_text("half")
        raise KeyboardInterrupt
    assert list((tmp_path / "deep").iterdir()) == []
    with atomic_folder(path) as temporary:
        (temporary / "x").write_text("whole")
        assert not path.exists()
    assert (path / "x").read_text() == "whole"


def test_existing_folders_are_refused_before_and_after(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    with pytest.raises(AFMError, match="exists already"), atomic_folder(path):
        raise AssertionError("must not be reached")
    other = tmp_path / "other"
    with pytest.raises(AFMError, match="exists already"), atomic_folder(other):
        other.mkdir()
    assert list(other.iterdir()) == []


# -- what killed processes leave


def test_leftovers_go_with_the_next_write_and_never_under_a_living_owner(tmp_path):
    path = tmp_path / "model"
    killed, living = writer(path), writer(path)
    killed.communicate("kill")
    assert len(list(tmp_path.iterdir())) == 2
    with atomic_write(tmp_path / "other.json") as temporary:
        temporary.write_text("{}")
    assert len(list(tmp_path.glob(".model-*"))) == 1
    living.communicate("")
    assert living.returncode == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "other.json"]
    assert (path / "deep" / "x").read_text() == "half"


def test_a_place_that_is_not_locked_yet_is_made_anew(tmp_path, monkeypatch):
    """Another process may remove the folder between its making and the making of its lock."""
    made, lock = [], files.FileLock

    def interrupted(path, **options):
        made.append(path.parent)
        if len(made) == 1:
            remove_leftovers(tmp_path)
            assert not path.parent.exists()
        return lock(path, **options)

    monkeypatch.setattr(files, "FileLock", interrupted)
    with files.place_beside(tmp_path / "x") as place:
        assert place == made[-1] != made[0]
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_no_leftover(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "owner.json").touch()
    (tmp_path / ".x-link.afm-mlx").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".x-file.afm-mlx").touch()
    (tmp_path / ".x-users.afm-mlx").mkdir()
    (tmp_path / ".x-users.afm-mlx" / "notes").touch()  # without a lock file
    (tmp_path / ".out-backup").mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_leftovers(tmp_path)
    remove_leftovers(tmp_path / "missing")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_is_removed_at_once_whatever_ends_the_removal(tmp_path, monkeypatch):
    path = tmp_path / "step"
    path.mkdir()
    (path / "x").touch()

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            files.remove_folder(path)
    assert not path.exists()
    files._places.clear()  # the process is gone
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_threads_write_beside_each_other(tmp_path):
    def write(number):
        for round in range(20):
            with atomic_write(tmp_path / f"{number}.txt") as path:
                path.write_text(f"{round}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {f"{number}.txt": "19" for number in range(4)}


def test_all_places_of_a_process_can_be_removed(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "a.json") as path:
        path.write_text("half")
        files.remove_places()
        assert list(tmp_path.iterdir()) == []


def test_names_of_any_length(tmp_path):
    for name in ["x" * 250, "\u00e9" * 120, "no-suffix"]:
        with atomic_write(tmp_path / name) as path:
            path.write_text("x")
        assert [entry.name for entry in tmp_path.iterdir()] == [name]
        (tmp_path / name).unlink()


def test_a_copy_that_fails_names_the_output_and_no_hidden_place(tmp_path):
    wanted = str(tmp_path / "out" / "file")
    for number, names in ((errno.ENOSPC, (wanted, None)), (errno.EACCES, ("source", wanted))):
        with pytest.raises(OSError) as failed, atomic_folder(tmp_path / "out") as folder:
            raise OSError(number, "said", "source", None, str(folder / "file"))
        assert (failed.value.errno, failed.value.strerror) == (number, "said")
        assert (failed.value.filename, failed.value.filename2) == names


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_a_file_takes_the_place_of_no_pipe_socket_or_link_to_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("socket", "a socket")):
            before = (tmp_path / name).lstat()
            with (
                pytest.raises(OSError, match=f"it is {kind}"),
                atomic_write(tmp_path / name) as path,
            ):
                path.write_text("text")
            assert os.path.samestat((tmp_path / name).lstat(), before)
