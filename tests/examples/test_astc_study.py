"""The study of ASTC blocks: the decoder on every input, and figures of docs/examples.md at a smaller size."""

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import astc_study as study


def number(code):
    """The specification's steps for one value, in whole numbers."""
    exponent, mantissa = code >> 11, code & 0x7FF
    if mantissa < 512:
        straight = 3 * mantissa
    elif mantissa < 1536:
        straight = 4 * mantissa - 512
    else:
        straight = 5 * mantissa - 2048
    return struct.unpack("<e", struct.pack("<H", (exponent << 10) + (straight >> 3)))[0]


def test_the_decoder_follows_the_specification_and_ascends():
    found = study.decode(np.arange(1 << 16))
    wanted = np.array([number(code) for code in range(1 << 16)], np.float32)
    assert np.array_equal(found, wanted, equal_nan=True)
    finite = found[: 31 << 11]
    assert (np.diff(finite) >= 0).all()
    assert np.isfinite(finite).all()


def test_blocks_are_cut_and_joined(rng):
    matrix = rng.normal(size=(12, 18))
    blocks = study.blocks_of(matrix)
    assert blocks.shape == (6, 36)
    assert np.array_equal(blocks[1].reshape(6, 6), matrix[:6, 6:12])
    assert np.array_equal(study.matrix_of(blocks, matrix.shape), matrix)


@pytest.mark.parametrize(
    ("rounded", "wanted"),
    [(study.astc, 25), (study.linear, 24), (study.affine(3), 19), (study.affine(4), 9)],
    ids=["astc", "linear", "affine 3", "affine 4"],
)
def test_errors_of_a_random_matrix(rounded, wanted):
    matrix = np.random.default_rng(1).normal(size=(192, 192)).astype(np.float32)
    whole, less = study.errors(matrix, rounded, (0, 8))
    assert abs(whole - wanted) < 1
    assert less < whole
