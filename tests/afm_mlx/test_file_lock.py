"""Locks on files: one owner at a time, whom errors name, and whose lock ends with its process."""

import dataclasses
import errno
import json
import os

import pytest

from afm_mlx import file_lock
from afm_mlx.file_lock import FileLock, LockHeldError, Owner
from tests.tools.cli import started

HOLD = """
import sys
from pathlib import Path
from afm_mlx.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_has_one_owner_until_it_is_released(tmp_path):
    path = tmp_path / "lock"
    lock = FileLock(path)
    with pytest.raises(LockHeldError, match="this very process since") as error:
        FileLock(path)
    assert error.value.owner.is_here()
    lock.release()
    lock.release()
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        FileLock(path, create=False)


def test_a_lock_that_nobody_holds_any_more_is_taken(tmp_path):
    path = tmp_path / "lock"
    FileLock(path)  # forgotten
    assert path.exists()
    FileLock(path, create=False).release()
    assert not path.exists()


def test_a_file_that_its_owner_removed_meanwhile_locks_nothing(tmp_path, monkeypatch):
    path = tmp_path / "lock"
    first, locked = FileLock(path), []

    def lock(descriptor, path):
        if not locked:  # the owner is done between the opening and the locking
            first.release()
        locked.append(descriptor)

    monkeypatch.setattr(file_lock, "_lock", lock)
    second = FileLock(path)
    assert len(locked) == 2
    assert path.exists()
    second.release()


def test_a_killed_process_holds_no_lock(tmp_path):
    path = tmp_path / "lock"
    with started(HOLD, path, says="locked") as process:
        with pytest.raises(LockHeldError, match=f"process {process.pid} since 20.*python") as error:
            FileLock(path)
        assert error.value.owner.may_live()
        process.kill()
        process.wait()
        assert not error.value.owner.may_live()
    FileLock(path).release()


# -- file systems without locks


@pytest.fixture
def no_locks(monkeypatch):
    def flock(*args):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", flock)


@pytest.mark.usefixtures("no_locks")
def test_without_locks_the_record_decides(tmp_path):
    for change, lives in [
        ({}, True),
        ({"pid": 2**22 + 1}, False),  # more than Linux gives out
        ({"host": "elsewhere", "pid": 2**22 + 1}, True),
    ]:
        path, owner = tmp_path / "lock", dataclasses.replace(Owner.here(), **change)
        path.write_text(json.dumps(dataclasses.asdict(owner)))
        assert owner.may_live() is lives
        if lives:
            with pytest.raises(LockHeldError) as error:
                FileLock(path)
            assert error.value.owner == owner
        else:
            FileLock(path).release()


@pytest.mark.usefixtures("no_locks")
def test_a_record_of_nobody_locks_nothing(tmp_path):
    for record in [b"", b"{", b"[]", b"[" * 10**5, b"\xff", b'{"pid": "1"}', b'{"pid": 1}']:
        (tmp_path / "lock").write_bytes(record)
        lock = FileLock(tmp_path / "lock")
        with (tmp_path / "lock").open("rb") as file:
            assert Owner.read(file.fileno()).pid == os.getpid()
        lock.release()
