"""Numbers of PyTorch tensors as bytes; files are read in tests/converters/test_toolkit_refuses.py."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from afm_mlx.checkpoint.torch_file import equal, mlx_dtype, tensor_chunks
from afm_mlx.errors import CheckpointError


def test_chunks_are_the_numbers_row_by_row(rng):
    tensor = torch.tensor(rng.normal(size=(6, 5)).astype(np.float32)).T
    data = b"".join(bytes(chunk) for chunk in tensor_chunks(tensor, mx.float32, "x"))
    np.testing.assert_array_equal(np.frombuffer(data, np.float32).reshape(5, 6), tensor.numpy())
    assert mlx_dtype(tensor.double()) == mx.float32
    assert mlx_dtype(tensor.int()) is None


def test_the_largest_number_of_a_type_fits_and_the_next_does_not():
    for sign in (1, -1):
        fits = torch.tensor([sign * 65504.0])
        assert len(list(tensor_chunks(fits, mx.float16, "x"))) == 1
        with pytest.raises(CheckpointError, match=r"x holds 6.554e\+04, and torch.float16 ends at"):
            list(tensor_chunks(fits * 1.0005, mx.float16, "x"))
    for bad in (float("nan"), float("inf")):
        with pytest.raises(CheckpointError, match="x holds NaN or infinity"):
            list(tensor_chunks(torch.tensor([0.0, bad]), mx.float32, "x"))


def test_equal_tensors_may_lie_elsewhere(rng):
    one = torch.tensor(rng.normal(size=(3, 4)))
    assert equal(one, one)
    assert equal(one, one.clone())
    other = one.clone()
    other[2, 3] += 1
    assert not equal(one, other)
