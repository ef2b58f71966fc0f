"""PyTorch's files: read without running what they hold, refused when damaged; their numbers as bytes."""

import os
import pickle
import sys
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import torch

from afm_mlx.checkpoint.torch_file import equal, mlx_dtype, open_state_dict, tensor_chunks
from afm_mlx.errors import AFMError, CheckpointError


class Runs:
    def __reduce__(self):
        return os.system, ("echo this ran >&2",)


@pytest.fixture
def path(tmp_path):
    """A file with a whole state dict."""
    torch.save({"a": torch.arange(300.0), "b": torch.ones(2, 3)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def compress(path):
    with zipfile.ZipFile(path) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def other_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def old_format(path):
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def junk_in_the_pickle(path):
    data = bytearray(path.read_bytes())
    start = data.index(b"data.pkl") + 60
    data[start : start + 60] = bytes(range(60))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: torch.save({"a": torch.zeros(2), "x": Runs()}, p), "could run code"),
        (lambda p: p.write_bytes(pickle.dumps(Runs())), "a bare pickle"),
        (old_format, "only the zip format"),
        (lambda p: p.write_text("version https://git-lfs"), "no PyTorch checkpoint: .*b'vers'"),
        (other_zip, r"it has no data\.pkl"),
        (compress, "packed again with compression"),
        (junk_in_the_pickle, "can't be read as a PyTorch checkpoint|more than tensors"),
        (lambda p: torch.save([torch.zeros(2)], p), "holds a list; a state dict"),
        (lambda p: torch.save({}, p), "holds a dict; a state dict"),
        (lambda p: torch.save({"model": {"a": torch.zeros(2)}}, p), "other things than tensors"),
        (lambda p: torch.save({"epoch": 3}, p), "other things than tensors .*: epoch"),
        (lambda p: p.unlink(), "is missing or no file"),
    ],
)
def test_files_that_hold_something_else_are_refused(path, capfd, change, words):
    change(path)
    with pytest.raises(CheckpointError, match=rf"model\.pt.*({words})") as caught:
        open_state_dict(path)
    assert "\n" not in str(caught.value)
    assert "this ran" not in capfd.readouterr().err


def test_a_file_that_was_cut_off_is_refused(path, rng):
    data = path.read_bytes()
    for keep in {0, len(data) - 1, *rng.integers(0, len(data), 20).tolist()}:
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"model\.pt"):
            open_state_dict(path)


def test_without_torch_the_error_says_how_to_install_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(AFMError, match=r"pip install .*\[convert\]"):
        open_state_dict(path)


def test_chunks_are_the_numbers_row_by_row(rng, monkeypatch):
    monkeypatch.setattr("afm_mlx.checkpoint.torch_file._CHUNK_ELEMENTS", 13)
    tensor = torch.tensor(rng.normal(size=(6, 5)).astype(np.float32)).T
    chunks = [bytes(chunk) for chunk in tensor_chunks(tensor, mx.float32, "x")]
    assert [len(chunk) for chunk in chunks] == [48, 48, 24]  # of two rows at most
    numbers = np.frombuffer(b"".join(chunks), np.float32)
    np.testing.assert_array_equal(numbers.reshape(5, 6), tensor.numpy())
    assert mlx_dtype(tensor.double()) == mx.float32
    assert mlx_dtype(tensor.int()) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_of_a_type_fits_and_the_next_does_not(sign):
    fits = torch.tensor([sign * 65504.0])
    assert len(list(tensor_chunks(fits, mx.float16, "x"))) == 1
    with pytest.raises(CheckpointError, match=r"x holds 6.554e\+04, and torch.float16 ends at"):
        list(tensor_chunks(fits * 1.0005, mx.float16, "x"))
    for bad in (float("nan"), sign * float("inf")):
        with pytest.raises(CheckpointError, match="x holds NaN or infinity"):
            list(tensor_chunks(torch.tensor([0.0, bad]), mx.float32, "x"))


def test_equal_tensors_may_lie_elsewhere(rng):
    one = torch.tensor(rng.normal(size=(3, 4)))
    assert equal(one, one)
    assert equal(one, one.clone())
    other = one.clone()
    other[2, 3] += 1
    assert not equal(one, other)
