"""Files are whole or not there."""

import os

import pytest

from afm_mlx.errors import AFMError
from afm_mlx.files import atomic_folder, atomic_write


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
